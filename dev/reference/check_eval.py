#!/usr/bin/env python3
"""Compares the scores of `./train --eval` with transformers on the same model folder, example by example.

    pip install -r dev/reference/requirements.txt
    ./train --model DIR --eval hellaswag,lambada --eval-out scores.jsonl
    python dev/reference/check_eval.py DIR data/eval/hellaswag.eval scores.jsonl    # and for lambada likewise

transformers scores every row of the evaluation file in float32. Both must make the same choice, except where the
reference's scores of the two choices lie within twice the rounding: the largest difference that computing in bfloat16 makes to the
reference's own scores of --rounding-rows rows, or --tolerance nats. No score may differ by more than that either. The last
line counts; the exit status is 1 when an example differs. Mistakes are answered by one sentence and exit status 2.
"""

import json
import os
import struct
import sys

from check_export import Parser, Problem, answered, load, np, score, torch

HEADER = "<8s6IQI16xI"
NORMS = ("choice", "choice_norm")


class Questions:
    """An evaluation file as data/README.md describes it: examples (rows, answer), rows (tokens, continuation, lengths)."""

    def __init__(self, path):
        data = open(path, "rb").read()
        magic, version, self.kind, self.vocabulary, _, n, r, k, _, _ = struct.unpack(HEADER, data[:64].ljust(64))
        if (magic, version) != (b"nib-eval", 1) or len(data) != 64 + 8 * n + 16 * r + 2 * k:
            raise Problem(f"{path}: not an evaluation file of version 1; make it with data/prepare.py --eval")
        table = np.frombuffer(data, "<u4", 4 * r, 64 + 8 * n).reshape(r, 4).astype(np.int64)
        tokens = np.frombuffer(data, "<u2", k, 64 + 8 * n + 16 * r).astype(np.int64)
        self.examples = np.frombuffer(data, "<u4", 2 * n, 64).reshape(n, 2).tolist()
        ends = np.cumsum(table[:, 0] + table[:, 1])
        starts = ends - table[:, 0] - table[:, 1]
        self.rows = [(tokens[a:b], int(row[1])) for a, b, row in zip(starts, ends, table)]
        self.lengths = table[:, 2:4]


def measured_rounding(options, questions, reference):
    """Returns the largest difference between float32 and bfloat16 among rows spread over the file."""
    stride = max(1, len(questions.rows) // options.rounding_rows)
    rows, want = questions.rows[::stride], reference[::stride, 0]
    got = score(load(options.folder, torch.bfloat16, options.device), rows, options.batch)[:, 0]
    return float(np.abs(got - want).max())


def read_scores(path, name, count):
    """Returns the lines of the evaluation file `name` among all that --eval scored."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line for line in map(json.loads, file) if line["task"] == name]
    except (ValueError, KeyError, TypeError) as error:
        raise Problem(f"{path}: not the scores of --eval-out ({error})") from None
    if [line["example"] for line in lines] != list(range(count)):
        raise Problem(
            f"{path}: {len(lines)} examples of {name}, and the evaluation file has {count}; write the scores again with "
            "./train --eval FILE.eval --model DIR --eval-out SCORES.jsonl"
        )
    return lines


def differences(line, answer, reference, lengths, rounding):
    """Returns what is wrong in an example, as (what, whether rounding explains it)."""
    mine = np.array([np.nan if score is None else score for score in line["scores"]])
    if len(mine) != len(reference) or line.get("answer") != answer:
        return [("another question", False)]
    wrong = []
    if not np.all(np.abs(mine - reference[:, 0]) <= 2 * rounding):
        wrong.append((f"scores {mine.round(4).tolist()}, want {reference[:, 0].round(4).tolist()}", False))
    if "right" in line:
        if line["right"] != (reference[0, 1] > 0):
            wrong.append((f"right {line['right']}, lead {reference[0, 1]:.5f}", abs(reference[0, 1]) <= 2 * rounding))
        return wrong
    for name, norm in zip(NORMS, (np.ones(len(mine)), lengths[:, 0])):
        normal, mine_is = reference[:, 0] / norm, line.get(name)
        best = int(np.argmax(normal))
        if mine_is not in range(len(mine)):
            wrong.append((f"{name} {mine_is}, want {best}", False))
        elif mine_is != best:
            gap, bound = normal[best] - normal[mine_is], rounding / norm[best] + rounding / norm[mine_is]
            wrong.append((f"{name} {mine_is}, want {best}: {gap:.5f} apart", gap <= bound))
    return wrong


def check(options):
    questions = Questions(options.questions)
    name = os.path.basename(options.questions).removesuffix(".eval")
    lines = read_scores(options.scores, name, len(questions.examples))
    model = load(options.folder, torch.float32, options.device)
    if model.config.vocab_size < questions.vocabulary:
        raise Problem(
            f"{options.questions}: {questions.vocabulary} tokens, and the model has {model.config.vocab_size}"
        )
    reference = score(model, questions.rows, options.batch)
    rounding = options.tolerance or measured_rounding(options, questions, reference)
    counts, at, largest = {"same": 0, "within rounding": 0, "DIFFERENT": 0}, 0, 0.0
    for line, (rows, answer) in zip(lines, questions.examples):
        if line.get("left_out"):
            at += rows
            continue
        mine, its = [x for x in line["scores"] if x is not None], reference[at : at + rows]
        if len(mine) == rows:
            largest = max(largest, float(np.abs(np.array(mine) - its[:, 0]).max()))
        wrong = differences(line, answer, its, questions.lengths[at : at + rows], rounding)
        kind = "same" if not wrong else "within rounding" if all(good for _, good in wrong) else "DIFFERENT"
        counts[kind] += 1
        at += rows
        if kind != "same":
            print(f"example {line['example']}: {'; '.join(what for what, _ in wrong)} ({kind})")
    if questions.kind == 0:
        ends = np.cumsum([rows for rows, _ in questions.examples])[:-1]
        picks = [int(np.argmax(part)) for part in np.split(reference[:, 0], ends)]
        right = np.mean([pick == answer for pick, (_, answer) in zip(picks, questions.examples)])
    else:
        right = np.mean(reference[:, 1] > 0)
        print(f"transformers: perplexity {np.exp(-reference[:, 0].mean()):.4f}")
    print(f"transformers: acc {right:.5f}, float32 on {model.device.type}")
    print(f"scores differ by at most {largest:.2e} nats, the rounding is {rounding:.2e}")
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    return int(counts["DIFFERENT"] > 0)


def main():
    parser = Parser(prog="check_eval", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("folder", metavar="DIR", help="model folder that ./train --model read")
    add("questions", metavar="FILE.eval", help="of data/prepare.py --eval")
    add("scores", metavar="SCORES.jsonl", help="of ./train --eval-out")
    add("--batch", type=int, default=32, metavar="B", help="rows at a time (default: %(default)s)")
    add("--device", help="cpu or cuda (default: cuda where there is one)")
    instead = "instead of the rounding of bfloat16; 1e-3 for ./train on a CPU"
    add("--tolerance", type=float, metavar="NATS", help=instead)
    add("--rounding-rows", type=int, default=512, metavar="N", help="rows that measure it (default: %(default)s)")
    options = parser.parse_args()
    if min(options.batch, options.rounding_rows) < 1:
        raise Problem("--batch and --rounding-rows must be at least 1")
    return check(options)


if __name__ == "__main__":
    sys.exit(answered("check_eval", main))
