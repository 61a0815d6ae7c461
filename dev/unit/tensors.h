// Tests read the tensors of a safetensors file into memory with this.
#pragma once
#include "../../data/safetensors.h"
#include "test.h"

// A tensor to be written.
inline SafetensorsTensor tensor_of(const char* name, const char* dtype, std::initializer_list<int64_t> shape) {
    SafetensorsTensor tensor = {};
    tensor.name = name, tensor.dtype = dtype;
    for (int64_t size : shape) tensor.shape[tensor.dims++] = size;
    return tensor;
}

// Returns the bytes of a tensor, which are never freed. It ends the test where they cannot be read.
inline const void* tensor_data(const Safetensors* file, const SafetensorsTensor* tensor) {
    void* data = malloc((size_t)tensor->bytes + 1);
    if (!data || !safetensors_read(file, tensor, 0, tensor->bytes, data, error)) printf("    %s\n", error), exit(1);
    return data;
}

// Returns the CRC-32C of a whole file.
inline uint32_t file_crc(const char* path) {
    uint32_t crc = 0;
    int64_t bytes = 0;
    const char* slash = strrchr(path, '/');
    const char* folder = formatted("%.*s", (int)(slash - path), path);
    if (!file_sum(folder, slash + 1, &crc, &bytes, error)) printf("    %s\n", error);
    return crc;
}
