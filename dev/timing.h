// Times of work on a GPU's stream, and checks of its results, for the programs in dev/.
#pragma once
#include "../kernels/common.cuh"

// Median milliseconds of `run()` on the stream, of `times` (at most 64) after two for warm-up, by CUDA events.
// `spread`: half of what lies between the first and the last tenth, as a share of the median.
template <typename Function>
double median_ms(const Device* dev, int times, Function run, double* spread = nullptr) {
    cudaEvent_t begin, end;
    check(cudaEventCreate(&begin));
    check(cudaEventCreate(&end));
    double ms[64];
    for (int i = -2; i < times; i++) {
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

// The ceiling of what only moves bytes: those read and written in a second when one array is copied to the other.
inline double copy_rate(const Device* dev, void* to, const void* from, int64_t bytes) {
    double ms =
        median_ms(dev, 10, [&] { check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, dev->stream)); });
    return 2.0 * (double)bytes / (1e-3 * ms);
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
