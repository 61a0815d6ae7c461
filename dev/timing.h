// Times of work on a GPU's stream, its operands, and checks of its results, for the programs in dev/.
#pragma once
#include "../kernels/matmul_plan.cuh"
#include "room.h"

// Up to 64 times in order.
struct Times {
    double ms[64];
    int count = 0;

    void add(double now) {
        int at = count++;
        for (; at > 0 && ms[at - 1] > now; at--) ms[at] = ms[at - 1];
        ms[at] = now;
    }
    double median() const { return ms[count / 2]; }
    // Half of what lies between the first and the last tenth, as a share of the median.
    double spread() const { return 0.5 * (ms[count - 1 - count / 10] - ms[count / 10]) / median(); }
};

// Milliseconds of `run()` on the stream, by CUDA events.
template <typename Function>
double elapsed_ms(const Device* dev, Function run) {
    cudaEvent_t begin, end;
    float ms;
    check(cudaEventCreate(&begin));
    check(cudaEventCreate(&end));
    check(cudaEventRecord(begin, dev->stream));
    run();
    check(cudaEventRecord(end, dev->stream));
    check(cudaEventSynchronize(end));
    check(cudaEventElapsedTime(&ms, begin, end));
    check(cudaEventDestroy(begin));
    check(cudaEventDestroy(end));
    return ms;
}

// The median of `times` runs after two for warm-up, each after an untimed `before()`.
template <typename Before, typename Function>
double median_ms_after(const Device* dev, int times, Before before, Function run, double* spread = nullptr) {
    Times measured;
    for (int i = -2; i < times; i++) {
        before();
        const double ms = elapsed_ms(dev, run);
        if (i >= 0) measured.add(ms);
    }
    if (spread) *spread = measured.spread();
    return measured.median();
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
    Room room(dev);
    uint64_t* times = room.device<uint64_t>(2);
    clock_kernel<<<1, 1, 0, dev->stream>>>(times);
    check_launch();
    const uint64_t* host = room.to_host(times, 2);
    return 1e3 * (double)host[0] / (double)host[1];
}

// The ceiling of what only moves bytes: those read and written in a second when one array is copied to the other.
inline double copy_rate(const Device* dev, void* to, const void* from, int64_t bytes) {
    double ms =
        median_ms(dev, 10, [&] { check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, dev->stream)); });
    return 2.0 * (double)bytes / (1e-3 * ms);
}

// Uniform values in [-scale, scale). Grid ceil(n / 256), block 256.
__global__ static void fill_kernel(bf16* to, int64_t n, float scale, uint32_t seed) {
    const int64_t i = blockIdx.x * 256ll + threadIdx.x;
    if (i >= n) return;
    uint64_t z = ((uint64_t)seed << 40 | (uint64_t)(i + 1)) * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    to[i] = __float2bfloat16(scale * ((float)(z >> 40) / 8388608.0f - 1.0f));
}

// n values on the device, uniform in [-scale, scale).
inline bf16* filled(Room* room, int64_t n, float scale, uint32_t seed) {
    bf16* values = room->device<bf16>(n);
    launch_kernel(room->dev, fill_kernel, (unsigned)ceil_div(n, 256), 256, 0, values, n, scale, seed);
    return values;
}

// The copy rate of arrays of so many bytes, told with the GPU's name.
inline double print_copy_rate(const Device* dev, int64_t bytes) {
    Room room(dev);
    const double rate = copy_rate(dev, filled(&room, bytes / 2, 1.0f, 2), filled(&room, bytes / 2, 1.0f, 1), bytes);
    printf("%s: copy %.0f GB/s\n", dev->name, rate * 1e-9);
    return rate;
}
// Returns the values in device memory as floats.
template <class T>
float* host_floats(Room* room, const T* device, int64_t n) {
    const T* bits = room->to_host(device, n);
    float* values = room->host<float>(n);
    for (int64_t i = 0; i < n; i++) values[i] = (float)bits[i];
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
