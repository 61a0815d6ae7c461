#include "defaults.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "memory.h"
#include "text.h"

static double least(double a, double b) {
    return a < b ? a : b;
}

static double between(double low, double x, double high) {
    return x < low ? low : least(x, high);
}

// Rounds a number to two digits, as one would type it.
static double two_digits(double x) {
    char text[32];
    snprintf(text, sizeof(text), "%.1e", x);
    return strtod(text, NULL);
}

// B* for a run of `tokens`.
static double suited(double tokens) {
    return 65536 * sqrt(tokens / 180e6);
}

long long default_tokens_per_step(const Options* o, int64_t epoch) {
    // With N known, the equation B = 65536 sqrt(N B / 180M) gives B.
    const double one = suited((double)o->steps), batch = o->steps > 0 ? one * one : suited((double)epoch);
    const double sequences = between(32768, batch, 524288) / (double)o->seq;
    return o->seq * (long long)exp2(round(log2(sequences > 1 ? sequences : 1)));
}

static bool is_muon(const Options* o) {
    return text_among(o->rule, "muon|normuon", '|');
}

const char* default_overrides(const Options* o) {
    const bool adds = is_muon(o) && o->weight_decay == OPTION_AUTO && !strstr(o->overrides, "wd=");
    return adds ? text_kept("%s" DEFAULT_DECAY, o->overrides) : o->overrides;
}

bool default_v_falls(const Options* o) {
    bool falls = !strstr(o->v, "@dq8");
    for (const char* at = o->overrides; (at = strstr(at, "v=")); at++) {
        const char* end = at + strcspn(at, " ;");
        falls = falls && !memmem(at, (size_t)(end - at), "@dq8", 4);
    }
    return falls;
}

void defaults_choose(Options* o, double rate, bool trained) {
    const bool muon = is_muon(o);
    const bool adam = text_among(o->rule, "adamw|adam|nadamw|ademamix|muon", '|');
    const double N = (double)o->steps, B = (double)o->tokens_per_step, D = N > 0 ? N * B : B;
    if (o->lr == OPTION_AUTO) {
        const double adamw = least(0.0018 * 768 / (double)o->channels * sqrt(B / suited(D)), 0.003);
        o->lr = two_digits(adamw * rate / (trained ? 30 : 1));
    }
    if (o->warmup == OPTION_AUTO) {
        const double usual = muon ? 40 : between(60, floor(N / 20), 700);
        o->warmup = (long long)least(usual, floor(0.75 * N));
    }
    if (o->weight_decay == OPTION_AUTO) o->weight_decay = muon ? two_digits(between(0.05, 4 / (N * o->lr), 0.4)) : 0.1;
    if (o->beta2 == OPTION_AUTO) {
        const double half = least(10e6, D / 20);
        o->beta2 = 1 - (adam && default_v_falls(o) ? least(two_digits(1 - exp2(-B / half)), 0.05) : 0.05);
    }
}
