// Mu-law companding for m: 4 bits, scale absmax. MuonQ (arXiv 2605.11396) quantises Muon's momentum through such a
// curve. The levels are equally far apart on telephony's curve with mu = 255. As in NF4, there is one level more above
// 0 than below:
//     (256^(k / 8) - 1) / 255,  k = 0 .. 8:     0, 0.0039, 0.0118, 0.0275, 0.0588, 0.1216, 0.2471, 0.4980, 1
//     (1 - 256^(k / 7)) / 255,  k = 1 .. 7:     -0.0047, -0.0152, -0.0383, -0.0893, -0.2020, -0.4507, -1
// Each level is about twice the one before, so small values that de4 and NF4 would round to 0 keep their size, and
// large levels are twice as far apart.
#pragma once
#include "levels.cuh"

EMBED_SOURCE

struct MuLaw4Map : MapDefaults<MuLaw4Map> {
    static constexpr int BITS = 4, ZERO = 7, CELL_BITS = 8, BINADE_BITS = 0;
    static constexpr bool SIGNED = true, EVEN = true;
    typedef EvenCells<201> Cells;                // an odd number, so that one begins at zero
    static constexpr float MIN = 1.0f / 255.0f;  // the level ZERO + 1

    static OPTIM_HOST double level(int code) {
        const double below[] = {-1.0,
                                -0.45071619225796083,
                                -0.20196652072348562,
                                -0.08931728873016145,
                                -0.03830275114140724,
                                -0.015200214183599613,
                                -0.004737956969990684};
        return (double)(float)(code < ZERO ? below[code] : (double)((1 << (code - ZERO)) - 1) / 255.0);
    }
};

typedef Levels<MuLaw4Map> MuLaw4;
