// How the ranks of a run (launch.h) connect: rank 0 listens at MASTER_ADDR and MASTER_PORT, and each other rank
// connects to it. rendezvous.c describes the protocol. The connections stay open for the messages of watch.c.
#pragma once
#include <time.h>
#include "../../data/clock.h"
#include "hmac.h"
#include "launch.h"
C_LINKAGE_BEGIN

enum { RENDEZVOUS_MAGIC = 0x6e696204 };  // "nib", and the version of these messages and of watch.c's

typedef struct {
    uint32_t magic;
    unsigned char random[HMAC_BYTES];
} Challenge;

typedef struct {
    uint32_t magic;
    int32_t rank, world, pid;
    char job[128], host[64];  // host may lack its final NUL
    unsigned char random[HMAC_BYTES], proof[HMAC_BYTES];
} Hello;

typedef struct {
    int32_t goes_on, pid;  // goes_on is 0 where the run ends, and rank 0 has said why
    unsigned char proof[HMAC_BYTES];
} Welcome;

typedef struct {
    char* data;
    size_t count, room;
} Bytes;

// A Peer is a rank as this rank knows it. All but the first three are watch.c's.
typedef struct {
    int socket;  // -1: not connected
    int pid;
    char host[64];
    Bytes in, out, data;  // received and to be sent, and data that has arrived for the host
    bool left;            // it has said good-bye
    double heard, moved;  // when it was last heard, and last made progress
    int64_t progress;
    int patience;  // seconds in which it must make progress; 0: no limit
    char what[64];
} Peer;

// Listens at launch->port (0: any port), and sets launch->port to the port and launch->listener to the socket.
bool rendezvous_listen(Launch* launch, char* error);

// Connects all ranks within `limit` seconds: rank 0 calls the first, the others, which know peers[0] alone, the second.
bool rendezvous_gather(Launch* launch, Peer* peers, int64_t limit, char* error);
bool rendezvous_reach(const Launch* launch, Peer* first, int64_t limit, char* error);

// Computes the proof of `role`, "rank" or "rank 0".
void rendezvous_prove(const Launch* launch, const char* role, const Challenge* challenge, const Hello* hello,
                      unsigned char proof[HMAC_BYTES]);

// False if the other side ends before all bytes have come, or the deadline passes.
bool receive_by(int socket, void* bytes, size_t count, double deadline);

static inline void sleep_ms(int ms) {
    const struct timespec time = {ms / 1000, ms % 1000 * 1000000L};
    nanosleep(&time, NULL);
}

C_LINKAGE_END
