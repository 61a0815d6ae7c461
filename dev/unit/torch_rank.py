"""What the scripts share of which test_torch.py starts one on each of several ranks: FOLDER RANK RANKS."""
import os
import pathlib
import sys

os.environ["OMP_NUM_THREADS"] = "1"
folder, rank, ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "optim" / "python"))
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

import nibble_optim  # noqa: E402


def start(gpus):
    """Returns the device, cuda if there are so many GPUs, and a mesh of all ranks."""
    device = "cuda" if torch.cuda.device_count() >= gpus and nibble_optim.gpus() >= gpus else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", init_method=f"file://{folder}/meet{ranks}", rank=rank,
                            world_size=ranks)
    return device, init_device_mesh(device, (ranks,))


def end():
    print("ok", flush=True)
    dist.barrier()  # a rank that goes while the other still reads from it ends with an error of gloo
    dist.destroy_process_group()
    os._exit(0)  # a thread of gloo that still runs when Python ends aborts the process, now and then
