#include "sampling.h"

#include <stdlib.h>
#include <string.h>

static bool prompt_add(Prompts* prompts, const char* text, size_t bytes, const Tokenizer* tokenizer, int V,
                       char* error) {
    Prompt prompt = {text_part(text, bytes), NULL, 1};
    const int room = (int)bytes + 16;
    prompt.tokens = memory_zero((size_t)room, sizeof(int));
    if (tokenizer) prompt.count = tokenizer_prompt(tokenizer, prompt.text, V, prompt.tokens, room);
    prompts->prompt = memory_grow(prompts->prompt, (size_t)(prompts->count + 1) * sizeof(Prompt));
    prompts->prompt[prompts->count++] = prompt;
    return prompt.count > 0 ||
           data_error(error, "the prompt cannot be encoded without merges.txt; put it beside vocab.json");
}

bool prompts_open(Prompts* prompts, const char* text, const char* file, const Tokenizer* tokenizer, int V,
                  char* error) {
    memset(prompts, 0, sizeof(*prompts));
    if (!*file) return prompt_add(prompts, text, strlen(text), tokenizer, V, error);
    int64_t bytes = 0;
    char* lines = file_read(file, &bytes, error);
    if (!lines) return false;
    bool fine = true;
    for (char* line = lines; fine && *line;) {
        size_t length = strcspn(line, "\n"), used = length;
        if (used > 0 && line[used - 1] == '\r') used--;
        if (used > 0) fine = prompt_add(prompts, line, used, tokenizer, V, error);
        line += length + (line[length] == '\n');
    }
    free(lines);
    if (fine && prompts->count == 0) {
        return data_error(error, "--prompt-file %s has no prompt; write one a line", file);
    }
    return fine;
}

void prompts_close(Prompts* prompts) {
    for (int i = 0; i < prompts->count; i++) free(prompts->prompt[i].text), free(prompts->prompt[i].tokens);
    free(prompts->prompt);
    memset(prompts, 0, sizeof(*prompts));
}

char* tokens_text(const Tokenizer* tokenizer, const int* tokens, int64_t count, size_t* bytes) {
    char* text = NULL;
    FILE* to = text_stream(&text, bytes);
    for (int64_t i = 0; i < count; i++) {
        int length = 0;
        const char* piece = tokenizer_decode(tokenizer, tokens[i], &length);
        fwrite(piece, 1, (size_t)length, to);
    }
    fclose(to);
    return text;
}

void sample_write(FILE* to, int index, int count, const char* prompt, const char* text, size_t bytes) {
    if (count > 1) fprintf(to, "%s--- sample %d of %d\n", index ? "\n" : "", index + 1, count);
    fputs(prompt, to);
    fwrite(text, 1, bytes, to);
    if (count > 1) fputc('\n', to);
}
