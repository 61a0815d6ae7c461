// Storage as the kernel sees it, and the storage of formats that keep one code an element and nothing beside the codes.
//
// A storage is a struct of static functions over n elements from `first` on (both multiples of 8, index in the arena):
//     load(streams, first, x, n)         stored -> fp32, what the update reads
//     store(streams, first, x, n, key)   fp32 -> stored, the step's rounding; key draws its noise
//     set(streams, first, x, n)          fp32 -> stored, rounded to nearest: weights written from outside
//     view(streams, first, x, n)         stored -> fp32, what the model sees
// and STREAM, which describes the arrays it keeps. One thread of a GPU calls them with 8 elements, a core of a CPU with
// a whole tile: x lies in registers in the one case and in L1 in the other.
//
// Elementwise<Format, rounding> makes a storage of a format: a struct with Code (an integer or float type of 2 or 4
// bytes), DTYPE (safetensors' name), decode(code), encode(x) to nearest and encode(x, 16 random bits). Every access is
// 16 bytes.
#pragma once
#include "../float.cuh"
#include "../noise.cuh"

EMBED_SOURCE

// The arrays of one storage.
struct Streams {
    void* codes;  // one code an element, arena layout
    void* extra;  // what is kept beside them, or null
};

// One of them: its name (a suffix of the slot's: weights, m, v; or a name of its own without a leading dot), the
// safetensors type, and `bits` for every `run` elements of the arena. bits 0: there is no such array.
struct StreamInfo {
    const char* name;
    const char* dtype;
    int bits;
    int run;
};

enum Rounding { NEAREST, STOCHASTIC };

// 8 codes, moved 16 bytes at a time.
template <class Code>
struct alignas(16) Codes {
    Code lane[8];
};

template <class Code>
OPTIM_INLINE Codes<Code> load_codes(const void* base, int64_t first) {
    const Code* address = (const Code*)base + first;
    Codes<Code> codes;
#ifdef __CUDA_ARCH__
    OPTIM_UNROLL
    for (int i = 0; i < (int)sizeof(codes) / 16; i++) ((uint4*)&codes)[i] = ((const uint4*)address)[i];
#else
    memcpy(&codes, address, sizeof(codes));
#endif
    return codes;
}

template <class Code>
OPTIM_INLINE void store_codes(void* base, int64_t first, const Codes<Code>& codes) {
    Code* address = (Code*)base + first;
#ifdef __CUDA_ARCH__
    OPTIM_UNROLL
    for (int i = 0; i < (int)sizeof(codes) / 16; i++) ((uint4*)address)[i] = ((const uint4*)&codes)[i];
#else
    memcpy(address, &codes, sizeof(codes));
#endif
}

template <class Format, Rounding ROUNDING>
struct Elementwise {
    typedef typename Format::Code Code;
    static constexpr StreamInfo STREAM[2] = {{"", Format::DTYPE, 8 * sizeof(Code), 1}, {"", "", 0, 1}};

    static OPTIM_INLINE void load(const Streams& streams, int64_t first, float* x, int n) {
        OPTIM_UNROLL
        for (int c = 0; c < n; c += 8) {
            Codes<Code> codes = load_codes<Code>(streams.codes, first + c);
            OPTIM_UNROLL
            for (int i = 0; i < 8; i++) x[c + i] = Format::decode(codes.lane[i]);
        }
    }

    static OPTIM_INLINE void set(const Streams& streams, int64_t first, const float* x, int n) {
        OPTIM_UNROLL
        for (int c = 0; c < n; c += 8) {
            Codes<Code> codes;
            OPTIM_UNROLL
            for (int i = 0; i < 8; i++) codes.lane[i] = Format::encode(x[c + i]);
            store_codes(streams.codes, first + c, codes);
        }
    }

    static OPTIM_INLINE void store(const Streams& streams, int64_t first, const float* x, int n, const NoiseKey& key) {
        if constexpr (ROUNDING == NEAREST) {
            set(streams, first, x, n);
        } else {
            OPTIM_UNROLL
            for (int c = 0; c < n; c += 8) {
                Noise noise = noise_draw(key, first + c);
                Codes<Code> codes;
                OPTIM_UNROLL
                for (int i = 0; i < 8; i++) codes.lane[i] = Format::encode(x[c + i], noise_lane(noise, i));
                store_codes(streams.codes, first + c, codes);
            }
        }
    }

    static OPTIM_INLINE void view(const Streams& streams, int64_t first, float* x, int n) {
        load(streams, first, x, n);
    }
};
