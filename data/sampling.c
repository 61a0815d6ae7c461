#include "sampling.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include "clock.h"
#include "text.h"

static bool prompts_add(Prompts* prompts, const char* text, const Tokenizer* tokenizer, int V, char* error) {
    const int at = prompts->count++, room = (int)strlen(text) + 16;
    prompts->text = memory_grow(prompts->text, (size_t)prompts->count * sizeof(char*));
    prompts->length = memory_grow(prompts->length, (size_t)prompts->count * sizeof(int));
    prompts->tokens = memory_grow(prompts->tokens, (size_t)(prompts->all + room) * sizeof(int));
    prompts->text[at] = text;
    int *own = prompts->tokens + prompts->all, length = 1;
    own[0] = 0;
    if (tokenizer) length = tokenizer_prompt(tokenizer, text, V, own, room);
    for (int i = 0; i < length; i++) {
        if (own[i] < V || !tokenizer) continue;
        return data_error(error, "the prompt has token %d, and the model's vocabulary has %d; type another prompt",
                          own[i], V);
    }
    prompts->length[at] = length, prompts->all += length;
    if (length > 0) return true;
    return data_error(error, tokenizer_encode(tokenizer, "", 0, NULL, 0) < 0
                                 ? "the prompt cannot be encoded without merges.txt; put it beside vocab.json"
                                 : "the prompt has a character that the model's vocabulary lacks; type another prompt");
}

bool prompts_open(Prompts* prompts, const char* text, const char* file, const Tokenizer* tokenizer, int V,
                  char* error) {
    int64_t bytes = 0;
    memset(prompts, 0, sizeof(*prompts));
    if (!*file) return prompts_add(prompts, text, tokenizer, V, error);
    SCOPED char* whole = file_read(file, &bytes, error);
    if (!whole) return data_error(error, "--prompt-file: %s; name a file of prompts, one a line", error);
    const char* line = strncmp(whole, "\xEF\xBB\xBF", 3) == 0 ? whole + 3 : whole;
    // A NUL would end its prompt.
    bool ok = strlen(whole) == (size_t)bytes && text_is_utf8(whole, bytes) && line[strspn(line, "\r\n")];
    if (!ok) data_error(error, "--prompt-file %s is no UTF-8 text, or empty; write prompts as UTF-8, one a line", file);
    for (const char* prompt; ok && (prompt = text_word(&line, '\n'));) {
        const int length = (int)strlen(prompt) - text_ends(prompt, "\r");
        if (length > 0) ok = prompts_add(prompts, text_kept("%.*s", length, prompt), tokenizer, V, error);
    }
    return ok;
}

void prompts_close(Prompts* prompts) {
    free(prompts->text), free(prompts->tokens), free(prompts->length);
    memset(prompts, 0, sizeof(*prompts));
}

static int samples_count(const Samples* samples) {
    return samples->prompts->count * samples->each;
}

void samples_next(Samples* samples, int* tokens, int count, int end) {
    const int stop = samples->tokenizer && samples->stop ? tokenizer_end(samples->tokenizer) : -1;
    for (int i = 0; i < count; i++) {
        samples->so_far.drawn += tokens[i] >= 0 && samples->so_far.began > 0;
        tokens[i] = tokens[i] == stop ? end : tokens[i];
    }
    if (samples->so_far.began == 0)
        samples->so_far.began = seconds_now();  // the first tokens wait for prompts and for compilers
    samples->so_far.seconds = seconds_now() - samples->so_far.began;
    const int token = tokens[0];
    if (!samples->to || samples_count(samples) > 1 || (token < 0 && token != end)) return;
    int bytes = 0;
    const char* text = token >= 0 ? tokenizer_decode(samples->tokenizer, token, &bytes) : "";
    const char* prompt = samples->prompts->text[0];
    if (samples->so_far.streamed++ == 0) text_print(samples->to, prompt, strlen(prompt));
    const size_t old = samples->so_far.half_bytes, all = old + (size_t)bytes;
    SCOPED char* piece = memory_take(all + 1);
    memcpy(piece, samples->so_far.half, old), memcpy(piece + old, text, (size_t)bytes);
    const size_t half = samples->so_far.half_bytes = text_print(samples->to, piece, all);
    memcpy(samples->so_far.half, piece + all - half, half);
    if (fflush(samples->to) != 0 && errno == EPIPE) exit(0);  // nobody reads on; other failures are reported at the end
}

void samples_done(void* context, int index, const int* tokens, int64_t used) {
    const Samples* samples = context;
    const int prompt = index / samples->each, count = samples_count(samples);
    if (!samples->tokenizer) return;
    SCOPED char* text;
    size_t bytes;
    FILE* memory = text_stream(&text, &bytes);
    for (int64_t i = samples->prompts->length[prompt]; i < used; i++) {
        int length = 0;
        const char* piece = tokenizer_decode(samples->tokenizer, tokens[i], &length);
        fwrite(piece, 1, (size_t)length, memory);
    }
    fclose(memory);
    if (samples->to && count > 1) {
        fprintf(samples->to, "%s--- sample %d of %d\n", index ? "\n" : "", index + 1, count);
        text_print(samples->to, samples->prompts->text[prompt], strlen(samples->prompts->text[prompt]));
        text_print(samples->to, text, bytes);
    }
    if (samples->to) fputc('\n', samples->to);
    if (samples->to && index == count - 1 && samples->so_far.drawn > 0) {
        fflush(samples->to);
        fprintf(stderr, "train: drew %lld tokens in %.3f s, %.0f a second\n", (long long)samples->so_far.drawn,
                samples->so_far.seconds, (double)samples->so_far.drawn / samples->so_far.seconds);
    }
    for (size_t i = 0; i < bytes; i++) text[i] = text[i] ? text[i] : '?';  // a model of bytes writes NULs too
    if (samples->done) samples->done(samples->context, index, samples->prompts->text[prompt], text);
}
