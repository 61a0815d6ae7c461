// libnibble_optim from C: fits a matrix to a target with 8-bit AdamW, saves the states, and goes on in a second
// optimizer, which ends with the same bits. In the folder of the repository:
//     make lib && gcc -std=c99 dev/examples/optim.c -L build/lib -lnibble_optim -o optim && LD_LIBRARY_PATH=build/lib ./optim
// (build/cpu/lib where there is no nvcc). On a GPU the arrays would be device memory, and the setting device=cuda.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../optim/nibble_optim.h"

enum { ROWS = 48, COLS = 64, N = ROWS * COLS, BIAS = 48, STEPS = 200 };

static float weight[N], bias[BIAS], weight_grad[N], bias_grad[BIAS];
static char error[NIBBLE_ERROR_BYTES];

static void require(NibbleStatus status) {
    if (status == NIBBLE_OK) return;
    fprintf(stderr, "optim: %s\n", error);
    exit(1);
}

// The gradient of the squared distance to a target, and the distance.
static double distance(void) {
    double sum = 0.0;
    for (int i = 0; i < N; i++) {
        weight_grad[i] = weight[i] - (float)(i % 7) / 7.0f;
        sum += weight_grad[i] * weight_grad[i];
    }
    for (int i = 0; i < BIAS; i++) bias_grad[i] = bias[i] - 0.5f;
    return sum / N;
}

static void train(NibbleOptim* optim, int first, int last) {
    void* const weights[] = {weight, bias};
    const void* const grads[] = {weight_grad, bias_grad};
    const int group_of[] = {0, 1};
    for (int step = first; step <= last; step++) {
        const double lr = 0.02 * (1.0 - (double)step / (STEPS + 1));
        const NibbleGroup groups[] = {{lr, 0.01, 0.9f, 0.95f, 1e-8f, step, NULL},
                                      {lr, 0.0, 0.9f, 0.95f, 1e-8f, step, NULL}};
        const NibbleStep now = {weights, grads, group_of, groups, NULL, NULL, step, NULL};
        distance();
        require(nibble_optim_step(optim, &now, error));
    }
}

int main(void) {
    const char* const settings[] = {"device=cpu", "parameters=fp32", "preset=adamw8", "seed=1", NULL};
    const NibbleTensor tensors[] = {{"weight", ROWS, COLS, 0, -1}, {"bias", 1, BIAS, 0, -1}};
    NibbleOptim *optim, *second;
    require(nibble_optim_create(&optim, settings, tensors, 2, NULL, NULL, NULL, error));
    printf("%s\n", nibble_optim_describe(optim));
    const double before = distance();
    train(optim, 1, STEPS / 2);

    const int64_t bytes = nibble_optim_bytes(optim);
    void* saved = malloc((size_t)bytes);
    static float weight_then[N], bias_then[BIAS], weight_end[N];
    require(nibble_optim_save(optim, saved, NULL, error));
    memcpy(weight_then, weight, sizeof(weight)), memcpy(bias_then, bias, sizeof(bias));
    train(optim, STEPS / 2 + 1, STEPS);
    memcpy(weight_end, weight, sizeof(weight));

    require(nibble_optim_create(&second, settings, tensors, 2, NULL, NULL, NULL, error));
    require(nibble_optim_load(second, saved, bytes, NULL, error));
    memcpy(weight, weight_then, sizeof(weight)), memcpy(bias, bias_then, sizeof(bias));
    train(second, STEPS / 2 + 1, STEPS);
    const int same = memcmp(weight, weight_end, sizeof(weight)) == 0;

    const char* const wrong[] = {"preset=adamw9", NULL};
    const NibbleStatus status = nibble_optim_create(&(NibbleOptim*){NULL}, wrong, tensors, 2, NULL, NULL, NULL, error);
    printf("distance %.6f -> %.6f, resumed run %s, %lld bytes of states\n", before, distance(),
           same ? "has the same bits" : "DIFFERS", (long long)bytes);
    printf("a mistake: status %d, %s\n", (int)status, error);
    free(saved);
    nibble_optim_free(optim);
    nibble_optim_free(second);
    return same && distance() < 1e-3 * before && status == NIBBLE_MISTAKE ? 0 : 1;
}
