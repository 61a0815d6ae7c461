// Learning-rate schedules.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    const char* kind;       // cosine, linear, constant or wsd
    double lr, final_lr;    // the largest rate; the last one as a share of it
    double decay_fraction;  // wsd: share of the steps in which the rate falls
    int64_t steps, warmup;  // of the run; of linear warm-up
} Schedule;

// The step from which wsd decays; may lie between two.
static inline double schedule_flat(const Schedule* s) {
    return (double)s->steps - (double)s->steps * s->decay_fraction;
}

// The learning rate of step 0, 1, ... steps-1.
static inline double learning_rate(const Schedule* s, int64_t step) {
    const double last = s->lr * s->final_lr;
    if (step < s->warmup) return s->lr * (double)(step + 1) / (double)s->warmup;
    double done = (double)(step - s->warmup) / (double)(s->steps > s->warmup ? s->steps - s->warmup : 1);
    if (done > 1) done = 1;
    if (strcmp(s->kind, "cosine") == 0) return last + (s->lr - last) * 0.5 * (1.0 + cos(3.14159265358979 * done));
    if (strcmp(s->kind, "linear") == 0) return s->lr + (last - s->lr) * done;
    if (strcmp(s->kind, "constant") == 0) return s->lr;
    // wsd: flat, then down by 1 - sqrt(share of the decay done).
    const double begin = schedule_flat(s);
    if ((double)step < begin) return s->lr;
    return last + (s->lr - last) * (1.0 - sqrt(((double)step - begin) / ((double)s->steps * s->decay_fraction)));
}
