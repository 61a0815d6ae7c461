// Tests of the host's memory: what data/memory.h promises, that nothing goes past it, and what limits do to ./train.
#include "cli.h"

#include <pthread.h>

#include "../../data/memory.h"
#include "apart.h"

constexpr size_t TOO_MUCH = (size_t)1 << 60;

static const char* volatile sink;  // so that the compiler leaves no allocation out

TEST(memory_missing_is_one_sentence) {
    static const std::tuple<const char*, void (*)()> cases[] = {
        {"memory_take", [] { sink = (char*)memory_take(TOO_MUCH); }},
        {"memory_zero", [] { sink = (char*)memory_zero(TOO_MUCH >> 4, 16); }},
        {"memory_zero, a product over 64 bits", [] { sink = (char*)memory_zero(TOO_MUCH, TOO_MUCH); }},
        {"memory_grow", [] { sink = (char*)memory_grow(memory_take(8), TOO_MUCH); }},
        {"memory_aligned", [] { sink = (char*)memory_aligned(256, TOO_MUCH); }},
    };
    for (const auto& [name, body] : cases) {
        const Ended its = run_apart(body);
        const char* end = strchr(its.text, '\n');
        expect(its.code == 2 && strncmp(its.text, "train: error: ", 14) == 0 && end && !end[1], "%s: code %d, %s", name,
               its.code, its.text);
        expect(!strstr(its.text, "checkpoint"), "%s: %s", name, its.text);
    }
}

// A text stays where it is, however many follow it, and the same text takes no more memory.
TEST(memory_texts_stay) {
    const char *first = text_kept("%s of %d", "one", 7), *same = first;
    for (int i = 0; i < 1000; i++) text_kept("%d", i), same = text_kept("one of %d", 7);
    expect(strcmp(first, "one of 7") == 0 && same == first, "%s", same);
}

TEST(memory_missing_names_the_last_checkpoint) {
    const Ended its = run_apart([] {
        static char path[64] = "";
        memory_checkpoint(path);
        strcpy(path, "some/step_00000003");
        sink = (char*)memory_take(TOO_MUCH);
    });
    expect_ended(test, its, 2, {"go on with --resume some/step_00000003\n"});
}

static pthread_barrier_t all_ready;

TEST(memory_missing_in_threads_is_one_sentence) {
    const auto ask_too_much = [](void*) -> void* {
        pthread_barrier_wait(&all_ready);
        sink = (char*)memory_take(TOO_MUCH);
        return nullptr;
    };
    auto body = [&] {
        pthread_t thread[16];
        pthread_barrier_init(&all_ready, nullptr, 16);
        for (pthread_t& one : thread) pthread_create(&one, nullptr, ask_too_much, nullptr);
        for (pthread_t& one : thread) pthread_join(one, nullptr);
    };
    for (int i = 0; i < 20; i++) {
        const Ended its = run_apart(body);
        const char* end = strchr(its.text, '\n');
        expect(its.code == 2 && end && !end[1], "code %d, %s", its.code, its.text);
    }
}

TEST(memory_texts) {
    char *part = text_part("abcdef", 3), *whole = text_part("abc", 9), *copy = text_copy("");
    char* made = text_format("%s-%d", "x", 42);
    expect(strcmp(part, "abc") == 0 && strcmp(whole, "abc") == 0 && copy[0] == 0, "%s %s %s", part, whole, copy);
    expect(strcmp(made, "x-42") == 0, "%s", made);
    unsigned char* zero = (unsigned char*)memory_zero(1000, 3);
    for (int i = 0; i < 3000; i++) expect(zero[i] == 0, "byte %d is %d", i, zero[i]);
    void* nothing = memory_take(0);
    expect(nothing, "no bytes are NULL");
}

TEST(memory_stream_is_open_memstream) {
    char *ours = nullptr, *theirs = nullptr;
    size_t our_bytes = 1, their_bytes = 1;
    FILE* streams[] = {text_stream(&ours, &our_bytes), open_memstream(&theirs, &their_bytes)};
    expect(ours && ours[0] == 0 && our_bytes == 0, "%zu bytes before anything is written", our_bytes);
    for (FILE* stream : streams) {
        for (int i = 0; i < 20000; i++) fprintf(stream, "%d%c", i * i, i % 7 ? ' ' : '\0');
        fflush(stream);
        expect(ours[our_bytes] == 0, "no NUL byte after a flush");
        fputs("the end", stream);
        fclose(stream);
    }
    expect(our_bytes == their_bytes && memcmp(ours, theirs, our_bytes + 1) == 0, "%zu and %zu bytes", our_bytes,
           their_bytes);
}

// Nothing of the product asks the C library itself, but for the library's list of what memory.h hands out; comments and
// texts may name its functions.
TEST(memory_comes_from_one_family) {
    int code;
    const char* found = shell(
        formatted("cd '%s' && for file in train_gpt2.cu $(find data kernels optim -name '*.c' -o -name '*.cu' -o -name "
                  "'*.cuh' -o -name '*.h' | grep -v '^data/memory'); do sed -E '/blocks->block, /d; "
                  "s/\"[^\"]*\"//g; s,//.*,,' $file | grep -nE "
                  "'\\<(malloc|calloc|realloc|reallocarray|aligned_alloc|posix_memalign|valloc|alloca|strdup|strndup|"
                  "asprintf|"
                  "vasprintf|getline|getdelim|open_memstream|new)\\>|std::(vector|string|map|unique_ptr)\\>' | sed "
                  "\"s,^,$file:,\"; done",
                  test_folder()),
        &code);
    expect(code == 0 && !*found, "exit code %d; this takes memory past data/memory.h: %s", code, found);
}

// A stack that is too small ends in a sentence. dev/faults.py tests other limits.
TEST(memory_of_the_stack) {
    int code;
    const char* said = shell(formatted("ulimit -s 1024 && %s/train --dry-run --device cpu 2>&1", test_folder()), &code);
    expect(code == 2 && strstr(said, "ulimit -s 8192") && strstr(said, "stack"), "exit code %d: %s", code, said);
}
