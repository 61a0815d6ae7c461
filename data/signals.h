// Signals of a run. The handlers set flags, which the run checks between steps and while it validates or samples.
//
//     SIGINT, SIGTERM, SIGHUP   stop: the run saves and ends, at once where there is nothing to save. SIGHUP stays
//                               ignored where it was ignored at the start, as under nohup
//     the same once more        ends the process without saving, two seconds or more after the first, for a launcher
//                               may deliver one signal twice; SIGINT after half a second, whatever the first was
//     SIGXCPU                   stop too; it comes again every second, and never ends the process without saving
//     SIGUSR1, SIGUSR2          save and go on
//     SIGPIPE, SIGXFSZ          ignored: a closed stdout does not end a run, and a full file is a write error
#pragma once
#include <pthread.h>
#include <signal.h>
#include "linkage.h"
C_LINKAGE_BEGIN

// The signal that asked to stop, or 0, and whether one asked to save. A run that stops ends with the code 128 + signal.
extern volatile sig_atomic_t signal_stop, signal_save;

// Installs the handlers, lets blocked signals through, and opens /dev/null in the place of closed descriptors 0 to 2,
// so that no file of the run gets text that was meant for the terminal. Call it before anything else.
void signals_catch(void);
// Sets `set` to the signals that a run handles.
void signals_handled(sigset_t* set);
// Starts a thread with all signals blocked. Returns pthread_create's status.
int signals_thread(pthread_t* thread, void* (*run)(void*), void* argument);
// Makes the handlers print nothing, on ranks other than 0.
void signals_quiet(void);
// Sets what a stop must wait for, a constant such as "this step"; NULL: there is nothing to save.
void signals_doing(const char* what);

C_LINKAGE_END
