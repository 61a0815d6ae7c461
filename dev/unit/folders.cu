// Tests of model folders as other programs write them: tensors, several files, tokenizers, config.json, sizes. Folders
// that ./train meets in other ways: commands.txt.
#include "../../data/gpt2_config.h"
#include "../../data/model_folder.h"
#include "../../data/tokenizer.h"
#include "cli.h"
#include "tensors.h"

// Makes a model of a checkpoint. Returns its path.
static const char* copy_model(const char* work, const char* name, const char* from) {
    const char* to = joined(work, name);
    mkdir(to, 0755);
    for (const char* file : {"config.json", "model.safetensors"}) {
        int64_t bytes;
        const char* text = contents(from, file, &bytes);
        write_bytes(to, file, text, (size_t)bytes);
    }
    return to;
}

static const char BYTE_LEVEL[] = "{\"type\": \"ByteLevel\", \"add_prefix_space\": false}";

static const char* train_bytes(Test* test, const char* work) {
    train_well(BRIEF "/used --steps 1", work, work);
    return joined(work, "used/step_00000001");
}

// A file that becomes shorter while it is in use is an error and no signal. (Data: cli_data_is_cut.)
FOLDER_TEST(folders_cut_while_read) {
    const char* path = joined(work, "x.safetensors");
    static float values[1 << 16];
    SafetensorsTensor entry = tensor_of("x", "BF16", {1 << 16});
    SafetensorsWriter* writer = safetensors_begin(path, &entry, 1, nullptr, error);
    expect(safetensors_write(writer, values, 2 << 16) && safetensors_finish(writer, nullptr, nullptr), "%s", error);
    Safetensors file;
    expect(safetensors_open(&file, path, error), "%s", error);
    expect(safetensors_floats(&file, file.tensors, 0, 1 << 16, values, error), "%s", error);
    if (truncate(path, 5000) != 0) abort();
    expect(!safetensors_floats(&file, file.tensors, 0, 1 << 16, values, error) && strstr(error, "cut short"), "%s",
           error);
    safetensors_close(&file);
}

struct Added {
    const char *name, *dtype;
    int64_t shape[4];
    int dims;
    int head;  // lm_head: 1 equal to the embedding, 2 different in one value
};

// Writes the tensors of FROM/model.safetensors from number `first` to number `last`, and `added`, into a file.
static void rewrite(const char* from, const char* to, int first, int last, const Added* added) {
    Safetensors file;
    if (!safetensors_open(&file, joined(from, "model.safetensors"), error)) abort();
    SafetensorsTensor entries[64];
    int count = 0;
    for (int t = 0; t < file.count; t++) {
        const SafetensorsTensor* tensor = &file.tensors[t];
        if (t < first || t >= last) continue;
        entries[count++] = *tensor;
    }
    if (added) {
        entries[count] = tensor_of(added->name, added->dtype, {});
        entries[count].dims = added->dims;
        memcpy(entries[count++].shape, added->shape, sizeof(added->shape));
    }
    SafetensorsWriter* writer = safetensors_begin(to, entries, count, "pt", error);
    char* bytes = (char*)calloc(1, 1 << 20);
    for (int t = first; t < last && t < file.count; t++) {
        if (!safetensors_read(&file, &file.tensors[t], 0, file.tensors[t].bytes, bytes, error)) abort();
        if (!safetensors_write(writer, bytes, file.tensors[t].bytes)) abort();
    }
    if (added) {
        const SafetensorsTensor* wte = safetensors_find(&file, "transformer.wte.weight");
        int64_t size = strcmp(added->dtype, "U8") == 0 ? 1 : strcmp(added->dtype, "BF16") == 0 ? 2 : 4;
        for (int d = 0; d < added->dims; d++) size *= added->shape[d];
        memset(bytes, 0, 1 << 20);
        if (added->head && !safetensors_read(&file, wte, 0, wte->bytes, bytes, error)) abort();
        if (added->head == 2) bytes[wte->bytes - 1] ^= 1;
        if (!safetensors_write(writer, bytes, size)) abort();
    }
    if (!safetensors_finish(writer, nullptr, nullptr)) abort();
    safetensors_close(&file);
}

// Every tensor is used, or known to be none of the weights, or refused by name.
FOLDER_TEST(folders_unused_tensors) {
    const char* from = train_bytes(test, work);
    const std::tuple<Added, bool> cases[] = {
        {{"lm_head.weight", "BF16", {256, 64}, 2, 1}, true},
        {{"lm_head.weight", "BF16", {256, 64}, 2, 2}, false},
        {{"lm_head.weight", "BF16", {64, 256}, 2, 1}, false},
        {{"lm_head.weight", "U8", {4}, 1, 0}, false},
        {{"lm_head.bias", "F32", {256}, 1, 0}, false},
        {{"transformer.h.0.attn.bias", "U8", {1, 1, 32, 32}, 4, 0}, true},
        {{"h.0.attn.masked_bias", "F32", {}, 0, 0}, true},
        {{"h.1.attn.bias", "U8", {1, 1, 32, 32}, 4, 0}, false},
        {{"transformer.h.1.ln_1.weight", "F32", {64}, 1, 0}, false},
        {{"wte.weight", "BF16", {256, 64}, 2, 1}, false},  // the other one is used
        {{"transformer.h.0.attn.c_attn.weight_scale", "F32", {1}, 1, 0}, false},
        {{"score.weight", "F32", {2, 64}, 2, 0}, false},
    };
    const char* folder = copy_model(work, "m", from);
    for (const auto& [added, good] : cases) {
        rewrite(from, joined(folder, "model.safetensors"), 0, 64, &added);
        run_train(sample, "--sample a --sample-tokens 2 --model %s", folder);
        run_train(train, QUICK " --seq 32 --data %s/text.txt --run %s/new --steps 0 --model %s", work, work, folder);
        for (Child* child : {&sample, &train}) {
            if (good) expect_code(*child, 0);
            if (!good) expect_error(test, child, added.name, added.name, "model.safetensors holds");
        }
        remove_tree(joined(work, "new"));
    }
}

static const char INDEX_JSON[] = "model.safetensors.index.json";

// Several files with an index are one model; what the index says must hold.
FOLDER_TEST(folders_several_files) {
    const char *from = train_bytes(test, work), *folder = copy_model(work, "m", from);
    const char *one = "model-00001-of-00002.safetensors", *two = "model-00002-of-00002.safetensors";
    rewrite(from, joined(folder, one), 0, 5, nullptr), rewrite(from, joined(folder, two), 5, 64, nullptr);
    unlink(joined(folder, "model.safetensors"));
    Safetensors file;
    expect(safetensors_open(&file, joined(from, "model.safetensors"), error), "%s", error);
    auto index = [&](const char* odd, const char* odd_file) {
        FILE* out = fopen(joined(folder, INDEX_JSON), "w");
        fprintf(out, "{\"metadata\": {\"total_size\": 1}, \"weight_map\": {");
        for (int t = 0; t < file.count; t++)
            fprintf(out, "%s\"%s\": \"%s\"", t ? ", " : "", file.tensors[t].name, t < 5 ? one : two);
        if (odd) fprintf(out, ", \"%s\": \"%s\"", odd, odd_file);
        fprintf(out, "}}");
        fclose(out);
    };
    index(nullptr, nullptr);
    run_train(whole, "--sample the --sample-tokens 9 --model %s", from);
    run_train(parts, "--sample the --sample-tokens 9 --model %s", folder);
    expect(strcmp(OUT(whole), OUT(parts)) == 0, "'%s' and '%s'", OUT(whole), OUT(parts));
    train_well(QUICK " --seq 32 --data %s/text.txt --run %s/new --steps 0 --model %s", work, work, folder);
    expect_equal_files(test, from, joined(work, "new/step_00000000"), "model.safetensors");
    const char* const odd[][3] = {{"x", one, "holds no tensor x"},
                                  {"x", "../m/model-00001-of-00002.safetensors", "no name of a file"},
                                  {"x", "none.safetensors", "none.safetensors: No such file"},
                                  {"x", "", "no name of a file"}};
    for (const auto& item : odd) {
        index(item[0], item[1]);
        refused(item[1], item[2], "", "--sample a --model %s", folder);
    }
    write_text(folder, INDEX_JSON, "{\"weight_map\": []}");
    refused("an empty index", "holds no weight_map", INDEX_JSON, "--sample a --model %s", folder);
    index(nullptr, nullptr);
    rewrite(from, joined(folder, two), 4, 64, nullptr);
    refused("a tensor in two files", "both hold the tensor", file.tensors[4].name, "--sample a --model %s", folder);
}

static void expect_tokens(Test* test, const Tokenizer* tokenizer) {
    int tokens[16], bytes = 0;
    int count = tokenizer_encode(tokenizer, "the th.", 7, tokens, 16);
    const int want[] = {257, ' ', 256, '.'};
    expect(count == 4 && memcmp(tokens, want, sizeof(want)) == 0, "%d tokens, the first %d", count, tokens[0]);
    expect(tokenizer_end(tokenizer) == END && tokenizer_vocabulary(tokenizer) == VOCABULARY, "%d of %d",
           tokenizer_end(tokenizer), tokenizer_vocabulary(tokenizer));
    const char* text = tokenizer_decode(tokenizer, 257, &bytes);
    expect(bytes == 3 && memcmp(text, "the", 3) == 0, "%.*s", bytes, text);
}

// tokenizer.json stands for vocab.json and merges.txt where it describes the same kind of tokenizer.
FOLDER_TEST(folders_tokenizer_json) {
    write_tokenizer(work);
    Tokenizer* tokenizer = tokenizer_open(work, error);
    expect(tokenizer, "%s", error);
    expect_tokens(test, tokenizer);
    unlink(joined(work, "merges.txt")), unlink(joined(work, "vocab.json"));
    write_tokenizer(work, true, BYTE_LEVEL);
    tokenizer = tokenizer_open(work, error);
    expect(tokenizer, "%s", error);
    int bytes = 0;
    expect_tokens(test, tokenizer);
    const char* pad = tokenizer_decode(tokenizer, 259, &bytes);
    expect(bytes == 5 && memcmp(pad, "<pad>", 5) == 0, "the added token is %.*s", bytes, pad);
    int tokens[16];
    const int want[] = {257, 259, 256, '<'},
              count = tokenizer_encode(tokenizer, "the<pad>th<|endoftext|>", 23, tokens, 16);
    expect(count == 3 + 13 && memcmp(tokens, want, sizeof(want)) == 0, "%d tokens around <pad>", count);
    char* whole = contents(work, "tokenizer.json");
    for (const char* flag : {"lstrip", "rstrip", "single_word"}) {
        const char* flagged = formatted("\"id\": 259, \"%s\": true", flag);
        write_text(work, "tokenizer.json", replaced(whole, "\"id\": 259", flagged));
        expect(!tokenizer_open(work, error) && strstr(error, "adds the token \"<pad>\" with"), "%s: %s", flag, error);
    }
}

// The vocabulary of bytes is there for transformers, which reads it as we do: each byte is its number.
FOLDER_TEST(folders_tokenizer_of_bytes) {
    expect(tokenizer_write_bytes(work, error), "%s", error);
    Tokenizer* bytes = tokenizer_open(work, error);
    int tokens[256];
    char text[256];
    for (int i = 0; i < 256; i++) text[i] = (char)i;
    expect(bytes && tokenizer_tokens(bytes) == 256 && tokenizer_encode(bytes, text, 256, tokens, 256) == 256, "%s",
           error);
    for (int i = 0; i < 256; i++) expect(tokens[i] == i, "byte %d is token %d", i, tokens[i]);
}

// Sizes give GPT-3's shapes where its table has them, and elsewhere nearly as many parameters as asked for in heads
// that attention has.
TEST(folders_sizes) {
    const std::tuple<const char*, int, int, int> known[] = {
        {"124M", 12, 768, 12},    {"350m", 24, 1024, 16}, {"0.76B", 24, 1536, 24}, {"1.3B", 24, 2048, 16},
        {"2.7B", 32, 2560, 20},   {"6.7b", 32, 4096, 32}, {"13B", 40, 5120, 40},   {"175B", 96, 12288, 96},
        {"30000M", 54, 6784, 53}, {"gpt2", 12, 768, 12},  {"d96", 96, 5120, 40}};
    for (const auto& [size, layers, channels, heads] : known) {
        const Gpt2Shape* got = gpt2_named(size);
        expect(
            got && got->layers == layers && got->channels == channels && got->heads == heads && got->positions == 1024,
            "%s: %d layers, %d channels, %d heads", size, got ? (int)got->layers : 0, got ? (int)got->channels : 0,
            got ? (int)got->heads : 0);
    }
    for (double wanted = 4e6; wanted < 4e11; wanted *= 1.07) {
        const char* text = formatted("%.4fM", wanted / 1e6);
        const Gpt2Shape* got = gpt2_named(text);
        expect(got && gpt2_size_check(text, error), "%s: none", text);
        if (!got) continue;
        const double C = got->channels, size = 12 * (double)got->layers * C * C + 51281 * C,
                     head = C / (double)got->heads;
        expect(fabs(size / wanted - 1) < 0.1 && head == (C < 2048 ? 64 : 128), "%s: %g parameters, heads of %g", text,
               size, head);
    }
    for (const char* none : {"", "B", "124", "30 ", "0.03 ", "124MB", "-3B", "1e3B", "0x3B", "1M", "600B", "nanB"})
        expect(!gpt2_named(none) && !gpt2_size_check(none, error), "%s is a size", none);
}
