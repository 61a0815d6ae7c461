"""Adafactor8Bit of adafactor8bit, version 0.2.4: Adafactor, and with beta3 CAME, whose codes are the package's."""
from . import drop_in

_RATES = {(False, False): "plain", (True, False): "relative", (False, True): "scaled", (True, True): "paper"}


def _settings(optimizer, values):
    beta1, beta2, beta3, (eps1, eps2) = (values.pop(key) for key in ("beta1", "beta2", "beta3", "eps"))
    scaled = values.pop("scale_weight_decay") and values["scale_parameter"] and values["weight_decay"] > 0
    wrong = (f"beta2={beta2} and beta3={beta3} were found; give both, or none" if (beta2 is None) != (beta3 is None)
             else "beta3 needs beta1; give both" if beta3 is not None and beta1 is None
             else "weight_decay goes with scale_weight_decay=False, or without scale_parameter" if scaled
             else "quantize=False was found; take Optimizer(rule=\"adafactor\")" if not values.pop("quantize")
             else 'apollo_rank was found; take Optimizer(rule="apollo")' if values.pop("apollo_rank") else "")
    if wrong:
        raise ValueError(f"Adafactor8Bit: {wrong}")
    values["eps"] = 2.0 ** -23 if eps1 is None else eps1
    margin, limits = 1 + values.pop("fira_margin"), values.pop("enable_fira_for_adafactor")
    decay = values.pop("beta2_decay")  # CAME has beta2 in its place
    optimizer._maximize = values.pop("maximize")
    return dict(rule="adafactor8bit" if beta3 is None else "came8bit", clip_update=values.pop("d"),
                m="none" if beta1 is None else f"adanf4/{values.pop('m_block_size')}",
                min_quantized=0 if beta1 is None else 4096, limit_growth=margin * limits,
                eps2=eps2, adafactor_lr=_RATES[values.pop("relative_step"), values.pop("scale_parameter")],
                betas=(beta1 or 0.9, beta2 or 0.999), **({"beta2_decay": decay} if beta3 is None else {"beta3": beta3}))


Adafactor8Bit = drop_in(
    "Adafactor8Bit", "params, lr=1e-2, beta1=None, beta2=None, beta2_decay=-0.8, beta3=None, eps=(None, 1e-3), "
    "weight_decay=0.0, d=1.0, maximize=False, relative_step=True, scale_parameter=True, factored=True, quantize=True, "
    "block_size=2048, m_block_size=128, min_8bit_size=4096, use_cuda_kernel=True, apollo_rank=0, "
    "apollo_update_proj_gap=200, apollo_scale_type='channel', apollo_eps=1e-8, apollo_factorize=False, "
    "scale_weight_decay=True, enable_fira_for_adafactor=False, fira_margin=0.01", _settings, preset="adafactor8bit")
