// Micro-batches from the loader's host memory to the device.
#pragma once
#include <assert.h>

#include "../data/loader.h"
#include "common.cuh"

// Returns the bytes of a micro-batch of N tokens, which is a Batch on the device: N tokens, N targets, N places in the
// order of buckets, and at most N + 1 buckets.
inline int64_t input_bytes(int64_t N) {
    return (5 * N + 2) * (int64_t)sizeof(int);
}

// The loader reuses a batch's memory two batches later. So each copy has an event, which is waited for before the batch
// after the next is requested: a whole micro-batch later, when it has long passed.
struct Feeder {
    const Device* dev;
    Loader* loader;
    cudaEvent_t copied[2];
    int64_t fed;
    char error[DATA_ERROR_BYTES];
};

inline void feeder_open(Feeder* feeder, const Device* dev, const Dataset* data, int B, int T, uint64_t seed,
                        bool shuffle, int64_t first_sequence, LoaderSlice slice = {0, 0}) {
    memset(feeder, 0, sizeof(*feeder));
    feeder->dev = dev;
    feeder->loader = loader_open(data, B, T, seed, shuffle, first_sequence, slice,
                                 dev->gpu ? pinned_alloc : memory_take, dev->gpu ? pinned_free : free);
    for (int i = 0; i < 2 && dev->gpu; i++) check(cudaEventCreateWithFlags(&feeder->copied[i], cudaEventDisableTiming));
}

// Copies the next micro-batch to `input`. False with feeder->error on bad data.
inline bool feeder_next(Feeder* feeder, Batch* input) {
    const Device* dev = feeder->dev;
    cudaEvent_t event = feeder->copied[feeder->fed % 2];
    if (dev->gpu && feeder->fed >= 2) check(cudaEventSynchronize(event));
    const Batch* batch = loader_next(feeder->loader, feeder->error);
    if (!batch) return false;
    assert(batch->bucket - batch->tokens == input->bucket - input->tokens);
    feeder->fed++;
    input->buckets = batch->buckets;
    const int64_t count = batch->bucket - batch->tokens + 2 * ((int64_t)batch->buckets + 1);
    copy_on(dev, dev->stream, input->tokens, batch->tokens, count * (int64_t)sizeof(int));
    if (dev->gpu) check(cudaEventRecord(event, dev->stream));
    return true;
}

// Writes a micro-batch of token 0 alone, for one that could not be read.
inline void input_blank(const Device* dev, Batch* input) {
    const int N = (int)(input->targets - input->tokens), bucket[4] = {0, 0, -1, N};
    device_zero(dev, input->tokens, input_bytes(N));
    copy_to_device(dev, input->bucket, bucket, sizeof(bucket));
    input->buckets = 1;
}

inline void feeder_close(Feeder* feeder) {
    device_sync(feeder->dev);
    loader_close(feeder->loader);
    for (int i = 0; i < 2 && feeder->dev->gpu; i++) check(cudaEventDestroy(feeder->copied[i]));
}
