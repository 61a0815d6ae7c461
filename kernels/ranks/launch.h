// The processes of a run, one per GPU, called ranks: how they start, communicate and end together.
//
// With `--gpus N` the process that was started is rank 0; it forks the others, which end with it. Otherwise the
// environment says which rank this is: torchrun's RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, Open MPI's
// OMPI_COMM_WORLD_*, or Slurm's SLURM_*, the first complete set.
//
// Every other rank is connected to rank 0 (rendezvous.c), for the messages of the host and a beat a second. Tensors go
// through comm.cuh.
//
// If a rank ends, crashes, is stopped, loses its machine or hangs (watchdog_arm), all ranks end with one sentence that
// names it, within SILENCE_SECONDS or the rank's patience, and a few seconds more. If a signal ends rank 0 of --gpus,
// no rank says so: the shell does.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include "../../data/errors.h"
C_LINKAGE_BEGIN

enum { SILENCE_SECONDS = 20 };  // without a beat; tests set NIBBLE_SILENCE=N in the environment

typedef struct {
    int rank, world;              // 0 of 1: alone
    int local_rank, local_world;  // on this machine; local_world below 1: unknown
    const char* source;           // who started the ranks, for the banner; "" alone
    const int* forked;            // (world) the processes that launch_fork has made, by rank; NULL: it has made none
    char host[256];               // where rank 0 listens
    int port;
    int listener;  // rank 0's socket; 0: none yet
    char job[128];
    bool has_secret;  // false: NIBBLE_SECRET is not set, so anybody could make the key
    uint64_t key[2];  // of the secret, the job and its ranks, which prove to each other that they have it
} Launch;
extern const Launch LAUNCH_ALONE;  // rank 0 of 1

// Reads the environment; false with a sentence if it is incomplete, contradicts itself, or --gpus is above 1 as well.
bool launch_environment(Launch* launch, int64_t gpus, char* error);

// Makes the calling process rank 0 of `gpus` ranks, forks the others, and returns true in each. The calling process
// must not have used CUDA or started a thread before. launch_leave waits for the others.
bool launch_fork(Launch* launch, int gpus, char* error);

// Connects the ranks, if there are several, and starts the watch; false with a sentence if some do not come in time.
// A process joins one run.
bool launch_join(Launch* launch, int64_t seconds, char* error);

// All ranks call these, in the same order. They take 0.1 ms or so.
void launch_broadcast(const Launch* launch, void* bytes, int64_t count);              // rank 0's bytes go to all
void launch_gather(const Launch* launch, const void* own, int64_t count, void* all);  // (world, count), everywhere
typedef enum { LAUNCH_MAX, LAUNCH_SUM } LaunchReduction;                              // sums: in the order of the ranks
void launch_all_reduce(const Launch* launch, double* values, int count, LaunchReduction how);
bool launch_any(const Launch* launch, bool flag);  // true if any rank's flag is

// Each watchdog_arm is a sign of progress. Until watchdog_disarm, a rank without one for `patience` seconds, and at
// least SILENCE_SECONDS, has failed, unless it only waits for others. `what` says what it does, in 60 letters.
void watchdog_arm(const Launch* launch, const char* what, double patience);
void watchdog_disarm(const Launch* launch);

// Every rank calls this last, with its exit code. Returns that, or the first code other than it and 0 with which a rank
// that launch_fork has made ended.
int launch_leave(const Launch* launch, int code);

// Finds the first host of Slurm's list: gpu003 of "gpu[003-007,9],login". False when it cannot be read.
bool launch_first_host(const char* list, char* host, size_t bytes);

C_LINKAGE_END
