// The ranks of a run find each other here (launch.h says who they are). Rank 0 listens at the address that MASTER_ADDR
// names, and at no other; each other rank connects to it once for every channel.
//
// Both sides prove that they know the secret of the run before either believes the other:
//
//     rank -> rank 0   Hello      who it is, and a random number
//     rank 0 -> rank   Challenge  another random number
//     rank -> rank 0   proof      HMAC-SHA256, under the run's key, of all of the above and of the port
//     rank 0 -> rank   Welcome    the answer, with such a proof of rank 0's
//
// The secret itself is not sent, an old proof is of no use, and rank 0 proves nothing to those that have not. The bytes
// that follow are neither encrypted nor signed, so this does not keep out those who can change packets on their way.
//
// Rank 0 hears all greetings at once, so that one that is slow, silent or foreign delays nobody. Every message has a
// fixed size, and every text in it may lack its final NUL.
#pragma once
#include <time.h>
#include "../../data/clock.h"
#include "hmac.h"
#include "launch.h"
C_LINKAGE_BEGIN

enum {
    PORTS = 8,            // that rank 0 may take, from the first on, where another program has some of them
    GREETINGS = 128,      // connections that rank 0 hears at a time; more wait until one of these is done or given up
    GREETING_SECONDS = 5  // that a greeting may take
};

enum {
    RENDEZVOUS_MAGIC = 0x6e696264,  // "nibd"
    RENDEZVOUS_VERSION = 3          // of these messages and of those that launch.c sends later
};

enum { TALK, CONTROL, CHANNELS };

typedef struct {
    uint32_t magic, version;
    int32_t rank, world, channel, pid;
    char job[128], host[64];
    unsigned char random[HMAC_BYTES];
} Hello;

typedef struct {
    uint32_t magic, version;
    int32_t accepted;  // 0: this is another job's rank 0, or another version's; the next port may be the right one
    unsigned char random[HMAC_BYTES];
} Challenge;

typedef struct {
    uint32_t magic;
    int32_t accepted, pid;
    char error[512];  // if not accepted: why
    unsigned char proof[HMAC_BYTES];
} Welcome;

// This is another rank as this one knows it.
typedef struct {
    int socket[CHANNELS];  // -1: not connected
    char host[64];
    int pid;
} Peer;

// Listens at the first free of `ports` ports from launch->port on (0: any port), which becomes launch->port.
bool rendezvous_listen(Launch* launch, int ports, char* error);

void rendezvous_close(Launch* launch);

// Rank 0 calls this: it waits until all others have come, for at most `limit` seconds, and tells them so.
bool rendezvous_gather(Launch* launch, Peer* peers, int64_t limit, char* error);

// The other ranks call this: it connects to rank 0 and waits until all have come.
bool rendezvous_reach(Launch* launch, Peer* first, int64_t limit, char* error);

// Computes the proof of a side: `role` is "rank" or "rank 0"; `welcome` is NULL for a rank's.
void rendezvous_prove(const unsigned char key[HMAC_BYTES], const char* role, int port, const Hello* hello,
                      const Challenge* challenge, const Welcome* welcome, unsigned char proof[HMAC_BYTES]);

// These send or receive all of the bytes. False: the other side has ended, or let the socket's time limit pass.
bool send_all(int socket, const void* bytes, size_t count);
bool receive_all(int socket, void* bytes, size_t count);
// Limits how long sending and receiving wait; 0 seconds: no limit. Small messages then leave at once.
void set_time_limit(int socket, int limit);

static inline void sleep_ms(int ms) {
    struct timespec time = {ms / 1000, ms % 1000 * 1000000L};
    nanosleep(&time, NULL);
}

C_LINKAGE_END
