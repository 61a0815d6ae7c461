#!/usr/bin/env python3
"""Injects faults that a machine can cause into ./train, on the CPU with a model of one layer, and checks the result.

    make faults
    make faults FAULTS="--kills 300 --calls 300 --signals 200"
    python3 dev/faults.py --only calls:17 --seed 1      # one case again, and what it printed

Each case has a group and a number, which with --seed decide everything about it but the moment of a kill or a signal:

    kills     SIGKILL at random moments, one to three in a row
    calls     one call, some or all from one on fail (dev/faults_preload.c): open, read, write, fsync, rename, malloc, ...
    signals   INT, TERM, HUP, USR1 and PIPE at random moments, once or twice

After each, ./train must have ended by itself, with exit code 0 or 2 (after a signal the code that is usual for it), and
with one sentence where the code is 2; no checkpoint may differ from the one that an undisturbed run has at this step;
and the same command again, undisturbed, must end with the weights and states of the undisturbed run, to the bit. The
last line is `N passed, N failed`.
"""
import argparse
import collections
import concurrent.futures
import contextlib
import errno
import json
import os
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TRAIN, PRELOAD = ROOT / "train", ROOT / "build/dev/faults_preload.so"
LAST, HALF = 12, 6  # steps of a run, and of the one that cases resume
PATIENCE = 40  # seconds after which a run counts as hanging
FILES = ("model.safetensors", "optimizer.safetensors", "config.json", "vocab.json", "merges.txt")
SHORT = {"kills": 40, "calls": 150, "signals": 60}
ERRORS = {"open": "EACCES EMFILE EIO", "folder": "EACCES EMFILE", "read": "EIO short EINTR",
          "write": "ENOSPC EIO EDQUOT short EINTR", "flush": "ENOSPC EIO", "sync": "EIO ENOSPC", "rename": "EIO EACCES",
          "mkdir": "ENOSPC EACCES EROFS", "resize": "EIO ENOSPC", "remove": "EACCES EROFS EIO", "map": "ENOMEM EACCES",
          "memory": "ENOMEM", "thread": "EAGAIN"}
SIGNALS = ("INT", "TERM", "HUP", "USR1", "PIPE")


# The training data: a folder as data/prepare.py makes it, with a tokenizer of 260 tokens.


def make_data(folder):
    folder.mkdir()
    merges, rng = ["t h", "th e", "a n"], random.Random(7)
    plain, others = [*range(33, 127), *range(161, 173), *range(174, 256)], iter(range(256, 324))
    vocabulary = [chr(b) if b in plain else chr(next(others)) for b in range(256)] + [m.replace(" ", "") for m in merges] + ["<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(vocabulary)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    (folder / "meta.json").write_text(json.dumps({"vocabulary": len(vocabulary)}))
    for name, count in (("train", 6000), ("val", 600)):
        text = [b for _ in range(count // 6) for b in rng.choice((b"fox sees", b"dog sits", b"the bird")) + b" "][:count]
        header = [20240520, 1, count] + [0] * 253
        (folder / f"{name}_000000.bin").write_bytes(struct.pack(f"<256i{count}H", *header, *text))


# One run of ./train.


Ended = collections.namedtuple("Ended", "code out err")


class Case:
    """A case's run, and what was done to it."""

    folder, fault = None, ""
    before = ()  # the steps of its checkpoints
    memory = no_tokenizer = False  # memory may be short; its tokenizer could not be read


class Harness:
    def __init__(self, options):
        self.options = options
        room = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
        self.root = tempfile.mkdtemp(prefix="nibble_faults_", dir="/dev/shm" if room > 1 << 30 else None)
        self.lock = threading.Lock()
        self.passed = self.failed = 0

    def words(self, steps=LAST, keep=2, every=3):
        text = (f"--device cpu --data {self.root}/data --layers 1 --channels 64 --heads 1 --seq 32 --batch 2 "
                f"--steps {steps} --schedule constant --warmup 0 --save-every {every} --keep {keep} --val-every 4 "
                f"--val-tokens 64 --sample-every 5 --sample-tokens 4 --run run --resume auto")
        return text.split()

    def start(self, folder, words, env=None):
        """Begins ./train in `folder`; what it prints goes to train.out and train.err there."""
        whole = {k: v for k, v in os.environ.items() if not re.match("RANK$|WORLD_SIZE|LOCAL_|MASTER_|SLURM|OMPI|NIBBLE_", k)}
        whole.update({"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive", "CUDA_VISIBLE_DEVICES": ""}, **(env or {}))
        whole = {k: v for k, v in whole.items() if v is not None}

        def prepare():
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

        with open(f"{folder}/train.out", "wb") as out, open(f"{folder}/train.err", "wb") as err:
            return subprocess.Popen([TRAIN, *words], cwd=folder, env=whole, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                                    preexec_fn=prepare, start_new_session=True)

    def end(self, process, folder):
        """Waits for the end. A process that hangs is killed and has no code."""
        try:
            code = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
        return Ended(code, *(Path(folder, f"train.{stream}").read_text("utf-8", "replace") for stream in ("out", "err")))

    def run(self, folder, words=None, **more):
        return self.end(self.start(folder, words or self.words(), **more), folder)

    # measure() runs without faults and records the files and the number of calls.

    def measure(self):
        make_data(Path(self.root, "data"))
        runs = (("zero", self.words(0)), ("whole", self.words(keep=1000, every=1)), ("half", self.words(HALF)))
        for name, words in (*runs, ("two", self.words())):
            os.makedirs(f"{self.root}/{name}")
            begin = time.monotonic()
            ended = self.run(f"{self.root}/{name}", words)
            assert ended.code == 0, f"an undisturbed run ends with {ended.code}: {ended.err}"
            self.seconds = time.monotonic() - begin
        # A run that is stopped before its first step saves the initial weights.
        shutil.copytree(f"{self.root}/zero/run/step_00000000", f"{self.root}/whole/run/step_00000000")
        self.counts = {}
        for begun in (False, True):
            folder = self.folder(f"count_{begun}", begun)
            env = {"LD_PRELOAD": PRELOAD, "FAULT_COUNT": f"{folder}/counts"}
            assert self.run(folder, env=env).code == 0, "a run that is counted fails"
            lines = Path(folder, "counts").read_text().splitlines()
            self.counts[begun] = {kind: int(count) for kind, count in map(str.split, lines)}

    def folder(self, name, begun):
        """Makes a folder for a case. If `begun`, it holds a run that has done half of its steps."""
        folder = f"{self.root}/{name}"
        os.makedirs(folder)
        if begun:
            shutil.copytree(f"{self.root}/half/run", f"{folder}/run", symlinks=True)
        return folder

    # What must hold of a run folder, and of an end.

    @staticmethod
    def steps(folder):
        names = os.listdir(f"{folder}/run") if os.path.isdir(f"{folder}/run") else []
        return sorted(int(name[5:]) for name in names if re.fullmatch(r"step_\d{8}", name))

    def check_checkpoints(self, case, whole=None):
        """Every file of a checkpoint is the undisturbed run's; step `whole` has them all. A run that could not read its
        tokenizer has none, and no numbers of it in config.json."""
        names = [name for name in FILES if not (case.no_tokenizer and name in ("vocab.json", "config.json"))]
        for step in self.steps(case.folder):
            for name in names:
                path = f"run/step_{step:08d}/{name}"
                got, want = Path(case.folder, path), Path(self.root, "whole", path)
                assert got.is_file() or step != whole, f"{path} is missing"
                assert not got.is_file() or got.read_bytes() == want.read_bytes(), f"{path} is not the undisturbed run's"

    @staticmethod
    def check_end(ended, codes=(0, 2)):
        assert ended.code is not None, f"hangs; stderr: {ended.err[-500:]}"
        assert ended.code in codes, f"ends with {ended.code}, not with one of {codes}; stderr: {ended.err[-500:]}"
        errors = [line for line in ended.err.splitlines() if not line.startswith("train: notice: ")]
        if ended.code == 2:
            assert len(errors) == 1 and errors[0].startswith("train: error: "), f"not one sentence: {ended.err[-800:]}"
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f]", ended.err), f"control characters: {ended.err[-500:]!r}"

    def check_kept(self, case, ended):
        """Checks that the newest earlier checkpoint, or a newer one, is there. A run that ends for lack of memory names
        its last one."""
        after = self.steps(case.folder)
        assert not case.before or (after and after[-1] >= case.before[-1]), f"checkpoints {case.before} became {after}"
        self.check_checkpoints(case, after[-1] if after else None)
        saved = re.findall(r"^save +\d+  (\S+)", ended.out, re.MULTILINE)
        named = ended.code == 0 or not case.memory or not saved or saved[-1] in ended.err
        assert named, f"{saved[-1:]} is not named: {ended.err}"

    def check_again(self, case):
        """Checks that the same command ends with the undisturbed run's bits."""
        ended = self.run(case.folder)
        assert ended.code == 0, f"again, undisturbed: ends with {ended.code}: {ended.err[-500:]}"
        assert self.steps(case.folder)[-1:] == [LAST], f"again, undisturbed: has steps {self.steps(case.folder)}"
        self.check_checkpoints(case, LAST)
        for line in Path(case.folder, "run/log.jsonl").read_text().splitlines():
            json.loads(line)

    # The groups of cases. Each disturbs a run of its own and asserts what must hold; the same command is then run undisturbed.

    def kills(self, case, rng):
        case.fault = "SIGKILL"
        for _ in range(rng.randint(1, 3)):
            process = self.start(case.folder, self.words())
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(rng.uniform(0, 1.2 * self.seconds))
            process.kill()
            self.check_end(self.end(process, case.folder), (-signal.SIGKILL, 0))
            self.check_checkpoints(case)

    def calls(self, case, rng):
        counts = self.counts[bool(case.before)]
        kind = rng.choice([kind for kind in counts if counts[kind] > 0] + ["memory"] * 4 + ["write"] * 2)
        first = rng.randint(1, counts[kind])
        last, error = rng.choice((first, first, first + 2, 10**9)), rng.choice(ERRORS[kind].split())
        if error == "EINTR":
            last = min(last, first + 50)  # signals do not come at every call for ever
        fault = f"{kind}:{first}:{last}:{getattr(errno, error, 0)}"
        case.fault, case.memory = f"FAULT={fault} ({error})", kind == "memory"
        ended = self.run(case.folder, env={"LD_PRELOAD": PRELOAD, "FAULT": fault})
        self.check_end(ended)
        # Without its tokenizer a run goes on and reports that there are no samples.
        case.no_tokenizer = bool(re.search("notice.*no samples", ended.out))
        self.check_kept(case, ended)

    @staticmethod
    def signal_is_awaited(pid, number):
        """Returns whether the process handles or ignores the signal, as it does from its first line of code on."""
        masks = re.findall(r"^Sig(?:Ign|Cgt):\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.M)
        return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)

    def signals(self, case, rng):
        word = rng.choice(SIGNALS)
        number, presses = getattr(signal, f"SIG{word}"), rng.choice((1, 1, 1, 2))
        process = self.start(case.folder, self.words(), env={"OMP_WAIT_POLICY": rng.choice(("passive", None))})
        begin, early = time.monotonic(), False
        for _ in range(presses):
            time.sleep(rng.uniform(0, self.seconds))
            with contextlib.suppress(OSError):
                awaited = self.signal_is_awaited(process.pid, number)
                early = early or (not awaited and os.path.getsize(f"{case.folder}/train.out") == 0)
                os.kill(process.pid, number)
        ended = self.end(process, case.folder)
        case.fault = f"SIG{word} x {presses} after {time.monotonic() - begin:.3f} s"
        stops = word in ("INT", "TERM", "HUP")
        self.check_end(ended, (0,) + ((128 + number,) if stops else ()) + ((-number,) if early else ()))
        self.check_checkpoints(case)
        saved = stops and "stopped  " in ended.out
        told = f"a run that was stopped ended with {ended.code} and the checkpoints {self.steps(case.folder)}"
        assert not saved or (ended.code == 128 + number and self.steps(case.folder)), told

    # All groups.

    def case(self, group, number):
        name, rng = f"{group}_{number}", random.Random(f"{self.options.seed} {group} {number}")
        begin, problem, case = time.monotonic(), None, Case()
        try:
            case.folder = self.folder(name, rng.random() < 0.4)
            case.before = self.steps(case.folder)
            getattr(self, group)(case, rng)
            self.check_again(case)
        except AssertionError as failed:
            problem = f"{case.fault}{', resumed' if case.before else ''}: {failed}"
        except Exception as failure:  # a fault of this program is a failure too, and the others go on
            problem = f"{type(failure).__name__}: {failure}"
        with self.lock:
            self.passed += problem is None
            self.failed += problem is not None
            if problem:
                print(f"FAIL  {group}:{number}  {time.monotonic() - begin:.1f} s  {problem}", flush=True)
        if not (problem and self.options.keep):
            shutil.rmtree(f"{self.root}/{name}", ignore_errors=True)

    def all(self):
        print(f"{self.seconds:.2f} s a run, {sum(self.counts[False].values())} calls that can fail", flush=True)
        for group in SHORT:
            count, begin, before = getattr(self.options, group), time.monotonic(), (self.passed, self.failed)
            numbers = range(count) if not self.options.only else [n for g, n in self.options.only if g == group]
            with concurrent.futures.ThreadPoolExecutor(self.options.jobs) as pool:
                list(pool.map(lambda number, group=group: self.case(group, number), numbers))
            if numbers:
                print(f"{group:8} {self.passed - before[0]} passed, {self.failed - before[1]} failed, "
                      f"{time.monotonic() - begin:.0f} s", flush=True)


def one_case(text):
    group, number = text.split(":")
    if group not in SHORT:
        raise argparse.ArgumentTypeError(f"'{group}' is none of {', '.join(SHORT)}")
    return group, int(number)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for group, count in SHORT.items():
        parser.add_argument(f"--{group}", type=int, default=count, metavar="N", help=f"cases of this group ({count})")
    parser.add_argument("--seed", default="1", help="what the cases are drawn from (1)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N", help="cases at a time (one a core)")
    parser.add_argument("--only", type=one_case, action="append", metavar="GROUP:N", help="this case alone; repeatable")
    parser.add_argument("--keep", action="store_true", help="leave the folders of cases that fail")
    options = parser.parse_args()
    for path in (TRAIN, PRELOAD):
        if not path.exists():
            sys.exit(f"{path} is missing; type make faults")
    harness = Harness(options)
    try:
        harness.measure()
        harness.all()
    except AssertionError as failed:
        print(f"FAIL  {failed}")
        harness.failed += 1
    finally:
        if not (options.keep and harness.failed):
            shutil.rmtree(harness.root, ignore_errors=True)
        else:
            print(f"kept: {harness.root}")
    print(f"{harness.passed} passed, {harness.failed} failed")
    return harness.failed > 0


if __name__ == "__main__":
    sys.exit(main())
