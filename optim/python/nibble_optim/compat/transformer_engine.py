"""FusedAdam of transformer_engine.pytorch.optimizers. Its masters are states, made from the parameters: separate in
fp32, or with store_param_remainders as the 16 bits that bf16 leaves out, which are TransformerEngine's to the bit.
Masters of torch.float16 or bfloat16 are those, too, and so have the values of fp32. A caller's own masters go in by
set_scaled_state. Moments of torch.uint8 are e4m3 with a scale every 256 elements, and those of torch.float16, which need
a scale that is not there, bf16 with stochastic rounding. For parameters of fp8, a group with the entry
weights="e4m3/tensor@given+fp32" keeps codes beside bf16 parameters, or copies.write_copies writes them
(help("nibble_optim.copies") tells both)."""
import functools

import torch

from ..part import MOMENTS
from . import drop_in
from .flashoptim import _damped_factor, _momentum

_MASTERS = {torch.float32: "bf16+fp32", torch.float16: "bf16+16", torch.bfloat16: "bf16+16"}
_STATES = {torch.float32: "fp32", torch.float16: "bf16:sr", torch.bfloat16: "bf16", torch.uint8: "e4m3"}


def _settings(optimizer, values):
    masters, remainders = values.pop("master_weights"), values.pop("store_param_remainders")
    kept, moments = values.pop("master_weight_dtype"), [values.pop(f"exp_avg{end}_dtype") for end in ("", "_sq")]
    for what, found, known in [("masters", kept, _MASTERS)] * bool(masters) + [("moments", its, _STATES) for its in moments]:
        if found not in known:
            raise ValueError(f"FusedAdam: {what} of {found} were found; take {', '.join(map(str, known))}")
    optimizer._bf16_weights = "bf16" if not masters else "bf16+16" if remainders else _MASTERS[kept]
    optimizer._remainders, optimizer._sets_none = masters and remainders, values.pop("set_grad_none")
    optimizer._grad_name = "decoupled_grad" if values.pop("use_decoupled_grad") else "grad"
    m, v = (_STATES[found] for found in moments)
    return dict(rule="adamw" if values.pop("adam_w_mode") else "adam", m=m, v=v, capturable=values.pop("capturable"))


class FusedAdam(drop_in(
        "FusedAdam", "params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, amsgrad=False, *, "
        "bias_correction=True, adam_w_mode=True, capturable=False, master_weights=False, "
        "master_weight_dtype=torch.float32, exp_avg_dtype=torch.float32, exp_avg_sq_dtype=torch.float32, "
        "use_decoupled_grad=False, store_param_remainders=False, set_grad_none=None", _settings)):
    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        self._place_rates()

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self._place_rates()

    def _place_rates(self):
        for group in self.param_groups:
            if self._shared["capturable"] and group["params"]:  # a captured step reads lr on the device
                group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32).to(group["params"][0].device)

    def zero_grad(self, set_to_none=None):
        asked = {set_to_none, self._sets_none} - {None}
        if len(asked) > 1:
            raise ValueError(f"zero_grad: set_to_none={set_to_none} was found, and FusedAdam was made with "
                             f"set_grad_none={self._sets_none}; leave one out")
        for p in (p for group in self.param_groups for p in group["params"]):
            if False not in asked:
                setattr(p, self._grad_name, None)
            elif getattr(p, self._grad_name, None) is not None:
                getattr(p, self._grad_name).zero_()

    def initialize_state(self, param, store_param_remainders=None):
        """Makes the states of all parameters before the first step, and masters from the parameters."""
        self._make_all()

    def _step(self, params, grads):
        super()._step(params, grads)
        for group in self.param_groups:
            group["step"] = group["steps"]

    def get_unscaled_state(self, param, state_name, skip_unscale=False):
        """Returns exp_avg, exp_avg_sq or master_param in fp32; of remainders, their int16."""
        self.initialize_state(param)
        value = self.state[param][state_name]
        if state_name != "master_param" or not self._remainders or param.dtype is not torch.bfloat16:
            return value
        return (value.view(torch.int32) - (param.detach().view(torch.int16).int() << 16)).to(torch.int16)

    def set_scaled_state(self, param, state_name, unscaled_state):
        """Sets exp_avg, exp_avg_sq or master_param, and with a master its parameter."""
        self.initialize_state(param)
        part, number = self._part_of[param]
        part.moment(number, MOMENTS[state_name], unscaled_state)


FusedSGD = drop_in("FusedSGD", "params, lr, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, *, "
                   "wd_after_momentum=False, materialize_master_grads=True, set_grad_none=None", functools.partial(_momentum, "FusedSGD", "sgd"),
                   m="fp32")
FusedSGD._lr_factor, FusedSGD._decouples = _damped_factor, False
