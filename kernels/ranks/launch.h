// The processes of a run, one a GPU, called ranks: who they are, how they find each other and how they end together.
//
// `--gpus N` forks N ranks; the process that was typed stays behind, hands signals on, waits, and returns the code of
// the first rank that failed. Otherwise the environment says which rank this is: torchrun's RANK, WORLD_SIZE,
// LOCAL_RANK, MASTER_ADDR and MASTER_PORT, Open MPI's OMPI_COMM_WORLD_*, or Slurm's SLURM_*, the first complete set.
//
// Rank 0 listens, and each other rank connects to it twice: once for what the host has to share (launch_share,
// launch_agree, some 0.1 ms each), once for a thread that sends a beat a second and reports what ends. Tensors go
// through comm.cuh. Both sides of a connection prove that they know the secret of the run, a random one that --gpus
// makes or the text in NIBBLE_SECRET (rendezvous.h).
//
// A rank that ends, crashes, is stopped, loses its machine or hangs (launch_hurry) ends all of them, with one message,
// which rank 0 prints, within SILENCE_SECONDS or its patience, and a few seconds more.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include "../../data/errors.h"
C_LINKAGE_BEGIN

enum { LAUNCH_LISTENERS = 8 };  // sockets, one for each address of rank 0's host
enum { SILENCE_SECONDS = 20 };  // without a beat, or without progress: NIBBLE_SILENCE=N in the environment, for tests

typedef struct LaunchWatch LaunchWatch;
typedef struct {
    int rank, world;              // 0 of 1: alone
    int local_rank, local_world;  // on this machine; local_world 0 when unknown
    const char* source;           // who says so, for the banner; "" alone
    char host[256];               // where rank 0 listens
    int port;                     // the first that it may take
    int listeners;                // sockets at which rank 0 listens; 0: none yet
    int listener[LAUNCH_LISTENERS];
    char job[128];          // tells jobs that try the same ports apart
    bool has_secret;        // false: NIBBLE_SECRET is not set, and anybody knows the key
    unsigned char key[32];  // what ranks prove to each other that they have
    LaunchWatch* watch;     // NULL: alone
} Launch;

// Reads the environment; false with a sentence when it is half there, contradicts itself, or --gpus is above 1 too.
bool launch_environment(Launch* launch, int64_t gpus, char* error);

// Makes `gpus` ranks and returns true in each of them; the calling process waits for them and exits. Nothing may have
// touched CUDA, or begun a thread, before.
bool launch_fork(Launch* launch, int gpus, char* error);

// Connects the ranks, if there are several, and begins to watch them; false with a sentence when not all come in time.
bool launch_join(Launch* launch, int64_t seconds, char* error);

// All ranks call these, in the same order.
void launch_share(const Launch* launch, int from, void* bytes, int64_t count);  // that rank's bytes go to all
typedef enum { LAUNCH_MAX, LAUNCH_SUM } LaunchAgree;                            // sums: in the order of the ranks
void launch_agree(const Launch* launch, double* values, int count, LaunchAgree how);
bool launch_any(const Launch* launch, bool flag);  // true where any rank's is

// Marks of progress. Between launch_hurry and launch_rest a rank that stands still for `patience` seconds, and at least
// SILENCE_SECONDS, is at fault unless it only waits for others; outside, it may take its time, and so may those that
// wait for it. `what`: what it is about, a constant.
void launch_hurry(const Launch* launch, const char* what, double patience);
void launch_rest(const Launch* launch);

// Every rank calls this at the end of all.
void launch_leave(Launch* launch);

// Finds the first host of Slurm's list: gpu003 of "gpu[003-007,9],login". False when it cannot be read.
bool launch_first_host(const char* list, char* host, size_t bytes);

C_LINKAGE_END
