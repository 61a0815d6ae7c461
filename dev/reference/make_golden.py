#!/usr/bin/env python3
"""Writes golden.safetensors: a small GPT-2, its loss, logits and gradients as PyTorch and transformers compute them.

    pip install -r dev/reference/requirements.txt
    python dev/reference/make_golden.py [-o dev/reference/golden.safetensors]

test_gpt2.cu loads the file and compares. The same command writes the same bytes. Contents (L=2, NH=2, C=128, positions
32, V=250, so that the padding of the vocabulary is tested; head size 64, so that the GPU's kernels can run it):
    transformer.wte.weight, ...   F32  all weights, in the names and orientation of transformers' model.safetensors
    golden.tokens, golden.targets I32  (B=2, T=24)
    golden.loss                   F64  (1) mean cross-entropy over the B*T targets
    golden.logits                 F32  (B, T, V)
    golden.grad_norm              F64  (1) 2-norm of the gradients of all parameters
    grad.<name>                   F32  gradients of the loss, in the parameter's shape; see `stored_gradient`
    golden.losses                 F64  (5) loss before each of 5 AdamW steps on this batch: learning rate 1e-3, betas
                                       0.9 and 0.95, eps 1e-8, weight decay 0.1 on matrices and embeddings only,
                                       gradients clipped to norm 1
Everything but the weights is computed in float64 from the stored float32 weights and is right to the last bits kept;
the script prints how far PyTorch's own float32 is from it, as a measure of what to expect of any float32 program.
"""

import argparse
import copy
import os
import sys

import numpy as np
import torch
from safetensors.numpy import save
from transformers import GPT2Config, GPT2LMHeadModel

B, T = 2, 24
CONFIG = dict(n_layer=2, n_head=2, n_embd=128, n_positions=32, vocab_size=250)


def stored_gradient(name):
    """Returns whether a gradient is stored: all vectors, both embeddings, one layer's matrices but mlp.c_proj.

    What is left out still counts in golden.grad_norm and, through AdamW's steps, in golden.losses.
    """
    return (
        name.endswith((".bias", "wte.weight", "wpe.weight"))
        or ".ln_" in name
        or (".h.0." in name and "mlp.c_proj" not in name)
    )


def make_model(random):
    """Draws weights far from their usual start, so that no bias, gain or residual hides behind a 0 or a 1."""
    config = GPT2Config(
        **CONFIG, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    config._attn_implementation = "eager"
    model = GPT2LMHeadModel(config).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shape = tuple(parameter.shape)
            values = random.standard_normal(shape) * (0.08 if parameter.dim() == 2 else 0.1)
            if ".ln_" in name and name.endswith(".weight"):
                values += 1.0
            parameter.copy_(torch.from_numpy(values.astype(np.float32)))
    return model


def loss_of(model, tokens, targets):
    logits = model(input_ids=tokens).logits
    return torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)), logits


def adamw_losses(model, tokens, targets, steps):
    model = copy.deepcopy(model)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss, _ = loss_of(model, tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return np.array(losses)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    here = os.path.dirname(os.path.abspath(__file__))
    parser.add_argument("-o", "--output", default=os.path.join(here, "golden.safetensors"))
    options = parser.parse_args()
    torch.set_num_threads(1)  # sums in one order
    torch.use_deterministic_algorithms(True)

    random = np.random.Generator(np.random.Philox(20240520))
    model = make_model(random)
    text = torch.from_numpy(random.integers(0, CONFIG["vocab_size"], (B, T + 1)))
    tokens, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()

    tensors = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    exact = copy.deepcopy(model).double()
    loss, logits = loss_of(exact, tokens, targets)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in exact.named_parameters()}
    for name, gradient in gradients.items():
        if stored_gradient(name):
            tensors["grad." + name] = gradient.float().numpy()
    norm = torch.sqrt(sum((gradient**2).sum() for gradient in gradients.values())).item()
    losses = adamw_losses(exact, tokens, targets, 5)
    tensors["golden.tokens"] = tokens.int().numpy()
    tensors["golden.targets"] = targets.int().numpy()
    tensors["golden.loss"] = np.array([loss.item()])
    tensors["golden.logits"] = logits.detach().float().numpy()
    tensors["golden.grad_norm"] = np.array([norm])
    tensors["golden.losses"] = losses
    data = save({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, metadata={"format": "pt"})
    with open(options.output, "wb") as file:
        file.write(data)

    single, _ = loss_of(model, tokens, targets)
    single.backward()
    worst = max(
        ((p.grad.double() - gradients[name]).abs().max() / gradients[name].abs().max()).item()
        for name, p in model.named_parameters()
    )
    print(f"{options.output}: {len(data):,} bytes, {len(tensors)} tensors, torch {torch.__version__}")
    print(f"  loss {loss.item():.9f}, gradient norm {norm:.9f}, AdamW's losses {' '.join(f'{x:.6f}' for x in losses)}")
    print(f"  PyTorch in float32: loss off by {abs(single.item() - loss.item()):.1e}, gradients by {worst:.1e} of the")
    drift = np.abs(adamw_losses(model, tokens, targets, 5) - losses).max()
    print(f"  largest of their tensor, AdamW's losses by {drift:.1e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
