#include "signals.h"
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <string.h>
#include <unistd.h>
#include "clock.h"

volatile sig_atomic_t signal_stop, signal_save;
static const char* volatile doing;    // what a stop waits for; NULL: there is nothing to save
static volatile double first_signal;  // the clock at the first request to stop
static volatile sig_atomic_t quiet;

static const int HANDLED[] = {SIGUSR1, SIGUSR2, SIGINT, SIGTERM, SIGHUP, SIGXCPU};
enum { HANDLED_COUNT = sizeof(HANDLED) / sizeof(HANDLED[0]) };

// Writes a line to stderr by calls that a signal handler may make.
static void tell(const char* text, const char* what, const char* end) {
    const char* const parts[] = {"\ntrain: ", text, what, end};
    for (int i = 0; i < 4 && !quiet; i++) {
        if (write(2, parts[i], strlen(parts[i])) < 0) return;
    }
}

static void on_signal(int number) {
    int error = errno;
    double now = seconds_now(), since = now - first_signal;
    if (number == SIGUSR1 || number == SIGUSR2) {
        signal_save = 1;
    } else if (!doing && !signal_stop) {  // a run that was told to stop and has saved ends by itself
        tell("stopped by a signal; there was nothing to save", "", "\n");
        _exit(128 + number);
    } else if (!signal_stop) {
        first_signal = now;
        signal_stop = number;
        tell("stopping after ", doing, "; press again to quit without saving\n");
    } else if (number != SIGXCPU && ((number == SIGINT && since >= 0.5) || (number == signal_stop && since >= 2.0))) {
        tell("stopped again: ended without saving", "", "\n");
        _exit(128 + number);
    }
    errno = error;
}

void signals_catch(void) {
    for (int i = 0; i <= 2; i++) {
        if (fcntl(i, F_GETFD) < 0 && open("/dev/null", O_RDWR) < 0) break;  // open takes the lowest free number, i
    }
    struct sigaction action = {.sa_handler = on_signal, .sa_flags = SA_RESTART}, before;
    for (int i = 0; i < HANDLED_COUNT; i++) {
        bool ignored = sigaction(HANDLED[i], NULL, &before) == 0 && before.sa_handler == SIG_IGN;
        if (HANDLED[i] != SIGHUP || !ignored) sigaction(HANDLED[i], &action, NULL);
    }
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN);  // a file over the shell's limit is a write error with a sentence, not a death
    sigset_t all;
    signals_handled(&all);
    sigprocmask(SIG_UNBLOCK, &all, NULL);
}

void signals_handled(sigset_t* set) {
    sigemptyset(set);
    for (int i = 0; i < HANDLED_COUNT; i++) sigaddset(set, HANDLED[i]);
}

int signals_thread(pthread_t* thread, void* (*run)(void*), void* argument) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // a thread begins with the mask of the one that creates it
    const int status = pthread_create(thread, NULL, run, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return status;
}

void signals_quiet(void) {
    quiet = 1;
}

void signals_doing(const char* what) {
    doing = what;
}
