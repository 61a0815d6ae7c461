// The tests of rules by tensor and of rules that read rows share this: a small model, and runs of it.
#pragma once
#include "rules.h"

// Rows that begin anywhere in a run of 8 elements, more than one slab and panel of rows.cuh, and vectors.
constexpr int TENSORS = 5, MODEL_MAX = 140 * 520;
inline const OptimTensor model[TENSORS] = {{"wte.weight", 37, 129, true, 0},
                                           {"h.0.ln_1.weight", 1, 300, false, 0},
                                           {"h.0.mlp.c_fc.weight", 129, 37, true, 0},
                                           {"h.0.mlp.c_proj.weight", 140, 520, true, 0},
                                           {"ln_f.weight", 1, 2500, false, 0}};

struct Kind {
    Device dev;
    OptimTensor tensor[TENSORS];
    Optim* optim;
};

// Runs steps `first` to `last` on tensors from the same start, whatever the layout. In step `bad` the factor is NaN.
inline void kind_steps(Kind* run, int first, int last, int bad = 0, int64_t begin = 0) {
    int64_t elements = 0;
    for (const OptimTensor& t : run->tensor) {
        int64_t end = t.offset + ceil_div(t.rows * t.cols, TILE_ELEMENTS) * TILE_ELEMENTS;
        elements = end > elements ? end : elements;
    }
    float *host = (float*)calloc((size_t)elements, sizeof(float)), *scale = (float*)device_alloc(&run->dev, 4);
    float* grads = (float*)device_alloc(&run->dev, elements * 4);
    for (int step = first; step <= last; step++) {
        const float factor = step == bad ? NAN : 0.5f;
        for (int t = 0; t < TENSORS; t++) {
            const int64_t n = run->tensor[t].rows * run->tensor[t].cols;
            for (int64_t i = 0; i < n; i++) host[run->tensor[t].offset + i] = gradient(step, t * 100000 + i);
        }
        copy_to_device(&run->dev, grads, host, elements * 4);
        copy_to_device(&run->dev, scale, &factor, 4);
        optim_step(run->optim, grads + begin, scale, 1e-2f, step);
    }
    device_sync(&run->dev);
    device_free(&run->dev, grads);
    device_free(&run->dev, scale);
    free(host);
}

inline void kind_open(Kind* run, const OptimConfig* config, bool gpu) {
    static float values[MODEL_MAX];
    device_open(&run->dev, gpu, 0);
    memcpy(run->tensor, model, sizeof(model));
    optim_layout(run->tensor, TENSORS, config);
    run->optim = optim_create(&run->dev, config, run->tensor, TENSORS, OPTIM_FP32);
    for (int t = 0; t < TENSORS; t++) {
        for (int64_t i = 0; i < model[t].rows * model[t].cols; i++) values[i] = start(t * 100000 + i);
        optim_set_weights(run->optim, t, values);
    }
    optim_decode(run->optim);
}

inline void kind_close(Kind* run) {
    optim_free(run->optim);
    device_close(&run->dev);
}

inline bool kind_same(const Kind* a, const Kind* b, int tensor) {
    static float x[2][MODEL_MAX];
    optim_get_weights(a->optim, tensor, x[0]);
    optim_get_weights(b->optim, tensor, x[1]);
    return memcmp(x[0], x[1], (size_t)(model[tensor].rows * model[tensor].cols) * sizeof(float)) == 0;
}

// Streams of `a` and `b`, which lie on any device, have the same bytes.
inline bool kind_equal(const Kind* a, const Kind* b) {
    bool same = optim_stream_count(a->optim) == optim_stream_count(b->optim);
    for (int s = 0; s < optim_stream_count(a->optim) && same; s++) {
        OptimStream x = optim_stream(a->optim, s), y = optim_stream(b->optim, s);
        const int64_t bytes = x.elements * x.element_bytes;
        char *of_a = (char*)malloc((size_t)bytes + 1), *of_b = (char*)malloc((size_t)bytes + 1);
        copy_to_host(&a->dev, of_a, x.data, bytes);
        copy_to_host(&b->dev, of_b, y.data, bytes);
        same = is(x.name, y.name) && x.elements == y.elements && memcmp(of_a, of_b, (size_t)bytes) == 0;
        free(of_a);
        free(of_b);
    }
    return same;
}
