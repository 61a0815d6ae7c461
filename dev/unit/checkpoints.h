// Whole-model tests of checkpoints and model folders, in this process: a part of test_gpt2.cu, which includes it where
// its helpers are known.
#pragma once

// Names as OpenAI's own upload has them, without "transformer.", and values in another type.
TEST(model_file_names) {
    Device dev = test_device(false);
    const char *folder = new_folder(), *path = joined(folder, "model.safetensors");
    TestModel m(&dev, &INITIAL);
    std::vector<SafetensorsTensor> entries(m.arena.count);
    for (int t = 0; t < m.arena.count; t++) {
        int64_t rows = t == WTE ? m.shape.V : m.arena.tensors[t].rows, cols = m.arena.tensors[t].cols;
        bool transposed = m.stored[t].transposed;
        entries[t] = tensor_of(m.arena.tensors[t].name, "F16", {transposed ? cols : rows, transposed ? rows : cols});
        if (m.arena.tensors[t].rows == 1) entries[t] = tensor_of(m.arena.tensors[t].name, "F16", {cols});
    }
    SafetensorsWriter writer;
    bool fine = safetensors_begin(&writer, path, entries.data(), m.arena.count, nullptr, error);
    for (int t = 0; t < m.arena.count && fine; t++) {
        int64_t n = (t == WTE ? m.shape.V : m.arena.tensors[t].rows) * m.arena.tensors[t].cols;
        std::vector<uint16_t> half(n);
        for (int64_t i = 0; i < n; i++) half[i] = (uint16_t)(0x3C00 + t);  // 1 + t / 1024
        half[0] = 0xC000, half[1] = 0x0001;                                // -2 and 2^-24
        fine = safetensors_write(&writer, half.data(), n * 2);
    }
    expect(fine && safetensors_finish(&writer), "%s", error);
    model_init(&m, 0, folder);
    const Floats values = weights_of(&m);
    for (int t = 0; t < m.arena.count; t++) {
        const float* w = &values[m.arena.tensors[t].offset];
        bool transposed = m.stored[t].transposed;
        expect(w[0] == -2.0f && w[transposed ? m.arena.tensors[t].cols : 1] == ldexpf(1, -24), "%s: %g and %g",
               m.arena.tensors[t].name, w[0], w[1]);
        expect(w[2] == 1.0f + (float)t / 1024, "%s: %g", m.arena.tensors[t].name, w[2]);
    }
}
