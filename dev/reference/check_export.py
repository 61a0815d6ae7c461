#!/usr/bin/env python3
"""Loads an exported model with transformers and prints its loss, for comparison with the trainer's.

    python dev/reference/check_export.py runs/last/step_00001000 --tokens 'data/corpus/val_*.bin' --expect 3.2871
    python dev/reference/check_export.py runs/last/step_00001000 --bytes README.md --windows 8

The data is cut as the trainer cuts it: windows of T tokens at multiples of T (T: the model's n_positions, or --length),
each with the token after it as the last target; a tail is left out, in every file. The mean over the first N windows is
computed in float32 whatever the stored type and printed as `loss 3.123456`. With --expect, the exit status is 1 when
the loss is further than --tolerance from it. Mistakes are answered by one sentence and exit status 2.
"""

import glob
import math
import os
import re
import sys

sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from problem import Parser, Problem, answered, needed

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # DIR is a folder, never a name to look up
with needed(os.path.basename(sys.argv[0]).removesuffix(".py"), "-r dev/reference/requirements.txt"):
    import numpy as np
    import torch
    from transformers import GPT2LMHeadModel

MAGIC, HEADER_BYTES = 20240520, 1024


def read_tokens(path, is_bytes):
    """Returns the tokens of a file, memory-mapped."""
    try:
        if is_bytes:
            return np.memmap(path, np.uint8, "r")
        header = np.fromfile(path, "<i4", 256)
        if len(header) < 256 or header[0] != MAGIC or header[1] != 1:
            raise Problem(f"{path}: not a shard of tokens (magic {MAGIC}, version 1); give other files by --bytes")
        return np.memmap(path, "<u2", "r", HEADER_BYTES, (int(header[2]),))
    except (OSError, ValueError) as error:
        raise Problem(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None


def windows(paths, is_bytes, length):
    """Yields windows of length + 1 tokens, in order."""
    for path in paths:
        tokens = read_tokens(path, is_bytes)
        for start in range(0, len(tokens) - length, length):
            yield np.asarray(tokens[start : start + length + 1]).astype(np.int64)


@torch.no_grad()
def score(model, rows, batch):
    """Returns (sum of ln p of the continuation, least lead of its tokens over others) of each row's last T + 1 tokens.
    Nothing predicts the first of these, so of a longer continuation only the last T tokens count."""
    most, device = model.config.n_positions + 1, model.device
    result = np.zeros((len(rows), 2))
    order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]))
    for start in range(0, len(order), batch):
        picked = order[start : start + batch]
        texts = [rows[i][0][-most:] for i in picked]
        width = max(map(len, texts))
        padded = torch.zeros(len(texts), width, dtype=torch.long)
        for line, text in zip(padded, texts):
            line[: len(text)] = torch.from_numpy(text)
        logits = model(input_ids=padded[:, :-1].to(device)).logits.float()  # what follows the text is not seen by it
        for j, (i, text) in enumerate(zip(picked, texts)):
            count = min(rows[i][1], len(text) - 1)
            its = logits[j, len(text) - 1 - count : len(text) - 1]
            targets = padded[j, len(text) - count : len(text)].to(device)[:, None]
            mine = its.gather(1, targets)[:, 0]
            others = its.scatter(1, targets, -torch.inf).max(1).values
            result[i] = (mine - its.logsumexp(1)).double().sum().item(), (mine - others).min().item()
    return result


def newest(folder):
    """Returns the last checkpoint of a run."""
    return max((name for name in os.listdir(folder) if re.fullmatch(r"step_\d+", name)), default="step_00001000")


def load(folder, dtype, device):
    """Returns the model of a folder on a device: by default a GPU where there is one."""
    if os.path.isfile(os.path.join(folder, "log.jsonl")):
        raise Problem(f"{folder}: a run folder; give a checkpoint in it, such as {folder}/{newest(folder)}")
    if not os.path.isfile(os.path.join(folder, "config.json")):
        raise Problem(f"{folder}: there is no config.json in it; give a checkpoint, such as RUN/step_00001000")
    try:
        model, info = GPT2LMHeadModel.from_pretrained(
            folder, dtype=dtype, output_loading_info=True, attn_implementation="eager"
        )
    except Exception as error:  # of transformers, safetensors and others
        raise Problem(f"{folder}: transformers cannot load it ({str(error).splitlines()[0]})") from None
    wrong = {kind: sorted(map(str, names)) for kind, names in info.items() if names and kind != "error_msgs"}
    if wrong.get("missing_keys") == ["lm_head.weight"]:  # tied to wte
        del wrong["missing_keys"]
    if wrong:
        raise Problem(f"{folder}: tensors do not fit the model: {wrong}")
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        return model.to(device or ("cuda" if torch.cuda.is_available() else "cpu")).eval()
    except (RuntimeError, AssertionError) as error:
        raise Problem(f"--device {device}: {str(error).splitlines()[0]}; give cpu or cuda") from None


def check(options):
    model = load(options.folder, torch.float32, options.device)
    length = model.config.n_positions if options.length is None else options.length
    if not 1 <= length <= model.config.n_positions:
        raise Problem(f"--length {length} is not within 1 and the model's {model.config.n_positions} positions")
    pattern = options.bytes or options.tokens
    paths = sorted(glob.glob(pattern)) or [pattern]
    sequences = []
    for sequence in windows(paths, options.bytes is not None, length):
        sequences.append(sequence)
        if len(sequences) == options.windows:
            break
    if not sequences:
        raise Problem(f"{pattern}: shorter than one window of {length} + 1 tokens; give a shorter --length")
    largest, targets = max(int(sequence.max()) for sequence in sequences), len(sequences) * length
    if largest >= model.config.vocab_size:
        raise Problem(f"the data has token {largest} but the vocabulary is {model.config.vocab_size}")
    loss = -score(model, [(sequence, length) for sequence in sequences], options.batch)[:, 0].sum() / targets
    print(f"loss {loss:.6f}")
    print(f"{len(sequences)} windows of {length}, {targets} targets, float32 on {model.device.type}")
    if options.expect is None:
        return 0
    error = abs(loss - options.expect)
    good = math.isfinite(error) and error <= options.tolerance
    verdict = "equal" if good else "DIFFERENT"
    print(f"{verdict}: expected {options.expect:.6f}, {error:.2e} off, tolerance {options.tolerance:g}")
    return 0 if good else 1


def main():
    parser = Parser(prog="check_export", description=__doc__.split("\n")[0])
    parser.add_argument("folder", metavar="DIR", help="Hugging Face GPT-2 model folder: config.json, model.safetensors")
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--tokens", metavar="FILE.bin", help="shard of tokens, or a glob of them")
    data.add_argument("--bytes", metavar="FILE", help="any file, read as bytes")
    parser.add_argument("--windows", type=int, default=16, metavar="N", help="how many windows (default: %(default)s)")
    parser.add_argument("--length", type=int, metavar="T", help="tokens of a window (default: the model's n_positions)")
    parser.add_argument("--batch", type=int, default=4, metavar="B", help="windows at a time (default: %(default)s)")
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    parser.add_argument("--expect", type=float, metavar="LOSS", help="exit with status 1 unless the loss is this")
    parser.add_argument("--tolerance", type=float, default=1e-4, metavar="X", help="of --expect (default: %(default)s)")
    options = parser.parse_args()
    if options.windows < 1 or options.batch < 1:
        raise Problem("--windows and --batch must be at least 1")
    return check(options)


if __name__ == "__main__":
    sys.exit(answered("check_export", main))
