// See removed.h.
#include "removed.h"
#include <stddef.h>
#include <string.h>

// An option, the value that had no effect, and the answer.
static const struct {
    const char *name, *unused, *answer;
} OPTIONS[] = {
    {"comm", "grads", "leave --comm out: --grads bf16 also sends half the bytes"},
    {"format", "", "put the format's file into optim/formats, as optim/README.md says under How to add, and type make"},
    {"rank-basis", "fp32", "leave --rank-basis out: galore keeps its directions in fp32"},
    {NULL, NULL, NULL},
};

// An option that still exists, its former value, and the answer.
static const struct {
    const char *option, *value, *answer;
} VALUES[] = {
    {"data-format", "nanogpt",
     "type .venv/bin/python data/prepare.py --from-nanogpt FOLDER --out DIR, and --data DIR here"},
    {NULL, NULL, NULL},
};

// A format's name and the answer. A name without a block means the format with every block, scale and rounding, and a
// scale's name means every format with it.
static const struct {
    const char *name, *answer;
} FORMATS[] = {
    {"log8", "type adalog8, or udyn8"},
    {"log16", "type bf16:sr"},
    {"mulaw4", "type de4/32@dq8, or nf4"},
    {"@bf16", "leave @bf16 out, or type @e8m0 or @dq8"},
    {"e4m3+8", "type bf16+8, or e4m3:ef"},
    {"fp16:kahan", "type bf16+16, which is exact in as many bytes, or bf16+8"},
    {"fp16:sr", "type bf16:sr, or bf16+8, which is more precise"},
    {NULL, NULL},
};

const char* removed_option(const char* name, const char* value) {
    for (int i = 0; OPTIONS[i].name; i++) {
        if (strcmp(OPTIONS[i].name, name) != 0) continue;
        return value && strcmp(value, OPTIONS[i].unused) == 0 ? NULL : OPTIONS[i].answer;
    }
    return NULL;
}

const char* removed_value(const char* option, const char* value) {
    for (int i = 0; VALUES[i].option; i++) {
        if (strcmp(VALUES[i].option, option) == 0 && strcmp(VALUES[i].value, value) == 0) return VALUES[i].answer;
    }
    return NULL;
}

const char* removed_format(const char* name) {
    const size_t base = strcspn(name, "/:@");
    for (int i = 0; FORMATS[i].name; i++) {
        const char* row = FORMATS[i].name;
        if (row[0] == '@' && strstr(name, row)) return FORMATS[i].answer;
        if (strcmp(row, name) == 0 || (strlen(row) == base && strncmp(row, name, base) == 0)) return FORMATS[i].answer;
    }
    return NULL;
}
