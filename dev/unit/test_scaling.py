#!/usr/bin/env python3
"""Tests of dev/scaling.py: one line a case, `N passed, N failed, N skipped` last; exit status 1 when a case fails.

    python3 dev/unit/test_scaling.py [-k SUBSTRING]

Each case is a table of a tiny model over the stand-in for NCCL on the CPU (kernels/ranks/comm.cuh), beside an nvidia-smi that
says what the case wants. Without ./train all is skipped and the exit status is 0.
"""

import os
import sys

from cases import ROOT, Folder, run_cases

TINY = "--seq 64 --steps 3 --skip 1 --device cpu --layers 1 --channels 64 --heads 1".split()


class Case(Folder):
    def __init__(self, folder):
        super().__init__(folder)
        self.program("nvidia-smi", 'case "$*" in *index*) printf "0\\n1\\n" ;; *) echo 1024 ;; esac')
        self.environment = {"PATH": f"{folder}:{os.environ['PATH']}", "NIBBLE_STAND_IN": "1"}
        for name in ("CUDA_VISIBLE_DEVICES", "RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)

    def table(self, *more, status=0):
        """Returns ([cells of each row], what went to stderr)."""
        done = self.typed(sys.executable, ROOT / "dev/scaling.py", *TINY, *more, status=status)
        return [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.split("\n")[2:-1]], done.stderr


def test_table(case):
    """Every count and mode has one row; with one micro-batch per rank all modes have the same bits."""
    rows, _ = case.table("--sizes", "nano:1:1,nano:2:2", "--shard", "none,weights")
    assert [row[:3] for row in rows] == [
        [size, count, shard]
        for size in ("nano, 1 x 1", "nano, 2 x 2")
        for count, shard in (("1", "-"), ("2", "none"), ("2", "weights"))
    ], rows
    for row in rows:
        ms, rate, share, planned, seen, ratio, loss = (float(cell.split()[0]) for cell in row[3:])
        tokens = 64 * int(row[1]) * (1 if "1 x 1" in row[0] else 4)
        assert abs(rate - 1e3 * tokens / ms) <= 0.01 * rate + 1, row
        assert 0 < share <= 250 and planned > 0 and seen == ratio == 0 and 9 < loss < 12, row
    assert rows[1][9] == rows[2][9] and float(rows[0][5].split()[0]) <= 100, rows


def test_dead_runs_are_rows(case):
    """Their rows hold their last words, and the other runs go on."""
    trainer = case.trainer('case "$*" in *--shard?states*) echo "train: error: no more | apples"; exit 2 ;; esac')
    rows, said = case.table("--sizes", "nano:1:1", "--shard", "states,none", "--trainer", trainer, status=1)
    assert rows[1] == ["nano, 1 x 1", "2", "states", "died: no more / apples"] and len(rows[2]) == 10, rows
    assert "no more | apples" in said, said
    rows, _ = case.table("--sizes", "none:1:1,nano:1:1", "--gpus", "1", status=1)
    assert rows[0][3].startswith("died: --model 'none' is neither") and len(rows[1]) == 10, rows


def test_gpus(case):
    """All GPUs are used; a mistake is reported before anything runs."""
    for typed, words in (
        ("--gpus 1,4", "this machine shows 2"),
        ("--gpus x", "argument --gpus: x: write numbers of 1 or more"),
        ("--skip 3", "--skip 3 leaves none"),
        ("--sizes nano", "argument --sizes: nano: write MODEL:BATCH:MICRO_BATCHES"),
        ("--sizes nano:a:1", "--sizes: nano:a:1: write MODEL"),
        ("--trainer /nope", "--trainer /nope is not there"),
    ):
        rows, said = case.table(*typed.split(), status=2)
        assert said.count("\n") == 1 and words in said and not rows, said
    case.program("nvidia-smi", "exit 1")  # a mistake in what is typed comes before one of the machine
    assert "--gpus: x: write numbers" in case.table("--gpus", "x", status=2)[1]
    case.program("nvidia-smi", "echo 1024")
    seen = case.folder / "seen"
    case.environment["CUDA_VISIBLE_DEVICES"] = "6,7,3"
    trainer = case.trainer(f'echo "$CUDA_VISIBLE_DEVICES" >> {seen}')
    rows, _ = case.table("--sizes", "nano:1:1", "--shard", "none", "--trainer", trainer)
    assert [row[1] for row in rows] == ["1", "2"], rows
    assert sorted(seen.read_text().split()) == ["6", "6,7", "7"], seen.read_text()


if __name__ == "__main__":
    sys.exit(run_cases(globals(), Case, None if (ROOT / "train").exists() else "type `make`"))
