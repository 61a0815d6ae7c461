"""Optimizers of flashoptim: 8-bit states in blocks of 32, and bf16 weights with 8 or 16 bits more beside them, and what
it has for a model: casts, fp32 weights, gradient release. With compress_state_dict=False, state_dict() has moments and
master_param in fp32, which torch's optimizers take, and those here of any formats, unless parameters are sharded or SGD
has dampening."""
import fnmatch
import functools
import math

import torch
from torch.utils._pytree import tree_map_only

from ..optimizer import FORMATS, Optimizer
from ..part import MOMENTS, _local, is_dtensor, with_low
from . import _attribute as __getattr__, drop_in  # noqa: F401

_WEIGHTS = {24: "bf16+8", 32: "bf16+16", None: "bf16"}
_SHARED = ", quantize=True, compress_state_dict=True, master_weight_bits=24, check_numerics=False, fused=True"
_MOMENTUM = "params, lr=1e-3, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False"


def _momentum(name, rule, optimizer, values):
    optimizer._sgd = {key: values.pop(key) for key in ("momentum", "dampening", "nesterov")}
    momentum, dampening, nesterov = optimizer._sgd.values()
    if dampening >= 1 or nesterov and (momentum <= 0 or dampening != 0):
        raise ValueError(f"{name}: momentum={momentum}, dampening={dampening} and nesterov={nesterov} were found; nesterov "
                         "needs a momentum without dampening, which is below 1")
    # m is a sum of undamped gradients here, so the rate is damped instead, though not decoupled decay.
    optimizer._factors_lr, optimizer._damped = momentum > 0 and dampening != 0, 1 - dampening
    return dict(betas=(momentum, 0.0), rule=rule + "-nesterov" * nesterov)


def _damped_factor(self, param, age):
    return self._damped, 1 / self._damped if self._decouples else 1.0


def _settings(name, rule, keeps_v):
    def settings(optimizer, values):
        bits, quantize = values.pop("master_weight_bits"), values.pop("quantize")
        if bits not in _WEIGHTS:
            raise ValueError(f"{name}: master_weight_bits={bits} was found; take 24, 32 or None")
        optimizer._bf16_weights, optimizer._compresses = _WEIGHTS[bits], values.pop("compress_state_dict")
        optimizer._check_numerics, optimizer._low_bits = values.pop("check_numerics"), (bits or 16) - 16
        optimizer._least_step = 0.1 if keeps_v else 1.0  # over the rate; adam's is flashoptim's estimate
        optimizer._answer = functools.partial(_answer, torch.int8 if bits == 24 else torch.int16)
        m, v = ("soft8/32", "sqrt8/32") if quantize else ("fp32", "fp32")
        its = dict(m=m, v=v if keeps_v else None)
        if "momentum" in values:
            its.update(_momentum(name, rule, optimizer, values))
        if values.pop("decouple_lr", False):  # a step decays by weight_decay times lr over the first lr
            its.update(decay_mode="independent", lr_max=values["lr"])
        return its
    return settings


class NumericsError(RuntimeError):
    """The rate is too small to change a parameter's largest values."""


def recompute_param_stats(self):
    """Forgets the largest magnitude of each parameter, so that check_numerics finds them anew in the next step."""
    vars(self).pop("_largest", None)


def _step(self, params, grads):
    """With check_numerics, refuses a rate whose step (least_step of it) is less than 1 / 0.49 times the distance between
    neighbouring numbers at a parameter's largest magnitude. That is flashoptim's bound. Ranks have the same magnitude."""
    most = vars(self).setdefault("_largest", {}) if self._check_numerics else {}
    for p in (p for p, grad in zip(params, grads) if grad is not None) if self._check_numerics else ():
        rate = self.param_groups[self._group_of[p]]["lr"]
        if p not in most:
            most[p] = float((p.full_tensor() if is_dtensor(p) else p).detach().abs().max()) if p.numel() else 0.0
        bits = self._low_bits if p.dtype is not torch.float32 else 0
        if rate > 0 and 0 < most[p] < math.inf:
            least = torch.finfo(p.dtype).eps / 0.49 * 2.0 ** (math.floor(math.log2(most[p])) - bits)
            if self._least_step * rate < least:
                beside = f" and {bits} bits beside them" if bits else ""
                raise NumericsError(f"lr={rate:.3g} may be too small to change weights of {p.dtype}{beside} that reach "
                                    f"{most[p]:.3g}; give lr={least / self._least_step:.3g} or more, or leave check_numerics out")
    Optimizer._step(self, params, grads)


class Moment:
    """A moment as flashoptim has it: codes in the parameter's shape, their scales, and materialize() in fp32."""

    def __init__(self, part, tensor, name):
        self.quantized, self.scales = (part.views[tensor].get(name + end) for end in ("", ".scales"))
        self.quantized = self.quantized.view(part.kept_shapes[tensor])
        if name == "m" and self.scales is not None:  # soft8 counts from -127 there
            self.quantized = (self.quantized.int() - 127).to(torch.int8)
        elif self.scales is not None:  # sqrt8 multiplies codes, not codes / 255; a code of 0 is 1 there, scaled by 0
            self.scales = 255 * self.scales
            empty = (self.scales == 0).repeat_interleave(32)[:self.quantized.numel()]
            self.quantized = self.quantized.masked_fill(empty.view_as(self.quantized), 0)
        self.materialize, self.is_quantized = lambda: part.moment(tensor, name), lambda: self.scales is not None


def _half_gap(p):
    """Returns half of the gap between numbers of fp16 that are as large as those of a parameter, in fp32."""
    return ((p.view(torch.int16).int() >> 10 & 31).clamp(min=1) + 101 << 23).view(torch.float32)


@torch.no_grad()
def reconstruct_fp32_param(param, error_bits):
    """Returns a parameter's values in fp32. Its error_bits are the lower bits of bf16, and fractions of fp16's half gap."""
    if param.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"reconstruct_fp32_param: {param.dtype} was found; give bf16 or fp16")
    return with_low(param, error_bits) if param.dtype is torch.bfloat16 else \
        param.float() + error_bits.float() / torch.iinfo(error_bits.dtype).max * _half_gap(param)


def _answer(error_dtype, part, tensor, key):
    if key in ("exp_avg", "exp_avg_sq", "momentum_buffer") and part.keeps(tensor, MOMENTS[key]):
        return lambda: Moment(part, tensor, MOMENTS[key])
    if key != "error_bits" or not part.keeps(tensor, "master"):
        return None
    if part.dtype is torch.bfloat16:
        return (lambda: part.low(tensor)) if part.low(tensor) is not None else None
    p, most = part.locals[tensor].detach(), torch.iinfo(error_dtype).max
    return lambda: (
        (part.moment(tensor, "master") - p.float()) / _half_gap(p) * most).clamp(-most, most).round().to(error_dtype)


def state_dict(self):
    saved = Optimizer.state_dict(self)
    if self._compresses or self._sgd.get("dampening") or any(map(is_dtensor, self._part_of)):
        return saved
    # Without these keys, load_state_dict takes the states as another optimizer's.
    saved["param_groups"] = [{key: value for key, value in {**group, **self._sgd}.items() if key not in ("steps", *FORMATS)}
                             for group in saved["param_groups"]]
    other = "exp_avg" if self._sgd else "momentum_buffer"
    for p, (part, t) in self._part_of.items():
        its = {name: part.moment(t, own) for name, own in MOMENTS.items() if name != other and part.keeps(t, own)}
        saved["state"][self._place_of[p]] = {"step": self.state[p]["step"], **its}
    return saved


def _whole(model):
    return model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model


@torch.no_grad()
def get_fp32_model_state_dict(self, model):
    """Returns the model's state_dict in fp32, with the bits that the optimizer keeps beside its parameters."""
    values = {name: value.detach().to(torch.float32, copy=True) for name, value in _whole(model).state_dict().items()}
    for name, p in _whole(model).named_parameters():
        if "master_param" in self.state.get(p, {}):
            values[name] = self.state[p]["master_param"]
    return values


@torch.no_grad()
def set_fp32_model_state_dict(self, model, fp32_state_dict):
    """Sets the model's parameters to those of an fp32 state_dict, and the bits beside them to what rounding cut off."""
    self._make_all()
    for name, p in _whole(model).named_parameters():
        if (value := fp32_state_dict.get(name)) is None:
            continue
        if value.dtype is not torch.float32:
            raise ValueError(f"set_fp32_model_state_dict: {name} of {value.dtype} was found; give fp32")
        part, number = self._part_of.get(p, (None, 0))
        if part is not None and part.keeps(number, "master"):
            part.moment(number, "master", _local(value))
        else:
            p.copy_(value)


for _name, _rule, _signature, _keeps_v in [
        ("FlashAdam", "adam", "params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0", True),
        ("FlashAdamW", "adamw", "params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, decouple_lr=False",
         True),
        ("FlashLion", "lion", "params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0, decouple_lr=False", False),
        ("FlashSGD", "sgd", _MOMENTUM, False), ("FlashSGDW", "sgdw", _MOMENTUM + ", decouple_lr=False", False)]:
    _kind = globals()[_name] = drop_in(_name, _signature + _SHARED, _settings(_name, _rule, _keeps_v), rule=_rule)
    _kind._lr_factor, _kind._decouples, _kind._sgd, _kind._check_numerics = _damped_factor, _rule == "sgdw", {}, False
    _kind._ensure_state_initialized = lambda self, param, hparams=None: self._make_all()
    for _method in (state_dict, get_fp32_model_state_dict, set_fp32_model_state_dict, recompute_param_stats, _step):
        setattr(_kind, _method.__name__, _method)


def _cast(values, dtype):
    return tree_map_only(torch.Tensor, lambda value: value.to(dtype) if value.is_floating_point() else value, values)


def cast_model(model, dtype=torch.bfloat16, selective=True, full_precision_layers=None,
               full_precision_recast_layers=None):
    """Casts a model's parameters and buffers to `dtype`, in place. Layers that are named (patterns of fnmatch for names
    with dots, or modules) stay as they are and get their inputs in fp32; the output of full_precision_recast_layers is
    of `dtype`. With `selective`, batch and instance norms stay too."""
    norms = (torch.nn.modules.batchnorm._BatchNorm, torch.nn.modules.instancenorm._InstanceNorm) if selective else ()
    named, recast = [], []
    for name, module in model.named_modules():
        for layers, found in ((full_precision_layers, named), (full_precision_recast_layers, recast)):
            if any(layer is module or isinstance(layer, str) and fnmatch.fnmatch(name, layer) for layer in layers or ()):
                found.append(module)
    kept = {id(tensor) for module in named + recast for its in (module.parameters(), module.buffers()) for tensor in its}
    for module in model.modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.is_floating_point() and not isinstance(module, norms) and id(tensor) not in kept:
                tensor.data = tensor.data.to(dtype)
                kept.add(id(tensor))
    for module in named + recast:
        module._has_fp32_input_hook = True  # flashoptim's mark
        module.register_forward_pre_hook(lambda _, inputs: _cast(inputs, torch.float32))
    for module in recast:
        module.register_forward_hook(lambda _, inputs, output: _cast(output, dtype))


def enable_gradient_release(model, optimizer, *, grad_scaler=None, pre_step=None):
    """Steps each parameter of the optimizer in the backward pass, until remove() of what it returns is called. A
    parameter is left alone where pre_step(parameter, its group) is false."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise TypeError("enable_gradient_release does not work with DistributedDataParallel; take fully_shard")
    if grad_scaler is not None:
        raise NotImplementedError("enable_gradient_release: grad_scaler is not there; leave it out")
    hooks = optimizer.step_in_backward(pre_step)._hooks
    return type("GradientReleaseHandle", (), {"active": property(lambda self: bool(hooks)),
                                               "remove": lambda self: [hooks.pop().remove() for _ in tuple(hooks)]})()
