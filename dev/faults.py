#!/usr/bin/env python3
"""Injects faults that a machine can cause into ./train, on the CPU with a model of one layer, and checks the result.

    make faults
    make faults FAULTS="--kills 300 --calls 300 --limits 100 --signals 200"
    python3 dev/faults.py --only calls:17 --seed 1      # one case again, and what it printed

Each case has a group and a number, which with --seed decide everything about it but the moment of a kill or a signal:

    kills     SIGKILL at random moments, one to three in a row
    calls     one call, some or all from one on fail (dev/faults_preload.c): open, read, write, fsync, rename, malloc, ...
    limits    ulimit -v, from what the program needs to begin with to what it needs to end; or drawn tight while it runs
    signals   INT, TERM, HUP, USR1 and PIPE at random moments, once or twice
    links     a symbolic link where the program writes a file or a folder
    special   a FIFO, a device, a folder, an empty or a broken file where the program reads one

After each, ./train must have ended by itself, with exit code 0 or 2 (after a signal the code that is usual for it), and
with one sentence where the code is 2; no checkpoint may differ from the one that an undisturbed run has at this step;
and the same command again, undisturbed, must end with the weights and states of the undisturbed run, to the bit. The
last line is `N passed, N failed`.
"""
import argparse
import concurrent.futures
import contextlib
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

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TRAIN = os.path.join(HERE, "train")
PRELOAD = os.path.join(HERE, "build", "dev", "faults_preload.so")
LAST, HALF = 12, 6  # steps of a run, and of the one that cases resume
PATIENCE = 40  # seconds after which a run counts as hanging
FILES = ("model.safetensors", "optimizer.safetensors", "config.json", "vocab.json", "merges.txt")
SHORT = {"kills": 40, "calls": 150, "limits": 50, "signals": 60, "links": 50, "special": 90}
ERRORS = {"open": "EACCES EMFILE EIO", "folder": "EACCES EMFILE", "read": "EIO short EINTR",
          "write": "ENOSPC EIO EDQUOT short EINTR", "flush": "ENOSPC EIO", "sync": "EIO ENOSPC", "rename": "EIO EACCES",
          "mkdir": "ENOSPC EACCES EROFS", "resize": "EIO ENOSPC", "remove": "EACCES EROFS EIO", "map": "ENOMEM EACCES",
          "memory": "ENOMEM", "thread": "EAGAIN"}
SIGNALS = ("INT", "TERM", "HUP", "USR1", "PIPE")
MEGABYTE = 1 << 20


class Failed(Exception):
    """A case raises this for what it found."""


def need(condition, text):
    if not condition:
        raise Failed(text)


# The training data: a folder as data/prepare.py makes it, with a tokenizer of 260 tokens.


def write(path, data):
    with open(path, "wb") as file:
        file.write(data if isinstance(data, bytes) else data.encode())


def make_data(folder):
    os.makedirs(folder)
    merges, rng = ["t h", "th e", "a n"], random.Random(7)
    plain, others = [*range(33, 127), *range(161, 173), *range(174, 256)], iter(range(256, 324))
    vocabulary = [chr(b) if b in plain else chr(next(others)) for b in range(256)] + [m.replace(" ", "") for m in merges] + ["<|endoftext|>"]
    write(f"{folder}/vocab.json", json.dumps({token: i for i, token in enumerate(vocabulary)}))
    write(f"{folder}/merges.txt", "#version: 0.2\n" + "\n".join(merges) + "\n")
    write(f"{folder}/meta.json", json.dumps({"vocabulary": len(vocabulary)}))
    for name, count in (("train", 6000), ("val", 600)):
        text = [b for _ in range(count // 6) for b in rng.choice((b"fox sees", b"dog sits", b"the bird")) + b" "][:count]
        header = [20240520, 1, count] + [0] * 253
        write(f"{folder}/{name}_000000.bin", struct.pack("<256i", *header) + struct.pack(f"<{count}H", *text))


# One run of ./train.


class Ended:
    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err


class Harness:
    def __init__(self, options):
        self.options = options
        room = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
        self.root = tempfile.mkdtemp(prefix="nibble_faults_", dir="/dev/shm" if room > 1 << 30 else None)
        self.lock = threading.Lock()
        self.passed = self.failed = 0

    def words(self, steps=LAST, keep=2, every=3, sample=5):
        text = (f"--device cpu --data {self.root}/data --layers 1 --channels 64 --heads 1 --seq 32 --batch 2 "
                f"--steps {steps} --schedule constant --warmup 0 --save-every {every} --keep {keep} --val-every 4 "
                f"--val-tokens 64 --sample-every {sample} --sample-tokens 4 --run run --resume auto")
        return text.split()

    def start(self, folder, words, env=None, limit=None):
        """Begins ./train in `folder`; what it prints goes to train.out and train.err there."""
        whole = {k: v for k, v in os.environ.items() if not re.match("RANK$|WORLD_SIZE|LOCAL_|MASTER_|SLURM|OMPI|NIBBLE_", k)}
        whole.update({"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive", "CUDA_VISIBLE_DEVICES": ""}, **(env or {}))
        whole = {k: v for k, v in whole.items() if v is not None}

        def prepare():
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            if limit:
                resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

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
        texts = []
        for stream in ("out", "err"):
            with open(f"{folder}/train.{stream}", encoding="utf-8", errors="replace") as file:
                texts.append(file.read())
        return Ended(code, *texts)

    def run(self, folder, words=None, **more):
        return self.end(self.start(folder, words or self.words(), **more), folder)

    # measure() runs without faults and records the files, the memory and the number of calls.

    def measure(self):
        make_data(f"{self.root}/data")
        runs = (("zero", self.words(0)), ("whole", self.words(keep=1000, every=1)), ("half", self.words(HALF)))
        for name, words in (*runs, ("two", self.words())):
            os.makedirs(f"{self.root}/{name}")
            begin = time.monotonic()
            ended = self.run(f"{self.root}/{name}", words)
            need(ended.code == 0, f"an undisturbed run ends with {ended.code}: {ended.err}")
            self.seconds = time.monotonic() - begin
        # A run that is stopped before its first step saves the initial weights.
        shutil.copytree(f"{self.root}/zero/run/step_00000000", f"{self.root}/whole/run/step_00000000")
        self.counts = {}
        for begun in (False, True):
            folder = self.folder(f"count_{begun}", begun)
            env = {"LD_PRELOAD": PRELOAD, "FAULT_COUNT": f"{folder}/counts"}
            need(self.run(folder, env=env).code == 0, "a run that is counted fails")
            with open(f"{folder}/counts", encoding="ascii") as file:
                self.counts[begun] = {kind: int(count) for kind, count in map(str.split, file)}
        # Below the least the system cannot even load the program and its libraries.
        self.least = self.bisect(lambda limit: self.run(f"{self.root}/two", ["--help"], limit=limit).code in (0, 2), 0, 4096)
        folder = self.folder("most", False)

        def fits(limit):
            shutil.rmtree(f"{folder}/run", ignore_errors=True)
            return self.run(folder, limit=limit).code == 0

        self.most = self.bisect(fits, self.least // MEGABYTE, 8192)

    @staticmethod
    def bisect(works, low, high):
        """Returns the least number of megabytes that work, in bytes."""
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if works(middle * MEGABYTE) else (middle, high)
        return high * MEGABYTE

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

    def check_checkpoints(self, folder, whole=None, but=""):
        """Every file of a checkpoint is the undisturbed run's; step `whole` has them all. `but`: a file that the case has
        changed; of a tokenizer's, the config.json with its numbers changes too."""
        names = [name for name in FILES if name != but and (name != "config.json" or but not in FILES[2:])]
        for step in self.steps(folder):
            for name in names:
                path = f"run/step_{step:08d}/{name}"
                there = os.path.isfile(f"{folder}/{path}")
                need(there or step != whole, f"{path} is missing")
                if not there:
                    continue
                with open(f"{folder}/{path}", "rb") as got, open(f"{self.root}/whole/{path}", "rb") as want:
                    need(got.read() == want.read(), f"{path} is not the undisturbed run's")

    @staticmethod
    def check_end(ended, codes=(0, 2)):
        need(ended.code is not None, f"hangs; stderr: {ended.err[-500:]}")
        need(ended.code in codes, f"ends with {ended.code}, not with one of {codes}; stderr: {ended.err[-500:]}")
        errors = [line for line in ended.err.splitlines() if not line.startswith("train: notice: ")]
        if ended.code == 2:
            need(len(errors) == 1 and errors[0].startswith("train: error: "), f"not one sentence: {ended.err[-800:]}")
        need(not re.search("[\x00-\x08\x0b-\x1f\x7f]", ended.err), f"control characters: {ended.err[-500:]!r}")

    def check_again(self, folder, but=""):
        """Checks that the same command ends with the undisturbed run's bits; `but`: a file of the user's own."""
        ended = self.run(folder)
        need(ended.code == 0, f"again, undisturbed: ends with {ended.code}: {ended.err[-500:]}")
        need(self.steps(folder)[-1:] == [LAST], f"again, undisturbed: has steps {self.steps(folder)}")
        self.check_checkpoints(folder, LAST, but=but)
        with open(f"{folder}/run/log.jsonl", encoding="utf-8") as file:
            for line in file:
                json.loads(line)

    def check_kept(self, folder, before, but=""):
        """Checks that the newest earlier checkpoint, or a newer one, is there; `but`: see check_checkpoints."""
        after = self.steps(folder)
        need(not before or (after and after[-1] >= before[-1]), f"checkpoints {before} became {after}")
        self.check_checkpoints(folder, after[-1] if after else None, but=but)

    # The groups of cases. Each takes a folder name and a generator of random numbers, and raises Failed.

    def kills(self, name, rng):
        folder = self.folder(name, rng.random() < 0.3)
        for _ in range(rng.randint(1, 3)):
            process = self.start(folder, self.words())
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(rng.uniform(0, 1.2 * self.seconds))
            process.kill()
            ended = self.end(process, folder)
            self.check_end(ended, (-signal.SIGKILL, 0))
            self.check_checkpoints(folder)
        self.check_again(folder)

    def calls(self, name, rng):
        begun = rng.random() < 0.5
        counts = self.counts[begun]
        kind = rng.choice([kind for kind in counts if counts[kind] > 0] + ["memory"] * 4 + ["write"] * 2)
        first = rng.randint(1, counts[kind])
        last, error = rng.choice((first, first, first + 2, 10**9)), rng.choice(ERRORS[kind].split())
        if error == "EINTR":
            last = min(last, first + 50)  # signals do not come at every call for ever
        fault = f"{kind}:{first}:{last}:{error}"
        folder = self.folder(name, begun)
        before = self.steps(folder)
        ended = self.run(folder, env={"LD_PRELOAD": PRELOAD, "FAULT": fault})
        try:
            self.check_end(ended)
            # Without its tokenizer a run goes on and reports that there are no samples.
            but = "vocab.json" if re.search("notice.*no samples", ended.out) else ""
            self.check_kept(folder, before, but)
            if kind == "memory":
                self.check_advice(ended)
            self.check_again(folder, but)
        except Failed as failed:
            raise Failed(f"FAULT={fault}{' of a resumed run' if begun else ''}: {failed}") from failed

    @staticmethod
    def check_advice(ended):
        """Checks that a run which ends for lack of memory names its last checkpoint."""
        saved = re.findall(r"^save +\d+  (\S+)", ended.out, re.MULTILINE)
        need(ended.code == 0 or not saved or saved[-1] in ended.err, f"{saved[-1:]} is not named: {ended.err}")

    def limits(self, name, rng):
        begun, running = rng.random() < 0.5, rng.random() < 0.4
        folder = self.folder(name, begun)
        before = self.steps(folder)
        limit = rng.randint(self.least, self.most + 2 * MEGABYTE) // 4096 * 4096
        if running:
            process = self.start(folder, self.words())
            # Not before its first line: until then it looks at its limits and trusts that they stay.
            while process.poll() is None and os.path.getsize(f"{folder}/train.out") == 0:
                time.sleep(0.001)
            time.sleep(rng.uniform(0, 0.8) * self.seconds)
            with contextlib.suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{process.pid}/statm", encoding="ascii") as file:
                    limit = int(file.read().split()[0]) * 4096 + rng.choice((0, 4096, 65536, MEGABYTE, 5 * MEGABYTE))
                resource.prlimit(process.pid, resource.RLIMIT_AS, (limit, limit))
            ended = self.end(process, folder)
        else:
            ended = self.run(folder, limit=limit)
        try:
            self.check_end(ended)
            self.check_kept(folder, before)
            self.check_advice(ended)
            self.check_again(folder)
        except Failed as failed:
            how = "drawn while it runs" if running else "of the whole run"
            raise Failed(f"ulimit -v {limit // 1024} {how}{', resumed' if begun else ''}: {failed}") from failed

    @staticmethod
    def signal_is_awaited(pid, number):
        """Returns whether the process handles or ignores the signal, as it does from its first line of code on."""
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            masks = [int(line.split()[1], 16) for line in file if line.startswith(("SigIgn", "SigCgt"))]
        return any(mask >> (number - 1) & 1 for mask in masks)

    def signals(self, name, rng):
        word = rng.choice(SIGNALS)
        number, presses = getattr(signal, f"SIG{word}"), rng.choice((1, 1, 1, 2))
        folder = self.folder(name, rng.random() < 0.3)
        env = {"OMP_WAIT_POLICY": rng.choice(("passive", None))}
        process = self.start(folder, self.words(), env=env)
        begin, early = time.monotonic(), False
        for _ in range(presses):
            time.sleep(rng.uniform(0, self.seconds))
            with contextlib.suppress(OSError):
                awaited = self.signal_is_awaited(process.pid, number)
                early = early or (not awaited and os.path.getsize(f"{folder}/train.out") == 0)
                os.kill(process.pid, number)
        ended = self.end(process, folder)
        try:
            stops = word in ("INT", "TERM", "HUP")
            codes = (0,) + ((128 + number,) if stops else ()) + ((-number,) if early else ())
            self.check_end(ended, codes)
            self.check_checkpoints(folder)
            saved = stops and "stopped  " in ended.out
            need(not saved or (ended.code == 128 + number and self.steps(folder)),
                 f"a run that was stopped ended with {ended.code} and the checkpoints {self.steps(folder)}")
            self.check_again(folder)
        except Failed as failed:
            raise Failed(f"SIG{word} x {presses} after {time.monotonic() - begin:.3f} s: {failed}") from failed

    LINKED = ("config.json", "config.json.tmp", "log.jsonl", "log.txt", "vocab.json", "vocab.json.tmp", "merges.txt",
              "merges.txt.tmp", "step_00000009", "step_00000009.tmp", "step_00000012", "step_00000012.tmp",
              "step_00000012.old.tmp", "step_00000003", "step_00000006", "save")

    @staticmethod
    def tree(folder):
        """Returns what is in a folder: the files' bytes, the links' targets."""
        found = {}
        for path, _, names in os.walk(folder):
            found[path] = None
            for name in names:
                with open(f"{path}/{name}", "rb") as file:
                    found[f"{path}/{name}"] = file.read()
        return found

    def links(self, name, rng):
        begun, link = rng.random() < 0.5, rng.choice(self.LINKED)
        folder = self.folder(name, begun)
        path, victims = f"{folder}/run/{link}", f"{folder}/victims"
        os.makedirs(f"{folder}/run", exist_ok=True)
        os.makedirs(f"{victims}/folder")
        write(f"{victims}/file", "mine\n")
        write(f"{victims}/folder/model.safetensors", "mine too\n")
        kinds = ["file", "folder", "nothing"]
        if os.path.isdir(path):
            kinds = ["moved"]  # a checkpoint that lies elsewhere, on a larger disk
        target = rng.choice(kinds)
        if target == "moved":
            shutil.move(path, f"{victims}/moved")
        elif os.path.lexists(path):
            shutil.move(path, f"{folder}/original")
        os.symlink(f"{victims}/{target}", path)
        before = self.tree(victims)
        ended = self.run(folder)
        try:
            need(self.tree(victims) == before, "what the link points to was changed")
            self.check_end(ended, (0,) if target == "moved" else (0, 2))
            if os.path.islink(path) and target != "moved":
                os.unlink(path)
                if os.path.exists(f"{folder}/original"):
                    shutil.move(f"{folder}/original", path)
            self.check_again(folder, link)
            need(self.tree(victims) == before, "what the link points to was changed by the run after it")
        except Failed as failed:
            raise Failed(f"run/{link} -> {target}{', resumed' if begun else ''}: {failed}") from failed

    def special_make(self, kind, path):
        """Puts something of a kind where a file or a folder was. What cannot be made is missing."""
        data = b""
        if os.path.isdir(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            with open(path, "rb") as file:
                data = file.read()
            os.unlink(path)
        make = {"fifo": os.mkfifo, "folder": os.mkdir, "zero": lambda path: os.symlink("/dev/zero", path), "terminal": lambda path: os.symlink("/dev/tty", path),
                "loop": lambda path: os.symlink(os.path.basename(path), path), "empty": lambda path: write(path, ""),
                "cut": lambda path: write(path, data[:len(data) // 2])}
        make[kind](path)

    SPECIAL = ("fifo", "zero", "terminal", "folder", "loop", "empty", "cut")
    READ = (["data"] + [f"data/{name}" for name in ("train_000000.bin", "val_000000.bin", "meta.json", "vocab.json",
                                                    "merges.txt")] +
            [f"run/{name}" for name in ("log.jsonl", "config.json", "log.txt", "vocab.json", "merges.txt", "save")] +
            [f"run/step_00000006/{name}" for name in (*FILES, "state.json")] +
            [f"model/{name}" for name in FILES if not name.startswith("optim")] +
            [f"sampled/{name}" for name in FILES if not name.startswith("optim")] + ["sampled/state.json"])

    def special(self, name, rng):
        place, kind = rng.choice(self.READ), rng.choice(self.SPECIAL)
        top = place.split("/")[0]
        folder = self.folder(name, top == "run")
        shutil.copytree(f"{self.root}/data", f"{folder}/data")
        for copy in ("model", "sampled"):
            shutil.copytree(f"{self.root}/half/run/step_{HALF:08d}", f"{folder}/{copy}")
        self.special_make(kind, f"{folder}/{place}")
        words = [word.replace(f"{self.root}/data", "data") for word in self.words()]
        if top == "model":
            shape = words.index("--layers")
            words = words[:shape] + ["--model", "./model"] + words[shape + 6:]
        elif top == "sampled":
            words = ["--device", "cpu", "--sample", "the", "--model", "./sampled", "--sample-tokens", "4"]
        before = self.steps(folder)
        ended = self.run(folder, words, limit=self.most + (1 << 30))
        try:
            self.check_end(ended)
            if top == "run":
                self.check_checkpoints(folder, but=os.path.basename(place))
                need(not before or self.steps(folder), "no checkpoint is left")
        except Failed as failed:
            raise Failed(f"{place} is {kind}: {failed}") from failed

    # All groups.

    def case(self, group, number):
        name, rng = f"{group}_{number}", random.Random(f"{self.options.seed} {group} {number}")
        begin, problem = time.monotonic(), None
        try:
            getattr(self, group)(name, rng)
        except Failed as failed:
            problem = str(failed)
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
        print(f"limits from {self.least // MEGABYTE} to {self.most // MEGABYTE} MB, {self.seconds:.2f} s a run, "
              f"{sum(self.counts[False].values())} calls that can fail", flush=True)
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
        if not os.path.exists(path):
            sys.exit(f"{path} is missing; type make faults")
    harness = Harness(options)
    try:
        harness.measure()
        harness.all()
    except Failed as failed:
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
