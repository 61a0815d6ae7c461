// See gpt2_config.h.
#include "gpt2_config.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "safetensors.h"

static const Gpt2Name names[] = {
    {"gpt2", 12, 768, 12, 1024},
    {"gpt2-medium", 24, 1024, 16, 1024},
    {"gpt2-large", 36, 1280, 20, 1024},
    {"gpt2-xl", 48, 1600, 25, 1024},
    {"nano", 4, 128, 2, 64},
    {"d6", 6, 384, 6, 1024},
    {"d12", 12, 768, 12, 1024},
    {"d24", 24, 1024, 16, 1024},
    {"d36", 36, 1280, 20, 1024},
    {"d48", 48, 1600, 25, 1024},
    {"d60", 60, 1920, 30, 1024},
    {"d72", 72, 2880, 45, 1024},
    {"d84", 84, 3456, 54, 1024},
};
enum { NAMES = sizeof(names) / sizeof(names[0]) };

const Gpt2Name* gpt2_named(const char* name) {
    for (int i = 0; i < NAMES; i++) {
        if (strcmp(name, names[i].name) == 0) return &names[i];
    }
    return NULL;
}

const char* gpt2_names(char* text, size_t bytes) {
    size_t used = 0;
    for (int i = 0; i < NAMES && used < bytes; i++) {
        used += (size_t)snprintf(text + used, bytes - used, "%s%s", i ? "|" : "", names[i].name);
    }
    return text;
}

static bool is_plain_gpt2(const Json* json, const char* folder, char* error) {
    const char* type = json_string(json, "model_type", "none");
    if (strcmp(type, "gpt2") != 0) {
        return data_error(
            error,
            "--model %s holds a model of type '%s'; nibble trains GPT-2: give a folder whose config.json says "
            "\"model_type\": \"gpt2\"",
            folder, type);
    }
    const char* activation = json_string(json, "activation_function", "gelu_new");
    double epsilon = json_number(json, "layer_norm_epsilon", 1e-5);
    int64_t inner = 4 * json_int(json, "n_embd", 768);
    if (strcmp(activation, "gelu_new") != 0 || fabs(epsilon - 1e-5) > 1e-9 ||
        json_int(json, "n_inner", inner) != inner || json_number(json, "tie_word_embeddings", 1) == 0) {
        return data_error(
            error,
            "--model %s is a GPT-2 variant (activation_function %s, layer_norm_epsilon %g); nibble has gelu_new, "
            "1e-05, n_inner 4 x n_embd and a tied head",
            folder, activation, epsilon);
    }
    static const struct {
        const char* flag;
        int needed;
    } flags[] = {{"scale_attn_weights", 1}, {"scale_attn_by_inverse_layer_idx", 0}, {"add_cross_attention", 0}};
    for (int i = 0; i < 3; i++) {
        if (json_number(json, flags[i].flag, flags[i].needed) == flags[i].needed) continue;
        return data_error(error, "--model %s is a GPT-2 variant with %s %s, which nibble has not", folder,
                          flags[i].flag, flags[i].needed ? "false" : "true");
    }
    return true;
}

bool gpt2_config_read(const char* folder, const Gpt2Shape* most, Gpt2Shape* shape, char* error) {
    char path[4608], reason[DATA_ERROR_BYTES];
    snprintf(path, sizeof(path), "%s/config.json", folder);
    int64_t bytes;
    char* text = file_read(path, &bytes, reason);
    Json* json = text ? json_parse(text, bytes, path, reason) : NULL;
    free(text);
    if (!json) return data_error(error, "--model %s: %s", folder, reason);
    bool fine = is_plain_gpt2(json, folder, error);
    *shape =
        (Gpt2Shape){json_int(json, "n_layer", 12), json_int(json, "n_embd", 768), json_int(json, "n_head", 12),
                    json_int(json, "n_positions", json_int(json, "n_ctx", 1024)), json_int(json, "vocab_size", 50257)};
    json_free(json);
    if (!fine) return false;
    const int64_t found[] = {shape->layers, shape->channels, shape->heads, shape->positions, shape->vocabulary};
    const int64_t limit[] = {most->layers, most->channels, most->heads, most->positions, most->vocabulary};
    for (int i = 0; i < 5; i++) {
        if (found[i] >= 1 && found[i] <= limit[i]) continue;
        return data_error(
            error,
            "%s has a shape out of range: n_layer %lld (at most %lld), n_embd %lld (at most %lld), n_head "
            "%lld, n_positions %lld, vocab_size %lld",
            path, (long long)found[0], (long long)limit[0], (long long)found[1], (long long)limit[1],
            (long long)found[2], (long long)found[3], (long long)found[4]);
    }
    return true;
}

bool gpt2_config_write(const char* path, const Gpt2Shape* shape, const char* dtype, char* error) {
    int last = shape->vocabulary == 50257 ? 50256 : 0;  // GPT-2's end of text
    char text[2048];
    int bytes = snprintf(
        text, sizeof(text),
        "{\n  \"architectures\": [\"GPT2LMHeadModel\"],\n  \"model_type\": \"gpt2\",\n  \"n_layer\": %lld,\n  "
        "\"n_embd\": %lld,\n"
        "  \"n_head\": %lld,\n  \"n_positions\": %lld,\n  \"n_ctx\": %lld,\n  \"vocab_size\": %lld,\n"
        "  \"activation_function\": \"gelu_new\",\n  \"layer_norm_epsilon\": 1e-05,\n  \"initializer_range\": 0.02,\n"
        "  \"attn_pdrop\": 0.0,\n  \"embd_pdrop\": 0.0,\n  \"resid_pdrop\": 0.0,\n  \"tie_word_embeddings\": true,\n"
        "  \"bos_token_id\": %d,\n  \"eos_token_id\": %d,\n  \"dtype\": \"%s\"\n}\n",
        (long long)shape->layers, (long long)shape->channels, (long long)shape->heads, (long long)shape->positions,
        (long long)shape->positions, (long long)shape->vocabulary, last, last, dtype);
    return file_write(path, text, bytes, error);
}
