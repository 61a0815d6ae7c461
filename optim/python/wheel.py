"""Writes dist/nibble_optim-VERSION-py3-none-manylinux_2_N_ARCH.whl with the package, the library and libgomp.

    make wheel            # python3 optim/python/wheel.py build/lib/libnibble_optim.so

A wheel is a zip file with a list of checksums, so no build tool is needed. N is the newest version of glibc that a
symbol of the libraries needs."""
import base64
import hashlib
import pathlib
import platform
import re
import subprocess
import sys
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def glibc(path):
    symbols = subprocess.run(["objdump", "-T", path], capture_output=True, text=True, check=True).stdout
    return max(int(minor) for minor in re.findall(r"GLIBC_2\.(\d+)", symbols))


def needed(path, name):
    """Returns the file that the loader finds for a library that `path` needs; None if it needs none of this name."""
    lines = subprocess.run(["ldd", path], capture_output=True, text=True, check=True).stdout
    found = re.search(re.escape(name) + r"\S* => (\S+)", lines)
    return pathlib.Path(found[1]).resolve() if found else None


GOMP = """nibble_optim/libgomp.so.1 is GCC's OpenMP runtime, unmodified, of the system that built this wheel.
Copyright Free Software Foundation, Inc. It is under the GNU General Public License, version 3 or later, with the GCC
Runtime Library Exception, version 3.1, which allows programs of any licence to be linked with it. Source:
https://gcc.gnu.org, directory libgomp. Texts: https://www.gnu.org/licenses/gpl-3.0.txt and
https://www.gnu.org/licenses/gcc-exception-3.1.html, and below where the system has them.
"""
TEXTS = "/usr/share/doc/libgomp1/copyright", "/usr/share/common-licenses/GPL-3"


def main():
    library = pathlib.Path(sys.argv[1])
    version = re.search(r'__version__ = "(.*)"', (HERE / "nibble_optim" / "__init__.py").read_text())[1]
    files = {str(path.relative_to(HERE)): path.read_bytes() for path in sorted(HERE.glob("nibble_optim/**/*.py"))}
    files["nibble_optim/libnibble_optim.so"] = library.read_bytes()
    newest, info = glibc(library), f"nibble_optim-{version}.dist-info"
    gomp = needed(library, "libgomp")
    if gomp:  # slim images lack it; the loader looks in the library's own folder first
        files["nibble_optim/libgomp.so.1"] = gomp.read_bytes()
        newest = max(newest, glibc(gomp))
        texts = [path.read_text("utf-8", "replace") for path in map(pathlib.Path, TEXTS) if path.is_file()]
        files[f"{info}/LICENSE.libgomp"] = "\n".join([GOMP, *texts]).encode()
    tag = f"py3-none-manylinux_2_{max(newest, 17)}_{platform.machine()}"
    files[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: nibble_optim\nVersion: {version}\nSummary: Optimizers with states and weights "
        "of 4, 8 and 16 bits for PyTorch, one launch a step\nLicense: "
        f"MIT{'; libgomp.so.1: GPL-3.0-or-later WITH GCC-exception-3.1' * bool(gomp)}\nRequires-Python: >=3.9\n"
        "Description-Content-Type: text/markdown\n\n" + (HERE / "README.md").read_text()).encode()
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: nibble\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()
    files[f"{info}/LICENSE"] = (ROOT / "LICENSE").read_bytes()
    record = ""
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(data)}\n"
    files[f"{info}/RECORD"] = (record + f"{info}/RECORD,,\n").encode()
    path = ROOT / "dist" / f"nibble_optim-{version}-{tag}.whl"
    path.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0))  # so that the same files give the same bytes
            entry.external_attr, entry.compress_type = 0o644 << 16, zipfile.ZIP_DEFLATED
            wheel.writestr(entry, data)
    print(f"{path.relative_to(ROOT)}  {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
