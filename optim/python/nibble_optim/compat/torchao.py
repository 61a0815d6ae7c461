"""Optimizers of torchao.optim: Adam and AdamW with states of 8 bits, 4 bits and fp8. As there, tensors of less than
4096 elements or of cut blocks have no codes; their states are fp32."""
from . import drop_in


def _make(name, rule, m, v, block, decay):
    """Returns the class `name`; m and v are formats, whose block is `block` unless the caller gives block_size."""

    def settings(optimizer, values):
        size = values.pop("block_size")
        optimizer._bf16_weights = "bf16:sr" if values.pop("bf16_stochastic_round") else "bf16"
        return dict(rule=rule, m=f"{m}/{size}", v=f"{v}/{size}", betas=values.pop("betas"), eps=values.pop("eps"),
                    min_quantized=(4096, size))

    return drop_in(__name__, name, f"params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay={decay}, "
                   f"amsgrad=False, *, block_size={block}, bf16_stochastic_round=False", settings)


Adam8bit = _make("Adam8bit", "adam", "dyn8", "udyn8", 256, 0)
AdamW8bit = _make("AdamW8bit", "adamw", "dyn8", "udyn8", 256, 1e-2)
Adam4bit = _make("Adam4bit", "adam", "de4", "lin4", 128, 0)
AdamW4bit = _make("AdamW4bit", "adamw", "de4", "lin4", 128, 1e-2)
AdamFp8 = _make("AdamFp8", "adam", "e4m3", "e4m3", 256, 0)
AdamWFp8 = _make("AdamWFp8", "adamw", "e4m3", "e4m3", 256, 1e-2)
