// Whole-model tests of checkpoints and model folders, in this process: a part of test_gpt2.cu, which includes it where
// its helpers are known.
#pragma once

// A file of transformers' orientation and names holds element (i, j) of each matrix where transformers looks for it.
TEST(model_file_orientation) {
    Device dev = test_device(false);
    Setup setup = INITIAL;
    setup.config.V = 250, setup.config.Vp = 256;
    const char *folder = new_folder(), *path = joined(folder, "step_00000000/model.safetensors");
    TestModel m;
    const Floats values = initial_weights(&m, &dev, &setup, 4);
    Run* run = run_of(&m, &setup, folder);
    expect(checkpoint_write(run, seconds_now(), true), "%s", run->folder.error);
    Safetensors file;
    expect(safetensors_open(&file, path, error), "%s", error);
    struct {
        const char* name;
        int64_t in, out;
    } matrices[] = {
        {"attn.c_attn", 128, 384}, {"attn.c_proj", 128, 128}, {"mlp.c_fc", 128, 512}, {"mlp.c_proj", 512, 128}};
    for (int k = 0; k < 4; k++) {
        const char* name = formatted("transformer.h.1.%s.weight", matrices[k].name);
        const SafetensorsTensor* tensor = safetensors_find(&file, name);
        int64_t in = matrices[k].in, out = matrices[k].out, wrong = 0;
        bool shaped = tensor && tensor->dims == 2 && tensor->shape[0] == in && tensor->shape[1] == out;
        expect(shaped, "%s is not of shape (in, out) = (%lld, %lld)", name, (long long)in, (long long)out);
        const float* ours =
            &values[m.arena.tensors[FIRST_BLOCK + BLOCK_TENSORS + 2 + (k < 2 ? 2 * k : 2 * k + 2)].offset];
        const float* data = shaped ? (const float*)tensor_data(&file, tensor) : nullptr;
        for (int64_t i = 0; shaped && i < in * out; i++) wrong += data[i] != ours[i % out * in + i / out];
        expect(wrong == 0, "%s: %lld elements at the wrong place", name, (long long)wrong);
    }
    const SafetensorsTensor* wte = safetensors_find(&file, "transformer.wte.weight");
    expect(wte && wte->shape[0] == 250 && wte->shape[1] == 128, "wte is stored without its padding");
    expect(wte && memcmp(tensor_data(&file, wte), &values[m.arena.tensors[WTE].offset], 250 * 128 * 4) == 0, "wte");
}

// Names as OpenAI's own upload has them, without "transformer.", and values in another type.
TEST(model_file_names) {
    Device dev = test_device(false);
    const char *folder = new_folder(), *path = joined(folder, "model.safetensors");
    TestModel m(&dev, &INITIAL);
    std::vector<SafetensorsEntry> entries(m.arena.count);
    for (int t = 0; t < m.arena.count; t++) {
        int64_t rows = t == WTE ? m.config.V : m.arena.tensors[t].rows, cols = m.arena.tensors[t].cols;
        bool transposed = m.stored[t].transposed;
        entries[t] = {m.arena.tensors[t].name, "F16", {transposed ? cols : rows, transposed ? rows : cols}, 2};
        if (m.arena.tensors[t].rows == 1) entries[t].shape[0] = cols, entries[t].dims = 1;
    }
    SafetensorsWriter* writer = safetensors_begin(path, entries.data(), m.arena.count, nullptr, error);
    bool fine = true;
    for (int t = 0; t < m.arena.count && fine; t++) {
        int64_t n = (t == WTE ? m.config.V : m.arena.tensors[t].rows) * m.arena.tensors[t].cols;
        std::vector<uint16_t> half(n);
        for (int64_t i = 0; i < n; i++) half[i] = (uint16_t)(0x3C00 + t);  // 1 + t / 1024
        half[0] = 0xC000, half[1] = 0x0001;                                // -2 and 2^-24
        fine = safetensors_write(writer, half.data(), n * 2, error);
    }
    expect(fine && safetensors_finish(writer, nullptr, nullptr, error), "%s", error);
    model_read(&m, folder);
    const Floats values = weights_of(&m);
    for (int t = 0; t < m.arena.count; t++) {
        const float* w = &values[m.arena.tensors[t].offset];
        bool transposed = m.stored[t].transposed;
        expect(w[0] == -2.0f && w[transposed ? m.arena.tensors[t].cols : 1] == ldexpf(1, -24), "%s: %g and %g",
               m.arena.tensors[t].name, w[0], w[1]);
        expect(w[2] == 1.0f + (float)t / 1024, "%s: %g", m.arena.tensors[t].name, w[2]);
    }
}
