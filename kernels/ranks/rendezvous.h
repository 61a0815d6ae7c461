// How the ranks of a run (launch.h) prove to each other that they belong to it, and what the watch hears. Every rank
// but 0 is connected to rank 0 twice. rendezvous.c describes the protocol; its tests speak it, too.
#pragma once
#include "launch.h"
C_LINKAGE_BEGIN

enum { MESSAGES, BEATS, CHANNELS };
enum { HMAC_BYTES = 32 };

// Who a process is.
typedef struct {
    int32_t rank, channel, pid;
    char host[64];                     // may lack its final NUL
    unsigned char random[HMAC_BYTES];  // the same on both channels of a process
    unsigned char proof[HMAC_BYTES];
} Hello;

// What a rank says every second.
typedef struct {
    int32_t failed;    // 0, or the exit code with which it ends
    int32_t patience;  // seconds in which it must make progress; 0: no limit
    int64_t progress;
} Beat;

// HMAC-SHA256 (RFC 2104, FIPS 180-4): the keyed hash of `count` bytes under a key of any length.
void hmac_sha256(const void* key, size_t key_bytes, const void* bytes, size_t count, unsigned char hash[HMAC_BYTES]);

// Computes the proof of `role`, "rank" or "rank 0", from what rank 0 and the rank have sent of themselves. True if
// `proof` held it before.
bool rendezvous_prove(const Launch* launch, const char* role, const Hello* first, const Hello* hello,
                      unsigned char proof[HMAC_BYTES]);

// Listens at launch->port (0: any port), and sets launch->port to the port and launch->listener to the socket.
bool rendezvous_listen(Launch* launch, char* error);

// False if the other side ends before all bytes have come, or the deadline passes.
bool receive_by(int socket, void* bytes, size_t count, double deadline);

C_LINKAGE_END
