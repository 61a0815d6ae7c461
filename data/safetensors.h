// Safetensors files, which hold the arrays of checkpoints and of Hugging Face model folders.
#pragma once
#include "files.h"
#include "json.h"
C_LINKAGE_BEGIN

typedef struct {
    const char* name;
    const char* dtype;  // "F32", "BF16", "U8", "I64", ...
    int64_t shape[8];
    int dims;
    int64_t at, bytes;  // where it lies in the file that was read
    int file;
} SafetensorsTensor;

// Writing: safetensors_begin takes the names, types and shapes of all tensors. safetensors_write takes their bytes in
// the same order, in pieces, and writes each at once. safetensors_finish, after the last byte, syncs and closes. The
// first failure, such as a full disk, puts a sentence with path and reason into `error`; all calls after it return
// false. A file that is given up, with `failed` set, is only closed. If safetensors_begin fails, nothing is open.
typedef struct {
    const char* path;  // NULL: no file is open
    char* error;
    int descriptor;
    int64_t bytes, expected;  // written so far, header included; of the whole file
    uint32_t crc;             // CRC-32C of what is written
    bool failed;
} SafetensorsWriter;
bool safetensors_begin(SafetensorsWriter* writer, const char* path, const SafetensorsTensor* tensors, int count,
                       const char* metadata_format /* "pt", or NULL */, char* error);
bool safetensors_write(SafetensorsWriter* writer, const void* bytes, int64_t count);
bool safetensors_finish(SafetensorsWriter* writer);

// Reading: the tensors of one or several files. Every offset of a header, which has at most 100 MB, is checked against
// the file's size. Tensors are read on request and not mapped, so that a file that is cut short is an error and not a
// signal.
typedef struct {
    const char* path;
    int descriptor;
    int64_t bytes;
    Json* header;
} SafetensorsFile;
typedef struct {
    SafetensorsFile* file;
    int files;
    SafetensorsTensor* tensors;  // of all files, by name
    int count;
} Safetensors;
bool safetensors_open(Safetensors* all, const char* path, char* error);
// Opens several files: safetensors_add adds one to a zeroed `all`, and safetensors_sort, which comes last, refuses two
// tensors of one name. The caller closes `all` if one of them fails.
bool safetensors_add(Safetensors* all, const char* path, char* error);
bool safetensors_sort(Safetensors* all, char* error);
void safetensors_close(Safetensors* all);
int safetensors_dtype_bytes(const char* dtype);  // of an element; 0: a type that is not known
const SafetensorsTensor* safetensors_find(const Safetensors* all, const char* name);  // NULL when absent
// Returns the path of the file that holds a tensor.
const char* safetensors_path(const Safetensors* all, const SafetensorsTensor* tensor);
// Returns true if every value is finite, or the type has no NaN or infinity (integers, codes). Otherwise false, with
// "NAME holds VALUE at element N" in `error`. `first` is the number of the first element, for arrays that come in
// pieces. `values` may be unaligned. Cost: one pass, at the speed of memory. Checkpoints call it when they are written
// and read, so that a NaN or an infinity is neither saved nor trained on.
bool values_finite(const char* name, const char* dtype, const void* values, int64_t bytes, int64_t first, char* error);
// Reads `count` bytes of a tensor, from its byte `first` on.
bool safetensors_read(const Safetensors* all, const SafetensorsTensor* tensor, int64_t first, int64_t count, void* to,
                      char* error);
// Reads `count` elements of an F32, BF16 or F16 tensor, from element `first` on, as floats; it refuses other types.
bool safetensors_floats(const Safetensors* all, const SafetensorsTensor* tensor, int64_t first, int64_t count,
                        float* values, char* error);
// out (cols, rows) = inp (rows, cols) transposed; elements of 2 or 4 bytes.
void transpose(void* out, const void* inp, int64_t rows, int64_t cols, int element_bytes);

C_LINKAGE_END
