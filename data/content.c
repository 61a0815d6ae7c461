// Files that are no text are recognized by the signature they begin with, or by a sample: a text in any 8-bit encoding
// has next to no NUL and control bytes, and no NUL at its beginning.
#include "content.h"
#include <stdlib.h>
#include <string.h>
#include "files.h"
#include "options.h"  // shell_word
#include "text.h"

enum { BEGIN = 512, HEAD = 65536, BLOCK = 4096, BLOCKS = 16 };

typedef struct {
    int64_t bytes;
    int64_t nul;
    int64_t control;      // bytes that no text has, beside NUL
    bool begins_as_text;  // no NUL in the first BEGIN bytes
} Sample;

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

static void sample_add(Sample* sample, const unsigned char* bytes, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        unsigned char b = bytes[i];
        // Tab, line feed, page feed, carriage return, backspace and escape are found in texts.
        bool usual = (b >= '\b' && b <= '\r') || b == 0x1B;
        sample->nul += b == 0;
        sample->control += (b > 0 && b < ' ' && !usual) || b == 0x7F;
    }
    sample->bytes += count;
}

static bool sample_is_text(const Sample* sample) {
    return sample->begins_as_text && sample->nul * 1000 <= sample->bytes && sample->control * 100 <= sample->bytes;
}

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

// Samples the first HEAD bytes and BLOCKS blocks of what follows them.
static bool sample_read(Sample* sample, unsigned char* head, int descriptor, int64_t size, const char* path,
                        char* error) {
    unsigned char block[BLOCK];
    int64_t bytes = size < HEAD ? size : HEAD;
    bool ok = file_read_at(descriptor, path, head, 0, bytes, error);
    if (ok) sample_add(sample, head, bytes < BEGIN ? bytes : BEGIN);
    sample->begins_as_text = sample->nul == 0;
    if (ok && bytes > BEGIN) sample_add(sample, head + BEGIN, bytes - BEGIN);
    for (int64_t i = 1; ok && size > HEAD + BLOCK && i <= BLOCKS; i++) {
        ok = file_read_at(descriptor, path, block, (size - BLOCK) / BLOCKS * i, BLOCK, error);
        if (ok) sample_add(sample, block, BLOCK);
    }
    return ok;
}

bool content_is_text(int descriptor, int64_t size, const char* path, char* error) {
    Sample sample = {0};
    SCOPED unsigned char* head = memory_zero(1, HEAD);
    if (!sample_read(&sample, head, descriptor, size, path, error)) return false;
    const bool text = sample_is_text(&sample);
    for (size_t i = 0; i < sizeof(signatures) / sizeof(signatures[0]); i++) {
        const char *signature = signatures[i].bytes, *name = signatures[i].name;
        if (size < signatures[i].length || memcmp(head, signature, (size_t)signatures[i].length) != 0) continue;
        if (text && strcmp(signature, "PAR1") == 0) continue;  // a text may begin so
        return refuse(error, path, name, signatures[i].advice);
    }
    if (text && is_json(path, head, size < HEAD ? size : HEAD)) {
        return refuse(error, path, "JSON, whose marks and names would be learned as well", prepare);
    }
    if (text) return true;
    const int64_t odd = sample.nul + sample.control;
    const char* binary = text_kept("binary (%.3g%% of its bytes are NUL or control characters)",
                                   100.0 * (double)odd / (double)sample.bytes);
    return refuse(error, path, binary, others);
}
