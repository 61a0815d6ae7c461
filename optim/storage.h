// What the files of optim/ share beside optim.h: a row of the tables of storages, and where a configuration keeps the
// weights and moments of a tensor.
#pragma once
#include "formats/spans.cuh"
#include "optim.h"

// A storage, by function pointers; update_elements takes it on the CPU.
struct FormatRow {
    static constexpr bool FEEDS_BACK = true;  // some do: feeds_back
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

// Of one stream for a run of elements of the arena; none of the numbers of spans, which are of tensors.
int64_t stream_bytes(const StreamInfo& stream, int64_t elements);

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

// A stream's name among all of an optimizer: `array` says which slot and launch, a name with a leading dot follows it.
void stream_name(const char* array, const StreamInfo& stream, char* name, size_t bytes);

// Elements of a tensor with its padding.
int64_t tensor_padded(const OptimTensor* tensor);

// Tensors by launches, from a resolved configuration and tensors that optim_layout placed with it; only what lies in
// the configuration's part of the arena.
struct Plan;
Plan* plan_ranges(const OptimConfig* config, const OptimTensor* tensors, int count);
void plan_free(Plan* plan);

enum Slot { SLOT_WEIGHTS, SLOT_M, SLOT_V, SLOT_SLOW, SLOTS };
const char* slot_name(Slot slot);

struct Place {
    const FormatRow* format;   // null: the rule keeps no such moment
    const FormatRow* nearest;  // of the same arrays, rounding to nearest; itself where it is dithered
    char array[160];           // as stream_name wants it
    int64_t begin, elements;   // of the arena: what its arrays hold
    int64_t numbers, at;       // of spans: in its array, and where the tensor's begin
};
Place plan_place(const Plan* plan, int tensor, Slot slot);

// Of one of its arrays.
int64_t place_bytes(const Place* place, const StreamInfo& stream);

// What is fixed for an optimizer's life.
struct OptimParts {
    const Device* dev;
    const OptimConfig* config;
    const OptimTensor* tensors;  // (count)
    int count;
    const FormatRow* weights_format;
    int64_t begin, elements;  // of the arena, held here
    Streams weights;          // device memory
};
OptimParts optim_parts(const Optim* optim);
