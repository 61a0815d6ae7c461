// Files that are no text are recognized by the signature they begin with, or by a sample: a text in any 8-bit encoding
// has next to no NUL and control bytes, and no NUL at its beginning.
#include <stdlib.h>
#include <string.h>
#include "loader.h"
#include "options.h"  // shell_word
#include "text.h"

enum { BEGIN = 512, BLOCK = 4096, BLOCKS = 16 };

// Advice about a file. %s is its name as a shell takes it.
static const char prepare[] = "type make venv && .venv/bin/python data/prepare.py %s";
static const char others[] =
    "name a text or shards of tokens, which data/prepare.py makes of packed text and, with --from-nanogpt DIR, of "
    "nanoGPT's files";

// The most likely mistakes. Any other file that is no text is "binary".
static const struct {
    int length;
    const char *bytes, *name, *advice;
} signatures[] = {
    {2, "\x1F\x8B", "gzip data", prepare},
    {6, "\3757zXZ\0", "xz data", prepare},
    {4, "\x28\xB5\x2F\xFD", "zstd data", prepare},
    {4, "PAR1", "a parquet table", prepare},
    {4, "PK\3\4", "a zip archive", "type unzip %s, and name a text that comes out"},
    {6, "\x93NUMPY", "a NumPy array (.npy)",
     "save the tokens of %s by .astype('uint16').tofile('train.bin'), and type .venv/bin/python data/prepare.py "
     "--from-nanogpt FOLDER"},
    {5, "%PDF-", "a PDF document", "type pdftotext %s text.txt, and name text.txt"},
    {2, "\xFF\xFE", "UTF-16 text", "type iconv -f UTF-16 -t UTF-8 %s > text.txt, and name text.txt"},
};

// True if a file is JSON by its name, or begins as an object or an array of those or of texts.
static bool is_json(const char* path, const unsigned char* head, int64_t bytes) {
    int64_t at = bytes >= 3 && memcmp(head, "\xEF\xBB\xBF", 3) == 0 ? 3 : 0;
    char two[2] = {0, 0};  // the first characters that are no white space
    for (int i = 0; i < 2; i++, at++) {
        while (at < bytes && strchr(" \t\r\n", head[at]) && head[at]) at++;
        if (at < bytes) two[i] = (char)head[at];
    }
    const bool begins = (two[0] == '{' && two[1] == '"') || (two[0] == '[' && (two[1] == '{' || two[1] == '"'));
    return begins || text_ends(path, ".jsonl") || text_ends(path, ".ndjson");
}

static bool refuse(char* error, const char* path, const char* name, const char* advice) {
    return data_error(error, "%s is %s; %s, or add --data-format bytes to train on its raw bytes", path, name,
                      text_kept(advice, shell_word(path)));
}

// Returns how many bytes no text has. Tab, line feed, page feed, carriage return, backspace and escape are found in
// texts.
static int64_t count_odd(const unsigned char* bytes, int64_t count) {
    int64_t odd = 0;
    for (int64_t i = 0; i < count; i++) {
        const bool usual = (bytes[i] >= '\b' && bytes[i] <= '\r') || bytes[i] == 0x1B;
        odd += (bytes[i] < ' ' && !usual) || bytes[i] == 0x7F;
    }
    return odd;
}

bool content_is_text(int descriptor, int64_t size, const char* path, char* error) {
    unsigned char sample[(1 + BLOCKS) * BLOCK] = {0};  // the first block, then others all over the file
    const int64_t head = size < BLOCK ? size : BLOCK, step = (size - head) / BLOCKS;
    int64_t bytes = head;
    if (!file_read_at(descriptor, path, sample, 0, head, error)) return false;
    for (int64_t i = 1; step > 0 && i <= BLOCKS; i++, bytes += BLOCK) {
        if (!file_read_at(descriptor, path, sample + bytes, step * i, BLOCK, error)) return false;
    }
    const int64_t odd = count_odd(sample, bytes);
    const bool text = !memchr(sample, 0, (size_t)(head < BEGIN ? head : BEGIN)) && odd * 100 <= bytes;
    for (size_t i = 0; i < sizeof(signatures) / sizeof(signatures[0]); i++) {
        const char* signature = signatures[i].bytes;
        if (memcmp(sample, signature, (size_t)signatures[i].length) != 0) continue;
        if (text && strcmp(signature, "PAR1") == 0) continue;  // a text may begin so
        return refuse(error, path, signatures[i].name, signatures[i].advice);
    }
    if (text && is_json(path, sample, head)) {
        return refuse(error, path, "JSON, whose marks and names would be learned as well", prepare);
    }
    return text || refuse(error, path,
                          text_kept("binary (%.3g%% of its bytes are NUL or control characters)",
                                    100.0 * (double)odd / (double)bytes),
                          others);
}
