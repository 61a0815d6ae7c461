// Tests of the host's memory: what data/memory.h promises. commands.txt has that nothing goes past it.
#include "files.h"

#include <pthread.h>

#include "../../data/memory.h"
#include "apart.h"

constexpr size_t TOO_MUCH = (size_t)1 << 60;

static const char* volatile sink;  // so that the compiler leaves no allocation out

static pthread_barrier_t all_ready;

static void ask_in_threads() {
    pthread_t thread[16];
    pthread_barrier_init(&all_ready, nullptr, 16);
    const auto ask = [](void*) -> void* {
        pthread_barrier_wait(&all_ready);
        sink = (char*)memory_take(TOO_MUCH);
        return nullptr;
    };
    for (pthread_t& one : thread) pthread_create(&one, nullptr, ask, nullptr);
    for (pthread_t& one : thread) pthread_join(one, nullptr);
}

static void ask_after_checkpoint() {
    static char path[64] = "";
    memory_checkpoint(path);
    strcpy(path, "some/step_00000003");
    sink = (char*)memory_take(TOO_MUCH);
}

TEST(memory_missing_is_one_sentence) {
    static const std::tuple<const char*, int, void (*)()> cases[] = {
        {"memory_take", 1, [] { sink = (char*)memory_take(TOO_MUCH); }},
        {"memory_zero", 1, [] { sink = (char*)memory_zero(TOO_MUCH >> 4, 16); }},
        {"memory_zero, a product over 64 bits", 1, [] { sink = (char*)memory_zero(TOO_MUCH, TOO_MUCH); }},
        {"memory_grow", 1, [] { sink = (char*)memory_grow(memory_take(8), TOO_MUCH); }},
        {"memory_aligned", 1, [] { sink = (char*)memory_aligned(256, TOO_MUCH); }},
        {"threads", 20, ask_in_threads},
        {"checkpoint", 1, ask_after_checkpoint},
    };
    for (const auto& [name, times, body] : cases) {
        for (int i = 0; i < times; i++) {
            const Ended its = run_apart(body);
            const char *end = strchr(its.text, '\n'),
                       *go_on = strstr(its.text, "go on with --resume some/step_00000003\n");
            expect(its.code == 2 && strncmp(its.text, "train: error: ", 14) == 0 && end && !end[1], "%s: code %d, %s",
                   name, its.code, its.text);
            expect(body == ask_after_checkpoint ? go_on != nullptr : !strstr(its.text, "checkpoint"), "%s: %s", name,
                   its.text);
        }
    }
}

// A text stays where it is, however many follow it, and the same text takes no more memory.
TEST(memory_texts) {
    const char *first = text_kept("%s of %d", "one", 7), *same = first;
    for (int i = 0; i < 1000; i++) text_kept("%d", i), same = text_kept("one of %d", 7);
    expect(strcmp(first, "one of 7") == 0 && same == first, "%s", same);
    char *part = text_part("abcdef", 3), *whole = text_part("abc", 9), *made = text_format("%s-%d", "x", 42);
    expect(strcmp(part, "abc") == 0 && strcmp(whole, "abc") == 0 && strcmp(made, "x-42") == 0, "%s %s", part, made);
    expect(memory_take(0), "no bytes are NULL");
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
