"""Laws of test_torch.py: whatever happens on the way to parameters, gradients or states, six steps leave the bits of six
plain steps. LAWS has what happens, and KINDS the settings with which each law is tried."""
import copy
import functools
import io

from test_torch import DEVICES, MATRIX_PRESETS, PRESETS, nibble_optim, torch

SHAPES = {"fc.weight": (33, 70), "fc.bias": (70,), "conv.weight": (8, 4, 3, 3), "proj.weight": (24, 24), "odd.bias": (101,),
          "none.bias": (0,)}
KINDS = [("bfloat16", dict(preset=preset)) for preset in PRESETS + MATRIX_PRESETS]
KINDS += [("float32", dict(preset=preset)) for preset in ("adamw8", "adamw32", "came8", "muon8")]
KINDS += [("bfloat16", settings) for settings in (
    dict(preset="adamw8", limit_growth=1.001), dict(preset="adamw8", weights="bf16+16"), dict(rule="adam-mini", m="bf16"),
    dict(rule="normuon", stacked="proj.weight:3"), dict(preset="galore8", biases=dict(preset="adamw8", lr=1e-3)))]
KINDS += [("float16", dict(preset="adamw32")), ("float16", dict(preset="muon8"))]


@functools.lru_cache(None)
def numbers(shape, seed):
    """Returns values that every type of parameters has exactly."""
    return torch.sin(seed + torch.arange(float(torch.Size(shape).numel())) ** 2).view(shape).bfloat16().half().float()


class Run:
    """Parameters, an optimizer and its steps. Before step 3 other code halves a parameter."""

    def __init__(self, device, dtype, settings):
        self.device, self.dtype, self.settings = device, getattr(torch, dtype), settings
        self.number, self.lay, self.in_backward = 0, lambda grad: grad, False
        self.open({name: numbers(shape, t).to(device, self.dtype).clone()
                   for t, (name, shape) in enumerate(SHAPES.items())})

    def open(self, values=None, in_backward=False, **more):
        if values:
            self.params = {name: torch.nn.Parameter(value) for name, value in values.items()}
        settings = {**self.settings, **more}  # biases come last, where rules of matrices have them too
        of_biases = settings.pop("biases", {})
        matrices, biases = ([(name, p) for name, p in self.params.items() if ("bias" in name) == wanted]
                            for wanted in (False, True))
        self.optimizer = nibble_optim.Optimizer(matrices, lr=1e-2, seed=1, **settings)
        if in_backward:
            self.optimizer.step_in_backward()
        self.optimizer.add_param_group({"params": biases, **of_biases})
        return self.optimizer

    def until(self, last):
        while self.number < last:
            self.number += 1
            if self.number == 3:
                with torch.no_grad():
                    self.params["fc.weight"].mul_(0.5)
            for t, (name, p) in enumerate(self.params.items()):
                grad = self.lay(numbers(SHAPES[name], 10 * self.number + t).to(self.device, self.dtype))
                p.grad = None if self.in_backward else torch.zeros_like(p)
                if self.in_backward:
                    (p * grad).sum().backward()
                    assert p.grad is None
                else:
                    p.grad.data = grad
            self.optimizer.step()
        return self

    def weights(self):
        return [p.detach().cpu() for p in self.params.values()]

    def states(self):
        return [value.cpu() for p in self.params.values() for _, value in sorted(self.optimizer.state[p].items())]


def saved_in_a_file(run):
    file = io.BytesIO()
    torch.save(run.until(3).optimizer.state_dict(), file)
    file.seek(0)
    run.open().load_state_dict(state_dict=torch.load(file, weights_only=True))


def copied(run):
    run.params, run.optimizer = copy.deepcopy((run.until(3).params, run.optimizer))


def pickled(run):
    file = io.BytesIO()
    torch.save((run.until(3).params, run.optimizer), file)
    file.seek(0)
    run.params, run.optimizer = torch.load(file, weights_only=False)


def in_the_backward_pass(run):
    """Saved states go on in the backward pass and after it, from either; a group may come after step_in_backward."""
    run.open(in_backward=True)
    for number in range(1, 7):
        run.in_backward = number in (1, 2, 3, 5)
        saved = run.optimizer.state_dict()
        if number == 3:
            copied(run)
        elif number > 3:
            values = {name: p.detach().clone() for name, p in run.params.items()}  # without hooks
            run.open(values, in_backward=run.in_backward).load_state_dict(saved)
        run.until(number)


def lies_otherwise(run):
    """With holes, transposed, channels last, not at a multiple of 16 bytes, and two in one tensor, whose version counter
    then rises by more than one a step."""
    base = [torch.zeros(81, 90, device=run.device, dtype=run.dtype) for _ in range(2)]
    others = {"fc.weight": base[0][:33, 8:78], "proj.weight": base[1][:24, :24].t(),
              "odd.bias": base[1][40:].view(-1)[1:102]}
    values = {name: others[name].copy_(p.detach()) if name in others else p.detach().clone()
              for name, p in run.params.items()}
    values["conv.weight"] = values["conv.weight"].to(memory_format=torch.channels_last)
    run.open(values)
    saved_in_a_file(run)
    run.until(6)
    filled = sum(map(torch.count_nonzero, base))
    assert filled <= sum(view.numel() for view in others.values()), "the holes hold what they did"


def has_inputs_as_rows(run):
    """As transformers' Conv1D keeps its matrices."""
    run.lay = lambda x: x.t().contiguous() if x.dim() == 2 else x
    run.open({name: run.lay(p.detach()) for name, p in run.params.items()}, transposed="fc.weight|proj.weight")


def has_gradients_that_lie_otherwise(run):
    run.lay = lambda grad: grad.t().contiguous().t() if grad.dim() == 2 else grad


def has_gradients_of_another_type(run):
    """From the third step on. States go on, and are saved and copied."""
    run.until(2)  # before the next one, other code writes a parameter too
    run.lay = lambda grad: grad.to(torch.bfloat16 if grad.dtype is torch.float32 else torch.float32)
    saved_in_a_file(run), copied(run), pickled(run)


LAWS = [saved_in_a_file, copied, pickled, in_the_backward_pass, lies_otherwise, has_inputs_as_rows,
        has_gradients_that_lie_otherwise, has_gradients_of_another_type]


def test_torch_laws():
    for device in DEVICES:
        for dtype, settings in KINDS:
            plain = Run(device, dtype, settings).until(6)
            want, by_matrix = plain.weights(), settings.get("preset") in MATRIX_PRESETS or "stacked" in settings
            together = by_matrix or "limit_growth" in settings
            assert not torch.equal(want[0], numbers(SHAPES["fc.weight"], 0).to(plain.dtype)), settings
            if device != "cpu" and not by_matrix:
                assert all(map(torch.equal, want, Run("cpu", dtype, settings).until(6).weights())), ("CPU", settings)
            for law in LAWS:
                # Galore's products on a GPU are in the gradients' type.
                other = law is has_gradients_of_another_type and by_matrix and device != "cpu"
                if other or (law is in_the_backward_pass and together):
                    continue
                run = Run(device, dtype, settings)
                law(run)
                found = run.until(6).weights()
                if law is has_inputs_as_rows:
                    found = list(map(run.lay, found))
                assert all(map(torch.equal, want, found)), (law.__name__, device, dtype, settings)
                if law not in (lies_otherwise, has_inputs_as_rows):
                    assert all(map(torch.equal, plain.states(), run.states())), (law.__name__, device, dtype, settings)
