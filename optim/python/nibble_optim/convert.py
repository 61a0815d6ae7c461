"""Converts between a torch optimizer's states and ./train's optimizer.safetensors, to the bit. Formats, rule and
overrides must be the same on both sides; names of arrays and sizes say which array is which."""
import json
import re
import struct

import torch


def _read(path):
    """Returns the arrays of a safetensors file as bytes: {name: (dtype, tensor)}."""
    with open(path, "rb") as file:
        size = struct.unpack("<Q", file.read(8))[0]
        header = json.loads(file.read(size))
        data = bytearray(file.read())
    return {name: (entry["dtype"], torch.frombuffer(data, dtype=torch.uint8)[slice(*entry["data_offsets"])])
            for name, entry in header.items() if name != "__metadata__"}


def _write(path, arrays):
    header, at = {}, 0
    for name, (dtype, data) in arrays.items():
        elements = data.numel() * 8 // int(re.search(r"\d+", dtype)[0])  # BF16 has 16 bits, F8_E4M3 has 8
        header[name] = {"dtype": dtype, "shape": [elements], "data_offsets": [at, at + data.numel()]}
        at += data.numel()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, data in arrays.values():
            file.write(data.numpy().tobytes())


def _single(optimizer):
    """Returns the optimizer's part. Refuses several, shards, parameters that do not come in ./train's order, and matrices
    whose rows are ./train's columns."""
    if len(optimizer._parts) != 1:
        raise ValueError(f"the optimizer has {len(optimizer._parts)} parts (parameters of several types or formats, or "
                         "none stepped yet), and ./train has one")
    part = optimizer._parts[0]
    if part.shares or any(count >= 0 for *_, count in part.tensors):
        raise ValueError("the parameters are sharded; gather them first")
    shapes, d = [(rows, cols) for _, rows, cols, *_ in part.tensors], part.tensors[0][2]
    block = [(1, d), (1, d), (3 * d, d), (1, 3 * d), (d, d), (1, d), (1, d), (1, d), (4 * d, d), (1, 4 * d), (d, 4 * d),
             (1, d)]
    wanted = shapes[:2] + block * ((len(shapes) - 4) // 12) + [(1, d)] * 2
    if len(shapes) < 4 or len(shapes) != len(wanted):
        raise ValueError(f"the optimizer has {len(shapes)} parameters, and ./train's GPT-2 has 4 and 12 for each layer")
    for (name, *_), shape, want in zip(part.tensors, shapes, wanted):
        if shape == want[::-1] != want:
            raise ValueError(f"{name} is {shape[0]} x {shape[1]}, inputs by outputs, as transformers' Conv1D has it, "
                             "and ./train has outputs by inputs; make the optimizer with "
                             'transposed="c_attn.weight|c_proj.weight|c_fc.weight"')
        if shape != want:
            raise ValueError(f"{name} is {shape[0]} x {shape[1]}, and ./train has {want[0]} x {want[1]} in its place; "
                             "give the parameters in ./train's order")
    return part


def to_train(optimizer, path):
    """Writes optimizer.safetensors for a checkpoint of ./train. Primary weights of fp32 and bf16 belong to the
    checkpoint's model.safetensors. The parameters must come in the order of ./train's tensors."""
    part = _single(optimizer)
    _write(path, {name: (dtype, part.bytes_at(address, size).cpu())
                  for name, dtype, address, size, *_ in part.handle.states()})


def from_train(optimizer, path, step):
    """Fills the states of an optimizer from optimizer.safetensors. The optimizer must have been stepped or have loaded
    states before; `step` is the checkpoint's."""
    part = _single(optimizer)
    saved, arrays = _read(path), list(part.handle.states())
    found = {name: (dtype, data.numel()) for name, (dtype, data) in saved.items()}
    wanted = {name: (dtype, size) for name, dtype, _, size, *_ in arrays}
    for name in [name for name in {**wanted, **found} if found.get(name) != wanted.get(name)]:
        raise ValueError(f"{path}: {name} has type and bytes {found.get(name)}, and {part.handle.describe()} with these "
                         f"parameters has {wanted.get(name)}")
    for name, _, address, size, *_ in arrays:
        part.bytes_at(address, size).copy_(saved[name][1])
    part.publish(optimizer.state, [step] * len(part.params))
    for group in optimizer.param_groups:
        group["steps"] = step
    part.handle.loaded()
