"""One rank of test_torch.py's torch_dtensor_ranks: FOLDER RANK RANKS. Steps a model of DTensors, sharded by rows, and the
same model whole, and compares weights and states. Before the last step the sharded one is saved and goes on from that: on
the same ranks, or from a checkpoint that two ranks wrote. Rules that read single elements step each shard where it is;
others have owners (nibble_optim/shares.py), which have the whole's states too."""
import copy
import os
import sys

os.environ["OMP_NUM_THREADS"] = "1"
from test_library import nibble_optim, raises  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as checkpoint  # noqa: E402
from torch.distributed.checkpoint.state_dict import (  # noqa: E402
    StateDictOptions, get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict)
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import Replicate, Shard, distribute_tensor  # noqa: E402

folder, rank, ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
gpus = min(torch.cuda.device_count(), nibble_optim.gpus())
device = "cuda" if gpus >= ranks else "cpu"
if device == "cuda":
    torch.cuda.set_device(rank)
dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", init_method=f"file://{folder}/meet{ranks}",
                        rank=rank, world_size=ranks)
MESH = init_device_mesh(device, (ranks,))
# The device is the same for all numbers of ranks, since products of matrices round otherwise on a GPU.
SAVED = MESH if gpus >= 3 or device == "cpu" else init_device_mesh("cpu", (ranks,))
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
# Checkpoints: rules of elements, 4 bits with a scale for 2048 elements, and rules that read matrices.
ROWS = [(24, 256), (5, 512), (1, 768), (301,), (6, 2, 128)]
WIDE = [(7, 2048), (4, 4096)]
MATRICES = [(24, 40), (5, 64), (33, 20), (2, 65), (1, 48)]


def grads(named, number, dtype, partly):
    """Returns gradients of one step; some lack that of ln_f."""
    torch.manual_seed(number)
    for name, (p, q) in named.items():
        grad = torch.randn(p.shape, device=p.device).to(dtype)
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


def from_checkpoint(model, optimizer, again, path, whole_file):
    """Two ranks save; others load into `again`. Returns who goes on. whole_file: the first rank saves whole states in a file
    of torch.save, and loads them for all. States that lie by rows are DTensors, and so are in checkpoints those that owners
    have."""
    save = StateDictOptions(full_state_dict=whole_file, cpu_offload=whole_file)
    load = StateDictOptions(full_state_dict=whole_file, broadcast_from_rank0=whole_file)
    goes_on = optimizer if ranks == 2 else again
    for p in model.parameters():
        p.grad = None  # otherwise torch makes no states to load into
    states = {"model": get_model_state_dict(model, options=save),
              "optimizer": get_optimizer_state_dict(model, goes_on, options=save)}
    if ranks == 2 and not whole_file:
        checkpoint.save(states, checkpoint_id=path)
    elif ranks == 2 and rank == 0:
        torch.save(states, path)
    elif ranks != 2:
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        if not whole_file:
            checkpoint.load(states, checkpoint_id=path)
        elif rank == 0:
            states = torch.load(path)
        set_model_state_dict(model, states["model"], options=load)
        set_optimizer_state_dict(model, again, states["optimizer"], options=load)
    return goes_on


def case(shapes, dtype, settings, partly=False, mesh=MESH, model=None, saved=False, whole_file=False):
    """A mesh of two dimensions has replicas along the first one. model: of fully_shard's; otherwise parameters are made."""
    torch.manual_seed(0)
    replicas = [Replicate()] * (mesh.ndim - 1)
    if model:
        parts = dict(model.named_parameters())
        whole = {name: torch.nn.Parameter(p.full_tensor().detach().clone()) for name, p in parts.items()}
    else:
        whole = {name: torch.nn.Parameter(torch.randn(shape, device=mesh.device_type).to(dtype))
                 for name, (shape, _) in shapes.items()}
        parts = {name: torch.nn.Parameter(distribute_tensor(whole[name].detach().clone(), mesh, [*replicas, placement]))
                 for name, (_, placement) in shapes.items()}
    named, path = {name: (whole[name], parts[name]) for name in whole}, f"{folder}/{bool(model)}.{dtype}.{whole_file}.{settings}"
    settings = dict(lr=1e-2, seed=5, **settings)
    optimizers = [nibble_optim.Optimizer(params.items(), **settings) for params in (whole, parts)]
    for number in range(1, 5):
        if number == 4:
            before, again = optimizers[1], nibble_optim.Optimizer(parts.items(), **settings)
            if saved:
                again = from_checkpoint(model or torch.nn.ParameterDict(parts), before, again, path, whole_file)
            else:
                again.load_state_dict(copy.deepcopy(before.state_dict()))
            optimizers[1] = again
        grads(named, number, dtype, partly)
        for optimizer in optimizers:
            optimizer.step()
        if number == 2:  # the master that an owner keeps must follow
            with torch.no_grad():
                for p in (*whole.values(), *parts.values()):
                    p.mul_(0.5)
    for name, (p, q) in named.items():
        assert torch.equal(p, q.full_tensor()), (dtype, settings, name, saved)
    return close_states(optimizers, settings)


def saved_case(shapes, dtype, **settings):
    case({str(i): (shape, Shard(0)) for i, shape in enumerate(shapes)}, dtype, settings, mesh=SAVED, saved=True)


def saved_model(dtype, whole_file, **settings):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 24), torch.nn.LayerNorm(24), torch.nn.Linear(24, 24))
    model.to(SAVED.device_type, dtype)
    for layer in (*model, model):
        fully_shard(layer, mesh=SAVED)
    case(None, dtype, {**settings, "overrides": "*.bias|1.*: rule=adamw m=fp32 v=fp32"}, mesh=SAVED, model=model, saved=True,
         whole_file=whole_file)


for dtype in (torch.float32, torch.bfloat16):
    for preset in ("adamw8", "adamw4", "adamw32", "flash24"):
        case(ELEMENTS, dtype, dict(preset=preset))
owned = 0
for settings in ANY + OF_BF16:
    for dtype in (torch.float32, torch.bfloat16)[settings in OF_BF16:]:
        rule = nibble_optim.Handle({**settings, "device": "cpu", "overrides": None}, []).setting("rule")
        partly = rule in VECTORS_ALONE or (rule == "adamw" and list(settings) == ["preset"])
        owned += case(WHOLE, dtype, settings, partly)
assert owned > 100, "few parameters had owners"
for shape in ((ranks, 1), (1, ranks)):
    case(WHOLE, torch.bfloat16, dict(preset="muon8"), True, init_device_mesh(device, shape))
for preset in ("adamw8", "adamw32", "adamw8c", "adamw8e", "flash24"):
    saved_case(ROWS, torch.bfloat16, preset=preset)
for preset in ("adamw8", "adamw32"):
    saved_case(ROWS, torch.float32, preset=preset)
for dtype in (torch.float32, torch.bfloat16):
    saved_case(ROWS, dtype, preset="adamw8", min_quantized=400)
for preset in ("adamw4l", "int8w4"):
    saved_case(WIDE, torch.bfloat16, preset=preset)
for preset in ("muon8", "galore8", "adafactor8", "came8", "rmnp4"):
    saved_case(MATRICES[:4] if preset in ("muon8", "galore8") else MATRICES, torch.bfloat16, preset=preset)
for whole_file in (False, True):
    saved_model(torch.float32, whole_file, preset="muon8")
    saved_model(torch.float32, whole_file, preset="adamw8")
    saved_model(torch.bfloat16, whole_file, preset="adamw32", weights="bf16+16")  # collectives take no int16
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
print("ok", flush=True)
dist.barrier()  # a rank that goes while the other still reads from it ends with an error of gloo
dist.destroy_process_group()
os._exit(0)  # a thread of gloo that still runs when Python ends aborts the process, now and then
