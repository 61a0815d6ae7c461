// Tests of the schedule of the learning rate, of what `auto` gives (data/schedule.h), and of a step's time.
#include "../../data/schedule.h"
#include "../../data/report.h"
#include "../../optim/optim.h"
#include "test.h"

static double rate_of(const Options& schedule, int64_t step, RateRise rise = {}) {
    Options o = schedule;
    o.lr = 2.0, o.final_lr = 0.1, o.decay_fraction = 0.2;
    return learning_rate(&o, &rise, step);
}

TEST(learning_rate) {
    const double eps = 1e-12;
    struct {
        const char* name;
        double middle, late, last;  // at steps 60 (half of the way after warm-up), 99 (half of wsd's decay) and 110
    } schedules[] = {{"cosine", 1.1, 0.2 + 0.9 * (1 + cos(3.14159265358979 * 0.89)), 0.2},
                     {"linear", 1.1, 2.0 - 1.8 * 0.89, 0.2},
                     {"constant", 2.0, 2.0, 2.0},
                     {"wsd", 2.0, 0.2 + 1.8 * (1 - sqrt(0.5)), 0.2}};
    for (const auto& s : schedules) {
        Options o = {};
        o.schedule = s.name, o.steps = 111, o.warmup = 10;
        for (int step = 0; step < 10; step++) {
            expect(fabs(rate_of(o, step) - 0.2 * (step + 1)) < eps, "%s: warm-up step %d", s.name, step);
        }
        expect(fabs(rate_of(o, 10) - 2.0) < eps, "%s begins at %g", s.name, rate_of(o, 10));
        expect(fabs(rate_of(o, 60) - s.middle) < eps, "%s: %g at 60", s.name, rate_of(o, 60));
        expect(fabs(rate_of(o, 99) - s.late) < eps, "%s: %g at 99", s.name, rate_of(o, 99));
        for (int step = 10; step < 110; step++) {
            double now = rate_of(o, step), next = rate_of(o, step + 1);
            expect(next <= now + eps && next >= s.last - eps, "%s rises at %d", s.name, step);
        }
        // The last step of a run of any length has the last rate; a single step has the peak.
        for (int steps : {2, 4, 20, 61, 111}) {
            o.steps = steps, o.warmup = steps / 2;
            const double last = rate_of(o, steps - 1);
            expect(fabs(last - s.last) < eps, "%s: %d steps end at %g", s.name, steps, last);
        }
        o.steps = 110, o.warmup = 0;
        expect(rate_of(o, 0) == 2.0, "%s without warm-up begins at %g", s.name, rate_of(o, 0));
        o.warmup = o.steps;
        expect(fabs(rate_of(o, 109) - 2.0) < eps, "%s: warm-up of all steps ends at %g", s.name, rate_of(o, 109));
        o.steps = 1, o.warmup = 0;
        expect(rate_of(o, 0) == 2.0, "%s: a single step has %g", s.name, rate_of(o, 0));
    }
}

// Resumed at step 50 with a larger rate, a run comes to the schedule's over as many steps as its warm-up has, or over
// half of those that are left.
TEST(learning_rate_rises) {
    for (int warmup : {8, 40}) {
        Options o = {};
        o.schedule = "cosine", o.steps = 100, o.warmup = warmup;
        const int length = warmup < 25 ? warmup : 25;
        for (int step = 0; step < 100; step++) {
            const double rate = rate_of(o, step), share = (step - 49.0) / length;
            const double want = step < 50 || share >= 1 ? rate : 0.1 + (rate - 0.1) * share;
            expect(fabs(rate_of(o, step, {50, 0.1}) - want) < 1e-12, "step %d: %g", step, rate_of(o, step, {50, 0.1}));
        }
    }
}

// `auto` gives GPT-2 124M these values.
TEST(learning_rate_auto) {
    const std::tuple<const char*, const char*, double, long long, double, long long, double, double> rows[] = {
        {"adamw", "fp32", 1.0, 2746, 0.0018, 137, 0.1, 0.995},
        {"adamw", "sqrt4/32@dq8", 1.0, 2746, 0.0018, 137, 0.1, 0.95},
        {"muon", "none", 2.0, 2746, 0.0036, 40, 0.4, 0.995},
        {"muon", "none", 2.0, 80, 0.006, 40, 0.4, 0.95},
        {"lion", "none", 0.2, 2746, 0.00036, 137, 0.1, 0.95},
        {"muon", "none", 2.0, 20000, 0.0037, 40, 0.054, 0.964},
        {"adamw", "udyn8/256", 1.0, 20000, 0.0018, 700, 0.1, 0.964}};
    Options o;
    options_defaults(&o);
    o.seq = 1024, o.channels = 768, o.overrides = "none";
    for (const auto& [rule, v, rate, steps, lr, warmup, decay, beta2] : rows) {
        expect(optim_usual_rate(rule) == rate, "%s: %g", rule, optim_usual_rate(rule));
        Options run = o;
        run.rule = rule, run.v = v, run.steps = steps;
        run.tokens_per_step = default_tokens_per_step(&run, 0);
        expect(run.tokens_per_step == (steps == 80     ? 32768
                                       : steps == 2746 ? 65536
                                                       : 524288),
               "%lld", run.tokens_per_step);
        defaults_choose(&run, rate, false, true, 0, error);
        const long long rise = strcmp(rule, "muon") == 0 ? std::min(steps / 4, 300ll) : 0;
        expect(run.of_rule.momentum_warmup == rise, "%s, %lld steps: %lld", rule, steps, run.of_rule.momentum_warmup);
        expect(run.lr == lr && run.warmup == warmup && run.of_rule.weight_decay == decay &&
                   fabs(run.of_rule.beta2 - beta2) < 1e-9,
               "%s, %lld steps: %g %lld %g %g", rule, steps, run.lr, run.warmup, run.of_rule.weight_decay,
               run.of_rule.beta2);
    }
    for (const auto& [epoch, tokens] : {std::tuple(1000ll, 32768ll), {100000000, 65536}, {10000000000, 524288}})
        expect(default_tokens_per_step(&o, epoch) == tokens, "%lld", epoch);
    const std::pair<long long, long long> warmups[] = {{0, 0},     {1, 0},       {2, 1},      {20, 15},
                                                       {79, 59},   {80, 60},     {200, 60},   {1200, 60},
                                                       {1220, 61}, {14000, 700}, {20000, 700}};
    for (const auto& [steps, warmup] : warmups) {
        Options run = o;
        run.steps = steps, run.tokens_per_step = 65536;
        defaults_choose(&run, 1, false, true, 0, error);
        expect(run.warmup == warmup, "%lld steps: warm-up %lld", steps, run.warmup);
    }
    o.schedule = "wsd", o.decay_fraction = 0.8, o.steps = 100, o.warmup = 60, o.tokens_per_step = 65536;
    expect(defaults_choose(&o, 1, false, true, 0, error) && o.warmup == 20, "wsd's decay begins after %lld", o.warmup);
}

// The first step is left out, then the first ten. What lies between two steps counts as time left to wait, not as the
// steps' own time.
TEST(step_timer) {
    StepTimer timer = {100, 100, 0, 0};
    double clock = 0;
    for (int64_t step = 101; step <= 130; step++) {
        double takes = step <= 110 ? 8 : 2, each = step_timed(&timer, step, clock, clock + takes);
        if (step == 105) expect(each == 9, "the first five: %g s a step", each);
        if (step == 110) expect(each == 8, "the tenth: %g s", each);
        if (step == 130) expect(each == 3, "the twenty after it: %g s a step", each);
        clock += takes + 1;
    }
    expect(timer.from == 110 && timer.seconds == 40, "%g s in the steps after step %lld", timer.seconds,
           (long long)timer.from);
}
