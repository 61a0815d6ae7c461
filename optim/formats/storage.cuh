// Storages and formats: the members that they must define, and the defaults of the optional members.
//
// A storage keeps weights or a moment in one to three arrays. It is a struct of static functions over n elements from
// `first` on:
//     load(streams, first, x, n, key)    stored -> fp32, as the update reads it
//     store(streams, first, x, n, key)   fp32 -> stored, with the step's rounding; `key` draws its noise
//     set(streams, first, x, n)          fp32 -> stored, rounded to nearest: for weights written from outside
//     view(streams, first, x, n)         stored -> fp32, as the model sees it
// and STREAM[3], which describes the arrays. It derives from StorageFunctions, which makes these of get<N>() and
// put<N>(). A thread of a GPU calls the functions with 8 or 16 elements, which lie in registers; a CPU core calls them
// with a whole tile, which lies in L1. `first` and n are multiples of 16, or of 8 if n is 8. `first` counts from the
// beginning of the streams: the start of this tile or of an earlier one. On a GPU the streams point into shared memory
// (kernel.cuh), several threads share a scale, and a step writes in place.
//
// If BLOCK elements share a scale, the store has parts, on a GPU (store_thread in kernel.cuh) as on the CPU
// (store_blocks in blocks.cuh): the largest magnitude of 8 to 32 elements (absmax), the largest of the block,
// clamp() if that is above NO_CLAMP_ABSMAX, and put_scaled(). The CPU's compiler turns the loops of these parts into
// vectors, since they have 16 or 32 iterations without branches.
//
// A format defines the values of single codes. It derives from ElementFormat (elementwise.cuh) or BlockFormat
// (blocks.cuh); Elementwise, Blocks and others turn a format into a storage.
#pragma once
#include "../../kernels/tile.h"
#include "../float.cuh"
#include "../noise.cuh"

EMBED_SOURCE

// The arrays of one storage.
struct Streams {
    void* codes;                  // one code for each element, in the arena's layout
    void* scales;                 // a second array, or null: scales, maxima, or the lower bits of the codes
    const void* table = nullptr;  // constants that the format looks up (blocks.cuh), one copy for all tiles, or null
    void* third = nullptr;        // a third array, or null
    // Only storages in spans use these: the scales that replace `scales` after the step (spans.cuh), and the tile's
    // place among them.
    float* new_scales = nullptr;
    const struct SpanTile* span = nullptr;
};

// The elements that share one number of an array: a run of the arena, or more than a tile holds (spans.cuh). The passes
// of rows.cuh compute the numbers of SPAN_SCALES and the following spans, for which new_scales does not replace
// `scales` after the step.
enum Span {
    SPAN_RUN,
    SPAN_TENSOR,
    SPAN_RANK1,
    SPAN_GIVEN,  // one a tensor, which the caller of the library writes
    SPAN_ROWS,
    SPAN_SCALES,   // of rows
    SPAN_FACTORS,  // of rows, then of columns
    SPAN_PAIRS,    // two of each
    SPAN_NORM,     // one a tensor
    SPANS
};

// Returns true if the numbers are made of sums over rows.
OPTIM_INLINE constexpr bool is_by_rows(Span span) {
    return span >= SPAN_ROWS && span <= SPAN_PAIRS;
}

// Returns true if there are numbers of rows and of columns, whose products the step reads.
OPTIM_INLINE constexpr bool is_by_columns(Span span) {
    return span == SPAN_FACTORS || span == SPAN_PAIRS;
}

// One array. An array with 0 bits does not exist. The numbers of a `span` other than SPAN_RUN belong to tensors, not to
// tiles; only the second array of a storage may have one.
struct StreamInfo {
    const char* name = "";      // with a leading dot a suffix of the slot's name (weights, m, v), otherwise a full name
    const char* dtype = "";     // safetensors' name
    int bits = 0;               // of one number
    int run = 1;                // elements of the arena that share one number
    bool written_only = false;  // true if the update does not read the array
    Span span = SPAN_RUN;
};

OPTIM_INLINE constexpr StreamInfo only_written(StreamInfo stream) {
    stream.written_only = true;
    return stream;
}

// Returns the bytes of one tile in an array; 0 for numbers of spans.
OPTIM_INLINE constexpr int tile_bytes(const StreamInfo& stream) {
    return stream.span != SPAN_RUN ? 0 : TILE_ELEMENTS / stream.run * stream.bits / 8;
}

enum Rounding { NEAREST, STOCHASTIC };

// The optional members of a storage.
struct StorageDefaults {
    static constexpr bool SIGNED = true;  // false: negative numbers are lost, so it cannot store m
    // Scales reach further than a tile and are made of maxima, which measure() raises before the store (spans.cuh).
    static constexpr bool HAS_SPANS = false;
    static constexpr bool FEEDS_BACK = false;  // the rounding error of weights goes into m (feedback.cuh)
    static constexpr bool feeds_back = false;  // the same, for table rows, which know it at run time

    static OPTIM_INLINE void measure(const Streams&, int, const float*, int) {}

    // Constants that the storage looks up; each thread block copies them into shared memory with prepare().
    static constexpr int TABLE_BYTES = 0;
    static OPTIM_HOST void fill(void*) {}

    // A store in parts.
    static constexpr int BLOCK = 1;                 // elements that share a scale
    static constexpr bool WANTS_TILE_MAX = false;   // put_scaled() reads the largest absmax of the tile
    static constexpr bool OF_ROOTS = false;         // the parts take the roots of the values
    static constexpr float NO_CLAMP_ABSMAX = 0.0f;  // a larger absmax needs clamp(); 0: none does

    // These matter on a GPU only.
    static constexpr bool TAKES_ORDER = false;     // load() and store() follow key.order; set() and view() never do
    static constexpr bool CROWDS_BANKS = false;    // look-ups keep shared memory so busy that key.order is faster
    static constexpr bool WRITES_BF16 = false;     // store() fills key.bf16_out
    static constexpr bool BF16_IS_STORED = false;  // key.bf16_out then has the numbers that load() would return
    static constexpr bool STORES_APART = false;    // common and rare values get separate code paths (kernel.cuh)
};

// The functions that most storages have. load() and store() call get<N>() and put<N>() for 16 elements at a time, or
// for 8 if no more are left. view() gives the numbers that the update reads. set() stores by Nearest, the same storage
// without noise.
template <class Storage>
struct StorageFunctions : StorageDefaults {
    // Returns the largest magnitude of N values. It may replace those that cannot be stored.
    template <int N>
    static OPTIM_INLINE float absmax(float*, const NoiseKey&) {
        return 0.0f;
    }

    template <int N>
    static OPTIM_INLINE void clamp(float*, float) {}

    // Stores N values of a block. `absmax` and `tile_max` are the largest magnitudes of the block and the tile.
    template <int N>
    static OPTIM_INLINE void put_scaled(const Streams& streams, int first, const float* value, float absmax,
                                        float tile_max, bool clamped, const NoiseKey& key) {
        Storage::store(streams, first, value, N, key);
    }

    static OPTIM_INLINE void load(const Streams& streams, int first, float* x, int n, const NoiseKey& key) {
        int c = 0;
        OPTIM_UNROLL
        for (; c + 16 <= n; c += 16) Storage::template get<16>(streams, first + c, x + c, key);
        if (c < n) Storage::template get<8>(streams, first + c, x + c, key);
    }

    static OPTIM_INLINE void store(const Streams& streams, int first, const float* x, int n, const NoiseKey& key) {
        int c = 0;
        OPTIM_UNROLL
        for (; c + 16 <= n; c += 16) Storage::template put<16>(streams, first + c, x + c, key);
        if (c < n) Storage::template put<8>(streams, first + c, x + c, key);
    }

    static OPTIM_INLINE void set(const Streams& streams, int first, const float* x, int n) {
        Storage::Nearest::store(streams, first, x, n, NoiseKey{0, 0, NOISE_WEIGHTS});
    }

    static OPTIM_INLINE void view(const Streams& streams, int first, float* x, int n) {
        Storage::load(streams, first, x, n, NoiseKey{});
    }
};
