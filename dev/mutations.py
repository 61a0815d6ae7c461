"""Checks that the tests find faults. Each row below puts one fault into the product, in a copy of this tree that is
built for the CPU; a test that the row's pattern picks must fail. The last line is `N passed, N failed`; a fault that
no test finds counts as failed.

    python3 dev/mutations.py [-k SUBSTRING] [--sample N] [--copy FOLDER]

-k picks rows by file or pattern. --sample takes N of them, always the same. --copy keeps the copy and its objects for
the next run. About half a minute a row.
"""

import argparse
import os
import random
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
    ("kernels/gelu.cuh", "GELU_CUBIC = 0.044715f", "GELU_CUBIC = 0.0447f", "model_golden", ["test_gpt2"]),
    ("kernels/layernorm.cuh", "LAYERNORM_EPS = 1e-5f", "LAYERNORM_EPS = 1e-4f", "model_golden", ["test_gpt2"]),
    ("kernels/attention.cuh", "q + 2 * (int64_t)C, stride, i + 1,", "q + 2 * (int64_t)C, stride, i,",
     "model_golden", ["test_gpt2"]),
    ("kernels/ranks/shard.cuh", "for (int r = 0; r < c.world; r++) {", "for (int r = 1; r < c.world; r++) {", "multi_losses",
     ["train_gpt2"]),
    ("kernels/ranks/shard.cuh", "splits && !s->first}", "splits}", "multi_losses", ["train_gpt2"]),
    ("kernels/ranks/slices.cuh", "return own[i].at + (tile - own[i].tile);", "return own[i].at;", "slices_owners",
     ["unit/slices"]),
    ("kernels/ranks/rendezvous.c", "&& proof == rendezvous_proof(launch, &other, own);", ";", "doors_", ["kernels/ranks/rendezvous"]),
    ("kernels/embedding.cuh", "positions[i] : i % T) * C;", "positions[i] : i / T) * C;",
     "model_golden", ["test_gpt2"]),
    ("kernels/norm.cuh", "if (c.by == CLIP_LAST && (double)*c.last > length)", "if (c.by == CLIP_LAST)", "norm",
     ["unit/norm"]),
    ("kernels/cpu_gemm.h", "k0 == 0 && !gemm->accumulate;", "k0 == 0;", "cpu_gemm", ["test_gpt2", "unit/kernels"]),
    ("kernels/classifier.cuh", "chain[v - whole] += cpu_exp(row[v] - maximum);",
     "chain[v - whole] = cpu_exp(row[v] - maximum);", "model_golden", ["test_gpt2"]),
    ("kernels/layer_ring.cuh", "return (int)(item % r->slots);", "return 0;", "cli_resume_offload",
     ["optim/model/arena", "optim/model/decode", "optim/model/offload", "optim/model/step", "train_gpt2"]),
    ("kernels/ranks/shard.cuh", "SCALAR_STOP, 3, SHARD_MAX", "SCALAR_STOP, 2, SHARD_MAX", "multi_bad", ["train_gpt2"]),
    # optim
    ("optim/formats/bf16.cuh", "bits + 0x7fffu + (bits >> 16 & 1u)", "bits + 0x8000u", "optim_bf16", ["unit/optim"]),
    ("optim/noise.cuh", "c[2] = high0 ^ c[3] ^ key1;", "c[2] = high0 ^ c[3] ^ key0;", "optim_philox", ["unit/optim"]),
    ("optim/rules/hyper.cuh", "return exact_fma(weight, exact_add(x, -a), a);",
     "return exact_fma(weight, x, a);", "laws_oracle", ["optim/table"]),
    ("optim/rules/lion.cuh", "*m = average(*m, g, hyper.one_minus_beta2);", "*m = average(*m, g, hyper.one_minus_beta1);",
     "laws_oracle", ["optim/table"]),
    ("optim/rows/rows.cuh", "exact_fma(one_minus_beta, exact_fma(sum, inverse, -v), v)",
     "exact_fma(one_minus_beta, exact_fma(sum, inverse, v), v)", "laws_oracle", ["optim/rows/rows"]),
    ("optim/override.cu", "(*p == '?' || *p == *name)", "(*p == *name)", "override_patterns", ["optim/override"]),
    ("optim/checkpoint/convert.cu", "side.format = side.place.nearest;", "side.format = side.place.format;", "convert_",
     ["optim/checkpoint/convert"]),
    ("optim/plan.cu", "low > begin ? low - begin : 0, (high", "0, (high", "laws_shards", ["optim/plan"]),
    ("optim/rules/adamw.cuh", "average_square(*v, g, hyper.one_minus_beta2)", "average_square(*v, g, hyper.one_minus_beta1)",
     "laws_oracle", ["optim/table"]),
    ("optim/rules/nadamw.cuh", "return nesterov(hyper, g, AdamW::moments(hyper, g, p, m, v, slow));",
     "return AdamW::moments(hyper, g, p, m, v, slow);", "laws_oracle", ["optim/table"]),
    ("optim/rules/ademamix.cuh", "exact_fma(hyper.alpha, *slow, *m)", "exact_fma(-hyper.alpha, *slow, *m)", "laws_oracle",
     ["optim/table"]),
    ("optim/rules/came.cuh", "exact_mul(*m, *second)", "exact_mul(*second, *second)", "laws_oracle", ["optim/table"]),
    ("optim/rules/rmnp.cuh", "exact_mul(nesterov(hyper, g, *m), *v)", "exact_mul(*m, *v)", "laws_oracle", ["optim/table"]),
    ("optim/constants.h", "double done = (double)step / (double)from.ramp;",
     "double done = (double)(step - 1) / (double)from.ramp;", "laws_oracle", ["optim/step"]),
    ("optim/constants.h", "from.independent ? rate / (double)from.lr_max\n", "from.independent ? rate\n",
     "laws_oracle", ["optim/step"]),
    ("optim/rows/rows.cuh", "RESIDUAL_EPS = 1e-16f", "RESIDUAL_EPS = 1e-8f", "laws_oracle", ["optim/rows/rows"]),
    ("optim/rows/rows.cu", "(float)config->eps2", "(float)config->eps2 * 0.1f", "laws_oracle", ["optim/rows/rows"]),
    ("optim/rows/rows.cuh", "is_finite(norm) && last > MIN_ROOT && norm > most", "is_finite(norm) && norm > most",
     "limit_growth", ["unit/rows"]),
    ("optim/matrix/low_rank.cu", "POWER_ITERATIONS = 2", "POWER_ITERATIONS = 1", "laws_oracle", ["optim/matrix/low_rank"]),
    ("optim/matrix/low_rank.cu", "(own_number(low->step) - 1) % low_gap(config) == 0", "own_number(low->step) % low_gap(config) == 0",
     "laws_oracle", ["optim/matrix/low_rank"]),
    ("optim/matrix/matrix.cu", "float factor = 0.2f * sqrtf((float)length);",
     "float factor = 0.25f * sqrtf((float)length);", "laws_oracle", ["optim/matrix/matrix"]),
    ("optim/formats/scales.cuh", "bits + 0x7fffffu) >> 23", "bits + 0x400000u) >> 23", "formats_", ["unit/formats"]),
    ("optim/formats/uniform.cuh", "part * (0.5f - (float)FIRST - (float)lowest)", "part * (0.499f - (float)FIRST - (float)lowest)",
     "formats_", ["unit/formats"]),
    ("optim/model/decode.cu", "part % 2 * layer", "0 * layer", "decoded_", ["optim/model/decode"]),
    ("optim/placed.cu", "const int64_t from = i * TILE_ELEMENTS - placed->head,", "const int64_t from = i * TILE_ELEMENTS,",
     "placed_", ["optim/placed"]),
    ("optim/plan.cu", "lr == 1.0 && decay == plan->group[1].decay", "decay == plan->group[1].decay", "laws_oracle", ["optim/plan"]),
    # data
    ("data/schedule.c", "o->lr * (double)(step + 1) / (double)o->warmup", "o->lr * (double)step / (double)o->warmup",
     "learning_rate", ["data/schedule"]),
    ("data/schedule.c", "1.0 - sqrt(done)", "1.0 - done", "learning_rate", ["data/schedule"]),
    ("data/evaluation.c", "|| example->answer >= example->rows", "|| example->answer > example->rows", "evaluation",
     ["data/evaluation"]),
    ("data/checkpoint.c", "bool whole = seal && crc32c(0, text,", "bool whole = seal || crc32c(0, text,", "cli_damaged_checkpoint",
     ["data/checkpoint"]),
    ("data/loader.c", "shuffle_index(loader->seed, n / windows, n % windows, windows)", "shuffle_index(loader->seed, 0, n % windows, windows)", "data_loader_order", ["data/loader"]),
    ("data/tokenizer.c", "tokenizer->token[joined].rank == 0) tokenizer->token[joined].rank = rank;", "true) tokenizer->token[joined].rank = 100000 - rank;", "corpus_every",
     ["data/tokenizer"]),
    ("data/safetensors.c", "return follows && at ==", "return at ==", "data_malformed", ["data/safetensors"]),
    ("data/files.c", "if (ok && rename(name, path) != 0) {", "if (ok && link(name, path) != 0) {", "data_files",
     ["data/files"]),
    ("data/loader.c", "while (file < end && within >= (file->tokens - 1) / T) within",
     "while (file < end && within >= file->tokens / T) within", "data_loader_files", ["data/loader"]),
    ("data/report.c", "known ? loss / log(2.0) / bytes_per_token : NAN", "known ? loss * log(2.0) / bytes_per_token : NAN",
     "cli_run", ["data/report"]),
    ("data/tokenizer.c", "while (point >= *run >> 2) point", "while (point > *run >> 2) point", "corpus_every", ["data/tokenizer"]),
    # the trainer
    ("train_gpt2.cu", "loss_mean(m->dev, m->scalars, m->losses, a.N, !first, share / (float)a.N);",
     "loss_mean(m->dev, m->scalars, m->losses, a.N, false, share / (float)a.N);", "model_", ["test_gpt2"]),
    ("train_gpt2.cu", "if (l < m->recomputed) {", "if (l + 1 < m->recomputed) {", "model_same_result", ["test_gpt2"]),
    ("train_gpt2.cu", "a.adds = !first && !shard_splits(m->arena.shard, SHARD_GRADS);", "a.adds = false;", "model_",
     ["test_gpt2"]),
]


def make(copy, *words):
    cache = "ccache " if shutil.which("ccache") else ""  # saves compiling again, where it is installed
    compiles = f"COMPILE={cache}$(CXX) -x c++ $(CXXFLAGS) $(SANITIZERS)"
    command = ["make", "NVCC=", compiles, f"CC={cache}gcc", f"-j{os.cpu_count()}", "-s", *words]
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
    parser.add_argument("--sample", type=int)
    parser.add_argument("--copy")
    options = parser.parse_args()
    stale = [row[:2] for row in ROWS if open(os.path.join(ROOT, row[0])).read().count(row[1]) != 1]
    if stale:
        sys.exit(f"mutations: these texts do not occur once: {stale}")
    rows = [row for row in ROWS if options.k in row[0] or options.k in row[3]]
    if options.sample:
        rows = random.Random(43).sample(rows, min(options.sample, len(rows)))
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
