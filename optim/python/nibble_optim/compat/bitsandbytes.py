"""Optimizers of bitsandbytes.optim with 8-bit and 32-bit states. min_8bit_size counts the elements of the whole tensor.
The Paged classes exist for their names; their states stay on the GPU. Adam decays as AdamW does, as it does there.
State entries have its names too: state1 and state2, of 8 bits as codes with absmax1, qmap1, absmax2 and qmap2."""
import ctypes
import sys

import torch

from .. import library
from . import _attribute as __getattr__, absent, drop_in  # noqa: F401

_BITS = ", optim_bits=32, args=None, min_8bit_size=4096"
_ADAM = "params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay={}, amsgrad=False" + _BITS
_ADEMAMIX = ("params, lr=1e-3, betas=(0.9, 0.999, 0.9999), alpha=5.0, t_alpha=None, t_beta3=None, eps=1e-8, "
             "weight_decay=1e-2, optim_bits=32, min_8bit_size=4096")
# Rule, arguments, and whether all three classes have optim_bits and all six is_paged.
_FAMILIES = {
    "Adam": ("adamw", _ADAM.format(0), True, True), "AdamW": ("adamw", _ADAM.format(1e-2), True, False),
    "Lion": ("lion", "params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0" + _BITS, False, False),
    "AdEMAMix": ("ademamix", _ADEMAMIX, False, False),
    "SGD": ("sgd", "params, lr, momentum=0, dampening=0, weight_decay=0, nesterov=False" + _BITS, False, False)}
_ABSENT = {"Adagrad": "AdamW8bit with betas=(0, 0.999)", "RMSprop": "AdamW8bit with betas=(0, alpha)",
           "LAMB": "AdamW8bit, or Optimizer(limit_growth=1.01)", "LARS": "SGD8bit", "PytorchLARS": "SGD"}


class GlobalOptimManager:
    """Gives parameters of all optimizers here other settings. It knows optim_bits; 8 bits in an optimizer of 32
    must be set before that optimizer is made."""

    _instance = None

    def __init__(self):
        self.initialize()

    def initialize(self):
        self.pid2config, self.registered, self.module_weight_config_triple = {}, [], []

    @classmethod
    def get_instance(cls):
        cls._instance = cls._instance or cls()
        return cls._instance

    def register_parameters(self, params):
        """What override_config has set for these applies to copies of them too, which a later optimizer gets in this order."""
        self.registered = [(p.shape, self.pid2config.get(id(p))) for p in _flat(params)]

    def override_config(self, parameters, key=None, value=None, key_value_dict=None):
        settings = {**({} if key is None else {key: value}), **(key_value_dict or {})}
        if settings.keys() != {"optim_bits"} or settings["optim_bits"] not in (8, 32):
            raise ValueError(f"override_config: {settings} was found, and optim_bits, 8 or 32, is there; other settings "
                             "belong in a parameter group")
        for p in parameters if isinstance(parameters, (list, tuple)) else [parameters]:
            self.pid2config[id(p)] = settings["optim_bits"] == 32

    def register_module_override(self, module, param_name, config):
        self.override_config(getattr(module, param_name), key_value_dict=config)


def _flat(params):
    found = [p for each in params for p in (each["params"] if isinstance(each, dict) else [each])]
    return [p[1] if isinstance(p, tuple) else p for p in found]


def _settings(name, rule, bits):
    """bits 0 leaves the choice of 8 or 32 to the argument optim_bits."""
    def settings(optimizer, values):
        asked, least = values.pop("optim_bits", 32), values.pop("min_8bit_size")
        if asked not in (32, bits or 8):
            raise ValueError(f"{name}: optim_bits={asked} was found; take {'8 or 32' if bits == 0 else bits}")
        quantized = (bits or asked) == 8
        # An optimizer of 32 bits has codes for those of its parameters that were given 8 bits before it was made.
        listed = lambda its: [its] if isinstance(its, torch.Tensor) else list(its)
        values["params"] = [{**each, "params": listed(each["params"])} if isinstance(each, dict) else each
                            for each in values["params"]]
        params, manager = _flat(values["params"]), GlobalOptimManager.get_instance()
        copies = [p.shape for p in params] == [shape for shape, _ in manager.registered]
        if copies and not any(id(p) in manager.pid2config for p in params):
            manager.pid2config.update((id(p), its) for p, (_, its) in zip(params, manager.registered) if its is not None)
        some = quantized or any(manager.pid2config.get(id(p)) is False for p in params)
        m, v = ("dyn8/256", "udyn8/256") if some else ("fp32", "fp32")
        its = dict(m=m, v=v if rule in ("adamw", "ademamix") else None, min_quantized=least if quantized else sys.maxsize)
        if "momentum" in values:
            its.update(betas=(values.pop("momentum"), 0.0))
        if rule == "ademamix":
            alpha, ramp = values.pop("t_alpha"), values.pop("t_beta3")
            if alpha != ramp:
                raise ValueError(f"{name}: t_alpha={alpha} and t_beta3={ramp} were found; give both alike, or none")
            its.update(alpha=values.pop("alpha"), ramp=ramp)
        return its
    return settings


def _levels(moment):
    """Returns what the 256 codes of "m" or "v" stand for beside a scale of 1, in fp32."""
    handle = library.Handle(dict(m="dyn8/256", v="udyn8/256", parameters="fp32"), [("levels", 1, 256, 0, -1)])
    at = {name: address for name, _, address, *_ in handle.states(0)}
    ctypes.memmove(at[moment], bytes(range(256)), 256)
    ctypes.c_float.from_address(at[moment + ".scales"]).value = 1.0
    values = torch.empty(256)
    handle.moment(0, moment, values.data_ptr(), False)
    return values


def _answer(part, tensor, key):
    if not isinstance(key, str):
        return None
    views, moments = part.views[tensor], {"1": ("m", "slow"), "2": ("v",)}.get(key[-1:], ())  # AdEMAMix's are stacked
    suffix = {"state": "", "absmax": ".scales", "qmap": ".scales"}.get(key[:-1], "?")
    shape = (-1,) if suffix else part.kept_shapes[tensor]
    arrays = [views[moment + suffix].view(shape) for moment in moments if moment + suffix in views]
    if not arrays:
        return None
    return lambda: _levels(moments[0]).to(part.device) if key.startswith("qmap") else \
        arrays[0] if len(arrays) == 1 else torch.stack(arrays)


def _is_small(self, param):
    return GlobalOptimManager.get_instance().pid2config.get(id(param), super(type(self), self)._is_small(param))


for _base, (_rule, _signature, _bits_of_all, _paged_of_all) in _FAMILIES.items():
    for _prefix in ("", "Paged") if _base != "SGD" else ("",):
        for _suffix, _bits in (("", 0), ("8bit", 8), ("32bit", 32)):
            _name = _prefix + _base + _suffix
            _its = _signature if _bits == 0 or _bits_of_all else _signature.replace(", optim_bits=32", "")
            _its += ", is_paged=False" if _paged_of_all or not _prefix and _base != "SGD" else ""
            globals()[_name] = drop_in(_name, _its, _settings(_name, _rule, _bits), rule=_rule)
            globals()[_name]._is_small, globals()[_name]._answer = _is_small, staticmethod(_answer)
for _base, _instead in _ABSENT.items():
    for _suffix in ("", "8bit", "32bit") if _base != "PytorchLARS" else ("",):
        globals()[_base + _suffix] = absent(_base + _suffix, f"take {_instead}")
optim = sys.modules[__name__]  # so that bnb.optim.AdamW8bit is found where bnb is this module
