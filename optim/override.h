// --override gives tensors whose names match a pattern another rule, formats, learning rate or decay:
//     "wpe|ln*: m=fp32 v=fp32 lr=0.5; *.bias: wd=0"
// An override is a list of patterns, a colon and settings; semicolons separate overrides. If several overrides match a
// tensor, later ones win, except that factors lr are multiplied. `*` matches any text and `?` any character. A pattern
// matches a whole name, or any part of it between dots: `wpe` matches "wpe.weight", `ln*` all layer norms, `h.0` the
// first block, and `c_attn.bias` that bias of every block. Typed overrides replace the preset's; "none", alone, means
// no overrides. A preset's overrides belong to its formats, so they are dropped if --weights, --m or --v name other
// formats.
//     weights  format of the weights          lr   factor on the learning rate
//     m, v     formats of the moments         wd   weight decay, in place of --weight-decay or of none
//     rule     the update; it takes the run's --beta1, --beta2 and --eps, and the run's lr times the factor
// A rule that keeps a v takes the v of the run. If the run keeps none, the override must give one (v=fp32). A rule that
// keeps no v takes no v=.
#pragma once
#include <stddef.h>

constexpr int OVERRIDES = 16;  // at most

// The tensors that rules of matrices leave to adamw: embeddings (one is also the head) and vectors.
constexpr const char* NON_MATRIX_TENSORS = "wte|wpe|ln*|*.bias";

constexpr size_t OVERRIDE_PATTERNS = 127;  // characters, at most: they are part of the names of a checkpoint's arrays

// Texts are kept as by text_kept.
struct Override {
    const char* patterns;                // as typed, without spaces
    const char *rule, *weights, *m, *v;  // "": unchanged
    double lr, decay;                    // a factor, 1 by default; a decay, below 0: unchanged
};

// Parses a text into `overrides` (OVERRIDES). Returns false with a sentence in `error` if the text is no list of
// overrides. Names of rules and formats are not checked. NULL, "" and "none" hold no overrides.
bool overrides_parse(const char* text, Override* overrides, int* count, char* error);

// Returns true if a tensor's name matches one of the patterns, which have | between them.
bool patterns_match(const char* patterns, const char* name);
