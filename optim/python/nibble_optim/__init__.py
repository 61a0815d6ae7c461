"""Optimizers with states and weights of 4, 8 and 16 bits, one launch a step. README.md has the lines to begin with."""
import typing

from .library import Handle, formats, gpus, options, presets

__version__ = "0.1.0"
__all__ = ["Optimizer", "Handle", "formats", "gpus", "options", "presets"]

if typing.TYPE_CHECKING:
    from .optimizer import Optimizer


def __getattr__(name):  # torch is imported where it is used
    if name == "Optimizer":
        from .optimizer import Optimizer
        return Optimizer
    raise AttributeError(f"module 'nibble_optim' has no attribute {name!r}")
