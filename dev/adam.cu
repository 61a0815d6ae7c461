// AdamW and its state, from the first kernel that comes to mind to one that keeps 8 or 4 bits a moment: the
// introduction to optim/, in one file that needs nothing else.
//
//   nvcc -O3 -arch=native -o adam dev/adam.cu && ./adam [ELEMENTS]        268435456 without an argument
//
// A step reads a weight, its gradient and two moments, and writes all but the gradient. It computes so little that only
// fewer bytes make it faster, and moments can be stored in fewer. The variants, in the order in which one finds them:
//   1. fp32             28 bytes an element, one thread each: four fifths of a copy, with 8 bytes of state
//   2. 8 bits, search   codes of a table of 256 levels; encoding searches the table in shared memory
//   3. 8 bits, formula  levels that a formula gives, so that nothing is looked up
//   4. 8 bits, vectors  the same; four elements a thread, read and written at once
//   5. 8 bits, TMA; 6. 4 bits, TMA      the same; copies to shared memory run ahead of the arithmetic
// Each variant is checked before it is timed: after ten steps, weights, codes and scales must have the bits of the
// plain C version. One that has not is not timed, and the program ends with status 1.
// Columns: bytes moved and bytes of state an element; the median time; bytes over time as a share of the rate of a
// device-to-device copy in the same run; and what the format costs: the distance between the weights and those of AdamW
// in double after ten steps, over the distance that the weights went.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <vector>

#define BOTH __host__ __device__ __forceinline__
#define CHECK(call) cuda_check(call, #call, __LINE__)

static void cuda_check(cudaError_t error, const char* call, int line) {
    if (error == cudaSuccess) return;
    fprintf(stderr, "adam.cu:%d: %s: %s\n", line, call, cudaGetErrorString(error));
    exit(1);
}

// ---- The update of one element

constexpr double LR = 1e-3, BETA1 = 0.9, BETA2 = 0.95, EPS = 1e-8, DECAY = 0.1;

// Two factors change from step to step. The host folds the two bias corrections into them.
struct Hyper {
    float step_size, root_factor;
};

static Hyper hyper_of(int step) {
    return {(float)(LR / (1.0 - pow(BETA1, step))), (float)(1.0 / sqrt(1.0 - pow(BETA2, step)))};
}

// Host and device must give the same bits. Both round divisions and square roots alike, but a compiler may fuse a
// product with the sum behind it, and the two compilers would choose differently. So each such pair is a call of fmaf,
// here and below.
BOTH void adamw(const Hyper& hyper, float* weight, float g, float* m, float* v) {
    *m = fmaf((float)BETA1, *m, (float)(1.0 - BETA1) * g);
    *v = fmaf((float)BETA2, *v, (float)(1.0 - BETA2) * g * g);
    const float quotient = *m / fmaf(sqrtf(*v), hyper.root_factor, (float)EPS);
    *weight = fmaf(-hyper.step_size, quotient, (float)(1.0 - LR * DECAY) * *weight);
}

// The textbook's formula in double, which errors are measured against.
static void adamw_double(int step, double* weight, double g, double* m, double* v) {
    *m = BETA1 * *m + (1.0 - BETA1) * g;
    *v = BETA2 * *v + (1.0 - BETA2) * g * g;
    const double m_hat = *m / (1.0 - pow(BETA1, step)), v_hat = *v / (1.0 - pow(BETA2, step));
    *weight -= LR * (m_hat / (sqrt(v_hat) + EPS) + DECAY * *weight);
}

// ---- Storage

constexpr int BLOCK = 32;   // elements that share a scale: the largest magnitude among them
constexpr int TILE = 2048;  // elements that TMA moves at once; n is rounded up to whole tiles, so no kernel has a rest

// n elements. m and v are floats, or codes of 8 or 4 bits with a scale for each block; zero bytes are moments of zero.
struct Arrays {
    int64_t n;
    float *grads, *weights;      // (n)
    void *m, *v;                 // (n) codes
    float *m_scales, *v_scales;  // (n / BLOCK)
};

// Variant 2's levels are bitsandbytes': seven decades below 1, each with twice as many levels as the one below. A
// moment may be far smaller than its block's largest, and these levels reach down to 3e-7 of it.
struct Levels {
    float m[256], v[256];  // ascending
};

// Fills in the levels above zero of a map whose lowest decade has n levels.
static void fill_levels(float* level, int n) {
    double power = 1e-6;
    for (int decade = 0; decade < 7; decade++, n *= 2, power *= 10.0)
        for (int j = 0; j < n; j++) *level++ = (float)(power * (0.1 + 0.9 * (j + 0.5) / n));
    *level = 1.0f;
}

static Levels make_levels() {
    Levels levels = {};
    fill_levels(levels.v + 1, 2);
    fill_levels(levels.m + 128, 1);
    for (int k = 1; k <= 127; k++) levels.m[127 - k] = -levels.m[127 + k];
    return levels;
}
static const Levels LEVELS = make_levels();

// Returns the code of the level nearest to y: eight look-ups, each of which waits for the one before.
BOTH int level_search(const float* level, float y) {
    int code = 0;
    for (int step = 128; step > 0; step /= 2) code += y >= level[code + step] ? step : 0;
    return code < 255 && y - level[code] >= level[code + 1] - y ? code + 1 : code;
}

// A v above zero must never decode to zero, since the update would be m / eps.
struct Search {
    static constexpr int BITS = 8;
    const Levels* levels;

    BOTH float decode_m(int code, float scale) const { return levels->m[code] * scale; }
    BOTH float decode_v(int code, float scale) const { return levels->v[code] * scale; }
    BOTH int encode_m(float m, float scale) const { return level_search(levels->m, m / fmaxf(scale, FLT_MIN)); }
    BOTH int encode_v(float v, float scale) const { return max(1, level_search(levels->v, v / fmaxf(scale, FLT_MIN))); }
};

// The levels of variants 3 to 6 are FlashOptim's (arXiv 2602.23349). With y a moment over its block's largest,
//     m:  z = 2 y / (1 + |y|)  in steps of 1 / MOST from -1 to 1;  y = z / (2 - |z|)
//     v:  the root of y in steps of 1 / COUNT, without zero
// Both have finer steps near zero, but not as fine as a table's decades: so a block is short.
template <int BITS_>
struct Formula {
    static constexpr int BITS = BITS_, COUNT = 1 << BITS, MOST = COUNT / 2 - 1;
    const Levels* none;

    BOTH float decode_m(int code, float scale) const {
        const int k = code - MOST;
        return scale * (float)k / (float)(2 * MOST - abs(k));
    }
    BOTH float decode_v(int code, float scale) const {
        const float root = (float)(code + 1) * (1.0f / COUNT);
        return root * root * scale;
    }
    BOTH int encode_m(float m, float scale) const {
        return MOST + (int)rintf((float)(2 * MOST) * m / fmaxf(scale + fabsf(m), FLT_MIN));
    }
    BOTH int encode_v(float v, float scale) const {
        return max(0, (int)rintf((float)COUNT * sqrtf(v / fmaxf(scale, FLT_MIN))) - 1);
    }
};

// ---- Plain C: what every kernel has to equal

static void fp32_plain(const Arrays& a, const Hyper& hyper) {
    for (int64_t i = 0; i < a.n; i++) adamw(hyper, &a.weights[i], a.grads[i], (float*)a.m + i, (float*)a.v + i);
}

// Codes of 4 bits lie two in a byte, the even one in the lower bits.
template <class Codes>
static void codes_plain(const Arrays& a, const Hyper& hyper) {
    constexpr int BITS = Codes::BITS, MASK = (1 << BITS) - 1, BYTES = BLOCK * BITS / 8;
    const Codes codes{&LEVELS};
    for (int64_t block = 0; block < a.n / BLOCK; block++) {
        uint8_t *m_codes = (uint8_t*)a.m + block * BYTES, *v_codes = (uint8_t*)a.v + block * BYTES;
        float m[BLOCK], v[BLOCK], m_max = 0.0f, v_max = 0.0f;
        for (int i = 0; i < BLOCK; i++) {
            m[i] = codes.decode_m(m_codes[i * BITS / 8] >> i * BITS % 8 & MASK, a.m_scales[block]);
            v[i] = codes.decode_v(v_codes[i * BITS / 8] >> i * BITS % 8 & MASK, a.v_scales[block]);
            adamw(hyper, &a.weights[block * BLOCK + i], a.grads[block * BLOCK + i], &m[i], &v[i]);
            m_max = fmaxf(m_max, fabsf(m[i])), v_max = fmaxf(v_max, v[i]);
        }
        memset(m_codes, 0, BYTES), memset(v_codes, 0, BYTES);
        for (int i = 0; i < BLOCK; i++) {
            m_codes[i * BITS / 8] |= (uint8_t)(codes.encode_m(m[i], m_max) << i * BITS % 8);
            v_codes[i * BITS / 8] |= (uint8_t)(codes.encode_v(v[i], v_max) << i * BITS % 8);
        }
        a.m_scales[block] = m_max, a.v_scales[block] = v_max;
    }
}

// ---- 1. fp32. One thread an element is enough: neighbouring threads read neighbouring floats, and a multiprocessor
// has enough threads to keep memory busy while each waits for what it reads.

constexpr int THREADS = 256;  // of a thread block, in all kernels

// grid: n / THREADS
__global__ void __launch_bounds__(THREADS) fp32_kernel(Arrays a, Hyper hyper, Levels) {
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    adamw(hyper, &a.weights[i], a.grads[i], (float*)a.m + i, (float*)a.v + i);
}

// ---- 2. and 3. 8 bits, one thread an element. A warp has a block of elements, so the largest magnitude takes five
// shuffles; a maximum does not round, so the order does not matter. With Search, a thread block copies the table once
// and serves many elements; the levels that 32 lanes look up often lie in the same bank. With Formula, the table goes,
// and the rest of the kernel is the same.

// Returns the largest x of each group of LANES neighbouring lanes.
template <int LANES>
__device__ __forceinline__ float group_max(float x) {
    for (int lane = 1; lane < LANES; lane *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lane));
    return x;
}

// grid: any
template <class Codes>
__global__ void __launch_bounds__(THREADS) codes_kernel(Arrays a, Hyper hyper, const __grid_constant__ Levels given) {
    __shared__ Levels levels;  // not there in the kernel of Formula, which does not read it
    if (std::is_same_v<Codes, Search>) {
        static_assert(THREADS == 256, "each thread copies a level");
        levels.m[threadIdx.x] = given.m[threadIdx.x], levels.v[threadIdx.x] = given.v[threadIdx.x];
        __syncthreads();
    }
    const Codes codes{&levels};
    uint8_t *m_codes = (uint8_t*)a.m, *v_codes = (uint8_t*)a.v;
    const int64_t first = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    for (int64_t i = first; i < a.n; i += (int64_t)gridDim.x * THREADS) {
        const int64_t block = i / BLOCK;
        float m = codes.decode_m(m_codes[i], a.m_scales[block]), v = codes.decode_v(v_codes[i], a.v_scales[block]);
        adamw(hyper, &a.weights[i], a.grads[i], &m, &v);
        const float m_max = group_max<BLOCK>(fabsf(m)), v_max = group_max<BLOCK>(v);
        m_codes[i] = (uint8_t)codes.encode_m(m, m_max), v_codes[i] = (uint8_t)codes.encode_v(v, v_max);
        if (i % BLOCK == 0) a.m_scales[block] = m_max, a.v_scales[block] = v_max;
    }
}

// ---- 4. Four elements a thread. A warp that reads one byte a lane asks for 32 bytes, a quarter of a line, and needs
// as many instructions for it as for a whole one. Now a lane reads 16 bytes of weights and of gradients, and four codes
// as one word. A block is eight lanes, and the largest magnitude takes three shuffles.

constexpr int PACK = 4;
template <int BITS>
using Word = std::conditional_t<BITS == 8, uint32_t, uint16_t>;  // PACK codes

template <class Codes>
__device__ __forceinline__ void update_pack(const Arrays& a, const Hyper& hyper, int64_t pack) {
    constexpr int BITS = Codes::BITS, MASK = (1 << BITS) - 1;
    const Codes codes{nullptr};
    Word<BITS>*m_word = (Word<BITS>*)a.m + pack, *v_word = (Word<BITS>*)a.v + pack;
    float *m_scale = &a.m_scales[pack * PACK / BLOCK], *v_scale = &a.v_scales[pack * PACK / BLOCK];
    alignas(16) float weights[PACK], grads[PACK];
    *(float4*)weights = ((const float4*)a.weights)[pack], *(float4*)grads = ((const float4*)a.grads)[pack];
    float m[PACK], v[PACK], m_max = 0.0f, v_max = 0.0f;
    uint32_t m_codes = *m_word, v_codes = *v_word;
    for (int i = 0; i < PACK; i++) {
        m[i] = codes.decode_m((int)(m_codes >> i * BITS & MASK), *m_scale);
        v[i] = codes.decode_v((int)(v_codes >> i * BITS & MASK), *v_scale);
        adamw(hyper, &weights[i], grads[i], &m[i], &v[i]);
        m_max = fmaxf(m_max, fabsf(m[i])), v_max = fmaxf(v_max, v[i]);
    }
    m_max = group_max<BLOCK / PACK>(m_max), v_max = group_max<BLOCK / PACK>(v_max);
    m_codes = v_codes = 0;
    for (int i = 0; i < PACK; i++) {
        m_codes |= (uint32_t)codes.encode_m(m[i], m_max) << i * BITS;
        v_codes |= (uint32_t)codes.encode_v(v[i], v_max) << i * BITS;
    }
    ((float4*)a.weights)[pack] = *(float4*)weights;
    *m_word = (Word<BITS>)m_codes, *v_word = (Word<BITS>)v_codes;
    *m_scale = m_max, *v_scale = v_max;  // the same numbers from eight lanes
}

// grid: n / (THREADS * PACK)
template <class Codes>
__global__ void __launch_bounds__(THREADS) vector_kernel(Arrays a, Hyper hyper, Levels) {
    update_pack<Codes>(a, hyper, (int64_t)blockIdx.x * THREADS + threadIdx.x);
}

// ---- 5. and 6. TMA. So far a thread waits for its loads, computes, and ends, and memory idles where too many threads
// compute at once. From Hopper on, one thread can order copies of whole runs between memory and shared memory and go
// on. A thread block has STAGES tiles in shared memory: while it updates one in place, the next is on its way in, and
// the one before on its way out. Alone this loses, since all threads wait at a barrier for each tile: the groups of
// optim/persistent.cuh have stages of their own, and warps that issue their copies.

constexpr int STAGES = 3;

template <int BITS>
struct alignas(128) Stage {
    float grads[TILE], weights[TILE];
    Word<BITS> m[TILE / PACK], v[TILE / PACK];
    float m_scales[TILE / BLOCK], v_scales[TILE / BLOCK];
};

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

// A barrier in shared memory: the thread that orders copies says how many bytes will come, and each copy counts its
// bytes off. Those who wait pass when all have come; a parity tells one round of the barrier from the next.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
    for (uint32_t done = 0; !done;)
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                     : "=r"(done)
                     : "r"(barrier), "r"(parity)
                     : "memory");
}

// Copy an array of a stage from and to its place in memory.
template <class T>
__device__ __forceinline__ void load(T* to, const void* from, int64_t tile, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"((const T*)from + tile), "n"(sizeof(T)), "r"(barrier)
                 : "memory");
}
template <class T>
__device__ __forceinline__ void store(void* to, const T* from, int64_t tile) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"((T*)to + tile),
                 "r"(shared_address(from)), "n"(sizeof(T))
                 : "memory");
}

template <int BITS>
__device__ __forceinline__ void tile_load(const Arrays& a, Stage<BITS>* stage, int64_t tile, uint32_t barrier) {
    barrier_expect(barrier, sizeof(Stage<BITS>));
    load(&stage->weights, a.weights, tile, barrier), load(&stage->grads, a.grads, tile, barrier);
    load(&stage->m, a.m, tile, barrier), load(&stage->m_scales, a.m_scales, tile, barrier);
    load(&stage->v, a.v, tile, barrier), load(&stage->v_scales, a.v_scales, tile, barrier);
}

template <int BITS>
__device__ __forceinline__ void tile_store(const Arrays& a, const Stage<BITS>* stage, int64_t tile) {
    store(a.weights, &stage->weights, tile);
    store(a.m, &stage->m, tile), store(a.m_scales, &stage->m_scales, tile);
    store(a.v, &stage->v, tile), store(a.v_scales, &stage->v_scales, tile);
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// grid: as many thread blocks as fit; shared memory: STAGES stages
template <class Codes>
__global__ void __launch_bounds__(THREADS) tma_kernel(Arrays a, Hyper hyper, Levels) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ uint64_t barriers[STAGES];
    Stage<Codes::BITS>* stages = (Stage<Codes::BITS>*)memory;
    const int64_t tiles = a.n / TILE, turn = gridDim.x;
    const uint32_t full = shared_address(barriers);
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++)
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(full + 8 * s) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        for (int s = 0; s < STAGES - 1; s++)
            if (blockIdx.x + s * turn < tiles) tile_load(a, &stages[s], blockIdx.x + s * turn, full + 8 * s);
    }
    __syncthreads();
    int s = 0, before = STAGES - 1;
    uint32_t parity = 0;
    for (int64_t tile = blockIdx.x; tile < tiles; tile += turn) {
        Stage<Codes::BITS>* stage = &stages[s];
        const Arrays here = {TILE, stage->grads, stage->weights, stage->m, stage->v, stage->m_scales, stage->v_scales};
        barrier_wait(full + 8 * s, parity);
        for (int pack = threadIdx.x; pack < TILE / PACK; pack += THREADS) update_pack<Codes>(here, hyper, pack);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the copies see what threads wrote
        __syncthreads();
        if (threadIdx.x == 0) {
            tile_store(a, stage, tile);
            // All stores but the last have read their stage, so the stage before may be filled again.
            asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
            const int64_t next = tile + (STAGES - 1) * turn;
            if (next < tiles) tile_load(a, &stages[before], next, full + 8 * before);
        }
        before = s;
        if (++s == STAGES) s = 0, parity ^= 1;
    }
    if (threadIdx.x == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
}

// ---- The table of variants, and what is done with each. A new one is one row.

struct Variant {
    const char* name;
    int bits;  // of a moment
    void (*kernel)(Arrays, Hyper, Levels);
    void (*plain)(const Arrays&, const Hyper&);
    int elements;      // of a thread block; 0: as many thread blocks as fit share all elements
    int shared_bytes;  // for stages of TMA
};

static const Variant VARIANTS[] = {
    {"fp32", 32, fp32_kernel, fp32_plain, THREADS, 0},
    {"8 bits, search", 8, codes_kernel<Search>, codes_plain<Search>, 0, 0},
    {"8 bits, formula", 8, codes_kernel<Formula<8>>, codes_plain<Formula<8>>, THREADS, 0},
    {"8 bits, vectors", 8, vector_kernel<Formula<8>>, codes_plain<Formula<8>>, PACK* THREADS, 0},
    {"8 bits, TMA", 8, tma_kernel<Formula<8>>, codes_plain<Formula<8>>, 0, STAGES * sizeof(Stage<8>)},
    {"4 bits, TMA", 4, tma_kernel<Formula<4>>, codes_plain<Formula<4>>, 0, STAGES * sizeof(Stage<4>)},
};

// Returns the number of thread blocks that take n elements.
static unsigned grid_of(const Variant& v, int64_t n) {
    int processors, fit = 0;
    CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0));
    CHECK(cudaFuncSetAttribute(v.kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, v.shared_bytes));
    CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fit, v.kernel, THREADS, v.shared_bytes));
    return (unsigned)(v.elements ? n / v.elements : fit * processors);
}

// Random gradients, new in each step, of sizes 1 to 1/16 within a block; some blocks have none, like rare tokens' rows.
__global__ void fill_kernel(float* values, uint64_t step) {
    const int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    uint64_t z = ((uint64_t)i << 8 | step) * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    const float uniform = (float)(z >> 40) / 16777216.0f, size = 1.0f / (float)(1 << i * 11 % 5);
    values[i] = i / BLOCK % 64 == 5 ? 0.0f : (uniform - 0.3f) * size;
}

// Returns n elements' arrays in one allocation on the device or on the host.
static Arrays arrays_of(int64_t n, char* memory) {
    float* at = (float*)memory;
    return {n, at, at + n, at + 2 * n, at + 3 * n, at + 4 * n, at + 4 * n + n / BLOCK};
}

// Takes ten steps of a variant, of plain C and of AdamW in double. Returns false if the variant is wrong; *error is
// what its format costs.
static bool is_right(const Variant& variant, char* memory, double* error) {
    const int64_t n = 64 * TILE, bytes = 16 * n + 8 * (n / BLOCK);
    const Arrays device = arrays_of(n, memory);
    std::vector<char> plain(bytes), got(bytes);
    const Arrays host = arrays_of(n, plain.data());
    CHECK(cudaMemset(memory, 0, bytes));
    fill_kernel<<<(unsigned)(n / THREADS), THREADS>>>(device.weights, 0);
    CHECK(cudaMemcpy(host.weights, device.weights, n * 4, cudaMemcpyDeviceToHost));
    const std::vector<float> first(host.weights, host.weights + n);
    std::vector<double> weights(first.begin(), first.end()), m(n), v(n);
    for (int step = 1; step <= 10; step++) {
        fill_kernel<<<(unsigned)(n / THREADS), THREADS>>>(device.grads, step);
        CHECK(cudaMemcpy(host.grads, device.grads, n * 4, cudaMemcpyDeviceToHost));
        variant.kernel<<<grid_of(variant, n), THREADS, variant.shared_bytes>>>(device, hyper_of(step), LEVELS);
        CHECK(cudaGetLastError());
        variant.plain(host, hyper_of(step));
        for (int64_t i = 0; i < n; i++) adamw_double(step, &weights[i], host.grads[i], &m[i], &v[i]);
    }
    CHECK(cudaMemcpy(got.data(), memory, bytes, cudaMemcpyDeviceToHost));
    double apart = 0.0, way = 0.0;
    for (int64_t i = 0; i < n; i++)
        apart += pow(host.weights[i] - weights[i], 2.0), way += pow(weights[i] - first[i], 2.0);
    *error = sqrt(apart / way);
    return memcmp(got.data(), plain.data(), bytes) == 0;
}

// Returns the median of 15 runs in milliseconds, after three for warm-up.
template <class Run>
static double median_ms(Run run) {
    cudaEvent_t begin, end;
    float ms[18];
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    for (int i = 0; i < 18; i++) {
        CHECK(cudaEventRecord(begin));
        run();
        CHECK(cudaEventRecord(end));
        CHECK(cudaEventSynchronize(end));
        CHECK(cudaEventElapsedTime(&ms[i], begin, end));
    }
    std::sort(ms + 3, ms + 18);
    return ms[3 + 7];
}

int main(int argc, char** argv) {
    char *end = nullptr, *memory;
    int64_t n = argc > 1 ? strtoll(argv[1], &end, 10) : 1ll << 28;
    if (argc > 2 || (end && *end) || n < 1 || n > 1ll << 38) {
        fprintf(stderr, "adam: type ./adam [ELEMENTS], with a number from 1 to 2^38\n");
        return 2;
    }
    cudaDeviceProp card;
    if (cudaGetDeviceProperties(&card, 0) != cudaSuccess) {
        fprintf(stderr, "adam: no GPU was found; run it on a machine with an NVIDIA GPU and its driver\n");
        return 2;
    }
    n = std::max<int64_t>((n + TILE - 1) / TILE, 64) * TILE;
    const int64_t bytes = 16 * n + 8 * (n / BLOCK);
    if (cudaMalloc(&memory, bytes) != cudaSuccess) {
        fprintf(stderr, "adam: %lld elements do not fit in the GPU's memory; type fewer\n", (long long)n);
        return 2;
    }
    const auto copy = [&] { CHECK(cudaMemcpyAsync(memory, memory + 8 * n, 8 * n, cudaMemcpyDeviceToDevice)); };
    const double rate = 16.0 * (double)n / median_ms(copy);  // bytes read and written in a millisecond
    printf("%s, %lld elements; a copy moves %.0f GB/s\n", card.name, (long long)n, rate * 1e-6);
    printf("%-18s %8s %8s %10s %8s %9s\n", "", "moved", "state", "ms", "of copy", "error");
    bool right = true;
    for (const Variant& v : VARIANTS) {
        double error;
        if (v.shared_bytes > 0 && card.major < 9) {
            printf("%-18s needs an H100 or later\n", v.name);
        } else if (!is_right(v, memory, &error)) {
            printf("%-18s WRONG: its bits are not those of plain C\n", v.name);
            right = false;
        } else {
            const Arrays arrays = arrays_of(n, memory);
            CHECK(cudaMemset(memory, 0, bytes));
            fill_kernel<<<(unsigned)(n / THREADS), THREADS>>>(arrays.grads, 1);
            const unsigned grid = grid_of(v, n);
            const double ms =
                median_ms([&] { v.kernel<<<grid, THREADS, v.shared_bytes>>>(arrays, hyper_of(1), LEVELS); });
            CHECK(cudaGetLastError());
            const double state = 2.0 * (v.bits / 8.0 + (v.bits < 32 ? 4.0 / BLOCK : 0.0)), moved = 12.0 + 2.0 * state;
            printf("%-18s %8.2f %8.2f %10.4f %6.1f %% %9.1e\n", v.name, moved, state, ms,
                   100.0 * moved * (double)n / ms / rate, error);
        }
    }
    return right ? 0 : 1;
}
