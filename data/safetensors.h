// Safetensors files, which hold the arrays of checkpoints and of Hugging Face model folders.
#pragma once
#include "files.h"
#include "json.h"
C_LINKAGE_BEGIN

// Writing: begin with all the tensors' names, types and shapes, then give the bytes in the same order, in pieces, each
// of which is written at once; finish checks that all came, syncs, and returns the CRC-32C and size of the whole file
// (either may be NULL). A short write (full disk) is an error with the path and the reason.
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

// Reading: every offset of the header, which has at most 100 MB, is checked against the file's size. Tensors are read
// when they are asked for, so that a file that is cut short meanwhile is an error and no signal.
typedef struct {
    const char* name;
    const char* dtype;
    int64_t shape[8];
    int dims;
    int64_t at;  // of its first byte in the file
    int64_t bytes;
} SafetensorsTensor;
typedef struct {
    const char* path;
    SafetensorsTensor* tensors;
    int count;
    int descriptor;
    int64_t bytes;  // of the file
    Json* header;
} Safetensors;
bool safetensors_open(Safetensors* file, const char* path, char* error);
int safetensors_dtype_bytes(const char* dtype);  // of an element; 0: a type that is not known
const SafetensorsTensor* safetensors_find(const Safetensors* file, const char* name);  // NULL when absent
// Returns true if every value is finite, and for types without NaN and infinity (integers, codes). Otherwise false,
// with "NAME holds VALUE at element N" in `error`. `first` is the number of the first element given, for arrays that
// come in pieces. `values` may be unaligned. Cost: one pass, at the speed of memory. A checkpoint asks for it as its
// arrays pass through host memory, in both directions, so a NaN or an infinity is neither saved nor trained on.
bool values_finite(const char* name, const char* dtype, const void* values, int64_t bytes, int64_t first, char* error);
// `count` bytes of a tensor from its byte `first` on.
bool safetensors_read(const Safetensors* file, const SafetensorsTensor* tensor, int64_t first, int64_t count, void* to,
                      char* error);
// `count` elements from element `first` on of an F32, BF16 or F16 tensor, as floats; another type is refused.
bool safetensors_floats(const Safetensors* file, const SafetensorsTensor* tensor, int64_t first, int64_t count,
                        float* values, char* error);
// out (cols, rows) = inp (rows, cols) transposed; elements of 2 or 4 bytes.
void transpose(void* out, const void* inp, int64_t rows, int64_t cols, int element_bytes);
void safetensors_close(Safetensors* file);

C_LINKAGE_END
