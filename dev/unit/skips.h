// Whole-model tests of steps that are not finite: a part of test_gpt2.cu, which includes it where its helpers are
// known.
#pragma once

// Feeds a micro-batch of random tokens and targets. Losses and gradients are multiplied by `share`: one of NaN makes
// them NaN.
static void feed_random(Model* m, float share) {
    const int n = m->B * m->T;
    std::vector<int> tokens(2 * n);
    for (int i = 0; i < 2 * n; i++) tokens[i] = (int)(0.5f * m->shape.V * (1 + test_uniform(41, i)));
    feed(m, &tokens[0], &tokens[n], true, share);
}

// A gradient or a loss that is NaN changes nothing, and one that is finite again does. norm has more of what is not
// finite, and laws_resume the steps after it.
TEST_BOTH(model_skips_nonfinite_steps) {
    Device dev = test_device(gpu);
    for (bool narrow : {false, true}) {
        Setup setup = TRAINED;
        if (narrow && !gpu) break;
        if (narrow) setup.T = 32, setup.type = OPTIM_BF16, setup.grads_bf16 = true;
        TestModel m(&dev, &setup);
        model_init(&m, 5);
        for (const auto& [share, loss] : {std::pair(NAN, 1.0f), {1.0f, NAN}, {1.0f, 1.0f}}) {
            feed_random(&m, share);
            copy_to_device(&dev, m.scalars, &loss, sizeof(loss));
            const Bytes before = streams(&m);
            update(&m, 1e-3f, 1.0f, 1);
            const bool good = isfinite(share) && isfinite(loss);
            expect(isnan(scalar(&m, 2)) == !good && (before == streams(&m)) == !good, "share %g, loss %g: factor %g",
                   share, loss, scalar(&m, 2));
        }
    }
}

// One value of each stored array in turn is no longer finite: the checkpoint is refused with its array's name, and is
// written once it is mended.
TEST_BOTH(model_refuses_to_save_nonfinite) {
    Device dev = test_device(gpu);
    TestModel m(&dev, &TRAINED);
    model_init(&m, 5);
    Run* run = run_of(&m, &TRAINED, new_folder());
    for (int i = -1; i < m.arena.optim->stream_count; i++) {
        OptimStream stream = i < 0 ? OptimStream{} : m.arena.optim->stream[i];
        const bool fp32 = i >= 0 && strcmp(stream.dtype, "F32") == 0;
        if (i >= 0 && !fp32 && strcmp(stream.dtype, "BF16") != 0) continue;
        char before[4], bad[4];
        const float nan = NAN;
        memcpy(bad, (const char*)&nan + (fp32 ? 0 : 2), fp32 ? 4 : 2);
        const int64_t bytes = fp32 ? 4 : 2;
        char* at = (char*)stream.data + 7 * bytes;
        if (i >= 0) copy_to_host(&dev, before, at, bytes), copy_to_device(&dev, at, bad, bytes);
        const bool written = checkpoint_write(run, seconds_now(), true);
        const char *error = run->folder.error, *name = i < 0 ? "finite" : stream.name;
        expect(written == (i < 0), "%s: %s", name, written ? "written" : error);
        if (i >= 0) expect(strstr(error, "holds nan at element 7; with a smaller --lr"), "%s: %s", name, error);
        if (i >= 0) copy_to_device(&dev, at, before, bytes);
    }
}
