// Tests of what is found on the disk: model folders as other programs write them, damaged and special files, links, and
// what a checkpoint keeps of the model that a run began with (cli.h says how ./train is run).
#include "../../data/gpt2_config.h"
#include "../../data/model_folder.h"
#include "../../data/tokenizer.h"
#include "cli.h"
#include "tensors.h"

// Copies a folder's files, without state.json unless `state`, so that it is a model and no checkpoint. Returns its
// path.
static const char* copy_model(const char* work, const char* name, const char* from, bool state = false) {
    const char* to = joined(work, name);
    remove_tree(to);
    if (!folder_make(to, error)) abort();
    const char* own[] = {"config.json", "model.safetensors", state ? "state.json" : "none",
                         state ? "optimizer.safetensors" : "none"};
    for (const char* file : own) {
        int64_t bytes;
        if (char* text = contents(from, file, &bytes)) write_bytes(to, file, text, (size_t)bytes);
    }
    if (!tokenizer_files_copy(from, to, error)) abort();
    return to;
}

static const char BYTE_LEVEL[] = "{\"type\": \"ByteLevel\", \"add_prefix_space\": false}";

// Trains one step on shards with the small tokenizer. Returns the checkpoint's path.
static const char* train_shards(Test* test, const char* work) {
    const char* data = joined(work, "data");
    mkdir(data, 0755);
    write_shard(data, "train_000.bin", 4000, 7);
    write_shard(data, "val_000.bin", 400, 7);
    write_text(data, "meta.json", "{\"vocabulary\": 259}");
    write_tokenizer(data);
    train_well(SHAPE " " QUICK " --data %s --run %s/used --steps 1", data, work);
    return joined(work, "used/step_00000001");
}

static const char* train_bytes(Test* test, const char* work) {
    train_well(BRIEF "/used --steps 1", work, work);
    return joined(work, "used/step_00000001");
}

static void flip_bit(const char* path, double share) {
    struct stat status;
    if (stat(path, &status) != 0) abort();
    change_byte(path, (int64_t)((double)status.st_size * share), 1);
}

// Returns a command with a folder, a file and the work folder in the places of @1, @2 and @3.
static const char* filled(const char* command, const char* folder, const char* file, const char* work) {
    return replaced(replaced(replaced(command, "@1", folder), "@2", file), "@3", work);
}

// One flipped bit in any file of a checkpoint is found by every option that loads the file.
FOLDER_TEST(folders_damage_is_found) {
    const char* from = train_shards(test, work);
    const char* const files[] = {"config.json", "model.safetensors", "vocab.json", "merges.txt", "state.json"};
    const char* const commands[] = {
        "--sample the --sample-tokens 2 --model @1", QUICK " --seq 32 --steps 1 --data @3/data --run @3/new --model @1",
        "--resume @1 --run @3/new --steps 2", QUICK " --seq 32 --data @3/data --dry-run --model @1"};
    for (const char* file : files) {
        const char* damaged = copy_model(work, "damaged", from, true);
        flip_bit(joined(damaged, file), strcmp(file, "state.json") == 0 ? 0.2 : 0.7);
        for (const char* command : commands) {
            const char* text = filled(command, damaged, "", work);
            refused(text, file, "damaged checkpoint", "%s", text);
        }
    }
    // The run folder's own copy of a tokenizer is checked too, and the advice for it helps.
    const char* used = joined(work, "used");
    flip_bit(joined(used, "merges.txt"), 0.9);
    refused("the run folder's merges.txt", "used/merges.txt does not match", "type rm ", "--resume %s --steps 2", used);
    unlink(joined(used, "merges.txt"));
    train_well("--resume %s --steps 2", used);
    expect_equal_files(test, used, from, "merges.txt");
}

// A name in state.json is that of a file in its folder.
FOLDER_TEST(folders_state_names) {
    const char* from = train_bytes(test, work);
    const char* const names[] = {"../text.txt", "/etc/passwd", "..", "a/b", "", "."};
    for (const char* name : names) {
        const char* folder = copy_model(work, "names", from, true);
        rewrite_state(folder, "\"files\": {",
                      formatted("\"files\": {\n  \"%s\": {\"bytes\": 1, \"crc32c\": 1},", name));
        refused(name, "no name of a file in its folder", name, "--resume %s --run %s/new --steps 2", folder, work);
        refused(name, "no name of a file in its folder", name, "--sample a --model %s", folder);
    }
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

// A file of 3 TiB in the place of one that the program reads whole: it says so at once and ends with code 2.
// dev/faults.py has special files.
FOLDER_TEST(folders_huge_files) {
    const char* from = train_shards(test, work);
    // In a command, @1 is the folder, @2 the file and @3 the work folder.
    const char* const begins = QUICK " --seq 32 --data @3/data --run @3/new --model @1 --steps 1";
    const char* const places[][2] = {{"config.json", "--sample a --model @1"},
                                     {"model.safetensors", "--sample a --model @1"},
                                     {"vocab.json", "--sample a --model @1"},
                                     {"merges.txt", "--sample a --model @1"},
                                     {"added_tokens.json", "--sample a --model @1"},
                                     {"model.safetensors", begins},
                                     {"config.json", begins},
                                     {"tokenizer_config.json", begins}};
    for (const auto& [file, command] : places) {
        const char *folder = copy_model(work, "m", from), *path = joined(folder, file);
        remove_tree(path), put_text(path, "");
        if (truncate(path, 3ll << 40) != 0) abort();
        const char* text = filled(command, folder, path, work);
        run_train(child, "%s", text);
        expect_error(test, &child, text, file, "");
        expect(seconds_now() - child.started < 20, "%s: it took %.0f s", text, seconds_now() - child.started);
        remove_tree(joined(work, "new"));
    }
}

static void make_link(const char* to, const char* at) {
    if (symlink(to, at) != 0) abort();
}

// A checkpoint that was moved and linked back, and a run folder that is a link, go on; removing the checkpoint's link
// leaves the checkpoint where it is.
FOLDER_TEST(folders_linked_back) {
    train_bytes(test, work);
    const char *step = joined(work, "used/step_00000001"), *far = joined(work, "far"), *link = joined(work, "link");
    if (rename(step, far) != 0) abort();
    make_link(far, step);
    make_link(joined(work, "used"), link);
    train_well("--resume %s --steps 2", step);
    train_well("--resume %s --steps 3 --keep 1", link);
    struct stat status;
    expect(lstat(step, &status) != 0, "the link of the old checkpoint is still there");
    expect(exists(far, "model.safetensors") && exists(far, "state.json"), "the checkpoint behind the link is gone");
    expect(exists(joined(work, "used"), "step_00000003"), "no checkpoint of step 3");
    // Files that are links, as Hugging Face's cache has them, are read.
    const char *cache = copy_model(work, "cache", far), *linked = joined(work, "linked");
    mkdir(linked, 0755);
    make_link(joined(cache, "config.json"), joined(linked, "config.json"));
    make_link(joined(cache, "model.safetensors"), joined(linked, "model.safetensors"));
    train_well("--sample a --sample-tokens 2 --model %s", linked);
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
    run_well(parts, "--sample the --sample-tokens 9 --model %s", folder);
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

// For a folder with PyTorch's own format only, the sentence holds a command, whose folder is one word of the shell.
FOLDER_TEST(folders_bin_only) {
    const char *from = train_bytes(test, work), *folder = copy_model(work, "it's", from);
    unlink(joined(folder, "model.safetensors"));
    write_text(folder, "pytorch_model.bin", "PK");
    run_train(child, "--sample a --model %s", folder);
    expect_error(test, &child, "pytorch_model.bin", "type python3 -c '", "it'\\''s' and start again");
    // The command is Python: a stand-in for the packages shows that it reads the .bin and writes model.safetensors.
    const char *begin = strstr(ERR(child), "python3 -c"), *end = begin ? strstr(begin, " and start again") : nullptr;
    if (begin && end && system("python3 -c '' 2>/dev/null") == 0) {
        mkdir(joined(work, "packages"), 0755), mkdir(joined(work, "packages/safetensors"), 0755);
        write_text(work, "packages/torch.py",
                   "class V:\n  def clone(self): return self\n  def contiguous(self): return self\n"
                   "def load(f, map_location, weights_only): return {f: V()}\n");
        write_text(work, "packages/safetensors/__init__.py", "");
        write_text(work, "packages/safetensors/torch.py",
                   "def save_file(d, p, metadata): open(p, 'w').write(' '.join(d))\n");
        const char* command = formatted("PYTHONPATH=%s/packages %.*s", work, (int)(end - begin), begin);
        expect(system(command) == 0, "%s", command);
        char* text = contents(folder, "model.safetensors");
        expect(text && strcmp(text, joined(folder, "pytorch_model.bin")) == 0, "%s", text ? text : "no file");
    }
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

// Tokens of another vocabulary mean nothing to weights that have learned one, whether it is larger or as large.
FOLDER_TEST(folders_data_of_another_tokenizer) {
    const char *from = train_shards(test, work), *data = joined(work, "data"), *used = joined(work, "used");
    const char* begun = QUICK " --seq 32 --steps 1 --data %s --run %s/new --model %s";
    train_well(begun, data, work, from);
    remove_tree(joined(work, "new"));
    const char* whole = contents(data, "vocab.json");
    write_text(data, "vocab.json", replaced(whole, "\"th\"", "\"he\""));
    write_text(data, "merges.txt", "#version: 0.2\nh e\nt he\n");
    run_well(fit, "--fit 24G --preset adamw8 --model %s", from);  // without data, for the model's own vocabulary
    expect(strstr(OUT(fit), "adamw8 "), "%s", OUT(fit));
    const char* type = "data/prepare.py FILE --tokenizer";
    refused("--model", "was prepared with another tokenizer than", type, begun, data, work, from);
    expect(!exists(work, "new"), "a run folder is left");
    refused("--resume", "was prepared with another tokenizer than", type, "--resume %s --steps 2", used);
    refused("--dry-run", "was prepared with another tokenizer than", type, "--dry-run --resume %s --steps 2", used);
    write_text(data, "vocab.json", whole);
    write_text(data, "merges.txt", "#version: 0.2\nt h\nth e\n");
    train_well("--resume %s --steps 2", used);
    const char *text = joined(work, "text.txt"), *found = "the data has a vocabulary of 256 tokens and --model";
    refused("text", found, type, begun, text, work, from);
    for (const char* name : {"state.json", "vocab.json"}) unlink(joined(from, name));
    refused("no tokenizer", found, "name data of the model's own tokens", begun, text, work, from);
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
        expect(!tokenizer_open(work, error) && strstr(error, "its added token \"<pad>\" has"), "%s: %s", flag, error);
    }
    const char* const others[][2] = {
        {"{\"type\": \"Whitespace\"}", "otherwise than"},
        {"{\"type\": \"ByteLevel\", \"add_prefix_space\": true}", "otherwise than"},
        {"{\"type\": \"ByteLevel\", \"use_regex\": false}", "otherwise than"},
        {"null", "otherwise than"},
    };
    for (const auto& other : others) {
        write_tokenizer(work, true, other[0]);
        expect(!tokenizer_open(work, error) && strstr(error, other[1]), "%s: %s", other[0], error);
    }
    const char* const texts[][2] = {
        {"{\"model\": {\"type\": \"Unigram\", \"vocab\": []}}", "of type Unigram"},
        {"{\"model\": {\"type\": \"WordPiece\", \"vocab\": {}}}", "of type WordPiece"},
        {"{}", "of type no"},
        {"{\"model\": {\"type\": \"BPE\", \"vocab\": {}}, \"pre_tokenizer\": {\"type\": \"ByteLevel\"}}", "no merges"},
        {"{\"model\": {\"vocab\": {\"a\": 0}, \"merges\": [3]}, \"pre_tokenizer\": {\"type\": \"ByteLevel\"}}",
         "no pair of texts"},
        {"{\"model\": {\"vocab\": {\"a\": 0}, \"merges\": [\"a b\"]}, \"pre_tokenizer\": {\"type\": \"ByteLevel\"}}",
         "no pair of tokens"},
        {"{\"model\": {\"vocab\": {\"a\": 0}, \"merges\": []}, \"pre_tokenizer\": {\"type\": \"ByteLevel\"}}",
         "no token for byte"},
        {"{\"model\": {\"vocab\": {\"a\": -1}, \"merges\": []}, \"pre_tokenizer\": {\"type\": \"ByteLevel\"}}",
         "is not in 0 to"},
        {"{\"model\": {\"vocab\": 1, \"merges\": []}, \"pre_tokenizer\": {\"type\": \"ByteLevel\"}}", "no vocabulary"},
        {"[]", "of type no"},
        {"{", "not valid JSON"},
    };
    for (const auto& text : texts) {
        write_text(work, "tokenizer.json", text[0]);
        expect(!tokenizer_open(work, error) && strstr(error, text[1]), "%s: %s", text[0], error);
        expect(strstr(error, "; put the tokenizer's files there again, or name another folder"), "%s", error);
    }
}

// Checkpoints copy files of the model's own folder or of the hub's cache alone, and each must be what its name says.
FOLDER_TEST(folders_copies) {
    const char *from = train_shards(test, work), *folder = copy_model(work, "m", from);
    const char *secret = joined(work, "secret.json"), *run = joined(work, "new");
    const char* begins = QUICK " --seq 32 --data %s/data --run %s --steps 1 --model %s";
    put_text(secret, "{\"machine\": 1}");
    for (const char* name : {"tokenizer_config.json", "added_tokens.json", "merges.txt", "config.json"}) {
        const char *path = joined(folder, name), *kept = contents(folder, name);
        unlink(path), make_link(strcmp(name, "config.json") == 0 ? joined(from, name) : secret, path);
        if (strcmp(name, "added_tokens.json") == 0) put_text(secret, "{}");
        refused(name, "is a link to ", "put the file itself there", begins, work, run, folder);
        unlink(path), remove_tree(run);
        if (kept) put_text(path, kept);
    }
    write_text(folder, "generation_config.json", "machine a login b password c");
    refused("not JSON", "generation_config.json", "not valid JSON", begins, work, run, folder);
    write_text(folder, "generation_config.json", "[1]"), remove_tree(run);
    refused("no object", "generation_config.json is no JSON object", "or remove it", begins, work, run, folder);
    write_text(folder, "generation_config.json", "{}"), remove_tree(run);
    // A hub's cache: snapshots/COMMIT/NAME is a link to ../../blobs/HASH.
    const char *blobs = joined(work, "blobs"), *snapshot = joined(work, "snapshots/1");
    remove_tree(run), mkdir(blobs, 0755), mkdir(joined(work, "snapshots"), 0755);
    write_text(folder, "generation_config.json", "{}");
    if (rename(folder, snapshot) != 0 || rename(joined(snapshot, "generation_config.json"), joined(blobs, "a1")) != 0)
        abort();
    make_link("../../blobs/a1", joined(snapshot, "generation_config.json"));
    train_well(begins, work, run, snapshot);
    expect(exists(run, "step_00000001/generation_config.json"), "a file of the hub's cache is not kept");
    // A stranger's run folder has links too. They are found before the first step.
    unlink(joined(run, "generation_config.json")), make_link(secret, joined(run, "special_tokens_map.json"));
    refused("the run's own", "special_tokens_map.json is a link to ", "put the file", "--resume %s --steps 2", run);
}

// This is a member of a model's config.json, and whether nibble takes the model.
FOLDER_TEST(folders_config_members) {
    const std::tuple<const char*, bool> cases[] = {{"\"activation_function\": \"gelu_new\"", true},
                                                   {"\"activation_function\": \"gelu_pytorch_tanh\"", true},
                                                   {"\"activation_function\": \"gelu\"", false},
                                                   {"\"activation_function\": \"relu\"", false},
                                                   {"\"activation_function\": 0", false},
                                                   {"\"activation_function\": [\"gelu_new\"]", false},
                                                   {"\"layer_norm_epsilon\": 1e-5", true},
                                                   {"\"layer_norm_epsilon\": 0.00001", true},
                                                   {"\"layer_norm_epsilon\": 1e-6", false},
                                                   {"\"layer_norm_epsilon\": 1.1e-5", false},
                                                   {"\"n_inner\": null", true},
                                                   {"\"n_inner\": 256", true},
                                                   {"\"n_inner\": 257", false},
                                                   {"\"tie_word_embeddings\": true", true},
                                                   {"\"tie_word_embeddings\": false", false},
                                                   {"\"scale_attn_weights\": false", false},
                                                   {"\"scale_attn_by_inverse_layer_idx\": false", true},
                                                   {"\"scale_attn_by_inverse_layer_idx\": true", false},
                                                   {"\"reorder_and_upcast_attn\": true", false},
                                                   {"\"add_cross_attention\": true", false},
                                                   {"\"quantization_config\": {\"bits\": 4}", false},
                                                   {"\"model_type\": \"gpt_neo\"", false},
                                                   {"\"n_layer\": \"2\"", false},
                                                   {"\"n_layer\": null", false},
                                                   {"\"n_layer\": 2.5", false},
                                                   {"\"n_layer\": -1", false},
                                                   {"\"use_cache\": true", true}};
    for (const auto& [member, taken] : cases) {
        Gpt2Shape shape;
        bool layers = strncmp(member, "\"n_layer", 8) == 0, type = strncmp(member, "\"model_type", 11) == 0;
        const char* text = formatted("{%s\"n_embd\": 64%s, %s}", type ? "" : "\"model_type\": \"gpt2\", ",
                                     layers ? "" : ", \"n_layer\": 2", member);
        write_text(work, "config.json", text);
        bool good = gpt2_config_read(work, &shape, error);
        expect(good == taken, "%s: %s", text, good ? "taken" : error);
        if (good) expect(shape.layers == 2 && shape.channels == 64 && shape.heads == 12, "%s: another shape", text);
    }
}

// Returns the config.json of a run's checkpoint as a tree.
static Json* saved_config(Test* test, const char* run, int step) {
    Json* json = json_read(joined(checkpoint_name(run, step), "config.json"), error);
    expect(json, "%s", error);
    return json;
}

static void expect_ids(Test* test, const Json* config, int64_t bos, int64_t eos, int64_t pad) {
    const int64_t want[] = {bos, eos, pad};
    for (int i = 0; i < SPECIAL_TOKENS; i++) {
        int64_t id = json_int(config, SPECIAL_TOKEN_IDS[i], -1);
        // Where it is missing transformers takes 50256, so a smaller vocabulary has null.
        const Json* member = json_get(config, SPECIAL_TOKEN_IDS[i]);
        const bool null = id < 0 && json_int(config, "vocab_size", 0) <= 50256;
        expect(id == want[i] && (id >= 0 || (null ? member && member->kind == JSON_NULL : !member)),
               "%s is %lld, want %lld", SPECIAL_TOKEN_IDS[i], (long long)id, (long long)want[i]);
    }
}

// Special tokens are the tokenizer's or the loaded model's, and there are none where nobody says so.
FOLDER_TEST(folders_special_tokens) {
    train_bytes(test, work);
    expect_ids(test, saved_config(test, joined(work, "used"), 1), -1, -1, -1);
    // The vocabulary of bytes is there for transformers, which reads it as we do: each byte is its number.
    Tokenizer* bytes = tokenizer_open(joined(work, "used/step_00000001"), error);
    int tokens[256];
    char text[256];
    for (int i = 0; i < 256; i++) text[i] = (char)i;
    expect(bytes && tokenizer_tokens(bytes) == 256 && tokenizer_encode(bytes, text, 256, tokens, 256) == 256, "%s",
           error);
    for (int i = 0; i < 256; i++) expect(tokens[i] == i, "byte %d is token %d", i, tokens[i]);
    remove_tree(joined(work, "used"));
    const char* from = train_shards(test, work);
    expect_ids(test, saved_config(test, joined(work, "used"), 1), END, END, -1);
    write_text(joined(work, "data"), "special_tokens_map.json",
               "{\"pad_token\": {\"content\": \"the\"}, \"eos_token\": \"th\", \"bos_token\": \"no such token\"}");
    train_well(SHAPE " " QUICK " --data %s/data --run %s/map --steps 1", work, work);
    expect_ids(test, saved_config(test, joined(work, "map"), 1), END, 256, 257);
    // Without a tokenizer nobody knows, whatever the vocabulary's size.
    const char* bare = joined(work, "bare");
    mkdir(bare, 0755);
    write_shard(bare, "train_000.bin", 4000, 7);
    train_well(SHAPE " " QUICK " --data %s/train_000.bin --run %s/none --steps 0", bare, work);
    Json* none = saved_config(test, joined(work, "none"), 0);
    expect_ids(test, none, -1, -1, -1);
    expect(json_int(none, "vocab_size", 0) == 50257, "the vocabulary");
    expect(exists(from, "vocab.json"), "no vocab.json");
}

// Facts that a loaded model's folder states beside the weights are in the run folder and in every checkpoint, also
// after a resume.
FOLDER_TEST(folders_loaded_model_is_kept) {
    const char *from = train_shards(test, work), *folder = copy_model(work, "m", from);
    const char* const kept[] = {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
                                "added_tokens.json", "generation_config.json"};
    for (const char* name : kept) write_text(folder, name, "{\"added_tokens\": [], \"model\": {}, \"a\": 1}");
    write_text(folder, "added_tokens.json", "{\"<x>\": 300}");
    write_text(
        folder, "config.json",
        "{\"model_type\": \"gpt2\", \"n_layer\": 1, \"n_embd\": 64, \"n_head\": 1, \"n_positions\": 32, "
        "\"vocab_size\": 259, \"eos_token_id\": [7, 8], \"bos_token_id\": 9, \"pad_token_id\": null, "
        "\"sep_token_id\": 259, \"decoder_start_token_id\": -1, \"forced_eos_token_id\": [7, \"x\"], "
        "\"torch_dtype\": \"float16\", \"attn_pdrop\": 0.1, \"task_specific_params\": {\"a\": [1, \"\\u0000b\"]}, "
        "\"activation_function\": \"gelu_pytorch_tanh\"}");
    train_well(QUICK " --seq 32 --data %s/data --run %s/new --steps 1 --model %s", work, work, folder);
    train_well("--resume %s/new --steps 2", work);
    for (int step = 1; step <= 2; step++) {
        Json* config = saved_config(test, joined(work, "new"), step);
        const Json* eos = json_get(config, "eos_token_id");
        expect(eos && eos->kind == JSON_ARRAY && eos->child->number == 7, "eos_token_id of step %d", step);
        expect(json_int(config, "bos_token_id", -1) == 9, "bos_token_id of step %d", step);
        const Json *pad = json_get(config, "pad_token_id"), *more = json_get(config, "task_specific_params");
        expect(pad && pad->kind == JSON_NULL && json_number(config, "attn_pdrop", 0) == 0.1, "step %d", step);
        expect(more && more->child->child->next->text_bytes == 2, "a nested member of step %d", step);
        for (const char* id : {"sep_token_id", "decoder_start_token_id", "forced_eos_token_id"})
            expect(!json_get(config, id), "%s, which is no token, was exported", id);
        expect(!json_get(config, "torch_dtype") && json_get(config, "dtype"), "the type of step %d", step);
        expect(strcmp(json_string(config, "activation_function", ""), "gelu_new") == 0, "activation_function");
        for (const char* name : kept) {
            expect_equal_files(test, folder, joined(work, "new"), name);
            expect_equal_files(test, folder, joined(work, step == 1 ? "new/step_00000001" : "new/step_00000002"), name);
        }
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
