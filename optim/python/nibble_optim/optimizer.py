"""Optimizer: a torch.optim.Optimizer whose step is one call of libnibble_optim.

Parameters with the same type, device and formats form a part (part.py), which is made when they first have gradients.
States are views of torch tensors that the part owns, so torch counts and saves them like its own. Each state belongs to
one parameter, and has the values of the whole parameter even if only a shard lies here."""
import difflib
import functools
import gc
import inspect
import itertools
import math
import operator
import re
import warnings
from collections import defaultdict
from copy import deepcopy
from typing import Iterable, Optional, Tuple, Union

import torch

from . import library
from .part import NUMBERS, PARAMETERS, TILE, OtherGradients, Part, _local, is_dtensor

try:
    OPTIONS = library.rule_options()  # arguments that are options of rules, which all groups share
except OSError as error:  # there is no library
    raise ImportError(str(error)) from error
FORMATS = ("preset", "rule", "weights", "m", "v")  # settings that a parameter group may have of its own
REST = "wte|wpe|ln*|*.bias"  # patterns that rules of matrices bring along, which need not match
# Torch's error has this reason where torch.compile(fullgraph=True) compiles around a step, which is left out.
REASON = "step() of nibble_optim calls a C library, which is one launch already; leave fullgraph=True out, or step outside"
# Names of other models' embeddings, heads, norms and biases, which these rules leave to adamw too.
OTHER_REST = "*embed*|lm_head|head|*norm*|bias"


def _by_pattern(text):
    """Yields the parts of `overrides` or `stacked`: (patterns, ":", settings), without spaces in the patterns."""
    for part in (text or "").split(";"):
        patterns, colon, settings = part.partition(":")
        if part.strip():
            yield "".join(patterns.split()) if colon else patterns, colon, settings


def _require_no_wrapper(params):
    """Refuses parameters of a module that sums gradients after the hooks of step_in_backward."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    from torch.distributed.fsdp import FullyShardedDataParallel
    wrappers = (torch.nn.parallel.DistributedDataParallel, FullyShardedDataParallel)
    for module in gc.get_objects():
        if issubclass(type(module), wrappers) and not params.isdisjoint(module.parameters()):
            raise RuntimeError(f"step_in_backward would step before {type(module).__name__} has summed the ranks' "
                               "gradients; step after the backward pass, or shard with fully_shard")


class Optimizer(torch.optim.Optimizer):
    """Updates parameters of float32, bfloat16 or float16 in place, with weights and states in the formats of a preset, or
    in those that rule, weights, m and v name. A parameter group may have its own lr, weight_decay, betas and eps, which
    schedulers may change, and its own preset, rule, weights, m and v.

    Mistakes raise ValueError or TypeError with a sentence that says what was found and what to give.

    params: parameters, (name, parameter) pairs or groups, as torch.optim takes them
    names: a module, or (name, parameter) pairs, that names parameters given without names
    preset, rule, weights, m, v: names that nibble_optim.presets() and nibble_optim.formats() print; a preset's rule and
        formats are the defaults of the others
    lr: learning rate, a number or a tensor of one; weight_decay: applied to the weights, times lr
    betas, eps: of the averages of gradients and of their squares
    overrides: other rules and formats for some tensors by name, "ln*: m=fp32 v=fp32; wte: rule=adamw"
    seed: of the noise of stochastic rounding
    lr_max: the largest lr, by which the decay_modes "independent" and "falling" divide
    capturable: steps may be captured in CUDA graphs
    stacked: equal matrices in one tensor, "c_attn.weight:3"; transposed: names of matrices with inputs as rows
    min_quantized: tensors of fewer elements keep fp32 states; (n, multiple): also those of no multiple
    options: of rules, such as momentum=0.9 or nesterov=False, which nibble_optim.options() prints:

"""

    _factors_lr, _lr_factor = False, None  # compat: a function (param, age), the factors of a parameter's lr and decay
    _pre_step = None  # step_in_backward's
    _bf16_weights = None  # the format of bf16 parameters without an argument `weights`; None: the preset's
    _answer = None  # compat: a function (part, tensor, key) for Part.answer
    # If it is true, torch's GradScaler sets grad_scale and found_inf for the time of a step, which takes gradients
    # divided in fp32. Otherwise GradScaler divides .grad before it, which it refuses of fp16, where small ones are lost.
    _step_supports_amp_scaling = property(lambda self: any(p.dtype is torch.float16 for group in self.param_groups
                                                           for p in group["params"]))
    _maximize = False
    _grad_name = "grad"  # of the attribute of parameters that has their gradients
    _given = {}  # what compat set of these and of its own, for copies

    def __init__(self, params: Iterable, preset: str = "adamw8", lr: Union[float, torch.Tensor] = 1e-3,
                 weight_decay: float = 0.1, betas: Tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, *,
                 rule: Optional[str] = None, weights: Optional[str] = None, m: Optional[str] = None,
                 v: Optional[str] = None, overrides: Optional[str] = None, seed: int = 0,
                 lr_max: Optional[float] = None, capturable: bool = False, stacked: Optional[str] = None,
                 min_quantized: Union[int, Tuple[int, int]] = 0, transposed: Optional[str] = None,
                 names: Union[torch.nn.Module, Iterable, None] = None,
                 **options: Union[None, bool, float, str]) -> None:
        self._shared = dict(overrides=overrides, seed=seed, lr_max=lr_max, stacked=stacked,
                            capturable=1 if capturable else None, **self._options_of(options))
        # Tensors that are smaller, as a whole, or no multiple of a second number, keep m and v in fp32.
        self._min_quantized = min_quantized if isinstance(min_quantized, tuple) else (min_quantized, 1)
        self._transposed = transposed
        named = names.named_parameters() if isinstance(names, torch.nn.Module) else names or ()
        self._named = {p: name for name, p in named}
        self._begin()
        if isinstance(params, (set, frozenset)):
            raise TypeError("params is a set, which has no order; give a list")
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, betas=betas, eps=eps, preset=preset,
                                      rule=rule, weights=weights, m=m, v=v, steps=0))
        self._check()

    def _begin(self):
        self._parts, self._part_of, self._names, self._rules, self._end = [], {}, {}, {}, 0
        self._flat, self._apart, self._hooks, self._dicts, self._unwrapped = None, None, [], [], False
        self._written = set()  # parameters that other code wrote, whose part is gone and the next one not yet there

    @staticmethod
    def _options_of(options):
        """Returns the settings of rules' options, None for those that are not among the arguments."""
        for name, value in options.items():
            if name not in OPTIONS:
                near = difflib.get_close_matches(name, inspect.signature(Optimizer).parameters, 1)
                raise TypeError(f"{name}={value!r} was found, which is no argument; "
                                f"{f'did you mean {near[0]}? ' if near else ''}help(Optimizer) lists all")
            if OPTIONS[name][0] == "on|off" and value is not None:
                if value not in (True, False):
                    raise ValueError(f"{name}: {value!r} was found; give True or False")
                options[name] = "on" if value else "off"
        return {**dict.fromkeys(OPTIONS), **options}

    @staticmethod
    def _constants(group):
        """Returns the constants of a group as settings, which the library checks. Refuses what is no number."""
        try:
            lr, decay, eps = float(group["lr"]), float(group["weight_decay"]), float(group["eps"])
            beta1, beta2 = (float(beta) for beta in group["betas"])
        except (TypeError, ValueError):
            found = ", ".join(f"{name}={group[name]!r}" for name in ("lr", "weight_decay", "eps", "betas"))
            raise ValueError(f"{found} were found; give numbers, and two of them as betas") from None
        if not 0 <= lr < math.inf:
            raise ValueError(f"lr: {lr:g} was found; give a number from 0 on")
        return dict(beta1=beta1, beta2=beta2, eps=eps, weight_decay=decay)

    def add_param_group(self, param_group):
        if param_group.get("preset") is not None:  # it brings its rule and formats, so the optimizer's do not apply
            param_group = {**dict.fromkeys(FORMATS), **param_group}
        for name in self._shared.keys() & param_group.keys():
            raise ValueError(f"{name}={param_group[name]!r} was found in a group, and all groups share it; give it to the "
                             "optimizer, or make two")
        params = param_group["params"]
        if not isinstance(params, (torch.Tensor, set)):  # torch refuses sets
            params = list(params)
            if params and all(isinstance(p, tuple) for p in params):  # torch before 2.6 takes no names
                names, params = map(list, zip(*params))
                param_group = {**param_group, "param_names": names}
            param_group = {**param_group, "params": params}
        super().add_param_group(param_group)
        group, rejected = self.param_groups[-1], [p for p in self.param_groups[-1]["params"] if p.dtype not in PARAMETERS]
        try:
            if rejected:
                raise TypeError(f"a parameter of {rejected[0].dtype} was found; the optimizer takes float32, "
                                "bfloat16 and float16")
            self._constants(group)
            self._rule(group)
            if self._names:  # the optimizer has been made
                self._check()
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        if self._apart is not None:
            self._set_apart()

    def _settings(self, group):
        settings = {"part": 1, **{key: value for key, value in self._shared.items() if value is not None}}
        settings.update((key, group[key]) for key in FORMATS if group.get(key) is not None)
        return settings

    def _settings_of(self, group, params):
        """Returns the library's settings for parameters of a group that have one type."""
        settings = self._settings(group)
        if self._is_small(params[0]):
            v = library.Handle({**settings, "device": "cpu"}, []).setting("v")
            settings.update(m="fp32", v="fp32" if v != "none" else None)
        if params[0].dtype is torch.float32:
            settings.pop("weights", None)  # they are stored as they are
        elif self._bf16_weights:
            settings.setdefault("weights", self._bf16_weights)
        if self._apart is not None:
            settings["releases"] = 1
        return {**settings, "parameters": PARAMETERS[params[0].dtype]}

    def _is_small(self, param):
        least, multiple = self._min_quantized
        return param.numel() < least or param.numel() % multiple > 0

    def _rule(self, group):
        """Returns the rule of a group's parameters without overrides, and whether it leaves some to adamw."""
        key = tuple(group.get(name) for name in FORMATS)
        if key not in self._rules:
            settings = {**self._settings(group), "device": "cpu", "overrides": None, "weights": None}
            handle = library.Handle(settings, [])
            self._rules[key] = handle.setting("rule"), handle.setting("overrides").startswith(REST)
        return self._rules[key]

    def _is_turned(self, param):
        """Returns True for a matrix whose rows are the columns of the parameter (the argument transposed)."""
        return param.dim() == 2 and library.matches(self._transposed or "", self._names[param])

    def _tensor(self, param):
        """Returns a parameter's name, rows and columns for the library, which knows what to leave to adamw by REST."""
        shape, name = param.shape[::-1] if self._is_turned(param) else param.shape, self._names[param]
        rows = shape[0] if param.dim() > 1 and param.numel() > 0 else 1
        _, leaves_rest = self._rule(self.param_groups[self._group_of[param]])
        rest = leaves_rest and (param.dim() < 2 or param.shape[0] == 1 or library.matches(f"{REST}|{OTHER_REST}", name))
        return name + ".wpe" if rest else name, rows, param.numel() // rows

    def _check(self):
        """Refuses what the library would refuse in the first step, by making an optimizer without memory."""
        self._index()
        self._check_patterns()
        self._check_orientation()
        weights = [group["weights"] for group in self.param_groups if group["weights"] not in (None, "fp32")]
        if weights and all(p.dtype is torch.float32 for p in self._flat):
            raise ValueError(f"weights: {weights[0]!r} was found and all parameters are fp32, which are stored as they "
                             "are; leave weights out, or make the parameters bf16")
        by_key = defaultdict(list)
        for p in self._flat:
            if p.requires_grad:
                by_key[(self._group_of[p], p.dtype, self._is_small(p))].append(p)
        for (number, *_), params in by_key.items():
            group = self.param_groups[number]
            library.Handle({**self._settings_of(group, params), **self._constants(group), "device": "cpu",
                            "capturable": None},
                           [(*self._tensor(p), 0, 0) for p in params])
        self._flat = None

    def _check_orientation(self):
        """Refuses a stack whose matrices may lie side by side, as in transformers' Conv1D, and transposed shards."""
        for patterns, _, number in _by_pattern(self._shared["stacked"]):
            for p in self._flat if self._transposed is None else ():
                name, rows, cols = self._tensor(p)
                if number.strip() == str(cols // rows) and cols % rows == 0 and rows > 1 and \
                        library.matches(patterns, name):
                    raise ValueError(f'stacked: {name} is {rows} x {cols}; if it has {number} matrices side by side, '
                                     f'as transformers\' Conv1D has them, add transposed="{patterns}", and otherwise '
                                     'transposed=""')
        for p in self._flat:
            if self._is_turned(p) and is_dtensor(p):
                raise ValueError(f"transposed: {self._names[p]} is sharded, and only a whole matrix can be turned; "
                                 "make it a torch.nn.Linear")

    def _check_needs(self):
        """Warns of an argument that no rule reads; a group that is added later may have a rule that does."""
        given = {name: rules for name, (_, _, rules, _) in OPTIONS.items() if rules and self._shared[name] is not None}
        if not given:
            return
        rules = set(re.findall(r"\brule=([a-z0-9-]+)", self._shared["overrides"] or ""))
        rules.update(rule for rule, _ in map(self._rule, self.param_groups))
        for name, readers in given.items():
            if not rules & set(readers):
                warnings.warn(f"{name} changes nothing without rule {' or '.join(readers)}, and the optimizer has "
                              f"{', '.join(sorted(rules))}; leave {name} out, or give such a rule")

    def _index(self):
        self._flat = list(itertools.chain.from_iterable(group["params"] for group in self.param_groups))
        for i, group in enumerate(self.param_groups):
            names = group.get("param_names")
            for j, p in enumerate(group["params"]):
                self._names[p] = names[j] if names else self._named.get(p, f"{i}.{j}")
        self._idle = None  # the places of parameters that have had no gradient yet
        self._group_of = {p: i for i, group in enumerate(self.param_groups) for p in group["params"]}
        self._place_of = {p: i for i, p in enumerate(self._flat)}

    def _flatten(self):
        self._index()
        self._check_patterns()
        self._check_needs()
        self._forget_touched(self._parts)
        if not self._part_of.keys() <= self._place_of.keys():
            raise RuntimeError("a parameter that has been stepped is in no group any more; take its state out of "
                               "optimizer.state, or make another optimizer of the new parameters")
        for part in self._parts:
            self._place(part)

    def _check_patterns(self):
        """Refuses a pattern that no name matches."""
        names = self._names.values()
        for setting, text in [("overrides", self._shared["overrides"]), ("stacked", self._shared["stacked"]),
                              ("transposed", self._transposed and f"{self._transposed}:")]:
            for patterns, colon, _ in _by_pattern(text):
                for pattern in filter(None, patterns.split("|")) if colon and patterns != REST else ():
                    if not library.matches(pattern, *names):
                        raise ValueError(f"{setting}: {pattern} matches no parameter; type a name such as "
                                         f"{next(iter(names))}, of model.named_parameters()")

    def _place(self, part):
        places = [self._place_of[p] for p in part.params]
        part.place([self._group_of[p] for p in part.params], places, places == list(range(len(self._flat))))

    # Parts.

    def _add_part(self, params, grads, element=None):
        group = self.param_groups[self._group_of[params[0]]]
        part = Part(self, params, self._settings_of(group, params), grads, self._end if element is None else element)
        self._place(part)
        self._parts.append(part)
        self._end, self._idle = max(self._end, part.handle.place(len(params)).element), None
        for t, p in enumerate(params):
            self._part_of[p] = (part, t)
        return part

    def _by_part(self, params, types):
        """Yields the parameters of each part, in their order, and the type of its gradients."""
        by_key = defaultdict(list)
        for p in params:
            group, grads = self.param_groups[self._group_of[p]], torch.float32 if p.dtype is torch.float16 else p.dtype
            by_key[(types.get(p, grads), p.dtype, p.device, self._is_small(p), *map(group.get, FORMATS))].append(p)
        for (grads, *_), members in by_key.items():
            for its in ([[p] for p in members] if self._apart else [members]):
                yield its, grads

    # The step.

    @functools.partial(torch.compiler.disable, **({"reason": REASON} if torch.__version__ >= (2, 7) else {}))
    @torch.optim.Optimizer.profile_hook_step
    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        flat = list(itertools.chain.from_iterable(group["params"] for group in self.param_groups))
        if self._flat is None or len(flat) != len(self._flat) or not all(map(operator.is_, flat, self._flat)):
            self._flatten()
        grads = [p.grad for p in self._flat] if self._grad_name == "grad" else \
            [getattr(p, self._grad_name, None) for p in self._flat]  # which takes three times as long
        self._step(self._flat, grads)
        if getattr(self, "grad_scale", None) is not None:  # .grad is left divided, as by torch's fused optimizers
            local = [_local(grad) for grad in grads if grad is not None]
            for device in {grad.device for grad in local}:
                inverse = 1 / self.grad_scale.to(device)  # which fp16 may not hold
                torch._amp_foreach_non_finite_check_and_unscale_([grad for grad in local if grad.device == device],
                                                                 torch.zeros_like(inverse), inverse)
        return loss

    step.hooked = True  # profile_hook_step has wrapped it already, below torch.compiler.disable

    def _scaling(self, device):
        """Returns what multiplies gradients and, in a capture, what is not 0 if they overflow: fp32 tensors or None."""
        factor = torch.full((), -1.0 if self._maximize else 1.0, dtype=torch.float32, device=device)
        scale, found = (getattr(self, name, None) for name in ("grad_scale", "found_inf"))
        return factor if scale is None else factor / scale.to(device), found if library.is_capturing() else None

    def _step(self, params, grads):
        captured = library.is_capturing()
        if not captured:
            if getattr(self, "found_inf", None):  # waits for the GPU, as GradScaler does for others; a graph does not
                return
            self._catch_up()
        self._forget_touched(self._of(params))
        if len(self._part_of) < len(params) or self._apart:
            self._make_missing(params, grads)
        groups, step, stepped = self.param_groups, self.param_groups[0]["steps"] + 1, False
        given = None if params is self._flat else dict(zip(params, grads))
        parts = self._of(params)
        for part in parts:
            if given is not None:
                its = [given[p] for p in part.params]
            else:
                its = grads if part.whole else [grads[i] for i in part.places]
            if all(g is None for g in its):
                continue
            if part.gpu and captured and not self._shared["capturable"]:
                raise RuntimeError("a step was captured into a CUDA graph, which would repeat this step's learning "
                                   "rate and noise; make the optimizer with capturable=True, or step outside of the "
                                   "graph")
            try:
                part.step(its, groups, max(part.age) + 1 if self._apart else step, part.gpu and captured,
                          self._scaling(part.device) if self._maximize or hasattr(self, "found_inf") else ())
                stepped = stepped or not captured
            except OtherGradients:  # the same states go on in parts that take such gradients
                self._written.update(part.params[t] for t in part.written())
                self._forget([part])
                self._make_missing(params, grads)
                parts += self._of([p for p, grad in zip(part.params, its) if grad is not None])
        if stepped:
            for group in groups:
                group["steps"] = step if not self._apart else max(max(part.age) for part in self._parts)

    def _of(self, params):
        """Returns the parts of these parameters, as far as there are any."""
        if params is self._flat:
            return list(self._parts)
        return list({id(self._part_of[p][0]): self._part_of[p][0] for p in params if p in self._part_of}.values())

    def _forget_touched(self, parts):
        """Forgets parts whose states other code has taken or replaced."""
        there = list(self.state.values())
        all_there = len(there) == len(self._dicts) and all(map(operator.is_, there, self._dicts))
        self._dicts = there
        self._forget([part for part in parts if part.is_touched(self.state, all_there)])

    def _forget(self, parts):
        """Takes parts away. What optimizer.state has of their parameters goes on in other parts (_make_missing)."""
        for part in parts:
            self._parts = [other for other in self._parts if other is not part]
            for p in part.params:
                del self._part_of[p]
            self._idle = None
        if not self._parts and not any(self.state.values()):  # to begin anew
            self._end = 0

    def _make_missing(self, params, grads):
        if self._idle is None:
            self._idle = [i for i, p in enumerate(self._flat) if p not in self._part_of]
        if params is self._flat:
            new = [(params[i], grads[i]) for i in self._idle if grads[i] is not None]
        else:
            new = [(p, g) for p, g in zip(params, grads) if g is not None and p not in self._part_of]
        if new and library.is_capturing():
            raise RuntimeError("a step was captured into a CUDA graph before any was taken with these gradients and "
                               "states; take some before")
        types = {p: g.dtype for p, g in new if g.dtype in NUMBERS}
        kept = {p: dict(self.state[p]) for p, _ in new if self.state.get(p)}
        self._restore(kept, types)
        for its, grads in self._by_part([p for p, _ in new if p not in kept], types):
            self._new_part(its, grads, [0] * len(its))
        for p in [p for p, _ in new if p in self._written]:
            self._written.discard(p)
            part, t = self._part_of[p]
            part.take_over([t])

    def _catch_up(self):
        """Counts the steps that replayed graphs have taken."""
        captured = [part for part in self._parts if part.captured]
        for part in captured:
            part.catch_up()
        if captured and not self._apart:
            for group in self.param_groups:
                group["steps"] = max(part.clock for part in captured)

    # States.

    def state_dict(self):
        """Returns the states. With FSDP2 all ranks call it together."""
        self._catch_up()
        states = super().state_dict()
        states["state"] = {i: dict(its) for i, its in states["state"].items()}
        if self._flat is None:
            self._flatten()
        for part in self._parts:
            for p, its in zip(part.params, part.compact()):
                states["state"][self._place_of[p]].update(its)
            for t, its in part.spread().items():
                there = states["state"][self._place_of[part.params[t]]]
                its.update(step=there["step"], element=there["element"])
                states["state"][self._place_of[part.params[t]]] = its
        return states

    def load_state_dict(self, state_dict):
        """Takes states that state_dict gave, to the bit; they must be of the same formats. Also takes the states of
        torch's Adam and AdamW, of torchao's, bitsandbytes' and TransformerEngine's, and goes on from their moments,
        rounded to the formats here."""
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        saved_groups = deepcopy(state_dict["param_groups"])
        sizes, here = ([len(group["params"]) for group in groups] for groups in (saved_groups, self.param_groups))
        if sizes != here:
            raise ValueError(f"the saved states have groups of {sizes} parameters and the optimizer has {here}")
        for saved, group in zip(saved_groups, self.param_groups):
            if "steps" not in saved:  # another optimizer's
                saved.update({key: value for key, value in group.items() if key not in saved})
                each = [its["step"] for its in state_dict["state"].values() if "step" in its]
                saved["steps"] = max(map(int, [saved.pop("step", 0), *each]))  # TransformerEngine counts in groups
                saved["betas"] = saved["betas"][:2]
            for key in FORMATS:
                if saved.get(key) != group.get(key):
                    raise ValueError(f"the saved states were made with {key}={saved.get(key)!r} and the optimizer has "
                                     f"{key}={group.get(key)!r}; make it with the same")
        ids = list(itertools.chain.from_iterable(group["params"] for group in saved_groups))
        params = list(itertools.chain.from_iterable(group["params"] for group in self.param_groups))
        for saved, group in zip(saved_groups, self.param_groups):
            saved["params"] = group["params"]
            if "param_names" in group:
                saved["param_names"] = group["param_names"]
        by_param = {p: state_dict["state"][i] for i, p in zip(ids, params) if i in state_dict["state"]}
        before = {key: self.__dict__[key] for key in ("param_groups", "state", "_parts", "_part_of", "_end")}
        self.param_groups = saved_groups
        try:
            self._parts, self._part_of, self._end, self.state = [], {}, 0, defaultdict(dict)
            self._flatten()
            self._restore(by_param)
        except Exception:
            self.__dict__.update(before)
            self._flatten()
            raise
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _restore(self, states, types={}):
        """Makes the parts again from which these states came, and fills them. `types` are of gradients."""
        others = {p: state for p, state in states.items() if state and "element" not in state}
        own = sorted((p for p in states if p not in others), key=lambda p: int(states[p]["element"]))
        for its, grads in self._by_part(own, types):
            self._restore_part(its, grads, states)
        for its, grads in self._by_part(others, types):
            steps = [self.param_groups[self._group_of[p]]["steps"] for p in its]
            part = self._new_part(its, grads, [int(states[p].get("step", step)) for p, step in zip(its, steps)])
            for t, p in enumerate(its):
                part.take_moments(t, states[p], self._names[p])
            masters = {t: states[p]["master_param"] for t, p in enumerate(its) if "master_param" in states[p]}
            part.begin_masters(masters)

    def _new_part(self, its, grads, ages):
        part = self._add_part(its, grads, self._apart and self._apart[its[0]])
        part.publish(self.state, ages)
        return part

    def _make_all(self):
        """Makes the parts of parameters that have none before their first step, with masters made from them."""
        if self._flat is None:
            self._flatten()
        for its, grads in self._by_part([p for p in self._flat if p.requires_grad and p not in self._part_of], {}):
            self._new_part(its, grads, [0] * len(its)).begin_masters({})

    def _restore_part(self, params, grads, states):
        part = self._add_part(params, grads, int(states[params[0]]["element"]))
        other = [t for t, p in enumerate(params) if part.handle.place(t).element != int(states[p]["element"])]
        if other:  # they were not made as one part
            self._parts.remove(part)
            cut = max(other[0], 1)
            for its in (params[:cut], params[cut:]):
                self._restore_part(its, grads, states)
            return
        part.restore_all([states[p] for p in params], [self._names[p] for p in params])
        part.publish(self.state, [int(states[p]["step"]) for p in params])
        part.loaded()

    def __getstate__(self):
        self._catch_up()
        return {**super().__getstate__(), "_shared": self._shared, "_min_quantized": self._min_quantized,
                "_transposed": self._transposed, "_given": self._given, **self._given,
                "_named": self._named, "_in_backward": bool(self._hooks), "_pre_step": self._pre_step}

    def __setstate__(self, state):
        super().__setstate__(state)
        if "_parts" not in self.__dict__:  # a copy or a loaded object, made without __init__
            self._begin()
            if self.__dict__.pop("_in_backward"):
                self.step_in_backward(self._pre_step)
            states = {p: dict(values) for p, values in self.state.items() if values}
            self.state = defaultdict(dict)
            self._flatten()
            self._restore(states)

    # In the backward pass.

    def step_in_backward(self, pre_step=None):
        """From now on steps each parameter as soon as its gradient is complete, and releases the gradient. A parameter
        for which pre_step(parameter, its group) is false is not stepped; its gradient goes all the same. step() and
        zero_grad() then do nothing, except for parameters that are frozen now and are not later. This does not work
        with DDP, which is refused in the backward pass, gradient accumulation, clipping or a GradScaler, whose scaled
        gradients would reach the weights before it looks at them."""
        if self._parts:
            raise RuntimeError("step_in_backward comes before the first step")
        self._apart, self._pre_step = {}, pre_step
        try:
            self._check()
        except ValueError:
            self._apart = None
            raise
        self._set_apart()
        return self

    def _set_apart(self):
        """Hooks new parameters. Each has the place in the model that it would have if all were stepped together."""
        def hook(param):
            if not self._unwrapped:
                _require_no_wrapper(set(self._flat))
                self._unwrapped = True
            try:
                if self._pre_step is None or self._pre_step(param, self.param_groups[self._group_of[param]]):
                    with torch.no_grad():
                        self._step([param], [param.grad])
            finally:
                param.grad = None

        active = not self._apart or bool(self._hooks)  # nobody has removed the hooks
        self._flatten()
        for p in self._flat[len(self._apart):]:
            self._apart[p] = TILE * sum(-(-q.numel() // TILE) for q in self._apart)
            if p.requires_grad and active:
                self._hooks.append(p.register_post_accumulate_grad_hook(hook))

    def describe(self):
        """Returns a line for each part: rule, formats and bytes a parameter."""
        return [part.handle.describe() for part in self._parts]


def _name_options():
    """Names the options of rules in Optimizer's signature and help."""
    arguments = inspect.signature(Optimizer.__init__)
    rest = [one for one in arguments.parameters.values() if one.kind is not one.VAR_KEYWORD]
    options = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in OPTIONS]
    Optimizer.__init__.__signature__ = arguments.replace(parameters=rest + options)
    Optimizer.__doc__ += library.options_text()


_name_options()
