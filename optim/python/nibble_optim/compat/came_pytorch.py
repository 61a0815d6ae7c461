"""CAME of came_pytorch, but for v, whose first averages are corrected here."""
from . import drop_in


def _came(optimizer, values):
    if values["lr"] is None or values.pop("eps") != (1e-30, 1e-16):
        raise ValueError("CAME: give an lr, and leave eps out, which is (1e-30, 1e-16)")
    return dict(clip_update=values.pop("clip_threshold"))


def _came_factor(self, param, age):
    """came_pytorch does not correct the first averages of its residuals, and so takes larger first steps."""
    factor = (1 - self._shared["beta3"] ** age) ** -0.5 if param.dim() > 1 else 1.0
    return factor, 1 / factor


CAME = drop_in("CAME", "params, lr=None, eps=(1e-30, 1e-16), clip_threshold=1.0, betas=(0.9, 0.999, 0.9999), "
               "weight_decay=0.0", _came, rule="came", m="fp32")
CAME._factors_lr, CAME._lr_factor = True, _came_factor
