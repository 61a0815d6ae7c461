// test_library.py builds this with libnibble_optim. It lets each allocation of the library fail in turn: the call
// returns NIBBLE_MEMORY, and after nibble_optim_free the library has no block left.
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../optim/nibble_optim.h"

void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void*, size_t),
    *__libc_memalign(size_t, size_t);
void __libc_free(void*);

enum { MOST = 1 << 16 };
static void* held[MOST];  // what the library took and has not freed
static size_t bytes_of[MOST];
static int blocks, number, failing;  // `failing`: the number of the allocation that fails; 0: none
static const void* library;

static int of_library(const void* caller) {
    Dl_info info;
    return library && dladdr(caller, &info) && info.dli_fbase == library;
}

static int fails(const void* caller) {
    return of_library(caller) && ++number == failing;
}

static void* taken(const void* caller, void* block, size_t bytes) {
    if (block && of_library(caller)) bytes_of[blocks] = bytes, held[blocks++] = block;
    return block;
}

static void dropped(void* block) {
    for (int i = blocks - 1; block && i >= 0; i--) {
        if (held[i] != block) continue;
        held[i] = held[--blocks], bytes_of[i] = bytes_of[blocks];
        return;
    }
}

#define CALLER __builtin_return_address(0)
void* malloc(size_t bytes) {
    return fails(CALLER) ? NULL : taken(CALLER, __libc_malloc(bytes), bytes);
}

void* calloc(size_t count, size_t bytes) {
    return fails(CALLER) ? NULL : taken(CALLER, __libc_calloc(count, bytes), count * bytes);
}

void* realloc(void* block, size_t bytes) {
    if (fails(CALLER)) return NULL;
    dropped(block);
    return taken(CALLER, __libc_realloc(block, bytes), bytes);
}

int posix_memalign(void** block, size_t alignment, size_t bytes) {
    *block = fails(CALLER) ? NULL : taken(CALLER, __libc_memalign(alignment, bytes), bytes);
    return *block ? 0 : ENOMEM;
}

void free(void* block) {
    dropped(block);
    __libc_free(block);
}

// The caller's memory for states, whose lack is one more failure.
static _Alignas(16) char caller_memory[1 << 22];
static int64_t caller_bytes;
static void* allocate(void* context, int64_t bytes) {
    if (library && ++number == failing) return context;
    caller_bytes += (bytes + 15) / 16 * 16;
    return caller_bytes <= (int64_t)sizeof(caller_memory) ? caller_memory + (caller_bytes - (bytes + 15) / 16 * 16)
                                                          : NULL;
}

enum { ROWS = 40, COLS = 72 };
static float weights[3][ROWS * COLS], grads[3][ROWS * COLS];

// Takes two steps, the second without a gradient of the vector if its rule lets it. Returns the first status that is
// not NIBBLE_OK. If `own`, the states lie in the caller's memory.
static NibbleStatus run(const char* const* settings, int own) {
    static char error[NIBBLE_ERROR_BYTES];
    const NibbleTensor tensors[] = {
        {"wte.weight", ROWS, COLS, 0, -1}, {"h.0.w", ROWS, COLS, 0, -1}, {"ln.bias", 1, COLS, 0, -1}};
    const NibbleGroup group = {.lr = 1e-2, .weight_decay = 0.1, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f};
    void* const to[] = {weights[0], weights[1], weights[2]};
    NibbleOptim* optim;
    caller_bytes = 0;
    NibbleStatus status = nibble_optim_create(&optim, settings, tensors, 3, own ? allocate : NULL, NULL, NULL, error);
    for (int step = 1; step <= 2 && optim; step++) {
        const void* from[] = {grads[0], grads[1],
                              step == 2 && nibble_optim_place(optim, 2).together < 0 ? NULL : grads[2]};
        const NibbleStep now = {.weights = to, .grads = from, .group = &group, .step = step};
        NibbleStatus its = nibble_optim_step(optim, &now, error);
        if (status == NIBBLE_OK) status = its;
    }
    if (status != NIBBLE_OK && status != NIBBLE_MEMORY) printf("%s: %s\n", settings[0], error);
    nibble_optim_free(optim);
    return status;
}

int main(void) {
    static const char* const settings[][4] = {
        {"preset=adamw8", "parameters=fp32"},
        {"preset=adamw32", "parameters=bf16"},
        {"preset=fp8", "parameters=fp32"},
        {"preset=adafactor8", "parameters=fp32"},
        {"preset=came8", "parameters=bf16"},
        {"preset=muon8", "parameters=fp32"},
        {"preset=galore8", "parameters=fp32"},
        {"rule=normuon", "parameters=fp32", "m=fp32"},
        {"m=de4/rank1", "v=lin4/rank1", "parameters=fp32"},
    };
    int bad = 0, failed = 0;
    // A mistake in the first call frees nothing that later calls use.
    if (run((const char* const[]){"m=nonsense", "parameters=fp32", NULL}, 0) != NIBBLE_MISTAKE) bad++;
    for (int i = 0; i < 3 * ROWS * COLS; i++) grads[0][i] = (float)(i % 13 - 6) / 9;
    for (size_t s = 0; s < sizeof(settings) / sizeof(settings[0]) && bad < 10; s++) {
        Dl_info info;
        // What stays for good is taken here, also what CUDA's runtime takes at the first failure.
        failing = 0, bad += run(settings[s], s % 2) != NIBBLE_OK;
        dladdr((const void*)nibble_optim_create, &info), library = info.dli_fbase;
        failing = 1, number = 0, run(settings[s], s % 2);
        for (failing = 1;; failing++) {
            blocks = number = 0;
            NibbleStatus status = run(settings[s], s % 2);
            if (blocks > 0 || (status != NIBBLE_OK) != (number >= failing)) {
                printf("%s, allocation %d: status %d, %d blocks left, the first of %zu bytes\n", settings[s][0],
                       failing, status, blocks, bytes_of[0]);
                bad++;
            }
            if (number < failing) break;
            failed++;
        }
        library = NULL;
    }
    printf("%d allocations failed, %d faults\n", failed, bad);
    return bad > 0 || failed < 100;
}
