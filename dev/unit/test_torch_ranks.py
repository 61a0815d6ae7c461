"""One rank of test_torch.py's torch_checkpoint_on_other_ranks: FOLDER RANK RANKS. Two ranks step a model that is
sharded by rows three times, save it and its optimizer as a distributed checkpoint, and step once more. One rank, or
three, load it, take the same step and find the same weights. Vectors are sharded too. States that lie by rows are
DTensors, and so are in checkpoints those that owners have."""
from torch_rank import end, folder, nibble_optim, rank, ranks, start, torch
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

device, mesh = start(3)  # the same for all numbers of ranks, since products of matrices round otherwise on a GPU
SHAPES = [(24, 256), (5, 512), (1, 768), (301,), (6, 2, 128)]
PRESETS = ("adamw8", "adamw32", "adamw8c", "adamw8e", "flash24")
WIDE = [(7, 2048), (4, 4096)]  # 4 bits have a scale for 2048 elements
WIDE_PRESETS = ("adamw4l", "int8w4")
MATRICES = [(24, 40), (5, 64), (33, 20), (2, 65), (1, 48)]
OF_WHOLE = ("muon8", "galore8", "adafactor8", "came8", "rmnp4")


def open_run(shapes, dtype, settings):
    """Returns sharded parameters of these shapes, or a model of fully_shard's, and an optimizer."""
    torch.manual_seed(0)
    if shapes:
        model = torch.nn.ParameterList(distribute_tensor(torch.randn(shape, device=device).to(dtype), mesh, [Shard(0)])
                                       for shape in shapes)
    else:
        model = torch.nn.Sequential(torch.nn.Linear(40, 24), torch.nn.LayerNorm(24), torch.nn.Linear(24, 24))
        model.to(device, dtype)
        for layer in (*model, model):
            fully_shard(layer, mesh=mesh)
        settings = {**settings, "overrides": "*.bias|1.*: rule=adamw m=fp32 v=fp32"}
    return model, nibble_optim.Optimizer(model.named_parameters(), lr=1e-2, seed=5, **settings)


def step(model, optimizer, number):
    torch.manual_seed(number)
    for p in model.parameters():
        p.grad = distribute_tensor(torch.randn(p.shape, device=device).to(p.dtype), mesh, [Shard(0)])
    optimizer.step()


def case(shapes, dtype, whole_file=False, **settings):
    """whole_file: the first rank saves whole states in a file of torch.save, and loads them for all."""
    path = f"{folder}/{bool(shapes)}.{dtype}.{whole_file}.{settings}"
    save = StateDictOptions(full_state_dict=whole_file, cpu_offload=whole_file)
    load = StateDictOptions(full_state_dict=whole_file, broadcast_from_rank0=whole_file)
    model, optimizer = open_run(shapes, dtype, settings)
    for number in (1, 2, 3) if ranks == 2 else ():
        step(model, optimizer, number)
    states = {"model": get_model_state_dict(model, options=save),
              "optimizer": get_optimizer_state_dict(model, optimizer, options=save)}
    if ranks == 2 and not whole_file:
        checkpoint.save(states, checkpoint_id=path)
    elif ranks == 2 and rank == 0:
        torch.save(states, path)
    elif ranks != 2:
        if not whole_file:
            checkpoint.load(states, checkpoint_id=path)
        elif rank == 0:
            states = torch.load(path)
        set_model_state_dict(model, states["model"], options=load)
        set_optimizer_state_dict(model, optimizer, states["optimizer"], options=load)
    step(model, optimizer, 4)
    whole = [p.full_tensor().detach() for p in model.parameters()]
    if ranks == 2 and rank == 0:
        torch.save(whole, path + ".weights")
    if ranks != 2:
        for i, (p, q) in enumerate(zip(torch.load(path + ".weights", map_location=device), whole)):
            assert torch.equal(p, q), (ranks, dtype, settings, i)


for preset in PRESETS:
    case(SHAPES, torch.bfloat16, preset=preset)
for preset in PRESETS[:2]:
    case(SHAPES, torch.float32, preset=preset)
for dtype in (torch.float32, torch.bfloat16):
    case(SHAPES, dtype, preset="adamw8", min_quantized=400)
for preset in WIDE_PRESETS:
    case(WIDE, torch.bfloat16, preset=preset)
for preset in OF_WHOLE:
    case(MATRICES[:4] if preset in ("muon8", "galore8") else MATRICES, torch.bfloat16, preset=preset)
for whole_file in (False, True):
    case(None, torch.float32, whole_file, preset="muon8")
    case(None, torch.float32, whole_file, preset="adamw8")
    case(None, torch.bfloat16, whole_file, preset="adamw32", weights="bf16+16")  # collectives take no int16
end()
