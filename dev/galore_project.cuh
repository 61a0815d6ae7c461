// The first product of galore_mma.cuh in bf16 on sm_90a, with operands and clusters as in galore_project_tf32.cuh:
//     a: Q, 64 rows a warpgroup;  b: G, 128 to 192 channels, as many as are done first
// The end differs from the one there, which takes a third of a short product's time. The blocks of a cluster own groups
// of eight channels in turns. When all have multiplied, a thread sends its sums of a group, four
// numbers, from its registers to the thread of its own number in the owner, which adds up the blocks' in order and
// hands them to the sink. What the sink reads of the first groups was asked for before the product. The optimizer,
// which leaves this product to the library, does not use it. Deterministic. Sizes are multiples of 8, addresses of 16
// bytes.
#pragma once
#include "galore_project_tf32.cuh"

#ifdef __CUDACC__
constexpr int LH_PIECE_BYTES = 256 * 16;  // what the threads of a block send of a group

// The steps of the sum that a block of a cluster has, from first[its number] to the next one's, and the number of its
// groups of channels.
struct LowParts {
    int first[LP_SLICES + 1], groups[LP_SLICES];
};

// In the end the blocks' sums take the stages' place: piece by piece, each block's after the other's.
template <bool LEFT, int CHANNELS, int STAGES>
struct LowSend {
    typedef LowProject<bf16, 1, LEFT, CHANNELS, STAGES> Kind;
    static constexpr int GROUPS = CHANNELS / 8;
    static constexpr int COME = Kind::full(2 * STAGES), BYTES = COME + 8;  // COME: barrier of the others' sums
    static_assert((GROUPS + LP_SLICES) * LH_PIECE_BYTES <= STAGES * Kind::STAGE, "the pieces take the stages' place");
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// Starts a step of the product of a warpgroup, in bf16: 64 of the rank, all channels.
template <typename Kind, int PARTS, bool LEFT>
__device__ __forceinline__ void lh_project_step(bf16, float (&c)[Kind::N / 8][4], uint32_t q, int warp, int, bool add) {
    const uint32_t g = q + Kind::G;
    const uint64_t left = uniform_operand(operand_k_major<LH_TILE>(q + warp / 4 * 64 * PANEL_ROW_BYTES, 0)),
                   right = uniform_operand(LEFT ? operand_mn_major<64>(g, 0) : operand_k_major<Kind::N>(g, 0));
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < 4; j++)
        Wgmma<Kind::N>::template shared<0, LEFT>(
            c, operand_step(left, j * 32), operand_step(right, j * (LEFT ? 16 * PANEL_ROW_BYTES : 32)), add || j > 0);
}

// PTX ISA: prefetch.tensormap; barrier.cluster, whose arrival needs no release, since what the others will see is the
// barriers' start, which has a fence of its own; mapa; st.async; mbarrier.try_wait of what other blocks wrote.

__device__ __forceinline__ void tensor_map_prefetch(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void lp_cluster_meet() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ uint32_t address_in(uint32_t address, int block) {
    uint32_t its;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(its) : "r"(address), "r"(block));
    return its;
}

__device__ __forceinline__ void send_four(uint32_t to, const float (&x)[4], uint32_t barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(to),
                 "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void wait_for_sent(uint32_t barrier) {
    uint32_t done = 0;
    while (!done) {
        asm volatile(
            "{.reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p;}"
            : "=r"(done)
            : "r"(barrier)
            : "memory");
    }
}

// A thread sends its sums by this. `place` is its place in an owner's first piece from this block.
template <typename Send>
__device__ __forceinline__ void lh_send(const float (&c)[Send::GROUPS][4], uint32_t place, uint32_t come, int slices) {
    int owner = 0;
#pragma unroll
    for (int n = 0; n < Send::GROUPS; n++) {
        if (owner == (int)blockIdx.x)
            asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(place), "f"(c[n][0]), "f"(c[n][1]), "f"(c[n][2]),
                         "f"(c[n][3])
                         : "memory");
        else
            send_four(address_in(place, owner), c[n], address_in(come, owner));
        if (++owner == slices) owner = 0, place += LH_PIECE_BYTES;
    }
}

// A thread's numbers of the groups that its block owns: of a group two pairs that lie side by side in memory. `old` is
// what the sink reads of AT_ONCE groups.
template <bool LEFT, typename Sink>
struct LowShare {
    static constexpr int AT_ONCE = 5;
    struct Old {
        typename Sink::Two of[AT_ONCE][2];
    };
    LowResult s;
    int groups, row, column;  // the groups that the block owns; of the first pair of the first one

    // `rank` and `channel` are the tile's first.
    __device__ __forceinline__ LowShare(LowResult its, int its_groups, int rank, int channel, int warp, int lane)
        : s(its), groups(its_groups) {
        const int of_rank = rank + warp * 16 + (LEFT ? lane / 4 : lane / 8 * 2),
                  of_channel = channel + (int)blockIdx.x * 8 + lane % 4 * 2 + (LEFT ? 0 : lane / 4 % 2);
        row = LEFT ? of_rank : of_channel, column = LEFT ? of_channel : of_rank;
    }
    // The place of pair `half` of a group.
    __device__ __forceinline__ bool find(int group, int half, int* r, int* c) const {
        const int further = group * s.slices * 8;
        *r = row + (LEFT ? half * 8 : further), *c = column + (LEFT ? further : half * 8);
        return group < groups && *r < s.rows && *c < s.cols;
    }
    __device__ __forceinline__ void ask(const Sink& sink, Old* old, int first) const {
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int r, c;
                old->of[u][half] = find(first + u, half, &r, &c) ? sink.load_two(r, c) : Sink::outside();
            }
        }
    }
    // The sum of a group; `place` is the thread's place in the piece from the first block, `next` the way to the next
    // block's. Across memory's rows, a thread swaps with the one of the next row.
    template <int SLICES>
    __device__ __forceinline__ void sum(float (&x)[4], uint32_t place, uint32_t next, int lane) const {
        constexpr int MOST = SLICES > 0 ? SLICES : LP_SLICES;
        float of[MOST][4];
#pragma unroll
        for (int block = 0; block < MOST; block++) {
            if (block < s.slices)
                asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
                             : "=f"(of[block][0]), "=f"(of[block][1]), "=f"(of[block][2]), "=f"(of[block][3])
                             : "r"(place + block * next)
                             : "memory");
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x[i] = of[0][i];
#pragma unroll
            for (int block = 1; block < MOST; block++)
                if (block < s.slices) x[i] += of[block][i];
        }
        if (LEFT) return;
        const bool odd = lane & 4;
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
            const float keep = odd ? x[i + 1] : x[i], swapped = __shfl_xor_sync(0xffffffffu, odd ? x[i] : x[i + 1], 4);
            x[i] = odd ? swapped : keep, x[i + 1] = odd ? keep : swapped;
        }
    }
    template <int SLICES>
    __device__ __forceinline__ void give(const Sink& sink, const Old& old, int first, uint32_t place, uint32_t next,
                                         int lane) const {
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) {
            if (first + u >= groups) break;
            float x[4];
            int r[2], c[2];
            bool inside[2];
            sum<SLICES>(x, place + (first + u) * LH_PIECE_BYTES, next, lane);
#pragma unroll
            for (int half = 0; half < 2; half++) inside[half] = find(first + u, half, &r[half], &c[half]);
            sink.take_twos(r, c, inside, x, old.of[u]);
        }
    }
};

// A thread that has multiplied ends a block by this. SLICES is s.slices, or 0 if that is known only then.
template <int SLICES, typename Send, typename Share, typename Sink>
__device__ __forceinline__ void lh_end(Share share, typename Share::Old* old, const Sink& sink,
                                       const float (&c)[Send::GROUPS][4], uint32_t shared, int lane) {
    if (SLICES > 0) share.s.slices = SLICES;
    const int most = (Send::GROUPS + share.s.slices - 1) / share.s.slices;
    const uint32_t come = shared + Send::COME, place = shared + threadIdx.x * 16, next = most * LH_PIECE_BYTES;
    lh_send<Send>(c, place + blockIdx.x * next, come, share.s.slices);
    if constexpr (SLICES * Share::AT_ONCE >= Send::GROUPS) {
        wait_for_sent(come);
        share.template give<SLICES>(sink, *old, 0, place, next, lane);
    } else {
        typename Share::Old more;
        share.ask(sink, &more, Share::AT_ONCE);
        wait_for_sent(come);
        for (int at = 0; at < share.groups; at += 2 * Share::AT_ONCE) {
            share.template give<SLICES>(sink, *old, at, place, next, lane);
            share.ask(sink, old, at + 2 * Share::AT_ONCE);
            share.template give<SLICES>(sink, more, at + Share::AT_ONCE, place, next, lane);
            share.ask(sink, &more, at + 3 * Share::AT_ONCE);
        }
    }
}
#endif

// Grid (slices, tiles of the rank, tiles of channels), clusters of `slices`, at most 8. The sink takes two pairs of
// numbers at a time.
template <bool LEFT, int CHANNELS, int STAGES, typename Sink>
__global__ void __launch_bounds__(LH_PROJECT_THREADS, 1)
    low_send_kernel(const __grid_constant__ LowProjectMaps maps, LowResult s, const __grid_constant__ LowParts parts,
                    Sink sink) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    typedef LowSend<LEFT, CHANNELS, STAGES> Send;
    typedef typename Send::Kind Kind;
    typedef LowShare<LEFT, Sink> Share;
    extern __shared__ __align__(1024) unsigned char low_project_shared[];
    const uint32_t shared = shared_offset(low_project_shared), come = shared + Send::COME;
    const int lane = threadIdx.x % 32, warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0);
    const int rank = blockIdx.y * LH_TILE, channel = blockIdx.z * CHANNELS, first = parts.first[blockIdx.x],
              steps = parts.first[blockIdx.x + 1] - first, groups = parts.groups[blockIdx.x];
    if (warp == 8) {
        if (is_elected()) {
            tensor_map_prefetch(&maps.g);
            tensor_map_prefetch(&maps.q);
            for (int i = 0; i < STAGES; i++) {
                barrier_init(shared + Kind::full(i), 1);
                barrier_init(shared + Kind::empty(i), 8);
            }
            barrier_init(come, 1);
            barrier_init_done();
            barrier_expect(come, (s.slices - 1) * groups * LH_PIECE_BYTES);
        }
        __syncwarp();
        group_arrive(1, LH_PROJECT_THREADS);
        if (is_elected())
            lh_project_produce<Kind, bf16, LEFT, CHANNELS, STAGES>(shared, &maps, rank, channel, first, steps);
        __syncwarp();
        lp_cluster_meet();
        return;
    }
    const Share share(s, groups, rank, channel, warp, lane);
    typename Share::Old old;
    share.ask(sink, &old, 0);
    group_sync(1, LH_PROJECT_THREADS);
    launch_next();
    float c[Kind::N / 8][4];
    lh_project_multiply<Kind, bf16, 1, LEFT, STAGES>(c, shared, warp, lane, steps);
    lp_cluster_meet();  // nobody reads the stages any more
    if (s.slices == 4)
        lh_end<4, Send>(share, &old, sink, c, shared, lane);
    else if (s.slices == 2)
        lh_end<2, Send>(share, &old, sink, c, shared, lane);
    else
        lh_end<0, Send>(share, &old, sink, c, shared, lane);
#else
    (void)maps, (void)s, (void)parts, (void)sink;
#endif
}

inline LowProjectPlan low_project_plan_bf16(const Device* dev, const bf16* g, const bf16* q, int64_t rows, int64_t cols,
                                            int64_t rank) {
    LowProjectPlan best;
    best.time = INFINITY;
    for (int channels : {128, 144, 160, 192}) {
        if (rows < cols && channels % 64 != 0) continue;
        const LowProjectPlan plan = low_project_plan<bf16>(dev, g, q, nullptr, rows, cols, rank, channels);
        if (plan.time < best.time) best = plan;
    }
    return best;
}

template <bool LEFT, int CHANNELS, int STAGES, typename Sink>
void low_send_launch(const Device* dev, const LowProjectPlan* p, const Sink& sink) {
    const int64_t steps = ceil_div(p->s.depth, LowOperand<bf16>::DEPTH);
    LowParts parts = {};
    for (int i = 0; i <= p->s.slices; i++) parts.first[i] = (int)(steps * i / p->s.slices);
    for (int i = 0; i < p->s.slices; i++) parts.groups[i] = (int)ceil_div(CHANNELS / 8 - i, p->s.slices);
    low_project_start(dev, p, low_send_kernel<LEFT, CHANNELS, STAGES, Sink>, LowSend<LEFT, CHANNELS, STAGES>::BYTES,
                      p->maps, p->s, parts, sink);
}

template <typename Sink>
void low_project_run_bf16(const Device* dev, const LowProjectPlan* p, const Sink& sink) {
    if (p->left && p->channels == 128) return low_send_launch<true, 128, 6>(dev, p, sink);
    if (p->left) return low_send_launch<true, 192, 5>(dev, p, sink);
    if (p->channels == 128) return low_send_launch<false, 128, 6>(dev, p, sink);
    if (p->channels == 144) return low_send_launch<false, 144, 6>(dev, p, sink);
    if (p->channels == 160) return low_send_launch<false, 160, 6>(dev, p, sink);
    low_send_launch<false, 192, 5>(dev, p, sink);
}
#endif
