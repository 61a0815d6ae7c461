"""Optimizers of bitsandbytes.optim with 8-bit and 32-bit states. min_8bit_size counts the elements of the whole tensor.
The Paged classes exist for their names; their states stay on the GPU. Adam decays as AdamW does, as it does there."""
import sys

from . import drop_in

_BITS = ", optim_bits=32, args=None, min_8bit_size=4096"
_ADAM = "params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay={}, amsgrad=False" + _BITS
_LION = "params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0" + _BITS
_ADEMAMIX = ("params, lr=1e-3, betas=(0.9, 0.999, 0.9999), alpha=5.0, t_alpha=None, t_beta3=None, eps=1e-8, "
             "weight_decay=1e-2, optim_bits=32, min_8bit_size=4096")
_SGD = "params, lr, momentum=0, dampening=0, weight_decay=0, nesterov=False" + _BITS


def _make(name, rule, bits, signature):
    """Returns the class `name` with states of 8 or 32 bits; bits 0 leaves the choice to the argument optim_bits."""

    def settings(optimizer, values):
        asked, least = values.pop("optim_bits", 32), values.pop("min_8bit_size")
        if asked not in (32, bits or 8):
            raise ValueError(f"{name}: optim_bits={asked} was found; take {'8 or 32' if bits == 0 else bits}")
        quantized = (bits or asked) == 8
        values.pop("is_paged", None)
        optimizer._bf16_weights = "bf16"
        m, v = ("dyn8/256", "udyn8/256") if quantized else ("fp32", "fp32")
        its = dict(rule=rule, m=m, v=v if rule in ("adamw", "ademamix") else None,
                   min_quantized=least if quantized else 0)
        betas = values.pop("betas") if "betas" in values else (values.pop("momentum"), 0.0)
        its.update(betas=betas[:2], eps=values.pop("eps", 1e-8))
        if rule == "ademamix":
            alpha, ramp = values.pop("t_alpha"), values.pop("t_beta3")
            if alpha != ramp:
                raise ValueError(f"{name}: t_alpha={alpha} and t_beta3={ramp} were found; give both alike, or none")
            its.update(beta3=betas[2], alpha=values.pop("alpha"), ramp=ramp)
        return its

    return drop_in(__name__, name, signature, settings)


def _family(base, rule, signature, bits_of_all=False, paged_of_all=False, prefixes=("", "Paged")):
    """Enters the classes of one rule. bits_of_all, paged_of_all: all classes have the argument optim_bits, is_paged."""
    for prefix in prefixes:
        for suffix, bits in (("", 0), ("8bit", 8), ("32bit", 32)):
            its = signature if bits == 0 or bits_of_all else signature.replace(", optim_bits=32", "")
            its += ", is_paged=False" if paged_of_all or (not prefix and len(prefixes) > 1) else ""
            globals()[prefix + base + suffix] = _make(prefix + base + suffix, rule, bits, its)


_family("Adam", "adamw", _ADAM.format(0), True, True)
_family("AdamW", "adamw", _ADAM.format(1e-2), True)
_family("Lion", "lion", _LION)
_family("AdEMAMix", "ademamix", _ADEMAMIX)
_family("SGD", "sgd", _SGD, prefixes=("",))
optim = sys.modules[__name__]  # so that bnb.optim.AdamW8bit is found where bnb is this module
