"""Times whole optimizer steps in torch on a GPU, on the tensors of GPT-2: nibble_optim beside torch's fused AdamW and,
where they are installed, torchao, bitsandbytes and FlashOptim. Parameters and gradients are bf16.

    make lib && python3 dev/torch_speed.py [--models gpt2,gpt2-xl] [--seconds 55]

Columns: milliseconds of a step between two events on the stream, of a step on the wall clock with synchronisation, and
microseconds until step() returns; medians. Bytes are what the first step allocates, for each parameter. It stops before
its time is over, and says what it left out."""
import argparse
import pathlib
import sys
import time

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "optim" / "python"))
MODELS = {"gpt2": (12, 768), "gpt2-medium": (24, 1024), "gpt2-large": (36, 1280), "gpt2-xl": (48, 1600)}


def shapes(layers, C):
    block = [(C,), (C,), (3 * C, C), (3 * C,), (C, C), (C,), (C,), (C,), (4 * C, C), (4 * C,), (C, 4 * C), (C,)]
    return [(50304, C), (1024, C), *(block * layers), (C,), (C,)]


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
    yield "torchao AdamW8bit", peer("torchao.optim", "AdamW8bit", bf16_stochastic_round=True)
    yield "bitsandbytes AdamW8bit", peer("bitsandbytes.optim", "AdamW8bit")
    yield "flashoptim FlashAdamW", peer("flashoptim", "FlashAdamW")


def median(values):
    return sorted(values)[len(values) // 2]


def measure(make, model, end):
    params = [torch.nn.Parameter(torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02) for shape in
              shapes(*MODELS[model])]
    for p in params:
        p.grad = torch.randn_like(p) * 1e-3
    before = torch.cuda.memory_allocated()
    optimizer = make(params)
    for _ in range(3):
        optimizer.step()
    torch.cuda.synchronize()
    bytes_each = (torch.cuda.memory_allocated() - before) / sum(p.numel() for p in params)
    events, walls, calls = [], [], []
    for _ in range(30):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin = time.perf_counter()
        first.record()
        optimizer.step()
        last.record()
        calls.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
        walls.append(time.perf_counter() - begin)
        events.append(first.elapsed_time(last))
        if time.time() > end:
            break
    return median(events), 1e3 * median(walls), 1e6 * median(calls), bytes_each


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="gpt2,gpt2-xl")
    parser.add_argument("--seconds", type=float, default=55.0)
    a = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("torch_speed: no GPU was found")
    end = time.time() + a.seconds
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'model':12} {'optimizer':34} {'events ms':>10} {'wall ms':>9} {'call us':>9} {'B/param':>8}")
    for model in a.models.split(","):
        for name, make in candidates():
            if time.time() > end:
                print(f"{model:12} {name:34} left out: no time")
                continue
            try:
                figures = measure(make, model, end)
            except ImportError:
                print(f"{model:12} {name:34} not installed")
                continue
            except Exception as error:
                print(f"{model:12} {name:34} failed: {type(error).__name__}: {str(error)[:200]}")
                continue
            finally:
                torch.cuda.empty_cache()
            print(f"{model:12} {name:34} {figures[0]:10.3f} {figures[1]:9.3f} {figures[2]:9.0f} {figures[3]:8.2f}",
                  flush=True)


if __name__ == "__main__":
    main()
