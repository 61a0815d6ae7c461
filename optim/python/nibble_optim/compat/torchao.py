"""Optimizers of torchao.optim: Adam and AdamW with states of 8 bits, 4 bits and fp8. Unlike torchao's, small tensors
have such states, too."""
from ..optimizer import Optimizer


def _make(name, rule, m, v, block, decay):
    """Returns the class `name`; m and v are formats, whose block is `block` unless the caller gives block_size."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=decay, amsgrad=False, *,
                 block_size=block, bf16_stochastic_round=False, seed=0):
        if amsgrad:
            raise ValueError(f"{name}: amsgrad=True was found, which keeps a third state; leave it out")
        self._bf16_weights = "bf16:sr" if bf16_stochastic_round else "bf16"
        Optimizer.__init__(self, params, rule=rule, m=f"{m}/{block_size}", v=f"{v}/{block_size}", lr=lr, betas=betas,
                           eps=eps, weight_decay=weight_decay, seed=seed)

    return type(name, (Optimizer,), {"__init__": __init__, "__doc__": f"torchao.optim.{name}", "__module__": __name__})


Adam8bit = _make("Adam8bit", "adam", "dyn8", "udyn8", 256, 0.0)
AdamW8bit = _make("AdamW8bit", "adamw", "dyn8", "udyn8", 256, 1e-2)
Adam4bit = _make("Adam4bit", "adam", "de4", "lin4", 128, 0.0)
AdamW4bit = _make("AdamW4bit", "adamw", "de4", "lin4", 128, 1e-2)
AdamFp8 = _make("AdamFp8", "adam", "e4m3", "e4m3", 256, 0.0)
AdamWFp8 = _make("AdamWFp8", "adamw", "e4m3", "e4m3", 256, 1e-2)
