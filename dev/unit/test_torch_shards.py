"""One rank of test_torch.py's torch_dtensor_shards: FOLDER RANK RANKS. Steps a model of DTensors, sharded by rows, and
the same model whole, and compares weights and states; then saves on the same ranks and loads. Rules that read single
elements step each shard where it is; others have owners (nibble_optim/shares.py), which have the whole's states too."""
import copy

from torch_rank import end, init_device_mesh, nibble_optim, ranks, start, torch  # before torch: it counts threads
from test_library import raises
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

device, MESH = start(ranks)
# Two ranks cut these at a multiple of a block that is none of a tile, then unevenly, then so that rank 1 has nothing.
# The last one is replicated.
ELEMENTS = {"h.0": ((24, 256), Shard(0)), "h.1": ((5, 512), Shard(0)), "h.2": ((1, 300), Shard(0)),
            "h.3": ((7, 9), Replicate())}
# Cuts through blocks, with GPT-2's names for vectors and what stands for an embedding.
WHOLE = {"wte": ((40, 24), Shard(0)), "h.0.a": ((24, 40), Shard(0)), "h.0.bias": ((33,), Shard(0)),
         "h.1.a": ((5, 64), Shard(0)), "h.1.b": ((7, 9), Replicate()), "ln_f": ((2,), Shard(0)),
         "h.2.a": ((33, 20), Shard(0)), "h.2.b": ((2, 65), Shard(0)), "h.3.a": ((24, 16), Shard(0))}
ANY = [dict(preset="muon8"), dict(preset="muon", rule="normuon", m="bf16:sr"), dict(preset="galore8", rank_gap=2),
       # Sizes and ranks that are multiples of 8: on GPUs its fused way.
       dict(preset="galore8", rank_gap=2, rank=8, overrides="h.1|h.2: rule=adamw v=fp32"),
       dict(rule="apollo", m="bf16:sr"), dict(preset="adafactor8"), dict(preset="came8"),
       dict(preset="rmnp4", m="bf16:sr"), dict(rule="adam-mini"), dict(preset="adamw8", limit_growth=1.001),
       dict(m="dyn8/rank1"), dict(preset="adamw8"), dict(preset="adamw4l")]
OF_BF16 = [dict(preset="muon8", weights="bf16+fp32"), dict(preset="adafactor8", weights="e4m3/tensor:sr"),
           dict(preset="int8w4"), dict(preset="flash24")]
VECTORS_ALONE = ("muon", "normuon", "galore", "apollo", "rmnp")  # these rules leave vectors to adamw


def grads(named, number, dtype, partly):
    """Returns gradients of one step; some lack that of ln_f."""
    torch.manual_seed(number)
    for name, (p, q) in named.items():
        grad = torch.randn(p.shape, device=device).to(dtype)
        p.grad, q.grad = grad, distribute_tensor(grad.clone(), q.device_mesh, q.placements)
        if partly and name == "ln_f" and number > 1:
            p.grad = q.grad = None


def close_states(optimizers, what):
    """States of parameters with owners are those of the whole; others are compared by the weights of later steps."""
    found = 0
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    for i, state in states[0].items():
        for name, value in state.items():
            other = states[1][i].get(name)
            if hasattr(other, "_local_tensor") and other.dim() == 1:
                other = other.full_tensor()
            if not isinstance(other, torch.Tensor) or hasattr(other, "_local_tensor"):
                continue
            assert torch.equal(value.view(-1), other.view(-1)), (what, i, name)
            found += name not in ("step", "element")
    return found


def case(shapes, dtype, settings, partly, mesh=MESH):
    """A mesh of two dimensions has replicas along the first one."""
    torch.manual_seed(0)
    replicas = [Replicate()] * (mesh.ndim - 1)
    whole = {name: torch.nn.Parameter(torch.randn(shape, device=device).to(dtype))
             for name, (shape, _) in shapes.items()}
    parts = {name: torch.nn.Parameter(distribute_tensor(whole[name].detach().clone(), mesh, [*replicas, placement]))
             for name, (_, placement) in shapes.items()}
    named = {name: (whole[name], parts[name]) for name in shapes}
    settings = dict(lr=1e-2, seed=5, **settings)
    optimizers = [nibble_optim.Optimizer(params.items(), **settings) for params in (whole, parts)]
    for number in range(1, 5):
        if number == 4:
            saved = copy.deepcopy(optimizers[1].state_dict())
            optimizers[1] = nibble_optim.Optimizer(parts.items(), **settings)
            optimizers[1].load_state_dict(saved)
        grads(named, number, dtype, partly)
        for optimizer in optimizers:
            optimizer.step()
        if number == 2:  # the master that an owner keeps must follow
            with torch.no_grad():
                for p in (*whole.values(), *parts.values()):
                    p.mul_(0.5)
    for name, (p, q) in named.items():
        assert torch.equal(p, q.full_tensor()), (dtype, settings, name)
    return close_states(optimizers, settings)


for dtype in (torch.float32, torch.bfloat16):
    for preset in ("adamw8", "adamw4", "adamw32", "flash24"):
        case(ELEMENTS, dtype, dict(preset=preset), False)
owned = 0
for settings in ANY + OF_BF16:
    for dtype in (torch.float32, torch.bfloat16)[settings in OF_BF16:]:
        rule = nibble_optim.Handle({**settings, "device": "cpu", "overrides": None}, []).setting("rule")
        partly = rule in VECTORS_ALONE or (rule == "adamw" and list(settings) == ["preset"])
        owned += case(WHOLE, dtype, settings, partly)
assert owned > 100, "few parameters had owners"
for shape in ((ranks, 1), (1, ranks)):
    case(WHOLE, torch.bfloat16, dict(preset="muon8"), True, init_device_mesh(device, shape))
p, q = (torch.nn.Parameter(distribute_tensor(torch.randn(6, 5, device=device), MESH, [Shard(0)])) for _ in range(2))
p.grad, q.grad = p.detach(), q.detach()
raises(ValueError, "give them the same betas",
       nibble_optim.Optimizer([dict(params=[p]), dict(params=[q], betas=(0.8, 0.9))], preset="muon").step)
optimizer = nibble_optim.Optimizer([p, q], preset="muon")
optimizer.step()
q.grad = None
raises(ValueError, "all of them or none", optimizer.step)
saved = optimizer.state_dict()
del saved["state"][0]["m"]  # one rank has the states, and the others must not wait for it
raises(ValueError, "have no m", lambda: optimizer.load_state_dict(saved))
end()
