"""Optimizer: a torch.optim.Optimizer whose step is one call of libnibble_optim.

Parameters with the same type, device and formats form a part, which is made when they first have gradients: one
optimizer of the library. States are views of torch tensors that the part owns, so torch counts and saves them like its
own. Each state belongs to one parameter, and has the values of the whole parameter even if only a shard lies here."""
import array
import itertools
import math
import operator
import re
import warnings
from collections import defaultdict
from copy import deepcopy

import torch
from torch.optim import optimizer as torch_optimizer

from . import library, lists, shares

FORMATS = ("preset", "rule", "weights", "m", "v")  # settings that a parameter group may have of its own
NEEDS = {"alpha ramp": "ademamix", "beta3": "ademamix came", "momentum nesterov": "muon normuon rmnp normuon-lite",
         "ns_steps ns_coefficients": "muon normuon", "rank": "galore fira apollo",
         "rank_gap rank_scale": "galore fira apollo apollo-mini",
         "clip_update": "adafactor came"}  # arguments need one of these rules, as in data/options_synonyms.h
NUMBERS = {torch.float32: "fp32", torch.bfloat16: "bf16"}
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I8": torch.int8, "I16": torch.int16}
TILE = 2048
REST = "wte|wpe|ln*|*.bias"  # patterns that rules of matrices bring along, which need not match


def _by_pattern(text):
    """Yields the parts of `overrides` or `stacked`: (patterns, ":", settings), without spaces in the patterns."""
    for part in (text or "").split(";"):
        patterns, colon, settings = part.partition(":")
        if part.strip():
            yield "".join(patterns.split()) if colon else patterns, colon, settings


def _matches(pattern, names):
    """Returns True if the pattern matches some name, from its beginning or a dot up to its end or a dot."""
    pattern = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")
    return any(map(re.compile(rf"(.*\.)?{pattern}(\..*)?", re.DOTALL).fullmatch, names))


def _is_dtensor(tensor):
    return hasattr(tensor, "_local_tensor")


def _is_capturing():
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _local(tensor):
    return tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor


def _part_of_whole(param):
    """Returns the first element, in the order of rows, and the number of elements of a DTensor that lie here."""
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
    """Returns the order of dimensions in which a parameter is contiguous; None if it is contiguous already. Refuses a
    parameter that is contiguous in no order."""
    local = _local(param)
    if local.is_contiguous():
        return None
    order = sorted(range(local.dim()), key=lambda d: (-local.stride(d), d))
    if local.detach().permute(order).is_contiguous() and not _is_dtensor(param):
        return order
    raise ValueError(f"a parameter of shape {tuple(param.shape)} and strides {local.stride()} was found, which has "
                     "holes or overlaps; make it contiguous")


def _address(grad, param, dtype, order):
    """Returns the gradient as a contiguous tensor of this type, which it usually is already."""
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


def _missing(grads):
    return tuple([t for t, grad in enumerate(grads) if grad is None])


class _Known:
    """Gradients that could be used without a copy: the layout of those that are not missing, and their last addresses.
    In most steps only addresses have changed."""

    def __init__(self, grads, missing, addresses):
        self.count = len(grads)
        self.there = [t for t, grad in enumerate(grads) if grad is not None] if missing else None
        its = self._its(grads)
        self.layout, self.numbers = lists.Layout.of(its), list(range(len(its)))
        self.where, self.addresses = lists.addresses(its), addresses

    def _its(self, grads):
        return grads if self.there is None else [grads[t] for t in self.there]

    def find(self, grads):
        """Returns the addresses as an array, 0 for a missing gradient; None if the layout has changed."""
        its = self._its(grads)
        if self.layout is None or not self.layout.same(its):
            return None
        if not lists.same_addresses(its, self.where, self.numbers):
            self.where = lists.addresses(its)
            if self.there is None:
                self.addresses = array.array("Q", self.where)
            else:
                self.addresses = array.array("Q", bytes(8 * self.count))
                for t, address in zip(self.there, self.where):
                    self.addresses[t] = address
        return self.addresses


class _Part:
    """Holds parameters of one type, device and formats: an optimizer of the library, and the memory of its states."""

    def __init__(self, owner, params, settings, grads, element):
        first = params[0]
        self.params, self.settings, self.grads = params, settings, grads
        if first.device.type not in ("cpu", "cuda"):
            raise ValueError(f"a parameter on {first.device} was found; the optimizer takes the CPU and NVIDIA GPUs")
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
        device = f"cuda:{self.device.index}" if self.gpu else "cpu"
        settings = {**settings, "device": device, "grads": NUMBERS[grads], "parameters": NUMBERS[first.dtype],
                    "element": element}
        self.dtype, self.shapes = first.dtype, [p.shape for p in self.locals]
        self.shares, self.owned = None, []
        self._make(settings, tensors)
        self.weights, self.where, self.numbers = None, None, list(range(len(params)))
        # A _Known for each set of missing gradients, how many were made, and the last such set.
        self.known, self.made, self.last_missing = {}, 0, ()
        # If parameters have taken different numbers of steps, the last step keeps its missing gradients, one parameter
        # of each group, and group_of here.
        self.divided = None
        self.views = [dict(self._views(t)) for t in range(len(params))]
        self.by_rows = [{name for name, *_, run, bits in self._states(t) if self._row_bytes(t, run, bits)}
                        for t in range(len(params))]
        # The library's copy of a parameter must be made again when other code has written the parameter.
        self.watched = any(name.split(".")[0] not in ("m", "v", "slow", "basis", "norms")
                           for views in self.views for name in views)
        # Copying an owner's changes to a parameter also raises the parameter's counter.
        self.versions, self.own_counters = None, False if self.shares else None
        # A write through a DTensor raises the counter of the DTensor alone, not that of the local tensor.
        self.sharded = [t for t, p in enumerate(params) if _is_dtensor(p)]
        self.counted = [*self.locals, *(params[t] for t in self.sharded)]
        self.counted_of = [*self.numbers, *self.sharded]

    def _make(self, settings, tensors):
        """Makes the library's optimizer; and if sharded parameters need owners, another one for those that this rank
        owns. Sets self.tensors and self.kept_shapes to what is kept here of each parameter."""
        cut = [p for p, (*_, count) in zip(self.params, tensors) if count >= 0]
        self.tensors, self.kept_shapes = list(tensors), list(self.shapes)
        if not cut or "releases" in settings:
            self.handle = self._open(settings, tensors)
            return
        ranks = shares.Ranks(cut[0])
        self.handle = self._open({**settings, "share": f"rest/{ranks.count}"}, tensors)
        owners = [self.handle.owner(t) for t in range(len(tensors))]
        self.owned = [t for t, owner in enumerate(owners) if owner >= 0]
        self.together_of = [self.handle.together(t) for t in range(len(tensors))]
        if not self.owned:
            return
        self.shares = shares.Shares(self.params, owners, ranks,
                                    lambda share: self._open({**settings, **share}, tensors))
        for t in self.owned:
            *_, first, count = tensors[t]
            if count > 0 and self.shares.pieces[t][0][ranks.here] != (first, count):
                raise ValueError(f"{tensors[t][0]} is cut otherwise than fully_shard does it, at equal numbers of rows")
            self.tensors[t] = (*tensors[t][:3], 0, -1)
            self.kept_shapes[t] = self.params[t].shape

    def _open(self, settings, tensors):
        try:
            return library.Handle(settings, tensors, self._allocate, self.stream())
        except (MemoryError, ValueError):
            if self.failed is not None:  # torch's own error says more
                raise self.failed from None
            raise

    def _states(self, tensor):
        """Returns the library's states of a parameter; none if another rank owns it."""
        if tensor not in self.owned:
            return self.handle.states(tensor)
        return self.shares.handle.states(tensor) if self.shares.handle else ()

    def spread(self):
        """Returns the states of parameters with owners, as DTensors."""
        if not self.shares:
            return {}
        mine = [t for t in self.owned if self.shares.owners[t] == self.shares.ranks.here]
        return self.shares.spread({t: self.views[t] for t in mine})

    def loaded(self):
        for handle in (self.handle, self.shares and self.shares.handle):
            if handle:
                handle.loaded()

    def place(self, groups, places, whole):
        """Sets the parameters' groups, and their places among all parameters; `whole`: there are no others."""
        self.groups, self.places, self.whole = groups, places, whole
        self.used = sorted(set(groups))
        self.group_of = array.array("i", [self.used.index(g) for g in groups])

    def _allocate(self, count):
        try:
            self.blocks.append(torch.empty(count, dtype=torch.uint8, device=self.device))
            return self.blocks[-1].data_ptr()
        except Exception as error:  # ctypes would print it and go on
            self.failed = error
            return 0

    def stream(self):
        return torch._C._cuda_getCurrentRawStream(self.device.index) if self.gpu else None

    def _views(self, tensor):
        """Yields the states of a tensor. With one number an element they have its shape; codes in blocks are bytes."""
        name, rows, cols, first, count = self.tensors[tensor]
        states, shape = list(self._states(tensor)), self.kept_shapes[tensor]
        alone = {n.split(".")[0] for n, *_ in states if "." in n}
        for name, dtype, data, size, run, bits in states:
            block = next(b for b in self.blocks if b.data_ptr() <= data < b.data_ptr() + b.numel()) if size else None
            view = block[data - block.data_ptr():][:size] if size else torch.empty(0, dtype=torch.uint8)
            row = self._row_bytes(tensor, run, bits)
            if row:
                begin = first % TILE // max(run, 1) * bits // 8
                shard = view[begin:begin + shape[0] * row].view(-1, row)
                shard = shard.view(DTYPES[dtype]) if dtype in DTYPES else shard
                view = shard if self.params[tensor].dim() > 1 else shard.view(-1)
                if run == 1 and name.split(".")[0] not in alone and dtype in DTYPES:
                    view = view.view(shape)
            elif dtype in DTYPES and bits >= 8:
                view = view.view(DTYPES[dtype])
                if run == 1 and name.split(".")[0] not in alone and self.order[tensor] is None:
                    head = first % TILE if count >= 0 else 0
                    view = view[head:head + shape.numel()].view(shape)
            yield name, view

    def _row_bytes(self, tensor, run, bits):
        """Returns the bytes of a state for each index of a cut parameter's first dimension, which belong to one rank. 0
        if the parameter is not cut, or if ranks may share numbers."""
        param, count = self.params[tensor], self.tensors[tensor][-1]
        row = math.prod(param.shape[1:])
        if count < 0 or run == 0 or TILE % run or row % run or row // run * bits % 8:
            return 0
        return row // run * bits // 8

    def _published(self, tensor):
        """Returns the states of a tensor as others see them. States that follow a cut parameter's rows are DTensors
        with its placements, which distributed checkpoints can load on any number of ranks. If there are other states,
        "cut" has the elements to which they belong, since they fit no other cut."""
        param, (*_, first, count) = self.params[tensor], self.tensors[tensor]
        states = dict(self.views[tensor])
        if count < 0:
            return states
        for name, view in self.views[tensor].items():
            if name not in self.by_rows[tensor]:
                states["cut"] = torch.tensor([first, count])
                continue
            shape = torch.Size((param.shape[0], *view.shape[1:]))
            stride = tuple(math.prod(shape[i + 1:]) for i in range(len(shape)))
            # torch cannot deepcopy a DTensor whose tensor begins within its storage, so this one begins at its storage.
            alone = torch.from_dlpack(view) if view.numel() > 0 else torch.empty_like(view)
            states[name] = type(param.data).from_local(alone, param.device_mesh, param.placements, run_check=False,
                                                       shape=shape, stride=stride)
        return states

    def find_weights(self):
        if self.watched:
            versions = lists.versions(self.counted)
            if self.versions is not None and versions != self.versions:
                self._take_over(t for t, then, now in zip(self.counted_of, self.versions, versions) if then != now)
            self.versions = versions
        if self.where is not None and lists.same_addresses(self.locals, self.where, self.numbers):
            return
        for p, local, shape, order in zip(self.params, self.locals, self.shapes, self.order):
            if _local(p) is not local or local.device != self.device or local.dtype is not self.dtype or \
                    local.shape != shape or _order(p) != order:
                raise RuntimeError(f"a parameter of {tuple(shape)} on {self.device} has been replaced since its first "
                                   f"step, by {tuple(local.shape)} of {local.dtype} with strides {local.stride()} on "
                                   f"{local.device}; move or change the model first and make the optimizer then")
        self.where = lists.addresses(self.locals)
        if self.watched and self.weights is not None:
            self._take_over(t for t, then, now in zip(self.numbers, self.weights, self.where)
                            if then != now and (_is_capturing() or not self._is_kept(t)))  # a capture is refused
        self.weights = array.array("Q", self.where)

    def _take_over(self, tensors):
        """Makes the library recompute the master or codes that it keeps beside these parameters."""
        for t in tensors:
            for handle in (self.handle, self.shares and self.shares.handle):
                if handle:
                    handle.weights_changed(t)

    def _is_kept(self, tensor):
        """Returns False if a parameter that has moved (p.data = new, model.to) has other values than its master. Codes
        cannot be compared, so they are always made again, without the bits that they have beside the parameter's."""
        kept, local = self.views[tensor].get("master", self.views[tensor].get("weights")), self.locals[tensor]
        if kept is None:
            return True
        if self.order[tensor] is not None:  # the state lies as the parameter does, with padding behind it
            kept, local = kept[:local.numel()], local.permute(self.order[tensor]).reshape(-1)
        return torch.equal(kept.to(self.dtype), local)

    def find_grads(self, grads):
        """Returns the gradients' addresses, 0 for a missing one, and tensors to keep alive until the step is queued."""
        if self.sharded:
            grads = [grad if grad is None else _local(grad) for grad in grads]
        found = self.known[()].find(grads) if not self.last_missing and () in self.known else None
        if found is None:
            self.last_missing = _missing(grads)
            if self.last_missing in self.known:
                found = self.known[self.last_missing].find(grads)
        if found is not None:
            return found, ()
        self.where = None  # if gradients have another layout, parameters may have one, even at their old addresses
        dtype, ordered, addresses, kept = self.grads, self.ordered, [], []
        plain = not ordered
        for t, grad in enumerate(grads):
            if grad is None:
                addresses.append(0)
                continue
            plain = plain and not _is_dtensor(grad)
            grad = _local(grad)
            if ordered or grad.dtype is not dtype or grad.layout is not torch.strided or not grad.is_contiguous() or \
                    grad.device != self.device or grad.shape != self.shapes[t]:
                grad = _address(grad, self.locals[t], dtype, self.order[t])
                kept.append(grad)
            addresses.append(grad.data_ptr() or 1)  # an empty shard has no address, and 0 would mean no gradient
        found = array.array("Q", addresses)
        # If layouts keep changing, remembering them is not worth its time.
        if plain and not kept and 1 not in addresses and self.made < 8:
            self.known[self.last_missing], self.made = _Known(grads, self.last_missing, found), self.made + 1
        return found, kept

    def constants(self, groups, missing, all_together, captured):
        """Returns the constants of each group, split by the number of steps taken, and each tensor's group."""
        if all_together:
            age = self.age[0] + 1
            return [self._constants(groups[g], age, captured) for g in self.used], self.group_of
        if self.divided is None or self.divided[0] != missing:
            number, firsts, group_of, without = {}, [], [], set(missing)
            for t, key in enumerate(zip(self.groups, self.age)):
                if t not in without and number.setdefault(key, len(number)) == len(firsts):
                    firsts.append(t)
                group_of.append(0 if t in without else number[key])
            self.divided = (missing, firsts, array.array("i", group_of))
        _, firsts, group_of = self.divided
        return [self._constants(groups[self.groups[t]], self.age[t] + 1, captured) for t in firsts], group_of

    @staticmethod
    def _constants(group, age, captured):
        beta1, beta2 = group["betas"]
        lr, lr_at = group["lr"], None
        if captured and isinstance(lr, torch.Tensor) and lr.is_cuda:
            if lr.dtype is not torch.float32:
                raise TypeError(f"lr is a tensor of {lr.dtype}, and a CUDA graph reads float32; make it one")
            lr, lr_at = 0.0, lr.data_ptr()
        return (float(lr), float(group["weight_decay"]), float(beta1), float(beta2), float(group["eps"]), age, lr_at)

    def catch_up(self):
        """Counts the steps of replayed graphs for the parameters of the capture."""
        clock = self.handle.clock(self.stream()) if self.captured else self.clock
        if len(self.captured) < len(self.age) and clock != self.clock:
            self._part_ways()
        for t in self.captured:
            self.age[t] += clock - self.clock
        self.counts.copy_(torch.tensor(self.age[:len(self.counts)], device="cpu"))
        self.clock, self.divided = clock, None

    def step(self, grads, groups, step, captured=False):
        """Takes a step. grads: one for each parameter, or None. groups: the optimizer's. captured: the step is captured
        into a CUDA graph, so nothing happens yet."""
        own = grads
        if self.shares:
            own = [grad if owner < 0 else None for grad, owner in zip(grads, self.shares.owners)]
        addresses, kept = self.find_grads(own)
        self.find_weights()
        missing = _missing(grads) if self.shares else self.last_missing
        all_together = self.together and not missing
        constants, group_of = self.constants(groups, missing, all_together, captured)
        if self.shares:
            self._check_shares(grads, captured, constants, group_of)
        self.handle.step(self.weights, addresses, group_of, constants, step, self.stream())
        if self.shares:
            self._step_shares(grads, group_of, constants, step)
        if captured:
            self.captured = [t for t, grad in enumerate(grads) if grad is not None]
            return
        self.clock = step
        if all_together:
            self.age = [self.age[0] + 1] * len(grads)
            self.counts.fill_(self.age[0])
        else:
            self._part_ways()
            self.age = [age + (grad is not None) for age, grad in zip(self.age, grads)]
            there = torch.ones(len(grads), device="cpu")
            there[list(missing)] = 0
            self.counts += there
        lists.increment_versions(self.counted)
        if self.watched:
            self._find_versions()

    def _check_shares(self, grads, captured, constants, group_of):
        """Refuses on all ranks what an owner would refuse later, when the others would wait for it."""
        present, first = [t for t in self.owned if grads[t] is not None], {}
        for t in present:
            its = constants[group_of[t]][2:6]  # betas, eps, number of the step
            other = first.setdefault(self.together_of[t], its)
            if self.together_of[t] >= 0 and its != other:
                own, theirs = ("({:g}, {:g}), eps {:g} at step {}".format(*each) for each in (its, other))
                raise ValueError(f"{self.tensors[t][0]} has betas {own} and others of its rule have {theirs}, which "
                                 "takes all together; give them the same betas and eps and step them together, or "
                                 "override the rule of some")
        for t in self.owned:
            if grads[t] is None and any(self.together_of[t] == self.together_of[u] >= 0 for u in present):
                raise ValueError(f"{self.tensors[t][0]} has no gradient and others of its rule have one, which takes "
                                 "all of them or none; give zeros, or give some another rule")
        if captured and present:
            raise RuntimeError("a step was captured into a CUDA graph, and ranks exchange parameters in it, which are "
                               "sharded and have owners; step outside of the graph")

    def _step_shares(self, grads, group_of, constants, step):
        """Steps the parameters that have owners. All ranks have gradients of the same ones."""
        values, slopes = {}, {}
        for t in self.owned:
            if grads[t] is None:
                continue
            local, order = self.locals[t], self.order[t]
            values[t] = local.detach() if order is None else local.detach().permute(order)
            slopes[t] = _address(_local(grads[t]), local, self.grads, order)
        if values:
            self.shares.step(values, slopes, group_of, constants, step, self.stream())

    def _find_versions(self):
        """Finds the versions after a step, which has raised each by one. Parameters that are views of one tensor share
        a counter, which the step has raised for each of them; the first step looks if there are any."""
        after = [number + 1 for number in self.versions]
        if not self.own_counters:
            found = lists.versions(self.counted)
            self.own_counters = self.own_counters is None and found == after
            after = found
        self.versions = after

    def _part_ways(self):
        """Parameters that step together share the tensor "step"; from now on each has its own."""
        if self.together:
            self.together = False
            self._count()
            for p, step in zip(self.params, self.steps):
                self.state[p]["step"] = step

    def _count(self):
        """Makes the tensors with the numbers of steps that parameters have taken: one tensor, or views of one."""
        ages = self.age[:1] if self.together else self.age
        self.counts, self.divided = torch.tensor(ages, dtype=torch.float32, device="cpu"), None
        self.steps = [self.counts[i] for i in range(len(ages))]

    def publish(self, state, ages):
        """Enters the states of all parameters into the optimizer's; `ages` are the numbers of steps taken."""
        self.state, self.age, self.clock, self.captured = state, list(ages), 0, []
        self.together = len(set(self.age)) == 1
        self._count()
        for t, p in enumerate(self.params):
            state[p] = {"step": self.steps[0 if self.together else t],
                        "element": torch.tensor(self.handle.element(t)), **self._published(t)}

    def restore_all(self, states, names):
        """Copies saved states into the views. If an owner refuses them, all ranks do, since they load together."""
        error = None
        for t, (state, name) in enumerate(zip(states, names)):
            try:
                self.restore(t, state, name)
            except ValueError as found:
                error = error or str(found)
        if self.shares and any(_is_dtensor(value) for t in self.owned for value in states[t].values()):
            error = self.shares.any(error)
        if error:
            raise ValueError(error)

    def restore(self, tensor, state, what):
        """Copies a saved state into the views."""
        views = self.views[tensor]
        if self.shares and tensor in self.owned:  # on all ranks, since full_tensor needs all of them
            state = {name: value.full_tensor() if _is_dtensor(value) else value for name, value in state.items()}
            state = {name: value.view(views[name].shape) if name in views and value.numel() == views[name].numel()
                     else value for name, value in state.items()}
        missing = sorted(set(views) - set(state))
        if missing:
            raise ValueError(f"{what}: the saved states have no {missing[0]}, which {self.handle.describe()} needs; "
                             "make the optimizer with the formats that they were saved with")
        *_, first, count = self.tensors[tensor]
        if "cut" in state and state["cut"].tolist() != [first, count]:
            there = state["cut"].tolist()
            raise ValueError(f"{what}: the saved states are of {there[1]} elements from {there[0]} on, and here lie "
                             f"{count} from {first} on; load them on as many ranks as saved them")
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
    """Updates parameters of float32 or bfloat16 in place, with weights and states in the formats of a preset, or in
    those that rule, weights, m and v name (README.md has more). A parameter group may have its own lr, weight_decay,
    betas and eps, which schedulers may change, and its own preset, rule, weights, m and v."""

    _bf16_weights = None  # the format of bf16 parameters without an argument `weights`; None: the preset's

    def __init__(self, params, preset="adamw8", lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8, *, rule=None,
                 weights=None, m=None, v=None, overrides=None, seed=0, decay_mode=None, lr_max=None,
                 beta3=None, alpha=None, ramp=None, momentum=None, nesterov=None, clip_update=None,
                 limit_growth=None, capturable=False, stacked=None, ns_steps=None, ns_coefficients=None, rank=None,
                 rank_gap=None, rank_scale=None, min_quantized=0):
        if nesterov not in (None, True, False):
            raise ValueError(f"nesterov: {nesterov!r} was found; give True or False")
        self._shared = dict(overrides=overrides, seed=seed, decay_mode=decay_mode, lr_max=lr_max,
                            beta3=beta3, alpha=alpha, ramp=ramp, momentum=momentum, clip_update=clip_update,
                            nesterov=None if nesterov is None else "on" if nesterov else "off",
                            limit_growth=limit_growth, capturable=1 if capturable else None,
                            stacked=stacked, ns_steps=ns_steps, ns_coefficients=ns_coefficients, rank=rank,
                            rank_gap=rank_gap, rank_scale=rank_scale)
        self._min_quantized = min_quantized  # smaller tensors, as a whole, keep m and v in fp32
        self._begin()
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, betas=tuple(betas), eps=eps, preset=preset,
                                      rule=rule, weights=weights, m=m, v=v, steps=0))

    def _begin(self):
        self._parts, self._part_of, self._names, self._end = [], {}, {}, 0
        self._flat, self._flat_group, self._apart, self._hooks = None, None, None, []

    @staticmethod
    def _check_group(group):
        try:
            lr, decay, eps = float(group["lr"]), float(group["weight_decay"]), float(group["eps"])
            beta1, beta2 = (float(beta) for beta in group["betas"])
        except (TypeError, ValueError):
            found = ", ".join(f"{name}={group[name]!r}" for name in ("lr", "weight_decay", "eps", "betas"))
            raise ValueError(f"{found} were found; give numbers, and two of them as betas") from None
        for name, value, good, want in [("lr", lr, 0 <= lr < math.inf, "a number from 0 on"),
                                        ("weight_decay", decay, 0 <= decay < math.inf, "a number from 0 on"),
                                        ("eps", eps, 0 < eps <= 1, "a number above 0, at most 1"),
                                        ("betas", beta1, 0 <= beta1 < 1, "numbers from 0 to below 1"),
                                        ("betas", beta2, 0 <= beta2 < 1, "numbers from 0 to below 1")]:
            if not good:
                raise ValueError(f"{name}: {value:g} was found; give {want}")

    def add_param_group(self, param_group):
        if param_group.get("preset") is not None:  # it brings its rule and formats, so the optimizer's do not apply
            param_group = {**dict.fromkeys(FORMATS), **param_group}
        params = param_group["params"]
        if not isinstance(params, torch.Tensor):
            params = list(params)
            if params and all(isinstance(p, tuple) for p in params):  # torch before 2.6 takes no names
                names, params = map(list, zip(*params))
                param_group = {**param_group, "param_names": names}
            param_group = {**param_group, "params": params}
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for p in group["params"]:
            if p.dtype not in NUMBERS:
                self.param_groups.pop()
                raise TypeError(f"a parameter of {p.dtype} was found; the optimizer takes float32 and bfloat16")
        try:
            self._check_group(group)
            # The library checks the names when it makes an optimizer without tensors.
            library.Handle(self._settings(group, "fp32" if all(p.dtype is torch.float32 for p in group["params"])
                                          else "bf16"), [])
        except ValueError:
            self.param_groups.pop()
            raise
        self._flat = None
        if self._apart is not None:
            self._set_apart()

    def _settings(self, group, parameters=None, small=False):
        settings = {key: value for key, value in self._shared.items() if value is not None}
        settings.update((key, group[key]) for key in FORMATS if group.get(key) is not None)
        if small:
            v = library.Handle({**settings, "device": "cpu"}, []).setting("v")
            settings.update(m="fp32", v="fp32" if v != "none" else None)
        if parameters:  # only to check the names
            settings.update(parameters=parameters, device="cpu", overrides=None)
        return settings

    def _check_needs(self):
        """Warns of an argument that no rule reads; a group that is added later may have a rule that does."""
        given = [name for names in NEEDS for name in names.split() if self._shared[name] is not None]
        if not given:
            return
        rules = set(re.findall(r"\brule=([a-z-]+)", self._shared["overrides"] or ""))
        for group in self.param_groups:
            rules.add(library.Handle(self._settings(group, "bf16"), []).setting("rule"))
        for names, readers in NEEDS.items():
            for name in names.split():
                if name in given and not rules & set(readers.split()):
                    warnings.warn(f"{name} changes nothing without rule {' or '.join(readers.split())}, and the "
                                  f"optimizer has {', '.join(sorted(rules))}; leave {name} out, or give such a rule")

    def _flatten(self):
        self._flat = list(itertools.chain.from_iterable(group["params"] for group in self.param_groups))
        self._flat_group = [i for i, group in enumerate(self.param_groups) for _ in group["params"]]
        for i, group in enumerate(self.param_groups):
            names = group.get("param_names")
            for j, p in enumerate(group["params"]):
                self._names[p] = names[j] if names else f"{i}.{j}"
        self._idle = None  # the places of parameters that have had no gradient yet
        self._check_patterns()
        self._check_needs()
        self._group_of = dict(zip(self._flat, self._flat_group))
        self._place_of = {p: i for i, p in enumerate(self._flat)}
        if not self._part_of.keys() <= self._place_of.keys():
            raise RuntimeError("a parameter that has been stepped is in no group any more; make another optimizer of "
                               "the new parameters")
        for part in self._parts:
            self._place(part)

    def _check_patterns(self):
        """Refuses a pattern that no name matches."""
        names = self._names.values()
        for setting in ("overrides", "stacked"):
            for patterns, colon, _ in _by_pattern(self._shared[setting]):
                for pattern in filter(None, patterns.split("|")) if colon and patterns != REST else ():
                    if not _matches(pattern, names):
                        raise ValueError(f"{setting}: {pattern} matches no parameter; type a name such as "
                                         f"{next(iter(names))}, of model.named_parameters()")

    def _overrides_of(self, params):
        """Returns the overrides without patterns of other parameters, such as those of another type."""
        names, kept = [self._names[p] for p in params], []
        for patterns, colon, settings in _by_pattern(self._shared["overrides"]):
            if colon and patterns != REST:
                patterns = "|".join(pattern for pattern in patterns.split("|") if _matches(pattern, names))
            if patterns:
                kept.append(patterns + colon + settings)
        return "; ".join(kept) or "*: lr=1"  # this changes nothing, and "" would bring the preset's

    def _place(self, part):
        places = [self._place_of[p] for p in part.params]
        part.place([self._group_of[p] for p in part.params], places, places == list(range(len(self._flat))))

    # Parts.

    def _key(self, param, grads):
        group = self.param_groups[self._group_of[param]]
        return (param.dtype, grads, param.device, param.numel() < self._min_quantized,
                tuple(group.get(key) for key in FORMATS))

    def _add_part(self, params, grads, element=None):
        group = self.param_groups[self._group_of[params[0]]]
        settings = self._settings(group, small=params[0].numel() < self._min_quantized)
        if params[0].dtype is torch.bfloat16 and self._bf16_weights:
            settings.setdefault("weights", self._bf16_weights)
        if self._shared["overrides"]:
            settings["overrides"] = self._overrides_of(params)
        if self._apart:
            settings["releases"] = 1
        part = _Part(self, params, settings, grads, self._end if element is None else element)
        self._place(part)
        self._parts.append(part)
        self._end, self._idle = max(self._end, part.handle.end), None
        for t, p in enumerate(params):
            self._part_of[p] = (part, t)
        return part

    def _make_parts(self, params, grads):
        """Makes parts for parameters that have their first gradients: one for each key, in order."""
        by_key = defaultdict(list)
        for p, grad in zip(params, grads):
            dtype = grad.dtype if grad.dtype in NUMBERS else p.dtype
            by_key[self._key(p, dtype)].append(p)
        for key, members in by_key.items():
            for part_params in ([[p] for p in members] if self._apart else [members]):
                element = self._apart[part_params[0]] if self._apart else None
                self._add_part(part_params, key[1], element).publish(self.state, [0] * len(part_params))

    # The step.

    def step(self, closure=None):
        return self._uncompiled_step(closure)

    step.hooked = True  # else torch wraps step, which takes 5 us even if there are no hooks

    @torch.compiler.disable
    def _uncompiled_step(self, closure):
        arguments = () if closure is None else (closure,)
        return (self._watched_step if self._is_watched() else self._plain_step)(*arguments)

    def _is_watched(self):
        """Returns True if torch's wrapper is needed: there are hooks to call, or a profiler runs."""
        return bool(self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks or
                    torch_optimizer._global_optimizer_pre_hooks or torch_optimizer._global_optimizer_post_hooks or
                    torch._C._autograd._profiler_enabled())

    @torch.no_grad()
    def _plain_step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        flat = list(itertools.chain.from_iterable(group["params"] for group in self.param_groups))
        if self._flat is None or len(flat) != len(self._flat) or not all(map(operator.is_, flat, self._flat)):
            self._flatten()
        grads = [p.grad for p in self._flat]
        self._step(self._flat, grads)
        return loss

    _watched_step = torch.optim.Optimizer.profile_hook_step(_plain_step)

    def _step(self, params, grads):
        if self._parts and not self.state:  # cleared by other code, to begin anew
            self._parts, self._part_of, self._end, self._idle = [], {}, 0, None
        if len(self._part_of) < len(params) or self._apart:
            self._make_missing(params, grads)
        captured = _is_capturing()
        if not captured:
            self._catch_up()
        groups, step, stepped = self.param_groups, self.param_groups[0]["steps"] + 1, False
        given = None if params is self._flat else dict(zip(params, grads))
        for part in self._parts if given is None else {id(self._part_of[p][0]): self._part_of[p][0]
                                                       for p in params}.values():
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
            part.step(its, groups, max(part.age) + 1 if self._apart else step, part.gpu and captured)
            stepped = stepped or not captured
        if stepped:
            for group in groups:
                group["steps"] = step if not self._apart else max(max(part.age) for part in self._parts)

    def _make_missing(self, params, grads):
        if self._idle is None:
            self._idle = [i for i, p in enumerate(self._flat) if p not in self._part_of]
        if params is self._flat:
            new = [(params[i], grads[i]) for i in self._idle if grads[i] is not None]
        else:
            new = [(p, g) for p, g in zip(params, grads) if g is not None and p not in self._part_of]
        if any(g.layout is not torch.strided for _, g in new):
            raise RuntimeError("a sparse gradient was found; the optimizer takes dense ones (sparse=False)")
        if new and _is_capturing():
            raise RuntimeError("a step was captured into a CUDA graph before any was taken; take some before")
        if new:
            self._make_parts(*zip(*new))

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
        if self._flat is None:
            self._flatten()
        for part in self._parts:
            for t, its in part.spread().items():
                there = states["state"][self._place_of[part.params[t]]]
                states["state"][self._place_of[part.params[t]]] = {"step": there["step"], "element": there["element"],
                                                                   **its}
        return states

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
        before = {key: self.__dict__[key] for key in ("param_groups", "state", "_parts", "_part_of", "_end")}
        self.param_groups = saved_groups
        try:
            self._restore(by_param)
        except Exception:
            self.__dict__.update(before)
            self._flatten()
            raise
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _restore(self, states):
        """Makes the parts again from which these states came, and fills them."""
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
            for part_params in ([[p] for p in members] if self._apart else [members]):
                self._restore_part(part_params, key[1], states)

    def _restore_part(self, params, grads, states):
        part = self._add_part(params, grads, int(states[params[0]]["element"]))
        fits = all(part.handle.element(t) == int(states[p]["element"]) for t, p in enumerate(params))
        if not fits and len(params) > 1:  # they were not made as one part
            self._parts.remove(part)
            for p in params:
                self._restore_part([p], grads, states)
            return
        part.restore_all([states[p] for p in params], [self._names[p] for p in params])
        part.publish(self.state, [int(states[p]["step"]) for p in params])
        part.loaded()

    def __getstate__(self):
        self._catch_up()
        return {**super().__getstate__(), "_shared": self._shared, "_min_quantized": self._min_quantized,
                "_bf16_weights": self._bf16_weights, "_in_backward": self._apart is not None}

    def __setstate__(self, state):
        super().__setstate__(state)
        if "_parts" not in self.__dict__:  # a copy or a loaded object, made without __init__
            self._begin()
            if self.__dict__.pop("_in_backward"):
                self.step_in_backward()
            states = {p: dict(values) for p, values in self.state.items()}
            self._restore(states)

    # In the backward pass.

    def step_in_backward(self):
        """From now on steps each parameter as soon as its gradient is complete, and releases the gradient. step() and
        zero_grad() then do nothing, except for parameters that are frozen now and are not later. This does not work
        with DDP, gradient accumulation or clipping."""
        if self._parts:
            raise RuntimeError("step_in_backward comes before the first step")
        self._apart = {}
        self._set_apart()
        return self

    def _set_apart(self):
        """Hooks new parameters. Each has the place in the model that it would have if all were stepped together."""
        def hook(param):
            with torch.no_grad():
                self._step([param], [param.grad])
            param.grad = None

        self._flatten()
        for p in self._flat[len(self._apart):]:
            self._apart[p] = TILE * sum(-(-q.numel() // TILE) for q in self._apart)
            if p.requires_grad:
                self._hooks.append(p.register_post_accumulate_grad_hook(hook))

    def describe(self):
        """Returns a line for each part: rule, formats and bytes a parameter."""
        return [part.handle.describe() for part in self._parts]
