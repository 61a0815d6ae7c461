"""Trains a small GPT in torch on a text's bytes with nibble_optim or, to compare, with torch's AdamW or torchao's.

    python3 dev/examples/train_torch.py --optimizer adamw8 [--data FILE] [--steps 300] [--run runs/adamw8]

--optimizer: torch, torchao, or a preset of nibble_optim (adamw32, adamw8, adamw4l, ...). Weights are fp32 for torch and
torchao and bf16 for the presets. The text is this repository's sources unless --data names another. --run writes a
log.jsonl, which `python3 dev/plot.py RUN...` draws."""
import argparse
import json
import pathlib
import sys
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "optim" / "python"))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, layers, width, heads, length, vocabulary=256):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.h = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        for name, p in self.named_parameters():
            residual = name.endswith(("c_proj.weight", "mlp.2.weight"))
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02 / (2 * layers) ** 0.5 if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe.weight[:tokens.shape[1]]
        for block in self.h:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight).float()
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def make_optimizer(name, model, lr):
    groups = [{"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
              {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0}]
    if name == "torch":
        return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
    if name == "torchao":
        from torchao.optim import AdamW8bit
        return AdamW8bit(groups, lr=lr, betas=(0.9, 0.95))
    from nibble_optim import Optimizer
    return Optimizer(groups, preset=name, lr=lr, betas=(0.9, 0.95), seed=1)


def held(tensor):
    """Returns bytes held; torchao's states are tensors that are made of others."""
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(held(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return tensor.numel() * tensor.element_size()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", default="adamw8")
    parser.add_argument("--data", default="")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--run", default="")
    a = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    files = [pathlib.Path(a.data)] if a.data else sorted(ROOT.glob("*/*.c*")) + [ROOT / "train_gpt2.cu"]
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    cut = len(text) * 19 // 20  # the last twentieth validates
    torch.manual_seed(1)
    model = GPT(a.layers, a.width, max(1, a.width // 64), a.length).to(device)
    if a.optimizer not in ("torch", "torchao"):
        model = model.bfloat16()
    optimizer = make_optimizer(a.optimizer, model, a.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min((i + 1) / 20, 1.1 - i / a.steps))
    draw = torch.Generator().manual_seed(2)

    def batch(begin, end, fixed=None):
        source = draw if fixed is None else torch.Generator().manual_seed(fixed)
        at = torch.randint(begin, end - a.length - 1, (a.batch, 1), generator=source) + torch.arange(a.length + 1)
        return text[at[:, :-1]].to(device), text[at[:, 1:]].to(device)

    if a.run:
        pathlib.Path(a.run).mkdir(parents=True, exist_ok=True)
    log = open(pathlib.Path(a.run, "log.jsonl"), "w") if a.run else None

    def record(kind, step, loss):
        if log:
            tokens, seconds = step * a.batch * a.length, time.time() - begin
            print(json.dumps(dict(type=kind, step=step, tokens=tokens, time_s=seconds, loss=loss)), file=log)

    def validate(step):
        with torch.no_grad(), torch.autocast(device, torch.bfloat16):
            loss = sum(model(*batch(cut, len(text), fixed)).item() for fixed in range(20)) / 20
        record("val", step, loss)
        return loss

    begin = time.time()
    for step in range(1, a.steps + 1):
        with torch.autocast(device, torch.bfloat16):
            loss = model(*batch(0, cut))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        record("train", step, loss.item())
        if step % 20 == 0 or step == 1:
            print(f"step {step:5}  loss {loss.item():.4f}  {time.time() - begin:.1f} s", flush=True)
        if step % max(a.steps // 10, 1) == 0 or step == a.steps:
            val = validate(step)
    states = sum(held(v) for state in optimizer.state.values() for v in state.values() if torch.is_tensor(v))
    weights = sum(held(p) for p in model.parameters())
    most = f", most in use {torch.cuda.max_memory_allocated() / 1e6:.0f} MB" if device == "cuda" else ""
    print(f"{a.optimizer}: validation {val:.4f} nats a byte, weights {weights / 1e6:.2f} MB, states "
          f"{states / 1e6:.2f} MB{most}")


if __name__ == "__main__":
    main()
