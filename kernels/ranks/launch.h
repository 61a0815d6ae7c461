// The processes of a run, one per GPU, called ranks: how they start, communicate and end together.
//
// `--gpus N` forks N ranks; the parent process forwards signals to them, waits, and exits with the code of the first
// rank that failed. Otherwise the environment says which rank this is: torchrun's RANK, WORLD_SIZE, LOCAL_RANK,
// MASTER_ADDR and MASTER_PORT, Open MPI's OMPI_COMM_WORLD_*, or Slurm's SLURM_*, the first complete set.
//
// Rank 0 listens, and each other rank connects to it twice: once for messages of the host (launch_broadcast,
// launch_all_reduce, some 0.1 ms each), once for a thread that sends a heartbeat every second and reports failures.
// Tensors go through comm.cuh. Both sides of a connection prove that they know the secret of the run, a random one that
// --gpus makes or the text in NIBBLE_SECRET (rendezvous.h).
//
// If a rank ends, crashes, is stopped, loses its machine or hangs (launch_hurry), all ranks end with one message, which
// rank 0 prints, within SILENCE_SECONDS or the rank's patience, and a few seconds more.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include "../../data/errors.h"
C_LINKAGE_BEGIN

enum { LAUNCH_LISTENERS = 8 };  // sockets, one for each address of rank 0's host
enum { SILENCE_SECONDS = 20 };  // without a heartbeat or progress; tests set NIBBLE_SILENCE=N in the environment

typedef struct LaunchWatch LaunchWatch;
typedef struct {
    int rank, world;              // 0 of 1: alone
    int local_rank, local_world;  // on this machine; local_world 0 when unknown
    const char* source;           // who started the ranks, for the banner; "" alone
    char host[256];               // where rank 0 listens
    int port;                     // the first port that it tries
    int listeners;                // sockets at which rank 0 listens; 0: none yet
    int listener[LAUNCH_LISTENERS];
    char job[128];          // distinguishes jobs that try the same ports
    bool has_secret;        // false: NIBBLE_SECRET is not set, so anybody knows the key
    unsigned char key[32];  // ranks prove to each other that they have it
    LaunchWatch* watch;     // NULL: alone
} Launch;

// Reads the environment; false with a sentence if it is incomplete, contradicts itself, or --gpus is above 1 as well.
bool launch_environment(Launch* launch, int64_t gpus, char* error);

// Forks `gpus` ranks and returns true in each of them; the calling process waits for them and exits. It must not have
// used CUDA or started a thread before.
bool launch_fork(Launch* launch, int gpus, char* error);

// Connects the ranks, if there are several, and starts the watch; false with a sentence if some do not come in time.
bool launch_join(Launch* launch, int64_t seconds, char* error);

// All ranks call these, in the same order.
void launch_broadcast(const Launch* launch, int from, void* bytes, int64_t count);  // that rank's bytes go to all
typedef enum { LAUNCH_MAX, LAUNCH_SUM } LaunchReduction;                            // sums: in the order of the ranks
void launch_all_reduce(const Launch* launch, double* values, int count, LaunchReduction how);
bool launch_any(const Launch* launch, bool flag);  // true if any rank's flag is

// Progress. Each launch_hurry is a sign of progress. Until launch_rest, a rank without one for `patience` seconds, and
// at least SILENCE_SECONDS, has failed, unless it only waits for others. `what` it does is a constant text.
void launch_hurry(const Launch* launch, const char* what, double patience);
void launch_rest(const Launch* launch);

// Every rank calls this last.
void launch_leave(Launch* launch);

// Finds the first host of Slurm's list: gpu003 of "gpu[003-007,9],login". False when it cannot be read.
bool launch_first_host(const char* list, char* host, size_t bytes);

C_LINKAGE_END
