// What others write and this program reads, under clang's libFuzzer: `make fuzz` builds this file and all that is
// behind it for the CPU, with the sanitizers, and dev/fuzz/run.py runs each target of the table at the end. NIBBLE_FUZZ
// in the environment names the target. An input is the content of a file, or of several with a 0 byte between them; a
// target writes them into a folder in memory and reads them as the trainer does. Right answers are checked elsewhere
// (dev/unit); here any input must be taken or refused by a sentence.
#define TESTING
#include "../../optim/override.h"
#include "../../train_gpt2.cu"

#include <setjmp.h>
#include <sys/stat.h>

typedef struct {
    const char* bytes;
    size_t count;
} FuzzInput;

static char folder[64];
static jmp_buf refused;  // where user_error() goes instead of ending the process

// Aborts, which the fuzzer reports with the input, where a fact does not hold.
static void demand(bool fact) {
    if (!fact) abort();
}

extern "C" void __wrap_launch_failed(int, const char* text) {
    demand(strncmp(text, "train: error: ", 14) == 0 && strchr(text, '\n') == strchr(text, 0) - 1);
    longjmp(refused, 1);
}

// A sentence says something and ends.
static void demand_sentence(const char* error) {
    demand(error[0] && memchr(error, 0, DATA_ERROR_BYTES));
}

// Cuts the input at its next 0 byte: returns the piece before it, and leaves what comes after.
static FuzzInput take(FuzzInput* rest) {
    const char* end = (const char*)memchr(rest->bytes, 0, rest->count);
    FuzzInput piece = {rest->bytes, end ? (size_t)(end - rest->bytes) : rest->count};
    const size_t used = end ? piece.count + 1 : piece.count;
    rest->bytes += used, rest->count -= used;
    return piece;
}

// The piece as a string. The caller frees it.
static char* take_text(FuzzInput* rest) {
    FuzzInput piece = take(rest);
    return strndup(piece.bytes, piece.count);
}

static const char* path_of(const char* name) {
    static char path[128];
    snprintf(path, sizeof(path), "%s/%s", folder, name);
    return path;
}

static void put(const char* name, FuzzInput input, FuzzInput end = {"", 0}) {
    FILE* file = fopen(path_of(name), "wb");
    demand(file != nullptr);
    fwrite(input.bytes, 1, input.count, file);
    fwrite(end.bytes, 1, end.count, file);
    fclose(file);
}

// What was parsed, written again, is JSON.
static void fuzz_json(FuzzInput input) {
    char error[DATA_ERROR_BYTES] = "", *text = nullptr;
    size_t bytes = 0;
    Json* json = json_parse(input.bytes, (int64_t)input.count, "input", error);
    if (!json) return demand_sentence(error);
    json_int(json, "a", 0), json_number(json, "a", 0), json_string(json, "a", "");
    FILE* file = open_memstream(&text, &bytes);
    json_write(file, json);
    fclose(file);
    Json* again = json_parse(text, (int64_t)bytes, "output", error);
    demand(again != nullptr);
    json_free(again), json_free(json), free(text);
}

// model.safetensors, or an index and the two files that it may name.
static void fuzz_safetensors(FuzzInput input) {
    static const ModelTensor tensors[] = {{"h.0.attn.bias", 1, 4, 1, false, 0, 1, "", 0, 0},
                                          {"wte.weight", 8, 4, 7, false, -1, 1, "", 0, 0},
                                          {"lm_head.weight", 4, 8, 4, true, -1, 1, "", 0, 0}};
    char error[DATA_ERROR_BYTES] = "";
    Safetensors model;
    const bool several = input.count > 0 && input.bytes[0] == '{';
    unlink(path_of("model.safetensors")), unlink(path_of("model.safetensors.index.json"));
    if (several) put("model.safetensors.index.json", take(&input));
    put(several ? "a.safetensors" : "model.safetensors", input);
    if (several) put("b.safetensors", input);
    for (bool whole : {false, true}) {
        bool fine = whole ? model_folder_open(&model, folder, tensors, 3, error)
                          : safetensors_open(&model, path_of(several ? "a.safetensors" : "model.safetensors"), error);
        if (!fine) demand_sentence(error);
        if (!fine) continue;
        for (int i = 0; i < model.count; i++) {
            const SafetensorsTensor* tensor = &model.tensors[i];
            demand(safetensors_find(&model, tensor->name) == tensor);
            float value[4];
            for (int64_t first : {(int64_t)0, tensor->bytes / 4 - 4}) {
                if (!safetensors_floats(&model, tensor, first, 4, value, error)) demand_sentence(error);
            }
        }
        for (const ModelTensor& tensor : tensors) {
            float values[32];
            if (!model_folder_read(&model, &tensor, values, error)) demand_sentence(error);
        }
        safetensors_close(&model);
    }
}

// A config.json that is taken is written again with the same shape.
static void fuzz_config(FuzzInput input) {
    char error[DATA_ERROR_BYTES] = "";
    Gpt2Shape shape, again;
    put("config.json", input);
    if (!gpt2_config_read(folder, &shape, error)) return demand_sentence(error);
    demand(shape.L >= 1 && shape.L <= GPT2_MAX_LAYERS && shape.NH >= 1 && shape.C <= GPT2_MAX_CHANNELS);
    Json* loaded = json_parse(input.bytes, (int64_t)input.count, "input", error);
    demand(gpt2_config_write(path_of("config.json"), &shape, "float32", loaded, 5, error));
    demand(gpt2_config_read(folder, &again, error) && memcmp(&shape, &again, sizeof(shape)) == 0);
    json_free(loaded);
}

static Options standard_options() {
    static Options options;
    if (!options.data) options_defaults(&options);
    return options;
}

// state.json without its seal, which is put behind it here so that its checksum is right; then options that were typed.
static void fuzz_state(FuzzInput input) {
    char error[DATA_ERROR_BYTES] = "", seal[64];
    FuzzInput state_text = take(&input);
    const uint32_t crc = crc32c(0, state_text.bytes, (int64_t)state_text.count);
    snprintf(seal, sizeof(seal), "\"crc32c\": %u\n}\n", crc);
    put("state.json", state_text, {seal, strlen(seal)});
    Json* state = checkpoint_verify(folder, false, error);
    if (!state) return demand_sentence(error);
    Options options = standard_options();
    for (int i = 0; i < OPTION_COUNT && (size_t)i < input.count; i++) options.given[i] = input.bytes[i] % 2 != 0;
    static RunFolder run;
    run = {};
    run.options = &options, run.resumed = state;
    if (!resume_options(&run, error)) demand_sentence(error);
    resume_optim(&run);
    const RunState none = {};
    run_state_read(state, &none);
    json_free(state);
}

// A shard, a file of any other name, or a folder with its meta.json, in each --data-format; the windows of its parts.
static void fuzz_shards(FuzzInput input) {
    static const char* const names[] = {"data.bin", "data.txt", "shards/train_000.bin", "shards/val_000.bin"};
    char error[DATA_ERROR_BYTES] = "";
    if (input.count < 2) return;
    const int kind = (unsigned char)input.bytes[0] % 3, T = 1 + (unsigned char)input.bytes[1] % 16;
    const DataFormat format = (DataFormat)((unsigned char)input.bytes[0] / 128);
    input.bytes += 2, input.count -= 2;
    if (kind == 2) put("shards/meta.json", take(&input));
    for (int i = kind; i < (kind == 2 ? 4 : kind + 1); i++) put(names[i], input);
    for (DatasetPart part : {DATASET_TRAIN, DATASET_VALIDATION, DATASET_WHOLE}) {
        Dataset data = {};
        int tokens[16], targets[16];
        char path[128];
        snprintf(path, sizeof(path), "%s", path_of(kind == 2 ? "shards" : names[kind]));
        bool fine = dataset_open(&data, path, format, part, 0.3, T, error);
        if (!fine) demand_sentence(error);
        const int64_t windows = fine ? dataset_windows(&data, T) : 0;
        for (int64_t i = 0; i < windows && i < 100; i++) {
            const bool read = dataset_window(&data, T, i, tokens, targets, error);
            if (!read) demand_sentence(error);
            for (int t = 0; t < T && read; t++) demand(tokens[t] >= 0 && targets[t] >= 0);
        }
        if (fine) dataset_close(&data);
    }
}

// vocab.json, merges.txt, what else a folder may hold of a tokenizer, and a text to encode; tokenizer.json alone where
// the first byte is a space.
static void fuzz_tokenizer(FuzzInput input) {
    static const char* const names[] = {"vocab.json", "merges.txt", "added_tokens.json"};
    char error[DATA_ERROR_BYTES] = "";
    int token[64], bytes = 0;
    const bool alone = input.count > 0 && input.bytes[0] == ' ';
    for (const char* name : names) unlink(path_of(name));
    unlink(path_of("tokenizer.json"));
    if (alone) put("tokenizer.json", take(&input));
    for (int i = 0; i < 3 && !alone; i++) {
        FuzzInput piece = take(&input);
        if (i < 2 || piece.count > 0) put(names[i], piece);
    }
    Tokenizer* tokenizer = tokenizer_open(folder, error);
    if (!tokenizer) return demand_sentence(error);
    const int count = tokenizer_encode(tokenizer, input.bytes, (int64_t)input.count, token, 64);
    for (int i = 0; i < count && i < 64; i++) tokenizer_decode(tokenizer, token[i], &bytes);
    for (int i : {-1, 0, 255, 50256, INT32_MAX}) tokenizer_decode(tokenizer, i, &bytes);
    tokenizer_close(tokenizer);
}

// An evaluation file, whose checksum is put in here, so that it is right; the batches of its rows.
static void fuzz_eval(FuzzInput input) {
    char error[DATA_ERROR_BYTES] = "";
    if (input.count < 64) return;
    const uint32_t crc = crc32c(crc32c(0, input.bytes, 60), input.bytes + 64, (int64_t)input.count - 64);
    char* file = (char*)malloc(input.count);
    memcpy(file, input.bytes, input.count), memcpy(file + 60, &crc, 4);
    put("x.eval", {file, input.count});
    free(file);
    Evaluation task;
    if (!evaluation_open(&task, path_of("x.eval"), nullptr, error)) return demand_sentence(error);
    for (int T : {1, 5, 64}) {
        EvaluationPass pass;
        if (!evaluation_begin(&pass, &task, T, 100, error)) demand_sentence(error);
        for (int i = 0; i < pass.batches; i++) evaluation_fill(&pass, i), evaluation_take(&pass);
        evaluation_result(&pass), evaluation_end(&pass);
    }
    evaluation_close(&task);
}

// A file of prompts.
static void fuzz_prompts(FuzzInput input) {
    char error[DATA_ERROR_BYTES] = "";
    Tokenizer* bytes = tokenizer_open(nullptr, error);
    Prompts prompts;
    put("prompts", input);
    const bool fine = prompts_open(&prompts, "", path_of("prompts"), bytes, 256, error);
    if (!fine) demand_sentence(error);
    for (int i = 0; i < prompts.count && fine; i++) demand(prompts.length[i] > 0 && prompts.tokens[i] < 256);
    prompts_close(&prompts), tokenizer_close(bytes);
}

// A command line, a word a line. What an option is set to reads back as the same.
static void fuzz_options(FuzzInput input) {
    char error[DATA_ERROR_BYTES] = "", *text = take_text(&input), *rest = nullptr, *words[64] = {(char*)"train"};
    int count = 1;
    for (char* word = strtok_r(text, "\n", &rest); word && count < 64; word = strtok_r(nullptr, "\n", &rest)) {
        words[count++] = word;
    }
    Options options = standard_options(), again = options;
    bool fine = options_parse(&options, count, words, error);
    if (!fine) demand_sentence(error);
    for (int i = 0; i < OPTION_COUNT && fine; i++) {
        if (!options.given[i]) continue;
        const char* value = option_text(&OPTIONS[i], &options);
        demand(option_set(&OPTIONS[i], &again, value, error));
        demand(strcmp(option_text(&OPTIONS[i], &again), value) == 0);
    }
    free(text);
    if (!fine) return;
    OptimConfig config = optim_config_of(&options);
    if (!optim_resolve(&config, error)) demand_sentence(error);
}

// The text of --override, and a tensor's name.
static void fuzz_overrides(FuzzInput input) {
    char error[DATA_ERROR_BYTES] = "", *text = take_text(&input), *name = take_text(&input);
    Override overrides[OVERRIDES];
    int count = 0;
    const bool fine = overrides_parse(text, overrides, &count, error);
    if (!fine) demand_sentence(error);
    demand(!fine || count <= OVERRIDES);
    for (int i = 0; i < count && fine; i++) patterns_match(overrides[i].patterns, name);
    Options options = standard_options();
    OptimConfig config;
    options.overrides = text;
    config = optim_config_of(&options);
    if (!optim_resolve(&config, error)) demand_sentence(error);
    free(text), free(name);
}

// A list of Slurm's hosts, or lines of NAME=VALUE, of the variables that launchers set.
static void fuzz_environment(FuzzInput input) {
    static const char names[] =
        "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT SLURM_PROCID SLURM_STEP_NUM_TASKS "
        "SLURM_LOCALID SLURM_JOB_ID SLURM_STEP_ID SLURM_JOB_NODELIST SLURM_STEP_NODELIST SLURM_STEP_NUM_NODES "
        "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK NIBBLE_SECRET";
    char error[DATA_ERROR_BYTES] = "", host[16], *text = take_text(&input), *rest = nullptr;
    Launch launch;
    launch_first_host(text, host, sizeof(host));
    for (char* line = strtok_r(text, "\n", &rest); line; line = strtok_r(nullptr, "\n", &rest)) {
        char* value = strchr(line, '=');
        if (value) *value++ = 0;
        if (value && text_among(line, names, ' ')) setenv(line, value, 1);
    }
    if (!launch_environment(&launch, 1, error)) demand_sentence(error);
    for (const char *list = names, *name; (name = text_word(&list, ' '));) unsetenv(name);
    free(text);
}

static const struct {
    const char* name;
    void (*run)(FuzzInput input);
} targets[] = {{"json", fuzz_json},       {"safetensors", fuzz_safetensors}, {"config", fuzz_config},
               {"state", fuzz_state},     {"shards", fuzz_shards},           {"tokenizer", fuzz_tokenizer},
               {"options", fuzz_options}, {"overrides", fuzz_overrides},     {"environment", fuzz_environment},
               {"eval", fuzz_eval},       {"prompts", fuzz_prompts}};
static void (*target)(FuzzInput input);

static void remove_folder() {
    char error[DATA_ERROR_BYTES];
    folder_remove(folder, error);
}

extern "C" int LLVMFuzzerInitialize(int*, char***) {
    const char *name = getenv("NIBBLE_FUZZ"), *shards = "shards";
    for (const auto& one : targets) {
        if (name && strcmp(name, one.name) == 0) target = one.run;
    }
    if (!target) {
        fprintf(stderr, "NIBBLE_FUZZ names no target:");
        for (const auto& one : targets) fprintf(stderr, " %s", one.name);
        fprintf(stderr, "\n");
        exit(2);
    }
    strcpy(folder, access("/dev/shm", W_OK) == 0 ? "/dev/shm/nibble_fuzz_XXXXXX" : "/tmp/nibble_fuzz_XXXXXX");
    demand(mkdtemp(folder) && mkdir(path_of(shards), 0700) == 0);
    atexit(remove_folder);
    return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t count) {
    if (setjmp(refused) == 0) target({(const char*)bytes, count});
    return 0;
}
