// The safetensors format.
//
// A safetensors file is: 8 bytes, the header's length N (little-endian); N bytes of JSON,
//   {"__metadata__": {...}, "name": {"dtype": "BF16", "shape": [768, 2304], "data_offsets": [begin, end]}, ...},
// padded with spaces; then the tensors' bytes, back to back, offsets counted from the end of the header.
// Writing pads so that the data starts at a multiple of 64 bytes, and keeps no buffer, since the pieces of a checkpoint
// are large. The reader trusts nothing: every number of the header is checked against the file, and the tensors must
// tile the data without a gap or an overlap, so a truncated file is noticed. The host is little-endian, as the format.
#include <assert.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "safetensors.h"

enum { MAX_HEADER = 100 << 20 };

// The types of tensors. A value is NaN or infinite where all bits of `mask` are set: the exponent's, or for types
// without infinity those of the one NaN. It is infinity where no bit of `mantissa` is set besides.
typedef struct {
    const char* name;
    int bytes;
    uint64_t mask, mantissa;  // 0 for types that are always finite
} Dtype;

static const Dtype DTYPES[] = {
    {"F32", 4, 0x7f800000, 0x007fffff},
    {"BF16", 2, 0x7f80, 0x007f},
    {"F16", 2, 0x7c00, 0x03ff},
    {"F64", 8, 0x7ff0000000000000, 0x000fffffffffffff},
    {"F8_E5M2", 1, 0x7c, 0x03},
    {"F8_E4M3", 1, 0x7f, 0x7f},
    {"F8_E8M0", 1, 0xff, 0xff},
    {"U8", 1, 0, 0},
    {"I8", 1, 0, 0},
    {"BOOL", 1, 0, 0},
    {"I16", 2, 0, 0},
    {"U16", 2, 0, 0},
    {"I32", 4, 0, 0},
    {"U32", 4, 0, 0},
    {"I64", 8, 0, 0},
    {"U64", 8, 0, 0},
    {"C64", 8, 0, 0},
};

static const Dtype* dtype_find(const char* name) {
    for (size_t i = 0; i < sizeof(DTYPES) / sizeof(DTYPES[0]); i++) {
        if (strcmp(DTYPES[i].name, name) == 0) return &DTYPES[i];
    }
    return NULL;
}

int safetensors_dtype_bytes(const char* dtype) {
    const Dtype* found = dtype_find(dtype);
    return found ? found->bytes : 0;
}

static inline uint64_t value_at(const char* values, int64_t i, int bytes) {
    uint64_t value = 0;
    memcpy(&value, values + i * bytes, (size_t)bytes);
    return value;
}

static inline bool any_bad_of(int bytes, uint64_t mask, const char* values, int64_t count) {
    int bad = 0;
    for (int64_t i = 0; i < count; i++) bad |= (value_at(values, i, bytes) & mask) == mask;
    return bad;
}

// True if any of `count` values is not finite. Each call has a constant size, so that its loop becomes vector code.
static bool any_bad(const Dtype* type, const char* values, int64_t count) {
    if (type->bytes == 1) return any_bad_of(1, type->mask, values, count);
    if (type->bytes == 2) return any_bad_of(2, type->mask, values, count);
    if (type->bytes == 4) return any_bad_of(4, type->mask, values, count);
    return any_bad_of(8, type->mask, values, count);
}

bool values_finite(const char* name, const char* dtype, const void* values, int64_t bytes, int64_t first, char* error) {
    const Dtype* type = dtype_find(dtype);
    if (!type || !type->mask) return true;
    const int64_t piece = 1 << 16, count = bytes / type->bytes;
    int64_t found = -1;
#pragma omp parallel for schedule(static) reduction(max : found)
    for (int64_t p = 0; p < (count + piece - 1) / piece; p++) {
        const int64_t begin = p * piece, length = count - begin < piece ? count - begin : piece;
        if (any_bad(type, (const char*)values + begin * type->bytes, length)) found = begin;
    }
    if (found < 0) return true;
    while (!any_bad(type, (const char*)values + found * type->bytes, 1)) found++;
    const uint64_t value = value_at(values, found, type->bytes);
    return data_error(error, "%s holds %s at element %lld", name, value & type->mantissa ? "nan" : "infinity",
                      (long long)(first + found));
}

// Elements times element size; -1 when a dimension is negative, the type unknown or the product over 63 bits.
static int64_t tensor_bytes(const char* dtype, const int64_t* shape, int dims) {
    int64_t bytes = safetensors_dtype_bytes(dtype);
    if (bytes == 0) return -1;
    for (int d = 0; d < dims; d++) {
        if (shape[d] < 0 || __builtin_mul_overflow(bytes, shape[d], &bytes)) return -1;
    }
    return bytes;
}

// Appends bytes to the file and to its checksum.
static bool writer_put(SafetensorsWriter* writer, const void* bytes, int64_t count) {
    writer->crc = crc32c(writer->crc, bytes, count);
    writer->bytes += count;
    writer->failed = !file_write_all(writer->descriptor, writer->path, bytes, count, writer->error);
    return !writer->failed;
}

// Writes the header's JSON, without padding. Returns the sum of the tensors' bytes.
static int64_t header_write(FILE* file, const SafetensorsTensor* tensors, int count, const char* metadata_format) {
    int64_t begin = 0;
    fputc('{', file);
    if (metadata_format) fprintf(file, "\"__metadata__\":{\"format\":\"%s\"}", metadata_format);
    for (int i = 0; i < count; i++) {
        const SafetensorsTensor* tensor = &tensors[i];
        const int64_t bytes = tensor_bytes(tensor->dtype, tensor->shape, tensor->dims);
        assert(bytes >= 0);
        if (i > 0 || metadata_format) fputc(',', file);
        json_write_string(file, tensor->name);
        fprintf(file, ":{\"dtype\":\"%s\",\"shape\":[", tensor->dtype);
        for (int d = 0; d < tensor->dims; d++) fprintf(file, "%s%lld", d ? "," : "", (long long)tensor->shape[d]);
        fprintf(file, "],\"data_offsets\":[%lld,%lld]}", (long long)begin, (long long)(begin + bytes));
        begin += bytes;
    }
    fputc('}', file);
    return begin;
}

bool safetensors_begin(SafetensorsWriter* writer, const char* path, const SafetensorsTensor* tensors, int count,
                       const char* metadata_format, char* error) {
    SCOPED char* text;
    size_t length;
    FILE* header = text_stream(&text, &length);
    const int64_t data = header_write(header, tensors, count, metadata_format);
    fclose(header);
    const uint64_t padded = (8 + length + 63) / 64 * 64 - 8;
    const int64_t bytes = 8 + (int64_t)padded + data;
    *writer = (SafetensorsWriter){.error = error, .expected = bytes};
    writer->descriptor = disk_holds(path, bytes, error) ? file_create(path, error) : -1;
    writer->failed = writer->descriptor < 0;
    if (writer->failed) return false;
    writer->path = text_kept("%s", path);
    char spaces[64];
    memset(spaces, ' ', sizeof(spaces));
    return (writer_put(writer, &padded, 8) && writer_put(writer, text, (int64_t)length) &&
            writer_put(writer, spaces, (int64_t)(padded - length))) ||
           safetensors_finish(writer);
}

bool safetensors_write(SafetensorsWriter* writer, const void* bytes, int64_t count) {
    assert(count <= writer->expected - writer->bytes);
    return !writer->failed && writer_put(writer, bytes, count);
}

bool safetensors_finish(SafetensorsWriter* writer) {
    const char* path = writer->path;
    bool ok = !writer->failed;
    assert(!ok || writer->bytes == writer->expected);
    ok = ok && file_sync(writer->descriptor, path, writer->error);
    // A network file system may report the full disk here and nowhere else.
    if (writer->descriptor >= 0 && close(writer->descriptor) != 0 && ok)
        ok = data_error(writer->error, "cannot write %s: %s", path, strerror(errno));
    writer->path = NULL;
    return ok;
}

// Reads an array of exact integers in [0, 2^63). Returns how many there are; -1: over `max`, others, or no array.
static int header_numbers(const Json* array, int64_t* numbers, int max) {
    int count = 0;
    if (!array || array->kind != JSON_ARRAY) return -1;
    for (const Json* one = array->child; one; one = one->next) {
        char* end = NULL;
        if (count == max) return -1;
        errno = 0;
        numbers[count] = one->kind == JSON_NUMBER ? strtoll(one->text, &end, 10) : -1;
        if (numbers[count++] < 0 || errno != 0 || *end) return -1;
    }
    return count;
}

// Reads one member of the header. The file's part after the header begins at `data` and has `data_bytes`. False if the
// member lacks something, is of an unknown type, or claims other bytes than its type and shape give.
static bool header_tensor(const Json* json, int64_t data, int64_t data_bytes, SafetensorsTensor* tensor) {
    int64_t place[2];
    tensor->dtype = json_string(json, "dtype", "");
    tensor->dims = header_numbers(json_get(json, "shape"), tensor->shape, 8);
    if (tensor->dims < 0 || header_numbers(json_get(json, "data_offsets"), place, 2) != 2) return false;
    if (place[0] > place[1] || place[1] > data_bytes) return false;
    tensor->at = data + place[0], tensor->bytes = place[1] - place[0];
    return tensor_bytes(tensor->dtype, tensor->shape, tensor->dims) == tensor->bytes;
}

static int by_place(const void* a, const void* b) {
    const SafetensorsTensor *left = a, *right = b;
    if (left->at != right->at) return left->at < right->at ? -1 : 1;
    return (left->bytes > right->bytes) - (left->bytes < right->bytes);  // empty tensors before their neighbour
}

static int by_name(const void* a, const void* b) {
    return strcmp(((const SafetensorsTensor*)a)->name, ((const SafetensorsTensor*)b)->name);
}

// True if the tensors of a file tile its data from its first byte to its last.
static bool tiles(SafetensorsTensor* tensors, int count, int64_t data, int64_t data_bytes) {
    qsort(tensors, (size_t)count, sizeof(*tensors), by_place);
    int64_t at = data;
    bool follows = true;
    for (int i = 0; i < count; at += tensors[i++].bytes) follows = follows && tensors[i].at == at;
    return follows && at == data + data_bytes;
}

// Opens a file and reads its header. Returns where its data begins; -1 with a sentence.
static int64_t header_read(SafetensorsFile* file, char* error) {
    uint64_t length = 0;
    const char *path = file->path, *wrong = NULL;
    file->descriptor = file_open(path, &file->bytes, error);
    if (file->descriptor < 0) return -1;
    if (file->bytes >= 8 && !file_read_at(file->descriptor, path, &length, 0, 8, error)) return -1;
    if (memcmp(&length, "version ", 8) == 0) {
        wrong = "the pointer of Git LFS to a file that git lfs pull would fetch";
    } else if (file->bytes < 8 || length > MAX_HEADER || (int64_t)length > file->bytes - 8) {
        wrong = text_kept("truncated or no safetensors file: it has %lld bytes and its header would be %llu bytes long",
                          (long long)file->bytes, (unsigned long long)length);
    } else {
        SCOPED char* text = memory_take(length + 1);
        if (!file_read_at(file->descriptor, path, text, 8, (int64_t)length, error)) return -1;
        file->header = json_parse(text, (int64_t)length, "its header", error);
        if (!file->header) wrong = text_kept("corrupted: %s", error);
        if (file->header && file->header->kind != JSON_OBJECT) wrong = "corrupted: its header is no object";
    }
    return wrong ? (data_error(error, "%s is %s", path, wrong), -1) : 8 + (int64_t)length;
}

bool safetensors_add(Safetensors* all, const char* path, char* error) {
    all->file = memory_grow(all->file, (size_t)(all->files + 1) * sizeof(SafetensorsFile));
    SafetensorsFile* file = &all->file[all->files];
    *file = (SafetensorsFile){text_copy(path), -1, 0, NULL};
    const int number = all->files++, first = all->count;
    const int64_t data = header_read(file, error), bytes = file->bytes - data;
    if (data < 0) return false;
    int members = 0;
    for (const Json* json = file->header->child; json; json = json->next) members++;
    all->tensors = memory_grow(all->tensors, (size_t)(first + members) * sizeof(SafetensorsTensor));
    for (const Json* json = file->header->child; json; json = json->next) {
        if (strcmp(json->key, "__metadata__") == 0) continue;
        SafetensorsTensor* tensor = &all->tensors[all->count++];
        *tensor = (SafetensorsTensor){.name = json->key, .file = number};
        if (header_tensor(json, data, bytes, tensor)) continue;
        return data_error(error,
                          "%s is truncated, corrupted or of a kind that is not known: its header gives tensor %s no "
                          "known type, or a shape or offsets that do not fit its %lld bytes of data",
                          path, json->key, (long long)bytes);
    }
    return tiles(all->tensors + first, all->count - first, data, bytes) ||
           data_error(error, "%s is truncated or corrupted: its tensors do not fill its %lld bytes of data", path,
                      (long long)bytes);
}

bool safetensors_sort(Safetensors* all, char* error) {
    const SafetensorsTensor* tensor = all->tensors;
    if (all->count > 0) qsort(all->tensors, (size_t)all->count, sizeof(*tensor), by_name);
    for (int i = 1; i < all->count; i++, tensor++) {
        if (strcmp(tensor[0].name, tensor[1].name) != 0) continue;
        return data_error(error, "the tensor %s comes twice, in %s and in %s", tensor->name,
                          safetensors_path(all, &tensor[0]), safetensors_path(all, &tensor[1]));
    }
    return true;
}

bool safetensors_open(Safetensors* all, const char* path, char* error) {
    *all = (Safetensors){0};
    if (safetensors_add(all, path, error) && safetensors_sort(all, error)) return true;
    safetensors_close(all);
    return false;
}

void safetensors_close(Safetensors* all) {
    for (int i = 0; i < all->files; i++) {
        if (all->file[i].descriptor >= 0) close(all->file[i].descriptor);
        free((void*)all->file[i].path), json_free(all->file[i].header);
    }
    free(all->file), free(all->tensors);
    *all = (Safetensors){0};
}

const SafetensorsTensor* safetensors_find(const Safetensors* all, const char* name) {
    const SafetensorsTensor key = {.name = name};
    return all->count > 0 ? bsearch(&key, all->tensors, (size_t)all->count, sizeof(key), by_name) : NULL;
}

const char* safetensors_path(const Safetensors* all, const SafetensorsTensor* tensor) {
    return all->file[tensor->file].path;
}

void transpose(void* out, const void* inp, int64_t rows, int64_t cols, int element_bytes) {
#pragma omp parallel for
    for (int64_t block = 0; block < (rows + 31) / 32; block++) {
        int64_t end = (block + 1) * 32 < rows ? (block + 1) * 32 : rows;
        for (int64_t j = 0; j < cols; j++) {
            for (int64_t i = block * 32; i < end; i++) {
                if (element_bytes == 2) ((uint16_t*)out)[j * rows + i] = ((const uint16_t*)inp)[i * cols + j];
                if (element_bytes == 4) ((uint32_t*)out)[j * rows + i] = ((const uint32_t*)inp)[i * cols + j];
            }
        }
    }
}

static float half_to_float(uint16_t half) {
    int exponent = half >> 10 & 31, mantissa = half & 1023;
    float magnitude = exponent == 0    ? ldexpf((float)mantissa, -24)
                      : exponent == 31 ? (mantissa ? NAN : INFINITY)
                                       : ldexpf((float)(1024 + mantissa), exponent - 25);
    return half & 0x8000 ? -magnitude : magnitude;
}

bool safetensors_read(const Safetensors* all, const SafetensorsTensor* tensor, int64_t first, int64_t count, void* to,
                      char* error) {
    const SafetensorsFile* file = &all->file[tensor->file];
    return file_read_at(file->descriptor, file->path, to, tensor->at + first, count, error);
}

bool safetensors_floats(const Safetensors* all, const SafetensorsTensor* tensor, int64_t first, int64_t count,
                        float* values, char* error) {
    if (strcmp(tensor->dtype, "F32") == 0) return safetensors_read(all, tensor, 4 * first, 4 * count, values, error);
    bool bf16 = strcmp(tensor->dtype, "BF16") == 0;
    if (!bf16 && strcmp(tensor->dtype, "F16") != 0) {
        return data_error(error, "%s: tensor %s is of type %s; F32, BF16 and F16 can be read",
                          safetensors_path(all, tensor), tensor->name, tensor->dtype);
    }
    // 16-bit values are read into the second half of `values`; a float is written there only after they were converted.
    const char* halves = (const char*)values + 2 * count;
    if (!safetensors_read(all, tensor, 2 * first, 2 * count, (void*)halves, error)) return false;
    for (int64_t i = 0; i < count; i++) {
        uint16_t half;
        memcpy(&half, halves + 2 * i, 2);
        uint32_t bits = (uint32_t)half << 16;
        if (bf16) memcpy(&values[i], &bits, 4);
        if (!bf16) values[i] = half_to_float(half);
    }
    return true;
}
