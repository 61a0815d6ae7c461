"""Optimizers of bitsandbytes.optim with 8-bit and 32-bit states. min_8bit_size counts the elements of the whole tensor.
The Paged classes exist for their names; their states stay on the GPU."""
import sys

from ..optimizer import Optimizer


def _checked_bits(name, bits, optim_bits):
    """Returns the bits of the states: the class's, or else the argument's."""
    if (bits or optim_bits) not in (8, 32):
        raise ValueError(f"{name}: optim_bits={optim_bits} was found; take 8 or 32")
    return bits or optim_bits


def _make(name, rule, bits, lr, betas, decay, keeps_v=True):
    """Returns the class `name` with states of 8 or 32 bits; bits 0 leaves the choice to the argument optim_bits."""

    def __init__(self, params, lr=lr, betas=betas, eps=1e-8, weight_decay=decay, amsgrad=False, optim_bits=bits or 32,
                 args=None, min_8bit_size=4096, percentile_clipping=100, block_wise=True, is_paged=False, *, alpha=5.0,
                 t_alpha=None, t_beta3=None, seed=0):
        for what, found, want in [("amsgrad", amsgrad, False), ("percentile_clipping", percentile_clipping, 100),
                                  ("block_wise", block_wise, True), ("t_beta3", t_beta3, t_alpha)]:
            if found != want:
                raise ValueError(f"{name}: {what}={found} was found; take {want}")
        used = _checked_bits(name, bits, optim_bits)
        self._bf16_weights = "bf16"
        slow = dict(beta3=betas[2], alpha=alpha, ramp=t_alpha) if rule == "ademamix" else {}
        m, v = ("dyn8/256", "udyn8/256") if used == 8 else ("fp32", "fp32")
        Optimizer.__init__(self, params, rule=rule, m=m, v=v if keeps_v else None, lr=lr, betas=betas[:2], eps=eps,
                           weight_decay=weight_decay, min_quantized=min_8bit_size if used == 8 else 0, seed=seed,
                           **slow)

    return type(name, (Optimizer,), {"__init__": __init__, "__module__": __name__,
                                     "__doc__": f"bitsandbytes.optim.{name}"})


def _make_sgd(name, bits):
    def __init__(self, params, lr, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, optim_bits=bits or 32,
                 args=None, min_8bit_size=4096, percentile_clipping=100, block_wise=True, *, seed=0):
        for what, found, want in [("dampening", dampening, 0.0), ("nesterov", nesterov, False),
                                  ("percentile_clipping", percentile_clipping, 100), ("block_wise", block_wise, True)]:
            if found != want:
                raise ValueError(f"{name}: {what}={found} was found; take {want}")
        used = _checked_bits(name, bits, optim_bits)
        self._bf16_weights = "bf16"
        Optimizer.__init__(self, params, rule="sgd", m="dyn8/256" if used == 8 else "fp32", lr=lr,
                           betas=(momentum, 0.0), weight_decay=weight_decay,
                           min_quantized=min_8bit_size if used == 8 else 0, seed=seed)

    return type(name, (Optimizer,), {"__init__": __init__, "__module__": __name__,
                                     "__doc__": f"bitsandbytes.optim.{name}"})


def _family(base, rule, lr, betas, decay, keeps_v=True):
    return {prefix + base + suffix: _make(prefix + base + suffix, rule, bits, lr, betas, decay, keeps_v)
            for prefix in ("", "Paged") for suffix, bits in (("", 0), ("8bit", 8), ("32bit", 32))}


globals().update(_family("Adam", "adam", 1e-3, (0.9, 0.999), 0.0))
globals().update(_family("AdamW", "adamw", 1e-3, (0.9, 0.999), 1e-2))
globals().update(_family("Lion", "lion", 1e-4, (0.9, 0.99), 0.0, keeps_v=False))
globals().update(_family("AdEMAMix", "ademamix", 1e-3, (0.9, 0.999, 0.9999), 1e-2))
SGD, SGD8bit, SGD32bit = _make_sgd("SGD", 0), _make_sgd("SGD8bit", 8), _make_sgd("SGD32bit", 32)
optim = sys.modules[__name__]  # so that bnb.optim.AdamW8bit is found where bnb is this module
