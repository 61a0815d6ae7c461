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

// A mapped file that was cut short, or a disk that cannot be read any more.
static void on_bus_error(int number) {
    static const char text[] =
        "train: error: a mapped file was cut short or cannot be read while in use; go on with --resume\n";
    if (write(2, text, sizeof(text) - 1) < 0) _exit(128 + number);
    _exit(2);
}

void signals_catch(void) {
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGUSR1, &action, NULL);
    signal(SIGBUS, on_bus_error);
    signal(SIGXFSZ, SIG_IGN);  // a file over the shell's limit is a write error with a sentence, not a death
}
