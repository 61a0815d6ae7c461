// The plan of which rank owns which part of a model: every layer is cut into slices.
//
// A bucket is a layer, or, as the last one, everything outside of the layers. Its tensors follow each other in a fixed
// order, counted in tiles. Every rank owns a slice of every bucket, so that a sum over the ranks ends at its owner and
// the weights return to all in one exchange. In the arena, a bucket lies in one or more runs, since tensors that share
// a launch of the optimizer lie together there.
//
// Cuts: the slices of rank r end at the allowed boundary that brings what ranks 0 to r own, in this and all earlier
// buckets, nearest to their share of the cost. A rank that gets too much in one bucket gets less in the next. All
// numbers are integers, so all ranks plan alike.
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../../data/memory.h"

struct SliceTensor {
    int64_t tile, tiles;  // place in the arena, and length with padding
    int bucket;           // rising
    int64_t grain;        // cuts inside the tensor fall on multiples of this
    int64_t cost;         // bytes that a tile's owner keeps
};

// Tiles that follow each other in the arena and in the bucket.
struct SliceRun {
    int64_t tile, at, tiles;  // first tile in the arena, and in the bucket
};

struct Slices {
    int ranks, buckets;
    SliceRun* run;   // of all buckets, one after another
    int* first_run;  // (buckets + 1) of each bucket
    int64_t* cut;    // (buckets, ranks + 1): rank r owns tiles cut[b][r] to cut[b][r + 1] of bucket b
};

inline const int64_t* slices_cut(const Slices* s, int bucket, int rank) {
    return s->cut + (int64_t)bucket * (s->ranks + 1) + rank;
}

// Returns piece `number` of the slices of `span` ranks of a bucket, from `rank` on: tiles of one run, at most `most`.
// There is no such piece if it has no tiles.
inline SliceRun slices_piece(const Slices* s, int bucket, int rank, int64_t number, int64_t most, int span = 1) {
    const int64_t begin = *slices_cut(s, bucket, rank), end = *slices_cut(s, bucket, rank + span);
    for (int i = s->first_run[bucket]; i < s->first_run[bucket + 1]; i++) {
        const SliceRun* run = &s->run[i];
        const int64_t low = begin > run->at ? begin : run->at,
                      high = end < run->at + run->tiles ? end : run->at + run->tiles;
        const int64_t pieces = high > low ? (high - low - 1) / most + 1 : 0;
        if (number < pieces) {
            const int64_t at = low + number * most, left = high - at;
            return SliceRun{run->tile + at - run->at, at, left < most ? left : most};
        }
        number -= pieces;
    }
    return SliceRun{0, 0, 0};
}

// Returns the boundary of a bucket's tensors that is nearest to `target`, in cost, where earlier ranks own `before`; it
// is `least` or above. `owned` receives its cost.
inline int64_t slices_boundary(const SliceTensor* tensor, int count, int64_t least, int64_t target, int64_t* owned) {
    int64_t best = least, at = 0, cost = 0, distance = -1;
    for (int t = 0; t < count; t++) {
        const SliceTensor* its = &tensor[t];
        // The tensor's begin, its end, and the two multiples of the grain around the target.
        const int64_t near = target > cost ? (target - cost) / its->cost / its->grain * its->grain : 0;
        const int64_t inside[] = {0, near, near + its->grain, its->tiles};
        for (int i = 0; i < 4; i++) {
            if (inside[i] > its->tiles || at + inside[i] < least) continue;
            const int64_t its_cost = cost + inside[i] * its->cost, away = llabs(its_cost - target);
            if (distance >= 0 && away >= distance) continue;
            distance = away, best = at + inside[i], *owned = its_cost;
        }
        at += its->tiles, cost += its->tiles * its->cost;
    }
    return best;
}

// Plans the slices of `count` tensors for `ranks` ranks. The tensors are in the order of their buckets; each bucket has
// one or more. The last bucket is cut first, since it has the largest tensors.
inline void slices_plan(Slices* s, const SliceTensor* tensor, int count, int ranks) {
    const int buckets = tensor[count - 1].bucket + 1;
    s->ranks = ranks, s->buckets = buckets;
    s->run = (SliceRun*)memory_zero((size_t)count, sizeof(SliceRun));
    s->first_run = (int*)memory_zero((size_t)buckets + 1, sizeof(int));
    s->cut = (int64_t*)memory_zero((size_t)buckets * (ranks + 1), sizeof(int64_t));
    int runs = 0;
    for (int t = 0; t < count; t++) {
        const bool first = t == 0 || tensor[t].bucket != tensor[t - 1].bucket;
        const int64_t at = first ? 0 : s->run[runs - 1].at + s->run[runs - 1].tiles;
        if (first) s->first_run[tensor[t].bucket] = runs;
        if (first || s->run[runs - 1].tile + s->run[runs - 1].tiles != tensor[t].tile)
            s->run[runs++] = SliceRun{tensor[t].tile, at, 0};
        s->run[runs - 1].tiles += tensor[t].tiles;
        s->first_run[tensor[t].bucket + 1] = runs;
    }
    int64_t total = 0, *owned = (int64_t*)memory_zero((size_t)ranks + 1, sizeof(int64_t));
    for (int i = 0; i < buckets; i++) {
        const int bucket = (buckets - 1 + i) % buckets;
        int64_t* cut = s->cut + (int64_t)bucket * (ranks + 1);
        int first = 0;
        while (tensor[first].bucket != bucket) first++;
        int tensors = 0;
        for (; first + tensors < count && tensor[first + tensors].bucket == bucket; tensors++) {
            total += tensor[first + tensors].tiles * tensor[first + tensors].cost;
            cut[ranks] += tensor[first + tensors].tiles;
        }
        for (int r = 0; r < ranks; r++) {
            // owned[r + 1]: what ranks 0 to r own.
            int64_t own = 0;
            const int64_t share = total / ranks * (r + 1) + total % ranks * (r + 1) / ranks;
            if (r + 1 < ranks)
                cut[r + 1] = slices_boundary(tensor + first, tensors, cut[r], share - owned[r + 1], &own);
            owned[r + 1] += own;
        }
    }
    free(owned);
}

inline int slices_compare(const void* a, const void* b) {
    const int64_t first = ((const SliceRun*)a)->tile, second = ((const SliceRun*)b)->tile;
    return (first > second) - (first < second);
}

// Lists what a rank owns as runs of the arena, in the arena's order; `at` counts its own tiles. `own` has room for
// first_run[buckets] of them. Returns how many there are.
inline int slices_own(const Slices* s, int rank, SliceRun* own) {
    int count = 0, runs = 0;
    for (int b = 0; b < s->buckets; b++) {
        for (int64_t i = 0; slices_piece(s, b, rank, i, INT64_MAX).tiles > 0; i++)
            own[count++] = slices_piece(s, b, rank, i, INT64_MAX);
    }
    qsort(own, (size_t)count, sizeof(SliceRun), slices_compare);
    for (int i = 0; i < count; i++) {
        const bool follows = runs > 0 && own[runs - 1].tile + own[runs - 1].tiles == own[i].tile;
        const int64_t at = runs > 0 ? own[runs - 1].at + own[runs - 1].tiles : 0;
        if (follows) own[runs - 1].tiles += own[i].tiles;
        if (!follows) own[runs++] = SliceRun{own[i].tile, at, own[i].tiles};
    }
    return runs;
}

// Returns the number of a tile of the arena among those of these runs, one of which has it.
inline int64_t slices_place(const SliceRun* own, int runs, int64_t tile) {
    int i = 0;
    while (i + 1 < runs && own[i + 1].tile <= tile) i++;
    return own[i].at + (tile - own[i].tile);
}

// Returns the owner of a tile of the arena, and in *tiles how many tiles from there on follow in its slice and run.
inline int slices_owner(const Slices* s, int64_t tile, int64_t* tiles) {
    int bucket = 0, i = 0, rank = 0;
    while (tile < s->run[i].tile || tile >= s->run[i].tile + s->run[i].tiles) i++;
    while (s->first_run[bucket + 1] <= i) bucket++;
    const int64_t at = s->run[i].at + (tile - s->run[i].tile), left = s->run[i].tiles - (tile - s->run[i].tile);
    while (slices_cut(s, bucket, rank)[1] <= at) rank++;
    const int64_t own = slices_cut(s, bucket, rank)[1] - at;
    *tiles = own < left ? own : left;
    return rank;
}

inline void slices_free(Slices* s) {
    free(s->run), free(s->first_run), free(s->cut);
}
