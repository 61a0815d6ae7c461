// Times the classifier (softmax, cross-entropy and gradient in place) at GPT-2's vocabulary, in bf16, each variant
// against the plain C version first: GB/s of a read and a write of the logits, and their share of the copy rate of the
// same run; then between matrix products, which hold the card at its power limit and so at lower clocks, as in a
// training step.
//   make build/dev/classifier && ./build/dev/classifier
#include "../kernels/classifier.cuh"
#include "../kernels/matmul.cuh"
#include "variants.h"

constexpr int V = 50257, Vp = 50304;

struct Arrays : Room {
    Shape shape;
    int64_t N = shape.N;
    float* losses;
    bf16* logits;
    int* targets;

    Arrays(const Device* on, const Shape& of) : Room(on), shape(of) {
        int* own = host<int>(N);
        for (int64_t i = 0; i < N; i++) own[i] = (int)(i * 7919 % V);
        losses = device<float>(N), logits = filled(this, N * Vp, 8.0f, 1), targets = to_device(own, N);
    }
    double unit() const { return (double)N * Vp * sizeof(bf16); }
};

// A block a row, the row read twice: the second time from L2, as far as it is still there.
static void run_two_reads(const Device* dev, const Arrays* a) {
    classifier_kernel<<<a->N, CLASSIFIER_THREADS, 0, dev->stream>>>(a->losses, a->logits, a->targets, 1e-3f, true, V,
                                                                    Vp, Fp8Codes{});
    check_launch();
}

// The row in shared memory as in production, but its exponentials are computed in both passes, each vector's relative
// to the thread's own maximum, and lanes are taken one by one.
__device__ inline void twice_take(ClassifierSum* own, const bf16* row, int begin, int end) {
    for (int v = begin + threadIdx.x * 8; v < end && v < V; v += CLASSIFIER_RESIDENT_THREADS * 8) {
        Vec<bf16> vec = load_vec(row + v);
        float x[8], top = own->maximum;
        for (int j = 0; j < 8; j++) x[j] = v + j < V ? to_float(vec.lane[j]) : -INFINITY;
        for (int j = 0; j < 8; j++) top = fmaxf(top, x[j]);
        float offset = classifier_offset(top);
        own->sum *= fast_exp2(classifier_offset(own->maximum) - offset);
        own->maximum = top;
        for (int j = 0; j < 8; j++) own->sum += fast_exp2(fmaf(x[j], LOG2_OF_E, -offset));
    }
}

__device__ inline void twice_give(bf16* row, int begin, int end, float offset, float scale, float dloss, int target) {
    for (int v = begin + threadIdx.x * 8; v < end; v += CLASSIFIER_RESIDENT_THREADS * 8) {
        Vec<bf16> vec = load_vec(row + v);
        float d[8];
        for (int j = 0; j < 8; j++) d[j] = fast_exp2(fmaf(to_float(vec.lane[j]), LOG2_OF_E, -offset)) * scale;
        for (int j = 0; j < 8; j++) d[j] = v + j >= V ? 0.0f : v + j == target ? d[j] - dloss : d[j];
        store_vec(row + v, round_vec<bf16>(d));
    }
}

// As classifier_resident_kernel.
__global__ static void __launch_bounds__(CLASSIFIER_RESIDENT_THREADS + 32, 2)
    twice_kernel(float* losses, bf16* logits, const int* targets, float dloss, int64_t N) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ __align__(128) unsigned char twice_shared[];
    __shared__ ClassifierSum parts[32];
    bf16* row = (bf16*)twice_shared;
    uint32_t barriers = shared_offset(twice_shared + Vp * sizeof(bf16)), done = barriers + CLASSIFIER_CHUNKS * 8;
    uint32_t parity = 0;
    const int chunks = (Vp + CLASSIFIER_CHUNK - 1) / CLASSIFIER_CHUNK;
    if (threadIdx.x == 0) {
        for (int q = 0; q < chunks; q++) {
            barrier_init(barriers + q * 8, 1);
            barrier_init(done + q * 8, CLASSIFIER_RESIDENT_THREADS);
        }
        barrier_init_done();
    }
    __syncthreads();
    if (threadIdx.x >= CLASSIFIER_RESIDENT_THREADS) {
        if (threadIdx.x == CLASSIFIER_RESIDENT_THREADS) classifier_order(row, barriers, done, logits, true, N, Vp);
        return;
    }
    for (int64_t i = blockIdx.x; i < N; i += gridDim.x, parity ^= 1) {
        ClassifierSum own = {CLASSIFIER_LOWEST, 0.0f};
        for (int q = 0; q < chunks; q++) {
            barrier_wait(barriers + q * 8, parity);
            twice_take(&own, row, q * CLASSIFIER_CHUNK, q + 1 < chunks ? (q + 1) * CLASSIFIER_CHUNK : Vp);
        }
        float target_logit = to_float(row[targets[i]]), top = warp_max(own.maximum);
        own.sum *= fast_exp2(classifier_offset(own.maximum) - classifier_offset(top));
        own = classifier_block_sum({top, own.sum}, parts);
        float offset = classifier_offset(own.maximum);
        if (threadIdx.x == 0) losses[i] = logf(own.sum) + offset * 0.693147180559945309f - target_logit;
        for (int q = 0; q < chunks; q++) {
            int begin = q * CLASSIFIER_CHUNK, end = q + 1 < chunks ? begin + CLASSIFIER_CHUNK : Vp;
            twice_give(row, begin, end, offset, dloss / own.sum, dloss, targets[i]);
            fence_async();
            barrier_arrive(done + q * 8);
        }
    }
#else
    (void)losses, (void)logits, (void)targets, (void)dloss, (void)N;
#endif
}

static void run_twice(const Device* dev, const Arrays* a) {
    if (!classifier_resident_fits(dev, Vp)) return run_two_reads(dev, a);
    int bytes = classifier_resident_bytes(Vp), blocks = 2 * dev->sm_count;
    check(cudaFuncSetAttribute(twice_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    twice_kernel<<<blocks, CLASSIFIER_RESIDENT_THREADS + 32, bytes, dev->stream>>>(a->losses, a->logits, a->targets,
                                                                                   1e-3f, a->N);
    check_launch();
}

static void run_prod(const Device* dev, const Arrays* a) {
    classifier<bf16>(dev, a->losses, a->logits, a->targets, 1e-3f, true, a->N, V, Vp);
}

// Losses alone read the logits once and write nothing.
static void run_losses(const Device* dev, const Arrays* a) {
    classifier<bf16>(dev, a->losses, a->logits, a->targets, 1e-3f, false, a->N, V, Vp);
}

// Losses alone leave the logits as they are.
static double error_of(const Variant<Arrays>* v, Arrays* a) {
    float *want = host_floats(a, a->logits, a->N * Vp), *want_loss = a->host<float>(a->N);
    classifier_cpu(want_loss, want, a->to_host(a->targets, a->N), 1e-3f, v->run != run_losses, a->N, V, Vp);
    v->run(a->dev, a);
    const float *got = host_floats(a, a->logits, a->N * Vp), *losses = a->to_host(a->losses, a->N);
    double error = 0.0;
    for (int64_t i = 0; i < a->N * Vp; i++)
        error = worst(error, fabs(got[i] - want[i]) / (fabs(want[i]) / 256 + 1e-10));
    for (int64_t i = 0; i < a->N; i++) error = worst(error, fabs(want_loss[i] - losses[i]) / 1e-4);
    return error;
}

static const Variant<Arrays> VARIANTS[] = {{"two reads", run_two_reads, 2, error_of},
                                           {"exponentials twice", run_twice, 2, error_of},
                                           {"prod", run_prod, 2, error_of},
                                           {"prod, losses alone", run_losses, 1, error_of}};

int main() {
    Device dev;
    device_open(&dev, true, 0);
    const auto right = right_ones(&dev, VARIANTS, {{300, V, 0}});
    const Shape shape = {16384, V, 0};
    const double copy = print_copy_rate(&dev, shape.N * Vp * 2);
    time_in_turns(&dev, right, shape, copy);
    const Arrays a(&dev, shape), b(&dev, shape);
    const int n = 8192;
    bf16 *x = b.logits, *weight = x + n * n, *out = weight + n * n;
    const auto product = [&] { matmul_forward<bf16>(&dev, out, nullptr, x, weight, nullptr, n, n, n); };
    for (const auto& v : right) {
        for (int i = 0; i < 100; i++) product();
        const double ms = median_ms_after(&dev, 40, product, [&] { v.run(&dev, &a); });
        printf("%-38s between products %8.4f ms %5.1f %% of copy\n", v.name, ms,
               100 * v.work * a.unit() / (1e-3 * ms) / copy);
    }
    return right.size() < std::size(VARIANTS);
}
