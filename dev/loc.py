#!/usr/bin/env python3
"""Counts lines, code lines and words, and compares them with dev/limits.txt.

    make loc       exit status 1: a part is above its limit
    python3 dev/loc.py --lower       lowers the limits to what is counted, for a commit that shrinks a part

Counts every tracked text but .md files, results and fixtures. Code lines are neither blank nor only a comment or a
docstring. Words are those of .md files outside folders of results.
"""
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMITS = ROOT / "dev/limits.txt"

# What to read, in this order, to understand one run with AdamW in bf16 on one GPU. Everything else is an extension.
CORE = """
train_gpt2.cu data/loader.h data/loader.c kernels/feeder.cuh kernels/common.cuh kernels/random.h
kernels/embedding.cuh kernels/layernorm.cuh kernels/cpu_gemm.h kernels/matmul.cuh kernels/operand.cuh kernels/linear.cuh
kernels/attention.cuh kernels/gelu.cuh kernels/classifier.cuh kernels/norm.cuh optim/optim.h optim/plan.h optim/plan.cu
optim/made.h optim/optim.cu optim/step.cu optim/storage.h optim/kernel.cuh optim/noise.cuh optim/rules/hyper.cuh
optim/rules/adamw.cuh optim/formats/storage.cuh optim/formats/elementwise.cuh optim/formats/bf16.cuh
optim/formats/fp32.cuh optim/formats/master.cuh
""".split()

FIXTURES = r"dev/reference/words\.txt|.*\.(safetensors|png|jsonl)|.*results/.*|LICENSE"


def counted(name, text):
    """Returns the lines and the code lines of a file."""
    code = text
    if re.search(r"\.(c|h|cu|cuh|js)$", name):
        code = re.sub(r"/\*.*?\*/", "", code, flags=re.S)
    elif name.endswith(".py"):
        code = re.sub(r'""".*?"""', "", code, flags=re.S)
    mark = "//" if re.search(r"\.(c|h|cu|cuh|js)$", name) else "#"
    return text.count("\n"), sum(1 for line in code.split("\n") if line.strip() and not line.strip().startswith(mark))


def parts(name):
    """Returns the parts that a file counts for."""
    first = name.split("/")[0]
    if name.startswith("dev/unit/") or name == "test_gpt2.cu":
        yield "tests"
    elif first == "dev" and not name.startswith("dev/galore"):
        yield "dev"
    elif first in ("train_gpt2.cu", "kernels", "data", "optim"):
        yield first
        yield "product"
    if name in CORE:
        yield "core"


def main():
    names = subprocess.check_output(["git", "-C", ROOT, "ls-files"], text=True).split()
    found = {part: [0, 0] for part in ("train_gpt2.cu", "core", "kernels", "data", "optim", "product", "tests", "dev", "words")}
    for name in (name for name in names if (ROOT / name).is_file()):
        if name.endswith(".md") and "results/" not in name:
            found["words"][0] += len((ROOT / name).read_text().split())
        elif not name.endswith(".md") and not re.fullmatch(FIXTURES, name):
            for part in parts(name):
                found[part] = [a + b for a, b in zip(found[part], counted(name, (ROOT / name).read_text()))]
    limits = {line.split()[0]: [int(word) for word in line.split()[1:]] for line in LIMITS.read_text().splitlines()}
    if "--lower" in sys.argv:
        limits = {part: [min(a, b) for a, b in zip(found[part], limits[part])] for part in limits}
        LIMITS.write_text("".join(f"{part:13} {lines:6} {code:6}\n" for part, (lines, code) in limits.items()))
    above = [part for part in found if any(a > b for a, b in zip(found[part], limits[part]))]
    print(f"{'':13} {'lines':>6} {'limit':>6}   {'code':>6} {'limit':>6}")
    for part, (lines, code) in found.items():
        print(f"{part:13} {lines:6} {limits[part][0]:6}   {code:6} {limits[part][1]:6}{'  above its limit' * (part in above)}")
    missing = [name for name in CORE if not (ROOT / name).is_file()]
    if missing:
        print(f"loc: error: CORE in dev/loc.py names {', '.join(missing)}, which is gone; name what took its place", file=sys.stderr)
    return 1 if above or missing else 0


if __name__ == "__main__":
    sys.exit(main())
