// The storage of formats that keep one code for each element and nothing else, and functions with which threads move
// codes. Elementwise<Format, rounding> makes a storage of a format: a struct that derives from ElementFormat and has
// Code (an integer type of 1, 2 or 4 bytes), DTYPE (safetensors' name), decode(code), encode(x) to nearest and
// encode(x, 16 random bits). Each access moves 16 bytes, or all codes of a thread if they are fewer.
#pragma once
#include "storage.cuh"

EMBED_SOURCE

// COUNT codes of BITS bits packed into words, moved 16 bytes at a time if there are as many. Of two 4-bit codes in a
// byte, the first is in the upper half.
template <int BITS, int COUNT>
struct alignas(BITS* COUNT >= 128 ? 16 : BITS * COUNT / 8) Packed {
    static constexpr int WORDS = BITS * COUNT / 32;
    static constexpr int EACH = 32 / BITS;  // codes in a word
    uint32_t word[WORDS];

    static OPTIM_INLINE int shift(int i) { return BITS * (BITS == 4 ? i % EACH ^ 1 : i % EACH); }
    OPTIM_INLINE uint32_t get(int i) const {
        if (BITS == 8 && !ON_GPU) return ((const uint8_t*)word)[i];
        return word[i / EACH] >> shift(i) & (0xffffffffu >> (32 - BITS));
    }

    // Returns 2^23 + code i, of 8 bits, as a float. On a GPU it takes one instruction, where the compiler would use up
    // to three.
    OPTIM_INLINE float number(int i) const {
        static_assert(BITS == 8, "a byte is picked");
#ifdef __CUDA_ARCH__
        return __uint_as_float(__byte_perm(word[i / EACH], 0x4b000000u, 0x7540u + i % 4));
#else
        return bits_float(0x4b000000u | get(i));
#endif
    }

    OPTIM_INLINE void add(int i, uint32_t code) {
        word[i / EACH] += code << shift(i);
    }

    // Subtracts a bias with which every code was added.
    OPTIM_INLINE void subtract(uint32_t bias) {
        uint32_t all = 0;
        OPTIM_UNROLL
        for (int i = 0; i < EACH; i++) all += bias << shift(i);
        OPTIM_UNROLL
        for (int w = 0; w < WORDS; w++) word[w] -= all;
    }

#ifdef __CUDA_ARCH__
    // Collects byte BYTE of four words.
    template <int BYTE>
    static OPTIM_INLINE uint32_t bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
        constexpr unsigned pick = (BYTE + 4) << 4 | BYTE;
        return __byte_perm(__byte_perm(a, b, pick), __byte_perm(c, d, pick), 0x5410);
    }

    // Sets all codes from words that each hold a code from byte BYTE on; codes of 4 bits are FIRST too large there.
    template <int BYTE, uint32_t FIRST = 0>
    OPTIM_INLINE void gather_bytes(const uint32_t* codes) {
        OPTIM_UNROLL
        for (int w = 0; w < WORDS; w++) {
            const uint32_t* c = codes + w * EACH;
            if constexpr (BITS == 8) {
                word[w] = bytes<BYTE>(c[0], c[1], c[2], c[3]);
            } else {
                uint32_t upper = bytes<BYTE>(c[0], c[2], c[4], c[6]), lower = bytes<BYTE>(c[1], c[3], c[5], c[7]);
                word[w] = (upper << 4) + lower - FIRST * 0x11111111u;
            }
        }
    }

    // Sets all codes from words that each hold a code in the upper bits.
    OPTIM_INLINE void gather(const uint32_t* codes) {
        OPTIM_UNROLL
        for (int w = 0; w < WORDS; w++) {
            const uint32_t* c = codes + w * EACH;
            if constexpr (BITS == 8) {
                word[w] = bytes<3>(c[0], c[1], c[2], c[3]);
            } else {
                uint32_t all = 0;
                OPTIM_UNROLL
                for (int i = EACH - 1; i >= 0; i--) {
                    const uint32_t code = c[i ^ 1];
                    all = __funnelshift_l(code, all, BITS);
                }
                word[w] = all;
            }
        }
    }
#else
    // Do the same in loops that become vectors.
    template <int BYTE>
    OPTIM_INLINE void gather_bytes(const uint32_t* codes) {
        static_assert(BITS == 8, "a code is a byte");
        for (int i = 0; i < COUNT; i++) ((uint8_t*)word)[i] = (uint8_t)(codes[i] >> 8 * BYTE);
    }

    OPTIM_INLINE void gather(const uint32_t* codes) {
        if constexpr (BITS == 8) return gather_bytes<3>(codes);
        for (int i = 0; i < COUNT; i += 2) {
            ((uint8_t*)word)[i / 2] = (uint8_t)(codes[i] >> 28 << 4 | codes[i + 1] >> 28);
        }
    }
#endif
};

// Returns the bits of a where the mask has ones, else those of b. On a GPU it takes one instruction, where the compiler
// would use two.
OPTIM_INLINE uint32_t bits_chosen(uint32_t mask, uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
    uint32_t result;
    asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(result) : "r"(mask), "r"(a), "r"(b));
    return result;
#else
    return (a & mask) | (b & ~mask);
#endif
}

// upper_halves joins the upper halves of two words, the first in the lower half. upper_bytes joins the upper bytes of
// their four halves, in order.
OPTIM_INLINE uint32_t upper_halves(uint32_t a, uint32_t b) {
    return OPTIM_EITHER(__byte_perm(a, b, 0x7632), a >> 16 | (b & 0xffff0000u));
}

OPTIM_INLINE uint32_t upper_bytes(uint32_t a, uint32_t b) {
    return OPTIM_EITHER(__byte_perm(a, b, 0x7531),
                        (a >> 8 & 0xffu) | (a >> 16 & 0xff00u) | (b << 8 & 0xff0000u) | (b & 0xff000000u));
}

template <class Value>
OPTIM_INLINE Value load_value(const void* base, int byte) {
    const char* address = (const char*)base + byte;
#ifdef __CUDA_ARCH__
    return *(const Value*)address;
#else
    Value value;
    memcpy(&value, address, sizeof(value));
    return value;
#endif
}

template <class Value>
OPTIM_INLINE void store_value(void* base, int byte, const Value& value) {
    char* address = (char*)base + byte;
#ifdef __CUDA_ARCH__
    *(Value*)address = value;
#else
    memcpy(address, &value, sizeof(value));
#endif
}

// In a warp whose threads have 16 consecutive elements each, the first halves of the codes of 16, 8 or 4 bits of
// threads 4, 8 or 16 apart are in the same banks of shared memory. So every second one of these threads takes its
// second half first, and none waits. This function returns 8 for such a thread and else 0: in all arrays, a thread's
// x[i] is the element first + (i ^ order).
OPTIM_INLINE int element_order(int first) {
    return (int)(((uint32_t)first >> 3 ^ (uint32_t)first >> 4 ^ (uint32_t)first >> 5) & 8u);
}

template <int BYTES>
struct alignas(BYTES) Words {
    uint32_t word[BYTES / 4];
};

// Load and store the codes of COUNT elements, all elements of a thread, in its order.
template <int COUNT, class Value>
OPTIM_INLINE Value load_ordered(const void* base, int first, const NoiseKey& key) {
    constexpr uint32_t SIZE = sizeof(Value), HALF = SIZE / 2;
    if constexpr (COUNT == 16 && ON_GPU) {
        if (key.ordered) {
            const char* at = (const char*)base + (uint32_t)first * SIZE / COUNT;
            const uint32_t half = (uint32_t)key.order * SIZE / COUNT;
            Value value;
            ((Words<HALF>*)&value)[0] = *(const Words<HALF>*)(at + half);
            ((Words<HALF>*)&value)[1] = *(const Words<HALF>*)(at + (HALF - half));
            return value;
        }
    }
    return load_value<Value>(base, first * (8 * (int)SIZE / COUNT) / 8);
}

template <int COUNT, class Value>
OPTIM_INLINE void store_ordered(void* base, int first, const Value& value, const NoiseKey& key) {
    constexpr uint32_t SIZE = sizeof(Value), HALF = SIZE / 2;
    if constexpr (COUNT == 16 && ON_GPU) {
        if (key.ordered) {
            char* at = (char*)base + (uint32_t)first * SIZE / COUNT;
            const uint32_t half = (uint32_t)key.order * SIZE / COUNT;
            *(Words<HALF>*)(at + half) = ((const Words<HALF>*)&value)[0];
            *(Words<HALF>*)(at + (HALF - half)) = ((const Words<HALF>*)&value)[1];
            return;
        }
    }
    store_value(base, first * (8 * (int)SIZE / COUNT) / 8, value);
}

// The optional members of a format of single elements.
template <class Format>
struct ElementFormat {
    static constexpr bool SIGNED = true;     // false: there are no negative levels
    static constexpr float SMALLEST = 0.0f;  // a v above 0 is not stored below this; 0: no limit
    static constexpr bool CLAMPS = false;    // encode_all without MAY_BE_NAN needs storable() values

    static OPTIM_INLINE float storable(float x) { return x; }

    // Encodes 8 elements, with the noise from `lane` on.
    template <Rounding ROUNDING, bool MAY_BE_NAN, class Codes>
    static OPTIM_INLINE void encode_all(const float* x, const Noise& noise, int lane, Codes* codes) {
        OPTIM_UNROLL
        for (int i = 0; i < 8; i++) {
            if constexpr (ROUNDING == STOCHASTIC) codes->add(i, Format::encode(x[i], noise_lane(noise, lane + i)));
            if constexpr (ROUNDING == NEAREST) codes->add(i, Format::encode(x[i]));
        }
    }
};

template <class Format, Rounding ROUNDING>
struct Elementwise : StorageFunctions<Elementwise<Format, ROUNDING>> {
    typedef Elementwise<Format, NEAREST> Nearest;
    typedef typename Format::Code Code;
    static constexpr int BITS = 8 * sizeof(Code);
    static constexpr StreamInfo STREAM[3] = {{"", Format::DTYPE, BITS, 1}};
    static constexpr bool SIGNED = Format::SIGNED, TAKES_ORDER = true,
                          CLAMPS = ROUNDING == STOCHASTIC && Format::CLAMPS;
    static constexpr float NO_CLAMP_ABSMAX = CLAMPS ? 3.40282347e38f : 0.0f;  // NaN and infinity are clamped

    template <int N>
    static OPTIM_INLINE void get(const Streams& streams, int first, float* x, const NoiseKey& key) {
        if constexpr (ON_GPU) {
            OPTIM_UNROLL
            for (int c = 0; c < N; c += 8) {
                auto codes = load_value<Packed<BITS, 8>>(streams.codes, BITS / 8 * (first + (c ^ key.order)));
                OPTIM_UNROLL
                for (int i = 0; i < 8; i++) x[c + i] = Format::decode((Code)codes.get(i));
            }
        } else {  // a loop that the host's compiler turns into vectors
            const Code* codes = (const Code*)streams.codes + first;
            for (int i = 0; i < N; i++) x[i] = Format::decode(codes[i]);
        }
    }

    // Returns x, raised to the format's SMALLEST if x is a v between 0 and that.
    static OPTIM_INLINE float raise_tiny_v(float x, const NoiseKey& key) {
        constexpr float min = Format::SMALLEST;
        return min > 0.0f && key.stream == NOISE_V && x > 0.0f && x < min ? min : x;
    }

    template <int N, bool MAY_BE_NAN = true>
    static OPTIM_INLINE void put(const Streams& streams, int first, const float* x, const NoiseKey& key) {
        Noise noise = {};
        if (ROUNDING == STOCHASTIC) noise = noise_draw(key, first);
        if constexpr (ON_GPU) {
            OPTIM_UNROLL
            for (int c = 0; c < N; c += 8) {
                float value[8];
                Packed<BITS, 8> codes = {};
                OPTIM_UNROLL
                for (int i = 0; i < 8; i++) value[i] = raise_tiny_v(x[c + i], key);
                Format::template encode_all<ROUNDING, MAY_BE_NAN>(value, noise, c, &codes);
                store_value(streams.codes, BITS / 8 * (first + (c ^ key.order)), codes);
            }
        } else {
            Code* codes = (Code*)streams.codes + first;
            for (int i = 0; i < N; i++) {
                const float value = raise_tiny_v(x[i], key);
                if constexpr (ROUNDING == STOCHASTIC) codes[i] = Format::encode(value, noise_lane(noise, i));
                if constexpr (ROUNDING == NEAREST) codes[i] = Format::encode(value);
            }
        }
    }

    // As an integer, NaN is the largest float, so the maximum of integers finds it.
    template <int N>
    static OPTIM_INLINE float absmax(float* x, const NoiseKey&) {
        int max = 0;
        OPTIM_UNROLL
        for (int i = 0; i < (CLAMPS ? N : 0); i++) max = (int)float_bits(x[i]) > max ? (int)float_bits(x[i]) : max;
        return bits_float((uint32_t)max);
    }

    template <int N>
    static OPTIM_INLINE void clamp(float* value, float) {
        OPTIM_UNROLL
        for (int i = 0; i < N; i++) value[i] = Format::storable(value[i]);
    }

    template <int N>
    static OPTIM_INLINE void put_scaled(const Streams& streams, int first, const float* value, float, float, bool,
                                        const NoiseKey& key) {
        put<N, !CLAMPS>(streams, first, value, key);
    }
};
