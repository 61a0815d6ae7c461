"""Copies of weights in bf16, fp16 or fp8, for models that keep other weights than the optimizer steps."""
import torch

from .part import _local


def _write_fp8(value, copy):
    most = torch.finfo(copy["data"].dtype).max
    amax = copy["amax"].copy_(value.abs().amax() if value.numel() else torch.zeros(()))
    scale = copy.get("scale")
    if scale is None:
        scale = torch.where((amax > 0) & amax.isfinite(), most / amax, 1.0).clamp(max=torch.finfo(torch.float32).max)
    _local(copy["data"]).copy_((value * scale).clamp(-most, most))
    copy["scale_inv"].copy_(1 / scale)


def write_copies(optimizer, copies):
    """After each step writes copies of parameters, in further passes of torch, and now. `copies` maps a parameter to a
    tensor of bf16 or fp16, or for fp8 to a dict: "data", of torch.float8_e4m3fn or float8_e5m2; "amax" and "scale_inv",
    fp32 tensors of one element, which get the largest magnitude and 1 / scale; and "scale", which the caller sets.
    Without "scale" it is the type's largest number over amax. The codes are scale times the value of the fp32 parameter
    or of its master, rounded to nearest and held within the type's range. Returns a handle; its remove() ends this. An
    fp8 copy of a master moves 41 bytes a parameter after the step.

    A step itself writes these bits of bf16 or fp16 to parameters that have a master (weights "bf16+fp32"), and of fp8
    to optimizer.state[p]["weights"] beside bf16 parameters (weights "e4m3/tensor@given+fp32" or "e5m2/..."). amax,
    1 / scale and scale are optimizer.state[p]["weights.scales"]; the caller sets the third number, which steps
    keep. It is there after the first step, which uses 1.
    With bf16 gradients and fp32 states such a step moves 29 bytes a parameter, of which 2 are the bf16 parameter.
    Without "@given" a step first measures amax; the scale is then the type's largest number over amax, up to rounding,
    and the bytes are 43."""
    def value_of(p):
        state = optimizer.state.get(p, {})
        return state["master_param"] if "master_param" in state else _local(p).float()

    @torch.no_grad()
    def write(*_):
        plain = [p for p in copies if not isinstance(copies[p], dict)]
        if plain:  # in one launch for many
            torch._foreach_copy_([_local(copies[p]) for p in plain], list(map(value_of, plain)))
        for p in (p for p in copies if isinstance(copies[p], dict)):
            _write_fp8(value_of(p), copies[p])

    if any(isinstance(copy, dict) and _local(p) is not p for p, copy in copies.items()):
        raise ValueError("write_copies: a DTensor was found for an fp8 copy, whose scale would be its shard's alone; give "
                         "bf16 or fp16 copies")
    write()
    return optimizer.register_step_post_hook(write)
