// --override: other formats, learning rate or decay for the tensors whose names match a pattern.
//     "wpe|ln*: m=fp32 v=fp32 lr=0.5; *.bias: wd=0"
// An override is patterns, a colon and settings; a semicolon stands between overrides, and of several that match a
// tensor the later ones win, but for the factors lr, which are multiplied. `*` is any text and `?` any character. A
// pattern matches a name, or any part of it between dots: `wpe` is "wpe.weight", `ln*` all layer norms, `h.0` the first
// block, `c_attn.bias` that of every block. "none", alone, is no overrides, not even those of the preset. What is typed
// takes the place of these, which go with the preset's formats: with other ones in --weights, --m or --v there are
// none.
//     weights  format of the weights          lr   factor on the learning rate
//     m, v     formats of the moments         wd   weight decay, in place of --weight-decay or of none
#pragma once
#include <stddef.h>

constexpr int OVERRIDES = 16;  // at most

struct Override {
    char patterns[128];              // as typed, without spaces; part of the names of a checkpoint's arrays
    char weights[32], m[32], v[32];  // "" leaves the format as it is
    double lr, decay;                // factor, 1 by default; decay below 0: as it is
};

// Parses the text; false and a sentence in `error`. Formats are not looked at. NULL, "" and "none" hold no overrides.
bool overrides_parse(const char* text, Override* overrides, int* count, char* error, size_t error_bytes);

bool override_matches(const Override* rule, const char* name);
// The same of one of its patterns, [begin, end), which holds no |.
bool pattern_matches(const char* begin, const char* end, const char* name);
