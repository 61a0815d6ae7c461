// See launch.h. Messages between ranks, and the watch: a thread on every rank that receives messages, sends a beat
// every second, and ends the process when another rank has failed, ended, or been silent for too long.
//
// A frame is a Head and at most PAYLOAD bytes. Rank 0 hears all ranks and tells the others when one of them fails; they
// hear rank 0 alone.
#include <errno.h>
#include <omp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#include "../../data/memory.h"
#include "../../data/signals.h"
#include "../../data/text.h"
#include "rendezvous.h"

enum { PAYLOAD = 16384 };

typedef enum { DATA, BEAT, FAILED, BYE } Kind;

typedef struct {
    int32_t kind, bytes;  // of the payload: of BEAT what the rank does, of FAILED its message
    int32_t number;       // of BEAT its patience, of FAILED its exit code
    int32_t zero;         // where a gap would be
    int64_t progress;     // of BEAT
} Head;

// Global, since callers of launch_failed know nothing of ranks.
static struct {
    Peer* peers;  // (world); NULL: no watch. peers[rank] has no socket
    int rank, world, silence;
    bool speaks;  // prints that rank 0 is lost: one rank of each machine
    bool forked;  // the parent process prints how a rank ended
    bool ending;
} watch;
// Held by whoever uses `watch`. Recursive, since a function that holds it can find no memory and call launch_failed.
static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static pthread_cond_t arrived = PTHREAD_COND_INITIALIZER;

static void bytes_add(Bytes* to, const void* bytes, size_t count) {
    if (count == 0) return;
    if (to->count + count > to->room) to->data = memory_grow(to->data, to->room = 2 * (to->count + count));
    memcpy(to->data + to->count, bytes, count);
    to->count += count;
}

static void bytes_drop(Bytes* from, size_t count) {
    memmove(from->data, from->data + count, from->count -= count);
}

// Sends what the system takes now; the rest stays in peer->out. That the other side has ended shows where it is read.
static void flush_peer(Peer* peer) {
    while (peer->socket >= 0 && peer->out.count > 0) {
        const ssize_t sent = send(peer->socket, peer->out.data, peer->out.count, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent <= 0) return;
        bytes_drop(&peer->out, (size_t)sent);
    }
}

static void send_frame(Peer* peer, Kind kind, int number, const void* payload, size_t bytes) {
    const Head head = {kind, (int32_t)bytes, number, 0, watch.peers[watch.rank].progress};
    if (peer->socket < 0) return;
    bytes_add(&peer->out, &head, sizeof(head));
    bytes_add(&peer->out, payload, bytes);
    flush_peer(peer);
}

static void tell_all(Kind kind, int number, const char* text) {
    const size_t bytes = strlen(text);
    for (int r = 0; r < watch.world; r++) {
        send_frame(&watch.peers[r], kind, number, text, bytes < PAYLOAD ? bytes : PAYLOAD);
    }
}

// Ends this process, and on rank 0 all ranks. `spoken`: the message has been printed already.
__attribute__((noreturn, format(printf, 3, 4))) static void end_all(int code, bool spoken, const char* format, ...) {
    char text[DATA_ERROR_BYTES + 256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    if (code < 1 || code > 255) code = 1;  // what another rank sent must not look like success
    pthread_mutex_lock(&lock);             // for good
    if (watch.ending) _exit(code);         // there is no memory for the messages below
    watch.ending = true;
    if (!spoken) fputs(text, stderr), fflush(stderr);
    tell_all(FAILED, code, text);
    // Waits until the others have closed their side, so that what was sent last is not lost with the socket.
    const double until = seconds_now() + 2;
    for (int open = 1; open > 0 && seconds_now() < until;) {
        open = 0;
        for (int r = 0; r < watch.world; r++) {
            Peer* peer = &watch.peers[r];
            if (peer->socket < 0) continue;
            flush_peer(peer);
            if (peer->out.count == 0) shutdown(peer->socket, SHUT_WR);
            const ssize_t got = recv(peer->socket, text, sizeof(text), MSG_DONTWAIT);
            open += got > 0 || (got < 0 && (errno == EAGAIN || errno == EINTR));
        }
        if (open > 0) sleep_ms(10);
    }
    _exit(code);
}

// Takes the place of the function of this name in data/errors.c. The message is printed once, by rank 0.
void launch_failed(int code, const char* text) {
    if (!watch.peers || watch.peers[watch.rank].left) return;
    if (watch.rank > 0) {
        // If all ranks make the same mistake, rank 0 should report it; it then ends this process too.
        sleep_ms(500);
        pthread_mutex_lock(&lock);
        tell_all(FAILED, code, text);
        pthread_mutex_unlock(&lock);
        sleep_ms(5000);
    }
    end_all(code, false, "%s", text);
}

__attribute__((noreturn)) static void peer_lost(int r, bool ended, const char* how) {
    const Peer* peer = &watch.peers[r];
    end_all(1, (r == 0 && !watch.speaks) || (ended && watch.forked),
            "train: error: rank %d on %s (process %d) %s; all ranks stop\n", r, peer->host, peer->pid, how);
}

static void take_frame(int r, const Head* head, const char* payload) {
    Peer* peer = &watch.peers[r];
    if (head->kind == DATA) return bytes_add(&peer->data, payload, (size_t)head->bytes);
    const char* prefix = "train: error: ";
    SCOPED char* text = text_part(payload, (size_t)head->bytes);
    text_disarm(text, true);
    if (head->kind == FAILED && r == 0) end_all(head->number, true, "%s", text);
    if (head->kind == FAILED) {
        const char* rest = text + (strncmp(text, prefix, strlen(prefix)) == 0 ? strlen(prefix) : 0);
        end_all(head->number, false, "%srank %d on %s: %s", prefix, r, peer->host, rest);
    }
    if (head->progress != peer->progress || head->number != peer->patience) peer->moved = peer->heard;
    peer->left |= head->kind == BYE, peer->progress = head->progress, peer->patience = head->number;
    snprintf(peer->what, sizeof(peer->what), "%.60s", text);
}

static void read_peer(int r) {
    Peer* peer = &watch.peers[r];
    char bytes[sizeof(Head) + PAYLOAD];
    const ssize_t got = recv(peer->socket, bytes, sizeof(bytes), MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0 && !peer->left) peer_lost(r, true, "has ended without a word");
    if (got <= 0) {
        close(peer->socket), peer->socket = -1;
        return;
    }
    peer->heard = seconds_now();
    bytes_add(&peer->in, bytes, (size_t)got);
    for (Head head; peer->in.count >= sizeof(head); bytes_drop(&peer->in, sizeof(head) + (size_t)head.bytes)) {
        memcpy(&head, peer->in.data, sizeof(head));
        if (head.kind < DATA || head.kind > BYE || head.bytes < 0 || head.bytes > PAYLOAD || head.progress < 0 ||
            (head.kind != FAILED && head.number < 0))
            peer_lost(r, false, "has sent what is no message");
        if (peer->in.count < sizeof(head) + (size_t)head.bytes) break;
        take_frame(r, &head, peer->in.data + sizeof(head));
    }
}

// Ends all ranks if none has made progress within its patience. The rank that is furthest behind is at fault.
static void check_progress(double now) {
    int behind = 0, ahead = 0;
    for (int r = 0; r < watch.world; r++) {
        const Peer* peer = &watch.peers[r];
        if (peer->left || peer->patience == 0 || now - peer->moved < peer->patience) return;
        if (peer->progress < watch.peers[behind].progress) behind = r;
        if (peer->progress > watch.peers[ahead].progress) ahead = r;
    }
    const Peer* last = &watch.peers[behind];
    const char* who = behind == ahead ? "no rank has"
                                      : text_kept("rank %d on %s hangs: the others wait for it, and it has not", behind,
                                                  behind ? last->host : "this host");
    end_all(1, false, "train: error: %s made progress for %d s (%s); all ranks stop\n", who, last->patience,
            last->what);
}

static void* watch_thread(void* unused) {
    (void)unused;
    struct pollfd* polled = memory_zero((size_t)watch.world, sizeof(struct pollfd));
    double beat = 0, before = seconds_now();
    for (;;) {
        pthread_mutex_lock(&lock);
        const double now = seconds_now();
        const bool paused = now - before > 3;  // Ctrl-Z, or a suspended machine
        before = now;
        for (int r = 0; r < watch.world; r++) {
            Peer* peer = &watch.peers[r];
            if (paused) peer->heard = peer->moved = now;  // the others have not been silent
            if (polled[r].revents && peer->socket >= 0) read_peer(r);
            flush_peer(peer);
            if (peer->socket >= 0 && now - peer->heard > watch.silence) {
                peer_lost(r, false,
                          text_kept("has been silent for %d s: it is stopped, or its machine cannot be reached",
                                    watch.silence));
            }
            polled[r] = (struct pollfd){peer->socket, POLLIN, 0};
        }
        if (watch.rank == 0) check_progress(now);
        const Peer* own = &watch.peers[watch.rank];
        if (now - beat >= 1) tell_all(BEAT, own->patience, own->what), beat = now;
        pthread_cond_broadcast(&arrived);
        pthread_mutex_unlock(&lock);
        poll(polled, (nfds_t)watch.world, 200);
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
    for (int r = 0; r < launch->world; r++) peers[r].socket = -1;
    snprintf(peers[0].host, sizeof(peers[0].host), "%.60s", launch->host);
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

// Messages between ranks.

static void give_bytes(int to, const void* bytes, size_t count) {
    Peer* peer = &watch.peers[to];
    pthread_mutex_lock(&lock);
    for (size_t at = 0; at < count; at += PAYLOAD) {
        send_frame(peer, DATA, 0, (const char*)bytes + at, count - at < PAYLOAD ? count - at : PAYLOAD);
        while (peer->socket >= 0 && peer->out.count > 0) {
            struct pollfd one = {peer->socket, POLLOUT, 0};
            pthread_mutex_unlock(&lock);
            poll(&one, 1, 100);
            pthread_mutex_lock(&lock);
            flush_peer(peer);
        }
    }
    pthread_mutex_unlock(&lock);
}

static void take_bytes(int from, void* bytes, size_t count) {
    Peer* peer = &watch.peers[from];
    pthread_mutex_lock(&lock);
    while (peer->data.count < count && peer->socket >= 0) pthread_cond_wait(&arrived, &lock);
    if (peer->data.count < count)
        end_all(1, false, "train: error: rank %d on %s has ended and others still wait for it; all ranks stop\n", from,
                peer->host);
    memcpy(bytes, peer->data.data, count);
    bytes_drop(&peer->data, count);
    pthread_mutex_unlock(&lock);
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
    snprintf(own->what, sizeof(own->what), "%s", what);
    own->patience = patience == 0 || patience > watch.silence ? (int)patience : watch.silence;
    own->moved = seconds_now();
    own->progress++;
    pthread_mutex_unlock(&lock);
}

void watchdog_disarm(const Launch* launch) {
    watchdog_arm(launch, "", 0);
}

void launch_leave(const Launch* launch) {
    if (!watch.peers) return;
    watchdog_disarm(launch);
    pthread_mutex_lock(&lock);
    tell_all(BYE, 0, "");
    watch.peers[launch->rank].left = true;
    pthread_mutex_unlock(&lock);
    launch_any(launch, false);  // then all have had the good-bye, and a connection that ends is no failure
}
