"""Muon and Adafactor of torch.optim. Muon computes its products in fp32 on the CPU and in fp16 on a GPU, torch in bf16."""
import math

from . import drop_in


def _muon(optimizer, values):
    if tuple(values.pop("ns_coefficients")) != (3.4445, -4.775, 2.0315):
        raise ValueError("Muon: ns_coefficients are (3.4445, -4.775, 2.0315) here")
    values.pop("eps")
    adjust = values.pop("adjust_lr_fn") or "original"
    if adjust not in ("original", "match_rms_adamw"):
        raise ValueError(f"Muon: adjust_lr_fn={adjust!r} was found; give original or match_rms_adamw")
    optimizer._original = adjust == "original"
    return {name: values.pop(name) for name in ("momentum", "nesterov", "ns_steps")}


def _muon_factor(self, param, age):
    """Returns what makes nibble's factor 0.2 sqrt(max(rows, columns)) torch's."""
    rows, cols = param.shape
    factor = math.sqrt(max(1, rows / cols)) / (0.2 * math.sqrt(max(rows, cols))) if self._original else 1.0
    return factor, 1 / factor


def _adafactor(optimizer, values):
    eps1, eps2 = values.pop("eps")
    optimizer._maximize = values.pop("maximize")
    return dict(clip_update=values.pop("d"), eps1=2.0 ** -23 if eps1 is None else eps1, eps2=eps2,
                beta2_decay=values.pop("beta2_decay"))


Muon = drop_in("Muon", "params, lr=1e-3, weight_decay=0.1, momentum=0.95, nesterov=True, "
               "ns_coefficients=(3.4445, -4.775, 2.0315), eps=1e-7, ns_steps=5, adjust_lr_fn=None", _muon, rule="muon",
               m="fp32", overrides="none")
Muon._factors_lr, Muon._lr_factor = True, _muon_factor
Adafactor = drop_in("Adafactor", "params, lr=1e-2, beta2_decay=-0.8, eps=(None, 1e-3), d=1.0, weight_decay=0.0, *, "
                    "foreach=None, maximize=False", _adafactor, rule="adafactor", m="none", adafactor_lr="paper")
