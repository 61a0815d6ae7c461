"""Tests of the Python package nibble_optim, and of the library that it calls (test_library.py).

    make lib && python3 dev/unit/test_torch.py [-k SUBSTRING]

What needs torch is skipped where torch is not installed, and what needs a GPU where there is none (cases then run on
the CPU alone).
"""
import contextlib
import copy
import gc
import io
import os
import pathlib
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import unittest.mock

import test_library
from cases import run_cases
from test_library import ROOT, nibble_optim, raises

try:
    import torch
    import torch.distributed.fsdp
except ImportError:
    torch = None

DEVICES = ["cpu"] + (["cuda"] if torch is not None and torch.cuda.is_available() and nibble_optim.gpus() > 0 else [])


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


def parameter(*shape):
    return torch.nn.Parameter(torch.sin(torch.arange(float(torch.Size(shape).numel())) ** 2).view(shape))


def give(params, number=1):
    """Gives the parameters gradients, which depend on a step's number."""
    for i, p in enumerate(params):
        p.grad = torch.cos(number * (i + 1.0) + torch.arange(float(p.numel())) ** 2).view(p.shape).to(p)


def same(a, b):
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters()))


def make(model, **settings):
    named = settings.get("preset") in MATRIX_PRESETS  # their names say that biases are adamw's
    return nibble_optim.Optimizer(list(model.named_parameters()) if named else model.parameters(),
                                  **{"lr": 1e-2, "seed": 1, **settings})


PRESETS = ("adamw32", "adamw8", "adamw4l", "flash24", "int8w4", "adamw8e", "adafactor8", "came8", "rmnp4")
MATRIX_PRESETS = ("muon", "muon8", "muon4", "galore8", "apollo-mini")


def test_torch_cuda_graph():
    """Replays of a captured training step, with a learning rate that changes, are the steps that follow; so are eager
    steps between replays."""
    if len(DEVICES) < 2:
        return "skipped: no GPU"
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
            other = model_of("cuda", dtype)
            other.dropped = make(other, **settings)
            step(other, other.dropped)
            other.dropped.itself = other.dropped  # the garbage collector frees it, during the capture
            del other
            with torch.cuda.graph(graph):
                gc.collect()
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


def change_gradient(view):
    """The gradient becomes `view` of its own memory, which holds finite numbers in any type. torch lets .data pass."""
    def change(p, memory):
        p.grad.data = view(memory)
    return change


def change_object(change):
    """The gradient stays the object that it is."""
    return lambda p, _: change(p.grad)


def turn(p, _):
    """Trains on with a transposed weight: the backward pass gives gradients the parameter's strides."""
    p.data = p.data.t()
    p.grad = torch.ones(16, 16).bfloat16().t()


def replace(name, value):
    return lambda p, _: setattr(p, name, value(p))


# Each row names a change that other code may make to a parameter of 16 x 16 in bf16 between two steps, makes it, and has
# a word of the refusal. Gradients lie in `memory` of 512 numbers. "at its address": comparing addresses sees no change.
CHANGES = [
    ("nothing", lambda *_: None, None),
    ("gradient elsewhere", replace("grad", lambda p: p.grad.clone()), None),
    ("gradient not contiguous", replace("grad", lambda p: p.grad.clone().t()), None),
    ("another at its address", change_gradient(lambda memory: memory[:256].view(16, 16)), None),
    ("another at its address, transposed", replace("grad", lambda p: p.grad.detach().t()), None),
    ("another at its address, in fp32", change_gradient(lambda memory: memory.view(torch.float32).view(16, 16)), None),
    ("another at its address, with holes", change_gradient(lambda memory: memory.view(16, 32)[:, :16]), None),
    ("another at its address, shorter", change_gradient(lambda memory: memory[:128].view(8, 16)), "of shape (8, 16)"),
    ("in fp32", change_object(lambda grad: setattr(grad, "data", grad.float())), None),
    ("transposed in place", change_object(lambda grad: grad.t_()), None),
    ("resized to more", change_object(lambda grad: grad.resize_(16, 17)), "of shape (16, 17)"),
    ("set to others' memory", change_object(lambda grad: grad.set_(torch.ones(16, 16).bfloat16())), None),
    ("sparse", replace("grad", lambda p: p.grad.to_sparse()), "sparse gradient"),
    ("parameter elsewhere, in fp32", replace("data", lambda p: p.data.float()), "has been replaced"),
    ("parameter elsewhere, shorter", replace("data", lambda p: p.data[:8].clone()), "has been replaced"),
    ("parameter elsewhere, transposed", replace("data", lambda p: p.data.clone().t()), "has been replaced"),
    ("parameter at its address, transposed", turn, "has been replaced"),
    ("parameter frozen", lambda p, _: p.requires_grad_(False), None)]


def steps_with_a_change(change, remember):
    """Returns what seven steps leave; the change comes before the fifth. Gradients are the same objects from step to step.
    `remember`: as users step; otherwise the optimizer has to look at everything anew."""
    torch.manual_seed(3)
    params = [torch.nn.Parameter(torch.randn(shape).bfloat16()) for shape in ((5,), (16, 16), (40, 64))]
    optimizer = nibble_optim.Optimizer(params, preset="adamw8", weights="bf16+16", lr=1e-2, seed=1)
    memory = torch.zeros(512).bfloat16()
    for p in params:
        p.grad = memory[:256].view(16, 16) if p.shape == (16, 16) else torch.zeros_like(p)
    for number in range(1, 8):
        memory.copy_(torch.randn(512))
        for p in params:
            if p.grad is not None and not (p.shape == (16, 16) and number > 4):
                p.grad.copy_(torch.randn(p.shape))
        if number == 5:
            change(params[1], memory)
        if optimizer._parts and not remember:
            optimizer._parts[0].where = optimizer._parts[0].layout = None
        elif optimizer._parts:
            assert number < 3 or number > 5 or optimizer._parts[0].layout, "nothing is remembered, so nothing is tested"
        optimizer.step()
    versions = [p._version for p in params]
    return versions, [p.detach() for p in params], optimizer.state_dict()["state"]


def test_torch_changes_between_steps():
    """What the optimizer remembers of the last step's tensors: after any change a step is that of an optimizer which
    remembers nothing, or is refused."""
    for name, change, refusal in CHANGES:
        if refusal:
            for remember in (True, False):
                raises((RuntimeError, TypeError), refusal, lambda: steps_with_a_change(change, remember))
            continue
        (versions, weights, states), (again, want, others) = (steps_with_a_change(change, remember)
                                                              for remember in (True, False))
        assert versions == again and versions[0] == 7, (name, versions, again)
        assert all(torch.equal(a, b) for a, b in zip(weights, want)), name
        assert all(torch.equal(a, others[i][key]) for i in range(3) for key, a in states[i].items()), name


def test_torch_is_adamw():
    """Parameters of two groups move as torch's AdamW moves them, where each counts its steps. Schedules, closures and hooks
    are torch's. Sets of missing gradients stay, change and come back; in the second run a first gradient comes late."""
    sets = [(), (1,), (1,), (1,), (), (0, 3), (0, 3), (2,), (1,), (1,), (2,), (0, 3), (), (), (0, 1, 2), (0, 1, 2)]
    for device in DEVICES:
        for missing in (sets, [(2,), (2,), *sets]):
            steps_of_adamw(device, missing)


def steps_of_adamw(device, missing):
    torch.manual_seed(4)
    mine = [torch.nn.Parameter(torch.randn(shape, device=device)) for shape in ((5,), (16, 16), (16, 16), (7, 3))]
    theirs = copy.deepcopy(mine)
    first, second = (make([{"params": params[:2], "weight_decay": 0.0}, {"params": params[2:], "lr": lr}],
                          lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95), **more)
                     for make, params, lr, more in (
                         (nibble_optim.Optimizer, mine, torch.tensor(3e-3), {"preset": "adamw32"}),
                         (torch.optim.AdamW, theirs, 3e-3, {})))
    calls = []
    first.register_step_pre_hook(lambda *_: calls.append("pre"))
    first.register_step_post_hook(lambda *_: calls.append("post"))
    schedulers = [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch)) for optimizer in (first, second)]

    for number, without in enumerate(missing):
        def closure():
            calls.append("closure")
            assert torch.is_grad_enabled()
            for i, (p, q) in enumerate(zip(mine, theirs)):
                p.grad = None if i in without else torch.randn_like(p)
                q.grad = None if i in without else p.grad.clone()
            return number

        assert first.step(closure) == number
        second.step()
        for scheduler in schedulers:
            scheduler.step()
        # A thousandth of what these steps can move a weight.
        assert all((p - q).abs().max() < 16e-6 for p, q in zip(mine, theirs)), number
    assert calls == ["pre", "closure", "post"] * len(missing)
    steps = [sum(i not in without for without in missing) for i in range(4)]
    assert [int(first.state[p]["step"]) for p in mine] == [int(second.state[q]["step"]) for q in theirs] == steps
    again = copy.deepcopy(first)
    assert [int(again.state[p]["step"]) for p in again.param_groups[0]["params"]] == steps[:2]


def test_torch_replays_with_a_missing_gradient():
    """The CPU takes what would be captured at once, as the first replay takes it: only its parameters count it."""
    params = [parameter(4) for _ in range(3)]
    optimizer = nibble_optim.Optimizer(params, preset="adamw8", capturable=True)
    give(params)
    optimizer.step()
    optimizer._parts[0].step([params[0].grad, None, params[2].grad], optimizer.param_groups, 2, captured=True)
    states = optimizer.state_dict()["state"]
    assert [int(states[i]["step"]) for i in range(3)] == [2, 1, 2]
    optimizer.step()
    assert [int(optimizer.state[p]["step"]) for p in params] == [3, 2, 3]
    assert optimizer.param_groups[0]["steps"] == 3


def test_torch_grad_scaler_skips_steps():
    """A step whose gradients are infinite changes nothing; others are those without a scaler, in fp16 too."""
    for device in DEVICES:
        for dtype in (torch.float32, torch.float16):
            model = model_of(device, dtype)
            optimizer = make(model, preset="adamw8")
            scaler = torch.amp.GradScaler(device, init_scale=4.0)
            before = copy.deepcopy(model)
            x, y = batch(model, 1)
            for factor in (float("inf"), 1.0):
                optimizer.zero_grad()
                scaler.scale(((model(x) - y) ** 2).mean() * factor).backward()
                scaler.step(optimizer)
                scaler.update()
                assert same(model, before) is (factor > 1.0) and scaler.get_scale() == 2.0
            train(before, make(before, preset="adamw8"), 1, 1)
            assert same(model, before) and optimizer.param_groups[0]["steps"] == 1
            assert all(torch.allclose(p.grad, q.grad, 1e-2, 1e-6) for p, q in zip(model.parameters(), before.parameters()))


def steps_with_changes(change, settings, lr=1e-2):
    """Returns a matrix and a weight that lies with channels last, which other code changes between five steps."""
    params = [torch.nn.Parameter(parameter(33, 70).detach().bfloat16()),
              torch.nn.Parameter(parameter(8, 4, 3, 3).detach().bfloat16().contiguous(memory_format=torch.channels_last))]
    optimizer = nibble_optim.Optimizer(params, lr=lr, seed=1, **settings)
    for number in range(1, 6):
        for p in params if number > 1 else ():
            change(p)
        give(params, number)
        optimizer.step()
    return params


def test_torch_weights_written_by_others():
    """What is kept beside a weight follows what others write. The same values elsewhere leave it as it is."""
    for settings in ({"preset": "adamw32"}, {"weights": "bf16+16"}, {"weights": "e4m3:ef"}, {"weights": "lin8:sr"}):
        for fill in (torch.no_grad()(lambda p: p.fill_(3.0)), lambda p: setattr(p, "data", torch.full_like(p, 3.0))):
            assert all((p == 3.0).all() for p in steps_with_changes(fill, settings, lr=0.0)), settings
        still, moved = (steps_with_changes(change, settings)
                        for change in (lambda p: None, lambda p: setattr(p, "data", p.data.clone())))
        assert all(map(torch.equal, still, moved)) and not torch.equal(still[0], parameter(33, 70).bfloat16()), settings


def test_torch_preset_of_a_group():
    """A group's own preset brings its rule and formats; without one, the group has those of the optimizer."""
    for own, kinds in [({"preset": "adamw8"}, [torch.uint8, torch.uint8]), ({"preset": "adamw8", "m": "fp32"},
                                                                            [torch.float32, torch.uint8]),
                       ({"rule": "adamw", "v": "bf16"}, [torch.float32, torch.bfloat16])]:
        weight, bias = parameter(8, 8), parameter(8)
        optimizer = nibble_optim.Optimizer([{"params": [weight]}, {"params": [bias], **own}], rule="muon", m="fp32")
        give([weight, bias])
        optimizer.step()
        assert [optimizer.state[bias][key].dtype for key in "mv"] == kinds and "v" not in optimizer.state[weight], own


def test_torch_overrides_of_some_parts():
    """Overrides name parameters of the whole model, also where each type or parameter is an optimizer of its own; and
    `weights` goes for those whose type allows it."""
    for in_backward in (False, True):
        model = torch.nn.ModuleDict({"fc": torch.nn.Linear(8, 8).bfloat16(), "ln": torch.nn.LayerNorm(8)})
        optimizer = nibble_optim.Optimizer(model.named_parameters(), weights="bf16+16",
                                           overrides="ln | fc.bias: m=fp32; ln: v=fp32 lr=0")
        if in_backward:
            optimizer.step_in_backward()
        model["ln"](model["fc"](torch.randn(3, 8).bfloat16()).float()).square().sum().backward()
        optimizer.step()
        kinds = {name: [optimizer.state[p][key].dtype for key in "mv"] for name, p in model.named_parameters()}
        byte, real = torch.uint8, torch.float32
        assert kinds == {"fc.weight": [byte, byte], "fc.bias": [real, byte], "ln.weight": [real, real],
                         "ln.bias": [real, real]}, kinds
        assert (model["ln"].weight == 1.0).all()
        assert ["weights.low" in optimizer.state[p] for p in model.parameters()] == [True, True, False, False]
    a, b = (torch.nn.Parameter(torch.ones(300)) for _ in "ab")
    optimizer = nibble_optim.Optimizer([{"params": [("a.w", a)]}, {"params": [("b.w", b)], "rule": "lion"}],
                                       preset="adamw8", overrides="a.w: v=fp32")
    for p in (a, b):
        p.grad = torch.ones(300)
    optimizer.step()
    assert optimizer.state[a]["v"].dtype is torch.float32 and "v" not in optimizer.state[b]
    raises(ValueError, "lion keeps no second moment", lambda: nibble_optim.Optimizer(
        [("a.w", a)], rule="lion", overrides="a.w: v=fp32"))


def test_torch_step_inside_a_compiled_function():
    models = [model_of(), model_of()]
    optimizers = [make(model, preset="adamw8") for model in models]
    train(models[0], optimizers[0], 1, 3)
    # torch 2.4 forgets whose step it is where a method alone is compiled.
    step = optimizers[1].step if torch.__version__ >= (2, 6) else lambda: optimizers[1].step()
    compiled = torch.compile(step, backend="eager")
    train(models[1], unittest.mock.Mock(zero_grad=optimizers[1].zero_grad, step=compiled), 1, 3)
    assert same(*models)
    if torch.__version__ >= (2, 7):
        raises(Exception, "calls a C library", torch.compile(lambda: optimizers[0].step(), backend="eager",
                                                                fullgraph=True))


def test_torch_lines_of_the_readme():
    text = (ROOT / "optim" / "python" / "README.md").read_text()
    block = text[text.index("    import torch"):].split("\n\n")[0]
    code, _, shown = "\n".join(line[4:] for line in block.split("\n")).partition("   # ")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {})
    assert printed.getvalue().strip() == shown, printed.getvalue()


def test_torch_dtensor_ranks():
    """With fully_shard's kind of cuts, on GPUs if there are enough, states and weights are those of one process; and a
    distributed checkpoint of two ranks continues on one and on three."""
    if not hasattr(torch.distributed.fsdp, "fully_shard"):
        return "skipped: FSDP2 and its DTensors are in torch from 2.6 on"
    with tempfile.TemporaryDirectory() as folder:
        for count in (2, 1, 3):
            command = [sys.executable, str(ROOT / "dev" / "unit" / "test_torch_ranks.py"), folder]
            ranks = [subprocess.Popen([*command, str(rank), str(count)], stdout=subprocess.PIPE,
                                      stderr=subprocess.STDOUT, text=True) for rank in range(count)]
            texts = [rank.communicate(timeout=480)[0] for rank in ranks]
            assert all(rank.returncode == 0 for rank in ranks), "\n".join(texts)


def test_torch_converts_train_checkpoints():
    """A checkpoint of ./train goes into a torch optimizer and out again, byte for byte. Matrices lie as torch.nn.Linear
    has them, or as transformers' Conv1D, which has to be said."""
    program = next((path for path in (ROOT / "train", ROOT / "build" / "cpu" / "train") if path.exists()), None)
    if not program:
        return "skipped: no ./train"
    from nibble_optim import convert
    for preset in ("adamw8", "muon8", "galore8"):
        with tempfile.TemporaryDirectory() as folder:
            converts(convert, program, preset, folder)


def converts(convert, program, preset, folder):
    run = subprocess.run([program, "--device", "cpu", "--preset", preset, "--steps", "2", "--val-every", "0",
                          "--sample-every", "0", "--run", f"{folder}/run"], capture_output=True, text=True,
                         env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=folder)
    assert run.returncode == 0, run.stderr
    checkpoint = next(pathlib.Path(folder, "run").glob("step_*"))
    with open(checkpoint / "model.safetensors", "rb") as file:
        header = __import__("json").loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    header.pop("__metadata__", None)
    # Linear weights are (outputs, inputs) in ./train and in torch; the file has GPT-2's order, the other one, which
    # is Conv1D's.
    for way, transposed in ((-1, ""), (1, "c_attn.weight|c_fc.weight|c_proj.weight"), (1, "")):
        shapes = [entry["shape"][::way if "c_" in name else 1] for name, entry in header.items()]
        params = [torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for shape in shapes]
        optimizer = nibble_optim.Optimizer(list(zip(header, params)), preset=preset, seed=1, transposed=transposed,
                                           stacked="c_attn.weight:3" if way < 0 or transposed else None)
        give(params)
        optimizer.step()
        if way == 1 and not transposed:
            raises(ValueError, "Conv1D", lambda: convert.to_train(optimizer, f"{folder}/back.safetensors"))
            continue
        convert.from_train(optimizer, checkpoint / "optimizer.safetensors", 2)
        convert.to_train(optimizer, f"{folder}/back.safetensors")
        here, back = (convert._read(path) for path in (checkpoint / "optimizer.safetensors",
                                                       f"{folder}/back.safetensors"))
        assert set(here) == set(back)
        assert all(here[n][0] == back[n][0] and torch.equal(here[n][1], back[n][1]) for n in here)


def test_torch_rules_are_those_of_peers():
    """torch's AdamW and Adafactor; came-pytorch where it is installed."""
    check = subprocess.run([sys.executable, str(ROOT / "dev" / "reference" / "check_rules.py")], stdout=subprocess.PIPE,
                           stderr=subprocess.STDOUT, text=True)
    tested = "ok    torch.adafactor" in check.stdout or not hasattr(torch.optim, "Adafactor")
    assert check.returncode == 0 and tested, check.stdout


def test_torch_python_takes_little_time():
    """Without the library's own work, a step takes a few times as long as reading all p.grad; where the optimizer looks
    at each tensor in Python, it is 20 to 30 times. Both are timed in turns, since a machine's speed changes."""
    report = []
    for count in (148, 580):
        params = [torch.nn.Parameter(torch.zeros(4)) for _ in range(count)]

        def renew():
            for p in params:
                p.grad = torch.ones_like(p)

        def microseconds(function):
            begin = time.perf_counter()
            function()
            return 1e6 * (time.perf_counter() - begin)

        def times_reading(before=lambda: None):
            turns = [(before(), microseconds(optimizer.step), microseconds(lambda: [p.grad for p in params])) for _ in range(51)]
            return statistics.median((step - 20) / reading for _, step, reading in turns)

        optimizer = nibble_optim.Optimizer(params, preset="adamw8")
        renew()
        optimizer.step()
        optimizer._parts[0].handle.step = lambda *_: None
        old, new = times_reading(), times_reading(renew)
        params[3].grad = None
        missing = times_reading()
        report.append(f"{count} tensors: {old:.1f} times reading, new gradients {new:.1f}, one missing {missing:.1f}")
        assert max(old, new, missing) < 14, report[-1]
    return "; ".join(report)


sys.modules["test_torch"] = sys.modules[__name__]
import test_torch_gpu  # noqa: E402
import test_torch_laws  # noqa: E402
import test_torch_peers  # noqa: E402
import test_torch_taken  # noqa: E402


if __name__ == "__main__":
    sys.exit(run_cases({**vars(test_library), **globals(), **vars(test_torch_gpu), **vars(test_torch_laws),
                        **vars(test_torch_peers), **vars(test_torch_taken)},
                       missing=None if torch else "torch is not installed", among="test_torch_"))
