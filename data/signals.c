// See signals.h.
#define _GNU_SOURCE
#include "signals.h"
#include <stddef.h>
#include <time.h>
#include <unistd.h>

volatile sig_atomic_t signal_stop, signal_save;
static volatile sig_atomic_t first_seconds;

static void on_signal(int number) {
    if (number == SIGUSR1) {
        signal_save = 1;
        return;
    }
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    // A second one means now; but launchers deliver one signal twice, to the program and to its group.
    if (signal_stop && now.tv_sec - first_seconds >= 2) _exit(128 + number);
    if (!signal_stop) first_seconds = (sig_atomic_t)now.tv_sec;
    signal_stop = 1;
}

void signals_catch(void) {
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGUSR1, &action, NULL);
    signal(SIGXFSZ, SIG_IGN);  // a file over the shell's limit is a write error with a sentence, not a death
}
