#!/usr/bin/env python3
"""Writes peers.safetensors: what other low-bit optimizers store of given inputs, computed by their code on the CPU.

    python3 -m venv /tmp/peers && /tmp/peers/bin/pip install -r dev/reference/requirements-peers.txt
    /tmp/peers/bin/python dev/reference/make_peers.py [-o dev/reference/peers.safetensors]

dev/unit/peers.cu loads the file and compares. The same command writes the same bytes; versions are in the metadata.
What runs: torchao eagerly (torch.compile would contract products and sums, differently on each machine), bitsandbytes
with the PyTorch form of its quantiser (exact_quantiser says why), FlashOptim's Triton kernels in Triton's interpreter.

Contents:
    map.<format>              F32  the peer's decoding of each code with scale 1
    input.<set>               F32  numbers to be stored: m, and the roots of v, which every program squares in float32
    <peer>.<format>.<set>.codes, .scales         their storage, in the peer's own types and packing
"""

import argparse
import importlib.metadata
import os
import sys
import warnings

os.environ["TRITON_INTERPRET"] = "1"
os.environ["ATEN_CPU_CAPABILITY"] = "default"  # one instruction set, so that other machines write the same bits

import numpy as np
import torch
from safetensors.torch import save

import bitsandbytes
import flashoptim.optimizers as flashoptim
import triton.language
import triton.runtime.interpreter as interpreter
from torchao.optim.subclass_4bit import OptimState4bit
from torchao.optim.subclass_8bit import OptimState8bit
from torchao.optim.subclass_fp8 import OptimStateFp8

class Interpreted:
    """Stands for what Triton's interpreter lacks of a GPU: two functions of libdevice, and bf16 rounded to nearest.

    The interpreter cuts off the lower bits of a float that becomes a bf16; a GPU's conversion rounds, ties to even.
    """

    @staticmethod
    def copysign(a, b):
        return triton.language.where(b < 0, -a, a)

    @staticmethod
    def pow(base, exponent):
        return base ** int(exponent.handle.data.item())

    cut = staticmethod(interpreter._convert_float)

    @staticmethod
    def convert(x, source, target, rounding):
        if (source, target) != (triton.language.float32, triton.language.bfloat16):
            return Interpreted.cut(x, source, target, rounding)
        return torch.from_numpy(x.copy()).bfloat16().view(torch.uint16).numpy()


def prepare():
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.compiler.set_stance("force_eager")
    interpreter._convert_float = Interpreted.convert
    flashoptim.libdevice = Interpreted
    flashoptim._get_sm_count = lambda device=None: 1
    for kernel in (flashoptim._triton_quantize_kernel, flashoptim._triton_dequantize_kernel):
        kernel.configs = kernel.configs[:1]  # nothing to tune


def exact_quantiser(x, code, blocksize):
    """Runs bitsandbytes' quantiser in PyTorch, which it uses on devices without a kernel of its own.

    Its CPU kernel looks y up in a table of 2^16 equal cells, so that many a |y| below 1e-4 lands on a wrong level, 1e-8
    on 2.1e-5; its CUDA kernels search the levels, as this does.
    """
    kernel = torch.library.get_kernel("bitsandbytes::quantize_blockwise", "CUDA")
    return kernel.call_boxed(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), x, code, blocksize)


# What each peer stores of a tensor in one format: codes, scales. ------------------------------------------------------


def torchao_store(format, x):
    if format in ("dyn8", "udyn8"):
        state = OptimState8bit.zeros(x.shape, format == "dyn8", 256)
    elif format in ("de4", "lin4"):
        state = OptimState4bit.zeros(x.shape, format == "de4", 128)
    else:
        state = OptimStateFp8.zeros(x.shape, 256)
    state.copy_(x)
    return state.codes.view(torch.uint8), state.scale


def bitsandbytes_store(format, x):
    if format == "nf4":
        codes, state = bitsandbytes.functional.quantize_4bit(x, quant_type="nf4", blocksize=64)
        return codes.flatten(), state.absmax
    code = bitsandbytes.functional.create_dynamic_map(signed=format == "dyn8")
    return exact_quantiser(x, code, 256)


def flashoptim_store(format, x):
    root = format == "sqrt8"
    return flashoptim.quantize(x, signed=not root, sqrt=root, softsign=not root)


STORE = {"torchao": torchao_store, "bitsandbytes": bitsandbytes_store, "flashoptim": flashoptim_store}
FORMATS = {  # format: (peers, block)
    "dyn8": (("torchao", "bitsandbytes"), 256),
    "udyn8": (("torchao", "bitsandbytes"), 256),
    "de4": (("torchao",), 128),
    "lin4": (("torchao",), 128),
    "e4m3": (("torchao",), 256),
    "nf4": (("bitsandbytes",), 64),
    "soft8": (("flashoptim",), 32),
    "sqrt8": (("flashoptim",), 32),
}
UNSIGNED = ("udyn8", "lin4", "sqrt8")


def maps():
    """Returns the value of each code, by the peers' own decoding with scale 1."""
    bytes = torch.arange(256, dtype=torch.uint8)
    one = torch.ones(8, dtype=torch.float16)
    return {
        "dyn8": OptimState8bit.zeros((256,), True, 256).qmap,
        "udyn8": OptimState8bit.zeros((256,), False, 256).qmap,
        "dyn8.bitsandbytes": bitsandbytes.functional.create_dynamic_map(True),
        "udyn8.bitsandbytes": bitsandbytes.functional.create_dynamic_map(False),
        "de4": OptimState4bit.zeros((128,), True, 128).qmap,
        "lin4": OptimState4bit.zeros((128,), False, 128).qmap,
        "e4m3": bytes.view(torch.float8_e4m3fn).float(),
        "nf4": bitsandbytes.functional.get_4bit_type("nf4", device="cpu"),
        "soft8": flashoptim.dequantize(bytes.view(torch.int8), one),
        "sqrt8": flashoptim.dequantize(bytes, one, signed=False, sqrt=True, softsign=False),
    }


# Inputs. --------------------------------------------------------------------------------------------------------------


def numbers(random, decades, count):
    """Returns normal numbers whose sizes are spread evenly over so many decades below 1."""
    return random.standard_normal(count) * 10.0 ** random.uniform(-decades, 0, count)


def blocks(random):
    """Returns blocks of 256 that each exercise a scale, and a tail."""
    negative = numbers(random, 7, 256) * 0.003
    negative[17] = -0.0371  # the largest is negative
    sparse = numbers(random, 5, 256) * 20.0
    sparse[random.random(256) < 0.4] = 0.0
    plain = random.standard_normal(256) * 1e-3
    tiny = numbers(random, 2, 256)
    tiny *= 4e-13 / np.abs(tiny).max()
    tail = numbers(random, 3, 100)
    return np.concatenate([negative, sparse, np.zeros(256), tiny, plain, tail]).astype(np.float32)


def stored_inputs(random):
    sets = {"m": blocks(random), "v": np.abs(blocks(random))}
    sets["v"][:256] *= 1e-2
    return sets


def store_all(tensors, sets):
    for format, (peers, block) in FORMATS.items():
        names = ["v" if format in UNSIGNED else "m"] + (["v"] if format == "e4m3" else [])
        for name in names:
            x = torch.from_numpy(sets[name])
            x = x * x if name == "v" else x
            for peer in peers:
                whole = len(x) if peer != "torchao" else len(x) // block * block  # torchao takes no tail
                codes, scales = STORE[peer](format, x[:whole].contiguous())
                tensors[f"{peer}.{format}.{name}.codes"] = codes
                tensors[f"{peer}.{format}.{name}.scales"] = scales


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    here = os.path.dirname(os.path.abspath(__file__))
    parser.add_argument("-o", "--output", default=os.path.join(here, "peers.safetensors"))
    options = parser.parse_args()
    prepare()
    random = np.random.Generator(np.random.Philox(20240520))

    map = {name: level.float().numpy() for name, level in maps().items()}
    tensors = {"map." + name: level for name, level in map.items()}
    sets = stored_inputs(random)
    tensors.update({"input." + name: values for name, values in sets.items()})
    store_all(tensors, sets)

    packages = ("torch", "triton", "torchao", "bitsandbytes", "flashoptim", "numpy")
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)
    data = {name: torch.as_tensor(tensor).contiguous() for name, tensor in tensors.items()}
    data = save(data, metadata={"made by": versions})  # one entry: several are written in any order
    with open(options.output, "wb") as file:
        file.write(data)
    print(f"{options.output}: {len(data):,} bytes, {len(tensors)} tensors")
    print(f"  {versions}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
