// Times of work on a GPU's stream, its operands, and checks of its results, for the programs in dev/.
#pragma once
#include "../kernels/matmul_plan.cuh"

// Median milliseconds of `run()` on the stream, of `times` (at most 64) after two for warm-up, by CUDA events, each
// after an untimed `before()`. `spread`: half of what lies between the first and the last tenth, as a share of the
// median.
template <typename Before, typename Function>
double median_ms_after(const Device* dev, int times, Before before, Function run, double* spread = nullptr) {
    cudaEvent_t begin, end;
    check(cudaEventCreate(&begin));
    check(cudaEventCreate(&end));
    double ms[64];
    for (int i = -2; i < times; i++) {
        before();
        check(cudaEventRecord(begin, dev->stream));
        run();
        check(cudaEventRecord(end, dev->stream));
        check(cudaEventSynchronize(end));
        float elapsed;
        check(cudaEventElapsedTime(&elapsed, begin, end));
        int at = i;
        for (; at > 0 && ms[at - 1] > elapsed; at--) ms[at] = ms[at - 1];
        if (i >= 0) ms[at] = elapsed;
    }
    check(cudaEventDestroy(begin));
    check(cudaEventDestroy(end));
    if (spread) *spread = 0.5 * (ms[times - 1 - times / 10] - ms[times / 10]) / ms[times / 2];
    return ms[times / 2];
}

template <typename Function>
double median_ms(const Device* dev, int times, Function run, double* spread = nullptr) {
    return median_ms_after(
        dev, times, [] {}, run, spread);
}

// Cycles and nanoseconds of a loop. Grid 1, block 1.
__global__ static void clock_kernel(uint64_t times[2]) {
    uint64_t begin, end;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    long long cycles = clock64();
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(end));
    while (end - begin < 50000);
    times[0] = (uint64_t)(clock64() - cycles);
    times[1] = end - begin;
}

// Megahertz at which the multiprocessors run now. Under products an H200 is at its power limit and far below its most.
inline double clock_mhz(const Device* dev) {
    uint64_t* times = (uint64_t*)device_alloc(dev, 16);
    uint64_t host[2];
    clock_kernel<<<1, 1, 0, dev->stream>>>(times);
    check_launch();
    copy_to_host(dev, host, times, sizeof(host));
    device_free(dev, times);
    return 1e3 * (double)host[0] / (double)host[1];
}

// The ceiling of what only moves bytes: those read and written in a second when one array is copied to the other.
inline double copy_rate(const Device* dev, void* to, const void* from, int64_t bytes) {
    double ms =
        median_ms(dev, 10, [&] { check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, dev->stream)); });
    return 2.0 * (double)bytes / (1e-3 * ms);
}

// n values on the device, uniform in [-scale, scale); device_free gives them back.
inline bf16* filled(const Device* dev, int64_t n, float scale, uint32_t seed) {
    bf16* values = (bf16*)device_alloc(dev, n * 2);
    matmul_fill(dev, values, n, scale, seed);
    return values;
}

// The copy rate of arrays of so many bytes, told with the GPU's name.
inline double print_copy_rate(const Device* dev, int64_t bytes) {
    bf16 *from = filled(dev, bytes / 2, 1.0f, 1), *to = filled(dev, bytes / 2, 1.0f, 2);
    double rate = copy_rate(dev, to, from, bytes);
    device_free(dev, from), device_free(dev, to);
    printf("%s: copy %.0f GB/s\n", dev->name, rate * 1e-9);
    return rate;
}

// What device memory holds, as floats; the caller frees them.
inline float* host_floats(const Device* dev, const bf16* device, int64_t n) {
    bf16* bits = (bf16*)malloc(n * 2);
    float* values = (float*)malloc(n * 4);
    copy_to_host(dev, bits, device, n * 2);
    for (int64_t i = 0; i < n; i++) values[i] = __bfloat162float(bits[i]);
    free(bits);
    return values;
}

// ||got - want|| / ||want||
inline double relative_error(const float* got, const float* want, int64_t n) {
    double error = 0.0, norm = 0.0;
    for (int64_t i = 0; i < n; i++) {
        error += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
        norm += (double)want[i] * want[i];
    }
    return sqrt(error / norm);
}
