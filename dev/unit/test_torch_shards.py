"""One of two ranks of test_torch.py's torch_dtensor_shards: FOLDER RANK. Steps a model of DTensors, sharded by rows,
and the same model whole, and compares weights and states; then saves on two ranks and loads."""
import copy
import os
import pathlib
import sys

os.environ["OMP_NUM_THREADS"] = "1"
folder, rank = sys.argv[1], int(sys.argv[2])
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "optim" / "python"))
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import Replicate, Shard, distribute_tensor  # noqa: E402

import nibble_optim  # noqa: E402

dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
# Cuts at multiples of a block but not of a tile; an uneven one; one that leaves rank 1 nothing; a replicated one.
SHAPES = [((24, 256), Shard(0)), ((5, 512), Shard(0)), ((1, 300), Shard(0)), ((7, 9), Replicate())]
for dtype in (torch.float32, torch.bfloat16):
    for preset in ("adamw8", "adamw4", "adamw32", "flash24"):
        torch.manual_seed(0)
        whole = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape, _ in SHAPES]
        parts = [torch.nn.Parameter(distribute_tensor(p.detach().clone(), mesh, [placement]))
                 for p, (_, placement) in zip(whole, SHAPES)]
        settings = dict(preset=preset, lr=1e-2, seed=5)
        optimizers = [nibble_optim.Optimizer(params, **settings) for params in (whole, parts)]

        def step(number):
            torch.manual_seed(number)
            for p, q, (shape, placement) in zip(whole, parts, SHAPES):
                p.grad = torch.randn(shape).to(dtype)
                q.grad = distribute_tensor(p.grad.clone(), mesh, [placement])
            for optimizer in optimizers:
                optimizer.step()

        for number in range(1, 4):
            step(number)
        saved = copy.deepcopy(optimizers[1].state_dict())
        optimizers[1] = nibble_optim.Optimizer(parts, **settings)
        optimizers[1].load_state_dict(saved)
        step(4)
        for i, (p, q) in enumerate(zip(whole, parts)):
            assert torch.equal(p, q.full_tensor()), (dtype, preset, i)
print("ok")
dist.barrier()  # a rank that goes while the other still reads from it ends with an error of gloo
dist.destroy_process_group()
