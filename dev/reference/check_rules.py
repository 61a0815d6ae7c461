"""Compares rules of nibble_optim, step by step, with the optimizers of torch and PyPI that have the same formulas, on
the CPU and in fp32: adamw and adafactor with torch.optim's, came with came-pytorch's, the rules adafactor8bit and
came8bit and apollo in adafactor8bit's states with adafactor8bit's. dev/unit/oracle.h has the equations of the others.

    make NVCC= lib && pip install torch came-pytorch adafactor8bit==0.2.4
    NIBBLE_OPTIM_LIBRARY=build/cpu/lib/libnibble_optim.so python3 dev/reference/check_rules.py

For six steps both get the same gradients; the changes of the weights must agree within what rounding explains: a
change is a product of a few roots and averages, each good to a few units of fp32's last place, and the weight that it
is added to has a last place of its own. A code that both programs round to another side is as good; at most one element
in 2000 may be further off by such a code of m, and none by a code of a row or a column, whose bounds are rarer. Where
formulas differ on purpose the script undoes the difference:

* came-pytorch starts its averages at 0 without correcting them, as the paper does. The average of g^2 then cancels where
  the update is clipped, which a small threshold makes certain; that of the residual leaves sqrt(1 - beta3^t), by which
  its learning rate is multiplied here.
* adafactor8bit's APOLLO gets the projection that ours draws (optim/matrix/low_rank.h). It adds eps to the root of v
  before that is corrected, so eps is nearly 0; it decodes v again before it divides by it where we divide by the v that
  is then stored, so states are fp32 there; and its clipping of the update's RMS is off.
  0.2.4 forgets m at the start of each step, and with apollo_factorize all of its state; class Kept lets it remember.

The last line is `N passed, N failed`."""
import importlib.metadata
import pathlib
import sys

import numpy as np
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "optim" / "python"))
from nibble_optim import Optimizer  # noqa: E402

STEPS, EPS32, SEED = 6, 2.0 ** -23, 5
SHAPES = [(48, 64), (96, 32), (33, 200), (40,)]
CODED = [(64, 96), (96, 64), (33, 200), (5000,), (40,)]  # the last one is too small for codes
MATRICES = [(48, 64), (96, 32), (40, 40)]
BETAS, LR = (0.9, 0.95), 1e-2


def parameters(shapes):
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(0.1 * torch.randn(shape, generator=generator)) for shape in shapes]


def gradients(step, shapes):
    """Returns gradients whose rows and columns differ much in size, as a model's do."""
    generator = torch.Generator().manual_seed(100 + step)
    for shape in shapes:
        gradient = torch.randn(shape, generator=generator)
        for axis, length in enumerate(shape):
            size = [1] * len(shape)
            size[axis] = length
            gradient = gradient * torch.exp(torch.randn(length, generator=generator)).reshape(size)
        yield 1e-2 * gradient


def torch_adamw(params):
    return torch.optim.AdamW(params, lr=LR, betas=BETAS, eps=1e-8, weight_decay=0.1), {}


def torch_adafactor(params):
    from torch.optim import Adafactor  # since torch 2.5
    return Adafactor(params, lr=LR, weight_decay=0.0, d=1.0, beta2_decay=-0.8), {
        "rule": "adafactor", "m": "none", "weight_decay": 0.0, "adafactor_lr": "paper"}


def came(params):
    from came_pytorch import CAME
    return CAME(params, lr=LR / 10, betas=(*BETAS, 0.99), clip_threshold=0.05), {
        "rule": "came", "weight_decay": 0.0, "clip_update": 0.05, "beta3": 0.99, "lr": LR / 10}


def take_package():
    """Returns adafactor8bit's module, of the version whose steps these are; the steps of 0.4 are others."""
    import adafactor8bit.optimizer
    found = importlib.metadata.version("adafactor8bit")
    if found != "0.2.4":
        raise ImportError(f"adafactor8bit {found} is installed; type pip install adafactor8bit==0.2.4")
    return adafactor8bit.optimizer


def package(settings, own):
    """Returns what makes adafactor8bit's optimizer. Learning rates are plain unless `settings` says otherwise."""
    def make(params):
        Adafactor8Bit = take_package().Adafactor8Bit
        plain = {"relative_step": False, "scale_parameter": False, "scale_weight_decay": False}
        return Adafactor8Bit(params, **{"lr": LR, "use_cuda_kernel": False, **plain, **settings}), {
            "preset": "adafactor8bit", "weight_decay": settings.get("weight_decay", 0.0), "eps": EPS32, **own}
    return make


class Kept(dict):
    """A state of adafactor8bit's APOLLO that keeps what 0.2.4 drops at the start of each step by mistake."""
    factored = False

    def get(self, key, default=None):
        return self.factored if key == "apollo_factorize" else super().get(key, default)

    def pop(self, key, default=None):
        keeps = key.startswith("m_low") and (self.get("v_low") is not None or "row_var_low" in self)
        return default if keeps else super().pop(key, default)


def apollo(settings, own):
    """The same for APOLLO, whose projection becomes ours."""
    def make(params):
        theirs = take_package()
        seeds = []

        def projection(shape, seed, device, dtype):
            seeds.extend([] if seed in seeds else [seed])
            right = shape[0] == RANK
            side = shape[1] if right else shape[0]
            q = torch.from_numpy(normal_numbers(RANK * side, seeds.index(seed)).reshape(RANK, side))
            return q if right else q.T

        theirs.stable_randn = projection
        peer, ours = package({"apollo_rank": RANK, "apollo_update_proj_gap": 3, "apollo_eps": 1e-30, "quantize": False,
                              "beta1": 0.9, "beta2": 0.95, "d": 1e9, "eps": (1e-30, 1e-3), **settings}, {})(params)
        for group in params:
            peer.state[group["params"][0]] = Kept()
            peer.state[group["params"][0]].factored = "apollo_factorize" in settings
        return peer, {**ours, "preset": "adamw32", "rule": "apollo", "rank": RANK, "rank_gap": 3, "rank_scale": 1.0,
                      "rank_reset": True, "eps": 1e-30, "seed": SEED, **own}
    return make


RANK = 8


def normal_numbers(count, refresh):
    """Returns the numbers of which apollo's directions consist (low_rank.cu, noise.cuh), for a matrix that comes first."""
    half, word = np.uint64(32), np.uint64(0xFFFFFFFF)
    counter = [np.arange(count, dtype=np.uint64), *(np.full(count, x, np.uint64) for x in (0, 8, refresh))]
    for i in range(7):
        keys = ((SEED + i * 0x9E3779B9) & 0xFFFFFFFF, (i * 0xBB67AE85) & 0xFFFFFFFF)
        a, b = counter[0] * np.uint64(0xD2511F53), counter[2] * np.uint64(0xCD9E8D57)
        counter = [b >> half ^ counter[1] ^ np.uint64(keys[0]), b & word, a >> half ^ counter[3] ^ np.uint64(keys[1]),
                   a & word]
    sums = sum((x & np.uint64(0xFFFF)) + (x >> np.uint64(16)) for x in counter).astype(np.float64)
    return ((sums - 4 * 65535) * 1.8688408e-5).astype(np.float32)


def compare(make, shapes, m=None):
    """Returns the largest difference of a change as a multiple of its bound, of all elements but one in 2000."""
    ours, theirs = parameters(shapes), parameters(shapes)
    peer, settings = make([{"params": [p]} for p in theirs])
    rate = settings.get("lr", LR)
    groups = [{"params": [p], **({"m": "fp32"} if p.numel() < 4096 and settings.get("m") != "none" else {})} for p in ours]
    own = Optimizer(groups, **{"preset": "adamw32", "weights": "fp32", "lr": rate, **settings})
    confident = settings.get("rule") == "came"
    worst = 0.0
    for step in range(1, STEPS + 1):
        for mine, other, gradient in zip(ours, theirs, gradients(step, shapes)):
            mine.grad, other.grad = gradient.clone(), gradient.clone()
        for other, there in zip(theirs, peer.param_groups):
            there["lr"] = rate * (1 - 0.99 ** step) ** 0.5 if confident and other.dim() > 1 else rate
        before = [p.detach().clone() for p in theirs]
        own.step(), peer.step()
        for mine, other, was in zip(ours, theirs, before):
            change = (other.detach() - was).abs()
            # 64 units of the change, for sums of up to 6,600 squares in any order, and one of the weight a step.
            bound = step * EPS32 * (64 * change.max() + other.detach().abs().max())
            off = (mine.detach() - other.detach()).abs().flatten().sort().values / bound
            worst = max(worst, off[len(off) - 1 - len(off) // 2000].item())
    return worst


def table():
    """Returns rows of the name, and what is called for the largest difference."""
    paper = {"relative_step": True, "scale_parameter": True, "lr": 0.5}, {"adafactor_lr": "paper", "lr": 0.5}
    no_m, m, margin = ({}, {"m": "none"}), ({"beta1": 0.9}, {}), ({"fira_margin": 0.05}, {"limit_growth": 1.05})
    limits = {"enable_fira_for_adafactor": True}, {"limit_growth": 1.01}
    confident = ({"beta1": 0.9, "beta2": 0.95, "beta3": 0.99}, {"rule": "came8bit", "beta3": 0.99})
    factored = {"apollo_factorize": True}, {"rule": "apollo-factored"}
    kinds = {"no m": (no_m,), "its own rates": (no_m, paper), "m": (m,), "m, its own rates": (m, paper),
             "m, limiter": (m, limits), "m, decay": (m, ({"weight_decay": 0.1}, {})), "limiter": (no_m, limits),
             "CAME": (confident,), "CAME, its own rates": (confident, paper), "CAME, limiter": (confident, limits)}
    for make in (torch_adamw, torch_adafactor, came):
        yield make.__name__.replace("_", ".").replace("came", "came-pytorch"), lambda make=make: compare(make, SHAPES)
    for name, parts in kinds.items():
        make = package({k: v for part in parts for k, v in part[0].items()},
                       {k: v for part in parts for k, v in part[1].items()})
        yield f"adafactor8bit: {name}", lambda make=make: compare(make, CODED)
    for name, parts in {"APOLLO": (), "APOLLO, margin": (margin,), "APOLLO, factored": (factored,)}.items():
        make = apollo({k: v for part in parts for k, v in part[0].items()},
                      {k: v for part in parts for k, v in part[1].items()})
        yield f"adafactor8bit: {name}", lambda make=make: max(compare(make, [shape]) for shape in MATRICES)


def main():
    failed = passed = 0
    for name, run in table():
        try:
            worst = run()
        except ImportError as missing:
            print(f"skip  {name}: {missing}")
            continue
        good = worst <= 1.0
        passed, failed = passed + good, failed + (not good)
        print(f"{'ok   ' if good else 'FAIL '} {name}: {worst:.2f} of bound after {STEPS} steps")
    print(f"{passed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
