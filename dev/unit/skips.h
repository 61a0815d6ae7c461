// Whole-model tests of steps that are not finite: a part of test_gpt2.cu, which includes it where its helpers are
// known.
#pragma once

// Feeds a micro-batch of random tokens and targets. Losses and gradients are multiplied by `share`: one of NaN makes
// them NaN.
static void feed_random(const Model* m, int seed, bool first = true, float share = 1.0f) {
    const int n = m->B * m->T;
    std::vector<int> tokens(2 * n);
    for (int i = 0; i < 2 * n; i++) tokens[i] = (int)(0.5f * m->config.V * (1 + test_uniform(40 + seed, i)));
    feed(m, &tokens[0], &tokens[n], first, share);
}

enum Poison { GRADIENT_NAN, GRADIENT_INFINITE, GRADIENT_HUGE, LOSS_NAN, LOSS_INFINITE, POISONS };

static void poison(const Model* m, Poison kind) {
    // The norm of 64 elements of 3e38 is beyond fp32.
    float value = kind == GRADIENT_NAN || kind == LOSS_NAN ? NAN : kind == GRADIENT_HUGE ? 3e38f : INFINITY;
    if (kind >= LOSS_NAN) {
        copy_to_device(m->dev, m->scalars, &value, sizeof(value));
        return;
    }
    bf16 rounded = from_float<bf16>(value);
    for (int i = 0; i < (kind == GRADIENT_HUGE ? 64 : 1); i++) {
        int64_t at = m->arena.tensors[FIRST_BLOCK + 2].offset + 5 + i;
        if (m->arena.grads_bf16) copy_to_device(m->dev, (bf16*)m->arena.grads + at, &rounded, sizeof(rounded));
        if (!m->arena.grads_bf16) copy_to_device(m->dev, (float*)m->arena.grads + at, &value, sizeof(value));
    }
}

// Four steps, and the same with poisoned ones among them: those change nothing, and all else is the same to the bit.
static void check_skips(Test* test, const Device* dev, const Setup* setup) {
    Bytes state[2], before;
    for (int run = 0; run < 2; run++) {
        TestModel m(dev, setup);
        model_init(&m, 5);
        for (int step = 1; step <= 4; step++) {
            for (int kind = 0; kind < (run == 1 ? POISONS : 0); kind++) {
                feed_random(&m, 100 + step);
                poison(&m, (Poison)kind);
                before = streams(&m);
                update(&m, 1e-3f, step % 2 ? 1.0f : 0.0f, step);
                expect(isnan(scalar(&m, 2)), "poison %d: the factor is %g", kind, scalar(&m, 2));
                expect(before == streams(&m), "poison %d changes weights or states", kind);
            }
            feed_random(&m, step);
            expect(isfinite(scalar(&m, 0)), "a loss of %g after poisoned steps", scalar(&m, 0));
            before = streams(&m);
            update(&m, 1e-3f, 1.0f, step);
            expect(before != streams(&m), "step %d changes nothing", step);
        }
        state[run] = streams(&m);
    }
    expect(state[0] == state[1], "steps that were skipped leave traces");
}

TEST_BOTH(model_skips_nonfinite_steps) {
    Device dev = test_device(gpu);
    Setup setup = TRAINED;
    check_skips(test, &dev, &setup);
    setup.T = 32, setup.type = OPTIM_BF16, setup.grads_bf16 = true;
    if (gpu) check_skips(test, &dev, &setup);
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
