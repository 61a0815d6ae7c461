"""Times whole optimizer steps in torch on the tensors of GPT-2: nibble_optim beside torch's fused AdamW and, where they
are installed, bitsandbytes, FlashOptim and torchao. Parameters and gradients are bf16. It prints tables in Markdown.

    make lib && python3 dev/torch_speed.py [--models gpt2,gpt2-xl] [--seconds 240]
    python3 dev/torch_speed.py --device cpu --small      # checks the script itself, on tensors of 48 channels

Columns: milliseconds of a step between two events on the stream, of a step on the wall clock with synchronisation, and
microseconds until step() returns; medians of 30 steps after 3. "Python us" is what step() of nibble_optim takes when
the library's function does nothing: with the same gradients as in the last step, and with new ones, as backward() makes
them. B/param is what the first step leaves allocated. After its seconds it starts no further measurement and says what
it left out; one that compiles at its first step (torchao) may run over."""
import argparse
import gc
import pathlib
import sys
import time

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "optim" / "python"))
MODELS = {"gpt2": (12, 768), "gpt2-medium": (24, 1024), "gpt2-large": (36, 1280), "gpt2-xl": (48, 1600)}
WARM, STEPS = 3, 30


def shapes(layers, C, vocabulary):
    block = [(C,), (C,), (3 * C, C), (3 * C,), (C, C), (C,), (C,), (C,), (4 * C, C), (4 * C,), (C, 4 * C), (C,)]
    return [(vocabulary, C), (1024, C), *(block * layers), (C,), (C,)]


def candidates():
    """Names and functions that make an optimizer of parameters; one that is not installed raises ImportError."""
    import nibble_optim

    def peer(module, name, **arguments):
        def make(params):
            library = __import__(module, fromlist=[name])
            return getattr(library, name)(params, lr=1e-4, weight_decay=0.1, **arguments)
        return make

    for preset in ("adamw8", "adamw8c", "adamw4l", "adamw32", "flash24"):
        yield f"nibble {preset}", lambda params, preset=preset: nibble_optim.Optimizer(params, preset=preset, lr=1e-4)
    yield "torch AdamW fused (bf16 states)", lambda params: torch.optim.AdamW(params, lr=1e-4, fused=True)
    yield "bitsandbytes AdamW8bit", peer("bitsandbytes.optim", "AdamW8bit")
    yield "flashoptim FlashAdamW", peer("flashoptim", "FlashAdamW")
    yield "torchao AdamW8bit", peer("torchao.optim", "AdamW8bit", bf16_stochastic_round=True)


def median(values):
    return sorted(values)[len(values) // 2]


class Clock:
    """Times on one device; the CPU has no events, and its work is done when the call returns."""

    def __init__(self, device):
        self.gpu = device == "cuda"

    def wait(self):
        if self.gpu:
            torch.cuda.synchronize()

    def allocated(self):
        return torch.cuda.memory_allocated() if self.gpu else 0

    def step(self, optimizer):
        """Milliseconds between events, on the wall clock, and microseconds of the call."""
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
    """Microseconds of nibble_optim's step() without the library's function: for old and for new gradients."""
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
    params = [torch.nn.Parameter(torch.randn(shape, device=device, dtype=torch.bfloat16) * 0.02) for shape in tensors]
    for p in params:
        p.grad = torch.randn_like(p) * 1e-3
    clock.wait()
    before = clock.allocated()
    optimizer = make(params)
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
    except ImportError:
        return f"| {name} | not installed | | | | |"
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="gpt2,gpt2-xl")
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="48 channels and 512 tokens: as many tensors, all small")
    a = parser.parse_args()
    for model in a.models.split(","):
        if model not in MODELS:
            sys.exit(f"torch_speed: --models: \"{model}\" was found; known are {', '.join(MODELS)}")
    if a.device == "cuda" and not torch.cuda.is_available():
        sys.exit("torch_speed: no GPU was found; type --device cpu --small to check the script")
    end = time.time() + a.seconds
    where = torch.cuda.get_device_name() if a.device == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}, Python {sys.version.split()[0]}", flush=True)
    for model in a.models.split(","):
        layers, C = MODELS[model]
        tensors = shapes(layers, 48, 512) if a.small else shapes(layers, C, 50304)
        elements = sum(torch.Size(shape).numel() for shape in tensors)
        print(f"\n{model}: {len(tensors)} tensors, {elements / 1e6:.1f} M elements\n")
        print("| optimizer | events ms | wall ms | call us | Python us, old / new gradients | B/param |")
        print("|---|---|---|---|---|---|")
        for name, make in candidates():
            print(row(name, make, tensors, a.device, end), flush=True)


if __name__ == "__main__":
    main()
