"""Fine-tunes a GPT-2 that ./train exported, in transformers, with each optimizer of a list, and prints a table as CSV.

    python3 dev/finetune.py --model runs/gpt2/step_00001000 --data my.txt [--lambada lambada_test.jsonl] [--csv FILE]
    python3 dev/finetune.py --vit       # memory and time of a ViT-H on random images; 2x80 checks the script on the CPU

Optimizers are PEERS and presets of nibble_optim; a missing package's row says so. Weights are fp32 for torch and bnb8,
else bf16; products are bf16. The last twentieth of the text validates. State bytes are what the first step leaves (the
CPU counts tensors alone), milliseconds are medians; ms_compile is how much longer the first step of the optimizer took.
A row is written when it is measured; torchao's compile for minutes, so they come last."""
import gc
import json
import sys
import time
from argparse import RawDescriptionHelpFormatter
from statistics import median_high as median

from problem import Parser, Problem, answered
from torch_speed import peer, torch

from examples.train_torch import held  # after torch_speed, which says how to install torch

FP32, BF16, SR = torch.float32, torch.bfloat16, {"bf16_stochastic_round": True}
PEERS = {"torch": (FP32, "torch.optim", "AdamW", {"fused": True}), "bnb8": (FP32, "bitsandbytes.optim", "AdamW8bit"),
         "torch-bf16": (BF16, "torch.optim", "AdamW", {"fused": True}), "flash": (BF16, "flashoptim", "FlashAdamW"),
         "te": (BF16, "transformer_engine.pytorch.optimizers", "FusedAdam", {"master_weights": True}),
         "torchao8": (BF16, "torchao.optim", "AdamW8bit", SR), "torchao4": (BF16, "torchao.optim", "AdamW4bit", SR)}
COLUMNS = ("optimizer parameter_bytes state_bytes peak_bytes ms_step ms_optimizer ms_compile loss_before loss_after "
           "lambada").split()


def text_of(a):
    """Returns functions: of the model, of a batch's loss (negative numbers validate), of the share of right answers."""
    from transformers import AutoTokenizer, GPT2LMHeadModel
    tokenizer, make = AutoTokenizer.from_pretrained(a.model), lambda: GPT2LMHeadModel.from_pretrained(a.model)
    encode = lambda text: tokenizer(text, verbose=False)["input_ids"]
    tokens, length = torch.tensor(encode(open(a.data).read())), min(a.length, make().config.n_positions)
    train, val = tokens.tensor_split([len(tokens) * 19 // 20])
    if len(val) <= length:
        raise Problem(f"--data: {len(val)} tokens validate, and a row takes {length}; give a longer text")

    def loss(model, number):
        its, draw = val if number < 0 else train, torch.Generator().manual_seed(number)
        at = torch.randint(len(its) - length, (a.batch, 1), generator=draw) + torch.arange(length)
        rows = its[at].to(model.device)
        return model(input_ids=rows, labels=rows).loss

    def lambada(model):
        by_length, right = {}, 0  # questions of one length are a batch
        for line in map(json.loads, open(a.lambada) if a.lambada else ()):
            begin, word = (line["context"], line["continuation"]) if "context" in line else line["text"].rsplit(" ", 1)
            ends = encode(" " + word.strip())
            row = (encode(begin.rstrip()) + ends)[-length:]
            by_length.setdefault(len(row), []).append((row, ends))
        for its in by_length.values():
            guesses = model(torch.tensor([row for row, _ in its], device=model.device)).logits.argmax(-1).tolist()
            right += sum(guess[-len(ends) - 1:-1] == ends for guess, (_, ends) in zip(guesses, its))
        return round(right / sum(map(len, by_length.values())), 4) if by_length else ""
    return make, loss, lambada


def images_of(a):
    """Returns the same of a vision transformer of the shape LAYERSxWIDTH, without questions."""
    from transformers import ViTConfig, ViTForImageClassification
    layers, width = map(int, a.vit.split("x"))
    config = ViTConfig(hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // 80, patch_size=14,
                       intermediate_size=4 * width, num_labels=1000)

    def loss(model, number):
        pixels = torch.randn(a.batch, 3, 224, 224, generator=torch.Generator().manual_seed(number)).to(model.device)
        return model(pixel_values=pixels, labels=torch.arange(a.batch, device=model.device)).loss
    return lambda: ViTForImageClassification(config), loss, lambda model: ""


def tuned(name, make_model, loss, lambada, a, device):
    """Fine-tunes with one optimizer and returns a row of the table."""
    dtype, package, kind, *more = PEERS.get(name, (BF16, "nibble_optim", "Optimizer", {"preset": name}))
    gpu, times, warm = device == "cuda", [], max(a.steps // 10, 1)
    wait, allocated = (torch.cuda.synchronize, torch.cuda.memory_allocated) if gpu else (lambda: None, lambda: 0)
    if gpu:
        gc.collect()  # the model of the row before is in a cycle
        torch.cuda.empty_cache(), torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(1)
    loss, lambada = map(torch.autocast(device, BF16), (loss, torch.no_grad()(lambada)))
    model = make_model().to(device, dtype)
    params = list(model.parameters())
    validate = torch.no_grad()(lambda: round(sum(loss(model.eval(), -i).item() for i in range(1, 17)) / 16, 4))
    optimizer, before = peer(package, kind, lr=a.lr, betas=(0.9, 0.99), **dict(*more))(params), validate()
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, (a.steps - step) / max(a.steps - warm, 1)))
    for step in range(a.steps):
        begin = time.perf_counter()
        loss(model.train(), step).backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        wait()
        middle, had = time.perf_counter(), allocated()
        optimizer.step()
        wait()
        states, end = (allocated() - had if step == 0 else states), time.perf_counter()
        times.append((1e3 * (end - begin), 1e3 * (end - middle)))
        schedule.step()
        optimizer.zero_grad()
    if not gpu:
        states = sum(held(v) for its in optimizer.state.values() for v in its.values() if torch.is_tensor(v))
    return (name, sum(p.nbytes for p in params), states, torch.cuda.max_memory_allocated() if gpu else "",
            *(round(median(each), 3) for each in zip(*times)), round(times[0][1] - median(own for _, own in times), 3),
            before, validate(), lambada(model))


def main():
    parser = Parser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--vit", nargs="?", const="32x1280")
    parser.add_argument("--optimizers", default="adamw32,adamw8,adamw8e,adamw4l,flash24," + ",".join(PEERS))
    for name, value in dict(model="", data="", lambada="", csv="", steps=300, batch=8, length=1024, lr=5e-5).items():
        parser.add_argument("--" + name, type=type(value), default=value)
    a, device = parser.parse_args(), "cuda" if torch.cuda.is_available() else "cpu"
    if not (a.vit or a.model and a.data):
        raise Problem("give --model and --data, or --vit")
    task, files = images_of(a) if a.vit else text_of(a), [sys.stdout, *([open(a.csv, "w")] if a.csv else [])]
    for name in ["", *a.optimizers.split(",")]:
        try:
            row = tuned(name, *task, a, device) if name else COLUMNS
        except Exception as missing:  # the others' rows go on
            row = (name, str(missing).split("\n")[0] or repr(missing))
        for file in files:
            print(*row, sep=",", file=file, flush=True)


if __name__ == "__main__":
    sys.exit(answered("finetune", main))
