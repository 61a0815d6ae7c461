#!/usr/bin/env python3
"""Builds the package: the wheel of `make wheel`, and what pip asks for (PEP 517), without a build tool.

    make wheel                              # python3 optim/python/wheel.py build/lib/libnibble_optim.so
    pip install ./optim/python              # runs `make lib`, so it takes nvcc if there is one
    python3 optim/python/wheel.py --sdist   # dist/nibble_optim-VERSION.tar.gz, which pip builds likewise

A wheel is dist/nibble_optim-VERSION-BUILD-py3-none-manylinux_2_N_ARCH.whl with the package, the library and libgomp.
BUILD is 0cpu, or the release of CUDA, 1cu124; pip takes the higher one. N is the newest version of glibc that a symbol of
the libraries needs."""
import base64
import hashlib
import pathlib
import platform
import re
import subprocess
import sys
import tarfile
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE / "source" if (HERE / "source").exists() else HERE.parents[1]  # in an sdist, or in the repository
VERSION = re.search(r'__version__ = "(.*)"', (HERE / "nibble_optim" / "__init__.py").read_text())[1]
NAME = f"nibble_optim-{VERSION}"
METADATA = f"""Metadata-Version: 2.1
Name: nibble_optim
Version: {VERSION}
Summary: Optimizers with states and weights of 4, 8 and 16 bits for PyTorch, one launch a step
Author: the authors of nibble
License: MIT; libgomp.so.1 in a wheel: GPL-3.0-or-later WITH GCC-exception-3.1
Classifier: Environment :: GPU :: NVIDIA CUDA
Classifier: Operating System :: POSIX :: Linux
Classifier: Programming Language :: Python :: 3
Classifier: Topic :: Scientific/Engineering :: Artificial Intelligence
Classifier: Typing :: Typed
Requires-Python: >=3.9
Requires-Dist: torch>=2.4
Description-Content-Type: text/markdown

""" + (HERE / "README.md").read_text()
GOMP = """nibble_optim/libgomp.so.1 is GCC's OpenMP runtime, unmodified, of the system that built this wheel.
Copyright Free Software Foundation, Inc. It is under the GNU General Public License, version 3 or later, with the GCC
Runtime Library Exception, version 3.1, which allows programs of any licence to be linked with it. Source:
https://gcc.gnu.org, directory libgomp. Texts: https://www.gnu.org/licenses/gpl-3.0.txt and
https://www.gnu.org/licenses/gcc-exception-3.1.html, and below where the system has them.
"""
TEXTS = "/usr/share/doc/libgomp1/copyright", "/usr/share/common-licenses/GPL-3"


def glibc(path):
    symbols = subprocess.run(["objdump", "-T", path], capture_output=True, text=True, check=True).stdout
    return max(int(minor) for minor in re.findall(r"GLIBC_2\.(\d+)", symbols))


def build_of(library):
    """Returns the wheel's build: the library's folder is build/lib, with `found` beside it, or build/cpu/lib."""
    release = re.search(r"^nvcc\s+(\d+)\.(\d+)", (library.parents[1] / "found").read_text())
    return f"1cu{release[1]}{release[2]}" if release else "0cpu"


def write_wheel(library, folder):
    files = {str(path.relative_to(HERE)): path.read_bytes() for path in sorted(HERE.glob("nibble_optim/**/*.py"))}
    files["nibble_optim/py.typed"], files["nibble_optim/libnibble_optim.so"] = b"", library.read_bytes()
    newest, info = glibc(library), f"{NAME}.dist-info"
    needed = subprocess.run(["ldd", library], capture_output=True, text=True, check=True).stdout
    found = re.search(r"libgomp\S* => (\S+)", needed)
    if found:  # slim images lack it; the loader looks in the library's own folder first
        gomp = pathlib.Path(found[1]).resolve()
        files["nibble_optim/libgomp.so.1"] = gomp.read_bytes()
        newest = max(newest, glibc(gomp))
        texts = [path.read_text("utf-8", "replace") for path in map(pathlib.Path, TEXTS) if path.is_file()]
        files[f"{info}/LICENSE.libgomp"] = "\n".join([GOMP, *texts]).encode()
    tag = f"py3-none-manylinux_2_{max(newest, 17)}_{platform.machine()}"
    files[f"{info}/METADATA"] = METADATA.encode()
    files[f"{info}/WHEEL"] = (f"Wheel-Version: 1.0\nGenerator: nibble\nRoot-Is-Purelib: false\n"
                              f"Build: {build_of(library)}\nTag: {tag}\n").encode()
    files[f"{info}/LICENSE"] = (ROOT / "LICENSE").read_bytes()
    record = ""
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(data)}\n"
    files[f"{info}/RECORD"] = (record + f"{info}/RECORD,,\n").encode()
    path = folder / f"{NAME}-{build_of(library)}-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0))  # so that the same files give the same bytes
            entry.external_attr, entry.compress_type = 0o644 << 16, zipfile.ZIP_DEFLATED
            wheel.writestr(entry, data)
    return path


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """pip calls this. Its option -C make=NVCC= gives `make` an argument: no CUDA, say."""
    subprocess.run(["make", "-j4", "lib", *(config_settings or {}).get("make", "").split()], cwd=ROOT, check=True)
    built = (ROOT / "build" / kind / "lib" / "libnibble_optim.so" for kind in ("", "cpu"))
    newest = max((path for path in built if path.exists()), key=lambda path: path.stat().st_mtime)
    return write_wheel(newest, pathlib.Path(wheel_directory)).name


def build_sdist(sdist_directory, config_settings=None):
    """pip calls this. An sdist has the package at its top and what `make lib` reads in source/."""
    path = pathlib.Path(sdist_directory) / f"{NAME}.tar.gz"
    package = [HERE / name for name in ("pyproject.toml", "wheel.py", "README.md", "nibble_optim")]
    with tarfile.open(path, "w:gz") as archive:
        def add(file, name):
            archive.add(file, f"{NAME}/{name}", filter=lambda entry: None if re.search(r"__pycache__|\.so", entry.name)
                        or "/optim/python" in entry.name else entry)
        for file in package:
            add(file, file.name)
        for name in ("Makefile", "LICENSE", "optim", "kernels", "data"):
            add(ROOT / name, f"source/{name}")
        information = tarfile.TarInfo(f"{NAME}/PKG-INFO")
        information.size = len(METADATA.encode())
        archive.addfile(information, __import__("io").BytesIO(METADATA.encode()))
    return path.name


if __name__ == "__main__":
    (ROOT / "dist").mkdir(exist_ok=True)
    made = build_sdist(ROOT / "dist") if sys.argv[1] == "--sdist" else write_wheel(pathlib.Path(sys.argv[1]), ROOT / "dist").name
    print(f"dist/{made}  {(ROOT / 'dist' / made).stat().st_size / 1e6:.1f} MB")
