"""Optimizer: a torch.optim.Optimizer whose step is one call of libnibble_optim.

Parameters with the same type, device and formats form a part, made when they first have gradients: one optimizer of the
library. States are views of torch tensors that belong to the part, so torch counts, saves and moves them as its own.
Each state belongs to one parameter and depends on the whole tensor alone, also where a DTensor's shard lies here."""
import array
import itertools
import math
from collections import defaultdict
from copy import deepcopy

import torch

from . import library

FORMATS = ("preset", "rule", "weights", "m", "v")  # settings that a parameter group may have of its own
NUMBERS = {torch.float32: "fp32", torch.bfloat16: "bf16"}
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I8": torch.int8, "I16": torch.int16}
TILE = 2048


def _is_dtensor(tensor):
    return hasattr(tensor, "_local_tensor")


def _local(tensor):
    return tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor


def _part_of_whole(param):
    """The first element, in the order of rows, and the number of elements of a DTensor that lie here."""
    if not _is_dtensor(param):
        return 0, -1
    cut = [p for p in param.placements if not p.is_replicate()]
    if not all(type(p).__name__ == "Shard" and p.dim == 0 for p in cut):
        raise ValueError(f"a DTensor with placements {param.placements} was found; the optimizer takes Replicate and "
                         "Shard(0), as fully_shard makes them")
    if not cut:
        return 0, -1
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    shape, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    row = math.prod(param.shape[1:])
    count = math.prod(shape)
    return (offset[0] * row if count else 0), count


def _order(param):
    """The order of dimensions in which the parameter is contiguous; None as it is. One that is in none is refused."""
    local = _local(param)
    if local.is_contiguous():
        return None
    order = sorted(range(local.dim()), key=lambda d: (-local.stride(d), d))
    if local.detach().permute(order).is_contiguous() and not _is_dtensor(param):
        return order
    raise ValueError(f"a parameter of shape {tuple(param.shape)} and strides {local.stride()} was found, which has "
                     "holes or overlaps; make it contiguous")


def _address(grad, param, dtype, order):
    """The gradient as a contiguous tensor of this type; most often it is one already."""
    if grad.layout is not torch.strided:
        raise RuntimeError("a sparse gradient was found; the optimizer takes dense ones (sparse=False)")
    if grad.device != param.device:
        raise RuntimeError(f"a gradient on {grad.device} was found for a parameter on {param.device}")
    if grad.shape != param.shape:
        raise RuntimeError(f"a gradient of shape {tuple(grad.shape)} was found for a parameter of "
                           f"{tuple(param.shape)}")
    if not grad.is_floating_point() or grad.dtype is torch.float64:
        raise TypeError(f"a gradient of {grad.dtype} was found; the optimizer takes float32 and bfloat16")
    if order is not None:
        grad = grad.permute(order)
    return grad.to(dtype).contiguous()


class _Part:
    """Parameters of one type, device and formats: one optimizer of the library, and the memory of its states."""

    def __init__(self, owner, params, settings, grads, element):
        first = params[0]
        self.params, self.settings, self.grads = params, settings, grads
        self.locals = [_local(p) for p in params]
        self.device, self.gpu = first.device, first.device.type == "cuda"
        self.order = [_order(p) for p in params]
        self.ordered = any(order is not None for order in self.order)
        self.blocks, self.failed = [], None
        tensors = []
        for p in params:
            rows = p.shape[0] if p.dim() > 1 and p.numel() > 0 else 1
            tensors.append((owner._names.get(p, "parameter"), max(rows, 1), p.numel() // max(rows, 1),
                            *_part_of_whole(p)))
        self.tensors = tensors
        device = f"cuda:{self.device.index}" if self.gpu else "cpu"
        try:
            self.handle = library.Handle({**settings, "device": device, "grads": NUMBERS[grads],
                                          "parameters": NUMBERS[first.dtype], "element": element}, tensors,
                                         self._allocate, self.stream())
        except MemoryError:
            if self.failed is not None:
                raise self.failed from None
            raise
        except ValueError:
            if self.failed is not None:
                raise self.failed from None
            raise
        self.weights = array.array("Q", bytes(8 * len(params)))
        self.addresses = array.array("Q", bytes(8 * len(params)))
        self.group_of = array.array("i", bytes(4 * len(params)))
        self.age = [0] * len(params)  # steps that each parameter has taken
        self.views = [dict(self._views(t)) for t in range(len(params))]
        # What is kept beside a parameter has to follow when others write it.
        self.watched = any(name not in ("m", "v", "slow") and not name.startswith(("m.", "v.", "slow."))
                           for views in self.views for name in views)
        self.versions = None

    def _allocate(self, count):
        try:
            self.blocks.append(torch.empty(count, dtype=torch.uint8, device=self.device))
            return self.blocks[-1].data_ptr()
        except Exception as error:  # ctypes would print it and go on
            self.failed = error
            return 0

    def stream(self):
        return torch.cuda.current_stream(self.device).cuda_stream if self.gpu else None

    def _views(self, tensor):
        """The states of a tensor. One number for each element has the parameter's shape; codes in blocks are bytes."""
        name, rows, cols, first, count = self.tensors[tensor]
        states = list(self.handle.states(tensor))
        alone = {n.split(".")[0] for n, *_ in states if "." in n}
        for name, dtype, data, size, run, bits in states:
            block = next(b for b in self.blocks if b.data_ptr() <= data < b.data_ptr() + b.numel()) if size else None
            view = block[data - block.data_ptr():][:size] if size else torch.empty(0, dtype=torch.uint8)
            if dtype in DTYPES and bits >= 8:
                view = view.view(DTYPES[dtype])
                local = self.locals[tensor]
                if run == 1 and name.split(".")[0] not in alone and self.order[tensor] is None:
                    head = first % TILE if count >= 0 else 0
                    view = view[head:head + local.numel()].view(local.shape)
            yield name, view

    def find_weights(self):
        if self.watched:
            versions = [p._version for p in self.locals]
            if self.versions is not None:
                for t, (then, now) in enumerate(zip(self.versions, versions)):
                    if then != now:
                        self.handle.weights_changed(t)
            self.versions = versions
        self.weights = array.array("Q", [p.data_ptr() for p in self.locals])

    def step(self, grads, groups, group_of, step):
        """grads: one for each parameter, or None. groups: the torch groups; group_of: their numbers here."""
        dtype, keep, addresses = self.grads, [], []
        for t, grad in enumerate(grads):
            if grad is None:
                addresses.append(0)
                continue
            grad = _local(grad)
            if grad.dtype is not dtype or self.ordered or grad.layout is not torch.strided or \
                    not grad.is_contiguous() or grad.shape != self.locals[t].shape or grad.device != self.device:
                grad = _address(grad, self.locals[t], dtype, self.order[t])
                keep.append(grad)
            address = grad.data_ptr()
            addresses.append(address if address else 1)  # an empty shard takes part in name alone
        self.find_weights()
        age = self.age
        number, constants, numbers = {}, [], []
        for t, grad in enumerate(grads):
            if grad is None:
                numbers.append(0)
                continue
            age[t] += 1
            key = (group_of[t], age[t])
            found = number.get(key)
            if found is None:
                found = number[key] = len(constants)
                group = groups[group_of[t]]
                constants.append((float(group["lr"]), float(group["weight_decay"]), float(group["betas"][0]),
                                  float(group["betas"][1]), float(group["eps"]), age[t]))
            numbers.append(found)
        self.group_of = array.array("i", numbers)
        try:
            self.handle.step(self.weights, array.array("Q", addresses), self.group_of, constants, step, self.stream())
        except Exception:
            for t, grad in enumerate(grads):
                age[t] -= grad is not None
            raise
        return number

    def restore(self, tensor, state, what):
        """Copies a saved state into the views."""
        views = self.views[tensor]
        missing = sorted(set(views) - set(state))
        if missing:
            raise ValueError(f"{what}: the saved states have no {missing[0]}, which {self.handle.describe()} needs; "
                             "make the optimizer with the formats that they were saved with")
        for name, view in views.items():
            saved = _local(state[name])
            if saved.shape != view.shape or saved.dtype != view.dtype:
                raise ValueError(f"{what}: the saved {name} is {tuple(saved.shape)} of {saved.dtype} and "
                                 f"{self.handle.describe()} has {tuple(view.shape)} of {view.dtype}; make the "
                                 "optimizer with the formats and shapes that it was saved with")
        with torch.no_grad():
            for name, view in views.items():
                view.copy_(_local(state[name]))


class Optimizer(torch.optim.Optimizer):
    """Updates parameters of float32 or bfloat16 in place, with weights and states in the formats of a preset, or in those
    that rule, weights, m and v name (README.md has the list). A parameter group may have its own lr, weight_decay,
    betas and eps, which schedulers may change, and its own preset, rule, weights, m and v."""

    def __init__(self, params, preset="adamw8", lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8, *, rule=None,
                 weights=None, m=None, v=None, overrides=None, formats=None, seed=0, decay_mode=None, lr_max=None,
                 beta3=None, alpha=None, ramp=None):
        self._shared = dict(overrides=overrides, formats=formats, seed=seed, decay_mode=decay_mode, lr_max=lr_max,
                            beta3=beta3, alpha=alpha, ramp=ramp)
        self._begin()
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, betas=tuple(betas), eps=eps, preset=preset,
                                      rule=rule, weights=weights, m=m, v=v, steps=0))
        for group in self.param_groups:
            self._check_group(group)

    def _begin(self):
        self._parts, self._part_of, self._names, self._end = [], {}, {}, 0
        self._flat, self._flat_group, self._apart, self._hooks = None, None, False, []

    @staticmethod
    def _check_group(group):
        lr, decay, eps = float(group["lr"]), float(group["weight_decay"]), float(group["eps"])
        beta1, beta2 = (float(beta) for beta in group["betas"])
        for name, value, good, want in [("lr", lr, 0 <= lr < math.inf, "a number from 0 on"),
                                        ("weight_decay", decay, 0 <= decay < math.inf, "a number from 0 on"),
                                        ("eps", eps, 0 < eps <= 1, "a number above 0, at most 1"),
                                        ("betas", beta1, 0 <= beta1 < 1, "numbers from 0 to below 1"),
                                        ("betas", beta2, 0 <= beta2 < 1, "numbers from 0 to below 1")]:
            if not good:
                raise ValueError(f"{name}: {value:g} was found; give {want}")
        # The library knows the names; an optimizer of one element says what is wrong with them.
        return {key: group.get(key) for key in FORMATS if group.get(key) is not None}

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for p in group["params"]:
            if p.dtype not in NUMBERS:
                self.param_groups.pop()
                raise TypeError(f"a parameter of {p.dtype} was found; the optimizer takes float32 and bfloat16")
        try:
            library.Handle(self._settings(group, "fp32" if all(p.dtype is torch.float32 for p in group["params"])
                                          else "bf16"), [])
        except ValueError:
            self.param_groups.pop()
            raise
        self._flat = None

    def _settings(self, group, parameters=None):
        settings = {key: value for key, value in self._shared.items() if value is not None}
        settings.update((key, group[key]) for key in FORMATS if group.get(key) is not None)
        if parameters:  # for a look at the names alone
            settings.update(parameters=parameters, device="cpu", overrides=None)
        return settings

    def _flatten(self):
        self._flat = list(itertools.chain.from_iterable(group["params"] for group in self.param_groups))
        self._flat_group = [i for i, group in enumerate(self.param_groups) for _ in group["params"]]
        for i, group in enumerate(self.param_groups):
            names = group.get("param_names")
            for j, p in enumerate(group["params"]):
                self._names[p] = names[j] if names else f"{i}.{j}"
        self._group_of = dict(zip(self._flat, self._flat_group))
        for part in self._parts:
            part.groups = [self._group_of[p] for p in part.params]

    # Parts.

    def _key(self, param, grads):
        group = self.param_groups[self._group_of[param]]
        return (param.dtype, grads, param.device, tuple(group.get(key) for key in FORMATS))

    def _add_part(self, params, grads, element=None):
        group = self.param_groups[self._group_of[params[0]]]
        part = _Part(self, params, self._settings(group), grads, self._end if element is None else element)
        part.groups = [self._group_of[p] for p in params]
        self._parts.append(part)
        self._end = max(self._end, part.handle.end)
        for t, p in enumerate(params):
            self._part_of[p] = (part, t)
        return part

    def _make_parts(self, params, grads):
        """Parts for parameters that have their first gradients: one for each key, in order."""
        by_key = defaultdict(list)
        for p, grad in zip(params, grads):
            dtype = grad.dtype if grad.dtype in NUMBERS else p.dtype
            by_key[self._key(p, dtype)].append(p)
        for key, members in by_key.items():
            for part_params in ([[p] for p in members] if self._apart else [members]):
                part = self._add_part(part_params, key[1])
                for t, p in enumerate(part.params):
                    self._publish(part, t, p)

    def _publish(self, part, t, param):
        self.state[param] = {"step": torch.tensor(float(part.age[t])), "element": torch.tensor(part.handle.element(t)),
                             **part.views[t]}

    # The step.

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._flat is None:
            self._flatten()
        grads = [p.grad for p in self._flat]
        self._step(self._flat, grads)
        return loss

    def _step(self, params, grads):
        new = [(p, g) for p, g in zip(params, grads) if g is not None and p not in self._part_of]
        if new:
            for p, g in new:
                if g.layout is not torch.strided:
                    raise RuntimeError("a sparse gradient was found; the optimizer takes dense ones (sparse=False)")
            self._make_parts(*zip(*new))
        groups = self.param_groups
        step = groups[0]["steps"] + 1
        given = dict(zip(params, grads)) if len(self._parts) != 1 or self._parts[0].params is not params else None
        stepped = False
        for part in self._parts:
            its = [given.get(p) for p in part.params] if given is not None else grads
            if not any(g is not None for g in its):
                continue
            if part.gpu and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("a step was captured into a CUDA graph, which would repeat this step's learning "
                                   "rate and noise; capture forward and backward, and step outside of the graph")
            self._same_device(part)
            part.step(its, groups, part.groups, max(part.age) + 1 if self._apart else step)
            stepped = True
            for p, t, g in zip(part.params, range(len(its)), its):
                if g is not None:
                    self.state[p]["step"].fill_(part.age[t])
            torch.autograd.graph.increment_version(part.locals)
            if part.watched:
                part.versions = [p._version for p in part.locals]
        if stepped:
            for group in groups:
                group["steps"] = step

    @staticmethod
    def _same_device(part):
        for p, local in zip(part.params, part.locals):
            if _local(p) is not local or local.device != part.device or local.dtype not in NUMBERS:
                raise RuntimeError(f"a parameter has moved from {part.device}, or was replaced, since its first step; "
                                   "move the model first and make the optimizer then")

    # States.

    def state_dict(self):
        return super().state_dict()

    def load_state_dict(self, state_dict):
        """Takes states that state_dict gave, to the bit; they must be of the same formats."""
        state_dict = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = hook(self, state_dict)
            state_dict = changed if changed is not None else state_dict
        saved_groups = deepcopy(state_dict["param_groups"])
        if len(saved_groups) != len(self.param_groups):
            raise ValueError(f"the saved states have {len(saved_groups)} parameter groups and the optimizer has "
                             f"{len(self.param_groups)}")
        for saved, group in zip(saved_groups, self.param_groups):
            if len(saved["params"]) != len(group["params"]):
                raise ValueError(f"the saved states have a group of {len(saved['params'])} parameters and the "
                                 f"optimizer's has {len(group['params'])}")
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
        self.param_groups = saved_groups
        self._restore(by_param)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _restore(self, states):
        """Makes the parts anew that these states came from, and fills them."""
        self._parts, self._part_of, self._end = [], {}, 0
        self.state = defaultdict(dict)
        self._flatten()
        by_key = defaultdict(list)
        for p, state in states.items():
            if "element" not in state:
                raise ValueError("the saved states are not of nibble_optim: they have no \"element\"; see "
                                 "nibble_optim.convert for others")
            by_key[self._key(p, p.dtype)].append(p)
        for key, members in by_key.items():
            members.sort(key=lambda p: int(states[p]["element"]))
            self._restore_part(members, key[1], states)

    def _restore_part(self, params, grads, states):
        part = self._add_part(params, grads, int(states[params[0]]["element"]))
        fits = all(part.handle.element(t) == int(states[p]["element"]) for t, p in enumerate(params))
        if not fits and len(params) > 1:  # they did not begin together
            self._parts.remove(part)
            for p in params:
                self._restore_part([p], grads, states)
            return
        for t, p in enumerate(params):
            part.restore(t, states[p], self._names[p])
            part.age[t] = int(states[p]["step"])
            self._publish(part, t, p)
        part.handle.loaded()

    def __getstate__(self):
        return {**super().__getstate__(), "_shared": self._shared}

    def __setstate__(self, state):
        super().__setstate__(state)
        if "_parts" not in self.__dict__:  # a copy, or from a file: torch has made the object without __init__
            self._begin()
            states = {p: dict(values) for p, values in self.state.items()}
            self._restore(states)

    # In the backward pass.

    def step_in_backward(self):
        """From now on each parameter is stepped as soon as its gradient is complete, and the gradient is released.
        step() and zero_grad() then find nothing to do. Not with DDP, gradient accumulation or clipping."""
        if self._parts:
            raise RuntimeError("step_in_backward comes before the first step")
        self._apart = True
        self._flatten()

        def hook(param):
            with torch.no_grad():
                self._step([param], [param.grad])
            param.grad = None

        self._hooks = [p.register_post_accumulate_grad_hook(hook) for p in self._flat if p.requires_grad]
        return self

    def describe(self):
        """One line for each part: rule, formats and bytes a parameter."""
        return [part.handle.describe() for part in self._parts]
