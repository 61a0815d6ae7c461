// Weights in bf16, with their rounding error kept beside them in bf16 (Kahan's compensated sum; Zamirai et
// al., arXiv 2010.06192). Updates smaller than a step of the weights add up in the compensation until they make one
// step.
//     x = w + k                                    the value that the update reads and changes
//     w = nearest(x), k = bf16(x - w)              x - w is exact
// k is at most half a step of w and has 8 significant bits: |w + k - x| <= 2^-8 |x - w|, which is at most 2^-17 |x|
// (2^-134 if k is subnormal), and far less if x is near w. An infinite w has k = 0. The model sees w.
// Bytes an element: 4.
#pragma once
#include "elementwise.cuh"
#include "bf16.cuh"

EMBED_SOURCE

struct Kahan : StorageDefaults {
    typedef Elementwise<Bf16, NEAREST> Weight;
    static constexpr StreamInfo STREAM[3] = {Weight::STREAM[0], {"compensation", "BF16", 16, 1}};

    static OPTIM_INLINE void load(const Streams& streams, int first, float* x, int n, const NoiseKey& key) {
        OPTIM_UNROLL
        for (int c = 0; c < n; c += 8) {
            float k[8];
            Weight::load(streams, first + c, x + c, 8, key);
            Weight::load({streams.extra, nullptr}, first + c, k, 8, key);
            OPTIM_UNROLL
            for (int i = 0; i < 8; i++) x[c + i] = exact_add(x[c + i], k[i]);
        }
    }

    static OPTIM_INLINE void set(const Streams& streams, int first, const float* x, int n) {
        OPTIM_UNROLL
        for (int c = 0; c < n; c += 8) {
            Codes<Bf16::Code> codes;
            float k[8];
            OPTIM_UNROLL
            for (int i = 0; i < 8; i++) {
                codes.lane[i] = Bf16::encode(x[c + i]);
                float w = Bf16::decode(codes.lane[i]);
                k[i] = is_finite(w) ? exact_add(x[c + i], -w) : 0.0f;
            }
            store_codes(streams.codes, first + c, codes);
            Weight::set({streams.extra, nullptr}, first + c, k, 8);
        }
    }

    static OPTIM_INLINE void store(const Streams& streams, int first, const float* x, int n, const NoiseKey&) {
        set(streams, first, x, n);
    }

    static OPTIM_INLINE void view(const Streams& streams, int first, float* x, int n) {
        Weight::load(streams, first, x, n, NoiseKey{});
    }
};
