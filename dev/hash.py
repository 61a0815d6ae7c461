#!/usr/bin/env python3
"""Checksums of short trainings. Equal rows show that a change of the code changed no bit.

    make hash      HASH="--short", "-k muon", "--device gpu", "--against OTHER/build/train", "--record" choose
    python3 dev/hash.py NEW/build/train --against OLD/build/train --resumes        old checkpoints load and go on

A case is a line of options for 20 steps of a tiny model on text from a generator in this file. "A -> B" resumes a
checkpoint of A after ten steps with the options B. With --resumes these alone are run: both programs go on from
OLD's checkpoint, without clipping, and norms may differ. A row has the checksums of the weights, the optimizer's states,
the losses with the norms, and the samples. dev/results/hash.txt has the rows of the commit that last changed it, and the
machine that they are from. On another machine that commit is built beside this one, and its rows are compared with.
The exit status is 1 if a row differs. What changes bits on purpose says so in its commit, with the rows of --record.
"""
import argparse
import ctypes
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hash_cases import COMMON, LIBRARY, LIBRARY_CODE, MIXED, WAYS
from runlog import read_arrays

ROOT = Path(__file__).resolve().parents[1]
RECORDED = "dev/results/hash.txt"


def command_output(*command):
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.strip()


def checksum(data):
    return hashlib.blake2b(data, digest_size=5).hexdigest()


def arrays(path):
    """Returns the checksum of a .safetensors file's arrays, whatever their order and the rest of its header."""
    return checksum(b"".join(f"{name} {type}".encode() + data for name, (type, _, data) in sorted(read_arrays(path).items())))


def row(program, case, work, options, gpu):
    """Runs a case in a new folder. Returns its four checksums, or why there are none."""
    device, begins = options.device, options.against.resolve() if options.resumes else program
    tree = next((folder for folder in program.parents if (folder / "optim/python").exists()), ROOT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{tree}/optim/python",
                   "NIBBLE_OPTIM_LIBRARY": f"{program.parent}/lib/libnibble_optim.so"}
    if device == "cpu":
        environment["NIBBLE_STAND_IN"] = "1"
    elif "--gpus" not in case:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    common = f"--device {device} --data {work.parent}/text.bin {COMMON} --run {work}"
    case = re.sub(r"(--(preset|rule) (galore|fira|apollo)\S*)", r"\1 --rank-gap 6", case)
    texts = [f"{program if i else begins} {common}/{i} {text}" for i, text in enumerate(case.split("->"))]
    if len(texts) > 1:
        texts[1] += f" --resume {work}/0/step_00000010" + " --clip 0" * options.resumes
    if case.startswith("library"):
        commands = [[sys.executable, "-c", LIBRARY_CODE, *case.split()[1:]]]
    else:
        commands = [shlex.split(text) for text in texts]
    try:
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment, timeout=500)
            if done.returncode:
                return "failed: " + (done.stderr.strip().split("\n")[-1] or f"status {done.returncode}")[:300]
        if case.startswith("library"):
            return done.stdout.strip()
        folder, losses, samples = work / str(len(commands) - 1), b"", b""
        told = ("loss",) if options.resumes else ("loss", "norm")
        for record in map(json.loads, open(folder / "log.jsonl")):
            if record["type"] in ("train", "val"):
                losses += struct.pack(f"<{len(told)}f", *(float(record.get(key, 0) or "nan") for key in told))
            if record["type"] == "sample":
                samples += record["text"].encode()
        last = folder / "step_00000020"
        return " ".join([arrays(last / "model.safetensors"), arrays(last / "optimizer.safetensors"), checksum(losses),
                         checksum(samples)])
    except (OSError, ValueError, KeyError, subprocess.TimeoutExpired) as error:
        return f"failed: {error}"[:300]
    finally:
        shutil.rmtree(work, ignore_errors=True)


def rows(program, cases, options):
    """Returns the row of each case."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        state, text = 12345, bytearray(b"ab")
        while len(text) < 20000:
            state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
            text.append(97 + (text[-1] * 3 + text[-2] + (state >> 60) // 5) % 16)
        Path(folder, "text.bin").write_bytes(text)
        with ThreadPoolExecutor(options.jobs) as pool:
            made = pool.map(lambda i: row(program, cases[i], Path(folder, str(i)), options, str(i % max(options.gpus, 1))), range(len(cases)))
            return dict(zip(cases, made))


def machine(program, device):
    """Returns what the bits may depend on besides the source."""
    if device == "cpu":
        processor = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
        compiler = command_output(*os.environ.get("CXX", "g++").split(), "--version").split("\n")[0]
        return f"{processor[1] if processor else platform.machine()}; {compiler}; {' '.join(platform.libc_ver())}"
    card = command_output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").split("\n")[0]
    library = re.search(r"libcublasLt\S* => (\S+)", command_output("ldd", str(program)))
    built = re.search(r"CUDA [0-9.]+", command_output(str(program), "--version"))
    version = ctypes.CDLL(library[1]).cublasLtGetVersion() if library else "unknown"
    return f"{card}; {built and built[0]}; cuBLASLt {version}"


def chosen(program, options):
    """Returns the cases of these options, in order."""
    listed = command_output(str(program), "--list-presets").split("\n")[1:]
    presets = [line.split()[0] for line in listed if line and not line.lstrip().startswith("--")]
    cases = [f"--preset {name}" for name in presets]
    for way, names in WAYS.items():
        names = names.split()
        short = [name[1:] for name in names if name[0] == "*"]
        for name in short if options.short else [name.strip("*") for name in names]:
            if not ("--gpus" in way and options.device == "gpu" and options.gpus < 3):
                cases.append(f"--preset {name} {way}")
    if not options.short:
        cases += MIXED
        built = all((one.resolve().parent / "lib/libnibble_optim.so").exists() for one in (program, options.against or program))
        cases += [f"library {text}" for text in LIBRARY if options.device == "cpu" and built]
    cases = [case for case in cases if "->" in case or not options.resumes]
    return [case for case in cases if options.k in case and not (options.device == "cpu" and "--matmul fp32" in case)]


def rows_of_commit(cases, program, options):
    """Builds the commit that last changed the recorded rows in a folder beside. Returns its rows."""
    commit = command_output("git", "log", "-1", "--format=%H", "--", RECORDED)
    with tempfile.TemporaryDirectory() as folder:
        if not commit or subprocess.run(["git", "worktree", "add", "--quiet", "--detach", folder, commit], cwd=ROOT).returncode:
            print("hash: error: git has no commit to compare with; name a built program with --against PATH/train", file=sys.stderr)
            sys.exit(2)
        try:
            built = program.relative_to(ROOT)
            wanted = [str(built)] + ["lib"] * any(case.startswith("library") for case in cases)
            subprocess.run(["make", f"-j{os.cpu_count()}", *wanted], cwd=folder, check=True, stdout=subprocess.DEVNULL)
            return rows(Path(folder, built), cases, options)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", folder], cwd=ROOT)


def main():
    parser = argparse.ArgumentParser(prog="hash", description=__doc__.split("\n")[0])
    parser.add_argument("program", type=Path, help="a built ./train, in the folder of its objects")
    parser.add_argument("--short", action="store_true", help="each preset, and one case of the most frequent ways to run")
    parser.add_argument("-k", default="", metavar="TEXT", help="only the cases that contain it")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N", help="cases at once")
    parser.add_argument("--against", type=Path, metavar="PROGRAM", help="compare with another built ./train")
    parser.add_argument("--resumes", action="store_true", help="resume the checkpoints of the program of --against")
    parser.add_argument("--record", action="store_true", help=f"write the rows into {RECORDED}")
    options = parser.parse_args()
    if options.resumes and not options.against:
        parser.error("--resumes wants --against OLD/build/train, whose checkpoints are resumed")
    options.gpus = command_output("nvidia-smi", "-L").count("GPU ") if options.device == "gpu" else 0
    program, here = options.program.resolve(), machine(options.program.resolve(), options.device)
    cases = chosen(program, options)
    found = rows(program, cases, options)
    file = ROOT / RECORDED
    lines = file.read_text().split("\n") if file.exists() else []
    recorded = {line.split("  ")[1]: line.split("  ")[2] for line in lines if line.startswith(options.device + "  ")}
    before = recorded
    was = next((line.split(": ", 1)[1] for line in lines if line.startswith(f"# {options.device}: ")), None)
    if options.against:
        before = rows(options.against.resolve(), cases, options)
    elif was != here and not options.record:
        print(f"hash: the recorded rows are from {was}, this is {here}: the commit that recorded them is built beside")
        before = rows_of_commit(cases, program, options)

    wrong = 0
    for case in cases:
        if found[case].startswith("failed") or found[case] != before.get(case):
            wrong += 1
            print(f"{case}\n    was  {before.get(case, 'not recorded')}\n    is   {found[case]}")
        if case.endswith(" ->") and found[case].split()[:2] != found.get(case[:-3], found[case]).split()[:2]:
            wrong += 1
            print(f"{case}\n    is not what the run without a resume gives: {found[case[:-3]]}")
    failed = any(text.startswith("failed") for text in found.values())
    if options.record and not failed:
        whole = not options.short and not options.k
        kept = {case: text for case, text in {**recorded, **found}.items() if case in found or not whole}
        others = [line for line in lines if line and not line.startswith((f"{options.device}  ", f"# {options.device}: "))]
        others = others or ["# Rows of `make hash` (dev/hash.py): device, case, checksums of weights, states, losses, samples."]
        mine = [f"# {options.device}: {here}", *(f"{options.device}  {case}  {text}" for case, text in kept.items())]
        file.write_text("\n".join(sorted(others + mine, key=lambda line: (line[0] != "#", line != others[0], line))) + "\n")
    print(f"hash: {len(cases)} rows, {wrong} {'changed' if options.record else 'differ'}")
    return failed if options.record else min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
