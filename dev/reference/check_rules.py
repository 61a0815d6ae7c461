"""Compares rules of nibble_optim, step by step, with the optimizers of torch and PyPI that have the same formulas:
adafactor with torch.optim.Adafactor and adafactor8bit's, came with came-pytorch's CAME and adafactor8bit's, adamw with
torch.optim.AdamW, all in fp32; and the equations of galore with galore-torch.

    make NVCC= lib && pip install torch came-pytorch adafactor8bit galore-torch bitsandbytes "transformers<5"
    NIBBLE_OPTIM_LIBRARY=build/cpu/lib/libnibble_optim.so python3 dev/reference/check_rules.py

For five steps both get the same gradients; the changes of the weights must agree within what rounding explains: a
change is a product of a few roots and averages, each good to a few units of fp32's last place, and the weight that it
is added to has a last place of its own. Where formulas differ on purpose the script undoes the difference:

* torch's and adafactor8bit's learning rate is times max(1e-3, RMS of the weights), which is `--adafactor-lr scaled`
  here.
* came-pytorch and adafactor8bit start their averages at 0 without correcting them, as the paper does. The average of g^2
  then cancels where the update is clipped, which a small threshold makes certain; that of the residual leaves
  sqrt(1 - beta3^t), by which their learning rate is multiplied here.
* adafactor8bit runs without its codes (quantize=False): dev/unit/peers.cu compares its logarithmic codes. Not compared
  is its adafactor with beta1, whose m averages gradients where ours, as in the paper, averages updates.
* galore-torch adds eps to the root of v before that is corrected, and decays weights after the update; eps is nearly 0
  and the decay 0 here. galore-torch is held to the equations of optim/matrix/low_rank.h in float64, with its own
  directions, and dev/unit/oracle.h holds our galore to them with ours. Both sets of directions span the gradient's
  leading ones; galore-torch's are singular vectors and ours are not rotated to be, which changes what Adam sees in each
  of them.

The last line is `N passed, N failed`."""
import pathlib
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "optim" / "python"))
from nibble_optim import Optimizer  # noqa: E402

STEPS, EPS32 = 5, 2.0 ** -23
SHAPES = [(48, 64), (96, 32), (33, 200), (40,)]


def parameters(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(0.1 * torch.randn(shape, generator=generator)) for shape in SHAPES]


def gradients(step):
    """Returns gradients whose rows and columns differ much in size, as a model's do."""
    generator = torch.Generator().manual_seed(100 + step)
    for shape in SHAPES:
        gradient = torch.randn(shape, generator=generator)
        for axis, length in enumerate(shape):
            size = [1] * len(shape)
            size[axis] = length
            gradient = gradient * torch.exp(torch.randn(length, generator=generator)).reshape(size)
        yield 1e-2 * gradient


def adamw(params, lr):
    return torch.optim.AdamW(params, lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1), {}


def adafactor(params, lr):
    from torch.optim import Adafactor  # since torch 2.5
    return Adafactor(params, lr=lr, weight_decay=0.0, d=1.0, beta2_decay=-0.8), {
        "rule": "adafactor", "m": "none", "weight_decay": 0.0, "clip_update": 1.0}


def came(params, lr):
    from came_pytorch import CAME
    return CAME(params, lr=lr, betas=(0.9, 0.95, 0.99), clip_threshold=0.05), {
        "rule": "came", "weight_decay": 0.0, "clip_update": 0.05, "beta3": 0.99}


def adafactor8bit(params, lr):
    from adafactor8bit import Adafactor8Bit
    return Adafactor8Bit(params, lr=lr, d=1.0, beta2_decay=-0.8, quantize=False, use_cuda_kernel=False), {
        "rule": "adafactor", "m": "none", "weight_decay": 0.0, "clip_update": 1.0}


def came8bit(params, lr):
    from adafactor8bit import Adafactor8Bit
    return Adafactor8Bit(params, lr=lr, beta1=0.9, beta2=0.95, beta2_decay=None, beta3=0.99, d=0.05, quantize=False,
                         use_cuda_kernel=False, relative_step=False, scale_parameter=False), {
        "rule": "came", "weight_decay": 0.0, "clip_update": 0.05, "beta3": 0.99}


def rate_here(name, theirs, parameter):
    """Returns the learning rate that makes nibble's formula the peer's."""
    if not name.startswith("adafactor"):
        return theirs
    return theirs * max(1e-3, parameter.detach().double().square().mean().sqrt().item())


def rate_there(name, lr, step, parameter):
    return lr * (1 - 0.99 ** step) ** 0.5 if name.startswith("came") and parameter.dim() > 1 else lr


def compare(name, make, lr):
    """Returns the largest difference of a change as a multiple of its bound."""
    ours, theirs = parameters(1), parameters(1)
    peer, settings = make([{"params": [p]} for p in theirs], lr)
    own = Optimizer([{"params": [p]} for p in ours], preset="adamw32", weights="fp32", lr=lr, **settings)
    worst = 0.0
    for step in range(1, STEPS + 1):
        for mine, other, gradient in zip(ours, theirs, gradients(step)):
            mine.grad, other.grad = gradient.clone(), gradient.clone()
        for mine, other, group, there in zip(ours, theirs, own.param_groups, peer.param_groups):
            group["lr"], there["lr"] = rate_here(name, lr, other), rate_there(name, lr, step, other)
        before = [p.detach().clone() for p in theirs]
        own.step(), peer.step()
        for mine, other, was in zip(ours, theirs, before):
            change = (other.detach() - was).abs()
            # 64 units of the change, for sums of up to 6,600 squares in any order, and one of the weight a step.
            bound = step * EPS32 * (64 * change.max() + other.detach().abs().max())
            worst = max(worst, ((mine.detach() - other.detach()).abs().max() / bound).item())
    return worst


def compare_galore():
    """Compares galore-torch with the equations in float64. Returns the difference as a multiple of the bound."""
    from galore_torch import GaLoreAdamW
    lr, (beta1, beta2), eps, scale, rank, worst = 1e-2, (0.9, 0.95), 1e-30, 0.25, 8, 0.0
    for shape in [(48, 64), (96, 32), (40, 40)]:
        generator = torch.Generator().manual_seed(3)
        weight = torch.nn.Parameter(0.1 * torch.randn(shape, generator=generator))
        peer = GaLoreAdamW([{"params": [weight], "rank": rank, "update_proj_gap": 3, "scale": scale,
                             "proj_type": "std"}], lr=lr, betas=(beta1, beta2), eps=eps, weight_decay=0.0,
                           no_deprecation_warning=True)
        m = v = 0.0
        mine = weight.detach().double()
        for step in range(1, STEPS + 1):
            weight.grad = torch.randn(shape, generator=generator) + torch.randn((shape[0], 1), generator=generator)
            before = weight.detach().clone()
            peer.step()
            basis = peer.state[weight]["projector"].ortho_matrix.double()
            gradient, right = weight.grad.double(), shape[0] >= shape[1]
            low = gradient @ basis.T if right else basis.T @ gradient
            m, v = m + (1 - beta1) * (low - m), v + (1 - beta2) * (low * low - v)
            direction = m / (1 - beta1 ** step) / ((v / (1 - beta2 ** step)).sqrt() + eps)
            mine = mine - lr * scale * (direction @ basis if right else basis @ direction)
            # A sum of up to 64 products errs by 64 units of its terms, and so does low, which Adam divides by itself.
            change = (weight.detach() - before).abs().max()
            bound = step * EPS32 * (128 * change + before.abs().max())
            worst = max(worst, ((mine - weight.detach().double()).abs().max() / bound).item())
    return worst


def main():
    failed = passed = 0
    peers = ((adamw, 1e-2), (adafactor, 1e-2), (came, 1e-3), (adafactor8bit, 1e-2), (came8bit, 1e-3), (None, 0.0))
    for make, lr in peers:
        name = make.__name__ if make else "galore's equations"
        try:
            worst = compare(name, make, lr) if make else compare_galore()
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
