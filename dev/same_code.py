#!/usr/bin/env python3
"""Compares the machine code of two builds: equal code has equal bits and equal speed. Needs no GPU.

    python3 dev/same_code.py OLD/build NEW/build [--rename OLD=NEW ...]

Compares each kernel in the objects of ./train, and the kernels below, which NVRTC compiles for sm_90a from the source
that each build's optim/jit.o holds. Instructions with their scheduling, registers, stack and shared memory count; names
do not, so a kernel that was only renamed is equal. --rename changes the names of types in the list below for a build
that does not know them. Exit status 1: some code has no equal in the other build; it is listed.
"""
import argparse
import collections
import ctypes
import glob
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# The step's kernels of presets and others: kernel, rule, weights, m, v, copy, gradients.
SHORT = {"F": "Elementwise<Fp32, NEAREST>", "BF": "Elementwise<Bf16, NEAREST>", "BSR": "Elementwise<Bf16, STOCHASTIC>",
         "MASTER": "WithMaster<Elementwise<Bf16, NEAREST>>", "SOFT": "Blocks<Soft8, 32, ScaleFp32, NEAREST>",
         "SQRT": "Blocks<Sqrt8, 32, ScaleFp32, NEAREST>", "DYN": "Blocks<Dyn8, 256, ScaleFp32, NEAREST>",
         "UDYN": "Blocks<Udyn8, 256, ScaleFp32, NEAREST>", "E4SR": "Blocks<E4m3, 256, ScaleFp32, STOCHASTIC>",
         "DE4D": "Blocks<De4, 32, ScaleDq8, NEAREST>", "SQ4D": "Blocks<Sqrt4, 32, ScaleDq8, NEAREST>",
         "LIN4": "Blocks<Lin4, 64, ScaleFp32, NEAREST>", "TENSOR": "Feedback<Spans<E4m3, SPAN_TENSOR, STOCHASTIC, ScaleE8m0>>"}
STEPS = [text.split("|") for text in """
step|AdamW|MASTER|F|F|None|F
step|AdamW|MASTER|F|F|None|BF
step|AdamW|BSR|DYN|UDYN|None|BF
step|AdamW|Feedback<BSR>|E4SR|UDYN|None|BF
step|AdamW|BSR|SOFT|SQRT|None|F
step|AdamW|BSR|Blocks<De4, 128, ScaleFp32, NEAREST>|Blocks<Lin4, 128, ScaleFp32, NEAREST>|None|BF
step|AdamW|BSR|DE4D|SQ4D|None|BF
step|AdamW|BSR|DE4D|LIN4|None|BF
step|AdamW|Split<int8_t, NEAREST>|SOFT|SQRT|None|BF
step|AdamW|Feedback<Blocks<E4m3, 128, ScaleE8m0, STOCHASTIC>>|E4SR|SQRT|None|BF
step|AdamW|TENSOR|E4SR|SQRT|None|BF
measure|AdamW|TENSOR|E4SR|SQRT|None|BF
step|AdamW|Blocks<Lin8OfPowers, 32, ScaleE8m0, STOCHASTIC>|DE4D|SQ4D|None|BF
step|AdamW|Kahan|BSR|AdaLog8<NEAREST>|None|BF
step|AdamW|MASTER|Spans<De4, SPAN_RANK1, NEAREST>|Spans<Lin4, SPAN_RANK1, NEAREST>|None|F
measure|AdamW|MASTER|Spans<De4, SPAN_RANK1, NEAREST>|Spans<Lin4, SPAN_RANK1, NEAREST>|None|F
step|NAdamW|Split<int16_t, NEAREST>|Blocks<E2m1, 32, ScaleFp32, NEAREST>|Blocks<Ulin8, 256, ScaleFp32, NEAREST>|None|F
step|Lion|Blocks<E5m2, 128, ScaleE8m0, STOCHASTIC>|Blocks<Nf4, 64, ScaleFp32, NEAREST>|None|None|BF
step|AdEMAMix|WithMaster<Elementwise<Fp16, NEAREST>>|SOFT|SQRT|None|F
step|AdamMini|BSR|SOFT|None|None|BF
sums|AdamMini|BSR|SOFT|None|None|BF
step|Adafactor|BSR|SOFT|None|None|BF
sums|Adafactor|BSR|SOFT|None|None|BF
step|Came|BSR|SOFT|None|None|BF
sums|Came|BSR|SOFT|None|None|BF
step|Rmnp|BSR|DE4D|None|None|BF
sums|Rmnp|BSR|DE4D|None|None|BF
sums|Scaled<AdamW>|BSR|DYN|UDYN|None|BF
step|Muon|F|SOFT|None|None|F
step|LowRank<MATRIX_GALORE>|F|DYN|UDYN|None|F
step|MatrixApply|BSR|None|None|None|F""".strip().split("\n")]


CUOBJDUMP = os.environ.get("CUOBJDUMP") or shutil.which("cuobjdump") or "/usr/local/cuda/bin/cuobjdump"


def kernels(path):
    """Returns (name, code, instructions) of each kernel in an object or cubin; the code is a checksum."""
    usage = subprocess.run([CUOBJDUMP, "-res-usage", path], capture_output=True, text=True).stdout
    resources = dict(re.findall(r"Function (\S+):\s+(REG:\d+ STACK:\d+ SHARED:\d+)", usage))
    found, name, words = [], None, []
    with subprocess.Popen([CUOBJDUMP, "-sass", path], stdout=subprocess.PIPE, text=True) as dump:
        for line in [*dump.stdout, "Function : end"]:
            if "Function : " in line:
                if name:
                    text = " ".join([resources.get(name, ""), *words])
                    found.append((name, hashlib.blake2b(text.encode(), digest_size=12).hexdigest(), len(words) // 2))
                name, words = line.split("Function : ")[1].strip(), []
            elif name:
                words += re.findall(r"/\* (0x[0-9a-f]{16}) \*/", line)
    return found


class Nvrtc:
    OPTIONS = ["--std=c++17", "-fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true", "--disable-warnings",
               "--gpu-architecture=sm_90a", "--no-cache"]  # those of optim/jit.cu

    def __init__(self, build):
        self.library = ctypes.CDLL(os.environ.get("NIBBLE_NVRTC") or "/usr/local/cuda/lib64/libnvrtc.so")
        with tempfile.NamedTemporaryFile() as file:
            subprocess.run(["objcopy", "-O", "binary", "-j", "optim_sources", f"{build}/optim/jit.o", file.name], check=True)
            self.source = re.sub(rb'(?m)^(#include "|#pragma once).*', b"", Path(file.name).read_bytes())

    def compile(self, expression, path):
        """Writes a cubin. Returns whether NVRTC could."""
        program, size = ctypes.c_void_p(), ctypes.c_size_t()
        options = (ctypes.c_char_p * len(self.OPTIONS))(*map(str.encode, self.OPTIONS))
        call = lambda name, *arguments: getattr(self.library, name)(*arguments) == 0
        good = (call("nvrtcCreateProgram", ctypes.byref(program), self.source, b"optim.cu", 0, None, None) and
                call("nvrtcAddNameExpression", program, expression.encode()) and
                call("nvrtcCompileProgram", program, len(options), options) and
                call("nvrtcGetCUBINSize", program, ctypes.byref(size)))
        if good:
            cubin = ctypes.create_string_buffer(size.value)
            good = call("nvrtcGetCUBIN", program, cubin)
            Path(path).write_bytes(cubin.raw)
        self.library.nvrtcDestroyProgram(ctypes.byref(program))
        return good


def step_kernels(build, renames):
    """Returns what kernels() does, of the list above."""
    nvrtc, found = Nvrtc(build), []
    with tempfile.TemporaryDirectory() as folder:
        for kernel, *types in STEPS:
            types = [re.sub(r"\b[A-Z0-9]+\b", lambda word: SHORT.get(word[0], word[0]), text) for text in types]
            plain = f"optim_{kernel}_kernel<{', '.join(types)}>"
            renamed = plain
            for rename in renames:
                renamed = re.sub(rf"\b{re.escape(rename.split('=')[0])}\b", rename.split("=")[1], renamed)
            if nvrtc.compile(plain, f"{folder}/cubin") or (renamed != plain and nvrtc.compile(renamed, f"{folder}/cubin")):
                found += [(plain, *rest) for _, *rest in kernels(f"{folder}/cubin")]
            else:
                found.append((plain, f"does not compile in {build}", 0))
    return found


def compare(what, old, new):
    """Prints what has no equal in the other build. Returns how many kernels have none."""
    counts = [collections.Counter(code for _, code, _ in side) for side in (old, new)]
    missing = []
    for side, other in ((old, counts[1]), (new, counts[0])):
        left = collections.Counter(other)
        missing.append([])
        for name, code, length in side:
            left[code] -= 1
            if left[code] < 0:
                missing[-1].append((name, f"{length} instructions" if length else code))
    names = sorted({name for side in missing for name, _ in side})
    plain = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True).stdout.split("\n")
    for name, shown in zip(names, plain):
        was, now = ([text for other, text in side if other == name] for side in missing)
        print(f"{'changed ' if was and now else 'old only' if was else 'new only'}  {shown}  {' '.join(was)} -> {' '.join(now)}")
    print(f"{what}: {len(old)} and {len(new)} kernels, {'equal' if not names else f'{len(names)} differ'}")
    return len(names)


def main():
    parser = argparse.ArgumentParser(prog="same_code", description=__doc__.split("\n")[0])
    parser.add_argument("builds", nargs=2, metavar="BUILD", help="folders of objects, older one first")
    parser.add_argument("--rename", action="append", default=[], metavar="OLD=NEW", help="a type's name in the other build")
    parser.add_argument("--only", choices=("objects", "steps"))
    options = parser.parse_args()
    if not os.path.exists(CUOBJDUMP):
        sys.exit(f"same_code: error: {CUOBJDUMP} is not there; install the CUDA toolkit's, or set CUOBJDUMP to its path")
    differ = 0
    with ThreadPoolExecutor(2) as pool:
        if options.only != "steps":
            paths = [[path for pattern in ("*.o", "optim/**/*.o") for path in glob.glob(f"{build}/{pattern}", recursive=True)
                      if not path.endswith(("/test_gpt2.o", "/corpus.o"))] for build in options.builds]
            found = [[kernel for part in pool.map(kernels, side) for kernel in part] for side in paths]
            differ += compare("objects", *found)
        if options.only != "objects":
            differ += compare("steps", *pool.map(lambda build: step_kernels(build, options.rename), options.builds))
    return min(differ, 1)


if __name__ == "__main__":
    sys.exit(main())
