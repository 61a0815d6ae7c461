"""Optimizers of flashoptim: 8-bit states in blocks of 32, and bf16 weights with 8 or 16 bits more beside them."""
from ..optimizer import Optimizer

_WEIGHTS = {24: "bf16+8", 32: "bf16+16", None: "bf16"}


def _make(name, rule, lr, betas, decay, keeps_v=True):
    def __init__(self, params, lr=lr, betas=betas, eps=1e-8, weight_decay=decay, quantize=True, decouple_lr=False,
                 compress_state_dict=True, master_weight_bits=24, check_numerics=False, fused=True, *, seed=0):
        if master_weight_bits not in _WEIGHTS:
            raise ValueError(f"{name}: master_weight_bits={master_weight_bits} was found; take 24, 32 or None")
        if not compress_state_dict or check_numerics:
            raise ValueError(f"{name}: compress_state_dict=False and check_numerics=True are not there; leave them out")
        self._bf16_weights = _WEIGHTS[master_weight_bits]
        if decouple_lr:  # a step decays by weight_decay times lr over the first lr
            decay = dict(decay_mode="independent", lr_max=lr)
        else:
            decay = {}
        m, v = ("soft8/32", "sqrt8/32") if quantize else ("fp32", "fp32")
        Optimizer.__init__(self, params, rule=rule, m=m, v=v if keeps_v else None, lr=lr, betas=betas, eps=eps,
                           weight_decay=weight_decay, seed=seed, **decay)

    return type(name, (Optimizer,), {"__init__": __init__, "__doc__": f"flashoptim.{name}", "__module__": __name__})


FlashAdam = _make("FlashAdam", "adam", 1e-3, (0.9, 0.999), 0.0)
FlashAdamW = _make("FlashAdamW", "adamw", 1e-3, (0.9, 0.999), 1e-2)
FlashLion = _make("FlashLion", "lion", 1e-4, (0.9, 0.99), 0.0, keeps_v=False)


class FlashSGD(Optimizer):
    """flashoptim.FlashSGD"""

    def __init__(self, params, lr=1e-3, momentum=0.0, weight_decay=0.0, quantize=True, master_weight_bits=24, *,
                 seed=0):
        self._bf16_weights = _WEIGHTS[master_weight_bits]
        super().__init__(params, rule="sgd", m="soft8/32" if quantize else "fp32", lr=lr, betas=(momentum, 0.0),
                         weight_decay=weight_decay, seed=seed)


def enable_gradient_release(model, optimizer):
    """Steps each parameter of the optimizer in the backward pass; `model`, which flashoptim needs, is ignored."""
    return optimizer.step_in_backward()
