"""Optimizers with the names and arguments of other packages, so that only the import has to change:

    from nibble_optim.compat.torchao import AdamW8bit            # torchao.optim
    from nibble_optim.compat import bitsandbytes as bnb          # bnb.AdamW8bit, bnb.optim.AdamW8bit
    from nibble_optim.compat.flashoptim import FlashAdamW        # flashoptim

States have the original's formats; results differ from it by rounding. State dicts are nibble_optim's."""
import inspect

from ..optimizer import Optimizer


def drop_in(module, name, signature, settings):
    """Returns the class `name`. Its arguments are those of `signature`, as the other package writes them, and seed.
    `settings(optimizer, values)` takes those that it uses out of `values` and returns Optimizer's; the others have to
    have the package's defaults."""
    arguments = inspect.signature(eval(f"lambda self, {signature}{'' if '*' in signature else ', *'}, seed=0: 0"))

    def __init__(self, *args, **kwargs):
        bound = arguments.bind(self, *args, **kwargs)
        bound.apply_defaults()
        values = bound.arguments
        del values["self"]
        its = settings(self, values)
        its.update((key, values.pop(key)) for key in ("params", "lr", "weight_decay", "seed"))
        for key, value in values.items():
            if value != arguments.parameters[key].default:
                raise ValueError(f"{name}: {key}={value!r} was found, which is not there; leave it out")
        Optimizer.__init__(self, **its)

    __init__.__signature__ = arguments
    package = module.rpartition(".")[2]
    return type(name, (Optimizer,), {"__init__": __init__, "__module__": module, "__doc__": f"{name} of {package}"})
