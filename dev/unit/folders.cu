// Tests of model folders as other programs write them: tensors, several files, tokenizers, sizes. Folders that ./train
// meets in other ways: commands.txt.
#include <vector>

#include "../../data/gpt2_config.h"
#include "../../data/model_folder.h"
#include "../../data/tokenizer.h"
#include "cli.h"
#include "tensors.h"

static const char BYTE_LEVEL[] = "{\"type\": \"ByteLevel\", \"add_prefix_space\": false}";

// The tensors of a GPT-2 of one layer, and one more where `added` has a name.
struct SmallModel {
    ModelTensor* tensors = nullptr;
    const int count = model_tensors(1, 64, 32, 256, 256, &tensors);

    // Writes the tensors from `first` to `last` in bf16, and `added`: with zeros, or with the embedding's values and
    // `different` in the last one.
    void write(const char* path, int first, int last, const SafetensorsTensor* added, bool as_wte,
               int different) const {
        static uint16_t values[256 * 64 * 4];
        std::vector<SafetensorsTensor> entries;
        for (int t = first; t < last; t++) {
            SafetensorsTensor entry = tensor_of(formatted("transformer.%s", tensors[t].name), "BF16", {});
            entry.dims = model_tensor_shape(&tensors[t], entry.shape);
            entries.push_back(entry);
        }
        if (added) entries.push_back(*added);
        SafetensorsWriter writer;
        if (!safetensors_begin(&writer, path, entries.data(), (int)entries.size(), "pt", error)) abort();
        for (size_t i = 0; i < entries.size(); i++) {
            const bool own = added && i + 1 == entries.size();
            int64_t n = 1;
            for (int d = 0; d < entries[i].dims; d++) n *= entries[i].shape[d];
            for (int64_t j = 0; j < n; j++)  // small bf16 values that depend on the tensor and the place
                values[j] = own && !as_wte ? 0 : (uint16_t)(0x3c00 + (own ? 0 : first + i) * 7 + j % 97);
            if (own) values[n - 1] += (uint16_t)different;
            if (!safetensors_write(&writer, values, n * safetensors_dtype_bytes(entries[i].dtype))) abort();
        }
        if (!safetensors_finish(&writer)) abort();
    }

    bool opens(Safetensors* model, const char* folder) const {
        return model_folder_open(model, folder, tensors, count, error);
    }
};

// Every tensor is used, or known to be none of the weights, or refused by name.
DATA_TEST(folders_unused_tensors) {
    const SmallModel small;
    const struct {
        SafetensorsTensor added;
        bool good, as_wte;
        int different;
    } cases[] = {
        {tensor_of("lm_head.weight", "BF16", {256, 64}), true, true, 0},
        {tensor_of("lm_head.weight", "BF16", {256, 64}), false, true, 1},
        {tensor_of("lm_head.weight", "BF16", {64, 256}), false, true, 0},
        {tensor_of("lm_head.weight", "U8", {4}), false, false, 0},
        {tensor_of("lm_head.bias", "F32", {256}), false, false, 0},
        {tensor_of("transformer.h.0.attn.bias", "U8", {1, 1, 32, 32}), true, false, 0},
        {tensor_of("h.0.attn.masked_bias", "F32", {}), true, false, 0},
        {tensor_of("transformer.h.1.ln_1.weight", "F32", {64}), false, false, 0},
        {tensor_of("transformer.h.0.attn.c_attn.weight_scale", "F32", {1}), false, false, 0},
        {tensor_of("score.weight", "F32", {2, 64}), false, false, 0},
    };
    for (const auto& item : cases) {
        Safetensors model;
        small.write(joined(folder, "model.safetensors"), 0, small.count, &item.added, item.as_wte, item.different);
        if (item.good) expect(small.opens(&model, folder), "%s: %s", item.added.name, error);
        if (item.good) continue;
        expect_refused(small.opens(&model, folder), error, item.added.name);
        expect(strstr(error, "model.safetensors holds"), "%s", error);
    }
}

// Several files with an index are one model; what the index says must hold.
DATA_TEST(folders_several_files) {
    const SmallModel small;
    const char *one = "model-00001-of-00002.safetensors", *two = "model-00002-of-00002.safetensors";
    auto index = [&](const char* odd, const char* odd_file) {
        put_text(joined(folder, "model.safetensors.index.json"), printed([&](FILE* out) {
                     fprintf(out, "{\"metadata\": {\"total_size\": 1}, \"weight_map\": {\"%s\": \"%s\"", odd, odd_file);
                     for (int t = 0; t < small.count; t++)
                         fprintf(out, ", \"transformer.%s\": \"%s\"", small.tensors[t].name, t < 5 ? one : two);
                     fputs("}}", out);
                 }));
    };
    Safetensors whole, parts;
    small.write(joined(folder, "model.safetensors"), 0, small.count, nullptr, false, 0);
    expect(small.opens(&whole, folder), "%s", error);
    unlink(joined(folder, "model.safetensors"));
    small.write(joined(folder, one), 0, 5, nullptr, false, 0);
    small.write(joined(folder, two), 5, small.count, nullptr, false, 0);
    index("transformer.wte.weight", one);
    expect(small.opens(&parts, folder), "%s", error);
    for (int t = 0; t < small.count; t++) {
        static float a[256 * 64], b[256 * 64];
        const ModelTensor* tensor = &small.tensors[t];
        expect(model_folder_read(&whole, tensor, a, error) && model_folder_read(&parts, tensor, b, error), "%s", error);
        expect(memcmp(a, b, tensor->rows * tensor->cols * sizeof(float)) == 0, "%s differs", tensor->name);
    }
    const char* const odd[][3] = {{"x", "../m/model-00001-of-00002.safetensors", "no name of a file"},
                                  {"x", "none.safetensors", "none.safetensors: No such file"},
                                  {"x", "", "no name of a file"}};
    for (const auto& item : odd) {
        index(item[0], item[1]);
        expect_refused(small.opens(&parts, folder), error, item[2]);
    }
    put_text(joined(folder, "model.safetensors.index.json"), "{\"weight_map\": []}");
    expect_refused(small.opens(&parts, folder), error, "model.safetensors.index.json holds no weight_map");
    index("transformer.wte.weight", one);
    small.write(joined(folder, two), 4, small.count, nullptr, false, 0);
    expect_refused(small.opens(&parts, folder), error, "comes twice");
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
        put_text(joined(work, "tokenizer.json"), replaced(whole, "\"id\": 259", flagged));
        expect(!tokenizer_open(work, error) && strstr(error, "adds the token \"<pad>\" with"), "%s: %s", flag, error);
    }
}

// Each byte is its number, in the program and in the files that transformers reads.
DATA_TEST(folders_tokenizer_of_bytes) {
    expect(tokenizer_write_bytes(folder, error), "%s", error);
    for (const char* of : {(const char*)nullptr, "", folder}) {
        Tokenizer* bytes = tokenizer_open(of, error);
        int tokens[256], length = 0;
        char text[256];
        for (int i = 0; i < 256; i++) text[i] = (char)i;
        expect(bytes && tokenizer_tokens(bytes) == 256 && tokenizer_end(bytes) == -1, "%s", error);
        expect(tokenizer_encode(bytes, text, 256, tokens, 256) == 256, "256 bytes are as many tokens");
        for (int i = 0; i < 256; i++) {
            const char* byte = tokenizer_decode(bytes, i, &length);
            expect(tokens[i] == i && length == 1 && *byte == text[i], "byte %d is token %d", i, tokens[i]);
        }
        expect(tokenizer_encode(bytes, "bcd", 3, tokens, 1) == 3 && tokens[0] == 'b' && tokens[1] == 1, "at most 1");
        tokenizer_decode(bytes, 256, &length);
        expect(length == 0, "no token 256");
    }
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
        expect(got && got->L == layers && got->C == channels && got->NH == heads && got->max_T == 1024,
               "%s: %d layers, %d channels, %d heads", size, got ? got->L : 0, got ? got->C : 0, got ? got->NH : 0);
    }
    for (double wanted = 4e6; wanted < 4e11; wanted *= 1.07) {
        const char* text = formatted("%.4fM", wanted / 1e6);
        const Gpt2Shape* got = gpt2_named(text);
        expect(got && gpt2_size_check(text, error), "%s: none", text);
        if (!got) continue;
        const double C = got->C, size = 12 * got->L * C * C + 51281 * C, head = C / got->NH;
        expect(fabs(size / wanted - 1) < 0.1 && head == (C < 2048 ? 64 : 128), "%s: %g parameters, heads of %g", text,
               size, head);
    }
    for (const char* none : {"", "B", "124", "30 ", "0.03 ", "124MB", "-3B", "1e3B", "0x3B", "1M", "600B", "nanB"})
        expect(!gpt2_named(none) && !gpt2_size_check(none, error), "%s is a size", none);
}
