"""Tests of libnibble_optim's own interface, with plain memory and without torch. test_torch.py runs them too.

    make lib && python3 dev/unit/test_library.py [-k SUBSTRING]

The bits against ./train's optimizer object are in dev/unit/placed.cu, which steps both.
"""
import array
import ctypes
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unittest.mock
import zipfile

from cases import run_cases

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "optim" / "python"))
import nibble_optim  # noqa: E402
from nibble_optim import library  # noqa: E402


def raises(kind, words, function):
    try:
        function()
    except kind as error:
        assert words in str(error), f"{words!r} is not in {error}"
        return
    raise AssertionError(f"nothing was raised that says {words!r}")


def floats(values):
    return (ctypes.c_float * len(values))(*values)


class Plain:
    """Tensors of fp32 in host memory, of n elements or (rows, columns), and steps over them."""

    def __init__(self, shapes, **settings):
        shapes = [shape if isinstance(shape, tuple) else (1, shape) for shape in shapes]
        lengths = [rows * cols for rows, cols in shapes]
        self.weights = [floats([((7 * i + 3 * t) % 11 - 5) / 7 for i in range(n)]) for t, n in enumerate(lengths)]
        tensors = [(f"t{t}", *shape, 0, -1) for t, shape in enumerate(shapes)]
        self.handle = nibble_optim.Handle({"device": "cpu", "parameters": "fp32", **settings}, tensors)

    def step(self, number, lr=1e-2, decay=0.1, missing=(), betas=(0.9, 0.95), eps=1e-8, scale=1, grads=None, groups=None):
        """grads: addresses, in place of those of numbers of its own. Tensor t has group t modulo the number of groups."""
        own = [floats([((5 * i + number) % 13 - 6) / 9 * scale for i in range(len(w))])
               for w in self.weights if not grads]
        grads = grads or [0 if t in missing else ctypes.addressof(g) for t, g in enumerate(own)]
        groups = groups or [(lr, decay, *betas, eps, number)]
        self.handle.step(array.array("Q", map(ctypes.addressof, self.weights)), array.array("Q", grads),
                         array.array("i", [t % len(groups) for t in range(len(grads))]), groups, number)

    def bytes(self):
        return [bytes(w) for w in self.weights] + [self.handle.save()]


def test_library_beta2_of_0():
    """v is the square of the gradient. One far below the last counts for more than it is, never for nothing."""
    for rule in ("adamw", "adam-mini", "came"):
        plain = Plain([3], rule=rule, m="fp32")
        plain.step(1, betas=(0.9, 0.0))
        before = list(plain.weights[0])
        plain.step(2, betas=(0.9, 0.0), decay=0.0, scale=1e-5)
        # m / (1 - 0.9^2) is at most half of the first gradients, 5/9, and v at least the square of the least, 1e-5/9.
        assert all(0 < abs(a - b) < 1e-2 * 0.5 * 5 / 1e-5 for a, b in zip(before, plain.weights[0])), rule


def same_again_and_resumed(shapes, **settings):
    """Three runs that end with the same bytes, of which the third goes on from what the first saved after step 2."""
    runs = [Plain(shapes, seed=3, **settings) for _ in range(3)]
    for number in (1, 2, 3, 7):
        for run in runs[:2]:
            run.step(number)
            assert "capturable" not in settings or run.handle.clock() == number, settings
        if number == 2:
            runs[2].handle.load(runs[0].handle.save())
            for to, source in zip(runs[2].weights, runs[0].weights):
                ctypes.memmove(to, source, ctypes.sizeof(to))
        if number > 2:
            runs[2].step(number)
    assert runs[0].bytes() == runs[1].bytes() == runs[2].bytes(), settings
    return runs


def test_library_same_bits_again_and_resumed():
    for preset in ("adamw32", "adamw8", "adamw4", "adamw4d", "flash24", "adafactor8", "came8", "rmnp4"):
        same_again_and_resumed([(50, 100), 1, 2048, 300], preset=preset, capturable=1)


def test_library_master_of_a_late_gradient():
    """A master is made at a tensor's first gradient, also if this comes after the states were saved."""
    a, b = (Plain([3000, 500], preset="adamw32", parameters="bf16") for _ in range(2))
    a.step(1, missing=[1])
    b.handle.load(a.handle.save())
    ctypes.memmove(b.weights[0], a.weights[0], ctypes.sizeof(a.weights[0]))
    a.step(2)
    b.step(2)
    assert a.bytes() == b.bytes()


def test_library_rules_that_take_all_tensors():
    for settings in ({"preset": "adafactor8"}, *({"rule": rule, "m": "dyn8", "rank_gap": 2} for rule in (
            "muon", "normuon", "galore", "fira", "apollo", "apollo-mini"))):
        runs = same_again_and_resumed([(50, 100), (33, 20), (8, 300)], **settings)
        before = runs[0].bytes()
        raises(ValueError, "takes all tensors or none", lambda: runs[0].step(5, missing=[1]))
        assert runs[0].bytes() == before, settings
        raises(ValueError, "and t is cut", lambda: nibble_optim.Handle(settings, [("t", 8, 300, 0, 1200)]))


def test_library_groups():
    """Rules of matrices take eight. Scales of whole tensors are no reason for equal betas."""
    for count in (8, 9):
        step = lambda: Plain([(4, 8)] * 9, rule="muon", m="fp32").step(
            1, groups=[(1e-2 / (g + 1), 0.1, 0.9, 0.95, 1e-8, 1) for g in range(count)])
        raises(ValueError, "more than 8 learning rates", step) if count > 8 else step()
    plain = Plain([(40, 33), (33, 40)], rule="adamw", m="dyn8/rank1", v="fp32")
    grads = floats([0.01] * 1320)
    plain.step(1, grads=[ctypes.addressof(grads)] * 2, groups=[(1e-2, 0.0, 0.9, beta2, 1e-8, 1) for beta2 in (0.95, 0.99)])
    assert all(abs(w[0] - (7 * 0 + 3 * t) % 11 / 7 + 5 / 7 + 1e-2) < 1e-4 for t, w in enumerate(plain.weights))


def test_library_stacked_matrices():
    """Three matrices in one tensor step as three tensors."""
    for rule in ("muon", "normuon", "fira"):
        one = Plain([(96, 64)], rule=rule, m="fp32", stacked="wte:5; t*: 3")
        three = Plain([(32, 64)] * 3, rule=rule, m="fp32")  # of a whole tile each: they lie where the parts of one do
        for t in range(3):
            ctypes.memmove(three.weights[t], ctypes.byref(one.weights[0], t * 8192), 8192)
        for number in range(1, 4):
            grads = floats([((5 * i + number) % 13 - 6) / 9 for i in range(96 * 64)])
            for run, size in ((one, 0), (three, 8192)):
                at = [ctypes.addressof(grads) + size * t for t in range(len(run.weights))]
                run.step(number, grads=at)
        assert bytes(one.weights[0]) == b"".join(map(bytes, three.weights)), rule
    saved = Plain([(96, 64)], rule="muon", m="fp32", stacked="t*:3").handle.save()
    raises(ValueError, "stacked t*:3", lambda: Plain([(96, 64)], rule="muon", m="fp32").handle.load(saved))
    raises(ValueError, "no 3 equal matrices", lambda: Plain([(32, 40)], rule="muon", stacked="t0:3"))


def test_library_part_of_a_model_has_its_noise():
    """A tensor's projection and noise depend on where it lies in the model, not on who steps it."""
    shapes = [(33, 20), (8, 300)]
    both = Plain(shapes, rule="apollo", m="fp32", seed=3)
    parts = [Plain(shapes[1:], rule="apollo", m="fp32", seed=3, element=element)
             for element in (both.handle.place(1).element, 0)]
    for number in range(1, 4):
        for t, part in enumerate(parts):
            if number == 1:
                ctypes.memmove(part.weights[0], both.weights[1], ctypes.sizeof(both.weights[1]))
            part.step(number)
        both.step(number)
    assert bytes(both.weights[1]) == bytes(parts[0].weights[0]) != bytes(parts[1].weights[0])


def test_library_shares_of_tensors_that_are_read_whole():
    """Optimizers that divide a model among them have the bits of one that has all of it."""
    shapes = [(24, 16), 40, (8, 300), (33, 20), (16, 48), 7, (4, 0)]
    vectors = {"overrides": "t1|t5: rule=adamw m=fp32 v=fp32"}
    for settings in ({"preset": "muon8", **vectors}, {"rule": "normuon", "m": "bf16:sr", **vectors},
                     {"preset": "galore8", "m": "bf16:sr", **vectors}, {"rule": "apollo", "m": "fp32", **vectors},
                     {"preset": "adafactor8"}, {"preset": "came8"},
                     {"rule": "adam-mini"}, {"preset": "adamw8", "limit_growth": 1.001}, {"m": "dyn8/rank1"}):
        whole = Plain(shapes, seed=3, element=4096, **settings)
        for count in (1, 2, 3, 9):
            plain = Plain(shapes, seed=3, element=4096, shares=count, **settings)
            owners = [plain.handle.place(t).owner for t in range(len(shapes))]
            assert [owners[1], owners[5]] == [-1, -1] or "overrides" not in settings, (settings, owners)
            assert {owners[t] for t in (0, 2, 3, 4)} <= set(range(count)), (settings, owners)
            handles = [plain.handle, *(Plain(shapes, seed=3, element=4096, share=i, shares=count, **settings).handle
                                       for i in range(count))]
            for number in range(1, 4):
                if count == 1:
                    whole.step(number)
                for handle in handles:
                    plain.handle = handle
                    plain.step(number)
            assert plain.bytes()[:-1] == whole.bytes()[:-1], (settings, count)
    for share, count in ((2, 2), (0, 0), (0, 1 << 21)):
        raises(ValueError, "below the number of shares", lambda: Plain([5], share=share, shares=count))
    # Rows with and without whole blocks of 256; a vector; one that is not cut; one without elements.
    handle = nibble_optim.Handle({"preset": "adamw8", "shares": 2}, [
        ("a", 6, 128, 0, 256), ("b", 4, 512, 1024, 1024), ("c", 1, 512, 0, 256), ("d", 6, 100, 0, -1),
        ("e", 6, 0, 0, 0)])
    assert [handle.place(t).owner >= 0 for t in range(6)] == [True, False, True, False, False, False]


def test_library_limit_growth():
    plain = Plain([(20, 30), 7], preset="adamw32", limit_growth=1)
    plain.step(1)
    raises(ValueError, "takes all tensors or none", lambda: plain.step(2, missing=[1]))
    raises(ValueError, "adds the decay to the gradient", lambda: Plain([5], rule="adam", limit_growth=1.01))
    raises(ValueError, "sets the norm of its updates", lambda: Plain([(5, 5)], rule="muon", limit_growth=1.01))
    raises(ValueError, "reads whole tensors",
           lambda: nibble_optim.Handle({"limit_growth": 1.01}, [("t", 8, 300, 0, 1200)]))
    for rule in ("fira", "apollo", "apollo-mini"):  # which limit by 1.01 unless another number is given
        ends = []
        for own in ({}, {"limit_growth": 1.01}, {"limit_growth": 1.3}):
            plain = Plain([(20, 30), (3, 4)], rule=rule, m="fp32", overrides="none", **own)
            for number in range(1, 4):
                plain.step(number, scale=number)
            ends.append([bytes(w) for w in plain.weights])
        assert ends[0] == ends[1] != ends[2], rule


def test_library_options_of_rules():
    """Each option has the default that it names, for each rule that reads it, and refuses what is none of its choices."""
    options = library.rule_options()
    assert {"momentum", "rank_gap", "adafactor_lr"} < options.keys()
    assert not {"beta1", "beta2", "eps", "weight_decay"} & options.keys()
    assert [float(options[name][1]) for name in ("alpha", "beta3", "momentum", "ns_steps", "clip_update", "rank")] == \
        [5, 0.9999, 0.95, 5, 1, 0], options
    assert options["nesterov"][:2] == ("on|off", "on") and options["rank"][0] == "N from 0 to 65536", options
    text = library.options_text()
    assert "auto" not in text and "--" not in text and "F x lr / lr_max" in text, text
    for name, (values, default, rules, _) in options.items():
        for rule in rules or ["adamw"]:
            with_it, without = (Plain([(20, 30), (3, 4)], rule=rule, m="fp32", overrides="none", **own)
                                for own in ({name: default}, {}))
            for number in range(1, 3):
                with_it.step(number)
                without.step(number)
            assert with_it.bytes() == without.bytes(), (name, rule)
        if "|" in values:
            raises(ValueError, f"{name} 'x' is not known", lambda: Plain([5], **{name: "x"}))


def test_library_mistakes_are_sentences():
    for settings, words in [({"preset": "adamw9"}, "did you mean adamw8?"), ({"m": "dyn9"}, "did you mean dyn8/256?"),
                            ({"seed": "x"}, "whole number"), ({"colour": "red"}, "is no setting"),
                            ({"element": 2 ** 64 - 2048}, "whole number"), ({"device": f"cuda:{2 ** 32 - 1}"}, "from 0 to"),
                            ({"device": "tpu"}, "cpu, cuda or cuda:N"), ({"nesterov": "1"}, "type one of on|off"), ({"alpha": "x"}, "alpha takes a number, not 'x'; give a number"),
                            ({"momentum": "auto"}, "not 'auto'; give a number"), ({"beta2": -1}, "betas -1 is out of range"),
                            ({"weight_decay": -1}, "weight_decay -1 is out of range"), ({"eps": "1e-46"}, "1e-46 was found"),
                            ({"parameters": "fp64"}, "fp32|bf16|fp16"),
                            ({"weights": "bf16:sr"}, "parameters of fp32"),
                            ({"rule": "lion", "v": "fp32"}, 'v: "fp32" was found, but lion keeps no second moment; leave v out'),
                            ({"v": "none"}, 'type v="fp32", say'), ({"rule": "muon"}, "t0 is a vector"),
                            ({"rule": "muon", "ns_steps": 0}, "from 1 to 100"), ({"limit_growth": 0.5}, "from 1 on"),
                            ({"decay_mode": "independent"}, "give lr_max a value above 0"),
                            ({"lr_max": "1e39"}, "give a number"),
                            ({"stacked": "t0"}, "a pattern"),
                            ({"overrides": "nothing*: lr=2"}, "matches no tensor"), ({"device": "cuda:99"}, "cuda")]:
        raises(ValueError, words, lambda: Plain([5], **settings))
    raises(MemoryError, "allocate gave no memory", lambda: nibble_optim.Handle({}, [("t", 1, 5, 0, -1)], lambda _: 0))
    for shape, words in [((0, 5, 0, -1), "1 row or more"), ((1 << 40, 1 << 40, 0, -1), "2^42 elements"),
                         ((4, 4, 1, 2 ** 63 - 1), "from 1 on were named and it has 16")]:
        raises(ValueError, words, lambda: nibble_optim.Handle({"device": "cpu"}, [("t", *shape)]))
    plain = Plain([5], preset="adamw8")
    for settings, words in [({"number": 0}, "steps count from 1"), ({"number": 1, "lr": float("nan")}, "lr nan"),
                            ({"number": 1, "betas": (0.9, 1.0)}, "betas 1 is out"), ({"number": 1, "eps": 0.0}, "eps 0 was"),
                            ({"number": 1, "betas": (0.9, -1)}, "betas -1 is out"),
                            ({"number": 1, "decay": -1}, "weight_decay -1 is out")]:
        raises(ValueError, words, lambda: plain.step(**settings))
    plain.step(1, betas=(0.9, 0.9999995), decay=1000)
    Plain([5], rule="adafactor", clip_update=1e30, rank_scale=1e7, alpha=2000)
    raises(ValueError, "no states", lambda: plain.handle.load(b"x" * 2000))
    raises(ValueError, "other tensors", lambda: plain.handle.load(Plain([6], preset="adamw8").handle.save()))
    raises(ValueError, "states are of", lambda: plain.handle.load(Plain([5], preset="adamw4").handle.save()))


def memory():
    """Bytes that this process has."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def test_library_refusals_leave_nothing():
    plain = Plain([(500, 2048), 5], preset="adafactor8")
    grads = [ctypes.addressof(plain.weights[0]), 0]
    for words, refused in [
            ("matches no tensor", lambda: Plain([5], overrides="nothing*: lr=2")),
            ("is cut", lambda: nibble_optim.Handle({"m": "dyn8/rank1"}, [("t", 8, 300, 0, 1200)])),
            ("all tensors or none", lambda: plain.step(1, grads=grads))]:
        for number in range(1020):
            before = memory() if number < 20 else before
            raises(ValueError, words, refused)
        assert memory() - before < 8 << 20, f"{words}: {(memory() - before) >> 10} KB more"


def test_library_frees_after_a_capture():
    """The garbage collector may find an optimizer while a CUDA graph is captured. The next optimizer frees it."""
    with unittest.mock.patch.object(library, "is_capturing", lambda: True):
        Plain([3])
        assert len(library._dropped) == 1
    Plain([3])
    assert not library._dropped


def test_library_prints_nothing_and_goes_on():
    code = "import sys; sys.path.insert(0, sys.argv[1]); import nibble_optim\n" \
           "for _ in range(3):\n    try: nibble_optim.Handle({'preset': 'x'}, [])\n    except ValueError: pass\n"
    run = subprocess.run([sys.executable, "-c", code, str(ROOT / "optim" / "python")], capture_output=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, b"", b""), run


def in_c(source, *options):
    """Builds a program with the library and runs it to its end. Returns what it prints."""
    where = pathlib.Path(library.library()._name).resolve().parent
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/program"
        subprocess.run(["gcc", *options, "-Wall", "-Wextra", "-Werror", ROOT / source, f"-L{where}", "-lnibble_optim", "-o",
                        program], check=True)
        run = subprocess.run([program], capture_output=True, text=True,
                             env={**os.environ, "LD_LIBRARY_PATH": str(where), "OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, run
    return run.stdout


def test_library_example_in_c():
    if not shutil.which("gcc"):
        return "skipped: no gcc"
    assert "has the same bits" in in_c("dev/examples/optim.c", "-std=c99", "-pedantic")


def test_library_frees_all_after_no_memory():
    if not shutil.which("gcc"):
        return "skipped: no gcc"
    in_c("dev/unit/library_memory.c", "-std=gnu11", "-D_GNU_SOURCE")


def test_library_wheel_in_an_empty_environment():
    wheels = sorted(ROOT.glob("dist/nibble_optim-*.whl"), key=lambda path: path.stat().st_mtime)
    if not wheels:
        return "skipped: no wheel; make wheel makes one"
    with zipfile.ZipFile(wheels[-1]) as wheel:
        names = {name.rpartition("/")[2]: name for name in wheel.namelist()}
        if "libgomp.so.1" in names:
            assert b"Runtime Library Exception" in wheel.read(names["LICENSE.libgomp"]), "of another licence"
            assert b"WITH GCC-exception-3.1\n" in wheel.read(names["METADATA"])
    code = "from nibble_optim import Handle; print(Handle({'preset': 'adamw8'}, [('w', 3, 4, 0, -1)]).describe())"
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([f"{folder}/bin/pip", "install", "-q", "--no-index", "--no-deps", "--disable-pip-version-check",
                        wheels[-1]], check=True)
        env = {name: value for name, value in os.environ.items() if name not in ("NIBBLE_OPTIM_LIBRARY", "PYTHONPATH")}
        run = subprocess.run([f"{folder}/bin/python", "-c", code], capture_output=True, text=True, env=env, cwd=folder)
    assert run.returncode == 0 and run.stdout.startswith("adamw  weights bf16:sr"), run


def test_library_source_distribution():
    """It has every file that the library's objects were made from, and its metadata; wheels of CUDA have other names."""
    spec = importlib.util.spec_from_file_location("nibble_wheel", ROOT / "optim" / "python" / "wheel.py")
    wheel = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(wheel)
    made_from = [path.read_text().replace("\\\n", " ").split() for path in ROOT.glob("build/**/lib/**/*.d")]
    read = {os.path.normpath(word) for words in made_from for word in words if (ROOT / word).is_file()}
    if not read:
        return "skipped: no build of the library here"
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(f"{folder}/{wheel.build_sdist(folder)}") as archive:
            there = set(archive.getnames())
            about = archive.extractfile(f"{wheel.NAME}/PKG-INFO").read().decode()
        lacking = sorted(name for name in read | {"Makefile", "LICENSE"} if f"{wheel.NAME}/source/{name}" not in there)
        assert not lacking and {f"{wheel.NAME}/{name}" for name in ("pyproject.toml", "wheel.py", "README.md")} < there, lacking
        for line in ("Requires-Dist: torch>=2.4", "Author: ", "License: MIT; libgomp", "Classifier: Typing :: Typed"):
            assert f"\n{line}" in about, line
        library = pathlib.Path(folder, "lib", "libnibble_optim.so")
        for found, build in (("g++ ", "0cpu"), ("nvcc      12.4  /usr/bin/nvcc\n", "1cu124")):
            pathlib.Path(folder, "found").write_text(found)
            library.parent.mkdir(exist_ok=True)
            assert wheel.build_of(library) == build, build


def test_library_types():
    """A type checker finds the classes, those of compat too, and the arguments' types."""
    if importlib.util.find_spec("mypy") is None:
        return "skipped: no mypy"
    code = """from nibble_optim import Optimizer
from nibble_optim.compat import bitsandbytes as bnb
from nibble_optim.compat.flashoptim import FlashAdamW
from nibble_optim.compat.torchao import AdamW8bit
bnb.AdamW8bit([], lr=1e-3), bnb.optim.Lion8bit([]), FlashAdamW([]), AdamW8bit([])
Optimizer([], lr=1e-3)
Optimizer([], preset=8)
"""
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "user.py").write_text(code)
        run = subprocess.run([sys.executable, "-m", "mypy", "--ignore-missing-imports", "--follow-imports=silent", "--cache-dir",
                              folder, "user.py"], capture_output=True, text=True, cwd=folder,
                             env={**os.environ, "MYPYPATH": str(ROOT / "optim" / "python")})
    assert run.stdout.startswith("user.py:7: error: Argument \"preset\"") and "Found 1 error" in run.stdout, run


if __name__ == "__main__":
    sys.exit(run_cases(globals()))
