// Noise for stochastic rounding: random bits that depend only on (seed, step, stream, element), so that the CPU, any
// number of GPUs, any launch shape and a resumed run draw the same bits.
// The generator is Philox4x32-7 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011;
// with 7 rounds it passes all of BigCrush). One call serves 16 consecutive elements; `element` is the index in the
// arena, counted over the whole model.
//     key = (seed low, seed high), counter = (element / 16 low, element / 16 high, stream, step)
//     noise = 256 * byte of the element + shared byte          16 bits, in 65536ths of a step
// Each element has its own byte of the 128 bits; the lower byte, the exclusive or of four bytes, is shared by all 16.
// So each noise is uniform over 65536 values; 8 bits alone would lose updates of less than 1/256 of a step. Two
// elements of the 16 are not independent, since the shared byte decides where an element's own byte equals the upper
// byte of its fraction. The covariance of their rounding up is at most 2^-18: a correlation of 2^-16 near the middle of
// a step, and up to 1/256 for two fractions below 1/256 of a step. Independent 16 bits for each element would take
// twice the calls.
#pragma once
#include "float.cuh"

EMBED_SOURCE

constexpr int NOISE_ELEMENTS = 16;  // one call serves this many
constexpr int NOISE_ROUNDS = 7;
constexpr uint32_t NOISE_STEP0 = 0x9E3779B9u, NOISE_STEP1 = 0xBB67AE85u;  // difference between the keys of two rounds

enum NoiseStream { NOISE_WEIGHTS, NOISE_M, NOISE_V, NOISE_SLOW };

// A seed and the keys of its rounds. In a kernel's arguments, instructions can read the keys as constant operands.
struct NoiseSeed {
    uint64_t seed;
    uint32_t round[2 * NOISE_ROUNDS];

    NoiseSeed() = default;
    OPTIM_INLINE NoiseSeed(uint64_t value) : seed(value) {
        for (int i = 0; i < NOISE_ROUNDS; i++) {
            round[2 * i] = (uint32_t)value + (uint32_t)i * NOISE_STEP0;
            round[2 * i + 1] = (uint32_t)(value >> 32) + (uint32_t)i * NOISE_STEP1;
        }
    }
};

struct NoiseKey {
    uint64_t seed;
    uint32_t step;
    uint32_t stream;
    int64_t element = 0;              // index in the arena of the storage functions' element 0
    int turn = 0;                     // on a GPU: alternates between 0 and 1 from tile to tile of a group of threads
    uint32_t* bf16_out = nullptr;     // on a GPU: if not null, the store also writes the weights here, in pairs of bf16
    const uint32_t* round = nullptr;  // on a GPU: the keys of the rounds (NoiseSeed), or null
    bool ordered = false;             // on a GPU: x[i] is the element first + (i ^ order) (elementwise.cuh)
    int order = 0;
};

struct Noise {
    uint32_t word[4];
    uint32_t shared = 0;  // bytes, from the upper: NOISE_FLOAT, 0, the shared byte, 0x80
};

constexpr uint32_t NOISE_FLOAT = 0x43;  // the upper byte of 128.0f

// Returns the upper 32 bits of a * b, and the lower ones in *low.
OPTIM_INLINE uint32_t product_halves(uint32_t a, uint32_t b, uint32_t* low) {
#ifdef __CUDA_ARCH__
    uint32_t high;  // moved as a word, since the compiler turns a shifted 64-bit product into an addition of zero
    asm("{.reg .u64 product; mul.wide.u32 product, %2, %3; mov.b64 {%0, %1}, product;}"
        : "=r"(*low), "=r"(high)
        : "r"(a), "r"(b));
    return high;
#else
    uint64_t product = (uint64_t)a * b;
    *low = (uint32_t)product;
    return (uint32_t)(product >> 32);
#endif
}

// One round of Philox: words 0 and 2 of the counter are multiplied by constants, and each product's upper half is mixed
// with another word and the key.
OPTIM_INLINE void philox_round(uint32_t* c, uint32_t key0, uint32_t key1) {
    uint32_t low0, high0 = product_halves(0xD2511F53u, c[0], &low0);
    uint32_t low1, high1 = product_halves(0xCD9E8D57u, c[2], &low1);
    c[0] = high1 ^ c[1] ^ key0;
    c[1] = low1;
    c[2] = high0 ^ c[3] ^ key1;
    c[3] = low0;
}

// Runs all rounds; the key grows by constants.
OPTIM_INLINE Noise philox4x32(Noise counter, uint32_t key0, uint32_t key1, int rounds) {
    OPTIM_UNROLL
    for (int i = 0; i < rounds; i++) {
        philox_round(counter.word, key0, key1);
        key0 += NOISE_STEP0;
        key1 += NOISE_STEP1;
    }
    return counter;
}

// Does the same with the keys of the rounds given.
OPTIM_INLINE Noise philox4x32(Noise counter, const uint32_t* round) {
    OPTIM_UNROLL
    for (int i = 0; i < NOISE_ROUNDS; i++) philox_round(counter.word, round[2 * i], round[2 * i + 1]);
    return counter;
}

// Draws the noise of the elements from `first` on: of 16 elements if `first` is a multiple of 16, else of 8.
OPTIM_INLINE Noise noise_draw(const NoiseKey& key, int first) {
    // The bits of begin and of `first` do not overlap on a GPU: key.element begins a tile, and `first` lies in it.
    const uint64_t begin = (uint64_t)key.element / NOISE_ELEMENTS;
    const uint64_t call = ON_GPU ? begin | (uint32_t)first / NOISE_ELEMENTS : begin + (uint64_t)first / NOISE_ELEMENTS;
    Noise counter = {{(uint32_t)call, (uint32_t)(call >> 32), key.stream, key.step}};
    Noise noise = key.round ? philox4x32(counter, key.round)
                            : philox4x32(counter, (uint32_t)key.seed, (uint32_t)(key.seed >> 32), NOISE_ROUNDS);
    uint32_t mixed = noise.word[0] ^ noise.word[1] ^ noise.word[2] ^ noise.word[3];
    noise.shared = (mixed & 0xff00u) | NOISE_FLOAT << 24 | 0x80u;
    if (first % NOISE_ELEMENTS != 0) noise.word[0] = noise.word[2], noise.word[1] = noise.word[3];
    if (key.ordered && key.order != 0) {
        const uint32_t word[2] = {noise.word[0], noise.word[1]};
        noise.word[0] = noise.word[2], noise.word[1] = noise.word[3];
        noise.word[2] = word[0], noise.word[3] = word[1];
    }
    return noise;
}

// Return the noise of lane 0 .. 15 in three forms, in one instruction each: noise_lane its 16 bits n;
// noise_middle 256 n + 128, the middle of n as 24 bits; noise_float the bits of the float 128 + n / 65536.
OPTIM_INLINE uint32_t noise_lane(const Noise& noise, int lane) {
    return OPTIM_EITHER(__byte_perm(noise.word[lane / 4], noise.shared, 0x6605 + (lane % 4 << 4)),
                        (uint32_t)((const uint8_t*)noise.word)[lane] << 8 | (noise.shared >> 8 & 0xffu));
}

OPTIM_INLINE uint32_t noise_middle(const Noise& noise, int lane) {
    return OPTIM_EITHER(__byte_perm(noise.word[lane / 4], noise.shared, 0x6054 + (lane % 4 << 8)),
                        noise_lane(noise, lane) << 8 | 0x80u);
}

OPTIM_INLINE uint32_t noise_float(const Noise& noise, int lane) {
    return OPTIM_EITHER(__byte_perm(noise.word[lane / 4], noise.shared, 0x7605 + (lane % 4 << 4)),
                        noise_lane(noise, lane) | NOISE_FLOAT << 24);
}
