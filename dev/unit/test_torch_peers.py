"""Cases of test_torch.py that compare nibble_optim.compat with the packages whose names it has, where these are
installed: every class, its signature, its defaults and twenty steps on the CPU; then what else is as there."""
import copy
import importlib
import inspect
import unittest.mock
import warnings

from test_torch import raises, torch

PACKAGES = {"bitsandbytes.optim": "bitsandbytes", "torchao.optim": "torchao", "flashoptim": "flashoptim",
            "torch.optim": "torch_optim", "came_pytorch": "came_pytorch", "galore_torch": "galore_torch",
            "apollo_torch": "apollo_torch"}
NOT_THERE = {"FlashOptimizer", "CPUOffloadOptimizer"}  # a base class; one without an own step
# Arguments without which a peer needs a GPU, or which it has no defaults for.
NEEDED = {"flashoptim": dict(quantize=False, master_weight_bits=None, fused=False), "came_pytorch": dict(lr=1e-3)}
# How far the weights may be off, of the way that they have gone: bitsandbytes rounds codes otherwise, torch's Muon
# computes in bf16, came_pytorch does not correct v. None: other directions, so only the arguments are compared.
MOST = {"GaLore": None, "APOLLO": None, "4bit": 1e-3, "Fp8": 1e-3, "8bit": 0.01, "Muon": 0.02, "CAME": 0.1, "": 1e-4}
# Classes whose own step fails, and others that take the same.
FAILS = {"AdEMAMix32bit": "AdEMAMix", "PagedAdEMAMix32bit": "PagedAdEMAMix"}


def arguments(kind):
    """Returns the arguments of a class as (name, kind, default), without nibble_optim's own seed."""
    return [(a.name, a.kind, a.default) for a in inspect.signature(kind).parameters.values() if a.name != "seed"]


def twenty_steps(kind, settings):
    """Returns where weights began and where twenty steps of a regression took them."""
    torch.manual_seed(0)
    shapes = ((20, 256), (60, 70)) if kind.__name__ == "Muon" else ((20, 256), (70,))
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
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
    base = {**NEEDED.get(package, {}), **({"momentum": 0.9} if "momentum" in names else {})}
    base.update({"lr": 1e-3} if names["lr"].default is inspect.Parameter.empty else {})
    yield base
    yield {**base, "lr": 3e-3, "weight_decay": 1.0}
    for name, more in (("t_alpha", {"t_alpha": 12, "t_beta3": 12, "alpha": 3.0, "betas": (0.8, 0.95, 0.999)}),
                       ("decouple_lr", {"weight_decay": 0.01, "decouple_lr": True}),
                       ("adjust_lr_fn", {"adjust_lr_fn": "match_rms_adamw"})):
        if name in names:
            yield {**base, **more}
    if "optim_bits" in names and "8bit" not in kind.__name__ and "32bit" not in kind.__name__:
        yield {**base, "optim_bits": 8}


def compare(package, peer, name, mine):
    theirs = getattr(peer, name)
    assert arguments(mine) == arguments(theirs), (package, name, inspect.signature(mine), inspect.signature(theirs))
    for settings in settings_of(theirs, package):
        most = next(most for part, most in MOST.items() if part in ("8bit" if settings.get("optim_bits") == 8 else name))
        if most is None:
            return
        (before, weights), (_, want) = (twenty_steps(kind, settings)
                                        for kind in (mine, getattr(peer, FAILS.get(name, name))))
        off = ((weights - want).norm() / (want - before).norm()).item()
        assert off < most, (package, name, settings, off)


def test_torch_compat_is_its_peers():
    """Each class that a peer has: here it is the same, or says what to take in its place."""
    found, absent = 0, []
    # torchao compiles its step, which changes no result but takes a minute.
    with unittest.mock.patch("torch.compile", lambda function, **_: function), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of paged states on the CPU, and of states in bf16
        for package, own in PACKAGES.items():
            try:
                peer = importlib.import_module(package)
            except ImportError:
                absent.append(package)
                continue
            ours = importlib.import_module(f"nibble_optim.compat.{own}")
            kinds = [name for name in (("Muon", "Adafactor") if package == "torch.optim" else dir(peer))
                     if inspect.isclass(getattr(peer, name, None)) and name not in NOT_THERE and
                     issubclass(getattr(peer, name), torch.optim.Optimizer)]
            for name in kinds:
                if issubclass(getattr(ours, name), importlib.import_module("nibble_optim").Optimizer):
                    compare(package, peer, name, getattr(ours, name))
                    found += 1
                else:
                    raises(NotImplementedError, "; take ", getattr(ours, name))
    return f"{found} classes; not installed: {', '.join(absent) or 'none'}"


def test_torch_compat():
    from nibble_optim.compat import (apollo_torch, bitsandbytes, came_pytorch, flashoptim, torch_optim, torchao,
                                     transformer_engine)
    for kind in [kind for module in (apollo_torch, bitsandbytes, came_pytorch, flashoptim, torch_optim, torchao,
                                          transformer_engine)
                 for kind in vars(module).values() if inspect.isclass(kind) and hasattr(kind, "describe")]:
        shapes = [(64, 64), (63, 65)] if kind is torch_optim.Muon else [(4095,), (4096,)]
        for dtype in (torch.bfloat16, torch.float16):
            params = [torch.nn.Parameter(torch.ones(shape).to(dtype)) for shape in shapes]
            optimizer = kind(params, lr=0.1, weight_decay=0.01)
            for p in params:
                p.grad = torch.sin(torch.arange(float(p.numel()))).view(p.shape).to(dtype)
            optimizer.step()
            assert (params[0] != 1).any() and (params[1] != 1).any(), kind
            kind(copy.deepcopy(params), lr=0.1, weight_decay=0.01).load_state_dict(optimizer.state_dict())
            if kind in (bitsandbytes.AdamW8bit, torchao.AdamW8bit):  # whose small tensors keep 32 bits
                assert [optimizer.state[p]["m"].dtype for p in params] == [torch.float32, torch.uint8]
    p = torch.nn.Parameter(torch.ones(4))
    for words, make in [("amsgrad=True", lambda: torchao.AdamW8bit([p], amsgrad=True)),
                        ("dampening=0.5", lambda: bitsandbytes.SGD([p], 1e-3, 0.9, 0.5)),
                        ("optim_bits=16", lambda: bitsandbytes.Lion([p], optim_bits=16)),
                        ("give both alike", lambda: bitsandbytes.AdEMAMix([p], t_alpha=9))]:
        raises(ValueError, words, make)


def test_torch_compat_more():
    """bitsandbytes' overrides of parameters, torchao's offloading, TransformerEngine's masters."""
    from nibble_optim.compat import bitsandbytes, torchao, transformer_engine
    params = [torch.nn.Parameter(torch.ones(64, 64)) for _ in range(2)]
    bitsandbytes.GlobalOptimManager.get_instance().override_config(params[1], "optim_bits", 32)
    optimizer = bitsandbytes.AdamW8bit(params)
    hosts = copy.deepcopy(params)
    offloaded = torchao.CPUOffloadOptimizer(hosts, torchao.AdamW8bit, lr=1e-3)
    torch.optim.lr_scheduler.LambdaLR(offloaded, lambda epoch: 1.0)
    for p in params + hosts:
        p.grad = torch.ones_like(p)
    optimizer.step(), offloaded.step()
    assert [optimizer.state[p]["m"].dtype for p in params] == [torch.uint8, torch.float32]
    assert torch.equal(hosts[0], params[0])
    for more, kept in (({}, {"master"}), ({"store_param_remainders": True}, {"weights.low"})):
        half = torch.nn.Parameter(torch.ones(64, 64).bfloat16())
        fused = transformer_engine.FusedAdam([half], master_weights=True, **more)
        half.grad = torch.ones_like(half)
        fused.step()
        assert kept <= set(fused.state[half]) and "exp_avg" in fused.state[half], set(fused.state[half])
