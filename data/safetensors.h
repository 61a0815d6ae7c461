// Safetensors files, JSON and checksummed files: what a checkpoint and a Hugging Face model directory are made of.
// Conventions of data/: a function that can fail by what the user gave returns false (or NULL) and writes one sentence
// (the file, what was found, what to do) into `error`; nothing here exits or asserts.
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#ifdef __cplusplus
extern "C" {
#endif

#define DATA_ERROR_BYTES 16384  // room for two paths and a sentence  // what every `error` must have room for

// Writes the sentence (cut to DATA_ERROR_BYTES) and returns false.
__attribute__((format(printf, 2, 3))) bool data_error(char* error, const char* format, ...);

// CRC-32C (Castagnoli), the checksum of every file of a checkpoint. crc is 0 at the start; crc32c(crc32c(0, a), b) is
// that of a followed by b. "123456789" gives 0xE3069283.
uint32_t crc32c(uint32_t crc, const void* bytes, int64_t count);

// A file read whole: NULL and a sentence when it cannot be opened or read. A NUL byte follows the contents. Caller
// frees.
char* file_read(const char* path, int64_t* bytes, char* error);
// Writes to `path.tmp`, syncs, renames over `path`, syncs the folder.
bool file_write(const char* path, const void* bytes, int64_t count, char* error);
// mkdir -p; an existing folder is fine, an existing file of that name is an error.
bool folder_make(const char* path, char* error);
bool folder_sync(const char* path, char* error);
// rm -r of a folder that this program wrote (files and one level of folders).
bool folder_remove(const char* path, char* error);

// JSON, parsed into a tree. Numbers keep their text so that 64-bit integers are exact.
typedef enum { JSON_NULL, JSON_BOOL, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT } JsonKind;
typedef struct Json Json;
struct Json {
    JsonKind kind;
    char* key;   // in an object; UTF-8, unescaped
    char* text;  // of a string (UTF-8, unescaped; length in text_bytes, may hold NUL) or a number
    int64_t text_bytes;
    double number;  // also 0 / 1 for JSON_BOOL
    Json* child;    // first element
    Json* next;     // next sibling
};
// Strict (RFC 8259), nested at most 256 deep, in time linear in the text. json_free takes what json_parse returned.
Json* json_parse(const char* text, int64_t bytes, const char* what, char* error);  // `what` names the file in the error
void json_free(Json* json);
const Json* json_get(const Json* object, const char* key);  // NULL when absent
// `otherwise` when absent, of another kind or, for json_int, not an integer of 64 bits.
double json_number(const Json* object, const char* key, double otherwise);
int64_t json_int(const Json* object, const char* key, int64_t otherwise);
const char* json_string(const Json* object, const char* key, const char* otherwise);
void json_write_string(FILE* file, const char* text);  // quoted and escaped; bytes that are no UTF-8 become U+FFFD
void json_write_number(FILE* file, double value);      // shortest decimal that reads back; non-finite as null
// The code point at text[0..bytes) and, returned, its length: 1 to 4 bytes, or 0 when they are no well-formed UTF-8.
int utf8_next(const char* text, int64_t bytes, uint32_t* point);
// Replaces what could steer a terminal in a text that came from elsewhere (control characters, and bytes that are no
// UTF-8) by '?'. Newlines and tabs stay when `lines` is true.
void text_disarm(char* text, bool lines);

// Writing: begin with all the tensors' names, types and shapes, then give the bytes in the same order, in pieces of any
// size; finish checks that all came, syncs, and returns the CRC-32C and size of the whole file (either may be NULL). A
// short write (full disk) is an error with the path and the reason.
typedef struct {
    const char* name;
    const char* dtype;  // "F32", "BF16", "U8", "I64", ...
    int64_t shape[4];
    int dims;
} SafetensorsEntry;
typedef struct SafetensorsWriter SafetensorsWriter;
SafetensorsWriter* safetensors_begin(const char* path, const SafetensorsEntry* entries, int count,
                                     const char* metadata_format /* "pt", or NULL */, char* error);
bool safetensors_write(SafetensorsWriter* writer, const void* bytes, int64_t count, char* error);
bool safetensors_finish(SafetensorsWriter* writer, uint32_t* crc, int64_t* bytes, char* error);  // frees the writer
void safetensors_abandon(SafetensorsWriter* writer);  // frees, leaves the file

// Reading: the file is mapped; every offset is checked against its size, header at most 100 MB. Other writers align the
// data to 8 bytes only and mix types, so `data` may be unaligned for its type: copy it with memcpy.
typedef struct {
    const char* name;
    const char* dtype;
    int64_t shape[8];
    int dims;
    const void* data;
    int64_t bytes;
} SafetensorsTensor;
typedef struct {
    const char* path;
    SafetensorsTensor* tensors;
    int count;
    const void* map;
    int64_t bytes;  // of the file
    Json* header;
} Safetensors;
bool safetensors_open(Safetensors* file, const char* path, char* error);
const SafetensorsTensor* safetensors_find(const Safetensors* file, const char* name);  // NULL when absent
// All elements of an F32, BF16 or F16 tensor as floats; false for another type. Data may be unaligned.
bool safetensors_floats(const SafetensorsTensor* tensor, float* values);
// out (cols, rows) = inp (rows, cols) transposed; elements of 2 or 4 bytes.
void transpose(void* out, const void* inp, int64_t rows, int64_t cols, int element_bytes);
uint32_t safetensors_crc(const Safetensors* file);  // of the whole file
void safetensors_close(Safetensors* file);

#ifdef __cplusplus
}
#endif
