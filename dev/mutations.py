"""Checks that the tests find faults. Each row below puts one fault into the product, in a copy of this tree that is
built for the CPU; a test that the row's pattern picks must fail. The last line is `N passed, N failed`; a fault that
no test finds counts as failed.

    python3 dev/mutations.py [-k SUBSTRING] [--copy FOLDER]

-k picks rows by file or pattern. --copy keeps the copy and its objects for the next run. About a minute a row.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# A row has a file, a text that occurs in it once, what replaces it, a pattern of tests, and the objects that are built
# again to show the fault (without build/cpu/ and .o). Nothing else is built, so a fault in a header takes little time.
ROWS = [
    # kernels
    ("kernels/gelu.cuh", "GELU_CUBIC = 0.044715f", "GELU_CUBIC = 0.0447f", "gelu_cpu", ["unit/kernels"]),
    ("kernels/layernorm.cuh", "LAYERNORM_EPS = 1e-5f", "LAYERNORM_EPS = 1e-4f", "layernorm_cpu", ["unit/kernels"]),
    ("kernels/attention.cuh", "q + 2 * (int64_t)C, stride, i + 1,", "q + 2 * (int64_t)C, stride, i,",
     "attention_gradient", ["unit/attention"]),
    ("kernels/ranks/shard.cuh", "for (int r = 0; r < c.world; r++) sum += to_float",
     "for (int r = 1; r < c.world; r++) sum += to_float", "exchange_between", ["unit/exchange"]),
    ("kernels/ranks/shard.cuh", "splits && !s->first);", "splits);", "exchange_between", ["unit/exchange"]),
    ("kernels/ranks/slices.cuh", "return own[i].at + (tile - own[i].tile);", "return own[i].at;", "slices_owners",
     ["unit/slices"]),
    ("kernels/ranks/rendezvous.c", "return differ == 0;", "return true;", "doors_", ["kernels/ranks/rendezvous"]),
    # optim
    ("optim/formats/bf16.cuh", "bits + 0x7fffu + (bits >> 16 & 1u)", "bits + 0x8000u", "optim_bf16", ["unit/optim"]),
    ("optim/noise.cuh", "c[2] = high0 ^ c[3] ^ key1;", "c[2] = high0 ^ c[3] ^ key0;", "optim_philox", ["unit/optim"]),
    ("optim/rules/hyper.cuh", "return exact_fma(weight, exact_add(x, -a), a);",
     "return exact_fma(weight, x, a);", "rules_against_double", ["optim/table", "unit/rules"]),
    ("optim/rules/lion.cuh", "*m = average(*m, g, hyper.one_minus_beta2);", "*m = average(*m, g, hyper.one_minus_beta1);",
     "rules_against_double", ["optim/table", "unit/rules"]),
    ("optim/rows.cuh", "exact_fma(one_minus_beta, exact_fma(sum, inverse, -v), v)",
     "exact_fma(one_minus_beta, exact_fma(sum, inverse, v), v)", "rows_", ["optim/rows"]),
    ("optim/override.cu", "(*p == '?' || *p == *name)", "(*p == *name)", "override_patterns", ["optim/override"]),
    ("optim/convert.cu", "const bool same = from.nearest == to.place.nearest;", "const bool same = true;", "convert_",
     ["optim/convert"]),
    ("optim/plan.cu", "return element < plan->begin ? plan->begin :", "return", "every_shard", ["optim/plan"]),
    # data
    ("data/checkpoint.c", "bool whole = state && covered > 0 &&", "bool whole = state ||", "cli_damaged_checkpoint",
     ["data/checkpoint"]),
    ("data/loader.c", "loader->sequence / loader->windows, window,", "0, window,", "data_loader_order", ["data/loader"]),
    ("data/tokenizer.c", "if (merge->joined < 0) *merge =", "if (merge->joined >= 0) *merge =", "tokenizer",
     ["data/tokenizer"]),
    ("data/safetensors.c", "if (!pair || begin > end) {", "if (!pair) {", "data_safetensors_bad", ["data/safetensors"]),
    ("data/files.c", "if (ok && rename(name, path) != 0) {", "if (ok && link(name, path) != 0) {", "data_files",
     ["data/files"]),
    # the trainer
    ("train_gpt2.cu", "loss_mean(m->dev, m->scalars, m->losses, N, !first, share / (float)N);",
     "loss_mean(m->dev, m->scalars, m->losses, N, false, share / (float)N);", "model_", ["test_gpt2"]),
    ("train_gpt2.cu", "if (l < m->recomputed) {", "if (l + 1 < m->recomputed) {", "model_same_result", ["test_gpt2"]),
    ("train_gpt2.cu", "gpt2_backward(m, &a, buckets, B, m->T, first);",
     "gpt2_backward(m, &a, buckets, B, m->T, true);", "model_", ["test_gpt2"]),
]


def make(copy, *words):
    cache = "ccache " if shutil.which("ccache") else ""  # saves compiling again, where it is installed
    command = ["make", "NVCC=", f"CXX={cache}g++", f"CC={cache}gcc", f"-j{os.cpu_count()}", "-s", *words]
    return subprocess.run(command, cwd=copy, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def build(copy, file, objects):
    """Builds the objects that show a fault in `file`. Returns what the compiler says if it fails."""
    result = make(copy, *(f"build/cpu/{name}.o" for name in objects))
    if not result.returncode:
        result = make(copy, "-o", file, "train", "test_gpt2")
    return result.stdout if result.returncode else ""


def found(copy, pattern):
    """Returns the first test that fails, or None."""
    result = subprocess.run(["./test_gpt2", "-k", pattern], cwd=copy, stdout=subprocess.PIPE, text=True)
    failed = re.findall(r"^FAIL +(\S+)", result.stdout, re.M)
    return failed[0] if failed and result.returncode else None


def try_row(copy, row):
    """Tries a row and prints its result. Returns true if a test found the fault."""
    file, find, replacement, pattern, objects = row
    path = os.path.join(copy, file)
    text = open(path).read()
    if text.count(find) != 1:
        print(f"FAIL  {file}: {find!r} occurs {text.count(find)} times", flush=True)
        return False
    paths = [os.path.join(copy, "build/cpu", f"{name}.o") for name in objects]
    kept = [open(name, "rb").read() for name in paths]
    open(path, "w").write(text.replace(find, replacement))
    said = build(copy, file, objects)
    test = None if said else found(copy, pattern)
    open(path, "w").write(text)
    for name, was in zip(paths, kept):
        open(name, "wb").write(was)
    print(f"{'ok   ' if test else 'FAIL '} {file}: {find!r} -> {replacement!r}: {said or test or 'no test fails'}", flush=True)
    return test is not None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", default="")
    parser.add_argument("--copy")
    options = parser.parse_args()
    rows = [row for row in ROWS if options.k in row[0] or options.k in row[3]]
    copy = options.copy or os.path.join(tempfile.mkdtemp(prefix="nibble-mutations-"), "tree")
    if not os.path.exists(copy):
        shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(".git", "runs", ".venv"))
    said = make(copy, "train", "test_gpt2")
    if said.returncode:
        sys.exit(said.stdout)
    passed = sum(try_row(copy, row) for row in rows)
    if not options.copy:
        shutil.rmtree(os.path.dirname(copy))
    print(f"{passed} passed, {len(rows) - passed} failed")
    return passed < len(rows)


if __name__ == "__main__":
    sys.exit(main())
