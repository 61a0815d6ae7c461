"""FusedAdam of transformer_engine.pytorch.optimizers. Its masters are states, made from the parameters: separate in
fp32, or with store_param_remainders as the 16 bits that bf16 leaves out."""
import torch

from . import drop_in

_STATES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.uint8: "e4m3"}


def _settings(optimizer, values):
    masters, remainders = values.pop("master_weights"), values.pop("store_param_remainders")
    optimizer._bf16_weights = "bf16+16" if masters and remainders else "bf16+fp32" if masters else "bf16"
    m, v = (_STATES[values.pop(name)] for name in ("exp_avg_dtype", "exp_avg_sq_dtype"))
    return dict(rule="adamw" if values.pop("adam_w_mode") else "adam", m=m, v=v,
                capturable=values.pop("capturable"))


FusedAdam = drop_in(
    "FusedAdam", "params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, adam_w_mode=True, weight_decay=0.0, "
    "amsgrad=False, *, capturable=False, master_weights=False, master_weight_dtype=torch.float32, "
    "exp_avg_dtype=torch.float32, exp_avg_sq_dtype=torch.float32, use_decoupled_grad=False, "
    "store_param_remainders=False, set_grad_none=None", _settings)
