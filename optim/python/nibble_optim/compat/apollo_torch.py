"""APOLLOAdamW of apollo_torch, whose random projections are other ones, and what it has of galore_torch."""
from . import absent, drop_in
from .galore_torch import ADAMW, GaLoreAdafactor, GaLoreAdamW8bit, projected  # noqa: F401

GaLoreAdamW = drop_in("GaLoreAdamW", ADAMW + "no_deprecation_warning=True", projected("GaLoreAdamW", {None: "galore"}),
                      m="fp32", v="fp32")
APOLLOAdamW = drop_in("APOLLOAdamW", ADAMW + "scale_front=False, disable_nl=False, no_deprecation_warning=True",
                      projected("APOLLOAdamW", {None: "apollo", "channel": "apollo", "tensor": "apollo-mini"}),
                      m="fp32", v="fp32")
QAPOLLOAdamW = absent("QAPOLLOAdamW", 'take Optimizer(preset="apollo-mini") or APOLLOAdamW')
