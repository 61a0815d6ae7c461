"""Cases of test_torch.py about what the optimizer takes and refuses: mistakes at construction, parameters of mixed
types, orders and orientations, gradients of another type than theirs, and states that other code changes."""
import contextlib
import copy
import importlib
import inspect
import io
import os
import subprocess
import sys
import tempfile
import unittest.mock
import warnings

from test_library import ROOT, library
from test_torch import batch, give, make, model_of, nibble_optim, parameter, raises, same, torch, train


def test_torch_refused_at_construction():
    vector, matrix, wide = parameter(8), parameter(6, 8), parameter(4, 12)
    of = nibble_optim.Optimizer
    made = of([("a", matrix)], rule="muon", overrides="none")
    for kind, words, function in [
            (ValueError, "did you mean adamw8?", lambda: of([vector], preset="adamw9")),
            (ValueError, "overrides: lnn matches no parameter", lambda: of([("ln", vector)], overrides="ln|lnn: m=fp32")),
            (ValueError, "stacked: q matches no parameter", lambda: of([("a", matrix)], rule="muon", stacked="a:3; q:3")),
            (ValueError, "transposed: q matches no", lambda: of([("a", matrix)], rule="muon", transposed="q")),
            (ValueError, "is a vector", lambda: of([vector], rule="muon", overrides="none")),
            (ValueError, "is a vector", lambda: made.add_param_group({"params": [("b", vector)]})),
            (ValueError, "e4m3x", lambda: of([{"params": [matrix]}, {"params": [vector], "m": "e4m3x"}])),
            (ValueError, "no 4 equal matrices", lambda: of([("a", matrix)], rule="muon", stacked="a:4")),
            (ValueError, 'add transposed="a"', lambda: of([("a", wide)], rule="muon", stacked="a:3")),
            (ValueError, "takes all matrices", lambda: of([matrix], rule="muon").step_in_backward()),
            (ValueError, "lr: -1", lambda: made.add_param_group({"params": [("b", wide)], "lr": -1.0})),
            (ValueError, "lr='x', ", lambda: of([vector], lr="x")),
            (ValueError, "betas 1.0 is out of range", lambda: of([vector], betas=(1.0, 0.9))),
            (ValueError, "betas=(0.9,) were found; give", lambda: of([vector], betas=(0.9,))),
            (ValueError, "eps: 0 was", lambda: of([matrix, vector], rule="muon", eps=0.0)),
            (TypeError, "did you mean nesterov?", lambda: of([matrix], rule="rmnp", nestorov=True)),
            (ValueError, "nesterov: 'off' was found; give True or False", lambda: of([matrix], rule="rmnp", nesterov="off")),
            (ValueError, "all parameters are fp32", lambda: of([vector], weights="bf16:sr")),
            (ValueError, 'weights: "e4m3" was found for parameters of fp16',
             lambda: of([torch.nn.Parameter(vector.half())], weights="e4m3")),
            (ValueError, "all groups share", lambda: of([{"params": [matrix], "momentum": 0.9}], rule="muon")),
            (TypeError, "float64", lambda: of([torch.nn.Parameter(vector.double())])),
            (TypeError, "set", lambda: of({vector})), (TypeError, "set", lambda: of([{"params": {vector}}]))]:
        raises(kind, words, function)
    assert library.rule_options().keys() < inspect.signature(nibble_optim.Optimizer).parameters.keys()
    assert "momentum=F from 0 to" in nibble_optim.Optimizer.__doc__
    code = "try: from nibble_optim import Optimizer\nexcept ImportError as error: print(error)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={
        **os.environ, "NIBBLE_OPTIM_LIBRARY": "/nowhere.so", "PYTHONPATH": str(ROOT / "optim" / "python")})
    assert "/nowhere.so is no file" in said.stdout, said
    give([matrix, vector, wide], 1)
    before = matrix.detach().clone()
    made.step()
    assert not torch.equal(before, matrix) and len(made.param_groups) == 1
    for settings in (dict(rule="lion"), dict(rule="sgd"), dict(preset="muon")):
        p = parameter(6, 8)
        give([p], 1)
        of([p], eps=0.0, **settings).step()
        assert p.isfinite().all() and not torch.equal(p, parameter(6, 8))
    for words, settings in [("momentum changes nothing", dict(momentum=0.9)), ("", dict(rule="rmnp", momentum=0.9)),
                            ("nothing without rule galore or fira or apollo or apollo-factored, and the optimizer has adamw", dict(rank=4)),
                            ("", dict(overrides="0.0: rule=muon", ns_steps=3))]:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            of([wide], **settings).step()
        assert len(said) == bool(words) and words in "".join(str(one.message) for one in said), (settings, said)


def test_torch_refused_later():
    absent, embedding, model = torch.nn.Parameter(torch.ones(4, device="meta")), torch.nn.Embedding(10, 4, sparse=True), model_of()
    absent.grad = torch.ones_like(absent)
    embedding(torch.tensor([1])).sum().backward()
    optimizer = make(model, preset="adamw8")
    train(model, optimizer, 1, 1)
    saved = optimizer.state_dict()
    for kind, words, function in [
            (ValueError, "on meta", nibble_optim.Optimizer([absent]).step),
            (RuntimeError, "sparse", nibble_optim.Optimizer(embedding.parameters()).step),
            (ValueError, "preset='adamw8'", lambda: make(model_of(), preset="adamw4").load_state_dict(saved)),
            (ValueError, "parameters and the", lambda: make(torch.nn.Linear(3, 3), preset="adamw8").load_state_dict(saved)),
            (ValueError, "shapes", lambda: nibble_optim.Optimizer(
                [parameter(n) for n in (5000, 70, 1, 5)], preset="adamw8", lr=1e-2).load_state_dict(saved))]:
        raises(kind, words, function)
    new = parameter(3)
    give([new], 1)
    before = new.detach().clone()
    optimizer.param_groups[0]["params"].append(new)
    optimizer.step()
    assert not torch.equal(new, before)
    optimizer.param_groups[0]["params"][-1] = parameter(3)
    raises(RuntimeError, "in no group any more", optimizer.step)


def test_torch_rules_of_matrices_leave_the_rest():
    """Embeddings, heads, norms and biases by the names of several models, and all vectors, are adamw's."""
    rest = ["model.embed_tokens.weight", "lm_head.weight", "tok_embeddings.weight", "model.norm.weight", "bias",
            "transformer.wte.weight", "layers.0.attention_norm.weight"]
    for preset in ("muon", "muon8", "galore8", "rmnp4"):
        named = [(name, parameter(8, 8)) for name in rest + ["layers.0.fc.weight"]] + [("layers.0.gain", parameter(8))]
        optimizer = nibble_optim.Optimizer(named, preset=preset)
        give([p for _, p in named], 1)
        optimizer.step()
        rules = {name: set(optimizer.state[p]) for name, p in named}
        own = rules.pop("layers.0.fc.weight")
        assert len(set(map(frozenset, rules.values()))) == 1 and own != rules["bias"], (preset, own, rules)
        assert "v" in rules["bias"], preset
    # transformers' Trainer makes its optimizers with groups of parameters without names, or with those of a model.
    model = torch.nn.ModuleDict({"embed_tokens": torch.nn.Embedding(8, 8), "fc": torch.nn.Linear(8, 8)})
    for names in (None, model):
        optimizer = nibble_optim.Optimizer([{"params": list(model.parameters())}], preset="muon8", names=names)
        give(list(model.parameters()), 1)
        optimizer.step()
        assert ["v" in optimizer.state[p] for p in model.parameters()] == [names is model, False, True]


def test_torch_states_taken_and_replaced():
    def pop(optimizer, p):
        optimizer.state.pop(p)

    def replace_all(optimizer, p):
        optimizer.state = {q: {name: value.clone() for name, value in state.items()}
                           for q, state in optimizer.state.items() if q is not p}

    def begin_anew(optimizer, _):
        optimizer.state.clear()
        optimizer.param_groups[0]["steps"] = 0

    for change in (pop, replace_all, begin_anew):
        model, anew = model_of(dtype=torch.bfloat16), change is begin_anew
        optimizer = make(model, preset="adamw8")
        train(model, optimizer, 1, 3)
        saved = copy.deepcopy(optimizer.state_dict())
        del saved["state"][1]
        again = copy.deepcopy(model)
        other = make(again, preset="adamw8")
        if not anew:
            other.load_state_dict(saved)
        change(optimizer, model[0].bias)
        train(model, optimizer, 4, 6)
        train(again, other, 4, 6)
        assert same(model, again) and int(optimizer.state[model[0].bias]["step"]) == 3, change
        assert len(optimizer.describe()) == (1 if anew else 3), "the first, the two after it, and the one made anew"
    # A state's tensor is replaced; a parameter is replaced, and its state goes with it.
    for replaces in (False, True):
        params = [parameter(8, 8), parameter(8)]
        optimizer = nibble_optim.Optimizer(params, preset="adamw32", lr=1e-2, weight_decay=0.0)
        give(params, 1)
        optimizer.step()
        state = optimizer.state[params[0]]
        state["m"] = torch.zeros(8, 8)
        if replaces:
            new = torch.nn.Parameter(params[0].detach().clone())
            optimizer.state[new] = optimizer.state.pop(params[0])
            optimizer.param_groups[0]["params"][0] = params[0] = new
        before = params[0].detach().clone()
        for p in params:
            p.grad = torch.zeros_like(p)
        optimizer.step()
        assert torch.equal(params[0], before) and int(optimizer.state[params[0]]["step"]) == 2, "m was 0, and is used"
        optimizer.state[params[0]]["m"] = torch.zeros(3)
        raises(ValueError, "shapes that it was saved with", optimizer.step)


def goes_on_from(kind, preset, most):
    """Ten steps of another optimizer, then ten from its states here and there: the ways differ by less than `most`."""
    theirs, mine = ([parameter(64, 128), parameter(33)] for _ in range(2))
    other = kind(theirs, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95))
    optimizer = nibble_optim.Optimizer(mine, preset=preset, lr=9.0)
    for number in range(1, 21):
        give(theirs, number)
        if number == 11:
            optimizer.load_state_dict(other.state_dict())
            before = [p.detach().clone() for p in theirs]
            for p, q in zip(mine, theirs):
                p.data.copy_(q.data)
        if number > 10:
            give(mine, number)
            optimizer.step()
        other.step()
    assert optimizer.param_groups[0]["lr"] == 1e-2 and optimizer.param_groups[0]["steps"] == 20
    for p, q, start in zip(mine, theirs, before):
        assert (p - q).norm() < most * (q - start).norm(), (kind, (p - q).norm() / (q - start).norm())
    return other, optimizer


def test_torch_states_of_other_optimizers():
    """torch's, and where they are installed torchao's and bitsandbytes', go on here; states have torch's names too."""
    other, optimizer = goes_on_from(torch.optim.AdamW, "adamw32", 1e-5)
    for p, q in zip(optimizer.param_groups[0]["params"], other.param_groups[0]["params"]):
        for name in ("exp_avg", "exp_avg_sq"):
            assert name in optimizer.state[p] and name not in list(optimizer.state[p])
            raises(TypeError, "is a copy, which no step reads; set step", lambda: optimizer.state[p].__setitem__(name, p))
            assert torch.allclose(optimizer.state[p][name], other.state[q][name], rtol=1e-5, atol=1e-6)
    with unittest.mock.patch("torch.compile", lambda function, **_: function):
        for package in ("torchao.optim", "bitsandbytes.optim"):
            with contextlib.suppress(ImportError):
                goes_on_from(importlib.import_module(package).AdamW8bit, "adamw8", 0.05)
    with contextlib.suppress(ImportError):  # whose first state is two averages
        for kind in ("AdEMAMix", "AdEMAMix8bit"):
            theirs, mine = ([parameter(64, 128), parameter(33, 131)] for _ in range(2))
            other = getattr(importlib.import_module("bitsandbytes.optim"), kind)(theirs)
            give(theirs)
            other.step()
            states = nibble_optim.Optimizer(mine, rule="ademamix", m="fp32", v="fp32")
            states.load_state_dict(other.state_dict())
            for p, q in zip(mine, theirs):
                want = 0.1 * q.grad, (1 - 0.9999) * q.grad
                for name, value in zip(("m", "slow"), want):
                    off = (states.state[p][name].view(-1)[:p.numel()].view_as(p) - value).norm() / value.norm()
                    assert off < 0.02, (kind, name, off)
    lion = nibble_optim.Optimizer([parameter(8)], rule="lion")
    raises(ValueError, "neither exp_avg", lambda: lion.load_state_dict(
        {"state": {0: {"step": 1}}, "param_groups": [{"params": [0], "lr": 1.0, "betas": (0.9, 0.9)}]}))


def test_torch_every_preset_takes_fp16():
    """Also those with 8-bit weights, which name weights of bf16 for vectors: these are none of fp16 parameters."""
    lines = library.library().nibble_optim_list(b"presets").decode().splitlines()[1:]
    for preset in [line.split()[0] for line in lines if not line.split()[0].startswith("--")]:
        named = [(name, torch.nn.Parameter(torch.ones(shape, dtype=torch.float16)))
                 for name, shape in (("ln_1.weight", (64,)), ("c_fc.weight", (64, 64)), ("c_fc.bias", (64,)))]
        optimizer = nibble_optim.Optimizer(named, preset=preset)
        give([p for _, p in named])
        optimizer.step()
        assert all((p != 1).any() and p.isfinite().all() for _, p in named), preset


def test_torch_saved_vectors_are_not_padded():
    params = [parameter(64) for _ in range(1000)]
    optimizer = nibble_optim.Optimizer(params)
    give(params, 1)
    optimizer.step()
    saved, file = optimizer.state_dict(), io.BytesIO()
    torch.save(saved, file)
    bytes_each = sum(value.nbytes for state in saved["state"].values() for value in state.values()) / 64000
    assert bytes_each < 2.4 and len(file.getvalue()) < 10 * 64000, (bytes_each, len(file.getvalue()) / 64000)


def test_torch_release_under_ddp_is_refused():
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=0, world_size=1)
        try:
            model = model_of()
            saved = make(model, preset="adamw8")
            train(model, saved, 1, 1)
            make(model, preset="adamw8").step_in_backward().load_state_dict(saved.state_dict())
            wrapped = torch.nn.parallel.DistributedDataParallel(model)
            x, y = batch(model, 1)
            raises(RuntimeError, "DistributedDataParallel", lambda: (wrapped(x) - y).square().sum().backward())
        finally:
            torch.distributed.destroy_process_group()
