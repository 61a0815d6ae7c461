// Tests of --format: what is read of a file without a GPU, each refusal, the example in dev/examples through NVRTC, and
// where there is a GPU, equal bits with built-in formats that are equal by construction, tables included.
#include "../../optim/jit.h"
#include "../../optim/optim.h"
#include "../../optim/user.h"
#include "steps.h"

static const char* example() {
    return joined(test_folder(), "dev/examples/format.cuh");
}

static OptimConfig asked(const char* formats, const char* m, const char* v) {
    OptimConfig config = {"", "adamw", "bf16:sr", "bf16", m, v, 0.9f, 0.95f, 1e-8f, 0.1f, 7};
    config.formats = formats;
    return config;
}

static bool resolve(Test* test, OptimConfig* config) {
    bool good = optim_resolve(config, error);
    expect(good, "%s", error);
    return good;
}

// Built-in formats with tables, under names of their own.
static const char BUILT_IN_TABLES[] =
    "OPTIM_FORMAT(\"a\", \"\", Blocks<Dyn8, 256, ScaleFp32, NEAREST>)\n"
    "OPTIM_FORMAT(\"b\", \"\", Blocks<Udyn8, 128, ScaleFp32, STOCHASTIC>)\n"
    "OPTIM_FORMAT(\"c\", \"\", Blocks<De4, 128, ScaleFp32, STOCHASTIC>)\n"
    "OPTIM_FORMAT(\"d\", \"\", Blocks<Nf4, 64, ScaleBf16, NEAREST>)\n"
    "OPTIM_FORMAT(\"e\", \"\", Blocks<Soft8, 32, ScaleFp32, NEAREST>)\n"
    "OPTIM_FORMAT(\"f\", \"\", Spans<Dyn8, SPAN_RANK1, NEAREST>)\n"
    "OPTIM_FORMAT(\"g\", \"\", Spans<E5m2, SPAN_TENSOR, STOCHASTIC>)\n";

// Formats of the user's for m and v, and the built-in ones that they are: 8 bits and 4, to nearest and not.
static const char* const equals[][4] = {
    {"my8", "my8:sr", "lin8/64", "lin8/64:sr"}, {"my8:sr", "bf16", "lin8/64:sr", "bf16"},
    {"a", "b", "dyn8/256", "udyn8/128:sr"},     {"c", "fp32", "de4/128:sr", "fp32"},
    {"e", "b", "soft8/32", "udyn8/128:sr"},     {"d", "fp32", "nf4@bf16", "fp32"},
    {"f", "g", "dyn8/rank1", "e5m2/tensor:sr"}};

// Calls body(files, m, v, built_in_m, built_in_v) for each of them.
template <class Body>
static void for_equals(Body body) {
    const char* tables = joined(new_folder(), "tables.cuh");
    put_text(tables, BUILT_IN_TABLES);
    for (const auto& row : equals) body(strlen(row[0]) > 1 ? example() : tables, row[0], row[1], row[2], row[3]);
}

// Returns what the optimizer gives NVRTC behind its own source for a configuration.
static const char* source_of(const OptimConfig* config) {
    const Rows rows = config_rows(config);
    return user_source(&rows);
}

CACHE_TEST(JIT_TEST, user_format_example) {
    OptimConfig config = asked(example(), "my8", "my8:sr"), same = asked("", "lin8/64", "lin8/64:sr");
    if (resolve(test, &config) && resolve(test, &same)) {
        expect(strcmp(config.m, "my8/64") == 0 && strcmp(config.v, "my8/64:sr") == 0, "%s %s", config.m, config.v);
        expect(!optim_built_in(&config, OPTIM_BF16), "it is built in");
        const char *line = described(config), *same_line = described(same);
        const char *cost = strstr(line, ":sr  4"), *same_cost = strstr(same_line, ":sr  4");
        expect(cost && same_cost && strcmp(cost, same_cost) == 0, "%s; %s", line, same_line);
        JitImage image;
        bool good = jit_get(kernel_of(config), "sm_90", &image, error, source_of(&config));
        expect(good, "%s", error);
        if (good) expect(strstr(image.symbol, "My8") && !image.cached, "%s", image.symbol);
        if (good) jit_free(&image);
        expect(!*source_of(&same), "a built-in combination is given a source");
    }
    const int lines = lines_of(contents(test_folder(), "dev/examples/format.cuh"));
    expect(lines > 10 && lines < 40, "the example has %d lines", lines);
}

// The host reads sizes from a user's format, also from one with a scale for each tensor or for rows and columns.
CACHE_TEST(JIT_TEST, user_format_sizes) {
    for_equals([&](const char* files, const char* m, const char* v, const char* built_in_m, const char* built_in_v) {
        OptimConfig config = asked(files, m, v), same = asked("", built_in_m, built_in_v);
        if (!resolve(test, &config) || !resolve(test, &same)) return;
        OptimTensor tensor = {"tensor", 1000, 77, true, 0};
        optim_layout(&tensor, 1, &config);
        const Device cpu = {};
        OptimBytes own = optim_bytes(&cpu, &config, &tensor, 1, OPTIM_BF16),
                   want = optim_bytes(&cpu, &same, &tensor, 1, OPTIM_BF16);
        expect(memcmp(&own, &want, sizeof(own)) == 0, "states of %lld bytes, %lld are right", (long long)own.states,
               (long long)want.states);
    });
}

CACHE_TEST(JIT_TEST, user_format_lists) {
    const char* text[2];
    for (int own = 0; own < 2; own++)
        text[own] = printed([&](FILE* file) { optim_list_formats(file, own ? example() : ""); });
    expect(!strstr(text[0], "my8") && strstr(text[1], "my8/64 ") && strstr(text[1], "my8/64:sr"), "%s", text[1]);
    const char* row = strstr(text[1], "  my8/64 ");
    int bits = 0, block = 0;
    double each = 0;
    expect(row && sscanf(row, " my8/64 %d %d %lf", &bits, &block, &each) == 3, "%s", row ? row : "no row");
    expect(bits == 8 && block == 64 && each == 1.062, "%d bits, block %d, %g bytes", bits, block, each);
}

static void refuses(Test* test, OptimConfig config, const char* begin, const char* holds) {
    error[0] = 0;
    expect(!optim_resolve(&config, error), "resolved, and should be refused: %s", holds);
    expect(strncmp(error, begin, strlen(begin)) == 0 && strstr(error, holds), "\"%s\" should hold \"%s\"", error,
           holds);
}

// A format of 8 bits for numbers in [0, 1], elementwise, and what it says of its sign.
static const char* const UNIT_FORMAT =
    "struct Unit8 : FormatDefaults {\n"
    "    typedef uint8_t Code;\n"
    "    static constexpr const char* DTYPE = \"U8\";\n"
    "    MEMBER\n"
    "    static OPTIM_INLINE float decode(uint8_t code) { return exact_mul((float)code, 1.0f / 255.0f); }\n"
    "    static OPTIM_INLINE uint8_t encode(float x) { return (uint8_t)exact_min(x * 255.0f + 0.5f, 255.0f); }\n"
    "};\n"
    "OPTIM_FORMAT(\"unit8\", \"for v\", Elementwise<Unit8, NEAREST>)\n";

CACHE_TEST(JIT_TEST, user_format_refusals) {
    const char* folder = new_folder();
    const char* type = "Blocks<Lin8, 64, ScaleFp32, NEAREST>";
    const char* const files[][3] = {
        {"empty.cuh", "struct Nothing {};\n", "names no format; add a line such as OPTIM_FORMAT("},
        {"commented.cuh", "// OPTIM_FORMAT(\"a/64\", \"\", None)\n", "names no format"},
        {"taken.cuh", "OPTIM_FORMAT(\"dyn8/256\", \"x\", TYPE)\n", "names a format \"dyn8/256\", which is built in"},
        {"weights.cuh", "OPTIM_FORMAT(\"bf16+8\", \"x\", TYPE)\n", "names a format \"bf16+8\", which is built in"},
        {"short.cuh", "OPTIM_FORMAT(\"udyn8\", \"x\", TYPE)\n", "names a format \"udyn8\", which is built in"},
        {"comma.cuh", "OPTIM_FORMAT(\"a,b/64\", \"x\", TYPE)\n", "take letters, digits"},
        {"blank.cuh", "OPTIM_FORMAT(\"\", \"x\", TYPE)\n", "take letters, digits"},
        {"long.cuh", "OPTIM_FORMAT(\"abcdefghijklmnopqrstuvwxyzabcdefgh\", \"x\", TYPE)\n",
         "longer than 31, 127 or 511"},
        {"twice.cuh", "OPTIM_FORMAT(\"a/64\", \"x\", TYPE)\nOPTIM_FORMAT(\"a/64\", \"y\", TYPE)\n", "and so does"},
        {"bits.cuh",
         "struct Odd : StorageDefaults { static constexpr StreamInfo STREAM[3] = {{\"\", \"U8\", 12}}; };\n"
         "OPTIM_FORMAT(\"odd\", \"x\", Odd)\n",
         "has 12 bits every 1 elements"},
        {"run.cuh", "OPTIM_FORMAT(\"a\", \"x\", Blocks<Lin8, 4096, ScaleFp32, NEAREST>)\n",
         "32 bits every 4096 elements"},
        {"error.cuh", "\n\n#pragma once\nstruct Mine {\n    int x = no_such_name;\n};\n", "error.cuh(5): error"},
        {"type.cuh", "\nOPTIM_FORMAT(\"a/64\", \"x\", Blocks<Absent, 64, ScaleFp32, NEAREST>)\n", "type.cuh(2): error"},
    };
    for (const auto& [name, text, holds] : files) {
        const char* path = joined(folder, name);
        put_text(path, replaced(text, "TYPE", type));
        refuses(test, asked(path, "fp32", "fp32"), "--format", holds);
        refuses(test, asked(path, "fp32", "fp32"), "--format", name);
    }
    refuses(test, asked(joined(folder, "absent.cuh"), "", ""), "--format: ", "absent.cuh: No such");
    refuses(test, asked(folder, "", ""), "--format: ", "not a regular file");
    // A name that another file of the list has, and the second file's own lines.
    put_text(joined(folder, "other.cuh"), formatted("\n\nOPTIM_FORMAT(\"my8/64\", \"x\", %s)", type));
    const char* both = formatted("%s,%s", example(), joined(folder, "other.cuh"));
    refuses(test, asked(both, "", ""), "--format: ", "other.cuh names a format \"my8/64\", and so does");
    both = formatted("%s,%s", example(), example());
    refuses(test, asked(both, "", ""), "--format: ", "type one of them alone");
    both = formatted("%s,%s", example(), joined(folder, "error.cuh"));
    refuses(test, asked(both, "", ""), "--format ", "error.cuh(5): error");
    // Names that are refused, or need the option.
    OptimConfig weights = asked(example(), "", "");
    weights.weights = "my8/64";
    refuses(test, weights, "--weights: \"my8/64\"", "--m and --v only");
    refuses(test, asked("", "my8", ""), "--m: \"my8\" is not known", "needs --format FILE.cuh");
    refuses(test, asked(example(), "my7", ""), "--m: \"my7\" is not known", "the files given name no such");
    put_text(joined(folder, "unsigned.cuh"), "OPTIM_FORMAT(\"u/64\", \"x\", Blocks<Ulin8, 64, ScaleFp32, NEAREST>)");
    refuses(test, asked(joined(folder, "unsigned.cuh"), "u", ""), "--m: \"u/64\"", "holds no negative numbers");
    for (const char* name : {"unsigned8.cuh", "signed8.cuh"}) {
        const char *path = joined(folder, name), *sign = *name == 'u' ? "static constexpr bool SIGNED = false;" : "";
        put_text(path, replaced(UNIT_FORMAT, "MEMBER", sign));
        OptimConfig m = asked(path, "unit8", "fp32"), v = asked(path, "fp32", "unit8"),
                    some = asked(path, "fp32", "fp32");
        some.overrides = "wpe: m=unit8";
        for (OptimConfig* config : {&m, &some}) {
            if (*sign) refuses(test, *config, "--", "holds no negative numbers");
            if (!*sign) resolve(test, config);
        }
        resolve(test, &v);
    }
    expect(folder_files(cache.path, false) > 0, "what compiles is kept");
}

CACHE_TEST(JIT_TEST, user_format_enters_the_content_address) {
    const char* folder = new_folder();
    const char* path = joined(folder, "mine.cuh");
    const char* at[2] = {"", ""};
    for (int k = 0; k < 2; k++) {
        // The same types and names, another body.
        put_text(path, formatted("struct Mine : Lin8 {\n    static constexpr float LARGEST = %d.0f;\n};\n"
                                 "OPTIM_FORMAT(\"mine/32\", \"x\", Blocks<Mine, 32, ScaleFp32, NEAREST>)\n",
                                 127 - k));
        OptimConfig config = asked(path, "mine", "");
        if (!resolve(test, &config)) break;
        at[k] = cache_path(kernel_of(config), "sm_90", source_of(&config));
    }
    expect(*at[0] && *at[1] && strcmp(at[0], at[1]) != 0, "the address is the same after the file was changed");
}

// A file that names "mine/32"; `text` stands in its body.
static OptimConfig changed_file(Test* test, const char* path, const char* text, char* sums, size_t bytes) {
    const char* file =
        formatted("%s\nOPTIM_FORMAT(\"mine/32\", \"/* x */\", Blocks<Mine, 32, ScaleFp32, NEAREST>)\n", text);
    put_text(path, file);
    OptimConfig config = asked(path, "fp32", "fp32");
    config.overrides = "a: m=mine";
    sums[0] = 0;
    if (resolve(test, &config)) user_sums(&config, sums, bytes);
    return config;
}

CACHE_TEST(JIT_TEST, user_format_sums) {
    const char* folder = new_folder();
    char sums[256], want[256];
    const char* body = "struct Mine : Lin8 {\n    static constexpr float LARGEST = 127.0f;\n};";
    changed_file(test, joined(folder, "mine.cuh"), body, want, sizeof(want));
    expect(strcmp(want, "mine/32=4f2872b9c3acf125") == 0, "checkpoints that hold a sum would not know %s", want);
    const char* const same[] = {
        body, "// new\nstruct Mine : Lin8 {\n    static constexpr float LARGEST = 127.0f;\n};",
        "struct Mine : Lin8 {  // new\n\n\tstatic constexpr /* \" */ float LARGEST = 127.0f;\n\n};\n/* \n */"};
    const char* const other[] = {"struct Mine : Lin8 {\n    static constexpr float LARGEST = 126.0f;\n};",
                                 "struct Mine : Lin8 {\n    static constexpr float LARGEST = 127.0f;\n};\nstruct B {};",
                                 "struct Mine : Lin8 {\n    //static constexpr float LARGEST = 127.0f;\n};"};
    for (const char* text : same) {
        changed_file(test, joined(folder, "elsewhere.cuh"), text, sums, sizeof(sums));
        expect(strcmp(sums, want) == 0, "%s and %s of\n%s", sums, want, text);
    }
    for (const char* text : other) {
        changed_file(test, joined(folder, "mine.cuh"), text, sums, sizeof(sums));
        expect(strncmp(sums, want, 8) == 0 && strcmp(sums, want) != 0, "%s of\n%s", sums, text);
    }
    OptimConfig plain = asked(joined(folder, "mine.cuh"), "fp32", "fp32");
    if (resolve(test, &plain)) user_sums(&plain, sums, sizeof(sums));
    expect(!*sums, "%s, and none is used", sums);
}

// A checkpoint whose m is in a format of the user's own, loaded by a run on the CPU that has another m.
static void expect_load_refused(Test* test, const OptimConfig* written, const char* sums, const char* holds) {
    Device cpu = {};
    OptimTensor tensor = {"a", 4, 4, true, 0};
    OptimConfig config = asked("", "fp32", "fp32");
    config.weights = "fp32";
    if (!resolve(test, &config)) return;
    optim_layout(&tensor, 1, &config);
    Optim* optim = optim_create(&cpu, &config, &tensor, 1, OPTIM_FP32);
    float nothing[16] = {};
    const auto zeros = [](void* context, const char*, const char*, int64_t) -> const void* { return context; };
    OptimStored stored = {*written, 3, zeros, stored_read, nullptr, nullptr, nothing, sums};
    stored.config.weights = "fp32";
    expect_refused(optim_load(optim, &stored, error), error, holds);
}

CACHE_TEST(JIT_TEST, user_format_changed_is_refused) {
    const char* folder = new_folder();
    char sums[256], now[256];
    const char* path = joined(folder, "mine.cuh");
    changed_file(test, path, "struct Mine : Lin8 {};", sums, sizeof(sums));
    OptimConfig config = changed_file(test, path, "struct Mine : Lin8 {};  // read again", now, sizeof(now));
    // Unchanged, or written before there were sums: the next check speaks.
    for (const char* known : {(const char*)sums, ""})
        expect_load_refused(test, &config, known, "a format of --format is not converted");
    config = changed_file(test, path, "struct Mine : Lin8 {\n    static constexpr int MORE = 1;\n};", now, sizeof(now));
    expect_load_refused(test, &config, sums, "--format that holds its mine/32 has been changed since");
}

// These formats fill the constants of each kind of table on a GPU.
JIT_TEST(user_format_tables_compile) {
    for (const char* format : {"Dyn8", "Udyn8", "De4", "Nf4", "Soft8"}) {
        const char* expression = formatted("optim_fill_kernel<Blocks<%s, 64, ScaleFp32, NEAREST>>", format);
        expect_compiles(test, expression);
    }
}

static const char SMALL[] = "--layers 1 --channels 64 --heads 1 --seq 32 --batch 2 --val-every 0 --sample-every 0";

// ./train with a --format, in a folder that is removed.
struct FormatRun {
    const char *words, *format, *says;  // the format's path from the root, or from here
    int code;
};

static void expect_run(Test* test, const FormatRun& run) {
    const char* format = run.format[0] == '/' ? run.format : joined(test_folder(), run.format);
    int code;
    const char* output =
        run_train(formatted("%s %s --format %s --run %s/run", SMALL, run.words, format, new_folder()), &code);
    expect(code == run.code && strstr(output, run.says), "%s: exit code %d\n%s", run.words, code, output);
    if (code == 2) {
        const char* end = strchr(output, '\n');
        bool log = strstr(run.says, "NVRTC");
        expect(strncmp(output, "train: error: --format", 22) == 0 && (log || (end && !end[1])), "%s", output);
    }
}

CACHE_TEST(JIT_TEST, user_format_command_line) {
    const FormatRun runs[] = {{"--list-formats", example(), "my8/64:sr", 0},
                              {"--list-formats", "/nowhere/mine.cuh", "cannot open /nowhere/mine.cuh", 2},
                              {"--list-formats", "README.md", "NVRTC could not compile it", 2}};
    for (const FormatRun& run : runs) expect_run(test, run);
}

// Refused before the file is read or NVRTC is asked for, whether it is installed or not.
CACHE_TEST(TEST, user_format_on_the_cpu) {
    const char* says = "is compiled for a GPU, and this run is on the CPU; type --format ''";
    const FormatRun runs[] = {{"--device cpu --m my8", example(), says, 2},
                              {"--device cpu --v my8/64:sr --dry-run", example(), says, 2},
                              {"--device cpu --steps 1", example(), says, 2},
                              {"--device cpu", "/nowhere/mine.cuh", says, 2}};
    for (int missing = 0; missing < 2; missing++) {
        Setting setting("NIBBLE_NVRTC", missing ? "/nowhere/libnvrtc.so" : "");
        for (const FormatRun& run : runs) expect_run(test, run);
    }
}

// Six steps on a GPU with moments of these formats leave the bytes that the built-in ones leave.
static void expect_equal_runs(Test* test, const char* formats, const char* m, const char* v, const char* built_in_m,
                              const char* built_in_v) {
    const OptimTensor tensors[] = {{"a", 33, 129, true, 0}, {"b", 1, 31, false, 0}, {"c", 64, 64, true, 0}};
    OptimConfig config[] = {asked(formats, m, v), asked("", built_in_m, built_in_v)};
    if (!resolve(test, &config[0]) || !resolve(test, &config[1])) return;
    Run run[2];
    for (int k = 0; k < 2; k++) {
        run_open(&run[k], &config[k], tensors, 3, OPTIM_BF16, true);
        run_steps(&run[k], 1, 6);
    }
    expect_same(test, &run[0], &run[1], describe(&config[0]));
}

// Tables, too: a thread of the GPU fills the user's, the host the built-in ones.
CACHE_TEST(JIT_TEST, user_format_equals_built_in_gpu) {
    for_equals([&](const char* files, const char* m, const char* v, const char* built_in_m, const char* built_in_v) {
        expect_equal_runs(test, files, m, v, built_in_m, built_in_v);
    });
}

TEST(user_format_trains_and_resumes_gpu) {
    // The option is restored as the others; without the file the resumed run says so.
    if (!jit_available()) skip("libnvrtc was not found");
    CacheFolder cache;
    const char *folder = new_folder(), *mine = joined(folder, "mine.cuh"), *run = joined(folder, "run");
    const auto copy = [&](const char* more) {
        const char* command = formatted("cat %s > %s; echo '%s' >> %s", example(), mine, more, mine);
        expect(system(command) == 0, "%s", command);
    };
    const auto expect_said = [&](int want, const char* says, const char* words) {
        int code;
        const char* output = run_train(words, &code);
        expect(code == want && strstr(output, says), "exit code %d\n%s", code, output);
    };
    copy("");
    expect_said(0, "m my8/64",
                formatted("%s --device gpu --format %s --m my8 --v my8:sr --steps 4 --run %s", SMALL, mine, run));
    expect_said(0, "m my8/64", formatted("--device gpu --resume %s --steps 6", run));
    // Another text under the same name: refused when its codes may mean something else, taken when they cannot.
    const char* longer = formatted("--device gpu --resume %s --steps 8", run);
    copy("struct Unused {};");
    expect_said(2, "holds its my8/64 has been changed since", longer);
    copy("// read again");
    expect_said(0, "m my8/64", longer);
    unlink(mine);
    expect_said(2, "--format: ", longer), expect_said(2, "mine.cuh: No such file", longer);
    expect_said(0, "", formatted("--device gpu --resume %s --steps 10 --format %s", run, example()));
}
