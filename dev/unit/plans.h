// Whole-model tests of the plan against what is allocated: a part of test_gpt2.cu, which includes it where its helpers
// are known.
#pragma once

// A block of the heap is at least what was asked for, and larger by less than two pages.
static void expect_allocated(Test* test, const char* what, int64_t planned, void* const* blocks, int count) {
    int64_t sum = 0;
    for (int i = 0; i < count; i++) sum += (int64_t)malloc_usable_size(blocks[i]);
    expect(sum >= planned && sum < planned + count * 8192, "%s: planned %lld bytes, allocated %lld", what,
           (long long)planned, (long long)sum);
}

// Memory that --offload takes on the host is planned to the byte, and the device has as much less, but for two slots of
// states and three layers' residuals.
TEST(memory_plan_offload) {
    Device dev = test_device(false);
    const Setup setup = {{7, 128, 2, 64, 128, 128}, 2, 64,        OPTIM_FP32, false,
                         RECOMPUTE_BLOCK,           0, "bf16:sr", "fp32",     "dyn8/256"};
    MemoryPlan plan[2];
    for (int k = 0; k < 2; k++) {
        TestModel m;
        OptimConfig config = setup_optim(&setup);
        config.offload = k == 1;
        model_shape(&m, &dev, &setup);
        m.spills = k == 1;
        m.arena.elements = optim_layout(m.arena.tensors, m.arena.count, &config);
        plan[k] = memory_plan(&m, &config);
        model_allocate(&m, &config);
        const int64_t spilled = k == 1 ? spill_bytes(7, 2 * 64 * 128 * 4) : 0;
        expect(plan[k].host == m.arena.optim->allocated.host + spilled && plan[k].states == m.arena.memory.states,
               "%lld bytes on the host, %lld of states", (long long)plan[k].host, (long long)plan[k].states);
        if (spilled > 0) expect_allocated(test, "residuals", spilled, (void**)&m.spill.host, 1);
    }
    expect(plan[0].host == 0 && plan[1].host > 0 && plan[1].total - plan[1].host < plan[0].total,
           "the device has less");
    const int64_t residuals = spill_bytes(7, 2 * 64 * 128 * 4);
    expect(residuals > 0 && spill_bytes(2, 4096) == 0 && plan[0].activations - plan[1].activations == residuals,
           "%lld bytes of activations less", (long long)(plan[0].activations - plan[1].activations));
    expect(plan[1].states < plan[0].states / 2, "%lld of %lld bytes of states stay", (long long)plan[1].states,
           (long long)plan[0].states);
}

// The room that a checkpoint is promised is what its files hold, but for padding, in every format of weights.
TEST(memory_plan_files) {
    Device dev = test_device(false);
    for (const char* weights : {"fp32", "bf16+fp32", "bf16:sr", "bf16+8", "lin8:sr", "e4m3:ef", "e4m3/tensor+fp32"}) {
        Setup setup = INITIAL;
        setup.weights = weights;
        TestModel m;
        OptimConfig config = setup_optim(&setup);
        model_shape(&m, &dev, &setup);
        m.arena.elements = optim_layout(m.arena.tensors, m.arena.count, &config);
        model_allocate(&m, &config);
        const OptimFiles plan = optim_file_bytes(&config, m.arena.tensors, m.arena.count);
        int64_t model = 0, optimizer = 0;
        for (int t = 0; t < m.arena.count; t++) {
            const int bytes = strcmp(optim_saved_dtype(m.arena.optim, t), "F32") == 0 ? 4 : 2;
            model += m.stored[t].rows * m.stored[t].cols * bytes;
        }
        OptimSaved* saved = optim_saved_open(m.arena.optim, nullptr, nullptr);
        for (const OptimStream* array = saved->array; array < saved->array + saved->arrays; array++) {
            optimizer += array->elements * array->element_bytes;
        }
        optim_saved_close(saved);
        const int64_t padding = (int64_t)m.arena.count * TILE_ELEMENTS * 12;
        expect(plan.model >= model && plan.model <= model + padding, "%s: model %lld bytes, planned %lld", weights,
               (long long)model, (long long)plan.model);
        expect(plan.optimizer >= optimizer - padding && plan.optimizer <= optimizer + padding,
               "%s: optimizer %lld bytes, planned %lld", weights, (long long)optimizer, (long long)plan.optimizer);
    }
}

TEST(memory_plan) {
    // Rows enough for the smallest of the buffers to show; nothing touches the memory.
    const Gpt2Shape shape = {3, 128, 2, 64, 300, 384};
    const Setup setups[] = {
        {shape, 128, 64, OPTIM_FP32, false, RECOMPUTE_NONE, 0, "fp32", "fp32", "fp32"},
        {shape, 128, 64, OPTIM_FP32, false, RECOMPUTE_BLOCK, 20, "bf16:sr", "bf16", "bf16:sr"},
        {shape, 128, 64, OPTIM_FP32, false, RECOMPUTE_GELU, 20, "bf16+fp32", "fp32", "fp32"},
        {shape, 128, 64, OPTIM_FP32, false, RECOMPUTE_NONE, 20, "e4m3/tensor", "fp32", "fp32", false, false, true}};
    Device dev = test_device(false);
    for (const Setup& setup : setups) {
        TestModel m(&dev, &setup);
        OptimConfig config = setup_optim(&setup);
        MemoryPlan plan = memory_plan(&m, &config);
        OptimBytes bytes = optim_bytes(&dev, &config, m.arena.tensors, m.arena.count, m.arena.type),
                   real = m.arena.optim->allocated;
        expect(memcmp(&bytes, &real, sizeof(bytes)) == 0, "the optimizer allocates other bytes than it says");
        const DecodedBytes rooms = decoded_bytes(&m.arena, &config);
        const int64_t room = rooms.room;
        expect(rooms.dequant_buffer == (setup.fp8 ? 2 * 12 * 128 * 128 * 4 : 0) &&
                   m.arena.dequant_bytes == rooms.dequant_buffer,
               "%s: dequant_buffer of %lld bytes", setup.weights, (long long)rooms.dequant_buffer);
        int64_t optimizer = bytes.weights + room + bytes.states + bytes.tables;
        expect((room == 0) == (strcmp(setup.weights, "fp32") == 0) && bytes.compute == 0, "%s: decoded in %lld bytes",
               setup.weights, (long long)room);
        expect(plan.weights + plan.states == optimizer, "weights %lld and states %lld", (long long)plan.weights,
               (long long)plan.states);
        expect(plan.total == optimizer + plan.grads + plan.activations + plan.other, "the total is not the sum");
        void* other[] = {m.input.tokens, m.losses, m.scalars, m.arena.squares, m.fp8.scale_inv};
        expect_allocated(test, "gradients", plan.grads, &m.arena.grads, 1);
        expect_allocated(test, "activations", plan.activations, &m.activations, 1);
        expect_allocated(test, "input, losses, squares and scales", plan.other, other, setup.fp8 ? 5 : 4);
    }
}

// Memory that the exchange between ranks takes for itself is in the plan once, on any GPU.
TEST(memory_plan_of_ranks) {
    const Setup setup = {
        {3, 128, 2, 64, 300, 384}, 4, 64, OPTIM_FP32, false, RECOMPUTE_NONE, 0, "fp32", "fp32", "fp32"};
    const Device cpu = test_device(false);
    TestModel m(&cpu, &setup);
    OptimConfig config = setup_optim(&setup);
    Device gpu = cpu;
    gpu.gpu = gpu.imagined = true, gpu.compute = 80, gpu.sm_count = 108, gpu.shared_memory = 164 << 10;
    int64_t total[2];
    Shard shard = {};
    shard.comm.world = 2, shard.gradient_bytes = 4;
    Model on_gpu = m;
    on_gpu.dev = &gpu, on_gpu.arena.shard = &shard;
    for (int i = 0; i < 2; i++) {
        shard.comm.bytes = i * 12345;
        total[i] = memory_plan(&on_gpu, &config).total;
    }
    expect(total[1] - total[0] == 12345, "the plan grows by %lld bytes", (long long)(total[1] - total[0]));
}

TEST_ALONE(memory_plan_gpu) {
    if (getenv("NIBBLE_SANITIZE")) skip("the sanitizer pads allocations");
    Device dev = test_device(true);
    const int64_t granularity = 2 << 20;  // of cudaMalloc's pages
    Setup setups[] = {
        {{6, 384, 6, 256, 5000, 5120}, 16, 256, OPTIM_BF16, true, RECOMPUTE_NONE, 0, "bf16+fp32", "fp32", "fp32"},
        {{6, 384, 6, 256, 5000, 5120}, 16, 256, OPTIM_BF16, false, RECOMPUTE_BLOCK, 512, "bf16:sr", "bf16", "bf16:sr"},
        {{6, 384, 6, 256, 5000, 5120}, 16, 256, OPTIM_FP32, false, RECOMPUTE_GELU, 0, "fp32", "fp32", "fp32"}};
    for (const Setup& setup : setups) {
        { TestModel warm(&dev, &setup); }  // modules load and contexts grow here, not in what is measured
        size_t before, after, total;
        check(cudaMemGetInfo(&before, &total));
        TestModel m(&dev, &setup);
        check(cudaMemGetInfo(&after, &total));
        OptimConfig config = setup_optim(&setup);
        int64_t planned = memory_plan(&m, &config).total - WORKSPACE_BYTES - dev.context - MODULE_BYTES,
                real = (int64_t)before - (int64_t)after;
        expect(real >= planned - granularity && real <= planned + 16 * granularity,
               "planned %lld bytes, allocated %lld", (long long)planned, (long long)real);
        note(test, "planned %.1f MiB, allocated %.1f", planned / 1048576.0, real / 1048576.0);
    }
}
