"""Tests of libnibble_optim and of the Python package nibble_optim.

    make lib && python3 dev/unit/test_torch.py [-k SUBSTRING]

The library's own interface is tested with plain memory; what needs torch is skipped where torch is not installed, and
what needs a GPU where there is none (cases then run on the CPU alone). The bits against ./train's optimizer object are
in dev/unit/placed.cu, which steps both.
"""
import array
import contextlib
import copy
import ctypes
import io
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "optim" / "python"))
import nibble_optim  # noqa: E402
from nibble_optim import library  # noqa: E402

try:
    import torch
    from nibble_optim import lists
except ImportError:
    torch = None

TESTS = []
DEVICES = ["cpu"] + (["cuda"] if torch is not None and torch.cuda.is_available() and nibble_optim.gpus() > 0 else [])


class Skip(Exception):
    pass


def test(function):
    TESTS.append(function)
    return function


def raises(kind, words, function):
    try:
        function()
    except kind as error:
        assert words in str(error), f"{words!r} is not in {error}"
        return
    raise AssertionError(f"no {kind.__name__} was raised")


# The library, without torch.

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
        self.group_of = array.array("i", [0] * len(lengths))

    def step(self, number, lr=1e-2, decay=0.1, missing=(), betas=(0.9, 0.95), eps=1e-8, scale=1):
        grads = [floats([((5 * i + number) % 13 - 6) / 9 * scale for i in range(len(w))]) for w in self.weights]
        address = lambda x: ctypes.addressof(x)
        self.handle.step(array.array("Q", map(address, self.weights)),
                         array.array("Q", [0 if t in missing else address(g) for t, g in enumerate(grads)]),
                         self.group_of, [(lr, decay, *betas, eps, number)], number)

    def bytes(self):
        return [bytes(w) for w in self.weights] + [self.handle.save()]


@test
def library_adamw_by_hand():
    plain = Plain([3], preset="adamw32")
    weights, m, v = list(plain.weights[0]), [0.0] * 3, [0.0] * 3
    for number in range(1, 6):
        plain.step(number)
        for i in range(3):
            g = ((5 * i + number) % 13 - 6) / 9
            m[i] += 0.1 * (g - m[i])
            v[i] += 0.05 * (g * g - v[i])
            ahead = m[i] / (1 - 0.9 ** number) / ((v[i] / (1 - 0.95 ** number)) ** 0.5 + 1e-8)
            weights[i] -= 1e-2 * (ahead + 0.1 * weights[i])
    # Five steps of lr; each rounds to 2^-24 of a weight and to some 2^-22 of an update.
    assert all(abs(a - b) < 5 * (2.0 ** -24 + 1e-2 * 2.0 ** -20) for a, b in zip(weights, plain.weights[0]))


def same_again_and_resumed(shapes, **settings):
    """Three runs that end with the same bytes, of which the third goes on from what the first saved after step 2."""
    runs = [Plain(shapes, seed=3, **settings) for _ in range(3)]
    for number in range(1, 5):
        for run in runs[:2]:
            run.step(number)
        if number == 2:
            runs[2].handle.load(runs[0].handle.save())
            for to, source in zip(runs[2].weights, runs[0].weights):
                ctypes.memmove(to, source, ctypes.sizeof(to))
        if number > 2:
            runs[2].step(number)
    assert runs[0].bytes() == runs[1].bytes() == runs[2].bytes(), settings
    return runs


@test
def library_same_bits_again_and_resumed():
    for preset in ("adamw32", "adamw8", "adamw4", "adamw4d", "flash24", "adafactor8", "came8", "rmnp4"):
        same_again_and_resumed([(50, 100), 1, 2048, 300], preset=preset)


@test
def library_missing_gradient_leaves_a_tensor_alone():
    a, b = Plain([3000, 500], preset="adamw8"), Plain([3000, 500], preset="adamw8")
    for run in (a, b):
        run.step(1)
    before = bytes(a.weights[1])
    a.step(2, missing=[1])
    b.step(2)
    assert bytes(a.weights[1]) == before != bytes(b.weights[1])
    assert bytes(a.weights[0]) == bytes(b.weights[0])


@test
def library_rule_that_reads_rows_by_hand():
    for nesterov in ("on", "off"):
        rmnp_by_hand(nesterov)


def rmnp_by_hand(nesterov):
    rows, cols, momentum = 3, 5, 0.9
    plain = Plain([(rows, cols)], rule="rmnp", m="fp32", momentum=momentum, nesterov=nesterov, overrides="none")
    weights, m = list(plain.weights[0]), [0.0] * (rows * cols)
    for number in range(1, 6):
        plain.step(number)
        g = [((5 * i + number) % 13 - 6) / 9 for i in range(rows * cols)]
        m = [a + (1 - momentum) * (b - a) for a, b in zip(m, g)]
        u = [b + momentum * (a - b) for a, b in zip(m, g)] if nesterov == "on" else m
        for i in range(rows * cols):
            row = u[i // cols * cols:(i // cols + 1) * cols]
            length = sum(x * x for x in row) ** 0.5
            weights[i] = weights[i] * (1 - 1e-2 * 0.1) - 1e-2 * u[i] / length
    assert all(abs(a - b) < 5 * (2.0 ** -24 + 1e-2 * 2.0 ** -20) for a, b in zip(weights, plain.weights[0]))


@test
def library_rule_that_reads_rows_takes_all_tensors():
    plain = Plain([(4, 8), (8, 4)], preset="adafactor8")
    before = plain.bytes()
    raises(ValueError, "takes all tensors or none", lambda: plain.step(1, missing=[1]))
    assert plain.bytes() == before
    plain.step(1)
    assert plain.bytes() != before


MATRIX_RULES = ("muon", "normuon", "galore", "fira", "apollo", "apollo-mini")


@test
def library_rules_that_read_matrices():
    shapes = [(50, 100), (33, 20), (8, 300)]
    for rule in MATRIX_RULES:
        runs = same_again_and_resumed(shapes, rule=rule, m="dyn8", rank_gap=2)
        before = runs[0].bytes()
        raises(ValueError, "takes all tensors or none", lambda: runs[0].step(5, missing=[1]))
        assert runs[0].bytes() == before, rule
        raises(ValueError, "t is sharded", lambda: nibble_optim.Handle({"rule": rule}, [("t", 8, 300, 0, 1200)]))


@test
def library_matrices_take_eight_groups():
    plain = Plain([(4, 8)] * 9, rule="muon", m="fp32")
    grads = [floats([0.1] * len(w)) for w in plain.weights]
    for count in (8, 9):
        groups = [(1e-2 / (g + 1), 0.1, 0.9, 0.95, 1e-8, 1) for g in range(count)]
        plain.group_of = array.array("i", [t % count for t in range(9)])

        def step():
            plain.handle.step(array.array("Q", map(ctypes.addressof, plain.weights)),
                              array.array("Q", map(ctypes.addressof, grads)), plain.group_of, groups, 1)
        raises(ValueError, "more than 8 learning rates", step) if count > 8 else step()


@test
def library_muon_by_hand():
    """One singular value: u of rank 1 has the orthogonal factor u / ||u||, which five steps bring near."""
    plain = Plain([(40, 30)], rule="muon", m="fp32", overrides="none", ns_coefficients="polar-express", ns_steps=8)
    before = list(plain.weights[0])
    x, y = [((3 * i) % 7 - 3) / 5 for i in range(40)], [((4 * i) % 9 - 4) / 7 for i in range(30)]
    grad = floats([a * b for a in x for b in y])
    plain.handle.step(array.array("Q", [ctypes.addressof(plain.weights[0])]),
                      array.array("Q", [ctypes.addressof(grad)]), plain.group_of,
                      [(1e-2, 0.1, 0.9, 0.95, 1e-8, 1)], 1)
    length = sum(g * g for g in grad) ** 0.5
    for b, w, g in zip(before, plain.weights[0], grad):
        want = b * (1 - 1e-2 * 0.1) - 1e-2 * 0.2 * 40 ** 0.5 * g / length
        assert abs(w - want) < 1e-2 * 0.2 * 40 ** 0.5 * 0.02 * abs(g) / length + 1e-6, (w, want)


@test
def library_tensor_scales_of_two_groups():
    """Scales of whole tensors are no reason for equal betas."""
    plain = Plain([(40, 33), (33, 40)], rule="adamw", m="dyn8/rank1", v="fp32")
    plain.group_of = array.array("i", [0, 1])
    grads = [floats([0.01] * len(w)) for w in plain.weights]
    plain.handle.step(array.array("Q", map(ctypes.addressof, plain.weights)),
                      array.array("Q", map(ctypes.addressof, grads)), plain.group_of,
                      [(1e-2, 0.0, 0.9, 0.95, 1e-8, 1), (1e-2, 0.0, 0.9, 0.99, 1e-8, 1)], 1)
    assert all(abs(w[0] - (7 * 0 + 3 * t) % 11 / 7 + 5 / 7 + 1e-2) < 1e-4 for t, w in enumerate(plain.weights))


@test
def library_stacked_matrices():
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
                run.handle.step(array.array("Q", map(ctypes.addressof, run.weights)), array.array("Q", at),
                                run.group_of, [(1e-2, 0.1, 0.9, 0.95, 1e-8, number)], number)
        assert bytes(one.weights[0]) == b"".join(map(bytes, three.weights)), rule
    saved = Plain([(96, 64)], rule="muon", m="fp32", stacked="t*:3").handle.save()
    raises(ValueError, "stacked t*:3", lambda: Plain([(96, 64)], rule="muon", m="fp32").handle.load(saved))
    raises(ValueError, "no 3 equal matrices", lambda: Plain([(32, 40)], rule="muon", stacked="t0:3"))


@test
def library_part_of_a_model_has_its_noise():
    """A tensor's projection and noise depend on where it lies in the model, not on who steps it."""
    shapes = [(33, 20), (8, 300)]
    both = Plain(shapes, rule="apollo", m="fp32", seed=3)
    parts = [Plain(shapes[1:], rule="apollo", m="fp32", seed=3, element=element)
             for element in (both.handle.element(1), 0)]
    for number in range(1, 4):
        for t, part in enumerate(parts):
            if number == 1:
                ctypes.memmove(part.weights[0], both.weights[1], ctypes.sizeof(both.weights[1]))
            part.step(number)
        both.step(number)
    assert bytes(both.weights[1]) == bytes(parts[0].weights[0]) != bytes(parts[1].weights[0])


@test
def library_shares_of_tensors_that_are_read_whole():
    """Optimizers that divide a model among them have the bits of one that has all of it."""
    shapes = [(24, 16), 40, (8, 300), (33, 20), (16, 48), 7]
    vectors = {"overrides": "t1|t5: rule=adamw m=fp32 v=fp32"}
    for settings in ({"preset": "muon8", **vectors}, {"rule": "normuon", "m": "bf16:sr", **vectors},
                     {"preset": "galore8", "m": "bf16:sr", **vectors}, {"rule": "apollo", "m": "fp32", **vectors},
                     {"preset": "adafactor8"}, {"preset": "came8"},
                     {"rule": "adam-mini"}, {"preset": "adamw8", "limit_growth": 1.001}, {"m": "dyn8/rank1"}):
        whole = Plain(shapes, seed=3, element=4096, **settings)
        for count in (1, 2, 3, 9):
            plain = Plain(shapes, seed=3, element=4096, share=f"rest/{count}", **settings)
            owners = [plain.handle.owner(t) for t in range(len(shapes))]
            assert [owners[1], owners[5]] == [-1, -1] or "overrides" not in settings, (settings, owners)
            assert {owners[t] for t in (0, 2, 3, 4)} <= set(range(count)), (settings, owners)
            handles = [plain.handle, *(Plain(shapes, seed=3, element=4096, share=f"{i}/{count}", **settings).handle
                                       for i in range(count))]
            for number in range(1, 4):
                if count == 1:
                    whole.step(number)
                for handle in handles:
                    plain.handle = handle
                    plain.step(number)
            assert plain.bytes()[:-1] == whole.bytes()[:-1], (settings, count)
    for share in ("2/2", "x/2", "/2", "1/2x", "1", "-1/3", "1/0"):
        raises(ValueError, "type I/N", lambda: Plain([5], share=share))
    # Rows with and without whole blocks of 256; a vector; one that is not cut.
    handle = nibble_optim.Handle({"preset": "adamw8", "share": "rest/2"}, [
        ("a", 6, 128, 0, 256), ("b", 4, 512, 1024, 1024), ("c", 1, 512, 0, 256), ("d", 6, 100, 0, -1)])
    assert [handle.owner(t) >= 0 for t in range(5)] == [True, False, True, False, False]


@test
def library_clock():
    for preset in ("adamw8", "came8", "muon8"):
        plain = Plain([(5, 8)], preset=preset, capturable=1)
        assert plain.handle.clock() == 0
        for number in (1, 2, 7):
            plain.step(number)
            assert plain.handle.clock() == number


@test
def library_limit_growth():
    """A tensor's update grows by no more than the factor from step to step; without it, it does."""
    most = {}
    for limit in (0, 1):
        plain = Plain([(20, 30), 7], preset="adamw32", limit_growth=limit)
        norms, before = [], list(plain.weights[0])
        for number in range(1, 9):
            plain.step(number, decay=0.0, scale=1 if number < 6 else 100)
            norms.append(sum((a - b) ** 2 for a, b in zip(plain.weights[0], before)) ** 0.5)
            before = list(plain.weights[0])
        most[limit] = max(b / a for a, b in zip(norms, norms[1:]))
    assert most[1] < 1 + 1e-4 and most[0] > 1.02, most
    raises(ValueError, "takes all tensors or none", lambda: plain.step(9, missing=[1]))
    raises(ValueError, "adds the decay to the gradient", lambda: Plain([5], rule="adam", limit_growth=1.01))
    raises(ValueError, "norm of their own", lambda: Plain([(5, 5)], rule="muon", limit_growth=1.01))
    raises(ValueError, "reads whole tensors",
           lambda: nibble_optim.Handle({"limit_growth": 1.01}, [("t", 8, 300, 0, 1200)]))


@test
def library_mistakes_are_sentences():
    for settings, words in [({"preset": "adamw9"}, "did you mean adamw8?"), ({"m": "dyn9"}, "did you mean dyn8/256?"),
                            ({"seed": "x"}, "whole number"), ({"colour": "red"}, "is no setting"),
                            ({"device": "tpu"}, "cpu, cuda or cuda:N"), ({"nesterov": "1"}, "type on or off"),
                            ({"parameters": "fp16"}, "fp32 or bf16"),
                            ({"weights": "bf16:sr"}, "parameters of fp32"),
                            ({"rule": "lion", "v": "fp32"}, 'v: "fp32" was found, but lion keeps no second moment; leave v out'),
                            ({"v": "none"}, 'type v="fp32", say'), ({"rule": "muon"}, "t0 is a vector"),
                            ({"rule": "muon", "ns_steps": 0}, "from 1 to 100"), ({"limit_growth": 0.5}, "from 1 on"),
                            ({"stacked": "t0"}, "a pattern"),
                            ({"overrides": "nothing*: lr=2"}, "matches no tensor"), ({"device": "cuda:99"}, "cuda")]:
        raises(ValueError, words, lambda: Plain([5], **settings))
    raises(MemoryError, "allocate gave no memory", lambda: nibble_optim.Handle({}, [("t", 1, 5, 0, -1)], lambda _: 0))
    for shape, words in [((0, 5), "1 row or more"), ((1 << 40, 1 << 40), "2^42 elements")]:
        raises(ValueError, words, lambda: nibble_optim.Handle({"device": "cpu"}, [("t", *shape, 0, -1)]))
    plain = Plain([5], preset="adamw8")
    for settings, words in [({"number": 0}, "steps count from 1"), ({"number": 1, "lr": float("nan")}, "lr nan"),
                            ({"number": 1, "betas": (0.9, 1.0)}, "below 1"), ({"number": 1, "eps": 0.0}, "eps 0")]:
        raises(ValueError, words, lambda: plain.step(**settings))
    raises(ValueError, "no states", lambda: plain.handle.load(b"x" * 2000))
    raises(ValueError, "other tensors", lambda: plain.handle.load(Plain([6], preset="adamw8").handle.save()))
    raises(ValueError, "states are of", lambda: plain.handle.load(Plain([5], preset="adamw4").handle.save()))


@test
def library_frees_what_a_failure_leaves():
    """Whichever allocation of states fails; the buffers for matrices are the largest part, 24 MB here."""
    blocks, left = [], 0

    def allocate(count):
        nonlocal left
        left -= 1
        blocks.append(ctypes.create_string_buffer(count + 16))
        return 0 if left < 0 else ctypes.addressof(blocks[-1]) + -ctypes.addressof(blocks[-1]) % 16

    def make(most):
        nonlocal left
        left = most
        blocks.clear()
        nibble_optim.Handle({"rule": "muon", "m": "fp32", "parameters": "fp32", "overrides": "v: rule=adamw v=fp32"},
                            [("w", 1024, 1024, 0, -1), ("v", 1, 50, 0, -1)], allocate)

    make(100)
    calls = 100 - left
    assert calls > 2, calls
    memory = lambda: int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    for call in range(calls):
        raises(MemoryError, "allocate gave no memory", lambda: make(call))
    before = memory()
    for _ in range(20):
        raises(MemoryError, "allocate gave no memory", lambda: make(calls - 1))
    assert memory() - before < 100 << 20, f"{(memory() - before) >> 20} MB more"


@test
def library_prints_nothing_and_goes_on():
    code = "import sys; sys.path.insert(0, sys.argv[1]); import nibble_optim\n" \
           "for _ in range(3):\n    try: nibble_optim.Handle({'preset': 'x'}, [])\n    except ValueError: pass\n"
    run = subprocess.run([sys.executable, "-c", code, str(ROOT / "optim" / "python")], capture_output=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, b"", b""), run


@test
def library_threads_do_not_meet():
    want = Plain([4000], preset="adamw8")
    for number in range(1, 9):
        want.step(number)
    runs, errors = [Plain([4000], preset="adamw8") for _ in range(4)], []

    def work(run):
        for number in range(1, 9):
            run.step(number)
            try:
                nibble_optim.Handle({"preset": "nothing"}, [])
            except ValueError as error:
                errors.append(str(error))

    threads = [threading.Thread(target=work, args=(run,)) for run in runs]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(errors) == 32 and all("nothing" in error for error in errors)
    assert all(run.bytes() == want.bytes() for run in runs)


@test
def library_example_in_c():
    if not shutil.which("gcc"):
        raise Skip("no gcc")
    where = pathlib.Path(library.library()._name).resolve().parent
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/optim"
        subprocess.run(["gcc", "-std=c99", "-Wall", "-Wextra", "-Werror", "-pedantic", ROOT / "dev/examples/optim.c",
                        f"-L{where}", "-lnibble_optim", "-o", program], check=True)
        run = subprocess.run([program], capture_output=True, text=True,
                             env={**os.environ, "LD_LIBRARY_PATH": str(where)})
    assert run.returncode == 0 and "has the same bits" in run.stdout, run


@test
def library_wheel_in_an_empty_environment():
    wheels = sorted(ROOT.glob("dist/nibble_optim-*.whl"), key=lambda path: path.stat().st_mtime)
    if not wheels:
        raise Skip("no wheel; make wheel makes one")
    code = "from nibble_optim import Handle; print(Handle({'preset': 'adamw8'}, [('w', 3, 4, 0, -1)]).describe())"
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([f"{folder}/bin/pip", "install", "-q", "--no-index", "--disable-pip-version-check", wheels[-1]],
                       check=True)
        env = {name: value for name, value in os.environ.items() if name not in ("NIBBLE_OPTIM_LIBRARY", "PYTHONPATH")}
        run = subprocess.run([f"{folder}/bin/python", "-c", code], capture_output=True, text=True, env=env, cwd=folder)
    assert run.returncode == 0 and run.stdout.startswith("adamw  weights bf16:sr"), run


# The optimizer of torch.

def model_of(device="cpu", dtype=None, seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(33, 70), torch.nn.GELU(), torch.nn.Linear(70, 5))
    return model.to(device=device, dtype=dtype or torch.float32)


def batch(model, number):
    torch.manual_seed(1000 + number)
    p = next(model.parameters())
    return torch.randn(32, 33).to(p), torch.randn(32, 5).to(p)


def train(model, optimizer, first, last):
    for number in range(first, last + 1):
        x, y = batch(model, number)
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()


def same(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()))


def make(model, **settings):
    named = settings.get("preset") in MATRIX_PRESETS  # their names say that biases are adamw's
    return nibble_optim.Optimizer(list(model.named_parameters()) if named else model.parameters(),
                                  **{"lr": 1e-2, "seed": 1, **settings})


PRESETS = ("adamw32", "adamw8", "adamw4l", "flash24", "int8w4", "adamw8e", "adafactor8", "came8", "rmnp4")
MATRIX_PRESETS = ("muon", "muon8", "muon4", "galore8", "apollo-mini")


def each_kind():
    for device in DEVICES:
        for dtype in (torch.float32, torch.bfloat16):
            for preset in PRESETS + MATRIX_PRESETS:
                yield device, dtype, preset


@test
def torch_close_to_adamw():
    for device in DEVICES:
        a, b = model_of(device), model_of(device)
        settings = dict(lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8)
        train(a, nibble_optim.Optimizer(a.parameters(), preset="adamw32", **settings), 1, 20)
        train(b, torch.optim.AdamW(b.parameters(), **settings), 1, 20)
        for p, q in zip(a.parameters(), b.parameters()):
            assert (p - q).abs().max() < 20 * 1e-3 * 1e-3, "a thousandth of what 20 steps can move a weight"


@test
def torch_losses_fall_in_every_format():
    for device, dtype, preset in each_kind():
        model = model_of(device, dtype)
        matrices = preset in MATRIX_PRESETS  # whose updates do not shrink with the gradient: lr has to
        optimizer = make(model, preset=preset, lr=2e-2 if matrices else 1e-2)
        x, y = batch(model, 1)
        losses = []
        for number in range(160 if matrices else 40):
            if matrices:
                optimizer.param_groups[0]["lr"] = 2e-2 * (1 - number / 160)
            optimizer.zero_grad()
            loss = ((model(x) - y) ** 2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.2 * losses[0], (device, dtype, preset, losses[0], losses[-1])


@test
def torch_state_dict_to_the_bit():
    for device, dtype, preset in each_kind():
        a = model_of(device, dtype)
        first = make(a, preset=preset)
        train(a, first, 1, 3)
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        file.seek(0)
        b = copy.deepcopy(a)
        second = make(b, preset=preset)
        second.load_state_dict(state_dict=torch.load(file, weights_only=True))
        c, third = copy.deepcopy((a, first))
        for model, optimizer in ((a, first), (b, second), (c, third)):
            train(model, optimizer, 4, 6)
        assert same(a, b) and same(a, c), (device, dtype, preset)
        for p, q in zip(a.parameters(), b.parameters()):
            for name, value in first.state[p].items():
                assert torch.equal(value, second.state[q][name]), (device, dtype, preset, name)


@test
def torch_cpu_and_gpu_are_equal():
    if len(DEVICES) < 2:
        raise Skip("no GPU")
    for dtype in (torch.float32, torch.bfloat16):
        for preset in PRESETS:
            models = [model_of(device, dtype) for device in DEVICES]
            optimizers = [make(model, preset=preset) for model in models]
            for number in range(1, 5):
                for model, optimizer in zip(models, optimizers):
                    for i, p in enumerate(model.parameters()):
                        torch.manual_seed(100 * number + i)
                        p.grad = torch.randn(p.shape).to(p)
                    optimizer.step()
            for p, q in zip(models[0].parameters(), models[1].parameters()):
                assert torch.equal(p, q.cpu()), (dtype, preset)
                for name, value in optimizers[0].state[p].items():
                    assert torch.equal(value, optimizers[1].state[q][name].cpu()), (dtype, preset, name)


@test
def torch_groups_schedulers_closures_hooks():
    for device in DEVICES:
        model = model_of(device)
        groups = [{"params": [model[0].weight, model[2].weight], "lr": 1e-2, "weight_decay": 0.1},
                  {"params": [model[0].bias, model[2].bias], "weight_decay": 0.0, "lr": torch.tensor(5e-3)}]
        optimizer = nibble_optim.Optimizer(groups, preset="adamw32")
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5 ** epoch)
        calls = []
        optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
        optimizer.register_step_post_hook(lambda *_: calls.append("post"))
        reference = copy.deepcopy(model)
        same_groups = [{"params": [reference[0].weight, reference[2].weight], "lr": 1e-2, "weight_decay": 0.1},
                       {"params": [reference[0].bias, reference[2].bias], "weight_decay": 0.0, "lr": 5e-3}]
        plain = torch.optim.AdamW(same_groups, betas=(0.9, 0.95))
        plain_scheduler = torch.optim.lr_scheduler.LambdaLR(plain, lambda epoch: 0.5 ** epoch)
        for number in range(1, 4):
            for m, o, s in ((model, optimizer, scheduler), (reference, plain, plain_scheduler)):
                def closure():
                    o.zero_grad()
                    x, y = batch(m, number)
                    loss = ((m(x) - y) ** 2).mean()
                    loss.backward()
                    return loss
                assert o.step(closure).item() > 0
                s.step()
        assert calls == ["pre", "post"] * 3
        for p, q in zip(model.parameters(), reference.parameters()):
            assert (p - q).abs().max() < 3e-5, "a thousandth of what three steps can move a weight"


@test
def torch_missing_gradients_and_new_groups():
    for device in DEVICES:
        model, extra = model_of(device), torch.nn.Parameter(torch.ones(7, device=device))
        optimizer = make(model, preset="adamw8")
        train(model, optimizer, 1, 2)
        optimizer.add_param_group({"params": [extra], "lr": 1e-1})
        before = model[0].weight.clone()
        model[0].weight.grad = None
        extra.grad = torch.ones_like(extra)
        optimizer.step()
        assert torch.equal(before, model[0].weight) and (extra < 1).all()
        assert optimizer.state[model[0].weight]["step"] == 2 and optimizer.state[model[0].bias]["step"] == 3
        assert optimizer.state[extra]["step"] == 1
        # States that began at different steps come back to the bit too.
        saved = copy.deepcopy(optimizer.state_dict())
        again = copy.deepcopy(list(model.parameters()) + [extra])
        second = nibble_optim.Optimizer(again[:-1], preset="adamw8", lr=1e-2, seed=1)
        second.add_param_group({"params": [again[-1]], "lr": 1e-1})
        second.load_state_dict(saved)
        for params, o in ((list(model.parameters()) + [extra], optimizer), (again, second)):
            for p in params:
                p.grad = torch.full_like(p, 0.25)
            o.step()
        assert all(torch.equal(p, q) for p, q in zip(list(model.parameters()) + [extra], again))


@test
def torch_cuda_graph():
    """Replays of a captured training step, with a learning rate that changes, are the steps that follow; so are eager
    steps between replays."""
    if len(DEVICES) < 2:
        raise Skip("no GPU")
    rate = lambda number: 1e-2 / number
    kinds = [{"preset": preset} for preset in (*PRESETS, "muon", "muon8", "muon4")]
    kinds += [{"preset": "muon", "rule": "normuon"}, {"rule": "adam-mini"}, {"preset": "adamw8", "limit_growth": 1.001}]
    for dtype in (torch.float32, torch.bfloat16):
        for settings in kinds:
            lr = torch.tensor(1e-2, device="cuda")
            a, b = model_of("cuda", dtype), model_of("cuda", dtype)
            first, second = make(a, lr=lr, capturable=True, **settings), make(b, **settings)
            x, y = batch(a, 1)
            stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()

            def step(model, optimizer):
                optimizer.zero_grad()
                ((model(x) - y) ** 2).mean().backward()
                optimizer.step()

            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for number in range(1, 4):
                    lr.fill_(rate(number))
                    step(a, first)
            torch.cuda.current_stream().wait_stream(stream)
            first.zero_grad()
            with torch.cuda.graph(graph):
                step(a, first)
            for number in range(4, 12):
                lr.fill_(rate(number))
                if number == 8:
                    step(a, first)
                else:
                    graph.replay()
            for number in range(1, 12):
                second.param_groups[0]["lr"] = float(torch.tensor(rate(number)))
                step(b, second)
            assert same(a, b), (dtype, settings)
            saved, want = first.state_dict(), second.state_dict()
            assert saved["param_groups"][0]["steps"] == want["param_groups"][0]["steps"] == 11
            for i, states in want["state"].items():
                assert all(torch.equal(value, saved["state"][i][name]) for name, value in states.items()), (settings, i)
    model = model_of("cuda")
    for settings, capturable, kind, words in [
            ({"preset": "adamw8"}, False, RuntimeError, "capturable=True"),
            ({"preset": "galore8"}, True, ValueError, "the host decides"),
            ({"preset": "adamw8", "m": "dyn8/rank1"}, True, ValueError, "scales of whole tensors"),
            ({"preset": "adamw16"}, True, RuntimeError, "before any was taken")]:
        optimizer, graph = make(model, capturable=capturable, **settings), torch.cuda.CUDAGraph()
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        if settings["preset"] != "adamw16":
            optimizer.step()

        def captured():
            with torch.cuda.graph(graph):
                optimizer.step()
        raises(kind, words, captured)


@test
def torch_limit_growth():
    for device in DEVICES:
        runs = []
        for _ in range(2):
            model = model_of(device, torch.bfloat16)
            runs.append((model, make(model, preset="adamw8", limit_growth=1.001)))
        train(*runs[0], 1, 3)
        runs[1][0].load_state_dict(runs[0][0].state_dict())
        runs[1][1].load_state_dict(copy.deepcopy(runs[0][1].state_dict()))
        for run in runs:
            train(*run, 4, 6)
        assert same(runs[0][0], runs[1][0])
        free = model_of(device, torch.bfloat16)
        train(free, make(free, preset="adamw8"), 1, 6)
        assert not same(free, runs[0][0]), "nothing was limited"


@test
def torch_matrices_and_the_rest():
    """Groups for a rule of matrices and for what it leaves; a new group; a schedule; resumed to the bit."""
    def build(model):
        matrices = [p for p in model.parameters() if p.dim() > 1]
        return nibble_optim.Optimizer([{"params": matrices, "preset": "muon4"},
                                       {"params": [p for p in model.parameters() if p.dim() == 1], "lr": 1e-3}],
                                      preset="adamw8", lr=2e-2, seed=2, rank_gap=2)

    def steps(model, optimizer, first, last, extra=None):
        for number in range(first, last + 1):
            optimizer.param_groups[0]["lr"] = 2e-2 / number
            x, y = batch(model, number)
            optimizer.zero_grad()
            ((model(x) - y) ** 2).mean().backward()
            if extra is not None:
                extra.grad = torch.sin(number + torch.arange(64.0 * 40, device=x.device).view(64, 40) ** 2)
            optimizer.step()

    for device in DEVICES:
        a = model_of(device, torch.bfloat16)
        optimizer = build(a)
        steps(a, optimizer, 1, 2)
        lines = " ".join(optimizer.describe())
        assert lines.count("muon") == 1 and lines.count("adamw") == 1, lines
        extra = torch.nn.Parameter(torch.ones(64, 40, device=device))
        optimizer.add_param_group({"params": [extra], "preset": "galore8"})
        steps(a, optimizer, 3, 3, extra)
        assert (extra != 1).any()
        b, again = copy.deepcopy(a), torch.nn.Parameter(extra.detach().clone())
        second = build(b)
        second.add_param_group({"params": [again], "preset": "galore8"})
        second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        steps(a, optimizer, 4, 6, extra)
        steps(b, second, 4, 6, again)
        assert same(a, b) and torch.equal(extra, again), device
    model = model_of()
    raises(ValueError, "is a vector", lambda: train(model, make(model, rule="muon"), 1, 1))
    backward = make(model, preset="muon").step_in_backward()
    raises(ValueError, "takes all matrices", lambda: train(model, backward, 1, 1))


@test
def torch_gradients_of_other_kinds():
    for device in DEVICES:
        p = torch.nn.Parameter(torch.ones(64, 48, dtype=torch.bfloat16, device=device))
        q = torch.nn.Parameter(torch.ones(64, 48, dtype=torch.bfloat16, device=device))
        a, b = (nibble_optim.Optimizer([x], lr=1e-2) for x in (p, q))
        grad = torch.randn(48, 64, device=device).to(torch.bfloat16)
        p.grad, q.grad = grad.t(), grad.t().contiguous()
        a.step(), b.step()
        assert torch.equal(p, q)
        image = torch.nn.Parameter(torch.randn(8, 4, 3, 3, device=device).to(memory_format=torch.channels_last))
        optimizer = nibble_optim.Optimizer([image], preset="adamw32", lr=1e-1, weight_decay=0.0)
        before = image.detach().clone()
        image.grad = torch.sign(before).contiguous()
        optimizer.step()
        assert (before - image - 1e-1 * torch.sign(before)).abs().max() < 1e-5
        # A bf16 tensor whose memory is not aligned, and one of no elements.
        whole = torch.ones(101, dtype=torch.bfloat16, device=device)
        odd, none = torch.nn.Parameter(whole[1:]), torch.nn.Parameter(torch.ones(0, device=device))
        optimizer = nibble_optim.Optimizer([odd], lr=1e-1)
        odd.grad = torch.ones_like(odd)
        optimizer.step()
        assert (odd < 1).all() and whole[0] == 1
        optimizer = nibble_optim.Optimizer([none], lr=1e-1)
        none.grad = torch.ones_like(none)
        optimizer.step()


@test
def torch_gradients_change_between_steps():
    """What the optimizer remembers of the last step's tensors: after any change a step is that of an optimizer which
    remembers nothing."""
    def steps(remember):
        torch.manual_seed(3)
        params = [torch.nn.Parameter(torch.randn(shape).bfloat16()) for shape in ((8, 16), (5,), (40, 64))]
        optimizer = nibble_optim.Optimizer(params, preset="adamw8", weights="bf16+16", lr=1e-2, seed=1)
        for number in range(14):
            for i, p in enumerate(params):
                p.grad = torch.randn(p.shape).bfloat16()
                if number == 3 and i == 0:
                    p.grad = torch.randn(16, 8).bfloat16().t()  # not contiguous
                if number == 5 and i == 1:
                    p.grad = None
                if number == 7 and i == 2:
                    p.grad.data = p.grad.float()  # torch lets this pass
                if number == 9 and i == 2:
                    p.data = p.data.clone()  # elsewhere, with the same values
                if number == 11 and i == 0:
                    with torch.no_grad():
                        p.mul_(0.5)
            if not remember and optimizer._parts:
                optimizer._parts[0].layout, optimizer._parts[0].where = None, None
                optimizer._parts[0].own_counters = False
            optimizer.step()
            if number == 13 and remember and lists.Layout.of(params):
                assert optimizer._parts[0].layout is not None, "no layout is remembered, so nothing was tested"
        return [p.detach() for p in params], optimizer.state_dict()["state"]

    weights, states = zip(*(steps(remember) for remember in (True, False)))
    assert all(torch.equal(a, b) for a, b in zip(*weights))
    assert all(torch.equal(a, states[1][i][name]) for i in range(3) for name, a in states[0][i].items())
    whole = torch.randn(64).bfloat16()
    views = [whole[:32].detach().requires_grad_(), whole[32:].detach().requires_grad_()]  # of one version counter
    copies = [view.detach().clone().requires_grad_() for view in views]
    for params in (views, copies):
        optimizer = nibble_optim.Optimizer(params, preset="adamw8", weights="bf16+16", lr=1e-3, seed=1)
        for _ in range(6):
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()
        assert optimizer._parts[0].own_counters is (params is copies)
    assert all(torch.equal(a, b) for a, b in zip(views, copies))
    tensors = [torch.zeros(2, 3), torch.zeros(4, dtype=torch.bfloat16)]
    assert lists.versions(tensors) == [0, 0] and lists.addresses(tensors) == [t.data_ptr() for t in tensors]
    assert lists.same_addresses(tensors, lists.addresses(tensors), [0, 1])
    assert not lists.same_addresses(tensors[::-1], lists.addresses(tensors), [0, 1])


@test
def torch_grad_scaler_skips_steps():
    for device in DEVICES:
        model = model_of(device)
        optimizer = make(model, preset="adamw8")
        scaler = torch.amp.GradScaler(device, init_scale=4.0)
        before = copy.deepcopy(model)
        x, y = batch(model, 1)
        scaler.scale(((model(x) - y) ** 2).mean() * float("inf")).backward()
        scaler.step(optimizer)
        scaler.update()
        assert same(model, before) and scaler.get_scale() == 2.0
        optimizer.zero_grad()
        scaler.scale(((model(x) - y) ** 2).mean()).backward()
        scaler.step(optimizer)
        assert not same(model, before)


@test
def torch_mistakes_are_exceptions():
    p, q = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(12, 8))
    q.grad = torch.ones_like(q)
    for kind, words, function in [
            (ValueError, "did you mean adamw8?", lambda: nibble_optim.Optimizer([p], preset="adamw9")),
            (ValueError, "lr: -1", lambda: nibble_optim.Optimizer([p], lr=-1.0)),
            (ValueError, "c_atn.weight matches no parameter", lambda: nibble_optim.Optimizer(
                [("h.0.c_attn.weight", q)], rule="muon", stacked="c_attn.*:3; c_atn.weight:3").step()),
            (ValueError, "betas: 1", lambda: nibble_optim.Optimizer([p], betas=(1.0, 0.9))),
            (ValueError, "betas=(0.9,) were found; give", lambda: nibble_optim.Optimizer([p], betas=(0.9,))),
            (ValueError, "nesterov: 'off' was found; give True or False",
             lambda: nibble_optim.Optimizer([q], rule="rmnp", nesterov="off")),
            (ValueError, "lr='x', ", lambda: nibble_optim.Optimizer([p], lr="x")),
            (TypeError, "float64", lambda: nibble_optim.Optimizer([torch.nn.Parameter(p.double())])),
            (TypeError, "float16", lambda: nibble_optim.Optimizer([torch.nn.Parameter(p.half())]))]:
        raises(kind, words, function)
    for words, settings in [("momentum changes nothing", dict(momentum=0.9)), ("", dict(rule="rmnp", momentum=0.9)),
                            ("nothing without rule galore, and the optimizer has fira", dict(rule="fira", rank_basis="bf16")),
                            ("", dict(overrides="0.0: rule=muon", ns_steps=3))]:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            nibble_optim.Optimizer([q], **settings).step()
        assert len(said) == bool(words) and words in "".join(str(one.message) for one in said), (settings, said)
    absent = torch.nn.Parameter(torch.ones(4, device="meta"))
    absent.grad = torch.ones_like(absent)
    raises(ValueError, "on meta", nibble_optim.Optimizer([absent]).step)
    embedding = torch.nn.Embedding(10, 4, sparse=True)
    optimizer = nibble_optim.Optimizer(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    raises(RuntimeError, "sparse", optimizer.step)
    model = model_of()
    optimizer = make(model, preset="adamw8")
    train(model, optimizer, 1, 1)
    for other, words in [(make(model_of(), preset="adamw4"), "preset='adamw8'"),
                         (make(torch.nn.Linear(3, 3), preset="adamw8"), "parameters and the"),
                         (nibble_optim.Optimizer([torch.nn.Parameter(torch.ones(n)) for n in (5000, 70, 1, 5)],
                                                 preset="adamw8", lr=1e-2), "shapes")]:
        raises(ValueError, words, lambda: other.load_state_dict(optimizer.state_dict()))
    plain = torch.optim.AdamW(model.parameters())
    raises((ValueError, KeyError), "", lambda: optimizer.load_state_dict(plain.state_dict()))
    train(model, optimizer, 2, 2)
    model[0].weight.data = torch.ones(3, 33)
    model[0].weight.grad = torch.ones(3, 33)
    raises(RuntimeError, "replaced", optimizer.step)


@test
def torch_weights_written_by_others():
    model = model_of(dtype=torch.bfloat16)
    optimizer = make(model, preset="adamw32", lr=0.0)
    train(model, optimizer, 1, 1)
    with torch.no_grad():
        model[0].weight.fill_(3.0)
    train(model, optimizer, 2, 2)
    assert (model[0].weight == 3.0).all(), "the master has followed"


@test
def torch_step_in_backward():
    for device in DEVICES:
        for preset in ("adamw8", "adamw32"):
            models = [model_of(device, torch.bfloat16) for _ in range(2)]
            optimizers = [make(model, preset=preset) for model in models]
            optimizers[1].step_in_backward()
            for model, optimizer in zip(models, optimizers):
                train(model, optimizer, 1, 4)
            assert same(*models), (device, preset)
            assert all(p.grad is None for p in models[1].parameters())


@test
def torch_lines_of_the_readme():
    text = (ROOT / "optim" / "python" / "README.md").read_text()
    block = text[text.index("    import torch"):].split("\n\n")[0]
    code, _, shown = "\n".join(line[4:] for line in block.split("\n")).partition("   # ")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert printed.getvalue().strip() == shown, printed.getvalue()


@test
def torch_compat():
    from nibble_optim.compat import bitsandbytes, flashoptim, torchao
    peers = [getattr(torchao, n) for n in ("Adam8bit", "AdamW8bit", "Adam4bit", "AdamW4bit", "AdamFp8", "AdamWFp8")] + \
        [getattr(bitsandbytes.optim, n) for n in ("Adam", "AdamW", "Adam8bit", "AdamW8bit", "Lion", "Lion8bit",
                                                  "PagedAdamW8bit", "AdEMAMix8bit")] + \
        [flashoptim.FlashAdam, flashoptim.FlashAdamW, flashoptim.FlashLion]
    for peer in peers:
        model = model_of()
        before = copy.deepcopy(model)
        optimizer = peer(model.parameters(), lr=1e-3, weight_decay=0.01)
        train(model, optimizer, 1, 2)
        assert not same(model, before), peer.__name__
        again = peer(before.parameters(), lr=1e-3, weight_decay=0.01)
        train(before, again, 1, 2)
        assert same(model, before), peer.__name__
        again.load_state_dict(optimizer.state_dict())
    raises(ValueError, "amsgrad", lambda: torchao.AdamW8bit(model.parameters(), amsgrad=True))
    # bitsandbytes' rule for 8-bit states counts the elements of the whole tensor.
    big = [torch.nn.Parameter(torch.ones(n)) for n in (4095, 4096)]
    optimizer = bitsandbytes.AdamW8bit(big)
    for p in big:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert [optimizer.state[p]["m"].dtype for p in big] == [torch.float32, torch.uint8]


@test
def torch_dtensor_shards():
    """With fully_shard's kind of cuts, on GPUs if there are enough, states and weights are those of one process."""
    run_ranks("test_torch_shards.py", (1, 2, 3))


@test
def torch_checkpoint_on_other_ranks():
    """A distributed checkpoint of two ranks continues on one and on three."""
    run_ranks("test_torch_ranks.py", (2, 1, 3))


def run_ranks(name, counts):
    """Runs a script on so many ranks, one count after the other, with one folder."""
    with tempfile.TemporaryDirectory() as folder:
        for count in counts:
            command = [sys.executable, str(ROOT / "dev" / "unit" / name), folder]
            ranks = [subprocess.Popen([*command, str(rank), str(count)], stdout=subprocess.PIPE,
                                      stderr=subprocess.STDOUT, text=True) for rank in range(count)]
            texts = [rank.communicate(timeout=240)[0] for rank in ranks]
            assert all(rank.returncode == 0 for rank in ranks), "\n".join(texts)


@test
def torch_converts_train_checkpoints():
    """A checkpoint of ./train goes into a torch optimizer and out again, byte for byte."""
    program = ROOT / "train"
    if not program.exists():
        raise Skip("no ./train")
    for preset in ("adamw8", "muon8", "galore8"):
        converts(program, preset)


def converts(program, preset):
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run([program, "--device", "cpu", "--preset", preset, "--steps", "2", "--val-every", "0",
                              "--sample-every", "0", "--run", f"{folder}/run"], capture_output=True, text=True,
                             env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=folder)
        assert run.returncode == 0, run.stderr
        checkpoint = next(pathlib.Path(folder, "run").glob("step_*"))
        from nibble_optim import convert
        with open(checkpoint / "model.safetensors", "rb") as file:
            header = __import__("json").loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        header.pop("__metadata__", None)
        layers = 1 + max(int(name.split("h.")[1].split(".")[0]) for name in header if "h." in name)
        prefix = "transformer." if any(name.startswith("transformer.") for name in header) else ""
        block = [f"{part}.{kind}" for part in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
                 for kind in ("weight", "bias")]
        names = ["wte.weight", "wpe.weight", *(f"h.{i}.{b}" for i in range(layers) for b in block), "ln_f.weight",
                 "ln_f.bias"]
        # Linear weights are (outputs, inputs) in ./train and in torch; the file has GPT-2's order, the other one.
        shapes = [header[prefix + name]["shape"][::-1 if "c_" in name else 1] for name in names]
        params = [torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for shape in shapes]
        optimizer = nibble_optim.Optimizer(list(zip(names, params)), preset=preset, seed=1, stacked="c_attn.weight:3")
        for p in params:
            p.grad = torch.zeros_like(p)
        optimizer.step()
        convert.from_train(optimizer, checkpoint / "optimizer.safetensors", 2)
        convert.to_train(optimizer, f"{folder}/back.safetensors")
        here, back = convert._read(checkpoint / "optimizer.safetensors"), convert._read(f"{folder}/back.safetensors")
        assert set(here) == set(back)
        assert all(here[n][0] == back[n][0] and torch.equal(here[n][1], back[n][1]) for n in here)


@test
def torch_rules_are_those_of_peers():
    """torch's AdamW and Adafactor; came-pytorch where it is installed."""
    check = subprocess.run([sys.executable, str(ROOT / "dev" / "reference" / "check_rules.py")], stdout=subprocess.PIPE,
                           stderr=subprocess.STDOUT, text=True)
    assert check.returncode == 0 and "ok    adafactor" in check.stdout, check.stdout


@test
def torch_python_takes_little_time():
    report = []
    for count in (148, 580):
        params = [torch.nn.Parameter(torch.zeros(4)) for _ in range(count)]
        optimizer = nibble_optim.Optimizer(params, preset="adamw8")
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        part, seconds = optimizer._parts[0], []
        part.handle.step = lambda *_: None  # without the library's own work
        for _ in range(50):
            begin = time.perf_counter()
            optimizer.step()
            seconds.append(time.perf_counter() - begin)
        report.append(f"{1e6 * min(seconds):.0f} us for {count} tensors")
        assert min(seconds) < 1e-3, report[-1]
    return ", ".join(report)


sys.modules["test_torch"] = sys.modules[__name__]
import test_torch_gpu  # noqa: E402,F401  registers its cases


def main():
    picked = sys.argv[2] if len(sys.argv) > 2 and sys.argv[1] == "-k" else ""
    counts = {"ok": 0, "FAIL": 0, "skip": 0}
    for function in TESTS:
        if picked not in function.__name__:
            continue
        begin, note = time.perf_counter(), ""
        try:
            if torch is None and function.__name__.startswith("torch_"):
                raise Skip("torch is not installed")
            verdict, note = "ok", function() or ""
        except Skip as reason:
            verdict, note = "skip", str(reason)
        except BaseException:
            verdict = "FAIL"
            traceback.print_exc(file=sys.stdout)
        counts[verdict] += 1
        print(f"{verdict:5} {function.__name__:48} {time.perf_counter() - begin:5.2f} s  {note}", flush=True)
    print(f"{counts['ok']} passed, {counts['FAIL']} failed, {counts['skip']} skipped")
    return counts["FAIL"] > 0


if __name__ == "__main__":
    sys.exit(main())
