#include "gpt2_config.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "files.h"
#include "text.h"

static const struct {
    const char* names;
    Gpt2Shape shape;
} shapes[] = {
    {"gpt2|d12", {12, 768, 12, 1024, 0, 0}},
    {"gpt2-medium|d24", {24, 1024, 16, 1024, 0, 0}},
    {"gpt2-large|d36", {36, 1280, 20, 1024, 0, 0}},
    {"gpt2-xl|d48", {48, 1600, 25, 1024, 0, 0}},
    {"nano", {4, 128, 2, 64, 0, 0}},
    {"d6", {6, 384, 6, 1024, 0, 0}},
    {"d60", {60, 1920, 30, 1024, 0, 0}},
    {"d72", {72, 2880, 45, 1024, 0, 0}},
    {"d84", {84, 3456, 54, 1024, 0, 0}},
    {"d96", {96, 5120, 40, 1024, 0, 0}},
    {"d120", {120, 6400, 50, 1024, 0, 0}},
};
enum { SHAPES = sizeof(shapes) / sizeof(shapes[0]) };

// Returns the depth of GPT-3's models at a width, interpolated in logarithms; at 64 channels it is one layer.
static double usual_layers(int channels) {
    static const double known[][2] = {{64, 1},    {768, 12},  {1024, 24}, {2048, 24},
                                      {2560, 32}, {4096, 32}, {5120, 40}, {12288, 96}};
    int i = 1;
    while (channels > known[i][0]) i++;
    const double share = log(channels / known[i - 1][0]) / log(known[i][0] / known[i - 1][0]);
    return known[i - 1][1] * pow(known[i][1] / known[i - 1][1], share);
}

enum { SIZE_POSITIONS = 1024, SIZE_VOCABULARY = 50257, SIZE_WIDE = 2048 };

static double size_of(int layers, int channels) {
    const double C = channels, embeddings = (SIZE_VOCABULARY + SIZE_POSITIONS + 2) * C;
    return layers * (12 * C * C + 13 * C) + embeddings;
}

// The shape whose size is near `wanted` and whose depth is near the usual one: a third of the depth's deviation counts
// as much as the size's. A head has 128 channels from SIZE_WIDE channels on, 64 below. False if none is within a tenth.
static bool size_choose(double wanted, Gpt2Shape* shape) {
    double min = INFINITY;
    for (int C = 64; C <= GPT2_MAX_CHANNELS; C += C < SIZE_WIDE ? 64 : 128) {
        const double exact = (wanted - size_of(0, C)) / (size_of(1, C) - size_of(0, C)), usual = usual_layers(C);
        const double depths[] = {floor(exact + 0.5), floor(usual + 0.5)};
        for (int i = 0; i < 2; i++) {
            if (!(depths[i] >= 1 && depths[i] <= GPT2_MAX_LAYERS)) continue;
            const int layers = (int)depths[i];
            const double off = fabs(log(size_of(layers, C) / wanted)), cost = 3 * off + fabs(log(layers / usual));
            if (off > 0.1 || cost >= min) continue;
            min = cost;
            *shape = (Gpt2Shape){layers, C, C / (C < SIZE_WIDE ? 64 : 128), SIZE_POSITIONS, 0, 0};
        }
    }
    return min < INFINITY;
}

// A number of parameters such as 124M or 1.5B; 0: the text is none.
static double size_number(const char* text) {
    const char* end;
    const double number = text_number(text, "KMB", 1e3, &end);
    return *text >= '0' && *text <= '9' && !*end && strpbrk(text, "kKmMbB") && !strpbrk(text, "eE") ? number : 0;
}

bool gpt2_size_check(const char* size, char* error) {
    Gpt2Shape shape;
    const double wanted = size_number(size);
    return (wanted > 0 && size_choose(wanted, &shape)) ||
           data_error(error, "--size takes a number of parameters from %.2gM to %.3gB, not '%s'; type --size %s",
                      size_of(1, 64) / 1e6, size_of(GPT2_MAX_LAYERS, GPT2_MAX_CHANNELS) / 1e9, size,
                      wanted == 0    ? "30B"
                      : wanted < 1e9 ? "4M"
                                     : "400B");
}

bool gpt2_take_size(Options* o, char* error) {
    if (!option_given(o, "size")) return true;
    o->model = o->size, o->size = "";
    o->given[option_find("model") - OPTIONS] = true;
    return gpt2_size_check(o->model, error);
}

const Gpt2Shape* gpt2_named(const char* name) {
    static Gpt2Shape sized;
    for (int i = 0; i < SHAPES; i++) {
        if (text_among(name, shapes[i].names, '|')) return &shapes[i].shape;
    }
    const double wanted = size_number(name);
    return wanted > 0 && size_choose(wanted, &sized) ? &sized : NULL;
}

bool gpt2_unknown(const char* name, char* error) {
    const char *owner = strchr(name, '/'), *text = NULL;
    if (owner && owner > name && owner[1] && !strchr(owner + 1, '/') && *name != '.') {
        return data_error(error,
                          "--model %s is no folder here; for the model of that name on the Hugging Face hub type hf "
                          "download %s --local-dir %s, and then --model ./%s",
                          name, name, owner + 1, owner + 1);
    }
    for (int i = 0; i < SHAPES; i++) text_add(&text, "%s%s", i ? "|" : "", shapes[i].names);
    return data_error(
        error, "--model '%s' is neither a folder nor a name that nibble knows; type one of %s, or a folder's path",
        name, text);
}

// A member of config.json: a number that the shape takes, or a setting of which nibble supports transformers' default.
typedef struct {
    const char *key, *wanted;  // wanted: its only value, as JSON; NULL: a whole number from 1 to `max`
    int usual, max, *number;
} Member;

// Takes or checks a member. An absent one means the default, and so does null, except for numbers.
static bool member_take(const Json* json, const Member* member, const char* folder, char* error) {
    const Json* found = json_get(json, member->key);
    SCOPED char* text = found ? json_text(found) : text_copy("null");
    const char* wanted = member->wanted;
    bool good = wanted && text_among(text, "null \"gelu_pytorch_tanh\"", ' ');  // gelu_new's other name
    if (wanted) {
        const double number = atof(wanted);
        good = good || strcmp(text, wanted) == 0 ||
               (found->kind == JSON_NUMBER && fabs(found->number - number) < 1e-6 * number);
    } else {
        const int64_t number = found ? json_int(json, member->key, -1) : member->usual;
        wanted = text_kept("whole numbers from 1 to %d", member->max);
        good = number >= 1 && number <= member->max, *member->number = (int)number;
    }
    return good ||
           data_error(
               error,
               "--model %s is a GPT-2 variant: its config.json has %s %.60s, and nibble has %s; give another model",
               folder, member->key, text, wanted);
}

bool gpt2_config_read(const char* folder, Gpt2Shape* shape, char* error) {
    JSON_SCOPED Json* json = json_read(path_in(folder, "config.json"), error);
    if (!json) return data_error(error, "--model %s: %s; name another folder", folder, error);
    const char* type = json_string(json, "model_type", "none");
    if (strcmp(type, "gpt2") != 0) {
        return data_error(error,
                          "--model %s holds a model of type '%s'; nibble trains GPT-2: give a folder whose config.json "
                          "says \"model_type\": \"gpt2\"",
                          folder, type);
    }
    *shape = (Gpt2Shape){0};
    const Member members[] = {
        {"activation_function", "\"gelu_new\"", 0, 0, NULL},
        {"layer_norm_epsilon", "1e-05", 0, 0, NULL},
        {"n_inner", text_kept("%lld", 4 * (long long)json_int(json, "n_embd", 768)), 0, 0, NULL},
        {"tie_word_embeddings", "true", 0, 0, NULL},
        {"scale_attn_weights", "true", 0, 0, NULL},
        {"scale_attn_by_inverse_layer_idx", "false", 0, 0, NULL},
        {"reorder_and_upcast_attn", "false", 0, 0, NULL},
        {"add_cross_attention", "false", 0, 0, NULL},
        {"is_encoder_decoder", "false", 0, 0, NULL},
        {"quantization_config", "none", 0, 0, NULL},
        {"n_layer", NULL, 12, GPT2_MAX_LAYERS, &shape->L},
        {"n_embd", NULL, 768, GPT2_MAX_CHANNELS, &shape->C},
        {"n_head", NULL, 12, 1024, &shape->NH},
        {json_get(json, "n_positions") ? "n_positions" : "n_ctx", NULL, 1024, 65536, &shape->max_T},
        {"vocab_size", NULL, 50257, 1 << 20, &shape->V}};
    for (size_t i = 0; i < sizeof(members) / sizeof(members[0]); i++) {
        if (!member_take(json, &members[i], folder, error)) return false;
    }
    return true;
}

// Heads of 64 or 128 channels: what attention's kernels have.
static bool check_heads(bool folder, const Gpt2Shape* shape, char* error) {
    const int C = shape->C, NH = shape->NH;
    if (C % NH == 0 && (C / NH == 64 || C / NH == 128)) return true;
    const char* advice = folder        ? "name another --model"
                         : C % 64 == 0 ? text_kept("type --heads %d", C / 64)
                                       : text_kept("type --channels %d", (C + 63) / 64 * 64);
    return data_error(error, "%d channels over %d heads: a head has 64 or 128 channels; %s", C, NH, advice);
}

bool gpt2_shape_choose(Options* o, const char* folder, bool resumed, int vocabulary, bool bytes, bool gpu,
                       Gpt2Shape* shape, char* error) {
    if (strcmp(o->model, "auto") == 0) o->model = !gpu ? "nano" : bytes ? "d6" : "gpt2";
    if (strcmp(o->model, "d6") == 0 && bytes && o->seq == OPTION_AUTO) o->seq = 256;
    const char* model = o->model;
    if (*folder) {
        if (!gpt2_config_read(folder, shape, error)) return false;
        if (!resumed && (o->layers >= 0 || o->channels >= 0 || o->heads >= 0)) {
            return data_error(error, "--model %s fixes the shape; leave --layers, --channels and --heads out", model);
        }
    } else {
        *shape = *gpt2_named(model);
        shape->V = vocabulary;
        if (o->layers >= 0) shape->L = (int)o->layers;
        if (o->channels >= 0) shape->C = (int)o->channels, shape->NH = shape->C / 64 > 0 ? shape->C / 64 : 1;
        if (o->heads >= 0) shape->NH = (int)o->heads;
        if (o->seq >= 0) shape->max_T = (int)o->seq;
    }
    if (vocabulary > shape->V || (bytes && shape->V != 256)) {
        const char* how =
            shape->V == 256 ? "name the text itself by --data" : "name data of the model's own tokens by --data";
        if (shape->V != 256 && tokenizer_exists(folder))
            how = text_kept("type .venv/bin/python data/prepare.py FILE --tokenizer %s --out DIR, and --data DIR here",
                            shell_word(folder));
        return data_error(error, "the data has a vocabulary of %d tokens and --model %s of %d; %s", vocabulary, model,
                          shape->V, how);
    }
    if (o->seq > shape->max_T) {
        return data_error(error, "--seq %lld is longer than the model's %d positions; type --seq %d or less", o->seq,
                          shape->max_T, shape->max_T);
    }
    shape->Vp = (shape->V + 127) / 128 * 128;
    if (o->seq == OPTION_AUTO) o->seq = shape->max_T;
    o->layers = shape->L, o->channels = shape->C, o->heads = shape->NH;
    return check_heads(*folder, shape, error);
}

// Can the value of a member such as eos_token_id be kept? It is a token of the vocabulary, several of them, or null.
static bool is_token_id(const Json* value, int64_t vocabulary) {
    if (value->kind == JSON_NULL) return true;
    if (value->kind == JSON_NUMBER)
        return value->number >= 0 && value->number < vocabulary && value->number == floor(value->number);
    bool ok = value->kind == JSON_ARRAY && value->child;
    for (const Json* one = value->child; ok && one; one = one->next) {
        ok = one->kind == JSON_NUMBER && is_token_id(one, vocabulary);
    }
    return ok;
}

bool gpt2_config_write(const char* path, const Gpt2Shape* shape, const char* dtype, const Json* loaded, int end_token,
                       char* error) {
    static const char* const tokens[] = {"bos_token_id", "eos_token_id", "pad_token_id"};
    // Members that are written from the model that is saved, or are of no use beside it.
    static const char replaced[] =
        "architectures model_type n_layer n_embd n_head n_positions n_ctx vocab_size dtype torch_dtype auto_map "
        "activation_function _name_or_path transformers_version";
    SCOPED char* text;
    size_t length;
    FILE* file = text_stream(&text, &length);
    fprintf(file,
            "{\n  \"architectures\": [\"GPT2LMHeadModel\"],\n  \"model_type\": \"gpt2\",\n  \"n_layer\": %d,\n"
            "  \"n_embd\": %d,\n  \"n_head\": %d,\n  \"n_positions\": %d,\n  \"n_ctx\": %d,\n"
            "  \"vocab_size\": %d,\n  \"activation_function\": \"gelu_new\",\n",
            shape->L, shape->C, shape->NH, shape->max_T, shape->max_T, shape->V);
    if (!loaded) {
        fputs(
            "  \"layer_norm_epsilon\": 1e-05,\n  \"initializer_range\": 0.02,\n  \"attn_pdrop\": 0.0,\n"
            "  \"embd_pdrop\": 0.0,\n  \"resid_pdrop\": 0.0,\n  \"tie_word_embeddings\": true,\n",
            file);
    }
    for (const Json* member = loaded && loaded->kind == JSON_OBJECT ? loaded->child : NULL; member;
         member = member->next) {
        if (text_among(member->key, replaced, ' ')) continue;
        if (text_ends(member->key, "_token_id") && !is_token_id(member, shape->V)) continue;
        fputs("  ", file);
        json_write_string(file, member->key);
        fputs(": ", file);
        json_write(file, member);
        fputs(",\n", file);
    }
    for (int i = 0; i < 3; i++) {
        const Json* kept = json_get(loaded, tokens[i]);
        if (kept && is_token_id(kept, shape->V)) continue;
        const bool there = i < 2 && end_token >= 0 && end_token < shape->V;
        if (there) fprintf(file, "  \"%s\": %d,\n", tokens[i], end_token);
        // Where a member is missing transformers takes GPT-2's own token, 50256.
        if (!there && shape->V <= 50256) fprintf(file, "  \"%s\": null,\n", tokens[i]);
    }
    fprintf(file, "  \"dtype\": \"%s\"\n}\n", dtype);
    fclose(file);
    return file_write(path, text, (int64_t)length, error);
}

double gpt2_flops(int64_t parameters, int64_t layers, int64_t channels, int64_t tokens) {
    return 6.0 * (double)parameters + 6.0 * (double)layers * (double)channels * (double)tokens;
}
