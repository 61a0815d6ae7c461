// What the files of optim/ share beside optim.h: rows of the tables, and what an optimizer holds.
#pragma once
#include "formats/spans.cuh"
#include "optim.h"
#include "rules/hyper.cuh"

// A storage, by function pointers; update_elements takes it on the CPU.
struct FormatRow : StorageDefaults {
    static constexpr bool HAS_SPANS = true, FEEDS_BACK = true;  // some do
    const char* name;
    const char* note;
    const char* type;      // as NVRTC is told it
    StreamInfo stream[3];  // codes, extra and more; those that there are not have no bits
    void (*load)(const Streams& streams, int first, float* x, int n, const NoiseKey& key);
    void (*store)(const Streams& streams, int first, const float* x, int n, const NoiseKey& key);
    void (*set)(const Streams& streams, int first, const float* x, int n);
    void (*view)(const Streams& streams, int first, float* x, int n);
    void (*measure)(const Streams& streams, int first, const float* x, int n);  // does nothing without spans
    int table_bytes;  // of constants that the format looks up, which fill makes
    void (*fill)(void* table);
    bool has_sign;
    bool dithered;                 // load and store depend on the place in the arena: see dither.cuh
    bool feeds_back;               // of weights: their rounding error goes into m
    const char* source = nullptr;  // of the user's own formats, for NVRTC; such a row has no functions
};

struct WeightsRow {
    FormatRow format;
    const void* decode[2];  // optim_decode_kernel into each OptimType
};

struct RuleRow {
    const char* name;
    const char* note;
    const char* type;
    bool keeps_v, keeps_slow;
    static constexpr bool adaptive = false;  // what it leaves in root is for GPUs
    void (*update)(const Hyper& hyper, float* p, const float* g, float* m, float* v, float* slow, float* root, int n);
};

// Those that a resolved configuration names. Of its moments one may be in a format of the user's own.
struct Rows {
    const RuleRow* rule;
    const WeightsRow* weights;
    const FormatRow *grads, *m, *v;
};
Rows config_rows(const OptimConfig* config);

// Null where there is none of this name.
const WeightsRow* find_weights(const char* name);
const FormatRow* find_state(const OptimConfig* config, const char* name);

// The span of the numbers that a storage has beside its codes, if it has such.
Span format_span(const FormatRow* format);

// How many of them a tensor has, and how its elements from `first` on, a multiple of a tile, find theirs in an array
// where the tensor's begin at `at`.
int64_t span_numbers(Span span, const OptimTensor* tensor);
SpanTile span_tile(Span span, const OptimTensor* tensor, int64_t first, int64_t at);

// The numbers that a step goes by, and those that it made, which become the current ones unless it changed nothing.
struct Settle {
    float *now, *next;  // (count), device memory
    int64_t count;
};
void spans_settle(const Device* dev, const Settle* settle, const float* grad_scale);

// What is fixed for an optimizer's life.
struct Plan;
struct OptimParts {
    const Device* dev;
    const OptimConfig* config;
    const Plan* plan;
    const OptimTensor* tensors;  // (count)
    int count;
};
OptimParts optim_parts(const Optim* optim);

// The arrays of weights that a tensor's are among, in device memory.
Streams weights_arrays(const Optim* optim, int tensor);
