"""The cases of hash.py: options of ./train that meet all rules, all storage formats and all ways to run."""

COMMON = (
    "--data-format bytes --model d6 --layers 3 --channels 64 --heads 1 --seq 32 --batch 3 --tokens-per-step 192 --steps 20 "
    "--lr 4e-3 --warmup 4 --schedule constant --beta1 0.9 --beta2 0.95 --eps 1e-8 --weight-decay 0.1 --clip 1 "
    "--seed 7 --val-every 10 --val-tokens 384 --save-every 10 --keep 2 --sample-every 10 "
    "--sample-tokens 24 --prompt ab --temperature 0.8 --top-k 50 --print-every 5")

# What no preset has. Where a step has one micro-batch (96 tokens), a GPU takes gradients in bf16.
MIXED = """
--weights fp32 --m bf16 --v bf16:sr --tokens-per-step 96
--weights bf16 --m fp16 --v fp16:sr
--weights bf16+8:sr --m fp16:sr --v fp32
--weights bf16:kahan --m lin8/32:sr --v e4m3/256
--weights bf16+16 --m dyn8/2048 --v udyn8/32
--weights fp16 --m e5m2/256 --v e5m2/256:sr
--weights fp16+fp32 --m lin8/256 --v ulin8/256 --tokens-per-step 96
--weights e4m3 --m e2m1/32 --v sqrt4/128
--weights e4m3:sr --m nf4/64 --v adalog8/2048
--weights e4m3+fp32 --m de4/64:sr --v lin4/32:sr --tokens-per-step 96
--weights e5m2 --m dyn8/256@e8m0 --v sqrt8/32@e8m0
--weights e5m2:sr --m dyn8/64@dq8 --v udyn8/64@dq8
--weights e5m2+fp32 --m e4m3/64@dq8 --v lin4/64@dq8
--weights lin8:ef --m bf16:sr --v sqrt8/32@dq8
--weights e4m3/tensor --m nf4/64@dq8 --v e4m3/64@dq8
--weights e4m3/tensor:sr --m e2m1/32@dq8 --v sqrt4/64@dq8
--weights e4m3/tensor+fp32 --m e4m3/tensor --v e4m3/tensor
--weights e5m2/tensor+fp32 --m e5m2/tensor --v e5m2/tensor:sr
--weights bf16:sr --m dyn8/rank1 --v udyn8/rank1
--m de4/rank1 --v lin4/rank1
--m de4/rank1:sr --v sqrt4/rank1
--m soft8/32@dq8:sr --v adalog8/2048:sr --tokens-per-step 96
--rule adam --m dyn8 --v udyn8
--rule nadamw --m soft8 --v sqrt8 --weights bf16:sr
--rule lion --m lin8 --weights bf16:sr --tokens-per-step 96
--rule sgd --m bf16:sr --weights bf16+8
--rule ademamix --m de4:sr --v lin4 --beta3 0.99 --ramp 10
--rule ademamix --m soft8:sr --v sqrt8 --weights bf16:ef --beta3 0.999 --alpha 4
--rule adafactor --m none --adafactor-lr paper
--rule adafactor --m dyn8 --adafactor-lr scaled --weights bf16:sr
--rule came --m e4m3/256:sr --weights e4m3:sr --beta3 0.99
--rule adam-mini --m de4/32@dq8 --weights lin8:sr
--rule normuon-lite --m dyn8 --weights bf16:sr
--rule rmnp --m bf16 --nesterov off --tokens-per-step 96
--rule normuon --m soft8 --weights bf16+16
--rule muon --m bf16:sr --ns-coefficients polar-express --ns-steps 6 --nesterov off
--rule galore --m fp32 --v fp32
--rule fira --m dyn8 --v udyn8 --weights bf16:sr
--rule apollo --m soft8 --v sqrt8
--rule apollo --weights bf16:sr --m bf16:sr --v bf16:sr
--preset adamw8 --limit-growth 1.01
--preset adamw32 --clip-by tensor --decay-mode independent --schedule wsd --final-lr 0.1
--preset adamw8c --clip-by last --schedule linear --final-lr 0
--preset adamw8c --schedule cosine --final-lr 0.1
--preset adamw8 --override "wpe|ln*: weights=fp32 m=fp32 lr=0.5; *.bias: rule=sgd m=bf16 wd=0; h.1.*: rule=lion m=lin8"
--preset muon8 --override "wte: rule=adafactor m=none; h.0.*: rule=came m=dyn8; wpe|*.bias|ln*: rule=adamw m=fp32 v=fp32"
--preset adamw32 --layers 2 --channels 128 --heads 2 --seq 48 --batch 2
--preset muon8 --layers 2 --channels 128 --heads 1 --seq 48 --batch 2
--preset adamw8e --temperature 0 --samples 2
--preset adamw4l --top-k 0 --logit-rows 32 --seq 64 --batch 3
""".strip().split("\n")

# Ways to run, and presets that differ in what they carry. Those with a star are in the short form.
WAYS = {
    "--shard none --gpus 3 --batch 1": "adamw8 muon",
    "--shard states --gpus 3 --batch 2": "*adamw8e adamw32 fp8w8e came8 muon8 galore8",
    "--shard grads --gpus 3 --batch 1": "adamw4d adamw32 flash24 adam-mini8 muon4",
    "--shard weights --gpus 3 --batch 1": "*int8w4 *adamw32 adamw8e fp8 adafactor8 rmnp4 *muon8 apollo-mini",
    "--release on --clip-by last --tokens-per-step 96": "*adamw8 adamw32 fp8w8e int8w4 came8",
    "--release on --clip 0 --tokens-per-step 96": "rmnp4 adafactor8 *muon8",
    "--release on --clip-by last --tokens-per-step 288 --shard weights --gpus 3": "*adamw8e adamw32 flash24 int8w4",
    "--offload states": "*adamw32 adamw8 flash24 came8 rmnp4",
    "--offload states,residuals --release on --clip-by last --tokens-per-step 96": "adamw8c adamw32 fp8w8e muon8",
    "--offload residuals --recompute gelu": "adamw4l int8w4",
    "--recompute gelu": "adamw8c fp8w8e",
    "--recompute block --kept-blocks 1": "*fp8w8e adamw32",
    "--recompute block --kept-blocks 2 --offload residuals": "adamw16 muon8",
    "--matmul fp8 --tokens-per-step 96": "*fp8 adamw8e int8w4",
    "--matmul fp8 --head bf16": "adamw32 fp8",
    "--matmul fp8 --recompute block --shard weights --gpus 3 --batch 2": "fp8 muon8",
    "--matmul fp8 --recompute gelu --tokens-per-step 96": "fp8w8e",
    "--matmul fp32": "adamw32 adamw8e fp8w8e int8w4 muon came8 galore8",
    "->": "*adamw8e *adamw32 adamw16 adamw4d flash24 fp8 int8w4 adam-mini8 adafactor8 *came8 rmnp4 muon8 *galore8 apollo-mini",
    "-> --shard weights --gpus 3 --batch 2": "flash24 adamw4 muon8",
    "-> --weights bf16+8 --m soft8/32 --v sqrt8/32": "adamw32",
    "-> --weights bf16:sr --m dyn8 --v udyn8": "*adamw32 flash24",
    "-> --weights bf16+fp32 --m fp32 --v fp32": "adamw4d int8w4 adamw8e",
    "-> --weights e4m3:ef --m e4m3/256:sr --v sqrt8/32": "adamw8",
    "-> --rule muon --m soft8/32": "adamw8c",
}

# Settings of the library, whose tensors lie in host memory.
LIBRARY = """
preset=adamw32
preset=adamw32 parameters=bf16
preset=adamw8 parameters=bf16
preset=adamw4d
preset=flash24 parameters=bf16
preset=adamw8e parameters=bf16
preset=int8w4
preset=adamwfp8
rule=lion m=lin8 grads=bf16
rule=ademamix m=soft8 v=sqrt8
preset=adafactor8
preset=came8 parameters=bf16
preset=adam-mini8
preset=rmnp4
preset=muon8 parameters=bf16
rule=normuon m=fp32
preset=galore8 rank=4
rule=fira m=fp32 v=fp32 rank=4
rule=apollo-factored m=dyn8 rank=4 rank_gap=2 rank_reset=on limit_growth=1.05
rule=came8bit m=adanf4 adafactor_lr=paper limit_growth=1.01
preset=apollo-mini
preset=adamw8 limit_growth=1.01
""".strip().split("\n")

LIBRARY_CODE = """
import array, ctypes, hashlib, sys
from nibble_optim import library
settings = {"device": "cpu", "parameters": "fp32", "seed": 3, **dict(text.split("=", 1) for text in sys.argv[1:])}
state = 1
def values(shape, scale, kind):
    global state
    wide = kind == "fp32"
    made = ((ctypes.c_uint32 if wide else ctypes.c_uint16) * (shape[0] * shape[1]))()
    for i in range(len(made)):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        value = ctypes.c_float(((state >> 40) - 2**23) / 2**23 * scale)
        made[i] = ctypes.c_uint32.from_buffer(value).value >> (0 if wide else 16)
    return made
shapes = {"wte.weight": (48, 72), "ln.bias": (1, 72), "h.0.w": (72, 40), "one.bias": (1, 1), "ln.weight": (1, 3000), "h.1.w": (300, 16)}
weights = [values(shape, 0.5, settings["parameters"]) for shape in shapes.values()]
handle = library.Handle(settings, [(name, *shape, 0, -1) for name, shape in shapes.items()])
address = lambda arrays: array.array("Q", map(ctypes.addressof, arrays))
for step in range(1, 7):
    grads = [values(shape, 0.1, settings.get("grads", settings["parameters"])) for shape in shapes.values()]
    handle.step(address(weights), address(grads), array.array("i", [0, 1, 0, 1, 1, 0]),
                [(1e-2, 0.1, 0.9, 0.95, 1e-8, step), (5e-3, 0.0, 0.9, 0.95, 1e-8, step)], step)
states = b"".join(name.encode() + ctypes.string_at(data, size) for name, _, data, size, *_ in sorted(handle.states()))
print(*(hashlib.blake2b(b, digest_size=5).hexdigest() for b in (b"".join(map(bytes, weights)), states)), "- -")
"""
