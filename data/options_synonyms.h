// The names that llm.c, nanoGPT, nanochat, Hugging Face's Trainer, torchtitan and others have for nibble's options, and
// what they have and nibble has not. Each name is in lower case with '-' for '_'; torchtitan's come without their
// group. The answer follows "unknown option --NAME; ". After them, what options need, and which exclude each other.
#pragma once
#include "options.h"

static const OptionSynonym SYNONYMS[] = {
    // data
    {"input-bin train-bin train-data train-file train-files data-dir dataset-path data-path dataset dataset-name "
     "train-dataset text-file corpus -i",
     "type --data PATH"},
    {"input-val-bin val-bin val-data val-file val-dataset validation-file eval-file eval-dataset validation-dataset -j",
     "type --val PATH"},
    {"validation-split-percentage val-split validation-split test-size test-split val-frac val-ratio eval-fraction "
     "validation-fraction",
     "type --val-fraction F, a share of 1"},
    {"tokenizer tokenizer-name tokenizer-path tokenizer-file encoding vocab-file merges-file",
     "leave it out: nibble takes the tokenizer from the --data folder, which data/prepare.py writes"},
    {"vocab-size vocabulary vocab padded-vocab-size", "leave it out: the vocabulary is the data's"},
    {"train-bpe train-tokenizer", "leave it out: data/prepare.py trains vocabularies, and --data has the one to use"},
    {"tasks benchmark benchmarks eval-tasks", "type --eval NAMES, such as hellaswag,lambada"},
    {"watch export dashboard", "leave it out: type .venv/bin/python dev/watch.py RUNS"},
    {"vram gpu-memory", "type --fit 24G, or --dry-run --memory 24G"},
    {"shuffle no-shuffle streaming num-proc num-workers workers dataloader-num-workers preprocessing-num-workers "
     "pin-memory dataloader-pin-memory prefetch cache-dir overwrite-cache max-train-samples max-eval-samples "
     "group-by-length",
     "leave it out: data is mapped and read in a seeded order, with nothing to choose"},
    // model
    {"init-from model-name-or-path model-name model-path model-dir hf-model pretrained pretrained-model "
     "from-pretrained config-name model-type flavor model.name model.flavor -e",
     "type --model NAME|DIR"},
    {"n-layer n-layers num-layers num-hidden-layers hidden-layers", "type --layers L"},
    {"n-embd n-embed d-model dim hidden-size hidden-dim model-dim embed-dim embedding-dim width n-hidden",
     "type --channels C"},
    {"n-head n-heads num-heads num-attention-heads attention-heads num-query-heads", "type --heads NH"},
    {"head-dim head-size", "type --heads NH: channels / heads is 64 or 128"},
    {"block-size seq-len seq-length sequence-length max-seq-len max-seq-length context-length context-size context ctx "
     "max-sequence-length max-position-embeddings n-positions n-ctx -t",
     "type --seq T"},
    {"depth aspect-ratio", "type --model d12 or such a name, or --layers L and --channels C"},
    {"dropout attn-pdrop resid-pdrop embd-pdrop attention-dropout hidden-dropout p-dropout",
     "leave it out: nibble has no dropout"},
    {"bias no-bias use-bias qkv-bias", "leave it out: GPT-2 has its biases and nibble no other kind"},
    {"n-kv-head n-kv-heads num-kv-heads num-key-value-heads window-pattern rope rope-theta rotary-pct norm-type "
     "tie-weights tie-word-embeddings tie-embeddings activation activation-function softcap qk-norm",
     "leave it out: nibble trains GPT-2 as it is, without variants"},
    // batch and length
    {"batch-size device-batch-size per-device-train-batch-size per-device-batch-size train-batch-size micro-batch-size "
     "microbatch-size train-micro-batch-size-per-gpu local-batch-size micro-batch mbs bs bsz -b",
     "type --batch B"},
    {"total-batch-size global-batch-size effective-batch-size tokens-per-batch batch-tokens -d",
     "type --tokens-per-step N, in tokens"},
    {"gradient-accumulation-steps grad-accum-steps grad-accumulation-steps gradient-accumulation accumulation-steps "
     "accumulate-grad-batches grad-accum accum-steps",
     "type --tokens-per-step N: batch x seq x GPUs x the micro-batches to accumulate"},
    {"per-device-eval-batch-size eval-batch-size val-batch-size", "leave it out: validation takes --batch"},
    {"max-iters max-steps num-iterations num-steps iterations iters train-steps training-steps total-steps "
     "max-iterations num-train-steps train-iters n-iters total-iters -x",
     "type --steps N"},
    {"epochs num-epochs num-train-epochs max-epochs n-epochs train-epochs",
     "type --steps N, or nothing: a run without --steps is one epoch"},
    {"target-flops target-param-data-ratio train-tokens total-tokens target-tokens",
     "type --steps N: the tokens / --tokens-per-step"},
    // optimizer
    {"optimizer optim optimizer-type optimizer-name optimizer.name opt",
     "type --preset NAME for rule and formats, or --rule NAME for the rule alone"},
    {"learning-rate max-lr peak-lr base-lr lr-max initial-lr init-lr max-learning-rate -l", "type --lr F"},
    {"matrix-lr embedding-lr unembedding-lr scalar-lr head-lr embed-lr lr-embed muon-lr",
     "type --override TEXT: lr= is a factor of --lr by tensor"},
    {"adam-beta1 adamw-beta1 beta-1 b1 optimizer-beta1 adam-b1", "type --beta1 F"},
    {"adam-beta2 adamw-beta2 beta-2 b2 optimizer-beta2 adam-b2", "type --beta2 F"},
    {"betas adam-betas", "type --beta1 F and --beta2 F"},
    {"adam-epsilon adam-eps epsilon optimizer-eps adamw-eps", "type --eps F"},
    {"wd weight-decay-rate l2 adam-weight-decay adam-w-decay weightdecay -c", "type --weight-decay F"},
    {"grad-clip gradient-clip gradient-clipping max-grad-norm clip-grad clip-grad-norm max-norm grad-norm-clip "
     "clip-norm gradient-clip-val grad-clipping clip-gradients",
     "type --clip F"},
    {"lr-scheduler-type lr-scheduler lr-schedule scheduler schedule-type lr-decay-style decay-type scheduler-type -k",
     "type --schedule cosine|linear|constant|wsd"},
    {"decay-lr no-decay-lr", "type --schedule constant for a rate that stays, or leave it out"},
    {"warmup-iters warmup-steps lr-warmup-steps num-warmup-steps warmup-iterations lr-warmup-iters -u",
     "type --warmup N"},
    {"warmup-ratio warmup-frac warmup-fraction lr-warmup-fraction", "type --warmup N, in steps"},
    {"min-lr lr-min min-learning-rate end-lr eta-min learning-rate-decay-frac lr-decay-frac final-lr-frac "
     "final-lr-fraction min-lr-ratio min-lr-factor min-lr-rate -q",
     "type --final-lr F, a share of --lr"},
    {"lr-decay-iters lr-decay-steps decay-iters decay-steps",
     "leave it out: the rate falls until --steps, of which wsd takes --decay-fraction"},
    {"warmdown-ratio cooldown-frac cooldown-fraction warmdown-iters cooldown-iters decay-ratio lr-decay-ratio cooldown",
     "type --schedule wsd and --decay-fraction F"},
    {"adafactor muon amsgrad label-smoothing label-smoothing-factor z-loss neftune-noise-alpha ema ema-decay",
     "leave it out: nibble has none (--list-presets and --help name the rules)"},
    {"skip-nan skip-update-lossz skip-update-gradz nan-action -sl -sg", "type --on-nonfinite skip|stop"},
    // precision and memory
    {"dtype precision mixed-precision amp torch-dtype autocast param-dtype compute-dtype mixed-precision-param",
     "type --matmul auto|bf16|fp32 for the matrix products; --weights, --grads, --m and --v store in other formats"},
    {"bf16 bfloat16 bf16-full-eval use-bf16", "type --matmul bf16"},
    {"fp32 float32 full-precision no-bf16 no-amp", "type --matmul fp32"},
    {"tf32 allow-tf32 tensorcores override-tf32 matmul-precision float32-matmul-precision fp16 float16 half "
     "fp16-opt-level -f",
     "leave it out: matrix products are bf16 or, with --matmul fp32, of full fp32"},
    {"fp8 fp8-recipe float8 use-fp8 enable-fp8-linear",
     "type --matmul fp8 for the matrix products, and --preset fp8w8e to store weights and states in 8 bits"},
    {"8bit-optimizer use-8bit-adam adam8bit adam-8bit", "type --preset adamw8"},
    {"int8 load-in-8bit load-in-4bit quantize quantization",
     "type --list-presets for what is stored in 8 and in 4 bits"},
    {"use-master-weights master-weights -w", "type --weights bf16+fp32"},
    {"compile compile.enable torch-compile no-compile torchcompile jit flash flash-attn flash-attention use-flash-attn "
     "attn-implementation attention-backend fused fused-adam fused-adamw gelu-fusion cuda-graphs -ge",
     "leave it out: nibble's kernels are compiled and fused already"},
    {"gradient-checkpointing activation-checkpointing activation-checkpoint activation-recompute recompute-activations "
     "grad-checkpointing checkpoint-activations activation-checkpoint.mode -r",
     "type --recompute block"},
    // several GPUs
    {"num-gpus n-gpus n-gpu gpu-ids device-ids ngpu ngpus nproc nproc-per-node gpus-per-node devices num-devices "
     "world-size",
     "type --gpus N"},
    {"gpu", "type --gpus N for several, or --device gpu"},
    {"zero-stage zero zero-optimization fsdp fsdp-mode deepspeed ddp ddp-backend data-parallel-shard-degree "
     "data-parallel-replicate-degree sharding-strategy strategy distributed -z",
     "type --shard none|states|grads|weights: ZeRO 0, 1, 2, 3"},
    {"tensor-parallel-degree tensor-parallel tensor-parallel-size tp-size pipeline-parallel-degree pipeline-parallel "
     "pipeline-parallel-size pp-size context-parallel-degree context-parallel-size expert-parallel-degree",
     "leave it out: nibble has data parallelism and --shard alone"},
    {"backend local-rank node-rank nnodes nodes num-nodes dist-backend dist-url master-addr master-port rdzv-backend "
     "rdzv-endpoint rdzv-id -pn -pr -pm -ps -pi -pg",
     "leave it out: ranks are read from the variables of torchrun, srun and mpirun"},
    // validation and samples
    {"eval-interval eval-steps val-loss-every eval-freq val-interval validation-interval val-check-interval "
     "validation.freq -v",
     "type --val-every N"},
    {"eval-iters eval-tokens val-steps val-max-steps eval-batches val-iters limit-val-batches max-val-steps "
     "eval-max-steps validation.steps -m",
     "type --val-tokens N, in tokens"},
    {"eval-only do-eval inference-only do-predict eval-strategy evaluation-strategy eval-on-start do-train val-only",
     "leave it out: a run trains and validates every --val-every steps; there is no run that only validates"},
    {"core-metric-every hellaswag hellaswag-eval", "type --eval hellaswag --eval-every N"},
    {"core-metric-max-per-task metric-for-best-model load-best-model-at-end",
     "leave it out: nibble measures the validation loss alone"},
    {"sample-interval generate-every sample-freq sampling-interval gen-every -s", "type --sample-every N"},
    {"max-new-tokens gent max-gen-tokens num-tokens-to-generate sample-length sample-len gen-length "
     "max-length-generate -g",
     "type --sample-tokens N"},
    {"num-samples n-samples sample-count num-return-sequences number-of-samples", "type --samples N"},
    {"start generate prompt-text sample-prompt input-text",
     "type --sample PROMPT with --model DIR, or --prompt TEXT for the samples of a run"},
    {"temp", "type --temperature F"},
    {"top-p min-p num-beams repetition-penalty typical-p",
     "leave it out: samples are drawn one at a time, by --temperature and --top-k"},
    // run
    {"out-dir output-dir output out outdir save-dir run-dir log-dir logging-dir checkpoint-dir ckpt-dir dump-folder "
     "save-path save-folder checkpoint.folder exp-dir experiment-dir work-dir -o",
     "type --run DIR"},
    {"run-name exp-name experiment-name wandb-run-name model-tag run-id name",
     "type --run DIR, whose last part is the run's name"},
    {"log-interval logging-steps log-every log-freq print-interval print-freq log-every-n-steps logging-interval "
     "log-steps -lg",
     "type --print-every N"},
    {"save-steps save-interval checkpoint-interval checkpoint-every ckpt-interval ckpt-every save-freq checkpoint-freq "
     "save-every-n-steps save-checkpoint-every checkpoint-steps checkpoint.interval -n",
     "type --save-every N"},
    {"save-total-limit keep-last keep-latest-k keep-checkpoints max-checkpoints num-checkpoints keep-last-n save-top-k "
     "-nk",
     "type --keep N"},
    {"resume-from resume-from-checkpoint resume-path resume-from-step continue continue-from restore auto-resume "
     "restart -y",
     "type --resume auto|DIR"},
    {"load load-from load-checkpoint ckpt ckpt-path checkpoint checkpoint-path",
     "type --resume DIR to go on with a run, or --model DIR to begin with its weights"},
    {"overwrite-output-dir overwrite force", "leave it out and name a new --run: nibble overwrites no run"},
    {"always-save-checkpoint checkpoint.enable save-strategy save-only-model save-safetensors save-final",
     "leave it out: --save-every says when, and a checkpoint comes at the end and on a signal"},
    {"use-cpu no-cuda no-gpu cpu", "type --device cpu"},
    {"device-type", "type --device auto|gpu|cpu"},
    {"cuda use-cuda use-gpu accelerator", "type --device gpu"},
    {"random-seed rng-seed manual-seed data-seed torch-seed training-seed", "type --seed N"},
    {"deterministic use-deterministic-algorithms full-determinism", "leave it out: every run is, to the bit"},
    {"wandb wandb-log wandb-project wandb-entity use-wandb no-wandb report-to tensorboard enable-tensorboard "
     "enable-wandb comet mlflow logger log-level push-to-hub hub-model-id hub-token tb-dir",
     "leave it out: the run folder has log.jsonl, which dev/watch.py shows and exports (TensorBoard, wandb)"},
    {"profiling enable-profiling profiler torch-profile nvtx", "type --profile"},
    {"overfit overfit-single-batch -a", "leave it out: nibble has none"},
    {"config config-file cfg conf yaml job-config-file args-file",
     "leave it out: options are typed; a run's config.json lists them all"},
    {"verbose quiet debug mode", "leave it out (--help lists the options)"},
};

// Options that change nothing without another one. --override may give a rule too.
static const OptionNeed NEEDS[] = {
    {"head fp8-grads", "matmul", "fp8"},
    {"kept-blocks", "recompute", "block"},
    {"decay-fraction", "schedule", "wsd"},
    {"save-every keep", "save", "all|weights"},
    {"final-lr", "schedule", "cosine|linear|wsd"},
    {"alpha ramp", "rule", "ademamix"},
    {"beta3", "rule", "ademamix|came"},
    {"momentum nesterov", "rule", "muon|normuon|rmnp|normuon-lite"},
    {"ns-steps ns-coefficients", "rule", "muon|normuon"},
    {"rank", "rule", "galore|fira|apollo"},
    {"rank-gap rank-scale", "rule", "galore|fira|apollo|apollo-mini"},
    {"adafactor-lr", "rule", "adafactor"},
    {"clip-update", "rule", "adafactor|came"},
    {NULL, NULL, NULL},
};

// Pairs of an option that replaces training, or another option, and of one that it would ignore.
static const char* const APART[][2] = {
    {"sample", "eval"},  {"sample", "dry-run"}, {"sample", "fit"}, {"sample", "eval-out"},    {"sample", "prompt"},
    {"sample", "steps"}, {"sample", "data"},    {"sample", "run"}, {"sample", "resume"},      {"sample", "profile"},
    {"fit", "eval"},     {"fit", "gpus"},       {"fit", "memory"}, {"fit", "batch"},          {"fit", "resume"},
    {"fit", "dry-run"},  {"fit", "device"},     {"fit", "shard"},  {"prompt-file", "prompt"},
};
