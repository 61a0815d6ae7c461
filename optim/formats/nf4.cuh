// NF4: 4 bits, scale absmax, levels at the quantiles of a normal distribution, scaled to [-1, 1], with 0 among them
// (the 16 values of QLoRA, arXiv 2305.14314, appendix E). It was made for weights. For m it has the most levels where
// most elements of a block are, and none between 0 and 0.08.
#pragma once
#include "levels.cuh"

EMBED_SOURCE

template <class Map>
struct Quantiles : MapDefaults<Map> {
    static constexpr int BITS = 4, ZERO = 7, CELL_BITS = 4, BINADE_BITS = 0;
    static constexpr bool SIGNED = true, EVEN = true;
    typedef EvenCells<32> Cells;
};

struct Normal4 : Quantiles<Normal4> {
    static constexpr float MIN = 0.07958029955625534f;  // the level ZERO + 1

    static OPTIM_HOST double level(int code) {
        const double levels[16] = {-1.0,
                                   -0.6961928009986877,
                                   -0.5250730514526367,
                                   -0.39491748809814453,
                                   -0.28444138169288635,
                                   -0.18477343022823334,
                                   -0.09105003625154495,
                                   0.0,
                                   0.07958029955625534,
                                   0.16093020141124725,
                                   0.24611230194568634,
                                   0.33791524171829224,
                                   0.44070982933044434,
                                   0.5626170039176941,
                                   0.7229568362236023,
                                   1.0};
        return (double)(float)levels[code];
    }
};

typedef Levels<Normal4> Nf4;

// adafactor8bit's table: -1 .. 0 has 8 levels, and 0 .. 1 the same with one more.
struct AdaNormal4 : Quantiles<AdaNormal4> {
    static constexpr float MIN = 0.07958022f;

    static OPTIM_HOST double level(int code) {
        const double half[9] = {0.0,        0.07958022, 0.17286907, 0.27408478, 0.3895074,
                                0.52507306, 0.6961928,  0.8641379,  1.0};
        return (double)(float)(code >= ZERO ? half[code - ZERO] : code > 0 ? -half[ZERO - code] : -1.0);
    }
};

typedef Levels<AdaNormal4> AdaNf4;
