// See launch.h. Messages between ranks, and the watch: a thread on every rank that sends a beat every second, hears
// those of others, and ends the process when another rank has failed, ended, or been silent for too long.
//
// Rank 0 hears all ranks, and they hear rank 0 alone: if it ends, all do.
#include <errno.h>
#include <math.h>
#include <omp.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include "../../data/memory.h"
#include "../../data/signals.h"
#include "../../data/text.h"
#include "rendezvous.h"

// Global, since callers of launch_failed know nothing of ranks.
static struct {
    Peer* peers;  // (world); NULL: no watch. peers[rank] has no socket
    int rank, world, silence;
    char what[64];  // this rank does
    bool speaks;    // prints that rank 0 is lost: one rank of each machine
    bool forked;    // the parent process prints how a rank ended
    bool leaves;    // the others may end
} watch;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;    // of this rank's own beat, and of `what` and `leaves`
static pthread_mutex_t ending = PTHREAD_MUTEX_INITIALIZER;  // who has it ends the process

// A beat always fits into the socket: before its buffer is full, the other side has been silent for too long.
static void send_beats(const Beat* beat) {
    for (int r = 0; r < watch.world; r++) {
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
    for (int r = 0; r < watch.world; r++) shutdown(watch.peers[r].socket[BEATS], SHUT_WR);
    for (int r = 0; r < watch.world; r++) {
        if (watch.peers[r].socket[BEATS] >= 0) receive_by(watch.peers[r].socket[BEATS], rest, sizeof(rest), until);
    }
    _exit(last.failed);
}

// Takes the place of the function of this name in data/errors.c.
void launch_failed(int code, const char* text) {
    const char* prefix = "train: error: ";
    char named[DATA_ERROR_BYTES + 256];
    if (!watch.peers || watch.leaves) return;
    if (watch.rank == 0) end_all(code, text);
    sleep_ms(1000);  // if all ranks make the same mistake, rank 0 prints it and ends this process meanwhile
    const bool is_error = strncmp(text, prefix, strlen(prefix)) == 0;
    snprintf(named, sizeof(named), "%srank %d: %s", prefix, watch.rank, text + (is_error ? strlen(prefix) : 0));
    end_all(code, named);
}

// `silence`: the seconds without a beat, or 0 for a connection that has ended.
__attribute__((noreturn)) static void peer_lost(int r, int silence) {
    const Hello* its = &watch.peers[r].hello;
    char how[128] = "ended without a word", text[512];
    if (silence > 0) {
        snprintf(how, sizeof(how), "been silent for %d s: it is stopped, or its machine cannot be reached", silence);
    }
    snprintf(text, sizeof(text), "train: error: rank %d on %s (process %d) has %s; all ranks stop\n", r, its->host,
             its->pid, how);
    end_all(1, (r == 0 && !watch.speaks) || (silence == 0 && watch.forked) ? "" : text);
}

static void hear(int r, double now) {
    Peer* peer = &watch.peers[r];
    const ssize_t got =
        recv(peer->socket[BEATS], (char*)&peer->in + peer->bytes, sizeof(Beat) - peer->bytes, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0 && !watch.leaves) peer_lost(r, 0);
    if (got <= 0) {
        close(peer->socket[BEATS]), peer->socket[BEATS] = -1;
        return;
    }
    peer->heard = now;
    peer->bytes = (peer->bytes + (size_t)got) % sizeof(Beat);
    if (peer->bytes > 0) return;
    if (peer->in.failed) end_all(peer->in.failed, "");  // and it has said why
    if (peer->in.progress != peer->beat.progress || peer->in.patience != peer->beat.patience) peer->moved = now;
    peer->beat = peer->in;
}

// Ends all ranks if none has made progress within its patience. The rank that is furthest behind is at fault.
static void check_progress(double now) {
    int behind = 0, ahead = 0;
    for (int r = 0; r < watch.world; r++) {
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
    struct pollfd* polled = memory_zero((size_t)watch.world, sizeof(struct pollfd));
    double sent = 0, before = seconds_now();
    for (;; poll(polled, (nfds_t)watch.world, 200)) {
        const double now = seconds_now();
        const bool paused = now - before > 3;  // Ctrl-Z, or a suspended machine
        before = now;
        pthread_mutex_lock(&lock);
        for (int r = 0; r < watch.world; r++) {
            Peer* peer = &watch.peers[r];
            if (paused) peer->heard = peer->moved = now;  // the others have not been silent
            if (polled[r].revents) hear(r, now);
            polled[r] = (struct pollfd){peer->socket[BEATS], POLLIN, 0};
            if (polled[r].fd >= 0 && now - peer->heard > watch.silence) peer_lost(r, watch.silence);
        }
        if (watch.rank == 0) check_progress(now);
        if (now - sent >= 1) send_beats(&watch.peers[watch.rank].beat), sent = now;
        pthread_mutex_unlock(&lock);
    }
}

// Sets the number of OpenMP threads: the ranks of a machine share its cores.
static void share_cores(int local_world) {
    const int cores = local_world > 1 ? omp_get_num_procs() / local_world : 0;
    if (!getenv("OMP_NUM_THREADS") && local_world > 1) omp_set_num_threads(cores > 0 ? cores : 1);
}

bool launch_join(Launch* launch, int64_t limit, char* error) {
    if (launch->world == 1) return true;
    const char* silence = getenv("NIBBLE_SILENCE");
    // With any launcher: for error messages, and for notes that the first rank of a machine prints.
    setenv("RANK", text_kept("%d", launch->rank), 1), setenv("LOCAL_RANK", text_kept("%d", launch->local_rank), 1);
    share_cores(launch->local_world);
    Peer* peers = memory_zero((size_t)launch->world, sizeof(Peer));
    for (int r = 0; r < launch->world; r++) peers[r].socket[MESSAGES] = peers[r].socket[BEATS] = -1;
    snprintf(peers[0].hello.host, sizeof(peers[0].hello.host), "%.60s", launch->host);
    if (!(launch->rank == 0 ? rendezvous_gather(launch, peers, limit, error)
                            : rendezvous_reach(launch, &peers[0], limit, error)))
        return false;
    for (int r = 0; r < launch->world; r++) peers[r].heard = peers[r].moved = seconds_now();
    watch.peers = peers, watch.rank = launch->rank, watch.world = launch->world;
    watch.silence = silence && atoi(silence) > 0 ? atoi(silence) : SILENCE_SECONDS;
    watch.forked = strcmp(launch->source, "--gpus") == 0;
    watch.speaks = launch->rank == 1 || launch->local_rank == 0;
    pthread_t thread;
    const int status = signals_thread(&thread, watch_thread, NULL);
    return status == 0 || data_error(error, "the thread that watches the ranks cannot start: %s", strerror(status));
}

// Messages between ranks. If one fails, the watch of this rank or of rank 0 soon ends the process and says why.

__attribute__((noreturn)) static void message_lost(int r) {
    sleep_ms(2000);
    peer_lost(r, 0);
}

static void give_bytes(int to, const void* bytes, size_t count) {
    if (!send_all(watch.peers[to].socket[MESSAGES], bytes, count)) message_lost(to);
}

static void take_bytes(int from, void* bytes, size_t count) {
    if (!receive_by(watch.peers[from].socket[MESSAGES], bytes, count, INFINITY)) message_lost(from);
}

void launch_broadcast(const Launch* launch, int from, void* bytes, int64_t count) {
    if (launch->world == 1 || count == 0) return;
    if (from > 0 && launch->rank == 0) take_bytes(from, bytes, (size_t)count);
    if (from > 0 && launch->rank == from) give_bytes(0, bytes, (size_t)count);
    if (launch->rank > 0 && launch->rank != from) take_bytes(0, bytes, (size_t)count);
    for (int r = 1; r < launch->world && launch->rank == 0; r++) {
        if (r != from) give_bytes(r, bytes, (size_t)count);
    }
}

// Copies the bytes of all ranks, one after another, to `all` on rank 0.
static void collect(const Launch* launch, const void* own, size_t count, void* all) {
    if (launch->rank > 0) return give_bytes(0, own, count);
    memcpy(all, own, count);
    for (int r = 1; r < launch->world; r++) take_bytes(r, (char*)all + (size_t)r * count, count);
}

void launch_gather(const Launch* launch, const void* own, int64_t count, void* all) {
    collect(launch, own, (size_t)count, all);
    launch_broadcast(launch, 0, all, launch->world * count);
}

void launch_all_reduce(const Launch* launch, double* values, int count, LaunchReduction how) {
    const size_t bytes = (size_t)count * sizeof(double);
    SCOPED double* all = memory_take((size_t)launch->world * bytes);
    collect(launch, values, bytes, all);
    for (int i = count; i < launch->world * count && launch->rank == 0; i++) {
        double* value = &values[i % count];
        *value = how == LAUNCH_SUM ? *value + all[i] : *value >= all[i] ? *value : all[i];
    }
    launch_broadcast(launch, 0, values, (int64_t)bytes);
}

bool launch_any(const Launch* launch, bool flag) {
    double value = flag;
    launch_all_reduce(launch, &value, 1, LAUNCH_MAX);
    return value > 0;
}

void watchdog_arm(const Launch* launch, const char* what, double patience) {
    if (!watch.peers) return;
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

void launch_leave(const Launch* launch) {
    if (!watch.peers) return;
    watchdog_disarm(launch);
    pthread_mutex_lock(&lock);
    watch.leaves = true;
    pthread_mutex_unlock(&lock);
    launch_any(launch, false);  // no rank ends before all have come here
}
