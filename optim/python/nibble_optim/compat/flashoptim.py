"""Optimizers of flashoptim: 8-bit states in blocks of 32, and bf16 weights with 8 or 16 bits more beside them."""
import torch

from . import drop_in

_WEIGHTS = {24: "bf16+8", 32: "bf16+16", None: "bf16"}
_SHARED = ", quantize=True, compress_state_dict=True, master_weight_bits=24, check_numerics=False, fused=True"
_MOMENTUM = "params, lr=1e-3, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False"


def _momentum(name, rule, optimizer, values):
    momentum, dampening, nesterov = (values.pop(key) for key in ("momentum", "dampening", "nesterov"))
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
        optimizer._bf16_weights = _WEIGHTS[bits]
        m, v = ("soft8/32", "sqrt8/32") if quantize else ("fp32", "fp32")
        its = dict(m=m, v=v if keeps_v else None)
        if "momentum" in values:
            its.update(_momentum(name, rule, optimizer, values))
        if values.pop("decouple_lr", False):  # a step decays by weight_decay times lr over the first lr
            its.update(decay_mode="independent", lr_max=values["lr"])
        return its
    return settings


for _name, _rule, _signature, _keeps_v in [
        ("FlashAdam", "adam", "params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0", True),
        ("FlashAdamW", "adamw", "params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, decouple_lr=False",
         True),
        ("FlashLion", "lion", "params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0, decouple_lr=False", False),
        ("FlashSGD", "sgd", _MOMENTUM, False), ("FlashSGDW", "sgdw", _MOMENTUM + ", decouple_lr=False", False)]:
    globals()[_name] = drop_in(_name, _signature + _SHARED, _settings(_name, _rule, _keeps_v), rule=_rule)
    globals()[_name]._lr_factor, globals()[_name]._decouples = _damped_factor, _rule == "sgdw"


def enable_gradient_release(model, optimizer, *, grad_scaler=None, pre_step=None):
    """Steps each parameter of the optimizer in the backward pass."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise TypeError("enable_gradient_release does not work with DistributedDataParallel; take fully_shard")
    if grad_scaler is not None or pre_step is not None:
        raise ValueError("enable_gradient_release: grad_scaler and pre_step are not there; leave them out")
    return optimizer.step_in_backward()
