// A step of several shards is the step of the whole, to the bit: every preset, alone and with overrides, cut at tiles
// within and between tensors. What an unsharded optimizer keeps is what its shards keep, one after another.
#include "../../optim/jit.h"
#include "presets.h"
#include "rules.h"

static constexpr auto& presets = all_presets.name;

constexpr int PARTS = 5, TILES = 13, STEPS = 4;
static const char* const part_names[PARTS] = {"wpe.weight", "h.0.ln_1.weight", "h.0.attn.c_attn.weight",
                                              "h.0.attn.c_attn.bias", "ln_f.weight"};
static const int64_t part_lengths[PARTS] = {5000, 33, 9000, 2048, 4097};  // 3, 1, 5, 1 and 3 tiles

// In tiles, up to the first 0; the last cut leaves a shard without elements.
static const int cuts[][TILES] = {{1}, {7}, {12}, {3, 4, 9}, {2, 6, 11}, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, {13}};

struct Shard {
    Device dev;
    OptimConfig config;
    OptimTensor tensor[PARTS];
    Optim* optim;
};

// Tiles [begin, end) under a configuration; STEPS steps.
static void shard_run(Shard* shard, const OptimConfig* config, int begin, int end, bool gpu) {
    constexpr int64_t ELEMENTS = TILES * TILE_ELEMENTS;
    static float values[ELEMENTS];
    float one = 1.0f;
    device_open(&shard->dev, gpu, 0);
    const Device* dev = &shard->dev;
    shard->config = *config;
    shard->config.begin = begin * TILE_ELEMENTS, shard->config.end = end * TILE_ELEMENTS;
    for (int t = 0; t < PARTS; t++) shard->tensor[t] = {part_names[t], 1, part_lengths[t], t % 2 == 0, 0};
    int64_t elements = optim_layout(shard->tensor, PARTS, &shard->config);
    if (elements != ELEMENTS) abort();
    shard->optim = optim_create(dev, &shard->config, shard->tensor, PARTS, OPTIM_BF16);
    for (int t = 0; t < PARTS; t++) {
        for (int64_t i = 0; i < part_lengths[t]; i++) values[i] = start(t * 100000 + i);
        optim_set_weights(shard->optim, t, values);
    }
    optim_decode(shard->optim);
    float *grads = (float*)device_alloc(dev, ELEMENTS * 4), *scale = (float*)device_alloc(dev, 4);
    copy_to_device(dev, scale, &one, 4);
    for (int step = 1; step <= STEPS; step++) {
        memset(values, 0, sizeof(values));
        for (int t = 0; t < PARTS; t++) {
            float* at = values + shard->tensor[t].offset;
            for (int64_t i = 0; i < part_lengths[t]; i++) at[i] = gradient(step, t * 100000 + i);
        }
        copy_to_device(dev, grads, values + begin * TILE_ELEMENTS, (end - begin) * TILE_ELEMENTS * 4);
        optim_step(shard->optim, grads, scale, 1e-2f, step);
    }
    device_sync(dev);
    device_free(dev, grads);
    device_free(dev, scale);
}

static void shard_close(Shard* shard) {
    optim_free(shard->optim);
    device_close(&shard->dev);
}

// Device memory against host memory.
static bool same_bytes(const Device* dev, const void* here, const char* whole, int64_t bytes) {
    char* copy = (char*)malloc((size_t)bytes + 1);
    copy_to_host(dev, copy, here, bytes);
    bool same = memcmp(copy, whole, (size_t)bytes) == 0;
    free(copy);
    return same;
}

// The shards' arrays one after another against those of `whole`, which is on the CPU.
static void compare(Test* test, const Shard* whole, const Shard* shards, int count, const char* what) {
    for (int s = 0; s < optim_stream_count(whole->optim); s++) {
        OptimStream want = optim_stream(whole->optim, s);
        int64_t used = 0, bytes = want.elements * want.element_bytes;
        bool same = true;
        for (int k = 0; k < count; k++) {
            for (int i = 0; i < optim_stream_count(shards[k].optim); i++) {
                OptimStream got = optim_stream(shards[k].optim, i);
                int64_t part = got.elements * got.element_bytes;
                if (!is(got.name, want.name)) continue;
                bool fits = used + part <= bytes;
                same = same && fits && same_bytes(&shards[k].dev, got.data, (const char*)want.data + used, part);
                used += part;
            }
        }
        expect(same && used == bytes, "%s: %s, %lld of %lld bytes", what, want.name, (long long)used, (long long)bytes);
    }
    const char* copy = (const char*)optim_weights(whole->optim);
    for (int k = 0; k < count; k++) {
        const OptimConfig* c = &shards[k].config;
        expect(same_bytes(&shards[k].dev, optim_weights(shards[k].optim), copy + c->begin * 2, (c->end - c->begin) * 2),
               "%s: weights in bf16 of shard %d", what, k);
        OptimBytes plan = optim_bytes(c, shards[k].tensor, PARTS, OPTIM_BF16), real = optim_allocated(shards[k].optim);
        expect(memcmp(&plan, &real, sizeof(plan)) == 0, "%s: planned and allocated", what);
    }
}

static void check_cuts(Test* test, const OptimConfig* config, bool gpu) {
    Shard whole, shards[TILES];
    shard_run(&whole, config, 0, TILES, false);
    for (const auto& cut : cuts) {
        char what[256];
        int count = 0;
        for (int begin = 0; count == 0 || cut[count - 1]; count++) {
            int end = cut[count] ? cut[count] : TILES;
            shard_run(&shards[count], config, begin, end, gpu);
            begin = end;
        }
        snprintf(what, sizeof(what), "%s \"%s\" cut first at tile %d into %d", config->preset, config->overrides,
                 cut[0], count);
        compare(test, &whole, shards, count, what);
        for (int k = 0; k < count; k++) shard_close(&shards[k]);
    }
    shard_close(&whole);
}

static OptimConfig shard_config(const char* preset, const char* overrides) {
    OptimConfig config = {preset, "", "", "fp32", "", "", 0.9f, 0.95f, 1e-8f, 0.1f, 99};
    config.overrides = overrides;
    config.ramp = 9;
    char error[1024];
    if (!optim_resolve(&config, error, sizeof(error))) printf("    %s\n", error), exit(1);
    return config;
}

static void check_presets(Test* test, bool gpu) {
    int count = 0;
    for (const char* preset : presets) {
        // Tensors 1 and 4 go into a launch of their own, at the arena's end.
        for (const char* overrides : {"", "ln*: m=fp32 lr=0.5; *.bias: wd=0.3"}) {
            OptimConfig config = shard_config(preset, overrides);
            check_cuts(test, &config, gpu);
            count++;
        }
    }
    snprintf(test->note, sizeof(test->note), "%d configurations, %d cuts", count,
             (int)(sizeof(cuts) / sizeof(cuts[0])));
}

// Tensors whose weights are stored in other formats, at the arena's end: read as they are stored, and by a copy.
static void check_weights(Test* test, bool gpu) {
    const char* const rows[][2] = {{"fp8w8e", "ln*|*.bias: weights=bf16:sr"},
                                   {"adamw8", "ln*: weights=e4m3:sr; *.bias: weights=bf16+fp32 m=fp32"}};
    for (const auto& row : rows) {
        OptimConfig config = shard_config(row[0], row[1]);
        check_cuts(test, &config, gpu);
    }
}

TEST(shards_equal_whole) {
    check_presets(test, false);
    check_weights(test, false);
}

static void check_presets_gpu(Test* test) {
    check_presets(test, true);
    check_weights(test, true);
}

TEST(shards_equal_whole_gpu) {
    if (!jit_available()) skip("libnvrtc was not found");
    with_empty_cache(test, check_presets_gpu);
}

#ifdef __CUDACC__
// One tensor of more than 2^31 elements on a GPU, of which the CPU computes the parts at its begin and beyond 2^31.
constexpr int64_t MANY = ((int64_t)1 << 31) + 5000;

// bf16 of any sign, from 3e-5 to 0.03.
static __host__ __device__ uint16_t many_gradient(int64_t element, int step) {
    uint64_t z = ((uint64_t)element + 1) * 0x9E3779B97F4A7C15ull + (uint64_t)step * 0xD1B54A32D192ED03ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    return (uint16_t)((z >> 48 & 0x8000u) | (0x3800u + (z >> 33 & 0x4ffu)));
}

// grid: ceil(elements / 256), block: 256.
__global__ void many_gradients_kernel(uint16_t* grads, int64_t elements, int step) {
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < elements) grads[i] = i < MANY ? many_gradient(i, step) : 0;
}

static void many_steps(Optim* optim, const Device* dev, int64_t begin, int64_t elements) {
    uint16_t* grads = (uint16_t*)device_alloc(dev, elements * 2);
    float one = 1.0f, *scale = (float*)device_alloc(dev, 4);
    copy_to_device(dev, scale, &one, 4);
    for (int step = 1; step <= 2; step++) {
        if (dev->gpu) {
            many_gradients_kernel<<<(unsigned)ceil_div(elements, 256), 256, 0, dev->stream>>>(grads, elements, step);
            check_launch();
        } else {
            for (int64_t i = 0; i < elements; i++) grads[i] = begin + i < MANY ? many_gradient(begin + i, step) : 0;
        }
        optim_step(optim, grads, scale, 1e-2f, step);
    }
    device_sync(dev);
    device_free(dev, grads);
    device_free(dev, scale);
}

TEST(shards_beyond_2_31_elements_gpu) {
    Device gpu, cpu;
    device_open(&gpu, true, 0);
    device_open(&cpu, false, 0);
    for (const char* preset : {"adamw8", "adamw4"}) {
        OptimConfig config = shard_config(preset, "");
        config.grads = "bf16";
        OptimTensor tensor = {"tensor", 1, MANY, true, 0};
        int64_t elements = optim_layout(&tensor, 1, &config);
        Optim* whole = optim_create(&gpu, &config, &tensor, 1, OPTIM_BF16);
        many_steps(whole, &gpu, 0, elements);
        for (int64_t begin : {(int64_t)0, ((int64_t)1 << 31) - 2 * TILE_ELEMENTS}) {
            OptimConfig part = config;
            part.begin = begin, part.end = begin ? elements : 3 * TILE_ELEMENTS;
            Optim* shard = optim_create(&cpu, &part, &tensor, 1, OPTIM_BF16);
            many_steps(shard, &cpu, begin, part.end - begin);
            for (int s = 0; s < optim_stream_count(shard); s++) {
                OptimStream want = optim_stream(shard, s), got = optim_stream(whole, s);
                int64_t bytes = want.elements * want.element_bytes, before = begin / (elements / got.elements);
                const char* at = (const char*)got.data + before * got.element_bytes;
                expect(same_bytes(&gpu, at, (const char*)want.data, bytes), "%s: %s from element %lld on", preset,
                       want.name, (long long)begin);
            }
            optim_free(shard);
        }
        optim_free(whole);
    }
    device_close(&cpu);
    device_close(&gpu);
}
#endif
