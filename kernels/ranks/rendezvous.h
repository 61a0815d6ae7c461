// How the ranks of a run (launch.h) prove to each other that they belong to it, and what the watch hears. Every rank
// but 0 is connected to rank 0 twice. rendezvous.c describes the protocol; its tests speak it, too.
#pragma once
#include <assert.h>
#include "launch.h"
C_LINKAGE_BEGIN

enum { MESSAGES, BEATS, CHANNELS };

// Who a process is.
typedef struct {
    int32_t rank, channel, pid;
    int32_t zero;        // fills the place of padding, since all bytes are hashed
    char host[64];       // may lack its final NUL
    uint64_t random[2];  // the same on both channels of a process
} Hello;
static_assert(sizeof(Hello) == 96, "padding");

// What a rank says every second.
typedef struct {
    int32_t failed;    // 0, or the exit code with which it ends
    int32_t patience;  // seconds in which it must make progress; 0: no limit
    int64_t progress;
} Beat;

// SipHash-2-4 of `count` bytes (Aumasson and Bernstein, 2012). Nobody can compute it without the key. 64 bits are
// enough, since each guess takes a connection.
uint64_t siphash(const uint64_t key[2], const void* bytes, size_t count);

// Sets launch->key to what follows from a secret text.
void rendezvous_key(Launch* launch, const char* secret);

// Returns what proves a process to another: the hash of both of their Hellos.
uint64_t rendezvous_proof(const Launch* launch, const Hello* own, const Hello* other);

// Listens at launch->port (0: any port), and sets launch->port to the port and launch->listener to the socket.
bool rendezvous_listen(Launch* launch, char* error);

// False if the other side ends before all bytes have come, or the deadline passes.
bool receive_by(int socket, void* bytes, size_t count, double deadline);

C_LINKAGE_END
