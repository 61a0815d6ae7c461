#include "sampling.h"
#include <stdlib.h>
#include <string.h>
#include "text.h"

static bool prompts_add(Prompts* prompts, const char* text, const Tokenizer* tokenizer, int V, char* error) {
    const int at = prompts->count++, room = (int)strlen(text) + 16;
    prompts->text = memory_grow(prompts->text, (size_t)prompts->count * sizeof(char*));
    prompts->length = memory_grow(prompts->length, (size_t)prompts->count * sizeof(int));
    prompts->tokens = memory_grow(prompts->tokens, (size_t)(prompts->all + room) * sizeof(int));
    int* own = prompts->tokens + prompts->all;
    own[0] = 0;
    const int length = tokenizer ? tokenizer_prompt(tokenizer, text, V, own, room) : 1;
    for (int i = 0; i < length && tokenizer; i++) {
        if (own[i] >= V)
            return data_error(error, "the prompt has token %d, and the model's vocabulary has %d; type another prompt",
                              own[i], V);
    }
    prompts->text[at] = text, prompts->length[at] = length, prompts->all += length;
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
