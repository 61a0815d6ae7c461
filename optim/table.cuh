// The tables: each name that the user can type, the type that it stands for, and one line about when to use it. The CPU
// path, NVRTC, --list-formats and the error messages know a format only by its row here.
// ROW(name, when to use, type...); a type is last because it may hold commas.
#pragma once
#include "formats/elementwise.cuh"
#include "formats/adalog8.cuh"
#include "formats/fp32.cuh"
#include "formats/bf16.cuh"
#include "formats/de4.cuh"
#include "formats/dyn8.cuh"
#include "formats/fp16.cuh"
#include "formats/kahan.cuh"
#include "formats/master.cuh"
#include "formats/minifloat.cuh"
#include "formats/nf4.cuh"
#include "formats/none.cuh"
#include "formats/soft8.cuh"
#include "formats/spans.cuh"
#include "formats/split.cuh"
#include "formats/uniform.cuh"
#include "rows/rows.cuh"
#include "rules/adafactor.cuh"
#include "rules/adafactor8bit.cuh"
#include "rules/adam.cuh"
#include "rules/adammini.cuh"
#include "rules/adamw.cuh"
#include "rules/ademamix.cuh"
#include "rules/came.cuh"
#include "rules/lion.cuh"
#include "rules/lowrank.cuh"
#include "rules/muon.cuh"
#include "rules/nadamw.cuh"
#include "rules/rmnp.cuh"
#include "rules/sgd.cuh"

// ROW(name, when to use, adamw's usual learning rate over the rule's, type)
#define OPTIM_RULES(ROW)                                                                                            \
    ROW("adamw", "Adam with decoupled weight decay", 1, AdamW)                                                      \
    ROW("adam", "the weight decay is added to the gradient (L2)", 1, Adam)                                          \
    ROW("nadamw", "adamw whose momentum is Nesterov's: the gradient counts twice", 1, NAdamW)                       \
    ROW("lion", "the sign of an average, no v; lr 3 to 10 times below adamw's, decay as many times above", 5, Lion) \
    ROW("sgd", "momentum beta1, no v, L2 decay; lr of its own", 1, Sgd)                                             \
    ROW("sgd-nesterov", "sgd with Nesterov's momentum", 1, SgdNesterov)                                             \
    ROW("sgdw", "sgd with decoupled weight decay", 1, SgdW)                                                         \
    ROW("sgdw-nesterov", "sgdw with Nesterov's momentum", 1, SgdWNesterov)                                          \
    ROW("ademamix", "adamw and a slow average of the gradient (--beta3, --alpha, --ramp), stored as m is", 1,       \
        AdEMAMix)                                                                                                   \
    ROW("adam-mini", "adamw with one v a row, the mean of the squares, in fp32", 1, AdamMini)                       \
    ROW("adafactor", "v is one number a row times one a column; --m none drops m", 1, Adafactor)                    \
    ROW("came", "adafactor, and a confidence in m (--beta3), factored too; lr somewhat below adamw's", 1.5, Came)   \
    ROW("adafactor8bit", "as the package of this name has it: m averages gradients, r and c have codes", 1,         \
        Adafactor8bit)                                                                                              \
    ROW("came8bit", "likewise, with its confidence (--beta3)", 1, Came8bit)                                         \
    ROW("rmnp", "momentum (--momentum) with rows of one length; vectors, embeddings: adamw", 1, Rmnp)               \
    ROW("normuon-lite", "rmnp with each row divided by the root of its own v", 1, NorMuonLite)

// Rules that read whole matrices. Vectors and embeddings need another rule; NON_MATRIX_TENSORS (override.h) gives them
// adamw.
#define OPTIM_MATRIX_RULES(ROW)                                                                                      \
    ROW("muon", "orthogonalised momentum of matrices (--momentum, --ns-steps, --ns-coefficients)", 0.5, Muon)        \
    ROW("normuon", "muon with rows scaled to equal size by a v of each row", 0.5, NorMuon)                           \
    ROW("galore", "adam in the leading directions of a matrix (--rank, --rank-gap, --rank-scale)", 0.25,             \
        LowRank<MATRIX_GALORE>)                                                                                      \
    ROW("fira", "galore plus the rest of the gradient, scaled as adam scales galore's part", 0.25,                   \
        LowRank<MATRIX_FIRA>)                                                                                        \
    ROW("apollo", "the gradient, scaled by row or column as adam scales a random projection of it", 4,               \
        LowRank<MATRIX_APOLLO>)                                                                                      \
    ROW("apollo-mini", "apollo of rank 1 with one scale a matrix: almost no states", 2, LowRank<MATRIX_APOLLO_MINI>) \
    ROW("apollo-factored", "apollo whose v is one number a row times one a column", 4, ApolloFactored)

#define OPTIM_ALL_RULES(ROW) OPTIM_RULES(ROW) OPTIM_MATRIX_RULES(ROW)

#define OPTIM_WEIGHTS(ROW)                                                                                             \
    ROW("fp32", "nothing is rounded; the matmul reads a copy when it computes in bf16", Elementwise<Fp32, NEAREST>)    \
    ROW("bf16", "stands still when an update is below half a step, 2^-9 of a weight", Elementwise<Bf16, NEAREST>)      \
    ROW("bf16:sr", "2 bytes in all; stochastic rounding keeps small updates alive", Elementwise<Bf16, STOCHASTIC>)     \
    ROW("bf16:kahan", "keeps its rounding error in a second bf16: about 17 bits, no noise", Kahan)                     \
    ROW("bf16+8", "bf16 and 8 more bits: 16 significant bits in 3 bytes", Split<int8_t, NEAREST>)                      \
    ROW("bf16+8:sr", "the same, never stalls; 1/256 of bf16:sr's noise", Split<int8_t, STOCHASTIC>)                    \
    ROW("bf16+16", "exact fp32 that contains the matmul's bf16; 2 bytes less than bf16+fp32", Split<int16_t, NEAREST>) \
    ROW("bf16+fp32", "the usual mixed precision: bf16 for the matmul, an fp32 master for the update",                  \
        WithMaster<Elementwise<Bf16, NEAREST>>)                                                                        \
    ROW("fp16", "3 bits more than bf16 and less range: fewer bits below 2^-14", Elementwise<Fp16, NEAREST>)            \
    ROW("fp16:sr", "fp16 with stochastic rounding, which keeps small updates alive", Elementwise<Fp16, STOCHASTIC>)    \
    ROW("fp16+fp32", "fp16 with an fp32 master", WithMaster<Elementwise<Fp16, NEAREST>>)                               \
    ROW("e4m3", "fp8, a power-of-two scale every 128; stands still below 2^-5 of a weight",                            \
        Blocks<E4m3, 128, ScaleE8m0, NEAREST>)                                                                         \
    ROW("e4m3:sr", "1 byte in all, updated in place", Blocks<E4m3, 128, ScaleE8m0, STOCHASTIC>)                        \
    ROW("e4m3+fp32", "e4m3 with an fp32 master", WithMaster<Blocks<E4m3, 128, ScaleE8m0, NEAREST>>)                    \
    ROW("e5m2", "as e4m3, with a bit less of mantissa", Blocks<E5m2, 128, ScaleE8m0, NEAREST>)                         \
    ROW("e5m2:sr", "as e4m3:sr, with a bit less of mantissa", Blocks<E5m2, 128, ScaleE8m0, STOCHASTIC>)                \
    ROW("e5m2+fp32", "e5m2 with an fp32 master", WithMaster<Blocks<E5m2, 128, ScaleE8m0, NEAREST>>)                    \
    ROW("lin8:sr", "1 byte in all, updated in place: linear, a power-of-two scale every 32",                           \
        Blocks<Lin8OfPowers, 32, ScaleE8m0, STOCHASTIC>)                                                               \
    ROW("bf16:ef", "as bf16:sr, errors fed back into m: take m :sr or fp32; not for lion, sgd",                        \
        Feedback<Elementwise<Bf16, STOCHASTIC>>)                                                                       \
    ROW("e4m3:ef", "as e4m3:sr, with feedback as bf16:ef", Feedback<Blocks<E4m3, 128, ScaleE8m0, STOCHASTIC>>)         \
    ROW("lin8:ef", "as lin8:sr, with feedback as bf16:ef, which leaves little noise",                                  \
        Feedback<Blocks<Lin8OfPowers, 32, ScaleE8m0, STOCHASTIC>>)                                                     \
    ROW("e4m3/tensor", "fp8, a power-of-two scale a tensor; --matmul fp8 reads it as it is",                           \
        Spans<E4m3, SPAN_TENSOR, NEAREST, ScaleE8m0>)                                                                  \
    ROW("e4m3/tensor:sr", "the same, never stalls; two passes a step",                                                 \
        Spans<E4m3, SPAN_TENSOR, STOCHASTIC, ScaleE8m0>)                                                               \
    ROW("e4m3/tensor:ef", "as e4m3/tensor:sr, with feedback as bf16:ef",                                               \
        Feedback<Spans<E4m3, SPAN_TENSOR, STOCHASTIC, ScaleE8m0>>)                                                     \
    ROW("e4m3/tensor+fp32", "one scale a tensor, as fp8 matmuls need it; two passes a step",                           \
        WithMaster<Spans<E4m3, SPAN_TENSOR, NEAREST>>)                                                                 \
    ROW("e5m2/tensor+fp32", "as e4m3/tensor+fp32, in e5m2", WithMaster<Spans<E5m2, SPAN_TENSOR, NEAREST>>)             \
    ROW("e4m3/tensor@given+fp32", "one pass: the library's caller gives the scale, 1 at first",                        \
        WithMaster<Spans<E4m3, SPAN_GIVEN, NEAREST>>)                                                                  \
    ROW("e5m2/tensor@given+fp32", "the same in e5m2", WithMaster<Spans<E5m2, SPAN_GIVEN, NEAREST>>)

#define OPTIM_GRADS(ROW)                                                                         \
    ROW("fp32", "sums of many micro-batches keep their small terms", Elementwise<Fp32, NEAREST>) \
    ROW("bf16", "half the memory; right with few micro-batches a step", Elementwise<Bf16, NEAREST>)

// Formats whose scales reach further than a tile.
#define OPTIM_SPAN(ROW, NAME, NOTE, FORMAT, SPAN) \
    ROW(NAME, NOTE, Spans<FORMAT, SPAN, NEAREST>) \
    ROW(NAME ":sr", "", Spans<FORMAT, SPAN, STOCHASTIC>)

// BLOCKS(name, when to use, format, usual block) stands for NAME/32 to NAME/2048, and NAME/BLOCK@e8m0 with the usual
// block. DOUBLED(name, when to use, format, block) stands for NAME/BLOCK@dq8. Each of these exists with :sr, too.
#define OPTIM_STATES(ROW, BLOCKS, DOUBLED)                                                                            \
    ROW("fp32", "the reference", Elementwise<Fp32, NEAREST>)                                                          \
    ROW("bf16", "for m; a v stalls when 1 - beta2 is below 2^-8, half a step", Elementwise<Bf16, NEAREST>)            \
    ROW("bf16:sr", "half of fp32, unbiased: the moving averages decay as they should", Elementwise<Bf16, STOCHASTIC>) \
    ROW("fp16", "for comparison: below 3e-8 all becomes 0, and the loss shows it", Elementwise<Fp16, NEAREST>)        \
    ROW("fp16:sr", "for m, unbiased; a v below 3e-8 is still 0 at most steps", Elementwise<Fp16, STOCHASTIC>)         \
    BLOCKS("dyn8", "for m, as in torchao and bitsandbytes: seven decades a block", Dyn8, 256)                         \
    BLOCKS("udyn8", "for v: dyn8 without a sign", Udyn8, 256)                                                         \
    BLOCKS("e4m3", "for m or v: fp8 with 3 bits of mantissa, as in torchao", E4m3, 256)                               \
    BLOCKS("e5m2", "for v of a wide range: fp8 with 2 bits of mantissa", E5m2, 256)                                   \
    BLOCKS("soft8", "for m, as in FlashOptim: the most precise at 8 bits, in short blocks", Soft8, 32)                \
    BLOCKS("sqrt8", "for v, as in FlashOptim: linear in the root", Sqrt8, 32)                                         \
    BLOCKS("lin8", "for m: linear; for comparison, or with lion", Lin8, 256)                                          \
    BLOCKS("ulin8", "for v: linear; for comparison, its floor inflates small v", Ulin8, 256)                          \
    BLOCKS("de4", "for m, as in lpmm and torchao: three decades in 4 bits", De4, 128)                                 \
    BLOCKS("lin4", "for v, as in lpmm and torchao: a floor of 1/16 of the block's largest", Lin4, 128)                \
    BLOCKS("sqrt4", "for v: linear in the root, a floor of 1/256", Sqrt4, 128)                                        \
    BLOCKS("nf4", "for m: quantiles of a normal distribution", Nf4, 64)                                               \
    BLOCKS("adanf4", "for m, as in adafactor8bit", AdaNf4, 128)                                                       \
    BLOCKS("e2m1", "for m: fp4", E2m1, 32)                                                                            \
    OPTIM_SPAN(ROW, "e4m3/tensor", "for study: one scale a tensor; two passes a step", E4m3, SPAN_TENSOR)             \
    OPTIM_SPAN(ROW, "e5m2/tensor", "for study: as e4m3/tensor", E5m2, SPAN_TENSOR)                                    \
    OPTIM_SPAN(ROW, "dyn8/rank1", "for m, for study: scales by row and column; two passes", Dyn8, SPAN_RANK1)         \
    OPTIM_SPAN(ROW, "udyn8/rank1", "for v, for study: as dyn8/rank1", Udyn8, SPAN_RANK1)                              \
    OPTIM_SPAN(ROW, "de4/rank1", "for m, for study: as dyn8/rank1", De4, SPAN_RANK1)                                  \
    OPTIM_SPAN(ROW, "lin4/rank1", "for v, for study: lpmm's default for v", Lin4, SPAN_RANK1)                         \
    OPTIM_SPAN(ROW, "sqrt4/rank1", "for v, for study: as lin4/rank1, of the root", Sqrt4, SPAN_RANK1)                 \
    ROW("adalog8/2048", "for v, as in adafactor8bit: from 2^-126 on, steps of about 0.4 binades", AdaLog8<NEAREST>)   \
    ROW("adalog8/2048:sr", "", AdaLog8<STOCHASTIC>)                                                                   \
    DOUBLED("soft8", "soft8 with 8-bit scales, like all @dq8", Soft8, 32)                                             \
    DOUBLED("sqrt8", "", Sqrt8, 32)                                                                                   \
    DOUBLED("dyn8", "", Dyn8, 64)                                                                                     \
    DOUBLED("udyn8", "", Udyn8, 64)                                                                                   \
    DOUBLED("e4m3", "", E4m3, 64)                                                                                     \
    DOUBLED("de4", "as precise as de4/32 in 4.3 bits", De4, 32)                                                       \
    DOUBLED("de4", "", De4, 64)                                                                                       \
    DOUBLED("sqrt4", "as precise as sqrt4/32 in 4.3 bits", Sqrt4, 32)                                                 \
    DOUBLED("sqrt4", "", Sqrt4, 64)                                                                                   \
    DOUBLED("lin4", "", Lin4, 64)                                                                                     \
    DOUBLED("nf4", "", Nf4, 64)                                                                                       \
    DOUBLED("e2m1", "", E2m1, 32)

// Presets name good combinations. From a row follow the lists, the benches and the tests. `overrides` may give some
// tensors other weights, or another rule whose kernel belongs to another preset.
struct PresetRow {
    const char *name, *rule, *weights, *m, *v, *note;
    const char* overrides = "";
};

constexpr PresetRow PRESETS[] = {
    {"adamw32", "adamw", "bf16+fp32", "fp32", "fp32", "the baseline: fp32 master weights and states"},
    {"adamw16", "adamw", "bf16:sr", "bf16:sr", "bf16:sr", "6 bytes a parameter in place of 14"},
    {"adamw8", "adamw", "bf16:sr", "dyn8/256", "udyn8/256", "8-bit states as in torchao and bitsandbytes"},
    {"adamw8e", "adamw", "bf16:ef", "e4m3/256:sr", "udyn8/256", "8-bit states; weights' rounding fed back"},
    {"adamw8c", "adamw", "bf16:sr", "soft8/32", "sqrt8/32", "8-bit states as FlashOptim keeps them"},
    {"adamwfp8", "adamw", "bf16:sr", "e4m3/256", "e4m3/256", "fp8 states as torchao keeps them"},
    {"adamw4", "adamw", "bf16:sr", "de4/128", "lin4/128", "4-bit states as lpmm and torchao keep them"},
    {"adamw4d", "adamw", "bf16:sr", "de4/32@dq8", "sqrt4/32@dq8", "4-bit states, 8-bit scales; beta2 up to 0.95"},
    {"adamw4l", "adamw", "bf16:sr", "de4/32@dq8", "lin4/64", "4-bit states for beta2 above 0.95; v is linear"},
    {"flash24", "adamw", "bf16+8", "soft8/32", "sqrt8/32", "FlashOptim: 24-bit weights, 8-bit states"},
    {"fp8w8e", "adamw", "e4m3:ef", "e4m3/256:sr", "sqrt8/32", "fp8 matrices but wpe; rounding errors fed back",
     "ln*|*.bias|wpe: weights=bf16:ef"},
    {"fp8", "adamw", "e4m3/tensor:ef", "e4m3/256:sr", "sqrt8/32", "fp8w8e with codes that --matmul fp8 reads",
     "ln*|*.bias|wpe: weights=bf16:ef"},
    {"int8w4", "adamw", "lin8:sr", "de4/32@dq8", "sqrt4/32@dq8", "2 bytes a parameter in all; beta2 up to 0.95",
     "ln*|*.bias: weights=bf16:sr"},
    {"adam-mini8", "adam-mini", "bf16:sr", "soft8/32", "none", "8-bit m; v is one number a row"},
    {"adafactor8", "adafactor", "bf16:sr", "soft8/32", "none", "8-bit m; v has numbers by row and column"},
    {"came8", "came", "bf16:sr", "soft8/32", "none", "8-bit m; v, confidence by row and column"},
    {"adafactor8bit", "adafactor8bit", "bf16:sr", "adanf4/128", "none", "the package's steps, with its m of 4 bits",
     "ln*|*.bias: m=fp32"},
    {"rmnp4", "rmnp", "bf16:sr", "de4/32@dq8", "none", "4-bit m and no v; the rest as adamw4l",
     "wte|wpe|ln*|*.bias: rule=adamw m=de4/32@dq8 v=lin4/64"},
    {"muon", "muon", "bf16+fp32", "fp32", "none", "muon, fp32 momentum; the rest as adamw32",
     "wte|wpe|ln*|*.bias: rule=adamw m=fp32 v=fp32"},
    {"muon8", "muon", "bf16:sr", "soft8/32", "none", "8-bit momentum; the rest as adamw8c",
     "wte|wpe|ln*|*.bias: rule=adamw m=soft8/32 v=sqrt8/32"},
    {"muon8w8", "muon", "lin8:sr", "soft8/32", "none", "8-bit weights; 2.5 bytes with --release on",
     "wte|wpe|ln*|*.bias: rule=adamw weights=bf16:sr m=soft8/32 v=sqrt8/32"},
    {"muon4", "muon", "bf16:sr", "de4/32@dq8", "none", "2.53 bytes a parameter; the rest as adamw4l",
     "wte|wpe|ln*|*.bias: rule=adamw m=de4/32@dq8 v=lin4/64"},
    {"galore8", "galore", "bf16:sr", "dyn8/256", "udyn8/256", "moments of rank --rank; the rest as adamw8",
     "wte|wpe|ln*|*.bias: rule=adamw m=dyn8/256 v=udyn8/256 lr=0.25"},
    {"apollo-mini", "apollo-mini", "bf16:sr", "fp32", "fp32", "almost no states; the rest as adamw8",
     "wte|wpe|ln*|*.bias: rule=adamw m=dyn8/256 v=udyn8/256 lr=2"},
};
constexpr int PRESET_COUNT = sizeof(PRESETS) / sizeof(PRESETS[0]);

// The names of these tables, in order.
#define OPTIM_NAME(NAME, ...) NAME,
constexpr const char* RULE_NAMES[] = {OPTIM_ALL_RULES(OPTIM_NAME)};
constexpr const char* WEIGHTS_NAMES[] = {OPTIM_WEIGHTS(OPTIM_NAME)};
