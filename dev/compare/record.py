"""Makes the record of a run: a few KB of JSON, taken from the run folder that ./train wrote, for the report.
A study's records are one file, results/NAME/runs.jsonl, with one record per line, sorted by name and seed.

    {"name", "seed", "options", "options_key", "data_key", "status": "done" | "diverged" | "died", "reason", "resolved",
     "final_loss", "val": [[step, loss], ...], "train": [[step, mean loss of the steps since the one before], ...],
     "tokens_per_second", "memory_mib", "weights_bytes", "state_bytes", "skipped", "seconds", "device", "commit", ...}

Losses are nats a token; a loss that was not finite is null. Bytes are per parameter.
"""

import json
import math
import re
import sys
from pathlib import Path

from trainer import read_plan

sys.path.append(str(Path(__file__).resolve().parents[1]))
from problem import Problem, write_whole
from runlog import RunLog, read_arrays

FILE = "runs.jsonl"

ITS_OWN = ("run", "resume", "sample", "data", "val")  # differ from start to start or from machine to machine
RISEN = 0.1  # nats above the loss of the initial weights, where a loss is no result but a run that has diverged
DIVERGED = re.compile(r"step \d+: the loss is \S+ and the norm of the gradient [^;]*")  # ./train's last words
POINTS = 200  # of the training loss: the mean of as many runs of steps


def checkpoint(folder):
    """Returns the newest checkpoint of a run folder, or None."""
    return max((path.parent for path in folder.glob("step_*/state.json") if path.parent.suffix != ".tmp"), default=None)


def thinned(records):
    """Returns at most POINTS pairs of a step and the mean loss of the steps up to it; null if one was not finite."""
    width = max(1, -(-len(records) // POINTS))
    result = []
    for i in range(0, len(records), width):
        losses = [record["loss"] for record in records[i : i + width]]
        mean = None if None in losses else round(math.fsum(losses) / len(losses), 5)
        result.append([records[min(i + width, len(records)) - 1]["step"], mean])
    return result


def speed(records, tokens_per_step):
    """Returns tokens a second without the first ten steps, or None."""
    seconds = [record["step_s"] for record in records[10:] or records]
    return round(tokens_per_step * len(seconds) / sum(seconds), 1) if seconds else None


def stored_bytes(folder):
    """Bytes of the weights and of the states in a checkpoint, padding included, but that fp32 weights beside weights of 8
    bits are counted without as many elements as these have of padding."""
    model, optimizer = (read_arrays(folder / f"{name}.safetensors") for name in ("model", "optimizer"))
    states = sum(len(its[2]) for name, its in optimizer.items() if re.match(r"(m|v|slow)\b", name))
    weights = sum(len(its[2]) for its in optimizer.values()) - states
    weights += sum(len(its[2]) for its in model.values() if its[0] == "BF16")
    # What the model file has in F32 is stored like this, or decoded from codes in the other file.
    codes = sum(math.prod(its[1]) for name, its in optimizer.items() if re.fullmatch(r"weights(\.\d+\[.*\])?", name))
    weights += 4 * max(0, sum(math.prod(its[1]) for its in model.values() if its[0] == "F32") - codes)
    return weights, states


def outcome(returncode, steps, log, words):
    """Returns (status, reason) of a run that ended."""
    reached = log["train"][-1]["step"] if log["train"] else 0
    words = re.sub(r"\n  +", "; ", words.strip())  # an error of a library has lines of details below its name
    sentences = [line.removeprefix("train: error: ") for line in words.split("\n") if line.strip()]
    if returncode == 0 and reached >= steps:
        final = [record["loss"] for record in log["val"] if record["step"] == reached]
        if not final:
            return "died", "there was no validation at the end; leave val-every above 0"
        if final[-1] is None:
            return "diverged", f"the validation loss of step {reached} is not finite"
        begin = log["val"][0]
        if begin["step"] == 0 and begin["loss"] is not None and final[-1] > begin["loss"] + RISEN:
            return "diverged", f"the validation loss rose from {begin['loss']:.4f} to {final[-1]:.4f}"
        return "done", ""
    told = DIVERGED.match(sentences[-1]) if sentences and returncode > 0 else None
    if told:
        return "diverged", told[0]
    if returncode < 0:
        return "died", f"killed by signal {-returncode} at step {reached} of {steps}"
    if returncode == 0 or returncode > 128:
        return "died", f"stopped at step {reached} of {steps}"
    return "died", sentences[-1] if sentences else f"ended with status {returncode} at step {reached} of {steps}"


def as_typed(value):
    """Returns a value of the log's options as ./train prints it: a number in the fewest digits of %g."""
    if not isinstance(value, float):
        return str(value)
    return next(text for text in (f"{value:.{digits}g}" for digits in range(1, 18)) if float(text) == value)


def make(run, folder, returncode, words, weights):
    """Returns the record of a run that ended in `folder`; `words`: what it wrote to stderr; `weights`: read_plan's."""
    whole = RunLog(folder / "log.jsonl").read(missing_ok=True)
    config, log = whole.config, whole.records
    banner = folder / "log.txt"
    told = read_plan(banner.read_text("utf-8", "replace"), weights) if banner.exists() else None
    resolved = {name: as_typed(value) for name, value in config.get("options", {}).items()}
    plan = told or run.plan
    if resolved.get("override") == "none":  # as it was said before presets had overrides of their own
        resolved = resolved | {"override": ""}
    steps = int(resolved.get("steps", plan["steps"]))
    status, reason = outcome(returncode, steps, log, words)
    losses = {record["step"]: record["loss"] for record in log["val"]}
    weights_bytes, state_bytes, saved = plan["weights_bytes"], plan["state_bytes"], checkpoint(folder)
    if saved and (override := resolved.get("override", "")):  # the plan's figures are those without it
        stored = [round(total / config["parameters"], 3) for total in stored_bytes(saved)]
        weights_bytes = stored[0] if "weights=" in override else weights_bytes
        state_bytes = stored[1] if re.search(r"\b[mv]=", override) else state_bytes
    return {
        "version": 1,
        "name": run.name,
        "seed": run.seed,
        "options": run.options,
        "options_key": run.options_key(),
        "status": status,
        "reason": reason,
        "resolved": {name: value for name, value in resolved.items() if name not in ITS_OWN},
        "parameters": config.get("parameters"),
        "steps": steps,
        "tokens_per_step": plan["tokens_per_step"],
        "final_loss": losses.get(steps) if status == "done" else None,
        "val": [[step, loss] for step, loss in losses.items()],
        "train": thinned(log["train"]),
        "tokens_per_second": speed(log["train"], plan["tokens_per_step"]),
        "memory_mib": plan["memory_mib"],
        "weights_bytes": weights_bytes,
        "state_bytes": state_bytes,
        "skipped": log["train"][-1]["skipped"] if log["train"] else 0,
        "data": re.sub(r"^.*/(?=.*  \S+ tokens in )", "", plan["data"]),  # the folder's name, wherever it is
        "resumed_at": whole.began,
        "device": config.get("device"),
        "commit": config.get("commit"),
    }


def read_all(path):
    """{(name, seed): record} of a file of records, none if there is no such file; of two records of one run the later
    line counts, so files of several machines may be joined."""
    records = {}
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            records[record["name"], record["seed"]] = record
            if record["resolved"].get("matmul") != "fp8":
                for unread in ("head", "fp8-grads"):  # fp8-grads is an option of earlier versions
                    record["resolved"].pop(unread, None)
        except (ValueError, KeyError, TypeError):
            raise Problem(f"{path}:{number} is no record of a run; remove the line") from None
    return records


def write(path, record):
    """Puts a record into the file, in the place of an earlier one of the same run. The file changes as a whole or not at
    all."""
    records = read_all(path) | {(record["name"], record["seed"]): record}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "".join(json.dumps(records[key]) + "\n" for key in sorted(records)))
