"""Cases of test_torch.py that compare nibble_optim.compat with the packages whose names it has, where these are
installed: every class, its signature, its defaults and twenty steps on the CPU; then what else is as there."""
import contextlib
import copy
import functools
import importlib
import inspect
import itertools
import unittest.mock
import warnings

from test_torch import DEVICES, give, nibble_optim, parameter, raises, torch

PACKAGES = {"bitsandbytes.optim": "bitsandbytes", "torchao.optim": "torchao", "flashoptim": "flashoptim",
            "torch.optim": "torch_optim", "came_pytorch": "came_pytorch", "galore_torch": "galore_torch",
            "apollo_torch": "apollo_torch", "adafactor8bit": "adafactor8bit", "transformer_engine.pytorch.optimizers": "transformer_engine"}
NOT_THERE = {"FlashOptimizer", "CPUOffloadOptimizer"}  # a base class; one without an own step
# Arguments without which a peer needs a GPU, or which it has no defaults for.
NEEDED = {"flashoptim": dict(quantize=False, master_weight_bits=None, fused=False), "came_pytorch": dict(lr=1e-3),
          "adafactor8bit": dict(use_cuda_kernel=False, scale_weight_decay=False)}
# How far the weights may be off, of the way that they have gone: bitsandbytes rounds codes otherwise, torch's Muon
# computes in bf16, came_pytorch does not correct v. None: other directions, or a step on GPUs alone, so only the
# arguments are compared.
MOST = {"GaLore": None, "APOLLO": None, "Fused": None,
        "4bit": 1e-3, "Fp8": 1e-3, "8Bit": 1e-5, "8bit": 0.01, "Muon": 0.02, "CAME": 0.1, "": 1e-4}
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
    optimizer, size = kind(params, **settings), 1e-4 if kind.__name__ == "Adafactor" and settings else 1  # eps1 matters
    for _ in range(20):
        for p, target in zip(params, targets):
            p.grad = (p.detach() - target + 0.3 * torch.randn(p.shape)) * size
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
                       ("decouple_lr", {"weight_decay": 0.01, "decouple_lr": True,
                                        **({"dampening": 0.4} if "dampening" in names else {})}),
                       ("adjust_lr_fn", {"adjust_lr_fn": "match_rms_adamw"}),
                       ("beta2_decay", {"eps": (None, 0.9), "d": 1.5, "lr": 0.5, "beta2_decay": -0.5, "maximize": True}),
                       ("apollo_rank", {"beta1": 0.9, "weight_decay": 0.1, "enable_fira_for_adafactor": True}),
                       ("beta3", {"beta1": 0.9, "beta2": 0.99, "beta3": 0.999, "relative_step": False})):
        if name in names:
            yield {**base, **more}
    if package == "flashoptim" and "dampening" in names:
        yield {**base, "weight_decay": 0.3, "dampening": 0.4}
        yield {**base, "weight_decay": 0.3, "nesterov": True}
        yield {**base, "momentum": 0.0, "weight_decay": 0.3, "dampening": 0.4}
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
    """Each class steps parameters of bf16 and fp16, is copied, and its states load."""
    modules = {own: importlib.import_module(f"nibble_optim.compat.{own}") for own in PACKAGES.values()}
    for kind in [kind for module in modules.values() for kind in vars(module).values() if hasattr(kind, "describe")]:
        shapes = [(64, 64), (63, 65)] if kind.__name__ == "Muon" else [(4095,), (4096,)]
        settings = {"lr": 0.1, "weight_decay": 0.01, **({"scale_weight_decay": False} if kind.__name__ == "Adafactor8Bit" else {})}
        for dtype in (torch.bfloat16, torch.float16):
            params = [torch.nn.Parameter(torch.ones(shape).to(dtype)) for shape in shapes]
            optimizer = kind(params, **settings)
            give(params)
            optimizer.step()
            assert (params[0] != 1).any() and (params[1] != 1).any(), kind
            kind(copy.deepcopy(params), **settings).load_state_dict(optimizer.state_dict())
            again, its = copy.deepcopy((optimizer, params))
            give(params), give(its)
            optimizer.step(), again.step()
            assert all(map(torch.equal, params, its)), kind
            if kind.__name__ == "AdamW8bit":  # whose small tensors keep 32 bits
                assert [optimizer.state[p]["m"].dtype for p in params] == [torch.float32, torch.uint8]
    params, bnb, adafactor = [parameter(4)], modules["bitsandbytes"], modules["adafactor8bit"].Adafactor8Bit
    for words, make in [("amsgrad=True", lambda: modules["torchao"].AdamW8bit(params, amsgrad=True)),
                        ("dampening=0.5", lambda: bnb.SGD(params, 1e-3, 0.9, 0.5)),
                        ("optim_bits=16", lambda: bnb.Lion(params, optim_bits=16)),
                        ("give both alike", lambda: bnb.AdEMAMix(params, t_alpha=9)),
                        ("give both, or none", lambda: adafactor(params, beta1=0.9, beta3=0.99)),
                        ("goes with scale_weight_decay=False", lambda: adafactor(params, weight_decay=0.1)),
                        ("without dampening", lambda: modules["flashoptim"].FlashSGD(
                            params, momentum=0.9, dampening=0.1, nesterov=True))]:
        raises(ValueError, words, make)


def test_torch_galore_of_8_bits():
    """Its steps are GaLoreAdamW's but for the rounding of states, in a group with a rank and in one without."""
    from nibble_optim.compat import galore_torch
    ways = []
    for kind in (galore_torch.GaLoreAdamW, galore_torch.GaLoreAdamW8bit):
        params = [parameter(96, 128), parameter(64, 70), parameter(33)]
        before = [p.detach().clone() for p in params]
        optimizer = kind([{"params": params[:1], "rank": 64, "update_proj_gap": 5, "scale": 0.25, "proj_type": "std"},
                          {"params": params[1:]}], lr=1e-2, eps=1e-8, weight_decay=0.1)
        for step in range(8):
            give(params, step)
            optimizer.step()
        ways.append([p.detach() - q for p, q in zip(params, before)])
        kept = [[optimizer.state[p][key].dtype for key in "mv"] for p in params]
    assert kept == [[torch.uint8] * 2] * 2 + [[torch.float32] * 2], kept
    for most, way, way8 in zip((0.05, 0.05, 1e-5), *ways):
        assert (way8 - way).norm() < most * way.norm(), (way8 - way).norm() / way.norm()


def test_torch_compat_more():
    """bitsandbytes' overrides of parameters, torchao's offloading."""
    from nibble_optim.compat import bitsandbytes, torchao
    params, manager = [parameter(64, 64), parameter(64, 64)], bitsandbytes.GlobalOptimManager.get_instance()
    manager.override_config(params[1], "optim_bits", 32)
    optimizer = bitsandbytes.AdamW8bit(params)
    hosts = copy.deepcopy(params)
    offloaded = torchao.CPUOffloadOptimizer(hosts, torchao.AdamW8bit, lr=1e-3)
    torch.optim.lr_scheduler.LambdaLR(offloaded, lambda epoch: 1.0)
    give(params), give(hosts)
    optimizer.step(), offloaded.step()
    assert [optimizer.state[p]["m"].dtype for p in params] == [torch.uint8, torch.float32]
    assert torch.equal(hosts[0], params[0])
    state = optimizer.state[params[0]]
    assert 5 not in state
    assert torch.equal(state["qmap2"][state["state2"].int()] * state["absmax2"].repeat_interleave(256).view(64, 64), state["exp_avg_sq"])
    manager.override_config(params[0], "optim_bits", 8)
    optimizer = bitsandbytes.Adam(params)
    optimizer.step()
    assert [optimizer.state[p]["m"].dtype for p in params] == [torch.uint8, torch.float32]
    manager.register_parameters(iter(params))
    copies = [torch.nn.Parameter(p.detach().clone()) for p in params]  # as on another device
    assert [bitsandbytes.Adam(copies)._is_small(p) for p in copies] == [False, True]
    bitsandbytes.Adam(others := [parameter(3, 5), parameter(7)])  # which are no copies
    assert not any(id(p) in manager.pid2config for p in others)
    manager.initialize()
    assert optimizer._is_small(params[0])


def net():
    torch.manual_seed(1)
    return torch.nn.ModuleDict({"first": torch.nn.Conv2d(2, 30, 3), "norm": torch.nn.BatchNorm2d(30),
                                "middle": torch.nn.Linear(30, 50), "head": torch.nn.Linear(50, 5)})


def forward(model, x):
    x = torch.relu(model["norm"](model["first"](x).float())).mean((2, 3)).to(model["middle"].weight.dtype)
    return model["head"](model["middle"](x))


def test_torch_flashoptim_of_a_model():
    """Casts of a model are flashoptim's, and weights in fp32 come out and go in again."""
    from nibble_optim.compat import flashoptim
    layers = [dict(), dict(dtype=torch.float16, selective=False), dict(full_precision_layers=["head"]),
              dict(full_precision_recast_layers=["mid*"], full_precision_layers=["*.head"])]
    for its in layers:
        models = [net(), net()]
        makers = [flashoptim.cast_model]
        with contextlib.suppress(ImportError):
            makers.append(importlib.import_module("flashoptim").cast_model)
        for make, model in zip(makers, models):
            make(model, **its)
        types = [{name: value.dtype for name, value in model.state_dict().items()} for model in models[:len(makers)]]
        assert types[0] == types[-1] and len(set(types[0].values())) > 1 and types[0]["first.weight"] != torch.float32
        if its.get("dtype") is None:
            x = torch.randn(4, 2, 6, 6).bfloat16()
            outputs = [forward(model, x) for model in models[:len(makers)]]
            assert torch.equal(outputs[0], outputs[-1]) and outputs[0].dtype == outputs[-1].dtype
    for bits, most in ((24, 2.0 ** -16), (32, 0.0), (None, 2.0 ** -8)):
        model = net()
        flashoptim.cast_model(model, full_precision_layers=["head"])
        optimizer = flashoptim.FlashAdamW(model.parameters(), lr=1e-3, master_weight_bits=bits)
        give(model.parameters())
        want = {name: torch.randn(value.shape) for name, value in net().state_dict().items()
                if value.is_floating_point() and "running" not in name}
        for step in range(2):  # before there are states, and beside them
            optimizer.set_fp32_model_state_dict(model, want)
            got = optimizer.get_fp32_model_state_dict(model)
            for name, value in want.items():
                off = ((got[name] - value) / value).abs().max().item()
                exact = 0.0 if name.startswith(("head", "norm")) else most
                assert off <= exact and (off > exact / 4 or exact == 0.0), (bits, name, off)
                assert ((model.state_dict()[name].float() - got[name]) / got[name]).abs().max() <= 2.0 ** -8
            optimizer.step()
            after = optimizer.get_fp32_model_state_dict(model)
            moved = {name: (after[name] - got[name]).abs().max().item() for name in want}
            assert all(0 < most < 3e-2 for most in moved.values()), (bits, moved)
        for key, level, power in (("exp_avg", lambda q: q / (254 - q.abs()), 1), ("exp_avg_sq", lambda q: q / 255, 2)):
            moment = optimizer.state[model.first.weight][key]  # flashoptim's codes, and its levels
            found = level(moment.quantized.double()).view(-1) * moment.scales.repeat_interleave(32)[:moment.quantized.numel()]
            assert torch.allclose(found ** power, moment.materialize().double().view(-1), 1e-5, 0), (bits, key)
    for bits, most in ((24, 2.0 ** -17), (32, 2.0 ** -22)):  # beside fp16; then states in fp32
        params = halves(torch.float16)
        one, other = (flashoptim.FlashSGD(params, momentum=0.9, master_weight_bits=bits, quantize=quantize,
                                          compress_state_dict=False) for quantize in (True, False))
        adam_steps(one, params, 3)
        [its.load_state_dict(one.state_dict()) for its in (other, torch.optim.SGD(params))]
        for p, state in ((p, its.state[p]) for its in (one, other) for p in params):
            off = flashoptim.reconstruct_fp32_param(p.detach(), state["error_bits"]) - one.state[p]["master_param"]
            assert off.abs().max() < most and torch.equal(state["exp_avg"].materialize(), one.state[p]["exp_avg"].materialize())
    damped = flashoptim.FlashSGD(params, momentum=0.9, dampening=0.5, compress_state_dict=False)
    assert "momentum" not in damped.state_dict()["param_groups"][0]  # its m is not torch's
    raises(ValueError, "give fp32", lambda: optimizer.set_fp32_model_state_dict(
        model, {"head.weight": torch.zeros(5, 50, dtype=torch.float64)}))
    params = halves()
    optimizer = flashoptim.FlashAdamW(params, lr=1e-3)
    flashoptim.enable_gradient_release(torch.nn.ParameterList(params), optimizer).remove()
    sum((0 * p).sum() for p in params).backward()  # which no longer steps, and leaves gradients
    optimizer.step()
    assert not any(p.grad.any() or optimizer.state[p][key].quantized.any() for p in params for key in ("exp_avg", "exp_avg_sq"))
    params, asked = halves(), []
    optimizer = flashoptim.FlashLion(params, lr=1e-9, check_numerics=True)
    flashoptim.enable_gradient_release(torch.nn.ParameterList(params), optimizer,
                                       pre_step=lambda p, group: asked.append(group["lr"]) or p.dim() > 1)
    raises(flashoptim.NumericsError, "and 8 bits beside them", sum((p * p).sum() for p in params).backward)
    assert params[0].grad is None  # the next gradient is not added to it
    optimizer.load_state_dict(optimizer.state_dict())  # which makes groups anew
    assert copy.deepcopy(optimizer)._pre_step is optimizer._pre_step
    optimizer.param_groups[0]["lr"] = 0.1
    before = [p.detach().clone() for p in params]
    params[1].grad = None
    sum((p * p).sum() for p in params).backward()
    assert asked[-2:] == [0.1, 0.1] and [torch.equal(p, q) for p, q in zip(params, before)] == [False, True]
    with torch.no_grad():
        params[0].fill_(2.0 ** 20)
    (params[0] * params[0]).sum().backward()  # the magnitude of the first step counts
    optimizer.recompute_param_stats()
    raises(flashoptim.NumericsError, "that reach", (params[0] * params[0]).sum().backward)


def halves(dtype=None):
    torch.manual_seed(3)
    return [torch.nn.Parameter(torch.randn(shape).to(dtype or torch.bfloat16)) for shape in ((20, 256), (70,))]


def adam_steps(optimizer, params, steps, masters=None, grad="grad", **settings):
    """Steps with gradients of a regression, which torch.optim.AdamW of fp32 masters gets too. Returns these."""
    masters = [torch.nn.Parameter(value.clone()) for value in masters or [p.detach().float() for p in params]]
    reference = torch.optim.AdamW(masters, lr=1e-3, **{"weight_decay": 0.0, **settings})
    for step in range(steps):
        for p, q in zip(params, masters):
            slope = q.detach() + torch.cos(torch.arange(float(p.numel())) * (step + 1)).view(p.shape)
            setattr(p, grad, slope if grad == "decoupled_grad" else slope.to(p.dtype))
            q.grad = getattr(p, grad).float()
        optimizer.step(), reference.step()
    return masters, reference


def test_torch_transformer_engine_masters():
    """FusedAdam's masters, separate or as remainders, made here or the caller's, take AdamW's steps in fp32; its states
    go out and in under TransformerEngine's names."""
    from nibble_optim.compat.transformer_engine import FusedAdam
    for dtype, more, kept in ((torch.bfloat16, {}, "master"), (torch.float16, {}, "master"),
                              (torch.bfloat16, {"store_param_remainders": True}, "weights.low"),
                              (torch.float16, {"store_param_remainders": True}, "master")):
        params, own = halves(dtype), [p.detach().float() + 1e-4 for p in halves(dtype)]
        fused = FusedAdam(params, weight_decay=0.1, master_weights=True, **more)
        for p, value in zip(params, own):
            fused.set_scaled_state(p, "master_param", value)
            assert torch.equal(p, value.to(dtype)) and torch.equal(fused.state[p]["master_param"], value)
        masters, reference = adam_steps(fused, params, 20, own, weight_decay=0.1)
        assert len(fused.describe()) == 1
        for p, q, begin in zip(params, masters, own):
            value = fused.state[p]["master_param"]
            assert kept in fused.state[p] and torch.equal(p, value.to(dtype))
            assert (value - q).norm() < 1e-4 * (q - begin).norm(), (dtype, more)
            given = fused.get_unscaled_state(p, "master_param")
            assert given.dtype is (torch.int16 if kept == "weights.low" else torch.float32)
        saved = {"state": {i: {name: fused.get_unscaled_state(p, name) for name in ("exp_avg", "exp_avg_sq",
                                                                                    "master_param")}
                           for i, p in enumerate(params)},
                 "param_groups": [{**fused.state_dict()["param_groups"][0], "step": 20}]}
        del saved["param_groups"][0]["steps"]
        its = [torch.nn.Parameter(p.detach().clone()) for p in params]
        again = FusedAdam(its, master_weights=True, **more)
        again.load_state_dict(saved)
        for one, other in ((fused, params), (again, its)):
            give(other)
            one.step()
        assert all(torch.equal(fused.state[p]["master_param"], again.state[q]["master_param"])
                   for p, q in zip(params, its)), (dtype, more)


def test_torch_transformer_engine_arguments():
    from nibble_optim.compat.transformer_engine import FusedAdam
    for moments, most in ((torch.float32, 1e-4), (torch.float16, 0.02), (torch.bfloat16, 0.02), (torch.uint8, 0.1)):
        params = halves(torch.float32)
        before = [p.detach().clone() for p in params]
        fused = FusedAdam(params, exp_avg_dtype=moments, exp_avg_sq_dtype=moments, capturable=True)
        assert fused.param_groups[0]["lr"].dtype is torch.float32
        for p, q, begin in zip(params, adam_steps(fused, params, 20)[0], before):
            assert (p - q).norm() < most * (q - begin).norm(), (moments, (p - q).norm() / (q - begin).norm())
        size = fused.state[params[0]]["m"].element_size()
        assert size == torch.empty(0, dtype=moments).element_size(), (moments, size)
    params = halves()
    masters = [p.detach().float() for p in params]  # a list is as good as True there
    fused = FusedAdam(params, use_decoupled_grad=True, master_weights=masters, set_grad_none=False)
    for p, q in zip(params, adam_steps(fused, params, 5, grad="decoupled_grad")[0]):
        assert (fused.state[p]["master_param"] - q).abs().max() < 1e-5 and p.grad is None
    fused.zero_grad()
    assert not params[0].decoupled_grad.any()
    raises(ValueError, "leave one out", lambda: fused.zero_grad(set_to_none=True))
    group = FusedAdam(halves(), 2e-3, (0.8, 0.9), 1e-7, 0.3, False).param_groups[0]
    assert [group[key] for key in ("lr", "betas", "eps", "weight_decay")] == [2e-3, (0.8, 0.9), 1e-7, 0.3]
    assert FusedAdam(halves(), master_weights=True, master_weight_dtype=torch.half)._bf16_weights == "bf16+16"
    for words, more in [("amsgrad=True", dict(amsgrad=True)), ("bias_correction=False", dict(bias_correction=False)),
                        ("masters of torch.uint8", dict(master_weights=True, master_weight_dtype=torch.uint8)),
                        ("take torch.float32", dict(exp_avg_dtype=torch.int8))]:
        raises(ValueError, words, lambda: FusedAdam(halves(), **more))


def test_torch_copies():
    """Copies beside the weights: the fp32 parameter or master, rounded; amax and 1 / scale are exact."""
    from nibble_optim.copies import write_copies
    for settings, dtype in ((dict(m="fp32", v="fp32"), torch.float32), (dict(weights="bf16+16"), torch.bfloat16)):
        params = halves(dtype)
        optimizer = nibble_optim.Optimizer(params, **settings)
        fp8 = [dict(data=torch.empty(p.shape, dtype=kind), amax=torch.zeros(1), scale_inv=torch.zeros(1))
               for p, kind in zip(params, (torch.float8_e4m3fn, torch.float8_e5m2))]
        fp8[1]["scale"] = torch.tensor([3e4])  # saturates
        low = [torch.empty(p.shape, dtype=kind) for p, kind in zip(params, (torch.bfloat16, torch.float16))]
        handles = [write_copies(optimizer, dict(zip(params, copies))) for copies in (fp8, low)]
        adam_steps(optimizer, params, 3)
        for p, copy8, copy16 in zip(params, fp8, low):
            value = optimizer.state[p]["master_param"] if dtype is torch.bfloat16 else p.detach()
            most, amax = torch.finfo(copy8["data"].dtype).max, value.abs().max()
            scale = copy8.get("scale", most / amax)
            assert torch.equal(copy16, value.to(copy16.dtype)) and copy8["amax"] == amax
            assert copy8["scale_inv"] == 1 / scale and copy8["data"].float().isfinite().all()
            assert torch.equal(copy8["data"].float(),
                               (value * scale).clamp(-most, most).to(copy8["data"].dtype).float())
        before = low[0].clone()
        [handle.remove() for handle in handles]
        adam_steps(optimizer, params, 1)
        assert torch.equal(low[0], before) and not torch.equal(params[0].to(low[0].dtype), before)
    # The copy is of the parameter, where its master is none of this optimizer's: states of torch's, and another's writing.
    p = halves()[0]
    adam = torch.optim.AdamW([p])
    adam_steps(adam, [p], 1)
    optimizer = nibble_optim.Optimizer([p], preset="adamw32")
    optimizer.load_state_dict(adam.state_dict())
    copy16, empty = torch.empty_like(p), torch.nn.Parameter(torch.empty(0, 8, dtype=torch.bfloat16, device=p.device))
    for write in (lambda: None, lambda: adam_steps(optimizer, [p], 1), torch.no_grad()(lambda: p.fill_(2.0))):
        write()
        write_copies(optimizer, {p: copy16}).remove()
        assert torch.equal(copy16, p)
    write_copies(nibble_optim.Optimizer([empty]), {empty: {"data": empty.to(torch.float8_e4m3fn),
                                                           **{name: torch.ones((), device=p.device) for name in ("amax", "scale_inv")}}})


def test_torch_copies_of_the_step():
    """The copies that a step of FusedAdam writes beside fp32 masters, with current scales or given ones, have the
    bits of the plain sequence of torch and of write_copies. A scale that is given stays when other code writes the
    parameter or loads states."""
    from nibble_optim.compat.transformer_engine import FusedAdam
    from nibble_optim.copies import write_copies
    fp8 = ("e4m3/tensor", torch.float8_e4m3fn), ("e5m2/tensor", torch.float8_e5m2)
    cases = [(None, torch.float16), (None, torch.bfloat16)] + [(name + end, kind) for name, kind in fp8 for end in ("+fp32", "@given+fp32")]
    for device, (weights, dtype) in itertools.product(DEVICES, cases):
        params = [torch.nn.Parameter(p.detach().to(device)) for p in halves(None if weights else dtype)]
        made = functools.partial(FusedAdam, [dict(params=params, weights=weights)], 0.01, master_weights=True)
        optimizer = made()
        optimizer.initialize_state(params[0])
        for step, scale in enumerate((2.0, 3.0, 1e6, 1e6, 1e6), 1):  # the last ones saturate
            if step == 4:
                params[0].data = params[0].detach() * 0.5
            if step == 5:
                saved, optimizer = optimizer.state_dict(), made()
                optimizer.load_state_dict(saved)
            given = weights and "@given" in weights
            for p in params if given and step < 4 else ():
                optimizer.state[p]["weights.scales"][2] = scale
            give(params, step)
            optimizer.step()
            for p in params:
                state = optimizer.state[p]
                value = state["master"]
                if not weights:
                    assert torch.equal(p, value.to(dtype))
                    continue
                codes, (amax, inverse, kept) = state["weights"][:p.numel()].view(p.shape), state["weights.scales"].clone()
                most, copy8 = torch.finfo(dtype).max, {name: torch.zeros(1, device=device) for name in ("amax", "scale_inv")}
                copy8.update(data=torch.empty_like(value, dtype=dtype), scale=kept)
                write_copies(optimizer, {p: copy8}).remove()
                assert amax == value.abs().max() == copy8["amax"], (weights, step)
                assert kept == scale and inverse == 1 / kept == copy8["scale_inv"] if given else \
                    abs(kept * amax / most - 1) < 1e-6 and abs(inverse * kept - 1) < 1e-6, (weights, step)
                assert torch.equal(codes, (value * kept).clamp(-most, most).to(dtype).view(torch.uint8))
                assert torch.equal(codes, copy8["data"].view(torch.uint8))
                assert torch.equal(p, (codes.view(dtype).float() * inverse).bfloat16())
