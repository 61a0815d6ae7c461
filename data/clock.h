// The clock of all timings.
#pragma once
#include <time.h>

// Returns the seconds since some moment in the past; changes of the date do not affect it.
static inline double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}
