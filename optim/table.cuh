// The tables: every name that the user can type, the type that it stands for, and one line about when to use it. A row
// here is all that the CPU path, the built-in kernels, NVRTC, --list-formats and the error messages know of a format.
// ROW(name, when to use, type...); a type is last because it may hold commas.
#pragma once
#include "formats/elementwise.cuh"
#include "formats/fp32.cuh"
#include "formats/bf16.cuh"
#include "formats/master.cuh"
#include "rules/adamw.cuh"

#define OPTIM_RULES(ROW) ROW("adamw", "Adam with decoupled weight decay", AdamW)

#define OPTIM_WEIGHTS(ROW)                                                                                          \
    ROW("fp32", "nothing is rounded; the matmul reads a copy when it computes in bf16", Elementwise<Fp32, NEAREST>) \
    ROW("bf16:sr", "2 bytes in all; stochastic rounding keeps small updates alive", Elementwise<Bf16, STOCHASTIC>)  \
    ROW("bf16+fp32", "the usual mixed precision: bf16 for the matmul, an fp32 master for the update", WithMaster<Bf16>)

#define OPTIM_GRADS(ROW)                                                                         \
    ROW("fp32", "sums of many micro-batches keep their small terms", Elementwise<Fp32, NEAREST>) \
    ROW("bf16", "half the memory; right with few micro-batches a step", Elementwise<Bf16, NEAREST>)

#define OPTIM_STATES(ROW)                                                                                  \
    ROW("fp32", "the reference", Elementwise<Fp32, NEAREST>)                                               \
    ROW("bf16", "for m; a v stalls when 1 - beta2 is below 2^-8, half a step", Elementwise<Bf16, NEAREST>) \
    ROW("bf16:sr", "half of fp32, unbiased: the moving averages decay as they should", Elementwise<Bf16, STOCHASTIC>)

// ROW(name, rule, weights, m, v, when to use). --grads is the trainer's choice.
#define OPTIM_PRESETS(ROW)                                                                                    \
    ROW("adamw32", "adamw", "bf16+fp32", "fp32", "fp32", "the baseline: fp32 master weights and fp32 states") \
    ROW("adamw16", "adamw", "bf16:sr", "bf16:sr", "bf16:sr", "6 bytes a parameter in place of 14")            \
    ROW("fp32", "adamw", "fp32", "fp32", "fp32", "everything in fp32, also where the matmuls are")

// Kernels compiled ahead of time: the presets with each kind of gradient. Every other combination is compiled by NVRTC
// when it is first asked for. ROW(rule, weights, grads, m, v).
#define OPTIM_BUILT_IN(ROW)                                                                                          \
    ROW(AdamW, WithMaster<Bf16>, Elementwise<Fp32, NEAREST>, Elementwise<Fp32, NEAREST>, Elementwise<Fp32, NEAREST>) \
    ROW(AdamW, WithMaster<Bf16>, Elementwise<Bf16, NEAREST>, Elementwise<Fp32, NEAREST>, Elementwise<Fp32, NEAREST>) \
    ROW(AdamW, Elementwise<Bf16, STOCHASTIC>, Elementwise<Fp32, NEAREST>, Elementwise<Bf16, STOCHASTIC>,             \
        Elementwise<Bf16, STOCHASTIC>)                                                                               \
    ROW(AdamW, Elementwise<Bf16, STOCHASTIC>, Elementwise<Bf16, NEAREST>, Elementwise<Bf16, STOCHASTIC>,             \
        Elementwise<Bf16, STOCHASTIC>)                                                                               \
    ROW(AdamW, Elementwise<Fp32, NEAREST>, Elementwise<Fp32, NEAREST>, Elementwise<Fp32, NEAREST>,                   \
        Elementwise<Fp32, NEAREST>)                                                                                  \
    ROW(AdamW, Elementwise<Fp32, NEAREST>, Elementwise<Bf16, NEAREST>, Elementwise<Fp32, NEAREST>,                   \
        Elementwise<Fp32, NEAREST>)
