// See launch.h and rendezvous.h: how ranks find each other, their messages, and the watch.
//
// 1. Rank 0 listens at the first address of MASTER_ADDR that its machine has, and at MASTER_PORT. Each other rank
//    connects to it, again and again until --join-timeout has passed: once for messages and once for beats, since a
//    beat must not wait behind a long message.
// 2. Both sides of a connection send a Hello with a random number.
// 3. The rank proves that it belongs to the run, and then rank 0 does, by a hash of both Hellos, with a key that
//    follows from NIBBLE_SECRET, the job, the number of ranks and the version of these messages.
// 4. Rank 0 closes its listening socket when all have come.
//
// Rank 0 handles one handshake after another, each within HANDSHAKE_SECONDS, so a silent stranger delays the ranks by
// no more than that. The secret is not sent, and an old proof is worth nothing. What follows is not encrypted.
//
// The watch is a thread on every rank that sends a beat every second, hears those of others, and ends the process when
// another rank has failed, ended, or been silent for too long. Rank 0 hears all ranks that have come, and they hear
// rank 0 alone: if it ends, all do.
#include "rendezvous.h"
#include <errno.h>
#include <math.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <omp.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include "../../data/clock.h"
#include "../../data/files.h"
#include "../../data/memory.h"
#include "../../data/signals.h"
#include "../../data/text.h"

static const double HANDSHAKE_SECONDS = 0.5;

// A rank as this rank knows it.
typedef struct {
    int socket[CHANNELS];  // -1: not connected
    Hello hello;
    Beat beat;            // the last one
    double heard, moved;  // when it was last heard, and last made progress
} Peer;

// Global, since callers of launch_failed know nothing of ranks. Ranks other than 0 know rank 0 alone.
static struct {
    Peer* peers;  // (world); the rank itself has no socket
    Launch launch;
    int silence;
    char what[64];       // what this rank does, for messages
    bool begun, leaves;  // a failure ends the others, until they may end themselves
} watch;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;    // guards the watch and its peers
static pthread_mutex_t ending = PTHREAD_MUTEX_INITIALIZER;  // the thread that has it ends the process

static void sleep_ms(int ms) {
    const struct timespec time = {ms / 1000, ms % 1000 * 1000000L};
    nanosleep(&time, NULL);
}

// Opens a socket that listens at the first address of `host` that this machine has, or that is connected to it. -1 if
// that fails, with the reason.
static int open_socket(const char* host, int port, bool listens, const char** reason) {
    const struct addrinfo hints = {.ai_socktype = SOCK_STREAM};
    const struct timeval second = {1, 0};  // for connecting
    const int yes = 1;
    struct addrinfo* list = NULL;
    int one = -1, failed = EADDRNOTAVAIL, unknown = getaddrinfo(host, text_kept("%d", port), &hints, &list);
    for (const struct addrinfo* at = list; at && one < 0; at = at->ai_next) {
        one = socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | (listens ? SOCK_NONBLOCK : 0), 0);
        if (one < 0) continue;  // a system without IPv6
        setsockopt(one, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
        setsockopt(one, SOL_SOCKET, SO_SNDTIMEO, &second, sizeof(second));
        setsockopt(one, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));  // accepted sockets inherit it
        if (listens ? bind(one, at->ai_addr, at->ai_addrlen) == 0 && listen(one, 4096) == 0
                    : connect(one, at->ai_addr, at->ai_addrlen) == 0)
            break;
        failed = errno;
        close(one);
        one = -1;
        if (listens && failed != EADDRNOTAVAIL) break;
    }
    if (list) freeaddrinfo(list);
    *reason = unknown ? gai_strerror(unknown) : strerror(failed);
    return one;
}

bool rendezvous_listen(Launch* launch, char* error) {
    const char* reason;
    struct sockaddr_in6 own = {0};
    socklen_t bytes = sizeof(own);
    const int one = open_socket(launch->host, launch->port, true, &reason);
    if (one < 0) {
        return data_error(error,
                          "rank 0 cannot listen at %s:%d (%s); set MASTER_ADDR to an address of its machine and "
                          "MASTER_PORT to a free port, alike on all ranks",
                          launch->host, launch->port, reason);
    }
    getsockname(one, (struct sockaddr*)&own, &bytes);
    launch->port = ntohs(own.sin6_port);  // which IPv4 has in the same place
    launch->listener = one;
    return true;
}

static bool send_all(int socket, const void* bytes, size_t count) {
    for (size_t done = 0; done < count;) {
        const ssize_t sent = send(socket, (const char*)bytes + done, count - done, MSG_NOSIGNAL);
        if (sent < 0 && errno != EINTR && errno != EAGAIN) return false;
        if (sent > 0) done += (size_t)sent;
    }
    return true;
}

bool receive_by(int socket, void* bytes, size_t count, double deadline) {
    for (size_t done = 0; done < count;) {
        struct pollfd one = {socket, POLLIN, 0};
        const double left = deadline - seconds_now();
        if (left <= 0) return false;
        if (poll(&one, 1, (int)(fmin(left, 1000) * 1000) + 1) <= 0) continue;
        const ssize_t got = recv(socket, (char*)bytes + done, count - done, MSG_DONTWAIT);
        if (got < 0 && (errno == EINTR || errno == EAGAIN)) continue;
        if (got <= 0) return false;
        done += (size_t)got;
    }
    return true;
}

static uint64_t rotate(uint64_t x, int bits) {
    return x << bits | x >> (64 - bits);
}

static void siphash_round(uint64_t v[4]) {
    v[0] += v[1], v[1] = rotate(v[1], 13) ^ v[0], v[0] = rotate(v[0], 32);
    v[2] += v[3], v[3] = rotate(v[3], 16) ^ v[2];
    v[0] += v[3], v[3] = rotate(v[3], 21) ^ v[0];
    v[2] += v[1], v[1] = rotate(v[1], 17) ^ v[2], v[2] = rotate(v[2], 32);
}

uint64_t siphash(const uint64_t key[2], const void* bytes, size_t count) {
    uint64_t v[4] = {key[0] ^ 0x736f6d6570736575, key[1] ^ 0x646f72616e646f6d, key[0] ^ 0x6c7967656e657261,
                     key[1] ^ 0x7465646279746573};
    for (size_t at = 0; at <= count; at += 8) {
        const size_t left = count - at;
        uint64_t word = left < 8 ? (uint64_t)count << 56 : 0;  // the last one has the length
        memcpy(&word, (const char*)bytes + at, left < 8 ? left : 8);
        v[3] ^= word, siphash_round(v), siphash_round(v), v[0] ^= word;
    }
    v[2] ^= 0xff;
    for (int i = 0; i < 4; i++) siphash_round(v);
    return v[0] ^ v[1] ^ v[2] ^ v[3];
}

void rendezvous_key(Launch* launch, const char* secret) {
    for (uint64_t i = 0; i < 2; i++) launch->key[i] = siphash((const uint64_t[2]){i, 0}, secret, strlen(secret));
}

uint64_t rendezvous_proof(const Launch* launch, const Hello* own, const Hello* other) {
    const Hello both[2] = {*own, *other};
    return siphash(launch->key, both, sizeof(both));
}

// Makes the Hello of this process. False if the system gives no random numbers.
static bool hello_make(const Launch* launch, Hello* own) {
    *own = (Hello){.rank = launch->rank, .pid = getpid()};
    gethostname(own->host, sizeof(own->host) - 1);
    return getrandom(own->random, sizeof(own->random), 0) == sizeof(own->random);
}

// True if this side still lacks this connection: elsewhere than on rank 0 it is one to rank 0, and there an open
// channel of a rank. Of two processes that say they are the same rank, the first one counts.
static bool connection_lacks(const Launch* launch, const Hello* other) {
    const int rank = other->rank, channel = other->channel;
    if (launch->rank > 0) return rank == 0;
    if (rank < 1 || rank >= launch->world || channel < 0 || channel >= CHANNELS) return false;
    const Peer* peer = &watch.peers[rank];
    return peer->socket[channel] < 0 &&
           (channel == 0 || memcmp(other->random, peer->hello.random, sizeof(other->random)) == 0);
}

// Proves this side of a new connection and checks the other. If that fails, it closes the socket and returns false.
static bool handshake(const Launch* launch, const Hello* own, int socket, double deadline) {
    uint64_t proof;
    Hello other;
    bool ok = send_all(socket, own, sizeof(*own)) && receive_by(socket, &other, sizeof(other), deadline) &&
              connection_lacks(launch, &other);
    for (int rank_proves = 1; ok && rank_proves >= 0; rank_proves--) {
        if (rank_proves == (launch->rank > 0)) {
            proof = rendezvous_proof(launch, own, &other);
            ok = send_all(socket, &proof, sizeof(proof));
        } else {
            ok = receive_by(socket, &proof, sizeof(proof), deadline) && proof == rendezvous_proof(launch, &other, own);
        }
    }
    if (!ok) return close(socket), false;
    pthread_mutex_lock(&lock);
    Peer* peer = &watch.peers[other.rank];
    peer->hello = other;
    peer->hello.host[sizeof(other.host) - 1] = 0;
    text_disarm(peer->hello.host, false);
    peer->heard = peer->moved = seconds_now();
    peer->socket[launch->rank > 0 ? own->channel : other.channel] = socket;
    pthread_mutex_unlock(&lock);
    return true;
}

// Returns the exit code of rank r, which launch_fork has made, as a shell gives it, and says how the rank has ended.
// The system tells it once: -1 before the end, and after the first answer.
static int ended_code(int r, int options, char how[128]) {
    siginfo_t its = {0};
    waitid(P_PID, (id_t)watch.launch.forked[r], &its, WEXITED | options);
    if (its.si_pid == 0) return -1;
    const bool exited = its.si_code == CLD_EXITED;
    snprintf(how, 128, "been ended by signal %d (%s)", its.si_status, strsignal(its.si_status));
    if (exited) snprintf(how, 128, "ended with exit code %d", its.si_status);
    return exited ? its.si_status : 128 + its.si_status;
}

static bool gather_ranks(Launch* launch, int64_t limit, char* error) {
    const double began = seconds_now(), deadline = began + (double)limit;
    int missing = (launch->world - 1) * CHANNELS, listed = 0;
    const char* list = "";
    char how[128];
    Hello own;
    if (launch->listener <= 0 && !rendezvous_listen(launch, error)) return false;
    if (!launch->has_secret) {
        fprintf(stderr,
                "train: note: NIBBLE_SECRET is not set, so anybody who reaches %s:%d could join this run; set it to "
                "the same random text on all ranks (openssl rand -hex 16 makes one)\n",
                launch->host, launch->port);
    }
    while (missing > 0 && seconds_now() < deadline) {
        for (int r = 1; r < launch->world && launch->forked; r++) {
            if (watch.peers[r].socket[BEATS] < 0 && ended_code(r, WNOHANG, how) >= 0)
                return data_error(error, "rank %d (process %d) has %s before it came", r, launch->forked[r], how);
        }
        struct pollfd waits = {launch->listener, POLLIN, 0};
        if (poll(&waits, 1, 100) <= 0) continue;
        const int one = accept4(launch->listener, NULL, NULL, SOCK_CLOEXEC);
        if (one < 0 && !(errno == EMFILE && more_descriptors())) sleep_ms(20);
        if (one < 0) continue;
        if (hello_make(launch, &own)) {
            missing -= handshake(launch, &own, one, seconds_now() + HANDSHAKE_SECONDS);
        } else {
            close(one);
        }
    }
    close(launch->listener);
    launch->listener = 0;
    for (int r = 1; r < launch->world; r++) {
        if (watch.peers[r].socket[BEATS] < 0 && ++listed <= 16)
            list = text_kept("%s%s%d", list, listed > 1 ? ", " : "", r);
    }
    return missing == 0 ||
           data_error(error,
                      "after %lld s these of the %d ranks have not come to rank 0 at %s:%d: %s%s; look at what they "
                      "say, start all with the same NIBBLE_SECRET and number of ranks, each as a rank of its own, or "
                      "give them longer with --join-timeout",
                      (long long)(seconds_now() - began), launch->world, launch->host, launch->port, list,
                      listed > 16 ? ", ..." : "");
}

static bool reach_first(const Launch* launch, int64_t limit, char* error) {
    const double deadline = seconds_now() + (double)limit;
    const char* reason = "the system gives no random numbers";
    Hello own;
    bool ok = hello_make(launch, &own);
    while (ok && own.channel < CHANNELS) {
        const int one = open_socket(launch->host, launch->port, false, &reason);
        const bool met = one >= 0 && handshake(launch, &own, one, deadline);
        own.channel += met;
        if (met) continue;
        if (one >= 0)
            reason = "who answers is of another run, or has another NIBBLE_SECRET, number of ranks or version";
        sleep_ms(50);
        ok = seconds_now() < deadline;
    }
    return ok || data_error(error,
                            "rank %d could not join rank 0 at %s:%d: %s; look at what rank 0 says, set MASTER_ADDR, "
                            "MASTER_PORT and NIBBLE_SECRET alike on all ranks, or give it longer with --join-timeout",
                            launch->rank, launch->host, launch->port, reason);
}

// The watch.

// A beat always fits into the socket: before its buffer is full, the other side has been silent for too long.
static void send_beats(const Beat* beat) {
    for (int r = 0; r < watch.launch.world; r++) {
        if (watch.peers[r].socket[BEATS] >= 0)
            send(watch.peers[r].socket[BEATS], beat, sizeof(*beat), MSG_NOSIGNAL | MSG_DONTWAIT);
    }
}

// Ends this process, and on rank 0 all ranks. It takes no memory, of which there may be none.
__attribute__((noreturn)) static void end_all(int code, const char* text) {
    char rest[4096];
    const Beat last = {.failed = code < 1 || code > 255 ? 1 : code};  // another rank's code must not look like success
    pthread_mutex_lock(&ending);
    fputs(text, stderr);
    fflush(stderr);
    send_beats(&last);
    // Waits until the others have closed their side, so that what was sent last is not lost with the socket.
    const double until = seconds_now() + 2;
    for (int r = 0; r < watch.launch.world; r++) shutdown(watch.peers[r].socket[BEATS], SHUT_WR);
    for (int r = 0; r < watch.launch.world; r++) {
        if (watch.peers[r].socket[BEATS] >= 0) receive_by(watch.peers[r].socket[BEATS], rest, sizeof(rest), until);
    }
    _exit(last.failed);
}

// Takes the place of the function of this name in data/errors.c.
void launch_failed(int code, const char* text) {
    const char* prefix = "train: error: ";
    char named[DATA_ERROR_BYTES + 256];
    if (!watch.begun || watch.leaves) return;
    // If the watch has lost a rank, it has the lock, says so and ends this process.
    if (watch.launch.rank == 0) pthread_mutex_lock(&lock), end_all(code, text);
    sleep_ms(1000);  // if all ranks make the same mistake, rank 0 prints it and ends this process meanwhile
    const bool is_error = strncmp(text, prefix, strlen(prefix)) == 0;
    snprintf(named, sizeof(named), "%srank %d: %s", prefix, watch.launch.rank, text + (is_error ? strlen(prefix) : 0));
    end_all(code, named);
}

// `silence`: the seconds without a beat, or 0 for a connection that has ended. The caller has the lock.
__attribute__((noreturn)) static void peer_lost(int r, int silence) {
    const Launch* launch = &watch.launch;
    const Hello* its = &watch.peers[r].hello;
    char how[128] = "ended without a word", text[512];
    int code = 1;
    if (silence > 0) {
        snprintf(how, sizeof(how), "been silent for %d s: it is stopped, or its machine cannot be reached", silence);
    } else if (launch->forked && r > 0) {
        // A rank's sockets close before its GPU's memory is freed, which may take long. Beats tell the others to wait.
        const double until = seconds_now() + watch.silence;
        while ((code = ended_code(r, WNOHANG, how)) < 0 && seconds_now() < until)
            send_beats(&watch.peers[0].beat), sleep_ms(50);
    }
    snprintf(text, sizeof(text), "train: error: rank %d on %s (process %d) has %s; all ranks stop\n", r, its->host,
             its->pid, how);
    // One rank of each machine says that rank 0 is lost; a shell says itself how the process that it started has ended.
    const bool speaks = launch->rank == 1 || launch->local_rank == 0, shell = launch->forked && silence == 0;
    end_all(code, r > 0 || (speaks && !shell) ? text : "");
}

// Reads a beat of rank r, whose first bytes have come. The end of the file means that the rank has ended.
static void beat_read(int r, double now) {
    Peer* peer = &watch.peers[r];
    Beat beat;
    if (!receive_by(peer->socket[BEATS], &beat, sizeof(beat), now + 1)) {
        if (!watch.leaves) peer_lost(r, 0);
        peer->socket[BEATS] = -1;
        return;
    }
    if (beat.failed) end_all(beat.failed, "");  // rank r has said why
    if (beat.progress != peer->beat.progress || beat.patience != peer->beat.patience) peer->moved = now;
    peer->beat = beat, peer->heard = now;
}

// Ends all ranks if none has made progress within its patience. The rank that is furthest behind is at fault.
static void check_progress(double now) {
    int behind = 0, ahead = 0;
    for (int r = 0; r < watch.launch.world; r++) {
        const Peer* peer = &watch.peers[r];
        if (peer->beat.patience == 0 || now - peer->moved < peer->beat.patience) return;
        if (peer->beat.progress < watch.peers[behind].beat.progress) behind = r;
        if (peer->beat.progress > watch.peers[ahead].beat.progress) ahead = r;
    }
    char who[256] = "no rank has", text[512];
    if (behind != ahead) {
        snprintf(who, sizeof(who), "rank %d on %s hangs: the others wait for it, and it has not", behind,
                 behind ? watch.peers[behind].hello.host : "this host");
    }
    snprintf(text, sizeof(text), "train: error: %s made progress for %d s (%s); all ranks stop\n", who,
             watch.peers[0].beat.patience, watch.what);
    end_all(1, text);
}

static void* watch_thread(void* unused) {
    (void)unused;
    struct pollfd* polled = memory_zero((size_t)watch.launch.world, sizeof(struct pollfd));
    double sent = 0, before = seconds_now();
    for (;; poll(polled, (nfds_t)watch.launch.world, 50)) {
        const double now = seconds_now();
        const bool paused = now - before > 3;  // Ctrl-Z, or a suspended machine
        before = now;
        pthread_mutex_lock(&lock);
        for (int r = 0; r < watch.launch.world; r++) {
            Peer* peer = &watch.peers[r];
            if (paused) peer->heard = peer->moved = now;  // the others have not been silent
            if (polled[r].revents) beat_read(r, now);
            polled[r] = (struct pollfd){peer->socket[BEATS], POLLIN, 0};
            if (polled[r].fd >= 0 && now - peer->heard > watch.silence) peer_lost(r, watch.silence);
        }
        if (watch.launch.rank == 0) check_progress(now);
        if (now - sent >= 1) send_beats(&watch.peers[watch.launch.rank].beat), sent = now;
        pthread_mutex_unlock(&lock);
    }
}

bool launch_join(Launch* launch, int64_t limit, char* error) {
    if (launch->world == 1) return true;
    const char* silence = getenv("NIBBLE_SILENCE");
    // With any launcher: for error messages, and for notes that the first rank of a machine prints.
    setenv("RANK", text_kept("%d", launch->rank), 1), setenv("LOCAL_RANK", text_kept("%d", launch->local_rank), 1);
    const int cores = launch->local_world > 1 ? omp_get_num_procs() / launch->local_world : 0;
    // The ranks of a machine share its cores.
    if (!getenv("OMP_NUM_THREADS") && launch->local_world > 1) omp_set_num_threads(cores > 0 ? cores : 1);
    watch.peers = memory_zero((size_t)launch->world, sizeof(Peer));
    for (int r = 0; r < launch->world; r++) watch.peers[r].socket[MESSAGES] = watch.peers[r].socket[BEATS] = -1;
    watch.launch = *launch;
    watch.silence = silence && atoi(silence) > 0 ? atoi(silence) : SILENCE_SECONDS;
    if (launch->rank > 0 && !reach_first(launch, limit, error)) return false;
    watch.begun = true;
    pthread_t thread;
    const int status = signals_thread(&thread, watch_thread, NULL);
    if (status != 0) return data_error(error, "the thread that watches the ranks cannot start: %s", strerror(status));
    if (launch->rank == 0 && !gather_ranks(launch, limit, error)) return false;
    launch_any(launch, false);  // all have come
    return true;
}

// Messages between ranks. If one fails, the watch of this rank or of rank 0 soon ends the process and says why.

// Sends bytes to rank r or, where `given` is NULL, takes them from it.
static void pass_bytes(int r, const void* given, void* taken, int64_t count) {
    const int socket = watch.peers[r].socket[MESSAGES];
    if (given ? send_all(socket, given, (size_t)count) : receive_by(socket, taken, (size_t)count, INFINITY)) return;
    sleep_ms(2000);             // the watch may have to hear why
    pthread_mutex_lock(&lock);  // and ends this process if it has lost the rank itself
    peer_lost(r, 0);
}

void launch_broadcast(const Launch* launch, void* bytes, int64_t count) {
    if (launch->rank > 0) return pass_bytes(0, NULL, bytes, count);
    for (int r = 1; r < launch->world; r++) pass_bytes(r, bytes, NULL, count);
}

void launch_gather(const Launch* launch, const void* own, int64_t count, void* all) {
    if (launch->rank > 0) pass_bytes(0, own, NULL, count);
    if (launch->rank == 0) memcpy(all, own, (size_t)count);
    for (int r = 1; r < launch->world && launch->rank == 0; r++) pass_bytes(r, NULL, (char*)all + r * count, count);
    launch_broadcast(launch, all, launch->world * count);
}

void launch_all_reduce(const Launch* launch, double* values, int count, LaunchReduction how) {
    const int64_t bytes = count * (int64_t)sizeof(double);
    SCOPED double* all = memory_take((size_t)(launch->world * bytes));
    launch_gather(launch, values, bytes, all);
    memcpy(values, all, (size_t)bytes);
    for (int i = count; i < launch->world * count; i++) {
        double* value = &values[i % count];
        *value = how == LAUNCH_SUM ? *value + all[i] : *value >= all[i] ? *value : all[i];
    }
}

bool launch_any(const Launch* launch, bool flag) {
    double value = flag;
    launch_all_reduce(launch, &value, 1, LAUNCH_MAX);
    return value > 0;
}

void watchdog_arm(const Launch* launch, const char* what, double patience) {
    if (!watch.begun) return;
    pthread_mutex_lock(&lock);
    Peer* own = &watch.peers[launch->rank];
    snprintf(watch.what, sizeof(watch.what), "%s", what);
    own->beat.patience = patience == 0 || patience > watch.silence ? (int)patience : watch.silence;
    own->moved = seconds_now();
    own->beat.progress++;
    pthread_mutex_unlock(&lock);
}

void watchdog_disarm(const Launch* launch) {
    watchdog_arm(launch, "", 0);
}

int launch_leave(const Launch* launch, int code) {
    if (!watch.begun) return code;
    int first = code;
    char how[128];
    watchdog_disarm(launch);
    pthread_mutex_lock(&lock);
    watch.leaves = true;
    pthread_mutex_unlock(&lock);
    launch_any(launch, false);  // no rank ends before all have come here
    for (int r = 1; r < launch->world && launch->forked && launch->rank == 0; r++) {
        const int its = ended_code(r, 0, how);
        if (first == code && its > 0) first = its;
    }
    return first;
}
