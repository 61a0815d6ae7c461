// Files that are no text are recognized by the signature they begin with, or by a sample: a text in any 8-bit encoding
// has next to no NUL and control bytes, and no NUL at its beginning.
#include "content.h"
#include <stdlib.h>
#include <string.h>
#include "files.h"
#include "options.h"  // shell_word

enum { BEGIN = 512, HEAD = 65536, BLOCK = 4096, BLOCKS = 16 };

typedef struct {
    int64_t bytes;
    int64_t nul[2];       // NUL bytes at even and at odd positions
    int64_t control;      // bytes that no text has, beside NUL
    bool begins_as_text;  // no NUL in the first BEGIN bytes
} Sample;

// Advice about a file. %s is its name as a shell takes it.
static const char prepare[] = "type make venv && .venv/bin/python data/prepare.py %s, or unpack it";
static const char not_text[] = "name a text or shards of tokens";
static const char unlz4[] = "type lz4 -d %s, and name the text that comes out";
static const char unzlib[] =
    "type python3 -c 'import sys, zlib; sys.stdout.buffer.write(zlib.decompress(open(sys.argv[1], \"rb\").read()))' %s "
    "> unpacked.txt, and name that file";
static const char utf16[] = "type iconv -f UTF-16 -t UTF-8 %s > text.txt, and name text.txt";
static const char utf16_little[] = "type iconv -f UTF-16LE -t UTF-8 %s > text.txt, and name text.txt";
static const char utf16_big[] = "type iconv -f UTF-16BE -t UTF-8 %s > text.txt, and name text.txt";
static const char utf32[] = "type iconv -f UTF-32 -t UTF-8 %s > text.txt, and name text.txt";

// A signature of printable characters alone might begin a text as well: it counts where the sample is not text.
static const struct {
    int at, length;
    const char *bytes, *name, *advice;
} signatures[] = {
    {0, 2, "\x1F\x8B", "gzip data", prepare},
    {0, 6, "\3757zXZ\0", "xz data", prepare},
    {0, 4, "\x28\xB5\x2F\xFD", "zstd data", prepare},
    {4, 6, "1AY&SY", "bzip2 data", prepare},
    {0, 4, "PAR1", "a parquet table", "type make venv && .venv/bin/python data/prepare.py %s"},
    {0, 4, "PARE", "an encrypted parquet table", not_text},
    {0, 4, "FEA1", "a Feather table", not_text},
    {0, 7, "MMIDIDX", "an index of Megatron-LM's",
     "add --data-format nanogpt and name the .bin beside it if its tokens are uint16"},
    {0, 3, "\x5D\0\0", "lzma data", prepare},
    {1, 3, "\x2A\x4D\x18", "packed data (a skippable frame of zstd or lz4)",
     "type unzstd %s or lz4 -d, and name the text that comes out"},
    {0, 4, "\x04\x22\x4D\x18", "lz4 data", unlz4},
    {0, 4, "\x02\x21\x4C\x18", "lz4 data", unlz4},
    {0, 5, "LZIP\1", "lzip data", "type lzip -d %s, and name the text that comes out"},
    {0, 4, "\x89LZO", "lzop data", "type lzop -d %s, and name the text that comes out"},
    {0, 10, "\xFF\6\0\0sNaPpY", "snappy data", "unpack it, and name the text that comes out"},
    {0, 2, "x\1", "zlib data", unzlib},
    {0, 2, "x^", "zlib data", unzlib},
    {0, 2, "x\x9C", "zlib data", unzlib},
    {0, 2, "x\xDA", "zlib data", unzlib},
    {0, 2, "\x1F\x9D", "compressed data (.Z)", "type zcat %s > unpacked.txt, and name that file"},
    {0, 6, "7z\xBC\xAF\x27\x1C", "a 7z archive", "type 7z x %s, and name a text that comes out"},
    {0, 6, "Rar!\x1A\x07", "a rar archive", "type unrar x %s, and name a text that comes out"},
    {0, 4, "PK\3\4", "a zip archive (a PyTorch, npz or office file is one too)",
     "type unzip %s, and name a text that comes out"},
    {0, 4, "PK\5\6", "an empty zip archive", not_text},
    {257, 5, "ustar", "a tar archive", "type tar -xf %s, and name a text that comes out"},
    {0, 6, "\x93NUMPY", "a NumPy array (.npy)",
     "save its tokens by .astype('uint16').tofile('train.bin') and add --data-format nanogpt"},
    {0, 5, "%PDF-", "a PDF document", "type pdftotext %s text.txt, and name text.txt"},
    {0, 4, "\177ELF", "an ELF program", not_text},
    {0, 4, "\x89PNG", "a PNG picture", not_text},
    {0, 3, "\xFF\xD8\xFF", "a JPEG picture", not_text},
    {0, 4, "GIF8", "a GIF picture", not_text},
    {0, 16, "SQLite format 3", "a SQLite database", not_text},
    {0, 8, "\x89HDF\r\n\x1A\n", "an HDF5 file", not_text},
    {0, 8, "ARROW1\0\0", "an Arrow file", not_text},
    {0, 4, "\xFF\xFF\xFF\xFF", "an Arrow stream", not_text},
    {0, 3, "ORC", "an ORC table", not_text},
    {0, 4, "Obj\1", "an Avro file", not_text},
    {0, 4, "GGUF", "a GGUF model", not_text},
    {0, 4, "RIFF", "a RIFF file (sound, film or picture)", not_text},
    {0, 4, "OggS", "an Ogg file", not_text},
    {0, 4, "fLaC", "a FLAC file", not_text},
    {0, 3, "ID3", "an MP3 file", not_text},
    {4, 4, "ftyp", "an MP4 film", not_text},
    {0, 4, "\xD0\xCF\x11\xE0", "an old office document", not_text},
    {0, 2, "MZ", "a Windows program", not_text},
    {0, 4, "\xFF\xFE\0\0", "UTF-32 text", utf32},
    {0, 4, "\0\0\xFE\xFF", "UTF-32 text", utf32},
    {0, 2, "\xFF\xFE", "UTF-16 text", utf16},
    {0, 2, "\xFE\xFF", "UTF-16 text", utf16},
};

static void sample_add(Sample* sample, const unsigned char* bytes, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        unsigned char b = bytes[i];
        // Tab, line feed, page feed, carriage return, backspace and escape are found in texts.
        bool usual = (b >= '\b' && b <= '\r') || b == 0x1B;
        sample->nul[i % 2] += b == 0;
        sample->control += (b > 0 && b < ' ' && !usual) || b == 0x7F;
    }
    sample->bytes += count;
}

static bool sample_is_text(const Sample* sample) {
    int64_t nul = sample->nul[0] + sample->nul[1];
    return sample->begins_as_text && nul * 1000 <= sample->bytes && sample->control * 100 <= sample->bytes;
}

static bool is_printable(const char* bytes, int length) {
    for (int i = 0; i < length; i++) {
        if (bytes[i] < ' ' || bytes[i] > '~') return false;
    }
    return true;
}

// Eight bytes that say how long the JSON after them is.
static bool is_safetensors(const unsigned char* head, int64_t bytes, int64_t size) {
    int64_t length = 0;
    if (bytes < 10 || head[8] != '{') return false;
    memcpy(&length, head, 8);
    return length >= 2 && length <= size - 8 && length <= 100 << 20;
}

// A pickle begins with its protocol, and then a frame, dictionary, list, tuple, text, bytes, class or long number.
static bool is_pickle(const unsigned char* head, int64_t bytes) {
    return bytes > 3 && head[0] == 0x80 && head[1] >= 2 && head[1] <= 5 && memchr("\x95}](cXBC\x8A", head[2], 9);
}

static void refuse(char* error, const char* path, const char* name, const char* advice) {
    data_error(error, "%s is %s; %s, or add --data-format bytes to train on its raw bytes", path, name,
               text_kept(advice, shell_word(path)));
}

// Names the kind of a file whose first bytes or sample show a known signature or structure; NULL for any other.
static const char* known_content(const unsigned char* head, int64_t bytes, int64_t size, const Sample* sample,
                                 const char** advice) {
    bool text = sample_is_text(sample);
    for (size_t i = 0; i < sizeof(signatures) / sizeof(signatures[0]); i++) {
        const char* signature = signatures[i].bytes;
        int at = signatures[i].at, length = signatures[i].length;
        if (bytes < at + length || memcmp(head + at, signature, (size_t)length) != 0) continue;
        if (text && is_printable(signature, length) && strcmp(signature, "%PDF-") != 0) continue;
        *advice = signatures[i].advice;
        return signatures[i].name;
    }
    *advice = "name its folder as --model, and a text as --data";
    if (is_safetensors(head, bytes, size)) return "a safetensors file of weights";
    *advice = not_text;
    if (is_pickle(head, bytes)) return "a Python pickle";
    for (int side = 0; side < 2; side++) {
        // Text of a European language in 16-bit units has a NUL in most of them, always on the same side.
        if (sample->nul[side] * 4 < sample->bytes || sample->nul[1 - side] * 100 > sample->bytes) continue;
        if (sample->control * 100 > sample->bytes) continue;
        *advice = side == 1 ? utf16_little : utf16_big;
        return "UTF-16 text";
    }
    return NULL;
}

// Samples the first HEAD bytes and BLOCKS blocks of what follows them.
static bool sample_read(Sample* sample, unsigned char* head, int descriptor, int64_t size, const char* path,
                        char* error) {
    unsigned char block[BLOCK];
    int64_t bytes = size < HEAD ? size : HEAD;
    bool ok = file_read_at(descriptor, path, head, 0, bytes, error);
    if (ok) sample_add(sample, head, bytes < BEGIN ? bytes : BEGIN);
    sample->begins_as_text = sample->nul[0] + sample->nul[1] == 0;
    if (ok && bytes > BEGIN) sample_add(sample, head + BEGIN, bytes - BEGIN);
    for (int64_t i = 1; ok && size > HEAD + BLOCK && i <= BLOCKS; i++) {
        ok = file_read_at(descriptor, path, block, (size - BLOCK) / BLOCKS * i & ~1ll, BLOCK, error);
        if (ok) sample_add(sample, block, BLOCK);
    }
    return ok;
}

Content content_of(int descriptor, int64_t size, const char* path, char* error) {
    Sample sample = {0};
    const char *advice = NULL, *name = NULL;
    SCOPED unsigned char* head = memory_zero(1, HEAD);
    bool ok = sample_read(&sample, head, descriptor, size, path, error);
    if (!ok) return CONTENT_UNREADABLE;
    name = known_content(head, size < HEAD ? size : HEAD, size, &sample, &advice);
    if (name) return refuse(error, path, name, advice), CONTENT_KNOWN;
    if (sample_is_text(&sample)) return CONTENT_TEXT;
    int64_t odd = sample.nul[0] + sample.nul[1] + sample.control;
    const char* binary = text_kept("binary (%.3g%% of its bytes are NUL or control characters)",
                                   100.0 * (double)odd / (double)sample.bytes);
    refuse(error, path, binary, "add --data-format nanogpt if it holds nanoGPT's uint16 tokens");
    return CONTENT_BINARY;
}

// The little-endian number of `count` bytes.
static int64_t little_endian(const unsigned char* at, int count) {
    uint64_t value = 0;
    for (int i = 0; i < count; i++) value |= (uint64_t)at[i] << 8 * i;
    return (int64_t)value;
}

// The integer that the opcode at `at` pushes, or -1.
static int64_t pickle_number(const unsigned char* at, const unsigned char* end) {
    if (at == end) return -1;
    const int bytes = *at == 'K' ? 1 : *at == 'M' ? 2 : *at == 'J' ? 4 : 0;
    if (bytes > 0) return end - at > bytes ? little_endian(at + 1, bytes) : -1;
    if (end - at > 2 && *at == 0x8A && at[1] >= 1 && at[1] <= 7 && end - at > 2 + at[1]) {
        return little_endian(at + 2, at[1]);
    }
    if (end - at < 3 || (*at != 'I' && *at != 'L') || !memchr(at, '\n', (size_t)(end - at))) return -1;
    return strtoll((const char*)at + 1, NULL, 10);  // protocol 0: digits up to the line feed
}

int64_t pickle_int(const char* pickle, int64_t bytes, const char* key) {
    const unsigned char *at = (const unsigned char*)pickle, *end = at + bytes;
    size_t length = strlen(key);
    while ((at = memmem(at, (size_t)(end - at), key, length))) {
        at += length;
        const unsigned char* next = at;
        if (next < end && *next == '\n') next++;  // the end of a text in protocol 0
        // The key may be memorized before its value comes.
        const unsigned char* line = next < end && *next == 'p' ? memchr(next, '\n', (size_t)(end - next)) : NULL;
        const int opcode = next < end ? *next : 0;
        const int64_t skip = opcode == 0x94 ? 1 : opcode == 'q' ? 2 : opcode == 'r' ? 5 : line ? line + 1 - next : 0;
        int64_t value = end - next > skip ? pickle_number(next + skip, end) : -1;
        if (value >= 0) return value;
    }
    return -1;
}
