// --override: another rule, other formats, learning rate or decay for the tensors whose names match a pattern.
//     "wpe|ln*: m=fp32 v=fp32 lr=0.5; *.bias: wd=0"
// An override is a list of patterns, a colon and settings; semicolons separate overrides. If several match a tensor,
// the later ones win, except that factors lr are multiplied. `*` is any text and `?` any character. A pattern matches a
// name, or any part of it between dots: `wpe` matches "wpe.weight", `ln*` all layer norms, `h.0` the first block, and
// `c_attn.bias` that of every block. What is typed replaces the preset's overrides; "none", alone, means no overrides
// at all. A preset's overrides go with its formats, so they are dropped if --weights, --m or --v name others.
//     weights  format of the weights          lr   factor on the learning rate
//     m, v     formats of the moments         wd   weight decay, in place of --weight-decay or of none
//     rule     the update; it takes the run's --beta1, --beta2 and --eps, and the run's lr times the factor
// A rule that keeps a v takes the v of the run. If the run keeps none, the override gives one (v=fp32). A rule that
// keeps none takes no v=.
#pragma once
#include <stddef.h>

constexpr int OVERRIDES = 16;  // at most

// The tensors that rules of matrices leave to adamw: embeddings, of which one is the head, and vectors.
constexpr const char* MATRIX_REST = "wte|wpe|ln*|*.bias";

struct Override {
    char patterns[128];                        // as typed, without spaces; part of the names of a checkpoint's arrays
    char rule[32], weights[32], m[32], v[32];  // "" leaves it as it is
    double lr, decay;                          // a factor, 1 by default; a decay below 0 leaves it as it is
};

// Parses the text; returns false with a sentence in `error` if it cannot. Names of formats are not checked. NULL, ""
// and "none" hold no overrides.
bool overrides_parse(const char* text, Override* overrides, int* count, char* error);

bool override_matches(const Override* rule, const char* name);
// Does the same for one of its patterns, [begin, end), which holds no |.
bool pattern_matches(const char* begin, const char* end, const char* name);
