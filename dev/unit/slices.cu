// Tests of kernels/ranks/slices.cuh, from the plan alone: who owns what, and how evenly.
#include "../../kernels/ranks/slices.cuh"
#include "../../kernels/tile.h"
#include "test.h"

struct Tensors {
    SliceTensor tensor[16 * 64];
    int count;
    int64_t tiles;
};

// Makes a model in the order of its buckets: 12 tensors a layer, then embeddings. `apart`: vectors lie behind all
// matrices in the arena, as tensors of another launch do; `whole`: layers' matrices are not cut, and cost half.
static Tensors* make_tensors(int layers, int64_t channels, int64_t vocabulary, bool apart, bool whole) {
    const int64_t C = channels, shape[][2] = {{1, C}, {1, C}, {3 * C, C}, {1, 3 * C}, {C, C},     {1, C},
                                              {1, C}, {1, C}, {4 * C, C}, {1, 4 * C}, {C, 4 * C}, {1, C}};
    Tensors* t = (Tensors*)memory_zero(1, sizeof(Tensors));
    const auto add = [&](int bucket, int64_t rows, int64_t cols, bool cuts) {
        const int64_t tiles = (rows * cols + TILE_ELEMENTS - 1) / TILE_ELEMENTS;
        t->tensor[t->count++] = {0, tiles, bucket, cuts ? 1 : tiles, cuts ? 8 : 4};
    };
    for (int l = 0; l < layers; l++) {
        for (const auto& [rows, cols] : shape) add(l, rows, cols, !whole || rows == 1);
    }
    add(layers, vocabulary, C, true), add(layers, 1024, C, true), add(layers, 1, C, true), add(layers, 1, C, true);
    for (bool vectors : {false, true}) {
        for (int i = 0; i < t->count; i++) {
            if ((apart && t->tensor[i].tiles < 16) != vectors) continue;
            t->tensor[i].tile = t->tiles, t->tiles += t->tensor[i].tiles;
        }
    }
    return t;
}

// Every tile is owned once, in pieces that do not cross a run; own tiles are numbered in the arena's order.
static void check_owners(Test* test, const Tensors* t, const Slices* s, int64_t most) {
    int* owners = (int*)memory_zero((size_t)t->tiles, sizeof(int));
    SliceRun* own = (SliceRun*)memory_zero((size_t)t->count, sizeof(SliceRun));
    for (int r = 0; r < s->ranks; r++) {
        int64_t tiles = 0, listed = 0;
        const int runs = slices_own(s, r, own);
        for (int b = 0; b < s->buckets; b++) {
            int64_t at = *slices_cut(s, b, r);
            for (int64_t i = 0; slices_piece(s, b, r, i, most).tiles > 0; i++) {
                const SliceRun piece = slices_piece(s, b, r, i, most);
                expect(piece.at == at && piece.tiles <= most, "rank %d, bucket %d, piece %d", r, b, (int)i);
                for (int64_t j = 0; j < piece.tiles; j++) owners[piece.tile + j]++;
                at += piece.tiles, tiles += piece.tiles;
            }
            expect(at == slices_cut(s, b, r)[1], "rank %d, bucket %d ends at %lld", r, b, (long long)at);
        }
        for (int i = 0; i < runs; i++) {
            expect(own[i].at == listed &&
                       slices_place(own, runs, own[i].tile + own[i].tiles - 1) == listed + own[i].tiles - 1,
                   "rank %d, run %d", r, i);
            listed += own[i].tiles;
        }
        expect(listed == tiles, "rank %d: %lld tiles of %lld", r, (long long)listed, (long long)tiles);
    }
    for (int64_t i = 0; i < t->tiles; i++) expect(owners[i] == 1, "tile %d has %d owners", (int)i, owners[i]);
    free(owners), free(own);
}

// Returns the largest share of a rank over the mean: of the cost, or of the time of all exchanges.
static double worst(const Tensors* t, const Slices* s, bool cost) {
    double most = 0, sum = 0, time = 0;
    double* owned = (double*)memory_zero((size_t)s->ranks, sizeof(double));
    for (int b = 0, first = 0; b < s->buckets; b++) {
        double largest = 0;
        for (int r = 0; r < s->ranks; r++) {
            const int64_t begin = slices_cut(s, b, r)[0], end = slices_cut(s, b, r)[1];
            largest = fmax(largest, (double)(end - begin));
            for (int64_t i = first, at = 0; i < t->count && t->tensor[i].bucket == b; at += t->tensor[i++].tiles) {
                const int64_t low = begin > at ? begin : at, last = at + t->tensor[i].tiles;
                const int64_t high = end < last ? end : last;
                if (high > low) owned[r] += (double)((high - low) * t->tensor[i].cost);
            }
        }
        time += largest;
        while (first < t->count && t->tensor[first].bucket == b) first++;
    }
    for (int r = 0; r < s->ranks; r++) most = fmax(most, owned[r]), sum += owned[r];
    free(owned);
    return cost ? most * s->ranks / sum : time * s->ranks / (double)t->tiles;
}

TEST(slices_owners) {
    for (bool apart : {false, true}) {
        for (bool whole : {false, true}) {
            for (int ranks : {1, 2, 3, 7, 16, 1024}) {
                Tensors* t = make_tensors(3, 64, 500, apart, whole);  // layers have 28 tiles
                Slices s;
                slices_plan(&s, t->tensor, t->count, ranks);
                for (int64_t most : {(int64_t)3, INT64_MAX}) check_owners(test, t, &s, most);
                for (int i = 0; i < t->count && whole; i++) {
                    const SliceTensor* its = &t->tensor[i];
                    int64_t at = 0;
                    for (int j = i; j > 0 && t->tensor[j - 1].bucket == its->bucket; j--) at += t->tensor[j - 1].tiles;
                    for (int r = 0; r < ranks; r++) {
                        const int64_t cut = *slices_cut(&s, its->bucket, r);
                        expect(its->grain == 1 || cut <= at || cut >= at + its->tiles, "a matrix is cut");
                    }
                }
                slices_free(&s), free(t);
            }
        }
    }
}

// The shares of GPT-2's smallest model.
TEST(slices_balance) {
    for (int ranks : {2, 4, 8, 16, 64}) {
        for (bool whole : {false, true}) {
            Tensors* t = make_tensors(12, 768, 50304, true, whole);
            Slices s;
            slices_plan(&s, t->tensor, t->count, ranks);
            const double memory = worst(t, &s, true), time = worst(t, &s, false);
            note(test, "%d%s: %.3f %.3f", ranks, whole ? " whole" : "", memory, time);
            expect(memory < (whole ? 1.5 : 1.002), "%d ranks: the largest has %.4f of the mean", ranks, memory);
            expect(whole || time < 1.015, "%d ranks: exchanges take %.4f of the mean", ranks, time);
            slices_free(&s), free(t);
        }
    }
}
