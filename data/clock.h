// The clock that everything here is timed by.
#pragma once
#include <time.h>

// Seconds since some moment in the past; no change of the date moves it.
static inline double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}
