"""Steps sharded parameters that need an owner: those that a rule (muon, adafactor), a format (scales of whole tensors)
or limit_growth reads whole, and those whose rows do not hold whole blocks of states, mostly vectors.

Each of them has an owner among the ranks that hold its rows. The owner keeps its states and takes its step: it receives
the other ranks' rows of the gradient and of the parameter, and sends the new rows of the parameter back. So states and
updates are those of the whole parameter, to the bit, for any number of ranks and any rows; a rank may hold none. Each
owner has a run of the model of about equal size, so a rank keeps one N-th of the states and does one N-th of the work.

Cost: three all-to-alls a step. A rank sends, and receives, 1 / N of the bytes of all these gradients and twice 1 / N
of those of the parameters; in bf16 that is 6 / N bytes a parameter. During the step it holds two copies of 1 / N of
both. An all-gather of the gradients would copy all of them to every rank, and every rank would do the whole work."""
import array
import itertools

import torch

ALIGNMENT = 16  # bytes at which the library takes tensors in place


def _cut_dimensions(param):
    """Returns the dimensions of a DTensor's mesh over which its rows are divided."""
    return [d for d, p in enumerate(getattr(param, "placements", ())) if not p.is_replicate()]


class Ranks:
    """The ranks among which a parameter's rows are divided."""

    def __init__(self, param):
        self.param, dimension = param, _cut_dimensions(param)[0]
        self.group = param.device_mesh.get_group(dimension)
        self.here = param.device_mesh.get_local_rank(dimension)
        self.count = param.device_mesh.size(dimension)
        self.all = torch.distributed.get_process_group_ranks(self.group)


class Shares:
    """The parameters of a part that have owners. `params` are all parameters of the part, and `owners` their owners'
    numbers, -1 for parameters without. `make(settings)` makes an optimizer of the library for whole parameters."""

    def __init__(self, params, owners, ranks, make):
        self.ranks, self.owners, self.handle = ranks, owners, None
        owned = [t for t, owner in enumerate(owners) if owner >= 0]
        self.owned = sorted(owned, key=lambda t: (owners[t], t))
        self.sizes = [p.numel() for p in params]
        self.pieces = {t: self._pieces(params[t]) for t in self.owned}
        if ranks.here in owners:
            self.handle = make({"share": ranks.here, "shares": ranks.count})

    def _pieces(self, param):
        """Returns where each rank's elements begin and how many they are, and True if all ranks hold all."""
        cut = _cut_dimensions(param)
        if not cut:
            return [(0, param.numel())] * self.ranks.count, True
        if len(cut) > 1:
            raise ValueError(f"a DTensor with placements {param.placements} was found; parameters that are read whole "
                             "or cut through blocks are sharded over one dimension of their mesh")
        if Ranks(param).all != self.ranks.all:
            raise ValueError("parameters on different meshes were found that are read whole or cut through blocks; "
                             "give each mesh an optimizer of its own")
        row = param.numel() // max(param.shape[0], 1)
        rows = -(-param.shape[0] // self.ranks.count)
        begins = [min(r * rows, param.shape[0]) * row for r in range(self.ranks.count + 1)]
        return [(begin, end - begin) for begin, end in zip(begins, begins[1:])], False

    def _sends(self, t, rank):
        """Returns how many elements the rank has to send to a parameter's owner."""
        pieces, everywhere = self.pieces[t]
        return pieces[rank][1] if not everywhere or rank == self.owners[t] else 0

    def _exchange(self, sent, counts, like):
        """Sends the tensors of the list sent[r] to rank r. Returns tensors of counts[r] elements of each rank r, in order.
        All are of the type and on the device of `like`."""
        parts = list(itertools.chain.from_iterable(sent))
        flat = torch.cat(parts) if parts else like.new_empty(0)
        received = like.new_empty(sum(map(sum, counts)))
        width = like.element_size()  # every backend takes bytes
        torch.distributed.all_to_all_single(received.view(torch.uint8), flat.view(torch.uint8),
                                            [width * sum(its) for its in counts],
                                            [width * sum(part.numel() for part in its) for its in sent],
                                            group=self.ranks.group)
        return received.split(list(itertools.chain.from_iterable(counts)))

    def _by_owner(self, these, what):
        """Returns what(t) of the parameters of each owner; `these` have the order of self.owned."""
        return [[what(t) for t in these if self.owners[t] == r] for r in range(self.ranks.count)]

    def gather(self, these, tensors):
        """Gathers parameters at their owners. `tensors` has what lies here of each, contiguous and of one element type.
        Returns those that this rank owns, whole, each at an address that the library takes."""
        here, ranks, first = self.ranks.here, range(self.ranks.count), tensors[these[0]]
        mine = [t for t in these if self.owners[t] == here]
        parts = self._exchange(self._by_owner(these, lambda t: tensors[t].view(-1)[:self._sends(t, here)]),
                               [[self._sends(t, r) for t in mine] for r in ranks], first)
        step = ALIGNMENT // first.element_size()
        begins = [0, *itertools.accumulate(-(-self.sizes[t] // step) * step for t in mine)]
        whole = first.new_empty(begins[-1])
        places = [whole[begin + self.pieces[t][0][r][0]:][:self._sends(t, r)]
                  for r in ranks for t, begin in zip(mine, begins)]
        _copy(places, parts)
        return {t: whole[begin:begin + self.sizes[t]] for t, begin in zip(mine, begins)}

    def scatter(self, these, whole, tensors):
        """Copies the new values of all these parameters from their owners to all ranks' `tensors`."""
        here, ranks = self.ranks.here, range(self.ranks.count)
        sent = [[values[self.pieces[t][0][r][0]:][:self.pieces[t][0][r][1]] for t, values in whole.items()] for r in ranks]
        parts = self._exchange(sent, self._by_owner(these, lambda t: self.pieces[t][0][here][1]), tensors[these[0]])
        _copy([tensors[t].view(-1) for t in these], parts)

    def step(self, weights, grads, *more):
        """Takes a step. `weights` and `grads` have what lies here of stepped parameters, contiguous, by number."""
        these = [t for t in self.owned if t in grads]
        values, slopes = self.gather(these, weights), self.gather(these, grads)
        if values:
            addresses = [array.array("Q", [tensors[t].data_ptr() if t in tensors else 0
                                           for t in range(len(self.sizes))]) for tensors in (values, slopes)]
            self.handle.step(*addresses, *more)
        self.scatter(these, values, weights)

    def any(self, value):
        """Returns the first rank's value that is not None, or None. All ranks call this together."""
        values = [None] * self.ranks.count
        torch.distributed.all_gather_object(values, value, group=self.ranks.group)
        return next((its for its in values if its is not None), None)

    def spread(self, states):
        """Returns the states of all owners, by number and name, as DTensors of which each rank has a run, as
        checkpoints need them. `states` has those of this rank's own parameters. All ranks call this together."""
        ranks, here = range(self.ranks.count), self.ranks.here
        kinds = [None] * self.ranks.count
        torch.distributed.all_gather_object(
            kinds, {t: [(name, x.dtype, x.numel()) for name, x in its.items()] for t, its in states.items()},
            group=self.ranks.group)
        entries = [(t, *kind) for t in self.owned for kind in kinds[self.owners[t]][t]]
        local = self.ranks.param._local_tensor

        def run(numbers, rank):
            each = -(-numbers // self.ranks.count)
            begin = min(rank * each, numbers)
            return slice(begin, min(begin + each, numbers))

        mine = [entry for entry in entries if self.owners[entry[0]] == here]
        sent = [[states[t][name].reshape(-1)[run(n, r)].view(torch.uint8) for t, name, _, n in mine] for r in ranks]
        counts = [[len(range(n)[run(n, here)]) * dtype.itemsize for t, _, dtype, n in entries if self.owners[t] == r]
                  for r in ranks]
        received = self._exchange(sent, counts, torch.empty(0, dtype=torch.uint8, device=local.device))
        spread = {t: {} for t in self.owned}
        for (t, name, dtype, n), part in zip(entries, received):
            alone = torch.empty(part.numel() // dtype.itemsize, dtype=dtype, device=local.device)
            alone.view(torch.uint8).copy_(part)
            param = self.ranks.param
            spread[t][name] = type(param.data).from_local(alone, param.device_mesh, param.placements, run_check=False,
                                                          shape=torch.Size((n,)), stride=(1,))
        return spread


def _copy(places, parts):
    pairs = [(place, part) for place, part in zip(places, parts) if part.numel() > 0]
    if pairs:
        torch._foreach_copy_(*map(list, zip(*pairs)))
