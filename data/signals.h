// Signals of a run: SIGINT and SIGTERM ask it to save and end, SIGUSR1 to save and go on. The handlers only set flags;
// the run looks at them between steps, and while it validates or samples.
#pragma once
#include <signal.h>
#include <stdbool.h>
#ifdef __cplusplus
extern "C" {
#endif

extern volatile sig_atomic_t signal_stop, signal_save;

// A second SIGINT or SIGTERM, two seconds or more after the first, ends the process at once.
void signals_catch(void);

#ifdef __cplusplus
}
#endif
