// Opens the files of dev/unit/malformed.txt, each of which must be refused by its sentence, or be taken.
#include "../../data/gpt2_config.h"
#include "../../data/loader.h"
#include "../../data/safetensors.h"
#include "../../data/tokenizer.h"
#include "files.h"

// Each of these opens what lies in a folder.
static bool opens_json(const char* folder) {
    return json_read(joined(folder, "json"), error) != nullptr;
}

// Leaves in `error` what a JSON text becomes when it is written again.
static bool opens_written(const char* folder) {
    const Json* json = json_read(joined(folder, "written"), error);
    const char* text = printed([&](FILE* file) { json_write(file, json); });
    return data_error(error, "%s", text);
}

static bool opens_safetensors(const char* folder) {
    char file[2048] = {0};
    int64_t length;
    const char* header = contents(folder, "safetensors", &length);
    memcpy(file, &length, 8), memcpy(file + 8, header, (size_t)length);
    put(joined(folder, "whole"), file, 8 + length + 8);
    Safetensors opened;
    return safetensors_open(&opened, joined(folder, "whole"), error);
}

static bool opens_tokenizer(const char* folder) {
    return tokenizer_open(folder, error) != nullptr;
}

static bool opens_merges(const char* folder) {
    put_text(joined(folder, "vocab.json"), "{\"a\":0,\"b\":1,\"ab\":2}");
    return opens_tokenizer(folder);
}

static bool opens_meta(const char* folder) {
    Dataset data;
    put_shard(joined(folder, "train_0.bin"), 0, 100, [](int64_t i) { return i; });
    return dataset_open(&data, folder, DATA_AUTO, DATASET_TRAIN, 0.1, 10, error);
}

static bool opens_config(const char* folder) {
    Gpt2Shape shape = {};
    const char *member = contents(folder, "config.json"),
               *whole = "{\"model_type\": \"gpt2\", \"n_embd\": 64, \"n_layer\": 2, %s}";
    put_text(joined(folder, "config.json"), replaced(whole, "%s", member));
    return gpt2_config_read(folder, &shape, error) && shape.L == 2 && shape.C == 64 && shape.NH == 12;
}

TEST(data_malformed) {
    static const std::tuple<const char*, bool (*)(const char* folder)> kinds[] = {{"json", opens_json},
                                                                                  {"written", opens_written},
                                                                                  {"safetensors", opens_safetensors},
                                                                                  {"tokenizer.json", opens_tokenizer},
                                                                                  {"vocab.json", opens_tokenizer},
                                                                                  {"merges.txt", opens_merges},
                                                                                  {"meta.json", opens_meta},
                                                                                  {"config.json", opens_config}};
    int files = 0;
    for (char *rest = contents(test_folder(), "dev/unit/malformed.txt"), *line; (line = strsep(&rest, "\n")) && rest;) {
        const char* part[32];
        int parts = 0;
        for (char* at = line; at && parts < 32; at = at ? at + 4 : nullptr) {
            part[parts++] = at;
            at = strstr(at, " :: ");
            if (at) *at = 0;
        }
        for (const auto& [kind, opens] : kinds) {
            for (int i = 2; i < parts && strcmp(kind, part[0]) == 0; i++, files++) {
                const char* folder = new_folder();
                put_text(joined(folder, kind), part[i]);
                error[0] = 0;
                const bool taken = opens(folder), wanted = strcmp(part[1], "taken") == 0;
                expect(taken == wanted && (taken || strstr(error, part[1])), "%s %s: %s", kind, part[i], error);
            }
        }
    }
    expect(files > 100, "only %d files", files);
    note(test, "%d files", files);
}
