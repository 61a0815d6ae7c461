// How the ranks of a run (launch.h) prove to each other that they belong to it, and what the watch hears. Every rank
// but 0 is connected to rank 0 twice. rendezvous.c describes the protocol; its tests speak it, too.
#pragma once
#include "launch.h"
C_LINKAGE_BEGIN

enum { MESSAGES, BEATS, CHANNELS };
enum { HASH_BYTES = 32 };

// Who a process is.
typedef struct {
    int32_t rank, channel, pid;
    char host[64];                     // may lack its final NUL
    unsigned char random[HASH_BYTES];  // the same on both channels of a process
} Hello;

// What a rank says every second.
typedef struct {
    int32_t failed;    // 0, or the exit code with which it ends
    int32_t patience;  // seconds in which it must make progress; 0: no limit
    int64_t progress;
} Beat;

// SHA-256 (FIPS 180-4) of `count` bytes.
void sha256(const void* bytes, size_t count, unsigned char hash[HASH_BYTES]);

// Computes what proves a process to another: the hash of the key and both of their Hellos, whose length is always the
// same, so that nobody can extend it. True if `proof` held it before.
bool rendezvous_prove(const Launch* launch, const Hello* own, const Hello* other, unsigned char proof[HASH_BYTES]);

// Listens at launch->port (0: any port), and sets launch->port to the port and launch->listener to the socket.
bool rendezvous_listen(Launch* launch, char* error);

// False if the other side ends before all bytes have come, or the deadline passes.
bool receive_by(int socket, void* bytes, size_t count, double deadline);

C_LINKAGE_END
