"""Cases of test_torch.py that compare nibble_optim.compat with the packages whose names it has, where these are
installed: every class, its signature, its defaults and twenty steps on the CPU."""
import importlib
import inspect
import unittest.mock
import warnings

from test_torch import raises, torch

NOT_THERE = {"bitsandbytes.optim": ["Adagrad", "LAMB", "LARS", "PytorchLARS", "RMSprop"],
             "torchao.optim": ["CPUOffloadOptimizer", "_AdamW"], "flashoptim": ["FlashOptimizer", "FlashSGDW"]}
# Without these flashoptim needs a GPU.
ON_CPU = {"flashoptim": dict(quantize=False, master_weight_bits=None, fused=False)}
# How far the weights may be off, of the way that they have gone: bitsandbytes rounds codes otherwise.
MOST = {"4bit": 1e-3, "Fp8": 1e-3, "8bit": 0.01, "": 1e-4}


# Classes whose own step fails, and others that take the same.
FAILS = {"AdEMAMix32bit": "AdEMAMix", "PagedAdEMAMix32bit": "PagedAdEMAMix"}


def arguments(kind):
    """Returns the arguments of a class as (name, kind, default), without nibble_optim's own seed."""
    return [(a.name, a.kind, a.default) for a in inspect.signature(kind).parameters.values() if a.name != "seed"]


def twenty_steps(kind, settings):
    """Returns where weights began and where twenty steps of a regression took them."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in ((20, 256), (70,))]
    targets, before = [torch.randn(p.shape) for p in params], [p.detach().clone() for p in params]
    optimizer = kind(params, **settings)
    for _ in range(20):
        for p, target in zip(params, targets):
            p.grad = p.detach() - target + 0.3 * torch.randn(p.shape)
        optimizer.step()
    return [torch.cat([p.detach().view(-1) for p in its]) for its in (before, params)]


def settings_of(kind, package):
    """Yields the settings to compare: the defaults, and others."""
    names = inspect.signature(kind).parameters
    base = {**ON_CPU.get(package, {}), **({"momentum": 0.9} if "momentum" in names else {})}
    base.update({"lr": 1e-3} if names["lr"].default is inspect.Parameter.empty else {})
    yield base
    yield {**base, "lr": 3e-3, "weight_decay": 1.0}
    if "t_alpha" in names:
        yield {**base, "t_alpha": 12, "t_beta3": 12, "alpha": 3.0, "betas": (0.8, 0.95, 0.999)}
    if "decouple_lr" in names:
        yield {**base, "weight_decay": 0.01, "decouple_lr": True}
    if "optim_bits" in names and "8bit" not in kind.__name__ and "32bit" not in kind.__name__:
        yield {**base, "optim_bits": 8}


def compare(package, peer, name, mine):
    theirs = getattr(peer, name)
    assert arguments(mine) == arguments(theirs), (package, name, inspect.signature(mine), inspect.signature(theirs))
    named = [a for a in inspect.signature(theirs).parameters.values() if a.name != "params"]
    mine([torch.nn.Parameter(torch.zeros(3))], **{a.name: 1e-3 if a.default is a.empty else a.default for a in named})
    for settings in settings_of(theirs, package):
        (before, weights), (_, want) = (twenty_steps(kind, settings)
                                        for kind in (mine, getattr(peer, FAILS.get(name, name))))
        off = ((weights - want).norm() / (want - before).norm()).item()
        kind = "8bit" if settings.get("optim_bits") == 8 else name
        assert off < next(most for part, most in MOST.items() if part in kind), (package, name, settings, off)


def compare_package(package, ours):
    try:
        peer = importlib.import_module(package)
    except ImportError:
        return None
    kinds = [name for name in dir(peer) if inspect.isclass(getattr(peer, name)) and
             issubclass(getattr(peer, name), torch.optim.Optimizer)]
    there = [name for name in kinds if name.replace("8bit", "").replace("32bit", "") not in NOT_THERE[package]]
    for name in there:
        compare(package, peer, name, getattr(ours, name))
    return f"{package} {len(there)}"


def test_torch_compat_is_its_peers():
    """Each class that bitsandbytes, torchao and flashoptim have, but for NOT_THERE."""
    from nibble_optim.compat import bitsandbytes, flashoptim, torchao
    # torchao compiles its step, which changes no result but takes a minute.
    with unittest.mock.patch("torch.compile", lambda function, **_: function), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of paged states on the CPU, and of states in bf16
        found = [compare_package(*both) for both in (("bitsandbytes.optim", bitsandbytes), ("torchao.optim", torchao),
                                                     ("flashoptim", flashoptim))]
    return ", ".join(filter(None, found)) or "skipped: no bitsandbytes, torchao or flashoptim"


def test_torch_compat():
    from nibble_optim.compat import bitsandbytes, flashoptim, torchao
    for kind in [kind for module in (bitsandbytes, flashoptim, torchao) for kind in vars(module).values()
                 if inspect.isclass(kind)]:
        runs = [[torch.nn.Parameter(torch.ones(n).bfloat16()) for n in (4095, 4096)] for _ in range(2)]
        optimizers = [kind(params, lr=0.1, weight_decay=0.01) for params in runs]
        for params, optimizer in zip(runs, optimizers):
            for p in params:
                p.grad = torch.sin(torch.arange(float(p.numel()))).bfloat16()
            optimizer.step()
        assert all(map(torch.equal, *runs)) and (runs[0][0] != 1).any(), kind
        optimizers[1].load_state_dict(optimizers[0].state_dict())
        if kind in (bitsandbytes.AdamW8bit, torchao.AdamW8bit):  # whose small tensors keep 32 bits
            assert [optimizers[0].state[p]["m"].dtype for p in runs[0]] == [torch.float32, torch.uint8]
    p = torch.nn.Parameter(torch.ones(4))
    for words, make in [("amsgrad=True", lambda: torchao.AdamW8bit([p], amsgrad=True)),
                        ("nesterov=True", lambda: bitsandbytes.SGD([p], 1e-3, 0.9, nesterov=True)),
                        ("optim_bits=16", lambda: bitsandbytes.Lion([p], optim_bits=16)),
                        ("give both alike", lambda: bitsandbytes.AdEMAMix([p], t_alpha=9))]:
        raises(ValueError, words, make)
