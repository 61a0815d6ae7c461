// The program chooses these values for options that are `auto`. They follow from the rule and from
//     D  tokens of training    N  steps    B  tokens of a step    C  channels
//     B*  the batch that suits a run's length: 65536 sqrt(D / 180M), so 65k tokens for some hundred million, 0.5M for
//     10B
//
//     option             auto
//     --tokens-per-step  B* between 32k and 512k, in a power of two of sequences; with bytes, or on a CPU, a
//     micro-batch
//     --lr               0.0018 x 768 / C x sqrt(B / B*), at most 0.003: adamw's. muon and normuon take twice that,
//     other
//                        rules as --list-presets says; weights that --model DIR has trained, a thirtieth
//     --warmup           muon, normuon: 40 steps; others: N / 20 from 60 to 700. A short run's is shorter
//     --weight-decay     muon, normuon: 4 / (N lr), from 0.05 to 0.4, and 0.05 for embeddings; others: 0.1
//     --beta2            adamw, adam, nadamw, ademamix, and adamw beside muon: v halves in 10M tokens, or in D / 20 if
//                        that is less, but at least 0.95; others, and a v with @dq8: 0.95
//
// So a run of the batch B* has the same rate at any length. The evidence is in dev/compare/README.md.
#pragma once
#include "options.h"
C_LINKAGE_BEGIN

// Returns the tokens of a step for a run of --steps, or of one epoch of so many tokens.
long long default_tokens_per_step(const Options* options, int64_t epoch);
// Chooses the others. `rate` is that of the rule over adamw's; `trained`: the weights are.
void defaults_choose(Options* options, double rate, bool trained);
#define DEFAULT_DECAY "; wte|wpe: wd=0.05"
// Returns --override, with the decay of embeddings beside muon if --weight-decay is auto and none is named.
const char* default_overrides(const Options* options);
// Returns whether v falls as beta2 says, which the 8-bit scales of @dq8 do not (optim/README.md, "How v falls").
bool default_v_falls(const Options* options);

C_LINKAGE_END
