"""Runs the targets of dev/fuzz/fuzz.cu, each for SECONDS: python3 dev/fuzz/run.py SECONDS [TARGET...]

The first inputs come from real files: those of a tiny run, command lines of README.md, presets, sources of formats.
New inputs that a target finds stay in build/fuzz/corpus/TARGET for the next time. An input that fails is kept, and
    NIBBLE_FUZZ=TARGET build/fuzz/fuzz build/fuzz/failed/TARGET/crash-...
runs it again. The last line is `N passed, N failed`.
"""

import json
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "dev"))
from runlog import read_arrays  # noqa: E402
WORK = ROOT / "build/fuzz"
TARGETS = ["json", "safetensors", "config", "state", "shards", "tokenizer", "options", "overrides", "environment", "eval", "prompts"]


def tiny_run():
    """Makes a run of two steps. Returns its folder and that of its checkpoint."""
    run = WORK / "run"
    shutil.rmtree(run, ignore_errors=True)
    subprocess.run(
        "./train --device cpu --layers 1 --channels 64 --heads 1 --seq 8 --batch 1 --tokens-per-step 8 --steps 2 "
        f"--val-every 0 --sample-every 0 --preset fp8w8e --run {run}".split(),
        cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return run, next(run.glob("step_*"))


def small_safetensors(path):
    """Returns a safetensors file with the names and types of another one and tensors of 8 bytes."""
    header, data, widths = {}, b"", {"F32": 4, "BF16": 2, "F16": 2, "U8": 1, "I8": 1, "F8_E4M3": 1}
    for name, (type, _, its) in read_arrays(path).items():
        header[name] = {"dtype": type, "shape": [8 // widths.get(type, 8)], "data_offsets": [len(data), len(data) + 8]}
        data += bytes(its[:8]).ljust(8, b"\0")
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def shard(tokens):
    return struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253) + struct.pack(f"<{len(tokens)}H", *tokens)


ENVIRONMENTS = [  # variables of launchers, and a list of Slurm's hosts
    b"RANK=1\nWORLD_SIZE=2\nLOCAL_RANK=1\nMASTER_ADDR=localhost\nMASTER_PORT=29500\nNIBBLE_SECRET=x\n"
    b"SLURM_PROCID=1\nSLURM_STEP_NUM_TASKS=2\nSLURM_LOCALID=1\nSLURM_JOB_ID=7\nSLURM_STEP_ID=0\n"
    b"SLURM_JOB_NODELIST=gpu[3-7,9]\n", b"gpu[003-007,9],login"]


def malformed(kind):
    """Returns the contents of a kind in dev/unit/malformed.txt."""
    rows = [line.split(" :: ") for line in (ROOT / "dev/unit/malformed.txt").read_text().splitlines()]
    return [text.encode() for row in rows if row[0] == kind for text in row[2:]]


def seeds():
    """Returns the first inputs of each target."""
    run, checkpoint = tiny_run()
    files = [path.read_bytes() for path in [*run.glob("*.json"), *checkpoint.glob("*.json")]]
    state = (checkpoint / "state.json").read_bytes().rpartition(b'"crc32c": ')[0]
    readme = "".join((ROOT / name).read_text() for name in ["README.md", "dev/compare/README.md"])
    lines = [line.split("#")[0] for line in re.findall(r"^ *\./train (--.*[^\\\n])$", readme, re.M)]
    typed = []
    for line in lines:
        try:
            typed.append(shlex.split(line))
        except ValueError:
            pass
    presets = subprocess.run(["./train", "--list-presets"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    overrides = ["wpe|ln*: weights=fp32 m=fp32 lr=0.5; *.bias: wd=0", "none"]
    overrides += [words[i + 1] for words in typed for i, word in enumerate(words[:-1]) if word == "--override"]
    meta = json.dumps({"vocabulary": 50257, "train": {"tokens": 40, "bytes": 99}, "val": {"tokens": 40, "bytes": 98}})
    vocabulary = json.dumps({"a": 0, "b": 1, "\u0120": 2, "ab": 3, "\u0120a": 4, "<|endoftext|>": 5})
    weights = [small_safetensors(path) for path in sorted(checkpoint.glob("*.safetensors"))]
    files_of = {"wte.weight": "a.safetensors", "wpe.weight": "b.safetensors"}
    index = {"metadata": {"total_size": 16}, "weight_map": files_of}
    merges = "#version: 0.2\na b\n\u0120 a\n"
    added = json.dumps({"<|pad|>": 6})
    whole = json.dumps({"model": {"type": "BPE", "vocab": json.loads(vocabulary), "merges": ["a b", ["\u0120", "a"]]},
                        "added_tokens": [{"id": 6, "content": "<|pad|>", "special": True}],
                        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}})
    questions = struct.pack("<8s6IQI20x6I", b"nib-eval", 1, 0, 256, 0, 2, 3, 15, 5, 2, 1, 1, 0, 3, 2)  # of three rows
    questions += struct.pack("<10I15H", 4, 4, *[3, 2, 4, 4] * 2, *range(15))
    headers = [struct.pack("<Q", len(text)) + text + bytes(8) for text in malformed("safetensors")]
    members = [b'{"model_type": "gpt2", %s}' % text for text in malformed("config.json")]
    return {
        "json": [*files, *(run / "log.jsonl").read_bytes().splitlines()[:4], meta.encode(), vocabulary.encode(), *malformed("json")],
        "safetensors": [*weights, *headers, json.dumps(index).encode() + b"\0" + weights[0]],
        "config": [(checkpoint / "config.json").read_bytes(), *members],
        "state": [state, re.sub(rb'"files": \{.*?\n\}', b'"files": {}', state, flags=re.S),
                  re.sub(rb'"files": \{.*?\n\}', b'"files": {}', state, flags=re.S) + b"\0" + bytes(range(60))],
        "shards": [b"\0\7" + shard(range(40)), b"\1\7" + b"some text " * 9,
                   b"\1\7" + b"ID3 at the beginning of a text, as MZ", b"\x80\3" + shard(range(99)),
                   b"\xc0\3" + bytes(range(99)), *(b"\2\3" + text + b"\0" + shard(range(1000, 1040)) for text in [meta.encode(), *malformed("meta.json")])],
        "tokenizer": ["\0".join([vocabulary, merges, added, "ab a aab"]).encode(),
                      (" " + whole + "\0ab a aab").encode(), *(b" " + text for text in malformed("tokenizer.json")),
                      *malformed("vocab.json")],
        "options": ["\n".join(words).encode() for words in typed],
        "overrides": [text.encode() + b"\0h.0.attn.c_attn.weight" for text in overrides],
        "environment": ENVIRONMENTS,
        "eval": [questions],
        "prompts": [b"a\nb\r\n\n", "\ufeffé".encode()],
    }, presets.encode().split()


def fuzz(target, inputs, words, seconds):
    """Runs one target. Returns whether nothing failed."""
    corpus, failed = WORK / "corpus" / target, WORK / "failed" / target
    first, dictionary = WORK / "seeds" / target, WORK / f"{target}.dict"
    for folder in corpus, failed, first:
        folder.mkdir(parents=True, exist_ok=True)
    for i, data in enumerate(inputs):
        (first / f"{i}").write_bytes(data)
    names = {word for data in [*inputs, *words] for word in re.findall(rb"[A-Za-z_][\w.-]{2,40}", data)}
    dictionary.write_text("".join(f'"{name.decode()}"\n' for name in sorted(names)[:2000]))
    environment = os.environ | {"NIBBLE_FUZZ": target, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive",
                                "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1"}
    longest = 500 if target == "options" else 8192  # names that nobody types are slow to compare
    command = [WORK / "fuzz", f"-max_total_time={seconds}", f"-max_len={longest}", "-timeout=10", "-rss_limit_mb=3000",
               "-print_final_stats=1", "-close_fd_mask=3", f"-dict={dictionary}", f"-artifact_prefix={failed}/",
               corpus, first]
    command = ["timeout", "-k", "5", str(2 * int(seconds) + 60), *command]  # one that hangs fails, without a count
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, errors="replace")
    executed = re.search(r"stat::number_of_executed_units: *(\d+)", done.stderr)
    coverage = re.findall(r"cov: (\d+)", done.stderr)
    good = done.returncode == 0 and executed is not None
    count, edges = executed[1] if executed else "?", coverage[-1] if coverage else "?"
    word = "ok   " if good else "FAIL "
    print(f"{word} fuzz_{target:<14} {count:>10} inputs in {seconds} s  {edges} edges", flush=True)
    if not good:
        lines = done.stderr.splitlines()
        begin = next((i for i, line in enumerate(lines) if "ERROR:" in line or "runtime error" in line), -20)
        print("\n".join(lines[begin:][:40] + lines[-1:]))
    return good


def main():
    seconds, chosen = sys.argv[1], sys.argv[2:]
    unknown = set(chosen) - set(TARGETS)
    if not seconds.isdigit() or unknown:
        print(f"error: make fuzz takes FUZZ_SECONDS=N and FUZZ=\"TARGET...\" of {' '.join(TARGETS)}", file=sys.stderr)
        return 2
    inputs, words = seeds()
    results = [fuzz(target, inputs[target], words, seconds) for target in chosen or TARGETS]
    print(f"{results.count(True)} passed, {results.count(False)} failed")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
