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


def open_run(dtype, preset, min_quantized, shapes):
    torch.manual_seed(0)
    values = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    params = [torch.nn.Parameter(distribute_tensor(value, mesh, [Shard(0)])) for value in values]
    return params, nibble_optim.Optimizer(params, preset=preset, lr=1e-2, seed=5, min_quantized=min_quantized)


def step(params, optimizer, number):
    torch.manual_seed(number)
    for p in params:
        p.grad = distribute_tensor(torch.randn(p.shape, device=device).to(p.dtype), mesh, [Shard(0)])
    optimizer.step()


def values(params, optimizer):
    return {"model": {str(i): p.detach() for i, p in enumerate(params)},
            "optimizer": {f"{i}.{name}": value for i, state in optimizer.state_dict()["state"].items()
                          for name, value in state.items()}}


def load(params, optimizer, path):
    step(params, optimizer, 1)  # makes the states
    kept = values(params, optimizer)
    checkpoint.load(kept, checkpoint_id=path)
    state = optimizer.state_dict()
    for key, value in kept["optimizer"].items():
        i, name = key.split(".", 1)
        state["state"][int(i)][name] = value
    for group in state["param_groups"]:
        group["steps"] = 3
    optimizer.load_state_dict(state)


def case(dtype, preset, min_quantized, shapes):
    path = f"{folder}/{dtype}.{preset}.{min_quantized}"
    params, optimizer = open_run(dtype, preset, min_quantized, shapes)
    if ranks == 2:
        for number in (1, 2, 3):
            step(params, optimizer, number)
        checkpoint.save(values(params, optimizer), checkpoint_id=path)
    else:
        load(params, optimizer, path)
    step(params, optimizer, 4)
    whole = [p.full_tensor() for p in params]
    if ranks == 2 and rank == 0:
        torch.save(whole, path + ".weights")
    if ranks != 2:
        for i, (p, q) in enumerate(zip(torch.load(path + ".weights", map_location=device), whole)):
            assert torch.equal(p, q), (ranks, dtype, preset, i)


def fsdp(preset, whole_file, dtype=torch.float32, weights=None):
    """The same of fully_shard's model and torch's functions for checkpoints; or with a file of whole states."""
    def open_model():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(40, 24), torch.nn.LayerNorm(24), torch.nn.Linear(24, 24))
        model.to(device, dtype)
        for layer in (*model, model):
            fully_shard(layer, mesh=mesh)
        return model, nibble_optim.Optimizer(model.named_parameters(), preset=preset, lr=1e-2, seed=5, weights=weights,
                                             overrides="*.bias|1.*: rule=adamw m=fp32 v=fp32")

    def train(model, optimizer, number):
        torch.manual_seed(number)
        for p in model.parameters():
            p.grad = distribute_tensor(torch.randn(p.shape, device=device).to(dtype), mesh, [Shard(0)])
        optimizer.step()

    path = f"{folder}/fsdp.{preset}.{whole_file}.{weights}"
    save = StateDictOptions(full_state_dict=whole_file, cpu_offload=whole_file)
    load = StateDictOptions(full_state_dict=whole_file, broadcast_from_rank0=whole_file)
    model, optimizer = open_model()
    if ranks == 2:
        for number in (1, 2, 3):
            train(model, optimizer, number)
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
    train(model, optimizer, 4)
    whole = [p.full_tensor().detach() for p in model.parameters()]
    if ranks == 2 and rank == 0:
        torch.save(whole, path + ".weights")
    if ranks != 2:
        for p, q in zip(torch.load(path + ".weights", map_location=device), whole):
            assert torch.equal(p, q), (ranks, preset, whole_file)


for dtype in (torch.float32, torch.bfloat16):
    for preset in PRESETS if dtype is torch.bfloat16 else PRESETS[:2]:
        for min_quantized in (0, 400) if preset == "adamw8" else (0,):
            case(dtype, preset, min_quantized, SHAPES)
for preset in WIDE_PRESETS:
    case(torch.bfloat16, preset, 0, WIDE)
for preset in OF_WHOLE:
    case(torch.bfloat16, preset, 0, MATRICES[:4] if preset in ("muon8", "galore8") else MATRICES)
for whole_file in (False, True):
    fsdp("muon8", whole_file)
    fsdp("adamw8", whole_file)
    fsdp("adamw32", whole_file, torch.bfloat16, "bf16+16")  # collectives take no int16
end()
