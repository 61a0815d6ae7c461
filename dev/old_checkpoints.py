"""Compares how two programs go on from the checkpoints of the first: python3 dev/old_checkpoints.py OLD/train NEW/train [PRESET...]

For each preset OLD trains a tiny model for ten steps on the CPU, and then both resume its checkpoint for five steps with
--clip 0. The exit status is 1 unless their losses, and the arrays that they save in the end, are equal to the bit.
"""
import subprocess
import sys
import tempfile
from pathlib import Path

from runlog import RunLog, read_arrays

if len(sys.argv) < 3:
    sys.exit(__doc__)
PRESETS = sys.argv[3:] or "adamw32 adamw8 adamw4l fp8w8e int8w4 muon8 came8".split()
COMMON = ("--device cpu --layers 2 --channels 64 --heads 1 --seq 64 --batch 4 --tokens-per-step 256 --val-every 0 "
          "--sample-every 0 --schedule constant --warmup 4 --lr 2e-3 --data-format bytes --data").split()


def train(program, run, *more):
    command = [program, *COMMON, f"{folder}/text", "--run", str(run), *more]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    saved = sorted(max(run.glob("step_*")).glob("*.safetensors"))
    return [line["loss"] for line in RunLog(run).read().records["train"]], [read_arrays(path) for path in saved]


equal = []
with tempfile.TemporaryDirectory() as folder:
    Path(folder, "text").write_bytes(b"".join(b"%d and %d are %d\n" % (i, i * i % 97, i + i * i % 97) for i in range(2000)))
    for preset in PRESETS:
        train(sys.argv[1], Path(folder, preset), "--preset", preset, "--steps", "10")
        resume = ["--resume", f"{folder}/{preset}/step_00000010", "--steps", "15", "--clip", "0"]
        one, other = (train(program, Path(folder, f"{preset}{i}"), *resume) for i, program in enumerate(sys.argv[1:3]))
        equal.append(one == other)
        print(preset, *one[0], "from", *one[1][1], *([] if one == other else ["DIFFERENT", *other[0]]))
sys.exit(not all(equal))
