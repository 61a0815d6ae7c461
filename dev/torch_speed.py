"""Times whole optimizer steps in torch on the tensors of GPT-2: nibble_optim beside torch's optimizers and, where they
are installed, bitsandbytes, FlashOptim, torchao, galore-torch and came-pytorch. Parameters and gradients are bf16. It
prints tables in Markdown: of rules that read single elements, and of those that read whole rows and matrices.

    make lib && python3 dev/torch_speed.py [--models gpt2,gpt2-xl] [--rules elements,whole] [--seconds 240]
    python3 dev/torch_speed.py --device cpu --small      # checks the script itself, on tensors of 48 channels

Peers for torch 2.11 and Python 3.12 are torchao 0.18.0, bitsandbytes 0.50.2 (it needs packaging), flashoptim 0.1.4,
galore-torch 1.0 (it needs bitsandbytes and transformers) and came-pytorch 0.1.3. The row of a missing one says so.

Columns: milliseconds of a step between two events on the stream, of a step on the wall clock with synchronisation, and
microseconds until step() returns; medians of 30 steps after 3. "Python us" is what step() of nibble_optim takes when
the library's function does nothing: with the same gradients as in the last step, and with new ones, as backward() makes
them. B/param is what the first steps leave allocated, buffers included. Rules that read matrices update those of the
blocks, and AdamW updates the rest (torch's is fused and keeps bf16 states). GaLore's projectors are made in the first
step, which is not timed. After its seconds it starts no further measurement and says what it left out; one that
compiles at its first step (torchao) may run over."""
import argparse
import gc
import importlib
import pathlib
import sys
import time
from statistics import median_high as median

from problem import Parser, Problem, answered, needed

with needed("torch_speed", "torch"):
    import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "optim" / "python"))
import nibble_optim  # noqa: E402: from the repository
from examples.train_torch import GPT  # noqa: E402: it wants torch

MODELS = {"gpt2": (12, 768), "gpt2-medium": (24, 1024), "gpt2-large": (36, 1280), "gpt2-xl": (48, 1600)}
WARM, STEPS = 3, 30


def shapes(layers, C, vocabulary):
    """Returns names and shapes of a model's parameters."""
    with torch.device("meta"):  # which holds no numbers
        model = GPT(layers, C, 1, 1024, vocabulary)
    return [(name, p.shape) for name, p in model.named_parameters()]


def split(named):
    """Returns the blocks' matrices, and all other parameters."""
    matrices = [p for name, p in named if p.dim() == 2 and name.startswith("h.")]
    rest = [p for name, p in named if not (p.dim() == 2 and name.startswith("h."))]
    return matrices, rest


class Both:
    """One optimizer for the blocks' matrices, and torch's AdamW for the rest."""

    def __init__(self, make, named):
        matrices, rest = split(named)
        self.parts = [make(matrices), torch.optim.AdamW(rest, lr=1e-4, fused=True)]

    def step(self):
        for part in self.parts:
            part.step()


def peer(module, name, **arguments):
    """A function that makes a package's optimizer; where it is missing, that raises ImportError."""
    def make(params):
        found = getattr(importlib.import_module(module), name, None)
        if found is None:
            raise ImportError(f"{module} has no {name}")
        return found(params, **{"lr": 1e-4, "weight_decay": 0.1, **arguments})
    return make


def plain(make):
    """Adapts an optimizer that takes parameters without names."""
    return lambda named: make([p for _, p in named])


def both(make):
    return lambda named: Both(make, named)


def galore(named):
    matrices, rest = split(named)
    projected = dict(params=matrices, rank=min(matrices[0].shape) // 4, update_proj_gap=200, scale=0.25, proj_type="std")
    return peer("galore_torch", "GaLoreAdamW")([dict(params=rest), projected])


def nibble(**arguments):
    return lambda named: nibble_optim.Optimizer(named, lr=1e-4, **arguments)


def elements():
    """Yields names, and functions that make an optimizer of named parameters, for rules that read single elements."""
    for preset in ("adamw8", "adamw8c", "adamwfp8", "adamw4", "adamw4l", "adamw32", "flash24"):
        yield f"nibble {preset}", nibble(preset=preset)
    yield "torch AdamW fused (bf16 states)", plain(peer("torch.optim", "AdamW", fused=True))
    yield "bitsandbytes AdamW8bit", plain(peer("bitsandbytes.optim", "AdamW8bit"))
    yield "flashoptim FlashAdamW", plain(peer("flashoptim", "FlashAdamW"))
    for name in ("AdamW8bit", "AdamWFp8", "AdamW4bit"):
        yield f"torchao {name}", plain(peer("torchao.optim", name, bf16_stochastic_round=True))


def whole():
    """Yields the same for rules that read rows and matrices."""
    for preset in ("adafactor8", "came8", "rmnp4"):
        yield f"nibble {preset}", nibble(preset=preset)
    yield "torch Adafactor (foreach)", plain(peer("torch.optim", "Adafactor", foreach=True))
    yield "came-pytorch CAME", plain(peer("came_pytorch", "CAME", betas=(0.9, 0.999, 0.9999)))
    for preset in ("muon", "muon8", "muon4"):
        yield f"nibble {preset}", nibble(preset=preset)
    yield "nibble normuon", nibble(preset="muon", rule="normuon")
    yield "torch Muon, and AdamW", both(peer("torch.optim", "Muon"))
    for preset in ("galore8", "apollo-mini"):
        yield f"nibble {preset}", nibble(preset=preset)
    yield "galore-torch GaLoreAdamW", galore


TABLES = {"elements": ("single elements", elements), "whole": ("rows and matrices", whole)}


class Clock:
    """Times work on one device. The CPU has no events; its work is done when the call returns."""

    def __init__(self, device):
        self.gpu = device == "cuda"

    def wait(self):
        if self.gpu:
            torch.cuda.synchronize()

    def allocated(self):
        return torch.cuda.memory_allocated() if self.gpu else 0

    def step(self, optimizer):
        """Returns milliseconds between events and on the wall clock, and microseconds of the call."""
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2)) if self.gpu else (None, None)
        self.wait()
        begin = time.perf_counter()
        if self.gpu:
            first.record()
        optimizer.step()
        call = time.perf_counter() - begin
        if self.gpu:
            last.record()
        self.wait()
        wall = time.perf_counter() - begin
        return first.elapsed_time(last) if self.gpu else 1e3 * wall, 1e3 * wall, 1e6 * call


def python_share(optimizer, params, clock):
    """Returns microseconds of nibble_optim's step() without the library's function, for old and for new gradients."""
    library, medians = optimizer._parts[0].handle.library, []
    kept = library.nibble_optim_step
    library.nibble_optim_step = lambda *_: 0
    try:
        for new in (False, True):
            times = []
            for _ in range(WARM + STEPS):
                for p in params if new else ():
                    p.grad = None
                for p in params if new else ():
                    p.grad = torch.empty_like(p)
                clock.wait()
                begin = time.perf_counter()
                optimizer.step()
                times.append(1e6 * (time.perf_counter() - begin))
            medians.append(median(times[WARM:]))
    finally:
        library.nibble_optim_step = kept
    return medians


def measure(make, tensors, device):
    clock = Clock(device)
    named = [(name, torch.nn.Parameter(torch.randn(shape, device=device, dtype=torch.bfloat16) * 0.02))
             for name, shape in tensors]
    params = [p for _, p in named]
    for p in params:
        p.grad = torch.randn_like(p) * 1e-3
    clock.wait()
    before = clock.allocated()
    optimizer = make(named)
    for _ in range(WARM):
        optimizer.step()
    clock.wait()
    bytes_each = (clock.allocated() - before) / sum(p.numel() for p in params)
    events, walls, calls = zip(*(clock.step(optimizer) for _ in range(STEPS)))
    shares = python_share(optimizer, params, clock) if hasattr(optimizer, "_parts") else None
    return median(events), median(walls), median(calls), bytes_each, shares


def row(name, make, tensors, device, end):
    if time.time() > end:
        return f"| {name} | left out: no time | | | | |"
    try:
        events, walls, calls, bytes_each, shares = measure(make, tensors, device)
    except ImportError as error:
        return f"| {name} | absent: {error} | | | | |"
    except Exception as error:
        text = " ".join(str(error).split())[:160].replace("|", "/")
        return f"| {name} | failed: {type(error).__name__}: {text} | | | | |"
    finally:
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    share = f"{shares[0]:.0f} / {shares[1]:.0f}" if shares else ""
    used = f"{bytes_each:.2f}" if device == "cuda" else ""
    return f"| {name} | {events:.3f} | {walls:.3f} | {calls:.0f} | {share} | {used} |"


def main():
    parser = Parser(prog="torch_speed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="gpt2,gpt2-xl")
    parser.add_argument("--rules", default="elements,whole")
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="48 channels and 512 tokens: as many tensors, all small")
    a = parser.parse_args()
    for option, known in (("models", MODELS), ("rules", TABLES)):
        for name in getattr(a, option).split(","):
            if name not in known:
                raise Problem(f"--{option}: \"{name}\" was found; known are {', '.join(known)}")
    if a.device == "cuda" and not torch.cuda.is_available():
        raise Problem("no GPU was found; type --device cpu --small to check the script")
    end = time.time() + a.seconds
    where = torch.cuda.get_device_name() if a.device == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}, Python {sys.version.split()[0]}", flush=True)
    for model in a.models.split(","):
        layers, C = MODELS[model]
        tensors = shapes(layers, 48, 512) if a.small else shapes(layers, C, 50304)
        count = sum(torch.Size(shape).numel() for _, shape in tensors)
        for rules in a.rules.split(","):
            read, candidates = TABLES[rules]
            print(f"\n{model}: {len(tensors)} tensors, {count / 1e6:.1f} M elements; rules that read {read}\n")
            print("| optimizer | events ms | wall ms | call us | Python us, old / new gradients | B/param |")
            print("|---|---|---|---|---|---|")
            for name, make in candidates():
                print(row(name, make, tensors, a.device, end), flush=True)


if __name__ == "__main__":
    sys.exit(answered("torch_speed", main))
