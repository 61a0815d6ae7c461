#include "sampling.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "clock.h"
#include "text.h"

// Says and logs sample `index` of `count`. On failure the run's `error` has a sentence.
static void sample_say(RunFolder* run, int index, int count, const char* prompt, const char* text) {
    if (index == 0) run_say(run, "sample ------------------------------------------------------------\n");
    if (count > 1) run_say(run, "%s--- sample %d of %d\n", index ? "\n" : "", index + 1, count);
    run_say(run, "%s%s\n", prompt, text);
    if (index == count - 1) run_say(run, "-------------------------------------------------------------------\n");
    FILE* log = run_log_begin(run, "sample");
    if (!log) return;
    fprintf(log, ", \"index\": %d", index);
    json_write_text_member(log, ", ", "prompt", prompt);
    json_write_text_member(log, ", ", "text", text);
    run_log_end(run);
}

static int samples_count(const Samples* samples) {
    return samples->run->prompts.count * (int)samples->run->options->samples;
}

void samples_next(Samples* samples, int* tokens, int count, int end) {
    const Tokenizer* tokenizer = samples->run->tokenizer;
    const int stop = strcmp(samples->run->options->stop, "end") == 0 ? tokenizer_end(tokenizer) : -1;
    for (int i = 0; i < count; i++) {
        samples->drawn += tokens[i] >= 0 && samples->began > 0;
        tokens[i] = tokens[i] == stop ? end : tokens[i];
    }
    if (samples->began == 0) samples->began = seconds_now();  // the first tokens wait for prompts and for compilers
    samples->seconds = seconds_now() - samples->began;
    const int token = tokens[0];
    if (!samples->to || samples_count(samples) > 1 || (token < 0 && token != end)) return;
    int bytes = 0;
    const char* text = token >= 0 ? tokenizer_decode(tokenizer, token, &bytes) : "";
    const char* prompt = samples->run->prompts.text[0];
    if (samples->streamed++ == 0) text_print(samples->to, prompt, strlen(prompt));
    const size_t old = samples->half_bytes, all = old + (size_t)bytes;
    SCOPED char* piece = memory_take(all + 1);
    memcpy(piece, samples->half, old), memcpy(piece + old, text, (size_t)bytes);
    const size_t half = samples->half_bytes = text_print(samples->to, piece, all);
    memcpy(samples->half, piece + all - half, half);
    if (fflush(samples->to) != 0 && errno == EPIPE) exit(0);  // nobody reads on; other failures are reported at the end
}

void samples_done(void* context, int index, const int* tokens, int64_t used) {
    const Samples* samples = context;
    RunFolder* run = samples->run;
    const int prompt = index / (int)run->options->samples, count = samples_count(samples);
    const char* prompt_text = run->prompts.text[prompt];
    SCOPED char* text;
    size_t bytes;
    FILE* memory = text_stream(&text, &bytes);
    for (int64_t i = run->prompts.length[prompt]; i < used; i++) {
        int length = 0;
        const char* piece = tokenizer_decode(run->tokenizer, tokens[i], &length);
        fwrite(piece, 1, (size_t)length, memory);
    }
    fclose(memory);
    if (samples->to && count > 1) {
        fprintf(samples->to, "%s--- sample %d of %d\n", index ? "\n" : "", index + 1, count);
        text_print(samples->to, prompt_text, strlen(prompt_text));
        text_print(samples->to, text, bytes);
    }
    if (samples->to) fputc('\n', samples->to);
    if (samples->to && index == count - 1 && samples->drawn > 0) {
        fflush(samples->to);
        fprintf(stderr, "train: drew %lld tokens in %.3f s, %.0f a second\n", (long long)samples->drawn,
                samples->seconds, (double)samples->drawn / samples->seconds);
    }
    for (size_t i = 0; i < bytes; i++) text[i] = text[i] ? text[i] : '?';  // a model of bytes writes NULs too
    if (!samples->to) sample_say(run, index, count, prompt_text, text);
}
