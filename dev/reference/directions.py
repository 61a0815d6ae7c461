"""Along which axes of a subspace does GaLore's AdamW train best? Trains GPT-2 in PyTorch (d6 unless sizes are typed) with
AdamW of the gradient's projection, whose axes are, anew every --gap steps,
    singular  the singular vectors of the gradient ("turned": these, turned by a random rotation)
    ours      the rows that optim/matrix/low_rank.h finds from the last ones ("ours4": in 4 power iterations, not 2)
with the same seeds. Prints validation losses and means over matrices and refreshes: the share of the best energy that the
subspace has; the largest |cosine| of a singular vector with an axis, weighted by energy; and the share of the energy along
an axis that the other axes predict, which is 0 for singular vectors.

    python3 dev/reference/directions.py --data wiki --scale 2"""
import argparse
import glob
import json
import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

parser = argparse.ArgumentParser()
for name, default in dict(data="wiki", ways="singular,turned,ours", seeds="1,2,3", steps=500, rank=96, gap=100, lr=3e-3,
                          scale=1.0, layers=6, channels=384, batch=16, context=1024, vocabulary=50257, device="cuda").items():
    parser.add_argument("--" + name, type=type(default), default=default)
a = parser.parse_args()
D, B, T = a.device, a.batch, a.context


def tokens(name):
    parts = [np.fromfile(file, dtype=np.uint16)[512:] for file in sorted(glob.glob(f"{a.data}/{name}*.bin"))]
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))


def loss_of(model, tokens, at):
    rows = torch.stack([tokens[i:i + T] for i in at]).to(D)
    with torch.autocast(D, torch.bfloat16, enabled=D == "cuda"):
        return model(input_ids=rows, labels=rows).loss


class GaLore:
    def __init__(self, params, way, seed):
        self.params, self.way, self.t, self.found, self.state = params, way, 0, [], [{} for _ in params]
        random = torch.Generator(D).manual_seed(seed)
        self.normal = lambda *shape: torch.randn(*shape, device=D, generator=random)

    def orthonormal(self, y):
        for j in range(len(y)):
            for _ in range(4):
                before = y[j] @ y[j]
                for _ in range(2):
                    y[j] -= (y[:j] @ y[j]) @ y[:j]
                after = y[j] @ y[j]
                if after > 1e-10 * before:
                    break
                y[j] = self.normal(y.shape[1])  # the row was a combination of earlier ones
            y[j] /= after.sqrt()
        return y

    def axes(self, g, q):
        """Returns rows: axes for the columns of g. q: the last ones, or None."""
        square = g.double() @ g.double().T
        values, best = (x.flip(-1)[..., :a.rank] for x in torch.linalg.eigh(square))
        if self.way in ("singular", "turned"):
            turn = torch.linalg.qr(self.normal(a.rank, a.rank))[0] if self.way == "turned" else torch.eye(a.rank, device=D)
            q = turn @ best.T.float()
        else:
            q = self.normal(a.rank, len(g)) if q is None else q
            for _ in range(int(self.way[4:] or 2)):
                q = self.orthonormal((q @ g) @ g.T)
        small, cosines = q.double() @ square @ q.double().T, (q.double() @ best).abs().amax(0)
        alone = 1 / torch.linalg.inv_ex(small)[0].diagonal() / small.diagonal()
        self.found.append(torch.stack([small.trace() / values.sum(), values @ cosines / values.sum(), 1 - alone.mean()]))
        return q

    @torch.no_grad()
    def step(self, lr):
        self.t += 1
        for p, s in zip(self.params, self.state):
            g = p.grad if p.shape[0] <= p.shape[-1] else p.grad.T
            matrix = p.dim() == 2 and min(p.shape) == a.channels and max(p.shape) < 10 * a.channels
            if matrix:
                if (self.t - 1) % a.gap == 0:
                    s["q"] = self.axes(g, s.get("q"))
                g = s["q"] @ g
            if "m" not in s:
                s["m"], s["v"] = torch.zeros_like(g), torch.zeros_like(g)
            s["m"].lerp_(g, 0.1), s["v"].lerp_(g * g, 0.05)
            n = (s["m"] / (1 - 0.9 ** self.t)) / ((s["v"] / (1 - 0.95 ** self.t)).sqrt() + 1e-8)
            if matrix:
                n = a.scale * (s["q"].T @ n)
            p.mul_(1 - lr * (0.1 if p.dim() == 2 else 0)).add_(n if n.shape == p.shape else n.T, alpha=-lr)


def run(way, seed):
    torch.manual_seed(seed)
    model = GPT2LMHeadModel(GPT2Config(n_layer=a.layers, n_embd=a.channels, n_head=a.channels // 64, vocab_size=a.vocabulary,
                                       resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)).to(D)
    galore, draw = GaLore(list(model.parameters()), way, seed), torch.Generator().manual_seed(seed)
    for step in range(a.steps):
        loss_of(model, train, torch.randint(len(train) - T, (B,), generator=draw)).backward()
        torch.nn.utils.clip_grad_norm_(galore.params, 1.0)
        galore.step(a.lr * min(1, (step + 1) / 50) * (1 - step / a.steps))
        model.zero_grad()
    with torch.no_grad():
        loss = np.mean([loss_of(model, val, range(i, i + B * T, T)).item() for i in range(0, len(val) - B * T - 1, B * T)])
    figures = [loss, *torch.stack(galore.found).mean(0).tolist()]
    return zip(("loss", "energy", "near", "predicted"), (round(x, 4) for x in figures))


train, val = tokens("train"), tokens("val")
for seed in map(int, a.seeds.split(",")):
    for way in a.ways.split(","):
        print(json.dumps({"way": way, "seed": seed, **dict(run(way, seed))}), flush=True)
