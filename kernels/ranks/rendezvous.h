// How the ranks of a run (launch.h) connect: rank 0 listens at MASTER_ADDR and MASTER_PORT, and each other rank
// connects to it twice, once for the messages of the host and once for the beats of watch.c. rendezvous.c describes the
// protocol.
#pragma once
#include <time.h>
#include "../../data/clock.h"
#include "hmac.h"
#include "launch.h"
C_LINKAGE_BEGIN

enum { MESSAGES, BEATS, CHANNELS };

typedef struct {
    unsigned char random[HMAC_BYTES];
} Challenge;

typedef struct {
    int32_t rank, channel, pid;
    char host[64];                     // may lack its final NUL
    unsigned char random[HMAC_BYTES];  // the same on both channels of a process
    unsigned char proof[HMAC_BYTES];
} Hello;

typedef struct {
    int32_t pid;
    unsigned char proof[HMAC_BYTES];
} Welcome;

// What a rank says every second.
typedef struct {
    int32_t failed;    // 0, or the exit code with which it ends
    int32_t patience;  // seconds in which it must make progress; 0: no limit
    int64_t progress;
} Beat;

// A rank as this rank knows it.
typedef struct {
    int socket[CHANNELS];  // -1: not connected
    Hello hello;
    Beat beat, in;  // the last one, and the next, of which so many bytes have come
    size_t bytes;
    double heard, moved;  // when it was last heard, and last made progress
} Peer;

// Listens at launch->port (0: any port), and sets launch->port to the port and launch->listener to the socket.
bool rendezvous_listen(Launch* launch, char* error);

// Connects all ranks within `limit` seconds: rank 0 calls the first, the others, which know peers[0] alone, the second.
bool rendezvous_gather(Launch* launch, Peer* peers, int64_t limit, char* error);
bool rendezvous_reach(const Launch* launch, Peer* first, int64_t limit, char* error);

// Computes the proof of `role`, "rank" or "rank 0".
void rendezvous_prove(const Launch* launch, const char* role, const Challenge* challenge, const Hello* hello,
                      unsigned char proof[HMAC_BYTES]);

// False if the other side ends before all bytes have gone or come, or the deadline passes.
bool send_all(int socket, const void* bytes, size_t count);
bool receive_by(int socket, void* bytes, size_t count, double deadline);

static inline void sleep_ms(int ms) {
    const struct timespec time = {ms / 1000, ms % 1000 * 1000000L};
    nanosleep(&time, NULL);
}

C_LINKAGE_END
