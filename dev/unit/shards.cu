// A shard's elements keep their numbers beyond 2^31: the noise and the result are the whole's. Cuts of every
// combination are in every.cu.
#include "steps.h"

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
    Room room(dev);
    uint16_t* grads = room.device<uint16_t>(elements);
    const float one = 1.0f, *scale = room.to_device(&one, 1);
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
}

TEST(shards_beyond_2_31_elements_gpu) {
    const Device gpu = test_device(true), cpu = test_device(false);
    for (const char* preset : {"adamw8", "adamw4"}) {
        const OptimConfig config = preset_config(preset, "bf16");
        OptimTensor tensor = {"tensor", 1, MANY, true, 0};
        int64_t elements = optim_layout(&tensor, 1, &config);
        Optim* whole = optim_create(&gpu, &config, &tensor, 1, OPTIM_BF16);
        many_steps(whole, &gpu, 0, elements);
        for (int64_t begin : {(int64_t)0, ((int64_t)1 << 31) - 2 * TILE_ELEMENTS}) {
            const int64_t end = begin ? elements : 3 * TILE_ELEMENTS;
            const OptimConfig part = shard_config(config, begin, end);
            Optim* shard = optim_create(&cpu, &part, &tensor, 1, OPTIM_BF16);
            many_steps(shard, &cpu, begin, end - begin);
            for (int s = 0; s < optim_stream_count(shard); s++) {
                OptimStream want = optim_stream(shard, s), got = optim_stream(whole, s);
                int64_t bytes = want.elements * want.element_bytes, before = begin / (elements / got.elements);
                Room room(&gpu);
                const char* copy = room.to_host((const char*)got.data + before * got.element_bytes, bytes);
                expect(memcmp(copy, want.data, (size_t)bytes) == 0, "%s: %s from element %lld on", preset, want.name,
                       (long long)begin);
            }
        }
    }
}
#endif
