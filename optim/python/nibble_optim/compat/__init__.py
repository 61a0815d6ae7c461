"""Optimizers with the names and arguments of other packages, so that only the import has to change:

    from nibble_optim.compat.torchao import AdamW8bit            # torchao.optim
    from nibble_optim.compat import bitsandbytes as bnb          # bnb.AdamW8bit, bnb.optim.AdamW8bit
    from nibble_optim.compat.flashoptim import FlashAdamW        # flashoptim
    from nibble_optim.compat.transformer_engine import FusedAdam    # transformer_engine.pytorch.optimizers
    from nibble_optim.compat.torch_optim import Adafactor, Muon  # torch.optim
    from nibble_optim.compat.galore_torch import GaLoreAdamW     # galore_torch; also apollo_torch, came_pytorch

States have the original's formats; results differ from it by rounding. State dicts are nibble_optim's. A module is a
table of its package's classes: name, arguments as the package writes them, and Optimizer's settings."""
import inspect
import sys
import typing

import torch

from ..optimizer import Optimizer

# Arguments that change no result here, and such that Optimizer has too.
WITHOUT_EFFECT = ("args is_paged fused foreach no_deprecation_warning set_grad_none capturable "
                  "use_cuda_kernel block_wise percentile_clipping materialize_master_grads apollo_update_proj_gap "
                  "apollo_scale_type apollo_eps apollo_factorize").split()  # apollo's without apollo_rank
SHARED = "params lr weight_decay seed eps".split()


def _attribute(name: str) -> typing.Any:
    """Modules that make classes in a loop import it for type checkers, which do not see these."""
    raise AttributeError(f"nibble_optim.compat has no {name}")


def drop_in(name, signature, settings, **fixed):
    """Returns the class `name`. Its arguments are those of `signature`, as the other package writes them, and seed.
    `settings(optimizer, values)`, if given, takes those that it uses out of `values` and returns Optimizer's, which have
    `fixed` besides; the others have to have the package's defaults."""
    arguments = inspect.signature(eval(f"lambda self, {signature}{'' if '*' in signature else ', *'}, seed=0: 0",
                                       {"torch": torch}))
    module = sys._getframe(1).f_globals["__name__"]

    def __init__(self, *args, **kwargs):
        bound = arguments.bind(self, *args, **kwargs)
        bound.apply_defaults()
        values = bound.arguments
        del values["self"]
        its = {**fixed, **(settings(self, values) if settings else {})}
        self._given = dict(vars(self))
        betas = values.pop("betas", None)
        if betas is not None:
            its.update({"betas": betas[:2], **({"beta3": betas[2]} if len(betas) > 2 else {})})
        for key in WITHOUT_EFFECT:
            values.pop(key, None)
        its.update((key, values.pop(key)) for key in SHARED if key in values)
        for key, value in values.items():
            if value != arguments.parameters[key].default:
                raise ValueError(f"{name}: {key}={value!r} was found, which is not there; leave it out")
        Optimizer.__init__(self, **its)

    __init__.__signature__ = arguments
    return type(name, (Optimizer,), {"__init__": __init__, "__module__": module, "_bf16_weights": "bf16",
                                     "__doc__": f"{name} of {module.rpartition('.')[2]}, see nibble_optim.Optimizer"})


def absent(name, instead):
    """Returns a class that says what to use in its place."""
    def __init__(self, *args, **kwargs):
        raise NotImplementedError(f"{name} is not in nibble_optim; {instead}")
    return type(name, (torch.optim.Optimizer,), {"__init__": __init__, "__module__": sys._getframe(1).f_globals["__name__"]})
