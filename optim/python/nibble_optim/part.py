"""Parts: parameters of one type, device and formats, which one optimizer of the library steps together."""
import array
import math
import operator

import torch
from torch.autograd.graph import increment_version

from . import library, shares

NUMBERS = {torch.float32: "fp32", torch.bfloat16: "bf16"}  # of gradients; others become one of these
PARAMETERS = {**NUMBERS, torch.float16: "fp16"}
MOMENTS = {"exp_avg": "m", "exp_avg_sq": "v", "momentum_buffer": "m", "master_param": "master"}  # others' names
# Other states, int16 among them, which collectives do not take, are bytes.
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I8": torch.int8}
TILE = 2048


class OtherGradients(Exception):
    """A gradient has a type that the part was not made for."""


class Noted(dict):
    """The states of a parameter in optimizer.state. Notes changes, but not those of the values of a tensor. It also
    answers to other packages' names, which iterating and saving leave out."""

    changes = None
    part, tensor = None, 0

    def __missing__(self, key):
        if key not in self:
            raise KeyError(key)
        return self.part.answer(self.tensor, key)()

    def __contains__(self, key):
        return super().__contains__(key) or (self.part is not None and self.part.answer(self.tensor, key) is not None)

    def get(self, key, default=None):
        return self[key] if key in self else default

    def __reduce__(self):
        return dict, (dict(self),)


def _noting(name):
    def method(self, *args, **kwargs):
        if name == "__setitem__" and not dict.__contains__(self, args[0]) and args[0] in self:
            raise TypeError(f"{args[0]} is a copy, which no step reads; set {', '.join(self)}, or load_state_dict")
        if self.changes is not None:
            self.changes.append(name)
        return getattr(dict, name)(self, *args, **kwargs)
    return method


for each in ("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update"):
    setattr(Noted, each, _noting(each))


def with_low(param, low):
    """Returns the fp32 values of a bf16 parameter with the 8 or 16 bits beside it."""
    bits = 8 * low.element_size()
    return ((param.view(torch.int16).int() << bits) + low.int() << 16 - bits).view(torch.float32)


def is_dtensor(tensor):
    return hasattr(tensor, "_local_tensor")


def _local(tensor):
    return tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor


def _part_of_whole(param):
    """Returns the first element, in the order of rows, and the number of elements of a DTensor that lie here."""
    if not is_dtensor(param):
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


def _address(grad, param, dtype, turned):
    """Returns the gradient, or its transpose, as a contiguous tensor of this type, which it usually is already."""
    if grad.layout is not torch.strided:
        raise RuntimeError("a sparse gradient was found; the optimizer takes dense ones (sparse=False)")
    if grad.device != param.device:
        raise RuntimeError(f"a gradient on {grad.device} was found for a parameter on {param.device}")
    if grad.shape != param.shape:
        raise RuntimeError(f"a gradient of shape {tuple(grad.shape)} was found for a parameter of "
                           f"{tuple(param.shape)}")
    if not grad.is_floating_point() or grad.dtype is torch.float64:
        raise TypeError(f"a gradient of {grad.dtype} was found; the optimizer takes float32 and bfloat16")
    return (grad.t() if turned else grad).to(dtype).contiguous()


def _missing(grads):
    return tuple([t for t, grad in enumerate(grads) if grad is None])


_COUNTS_LISTS = torch.__version__ >= (2, 6)  # increment_version takes a list of tensors


# These answer questions about a list of tensors without a loop in Python, which would take 5 times as long.
def _addresses(tensors):
    return list(map(torch.Tensor.data_ptr, tensors))


def _versions(tensors):
    return list(map(operator.attrgetter("_version"), tensors))


def _divide(keys, without=()):
    """Returns the first tensor of each key, and a number of its key for each tensor; 0 for those of `without`."""
    number, firsts, numbers = {}, [], []
    for t, key in enumerate(keys):
        if t not in without and number.setdefault(key, len(number)) == len(firsts):
            firsts.append(t)
        numbers.append(0 if t in without else number[key])
    return firsts, array.array("i", numbers)


def _layout_of(tensors):
    """Returns a function that is true of as many tensors with the same types, devices, shapes and strides. A missing
    tensor (None) raises TypeError."""
    try:
        return torch._C._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=[list(t.shape) for t in tensors],
                                                    dynamic_dims_strides=[list(t.stride()) for t in tensors]).check
    except Exception:  # another version of torch lacks this private class, or it has other arguments
        return lambda *_: False


class Part:
    """Holds parameters of one type, device and formats: an optimizer of the library, and the memory of its states."""

    def __init__(self, owner, params, settings, grads, element):
        first = params[0]
        self.params, self.grads = params, grads
        if first.device.type not in ("cpu", "cuda"):
            raise ValueError(f"a parameter on {first.device} was found; the optimizer takes the CPU and NVIDIA GPUs")
        self.locals = [_local(p) for p in params]
        self.device, self.gpu = first.device, first.device.type == "cuda"
        self.turned = [owner._is_turned(p) for p in params]
        self.lr_factor, self.compat_answer = owner._lr_factor, owner._answer
        self.kinds = [p.shape if owner._factors_lr else None for p in params]  # parameters that share lr's factor
        # The library works on a copy of a parameter that does not lie row by row.
        self.copies = {t: self._lying(t).contiguous() for t in range(len(params)) if not self._lying(t).is_contiguous()}
        self.blocks, self.failed, self.changes = [], None, []
        tensors = [(*owner._tensor(p), *_part_of_whole(p)) for p in params]
        device = f"cuda:{self.device.index}" if self.gpu else "cpu"
        settings = {**settings, "device": device, "grads": NUMBERS[grads], "parameters": PARAMETERS[first.dtype],
                    "element": element}
        self.dtype, self.shapes = first.dtype, [p.shape for p in self.locals]
        self.shares, self.owned = None, []
        self._make(settings, tensors)
        self.weights, self.where = None, None
        # The last step's missing gradients, and the layout of the others if they could be used without a copy.
        self.last_missing, self.layout = (), None
        self.views = [dict(self._views(t)) for t in range(len(params))]
        self.by_rows = [{name for name, *_, run, bits in self._states(t) if self._row_bytes(t, run, bits)}
                        for t in range(len(params))]
        # The library's copy of a parameter must be made again when other code has written the parameter.
        self.watched = any(name.split(".")[0] not in ("m", "v", "slow", "basis", "norms")
                           for views in self.views for name in views)
        self.versions = None
        # A write through a DTensor raises the counter of the DTensor alone, not that of the local tensor.
        self.sharded = [t for t, p in enumerate(params) if is_dtensor(p)]
        self.counted = [*self.locals, *(params[t] for t in self.sharded)]
        self.counted_of = [*range(len(params)), *self.sharded]

    def _lying(self, t):
        """Returns a parameter as the library takes it, rows first. Writes to it raise no version counter."""
        return self.locals[t].data.t() if self.turned[t] else self.locals[t].data

    def _make(self, settings, tensors):
        """Makes the library's optimizer; and if sharded parameters need owners, another one for those that this rank
        owns. Sets self.tensors and self.kept_shapes to what is kept here of each parameter."""
        cut = [p for p, (*_, count) in zip(self.params, tensors) if count >= 0]
        self.tensors, self.kept_shapes = list(tensors), list(self.shapes)
        if not cut or "releases" in settings:
            self.handle = self._open(settings, tensors)
            return
        ranks = shares.Ranks(cut[0])
        self.handle = self._open({**settings, "shares": ranks.count}, tensors)
        owners = [self.handle.place(t).owner for t in range(len(tensors))]
        self.owned = [t for t, owner in enumerate(owners) if owner >= 0]
        self.together_of = [self.handle.place(t).together for t in range(len(tensors))]
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

    def keeps(self, tensor, name):
        """Returns True if moment "m" or "v" of a parameter lies here, in the parameter's shape, or its "master", which may
        be 8 or 16 bits beside bf16."""
        if name == "master":
            return tensor not in self.owned and any(state in ("master", "weights.low") for state, *_ in self._states(tensor))
        its = [(state.split(".")[0], run) for state, *_, run, _ in self._states(tensor)]
        return any(state == name for state, _ in its) and ("m", 0) not in its  # galore's m has another shape

    def answer(self, tensor, key):
        """Returns a function that makes what other packages call `key` of a parameter's states; None without such."""
        own = self.compat_answer(self, tensor, key) if self.compat_answer else None
        if own is None and self.keeps(tensor, MOMENTS.get(key)):
            return lambda: self.moment(tensor, MOMENTS[key])
        return own

    def moment(self, tensor, name, values=None):
        """Returns moment "m" or "v" of a parameter, or "master", in fp32, or sets it to `values`, rounded to its format."""
        if name == "master":
            return self._master(tensor, values)
        handle = self.shares.handle if tensor in self.owned else self.handle
        shape, turned = self.kept_shapes[tensor], self.turned[tensor]
        host = torch.empty(shape[::-1] if turned else shape)
        if values is not None:
            values = values.reshape(shape)
            host.copy_(values.t() if turned else values)
        handle.moment(tensor, name, host.data_ptr(), values is not None, self.stream())
        return (host.t() if turned else host).to(self.device)

    def _master(self, tensor, values):
        """Returns the fp32 value of a parameter that has a master or 8 or 16 bits beside it, or sets it, and the parameter;
        of 24 bits it is the nearest. `values` may be int16: the bits beside the parameter."""
        p, master = self.locals[tensor].data, self.views[tensor].get("master")
        if values is None and tensor in self.written():  # the next step takes it over
            return p.float()
        low = self.low(tensor)
        if values is None:
            return master.clone() if master is not None else with_low(p, low)
        if values.dtype is torch.int16:
            values = with_low(p, values.to(p.device))
        values = values.to(p.device, torch.float32).reshape(p.shape).contiguous()
        if master is not None:
            master.copy_(values)
            p.copy_(values)
        else:
            kept, bits = values.view(torch.int32), 8 * low.element_size()
            if bits == 8:
                kept = kept + 0x7f + (kept >> 8 & 1) >> 8
            high = kept + (1 << bits - 1) >> bits
            p.view(torch.int16).copy_(high)
            low.copy_(kept - (high << bits))

    def low(self, tensor):
        """Returns the 8 or 16 bits that lie beside a bf16 parameter, in its shape; None without such."""
        bits = next((bits for state, *_, bits in self._states(tensor) if state == "weights.low"), None)
        if bits is None:
            return None
        shape = self.locals[tensor].shape
        low = self.views[tensor]["weights.low"].reshape(-1)[:bits // 8 * shape.numel()]
        low = low.view(torch.int16 if bits == 16 else torch.int8)
        return low.view(shape[::-1]).t() if self.turned[tensor] else low.view(shape)

    def begin_masters(self, given):
        """Before the first step here, sets masters to the tensors that `given` has by number, others to the parameters."""
        kept = [t for t in range(len(self.params)) if self.keeps(t, "master")]
        for t in kept:
            self._master(t, given.get(t, self.locals[t].float()))
        self.loaded()
        self.take_over(t for t in range(len(self.params)) if t not in kept)

    def compact(self):
        """Returns copies of the states that lie close together, by parameter, if the padding to whole tiles takes a third
        of the part's memory or more, since torch.save saves all memory that has a part of a tensor."""
        everything = [view for views in self.views for view in views.values()]
        if sum(block.nbytes for block in self.blocks) < 1.5 * sum(view.nbytes for view in everything) or self.owned or \
                self.sharded:
            return []
        copies = {}
        for kind in {(view.dtype, view.device) for view in everything}:
            these = [view for view in everything if (view.dtype, view.device) == kind]
            parts = torch.cat([view.reshape(-1) for view in these]).split([view.numel() for view in these])
            copies.update((id(view), part.view(view.shape)) for view, part in zip(these, parts))
        return [{name: copies[id(view)] for name, view in views.items()} for views in self.views]

    def take_moments(self, tensor, state, what):
        """Sets the moments of a parameter from another package's state of it."""
        state = {**state, **state.get("__bnb_optimizer_quant_state__", {})}
        for own, torchs, bitsandbytes in (("m", "exp_avg", "1"), ("v", "exp_avg_sq", "2")):
            if not self.keeps(tensor, own):
                continue
            found = state.get(torchs, state.get(f"state{bitsandbytes}", state.get("momentum_buffer")))
            if found is None:
                raise ValueError(f"{what}: the saved states have neither {torchs} nor state{bitsandbytes}, from which "
                                 f"{self.handle.describe()} would go on; load those of an optimizer with the same rule")
            if hasattr(found, "dequantize") and type(found) is not torch.Tensor:  # torchao's
                found = found.dequantize()
            if f"absmax{bitsandbytes}" in state:
                scales, levels = state[f"absmax{bitsandbytes}"].cpu(), state[f"qmap{bitsandbytes}"].cpu()
                codes = found.cpu().view(*scales.shape[:-1], -1)
                count = codes.shape[-1]
                block = next(n for n in (256, 2048, 64, 128, 512, 1024, 4096) if -(-count // n) == scales.shape[-1])
                found = levels[codes.long()] * scales.repeat_interleave(block, -1)[..., :count]
            stacked = own == "m" and self.keeps(tensor, "slow")  # AdEMAMix's two averages of gradients
            for name, value in zip(("m", "slow"), found) if stacked else ((own, found),):
                self.moment(tensor, name, value)

    def handles(self):
        """Returns the library's optimizers: of parameters without owners, and of those that this rank owns."""
        return [handle for handle in (self.handle, self.shares and self.shares.handle) if handle]

    def loaded(self):
        for handle in self.handles():
            handle.loaded()

    def place(self, groups, places, whole):
        """Sets the parameters' groups, and their places among all parameters; `whole`: there are no others."""
        self.groups, self.places, self.whole = groups, places, whole
        self.firsts, self.group_of = _divide(zip(groups, self.kinds))

    def _allocate(self, count):
        try:
            self.blocks.append(torch.empty(count, dtype=torch.uint8, device=self.device))
            return self.blocks[-1].data_ptr()
        except Exception as error:  # ctypes would print it and go on
            self.failed = error
            return 0

    def stream(self):
        return torch._C._cuda_getCurrentRawStream(self.device.index) if self.gpu else None

    def bytes_at(self, address, size):
        """Returns memory of the states, as a tensor of bytes."""
        block = next(b for b in self.blocks if b.data_ptr() <= address < b.data_ptr() + b.numel()) if size else None
        return block[address - block.data_ptr():][:size] if size else torch.empty(0, dtype=torch.uint8)

    def _views(self, tensor):
        """Yields the states of a tensor. With one number an element they have its shape; codes in blocks are bytes."""
        name, rows, cols, first, count = self.tensors[tensor]
        states, shape = list(self._states(tensor)), self.kept_shapes[tensor]
        alone = {n.split(".")[0] for n, *_ in states if "." in n}
        for name, dtype, data, size, run, bits in states:
            view, row = self.bytes_at(data, size), self._row_bytes(tensor, run, bits)
            if row:
                begin = first % TILE // max(run, 1) * bits // 8
                shard = view[begin:begin + shape[0] * row].view(-1, row)
                shard = shard.view(DTYPES[dtype]) if dtype in DTYPES else shard
                view = shard.view(-1) if self.params[tensor].dim() == 1 and shard.shape[1:] == (1,) else shard
                if run == 1 and name.split(".")[0] not in alone and dtype in DTYPES:
                    view = view.view(shape)
            elif count < 0 and run > 0 and not name.startswith("weights"):  # without the padding to whole tiles
                view = view[:(-(-shape.numel() // run) * bits + 7) // 8]
            if not row and dtype in DTYPES and bits >= 8:
                view = view.view(DTYPES[dtype])
                if run == 1 and name.split(".")[0] not in alone:
                    head = first % TILE if count >= 0 else 0
                    view = view[head:head + shape.numel()]
                    view = view.view(shape[::-1]).t() if self.turned[tensor] else view.view(shape)
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

    def written(self):
        """Returns the numbers of the parameters that other code has written since the last step."""
        versions = _versions(self.counted) if self.watched else None
        if self.versions is None or versions == self.versions:
            return ()
        return [t for t, then, now in zip(self.counted_of, self.versions, versions) if then != now]

    def find_weights(self):
        self.take_over(self.written())
        where = _addresses(self.locals)
        if where == self.where:
            return
        for t, (p, local, shape) in enumerate(zip(self.params, self.locals, self.shapes)):
            if _local(p) is not local or local.device != self.device or local.dtype is not self.dtype or \
                    local.shape != shape or self._lying(t).is_contiguous() is (t in self.copies):
                raise RuntimeError(f"a parameter of {tuple(shape)} on {self.device} has been replaced since its first "
                                   f"step, by {tuple(local.shape)} of {local.dtype} with strides {local.stride()} on "
                                   f"{local.device}; move or change the model first and make the optimizer then")
        if self.watched and self.weights is not None:
            self.take_over(t for t, (then, now) in enumerate(zip(self.weights, where))
                           if then != now and (library.is_capturing() or not self._is_kept(t)))  # a capture is refused
        self.where, self.weights = where, array.array("Q", where)

    def take_over(self, tensors):
        """Makes the library recompute the master or codes that it keeps beside these parameters."""
        for t in tensors:
            for handle in self.handles():
                handle.weights_changed(t)

    def _is_kept(self, tensor):
        """Returns False if a parameter that has moved (p.data = new, model.to) has other values than its master. Codes
        cannot be compared, so they are always made again, without the bits that they have beside the parameter's."""
        kept = self.views[tensor].get("master", self.views[tensor].get("weights"))
        return kept is None or torch.equal(kept.to(self.dtype), self.locals[tensor])

    def find_grads(self, grads):
        """Returns the gradients' addresses, 0 for a missing one, and tensors to keep alive until the step is queued."""
        if self.sharded:
            grads = [_local(grad) for grad in grads]
        found = self._find_again(grads)
        if found is not None:
            return found, ()
        before, self.last_missing, self.layout = self.last_missing, _missing(grads), None
        self.where = None  # if gradients have another layout, parameters may have one, even at their old addresses
        dtype, addresses, kept = self.grads, [], []
        for t, grad in enumerate(grads):
            if grad is None:
                addresses.append(0)
                continue
            self.require_type(grad)
            if self.turned[t] or grad.dtype is not dtype or grad.layout is not torch.strided or \
                    not grad.is_contiguous() or grad.device != self.device or grad.shape != self.shapes[t]:
                grad = _address(grad, self.locals[t], dtype, self.turned[t])
                kept.append(grad)
            addresses.append(grad.data_ptr() or 1)  # an empty shard has no address, and 0 would mean no gradient
        # If gradients come and go in each step, remembering their layout is not worth its time.
        if not kept and 1 not in addresses and before == self.last_missing:
            self.layout = _layout_of([grad for grad in grads if grad is not None])
        return array.array("Q", addresses), kept

    def _find_again(self, grads):
        """Returns the addresses of gradients that have the last step's layout; None if they have another."""
        if self.layout is None or (self.last_missing and _missing(grads) != self.last_missing):
            return None
        its = [grad for grad in grads if grad is not None] if self.last_missing else grads
        try:
            if not self.layout(*its):
                return None
        except TypeError:
            return None
        addresses = _addresses(its)
        for t in self.last_missing:
            addresses.insert(t, 0)
        return array.array("Q", addresses)

    def require_type(self, grad):
        if grad.dtype is not self.grads and grad.dtype in NUMBERS:
            raise OtherGradients

    def constants(self, groups, missing, all_together, captured):
        """Returns the constants of each group, split by the number of steps taken, and each tensor's group. The last
        division is kept, by the missing gradients, and with one parameter of each group."""
        firsts, group_of = self.firsts, self.group_of
        if not all_together:
            if self.divided is None or self.divided[0] != missing:
                self.divided = (missing, *_divide(zip(self.group_of, self.age), set(missing)))
            _, firsts, group_of = self.divided
        return [self._constants(groups[self.groups[t]], t, captured) for t in firsts], group_of

    def _constants(self, group, tensor, captured):
        beta1, beta2 = group["betas"]
        lr, lr_at, decay, age = group["lr"], None, float(group["weight_decay"]), self.age[tensor] + 1
        if captured and isinstance(lr, torch.Tensor) and lr.is_cuda:
            if lr.dtype is not torch.float32:
                raise TypeError(f"lr is a tensor of {lr.dtype}, and a CUDA graph reads float32; make it one")
            lr, lr_at = 0.0, lr.data_ptr()
        if self.kinds[tensor] is not None:
            factor, decays = self.lr_factor(self.params[tensor], age)
            lr, decay = lr * factor, decay * decays
        return float(lr), decay, float(beta1), float(beta2), float(group["eps"]), age, lr_at

    def catch_up(self):
        """Counts the steps of replayed graphs for the parameters of the capture."""
        clock = self.handle.clock(self.stream()) if self.captured else self.clock
        for t in self.captured:
            self.age[t] += clock - self.clock
        self.clock, self.divided = clock, None
        self._count()

    def step(self, grads, groups, step, captured=False, scaling=()):
        """Takes a step. grads: one for each parameter, or None. groups: the optimizer's. captured: the step is captured
        into a CUDA graph, so nothing happens yet. scaling: what multiplies gradients, what is not 0 if they overflow."""
        own, scales = grads, [None if each is None else each.data_ptr() for each in scaling]
        if self.shares:
            own = [grad if owner < 0 else None for grad, owner in zip(grads, self.shares.owners)]
        addresses, kept = self.find_grads(own)
        self.find_weights()
        missing = _missing(grads) if self.shares else self.last_missing
        all_together = self.together and not missing
        constants, group_of = self.constants(groups, missing, all_together, captured)
        if self.shares:
            self._check_shares(grads, captured, constants, group_of)
        weights = self._copy_in(grads) if self.copies else self.weights
        self.handle.step(weights, addresses, group_of, constants, step, self.stream(), *scales)
        if self.shares:
            self._step_shares(grads, group_of, constants, step, self.stream(), *scales)
        for t, copy in self.copies.items():
            if grads[t] is not None:
                self._lying(t).copy_(copy)
        if captured:
            self.captured = [t for t, grad in enumerate(grads) if grad is not None]
            return
        self.clock = step
        if all_together:
            self.age = [self.age[0] + 1] * len(grads)
            self.counts.fill_(self.age[0])
        else:
            self.age = [age + (grad is not None) for age, grad in zip(self.age, grads)]
            there = torch.ones(len(grads), device="cpu")
            there[list(missing)] = 0
            self.counts += there
            self.together = False
        for written in [self.counted] if _COUNTS_LISTS else self.counted:
            increment_version(written)
        if self.watched:
            self.versions = _versions(self.counted)

    def _copy_in(self, grads):
        """Copies the parameters that do not lie row by row, and returns the addresses at which the library works."""
        weights = self.weights[:]
        for t, copy in self.copies.items():
            weights[t] = copy.data_ptr()
            if grads[t] is not None:
                copy.copy_(self._lying(t))
        return weights

    def _check_shares(self, grads, captured, constants, group_of):
        """Refuses on all ranks what an owner would refuse later, when the others would wait for it."""
        present, first = [t for t in self.owned if grads[t] is not None], {}
        for t in present:
            self.require_type(_local(grads[t]))
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

    def _step_shares(self, grads, *more):
        """Steps the parameters that have owners. All ranks have gradients of the same ones."""
        values, slopes = {}, {}
        for t in self.owned:
            if grads[t] is None:
                continue
            values[t] = self.copies.get(t, self.locals[t].detach())
            slopes[t] = _address(_local(grads[t]), self.locals[t], self.grads, False)
        if values:
            self.shares.step(values, slopes, *more)

    def _count(self):
        """Writes the numbers of steps that parameters have taken."""
        self.counts.copy_(torch.tensor(self.age, device="cpu"))
        self.together = len(set(self.age)) == 1

    def publish(self, state, ages):
        """Enters the states of all parameters into the optimizer's; `ages` are the numbers of steps taken."""
        self.age, self.clock, self.captured, self.divided = list(ages), 0, [], None
        self.counts = torch.zeros(len(self.age), device="cpu")
        self._count()
        elements = torch.tensor([self.handle.place(t).element for t in range(len(self.age))], device="cpu")
        for t, p in enumerate(self.params):
            state[p] = Noted(step=self.counts[t], element=elements[t], **self._published(t))
            state[p].changes, state[p].part, state[p].tensor = self.changes, self, t

    def is_touched(self, state, all_there):
        """Returns True if other code has taken or replaced a state. all_there: optimizer.state has the same Noted."""
        return bool(self.changes) or not (all_there or all(getattr(state.get(p), "changes", None) is self.changes
                                                           for p in self.params))

    def restore_all(self, states, names):
        """Copies saved states into the views. If an owner refuses them, all ranks do, since they load together."""
        error = None
        for t, (state, name) in enumerate(zip(states, names)):
            try:
                self.restore(t, state, name)
            except ValueError as found:
                error = error or str(found)
        if self.shares and any(is_dtensor(value) for t in self.owned for value in states[t].values()):
            error = self.shares.any(error)
        if error:
            raise ValueError(error)

    def restore(self, tensor, state, what):
        """Copies a saved state into the views."""
        views = self.views[tensor] if self.params[tensor].numel() > 0 else {}  # without elements, nothing is used
        if self.shares and tensor in self.owned:  # on all ranks, since full_tensor needs all of them
            state = {name: value.full_tensor() if is_dtensor(value) else value for name, value in state.items()}
            state = {name: value.view(views[name].shape) if name in views and value.numel() == views[name].numel()
                     else value for name, value in state.items()}
        missing = sorted(set(views) - set(state))
        if missing:
            raise ValueError(f"{what}: the saved states have no {missing[0]}, which {self.handle.describe()} needs; "
                             "make the optimizer with the formats that they were saved with")
        *_, first, count = self.tensors[tensor]
        padded = {name: size for name, _, _, size, *_ in self._states(tensor)}
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
        for name in {name.split(".")[0] for name, view in views.items() if view.nbytes < padded[name]}:
            if name in ("m", "v", "slow") and self.keeps(tensor, name):
                self.moment(tensor, name, torch.zeros(self.kept_shapes[tensor]))  # the padding has codes of zero
        with torch.no_grad():
            for name, view in views.items():
                view.copy_(_local(state[name]))
