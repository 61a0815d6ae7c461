// Unit tests of kernels/classifier.cuh and of the mean of its losses: the kernels against double (kernels.h says how).
#include "../../kernels/classifier.cuh"
#include "kernels.h"

namespace {

double cross_entropy_double(const double* logits, int target, int V) {
    double maximum = logits[0], sum = 0.0;
    for (int v = 0; v < V; v++) maximum = fmax(maximum, logits[v]);
    for (int v = 0; v < V; v++) sum += exp(logits[v] - maximum);
    return log(sum) - (logits[target] - maximum);
}

// Against double: a sum of 50257 terms in fp32 is no oracle. Beyond
// this many rows they come again, with other targets: a number prime to the 264 blocks of an H200, so that no block has
// the same row twice in a row.
constexpr int DISTINCT_ROWS = 37;

// Logit v of row i.
using Logit = float (*)(int64_t i, int v, int V);

float even_logit(int64_t i, int v, int V) {
    return 8.0f * test_uniform(1, i * V + v);
}

// Rows whose maxima lie far from the rest, or grow along the row, or where most exponentials are 0.
float wide_logit(int64_t i, int v, int V) {
    float value = test_uniform(2, i * V + v);
    switch (i % 6) {
        case 0:
            return 1000.0f * value;
        case 1:
            return v == V - 1 ? 500.0f : 8.0f * value;
        case 2:
            return v % 3 == 1 ? -INFINITY : 8.0f * value;
        case 3:
            return 200.0f * (float)v / (float)V - 100.0f + value;
        case 4:
            return 8.0f * value - 5000.0f;
        default:
            return 1.0f;
    }
}

template <typename X>
void classifier_case(Test* test, double* worst, const Device* dev, int64_t N, int V, int Vp, Logit logit = even_logit) {
    const float dloss = 1.0f / 64;
    const int64_t distinct = N < DISTINCT_ROWS ? N : DISTINCT_ROWS;
    Room room(dev);
    float* values = room.host<float>(N * Vp);
    double *row = room.host<double>(2 * V), *softmax = row + V;
    int* targets = room.host<int>(N);
    for (int64_t i = 0; i < distinct * Vp; i++)  // what the padding holds is never used
        values[i] = i % Vp < V ? logit(i / Vp, (int)(i % Vp), V) : NAN;
    for (int64_t i = distinct; i < N; i++) memcpy(values + i * Vp, values + i % distinct * Vp, Vp * sizeof(float));
    Array<X> logits(dev, N * Vp, values);
    Array<float> losses(dev, N);
    for (int64_t first = 0; first < distinct; first++) {
        for (int v = 0; v < V; v++) row[v] = logits.host[first * Vp + v];
        const double log_sum = cross_entropy_double(row, 0, V) + row[0];
        for (int v = 0; v < V; v++) softmax[v] = exp(row[v] - log_sum);
        for (int64_t i = first; i < N; i += distinct) {
            targets[i] = i % 3 == 0 ? V - 1 : i % 3 == 1 ? 0 : (int)(i * 7919 % V);
            if (isinf(row[targets[i]])) targets[i] = 0;
            losses.want[i] = (float)(log_sum - row[targets[i]]);
            for (int v = 0; v < Vp; v++)
                logits.want[i * Vp + v] = v < V ? (float)((softmax[v] - (v == targets[i])) * dloss) : 0.0f;
        }
    }
    const int* device_targets = room.to_device(targets, N);
    const auto run = [&](bool backward) {
        classifier(dev, losses.device, logits.device, device_targets, dloss, backward, N, V, Vp);
    };
    // e^(x - max): the argument, up to 23 in base 2, is good to fp32's epsilon, and so is each of the V / 1024 sums.
    const double bound = EPS32 * 64;
    check_outputs(test, worst, [&] { run(false); }, {{"losses", &losses, bound}});
    check_outputs(test, worst, [&] { run(true); },
                  {{"losses", &losses, bound}, {"dlogits", &logits, bound * dloss / 16}});
}

#ifdef __CUDACC__
// Rows that stay in shared memory, several a block: of two chunks, GPT-2's with and without padding, and so long that a
// multiprocessor has one block.
OPERATOR_TEST(classifier_resident_rows_gpu) {
    const int shapes[][3] = {{1100, 20000, 20032}, {1000, 50257, 50304}, {600, 50304, 50304}, {600, 100277, 100352}};
    if (!classifier_resident_fits(&dev, 50304)) skip("needs compute capability 9.0 and a build for it");
    for (auto& s : shapes) classifier_case<bf16>(test, &worst, &dev, s[0], s[1], s[2]);
    classifier_case<bf16>(test, &worst, &dev, 600, 50257, 50304, wide_logit);
    Device older = dev;
    older.compute = 80;
    classifier_case<bf16>(test, &worst, &older, 37, 50257, 50304, wide_logit);
    classifier_case<bf16>(test, &worst, &dev, 3, 150000, 150016);  // too long to stay in shared memory
}

// For `make sanitize`, whose race checker is slow: two blocks, which take five rows of three chunks in turn.
OPERATOR_TEST(classifier_race_gpu) {
    dev.sm_count = 1;
    if (!classifier_resident_fits(&dev, 30016)) skip("needs compute capability 9.0 and a build for it");
    classifier_case<bf16>(test, &worst, &dev, 5, 30000, 30016);
}
#endif

OPERATOR_BOTH(classifier) {
    const int shapes[][3] = {{1, 256, 256}, {37, 257, 384}, {1000, 256, 256}, {37, 50257, 50304}, {3, 5, 128}};
    for (auto& s : shapes) {
        in_inputs(dev, [&](auto x) { classifier_case<decltype(x)>(test, &worst, &dev, s[0], s[1], s[2]); });
    }
    for (int64_t N : {1, 37, 1000, 65536}) {
        for (bool accumulate : {false, true}) {
            Array<float> losses(&dev, N, 1, 4.0f), mean(&dev, 1, 2, 3.0f, accumulate);
            double sum = accumulate ? mean.host[0] * (double)N : 0.0;
            for (int64_t i = 0; i < N; i++) sum += losses.host[i];
            mean.want[0] = (float)(sum / N);
            const auto run = [&] { loss_mean(&dev, mean.device, losses.device, N, accumulate, 1.0f / N); };
            check_outputs(test, &worst, run, {{"mean", &mean, 64 * EPS32}});
        }
    }
}

}  // namespace
