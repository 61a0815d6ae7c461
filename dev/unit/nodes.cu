// Tests of several nodes, which NIBBLE_NODES simulates over the stand-in.
#include <sys/socket.h>
#include <sys/syscall.h>

#include "../../kernels/ranks/collect.cuh"
#include "../../optim/formats/bf16.cuh"
#include "../room.h"
#include "ranks.h"

// Takes the place of libc's function and counts the messages of this process. Beats, which do not wait, are none.
static int64_t messages;
extern "C" ssize_t send(int socket, const void* bytes, size_t count, int flags) {
    messages += !(flags & MSG_DONTWAIT);
    return syscall(SYS_sendto, socket, bytes, count, flags, nullptr, 0);
}

constexpr int TENSORS = 4;
static const SliceTensor model[TENSORS] = {{40, 37, 0, 1, 1}, {77, 37, 1, 1, 1}, {0, 40, 2, 1, 1}, {114, 9, 2, 1, 1}};
constexpr int64_t TILES = 123, ELEMENTS = TILES * TILE_ELEMENTS;

// Gradients of all magnitudes, so that each order of a sum has other bits.
template <typename G>
static G gradient(int rank, int64_t i) {
    uint32_t x = (uint32_t)(i * 64 + rank) * 0x9e3779b1u;
    x = (x ^ x >> 15) * 0x85ebca77u;
    return from_float<G>((float)(int32_t)x / (float)(1 << x % 13));
}

// The definition: node by node, each in the order of its ranks.
template <typename G>
static G sum_of_nodes(int world, int nodes, int64_t i) {
    float sum = 0.0f;
    for (int node = 0; node < nodes; node++) {
        float its = 0.0f;
        for (int local = 0; local < world / nodes; local++)
            its += to_float(gradient<G>(node * (world / nodes) + local, i));
        sum += to_float(from_float<G>(its));
    }
    return from_float<G>(sum);
}

struct NodesShard : Shard {
    Room room{nullptr};

    NodesShard(Launch* launch, const Device* dev, ShardMode how, int bytes) : Shard() {
        comm_open(&comm, launch, dev);
        comm.net.sent = 0, mode = how, piece = 5, gradient_bytes = weight_bytes = bytes;
        shard_plan(this, model, TENSORS);
        const int64_t tiles = how >= SHARD_GRADS ? packed / TILE_ELEMENTS + own_tiles : TILES;
        MemoryPlan memory = {};
        shard_open(this, dev, room.zeros<char>(tiles * TILE_ELEMENTS * bytes),
                   room.zeros<char>((own_tiles + 1) * TILE_ELEMENTS * bytes), room.zeros<double>(TILES), ELEMENTS,
                   &memory);
    }
    ~NodesShard() { shard_close(this); }
};

// Sums a number over the ranks of this rank's node.
static int64_t of_node(const Shard* s, int64_t own) {
    int64_t each[64], sum = 0;
    launch_gather(s->comm.launch, &own, sizeof(own), each);
    for (int r = 0; r < s->comm.node.world; r++) sum += each[s->comm.node.first + r];
    return sum;
}

// Returns where a tensor lies in an arena or in packed memory.
static char* tensor_at(const Shard* s, void* memory, const SliceTensor& t, int64_t tile) {
    return shard_at(s, memory, t.bucket, {t.tile, t.tile == 114 ? 40 : 0, t.tiles}, tile);
}

template <typename G>
static void check_nodes(Launch* launch, ShardMode mode) {
    const Device dev = test_device(false);
    NodesShard s(launch, &dev, mode, sizeof(G));
    const int world = s.comm.world, nodes = s.comm.net.world, asked = atoi(getenv("NIBBLE_NODES"));
    const int64_t tile = TILE_ELEMENTS * (int64_t)sizeof(G);
    const auto sums_right = [&](const void* got, int64_t first, int64_t tiles) {
        for (int64_t i = 0; i < tiles * TILE_ELEMENTS; i++)
            require_rank(to_float(((const G*)got)[i]) ==
                         to_float(sum_of_nodes<G>(world, nodes, first * TILE_ELEMENTS + i)));
    };
    require_rank(nodes == (world % asked ? world : asked) && s.comm.node.world * nodes == world);
    shard_micro_batch(&s, true, mode < SHARD_GRADS);
    for (int b : {1, 0, 2}) {
        for (const SliceTensor& t : model) {
            for (int64_t i = 0; i < t.tiles * TILE_ELEMENTS && t.bucket == b; i++)
                ((G*)tensor_at(&s, s.grads, t, tile))[i] = gradient<G>(s.comm.rank, t.tile * TILE_ELEMENTS + i);
        }
        shard_reduce<G>(&s, b);
    }
    // A node's sums go to the other nodes once, and later its weights to each. Ranks own equally many tiles but for
    // one.
    const int64_t owns = of_node(&s, s.own_tiles), of_sums = of_node(&s, s.comm.net.sent);
    require_rank(llabs(owns * nodes - TILES) <= world && (mode != SHARD_GRADS || of_sums == (TILES - owns) * tile));
    char* only = s.room.zeros<char>(TILES * tile);  // what this rank owns
    for (const SliceRun* run = s.Shard::own; run < s.Shard::own + s.own_runs; run++) {
        const char* sums = mode >= SHARD_GRADS ? (char*)s.sums + run->at * tile : (char*)s.grads + run->tile * tile;
        sums_right(sums, run->tile, run->tiles);
        memcpy((char*)s.kept_weights + run->at * tile, sums, (size_t)(run->tiles * tile));
        memcpy(only + run->tile * tile, sums, (size_t)(run->tiles * tile));
    }
    if (mode == SHARD_NONE) {
        double squares[TILES];
        sums_right(s.grads, 0, TILES);
        tile_squares<G>(&dev, nullptr, squares, (G*)s.grads, TILES);
        require_rank(memcmp(squares, s.squares, sizeof(squares)) == 0);
        return;
    }
    s.comm.net.sent = 0;
    shard_publish(&s);
    for (const SliceTensor& t : model) {
        shard_need(&s, t.bucket);
        sums_right(tensor_at(&s, s.weights, t, tile), t.tile, t.tiles);
    }
    require_rank(of_node(&s, s.comm.net.sent) == (nodes - 1) * owns * tile);
    char* all = s.room.zeros<char>(TILES * tile);  // on rank 0, for a checkpoint
    for (const SliceTensor& t : model)
        shard_collect(&s, all + t.tile * tile, only + t.tile * tile, t.tile, tile, false, 0, t.tiles * tile);
    if (s.comm.rank == 0) sums_right(all, 0, TILES);
    float scalars[SCALARS] = {(float)s.comm.rank + 1};
    shard_agree(&s, scalars);
    require_rank(scalars[SCALAR_LOSS] == (float)(world * (world + 1) / 2));
    // If one rank's loss is no number, nobody's is, and bytes that one rank has otherwise are noticed.
    const bool last = s.comm.rank == world - 1;
    scalars[SCALAR_LOSS] = last ? NAN : 1.0f;
    shard_agree(&s, scalars);
    char bytes[5000] = {};
    require_rank(isnan(scalars[SCALAR_LOSS]) && shard_equal(&s, bytes, sizeof(bytes)));
    bytes[sizeof(bytes) - 1] = last;
    require_rank(!shard_equal(&s, bytes, sizeof(bytes)));
}

static void nodes_main(Launch* launch) {
    for (ShardMode mode : {SHARD_NONE, SHARD_STATES, SHARD_GRADS, SHARD_WEIGHTS}) check_nodes<float>(launch, mode);
    check_nodes<bf16>(launch, SHARD_GRADS);  // the CPU takes no squares of bf16, as other modes would
}

TEST(nodes_sums_and_bytes) {
    const int rows[][2] = {{4, 1}, {4, 2}, {4, 4}, {6, 2}, {6, 3}, {8, 4}, {3, 2}};
    for (const auto& [ranks, nodes] : rows) {
        setenv("NIBBLE_NODES", formatted("%d", nodes), 1);
        expect_ranks(test, ranks, nodes_main);
    }
    unsetenv("NIBBLE_NODES");
}

// The messages of all ranks until the first exchange has passed, for each rank but 0: the same for any number.
static void start_main(Launch* launch) {
    const Device dev = test_device(false);
    Comm comm;
    comm_open(&comm, launch, &dev);
    double all = (double)messages;
    launch_all_reduce(launch, &all, 1, LAUNCH_SUM);
    if (launch->rank == 0) fprintf(stderr, "%g messages a rank\n", all / (launch->world - 1));
    comm_close(&comm);
}

TEST(nodes_start_up) {
    const Ended few = run_ranks(2, start_main);
    for (int ranks : {2, 5, 16}) expect_ranks(test, ranks, start_main, 0, few.text);
    note(test, "%s", few.text);
    Device gpu = {};
    gpu.gpu = true;
    for (int world : {2, 8, 128, 1024}) {
        const int64_t mib = 2 * world * link_trial_bytes(&gpu, world) >> 20;
        expect(mib > 48 && mib <= 64, "%d members: %d MiB", world, (int)mib);
    }
}
