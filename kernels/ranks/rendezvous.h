// How the ranks of a run (launch.h) connect. Rank 0 listens at the addresses of MASTER_ADDR, and at no other; each
// other rank connects to it once for every channel.
//
// Both sides prove that they know the secret of the run before either trusts the other:
//
//     rank -> rank 0   Hello      who it is, and a random number
//     rank 0 -> rank   Challenge  another random number
//     rank -> rank 0   proof      HMAC-SHA256, under the run's key, of all of the above and of the port
//     rank 0 -> rank   Welcome    the answer, with rank 0's own proof
//
// The secret itself is not sent, an old proof cannot be used again, and rank 0 proves nothing to a rank that has not.
// The bytes that follow are neither encrypted nor signed, so this does not stop those who can change packets in
// transit.
//
// Rank 0 handles all greetings at the same time, so that one that is slow, silent or foreign delays no other. Every
// message has a fixed size, and a text in it may lack its final NUL.
#pragma once
#include <time.h>
#include "../../data/clock.h"
#include "hmac.h"
#include "launch.h"
C_LINKAGE_BEGIN

enum {
    PORTS = 8,            // ports that rank 0 tries, since other programs may have some of them
    GREETINGS = 128,      // connections that rank 0 handles at a time; others wait until one of these ends
    GREETING_SECONDS = 5  // time limit of a greeting
};

enum {
    RENDEZVOUS_MAGIC = 0x6e696264,  // "nibd"
    RENDEZVOUS_VERSION = 3          // of these messages and of launch.c's
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
    int32_t accepted;  // 0: this rank 0 is of another job or version; try the next port
    unsigned char random[HMAC_BYTES];
} Challenge;

typedef struct {
    uint32_t magic;
    int32_t accepted, pid;
    char error[512];  // if not accepted: why
    unsigned char proof[HMAC_BYTES];
} Welcome;

// A Peer is another rank as this rank knows it.
typedef struct {
    int socket[CHANNELS];  // -1: not connected
    char host[64];
    int pid;
} Peer;

// Listens at the first free one of `ports` ports from launch->port on (0: any port), and sets launch->port to it.
bool rendezvous_listen(Launch* launch, int ports, char* error);

void rendezvous_close(Launch* launch);

// Rank 0 calls this. It waits until all others are connected, for at most `limit` seconds, and tells them.
bool rendezvous_gather(Launch* launch, Peer* peers, int64_t limit, char* error);

// The other ranks call this. It connects to rank 0 and waits until all ranks are connected.
bool rendezvous_reach(Launch* launch, Peer* first, int64_t limit, char* error);

// Computes a proof: `role` is "rank" or "rank 0"; `welcome` is NULL for "rank".
void rendezvous_prove(const unsigned char key[HMAC_BYTES], const char* role, int port, const Hello* hello,
                      const Challenge* challenge, const Welcome* welcome, unsigned char proof[HMAC_BYTES]);

// These send or receive all bytes. False: the other side has ended, or the socket's time limit has passed.
bool send_all(int socket, const void* bytes, size_t count);
bool receive_all(int socket, void* bytes, size_t count);
// Limits how long sending and receiving wait, in seconds (0: no limit), and makes small messages leave at once.
void set_time_limit(int socket, int limit);

static inline void sleep_ms(int ms) {
    struct timespec time = {ms / 1000, ms % 1000 * 1000000L};
    nanosleep(&time, NULL);
}

C_LINKAGE_END
