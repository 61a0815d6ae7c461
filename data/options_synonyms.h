// Other programs' names for nibble's options, and options that exclude each other.
#pragma once

// Names that llm.c, nanoGPT, nanochat, Hugging Face's Trainer and torchtitan have for nibble's options, and those that
// earlier versions had: in lower case with '-' for '_', without torchtitan's groups, and with a space between two. The
// answer follows "unknown option --NAME; ".
static const struct {
    const char *names, *answer;
} SYNONYMS[] = {
    {"-i dataset train-file", "type --data PATH"},
    {"validation-file", "type --val PATH"},
    {"-e init-from model-name-or-path", "type --model NAME|DIR"},
    {"n-layer", "type --layers L"},
    {"n-embd", "type --channels C"},
    {"n-head", "type --heads NH"},
    {"-t block-size seq-len max-seq-len", "type --seq T"},
    {"depth", "type --model d12 or such a name, or --layers L and --channels C"},
    {"dropout", "leave it out: nibble has no dropout"},
    {"-b batch-size device-batch-size per-device-train-batch-size", "type --batch B"},
    {"total-batch-size", "type --tokens-per-step N, in tokens"},
    {"gradient-accumulation-steps", "type --tokens-per-step N: batch x seq x GPUs x the micro-batches to accumulate"},
    {"-x max-iters max-steps num-iterations", "type --steps N"},
    {"epochs num-train-epochs", "type --steps N, or nothing: a run without --steps is one epoch"},
    {"optimizer optim", "type --preset NAME for rule and formats, or --rule NAME for the rule alone"},
    {"learning-rate", "type --lr F"},
    {"adam-beta1", "type --beta1 F"},
    {"adam-beta2", "type --beta2 F"},
    {"adam-epsilon", "type --eps F"},
    {"grad-clip max-grad-norm", "type --clip F"},
    {"lr-scheduler-type", "type --schedule cosine|linear|constant|wsd"},
    {"warmup-iters warmup-steps", "type --warmup N"},
    {"warmup-ratio", "type --warmup N, in steps"},
    {"min-lr", "type --final-lr F, a share of --lr"},
    {"dtype bf16", "type --matmul auto|bf16|fp32; --weights, --grads, --m and --v store in other formats"},
    {"fp8", "type --matmul fp8, and --preset fp8w8e to store weights and states in 8 bits"},
    {"compile", "leave it out: nibble's kernels are compiled already"},
    {"gradient-checkpointing", "type --recompute block"},
    {"num-gpus", "type --gpus N"},
    {"eval-interval eval-steps", "type --val-every N"},
    {"eval-iters", "type --val-tokens N, in tokens"},
    {"max-new-tokens", "type --sample-tokens N"},
    {"-o out-dir output-dir", "type --run DIR"},
    {"log-interval logging-steps", "type --print-every N"},
    {"save-steps", "type --save-every N"},
    {"save-total-limit", "type --keep N"},
    {"resume-from-checkpoint", "type --resume auto|DIR"},
    {"fp8-grads", "leave it out: codes of gradients are e4m3, and those of the logits e5m2"},
    {"comm", "leave it out: --grads bf16 also sends half the bytes"},
    {"format", "leave it out: a format is a file in optim/formats, as optim/README.md says under How to add"},
    {"rank-basis", "leave it out: galore keeps its directions in fp32"},
    {"field tokenizer train-bpe", "leave it out here: data/prepare.py has it, which makes the folder of --data"},
    {"wandb-log", "leave it out: the run folder has log.jsonl, which dev/watch.py shows and exports"},
};

// The second option of a pair has no effect beside the first. --eval stands for a run that only evaluates, which is one
// without --eval-every.
static const char* const APART[][2] = {
    {"sample", "eval"},  {"sample", "dry-run"}, {"sample", "fit"},  {"sample", "eval-out"},    {"sample", "prompt"},
    {"sample", "steps"}, {"sample", "data"},    {"sample", "run"},  {"sample", "resume"},      {"sample", "profile"},
    {"fit", "eval"},     {"fit", "gpus"},       {"fit", "memory"},  {"fit", "batch"},          {"fit", "resume"},
    {"fit", "dry-run"},  {"fit", "device"},     {"fit", "shard"},   {"prompt-file", "prompt"}, {"size", "model"},
    {"size", "layers"},  {"size", "channels"},  {"size", "heads"},  {"eval", "data"},          {"eval", "steps"},
    {"eval", "dry-run"}, {"eval", "run"},       {"eval", "resume"},
};
