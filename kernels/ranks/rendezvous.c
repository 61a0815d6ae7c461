// See rendezvous.h. The protocol:
//
// 1. Rank 0 listens at the first address of MASTER_ADDR that its machine has, and at MASTER_PORT. Each other rank
//    connects to it, again and again until --join-timeout has passed.
// 2. Rank 0 sends a Challenge (36 bytes): a random number.
// 3. The rank sends a Hello (272 bytes): its number, its job, a random number, and its proof, the HMAC-SHA256 of the
//    Challenge and the Hello under a key that follows from NIBBLE_SECRET.
// 4. Rank 0 sends a Welcome (40 bytes) with a proof of its own, or closes the connection of a rank that is of another
//    job or has proven nothing.
// 5. When all ranks are there, or one cannot be part of the run, or --join-timeout has passed, rank 0 closes its
//    listening socket and sends every rank a second Welcome, which says whether the run goes on.
//
// So W ranks take 4 (W - 1) messages. Rank 0 handles all handshakes at the same time. Each may take HANDSHAKE_SECONDS
// or, when there are W + SPARE of them, a quarter of a second, so a slow or silent connection delays others by no more.
//
// The secret is not sent, and an old proof is worth nothing. A stranger without it can take such places, no more. One
// who can relay packets between the machines can take the place of a rank: what follows the handshake is neither
// encrypted nor signed.
#include "rendezvous.h"
#include <errno.h>
#include <math.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>
#include "../../data/files.h"
#include "../../data/memory.h"
#include "../../data/text.h"

enum { HANDSHAKE_SECONDS = 5, SPARE = 128 };

// Opens a socket that listens at the first address of `host` that this machine has, or that is connected to it. -1 if
// that fails, with the reason as a text and in errno.
static int open_socket(const char* host, int port, bool listens, const char** reason) {
    const struct addrinfo hints = {.ai_socktype = SOCK_STREAM};
    const struct timeval second = {1, 0};  // for connecting, and for a handshake's small messages
    const int yes = 1, no = 0;
    struct addrinfo* list = NULL;
    int one = -1, failed = EADDRNOTAVAIL, unknown = getaddrinfo(host, text_kept("%d", port), &hints, &list);
    for (const struct addrinfo* at = list; at && one < 0; at = at->ai_next) {
        one = socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | (listens ? SOCK_NONBLOCK : 0), 0);
        if (one < 0) continue;  // a system without IPv6
        setsockopt(one, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
        setsockopt(one, SOL_SOCKET, SO_SNDTIMEO, &second, sizeof(second));
        setsockopt(one, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));  // accepted sockets inherit it
        if (at->ai_family == AF_INET6) setsockopt(one, IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof(no));
        if (listens ? bind(one, at->ai_addr, at->ai_addrlen) == 0 && listen(one, 4096) == 0
                    : connect(one, at->ai_addr, at->ai_addrlen) == 0)
            break;
        failed = errno;
        close(one);
        one = -1;
        if (listens && failed != EADDRNOTAVAIL) break;
    }
    if (list) freeaddrinfo(list);
    errno = unknown ? EINVAL : failed;
    *reason = unknown ? gai_strerror(unknown) : strerror(failed);
    return one;
}

// Reads the address at which a socket listens. True if it is reached from this machine alone.
static bool is_loopback(int socket, int* port) {
    struct sockaddr_in6 own = {0};
    socklen_t bytes = sizeof(own);
    getsockname(socket, (struct sockaddr*)&own, &bytes);
    *port = ntohs(own.sin6_port);  // which IPv4 has in the same place
    return own.sin6_family == AF_INET ? ((unsigned char*)&((struct sockaddr_in*)&own)->sin_addr)[0] == 127
                                      : IN6_IS_ADDR_LOOPBACK(&own.sin6_addr);
}

bool rendezvous_listen(Launch* launch, char* error) {
    const char *reason, *any;
    int port, one = open_socket(launch->host, launch->port, true, &reason);
    // Other machines do not find a name that the hosts file maps to loopback, as Debian's maps the machine's own. The
    // address of a gateway is none of this machine's. Rank 0 then listens at all addresses, the latter with a secret.
    const bool is_name = !strstr(launch->host, "localhost") && strspn(launch->host, "0123456789.:") == 0;
    const bool hidden = one >= 0 && launch->local_world != launch->world && is_name && is_loopback(one, &port);
    if (hidden) close(one);
    if (hidden || (one < 0 && errno == EADDRNOTAVAIL && launch->has_secret)) {
        one = open_socket("::", launch->port, true, &any);  // IPv4 too
        if (one < 0) one = open_socket("0.0.0.0", launch->port, true, &any);
    }
    if (one < 0) {
        return data_error(error,
                          "rank 0 cannot listen at %s:%d (%s); set MASTER_ADDR to an address of its machine and "
                          "MASTER_PORT to a free port, alike on all ranks",
                          launch->host, launch->port, reason);
    }
    is_loopback(one, &launch->port);
    launch->listener = one;
    return true;
}

// Messages.

// Sends a message, which fits into the buffers of a new connection and so does not wait.
static bool send_message(int socket, const void* bytes, size_t count) {
    return send(socket, bytes, count, MSG_NOSIGNAL) == (ssize_t)count;
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

void rendezvous_prove(const Launch* launch, const char* role, const Challenge* challenge, const Hello* hello,
                      unsigned char proof[HMAC_BYTES]) {
    struct {
        char role[8];
        Challenge challenge;
        Hello hello;
    } all = {.challenge = *challenge, .hello = *hello};
    memcpy(all.role, role, strlen(role));
    memset(all.hello.proof, 0, HMAC_BYTES);
    hmac_sha256(launch->key, HMAC_BYTES, &all, sizeof(all), proof);
}

static bool verify_proof(const Launch* launch, const char* role, const Challenge* challenge, const Hello* hello,
                         const unsigned char proof[HMAC_BYTES]) {
    unsigned char want[HMAC_BYTES], differ = 0;
    rendezvous_prove(launch, role, challenge, hello, want);
    for (int i = 0; i < HMAC_BYTES; i++) differ |= want[i] ^ proof[i];  // as long wherever they differ
    return differ == 0;
}

// Rank 0.

typedef struct {
    int socket;
    double since;
    size_t bytes;  // received of the hello
    Challenge challenge;
    Hello hello;
} Handshake;

typedef struct {
    const Launch* launch;
    Peer* peers;
    Handshake* open;  // (room)
    int count, room;
    int came;        // admitted ranks
    bool strangers;  // some have not proven that they know the secret
    bool ok;         // false: the run cannot go on, and `error` says why
    char* error;
} Listener;

// True if the other side, which must not send anything now, has closed the connection: it gave up waiting.
static bool is_closed(int socket) {
    char byte;
    const ssize_t got = recv(socket, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR);
}

// Admits a rank that has proven itself, or ends the run if that rank does not fit. True if the connection is kept.
static bool admit(Listener* listener, const Handshake* handshake) {
    const Launch* launch = listener->launch;
    const Hello* hello = &handshake->hello;
    const bool fits = hello->world == launch->world && hello->rank > 0 && hello->rank < launch->world;
    Peer* peer = fits ? &listener->peers[hello->rank] : NULL;
    char host[sizeof(hello->host)];
    snprintf(host, sizeof(host), "%.*s", (int)sizeof(host) - 1, hello->host);
    text_disarm(host, false);
    if (fits && peer->socket >= 0 && is_closed(peer->socket)) close(peer->socket), peer->socket = -1, listener->came--;
    if (!fits) {
        listener->ok = data_error(
            listener->error, "rank %d of %d came from %s and this run has %d ranks; start all with the same number",
            hello->rank, hello->world, host, launch->world);
    } else if (peer->socket >= 0) {
        listener->ok = data_error(
            listener->error, "two processes say that they are rank %d: on %s and on %s; give each a rank of its own",
            hello->rank, peer->host, host);
    }
    Welcome welcome = {.goes_on = listener->ok, .pid = getpid()};
    rendezvous_prove(launch, "rank 0", &handshake->challenge, hello, welcome.proof);
    if (!send_message(handshake->socket, &welcome, sizeof(welcome)) || !listener->ok) return false;
    peer->socket = handshake->socket, peer->pid = hello->pid;
    memcpy(peer->host, host, sizeof(host));
    listener->came++;
    return true;
}

// Reads what has arrived. False if the handshake is over; its socket is then -1 or to be closed.
static bool read_handshake(Listener* listener, Handshake* handshake) {
    Hello* hello = &handshake->hello;
    char* to = (char*)hello + handshake->bytes;
    const ssize_t got = recv(handshake->socket, to, sizeof(*hello) - handshake->bytes, MSG_DONTWAIT);
    if (got <= 0) return got < 0 && (errno == EAGAIN || errno == EINTR);
    handshake->bytes += (size_t)got;
    if (handshake->bytes >= sizeof(hello->magic) && hello->magic != RENDEZVOUS_MAGIC) return false;
    if (handshake->bytes < sizeof(*hello)) return true;
    if (memcmp(hello->job, listener->launch->job, sizeof(hello->job)) != 0) return false;
    if (!verify_proof(listener->launch, "rank", &handshake->challenge, hello, hello->proof)) {
        listener->strangers = true;
    } else if (admit(listener, handshake)) {
        handshake->socket = -1;
    }
    return false;
}

static void accept_connection(Listener* listener) {
    Handshake* next = &listener->open[listener->count];
    const int one = accept4(listener->launch->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (one < 0 && errno == EMFILE && more_descriptors()) return;  // the listener is still ready
    if (one < 0 && errno != EAGAIN) sleep_ms(20);                  // until some are closed
    if (one < 0) return;
    *next = (Handshake){.socket = one, .since = seconds_now(), .challenge.magic = RENDEZVOUS_MAGIC};
    if (getrandom(next->challenge.random, HMAC_BYTES, 0) == HMAC_BYTES &&
        send_message(one, &next->challenge, sizeof(next->challenge))) {
        listener->count++;
    } else {
        close(one);
    }
}

// Handles what arrives within a quarter of a second.
static void serve(Listener* listener, struct pollfd* polled) {
    const int count = listener->count;
    const double limit = count == listener->room ? 0.25 : HANDSHAKE_SECONDS;
    for (int i = 0; i < count; i++) polled[i] = (struct pollfd){listener->open[i].socket, POLLIN, 0};
    polled[count] = (struct pollfd){count < listener->room ? listener->launch->listener : -1, POLLIN, 0};
    if (poll(polled, (nfds_t)count + 1, 250) < 0) return;
    for (int i = count - 1; i >= 0 && listener->ok; i--) {
        Handshake* handshake = &listener->open[i];
        if (seconds_now() - handshake->since < limit && (!polled[i].revents || read_handshake(listener, handshake)))
            continue;
        if (handshake->socket >= 0) close(handshake->socket);
        *handshake = listener->open[--listener->count];
    }
    if (polled[count].revents) accept_connection(listener);
}

// Lists missing ranks, such as "1, 3, 5", but not too many.
static const char* list_missing(const Launch* launch, const Peer* peers) {
    int listed = 0;
    const char* text = "";
    for (int r = 1; r < launch->world; r++) {
        if (peers[r].socket < 0 && listed++ < 16) text = text_kept("%s%s%d", text, *text ? ", " : "", r);
    }
    return listed > 16 ? text_kept("%s and %d more", text, listed - 16) : text;
}

bool rendezvous_gather(Launch* launch, Peer* peers, int64_t limit, char* error) {
    const double deadline = seconds_now() + (double)limit;
    const int room = launch->world + SPARE;
    if (launch->listener <= 0 && !rendezvous_listen(launch, error)) return false;
    if (!launch->has_secret) {
        fprintf(stderr,
                "train: note: NIBBLE_SECRET is not set, so anybody on %s could join this run at %s:%d; set it to the "
                "same random text on all ranks (openssl rand -hex 16 makes one)\n",
                is_loopback(launch->listener, &launch->port) ? "this machine" : "the network", launch->host,
                launch->port);
    }
    SCOPED Handshake* open = memory_zero((size_t)room, sizeof(Handshake));
    SCOPED struct pollfd* polled = memory_zero((size_t)room + 1, sizeof(struct pollfd));
    Listener listener = {.launch = launch, .peers = peers, .open = open, .room = room, .ok = true, .error = error};
    while (listener.came < launch->world - 1 && listener.ok && seconds_now() < deadline) serve(&listener, polled);
    if (listener.came < launch->world - 1 && listener.ok) {
        listener.ok = data_error(
            error,
            "after %lld s these of the %d ranks have not come to rank 0 at %s:%d: %s; look at what they say, %sor give "
            "them longer with --join-timeout",
            (long long)limit, launch->world, launch->host, launch->port, list_missing(launch, peers),
            listener.strangers ? "set NIBBLE_SECRET to the same text on all ranks (some did not know it), " : "");
    }
    const Welcome word = {.goes_on = listener.ok};
    for (int r = 1; r < launch->world; r++) {
        if (peers[r].socket >= 0) send_message(peers[r].socket, &word, sizeof(word));  // watch.c finds a dead one
    }
    for (int i = 0; i < listener.count; i++) close(open[i].socket);
    close(launch->listener);
    launch->listener = 0;
    return listener.ok;
}

// The other ranks.

// A rank's side of a handshake. False, with the reason, if the other side is not rank 0 of this run.
static bool greet(const Launch* launch, int socket, Welcome* welcome, double deadline, const char** reason) {
    Hello hello = {.magic = RENDEZVOUS_MAGIC, .rank = launch->rank, .world = launch->world, .pid = getpid()};
    Challenge challenge;
    *reason = "who answers there is not rank 0 of this version of nibble";
    if (!receive_by(socket, &challenge, sizeof(challenge), deadline) || challenge.magic != RENDEZVOUS_MAGIC)
        return false;
    *reason = "who answers there is of another run or has another NIBBLE_SECRET";
    memcpy(hello.job, launch->job, sizeof(hello.job));
    gethostname(hello.host, sizeof(hello.host) - 1);
    if (getrandom(hello.random, HMAC_BYTES, 0) != HMAC_BYTES) return false;
    rendezvous_prove(launch, "rank", &challenge, &hello, hello.proof);
    return send_message(socket, &hello, sizeof(hello)) && receive_by(socket, welcome, sizeof(*welcome), deadline) &&
           verify_proof(launch, "rank 0", &challenge, &hello, welcome->proof);
}

bool rendezvous_reach(const Launch* launch, Peer* first, int64_t limit, char* error) {
    const double deadline = seconds_now() + (double)limit;
    const char* reason = "";
    Welcome welcome;
    for (bool noted = false;; sleep_ms(50)) {
        const double now = seconds_now();
        if (now >= deadline) {
            return data_error(error,
                              "rank %d could not join rank 0 at %s:%d: %s; look at what rank 0 says, set MASTER_ADDR, "
                              "MASTER_PORT and NIBBLE_SECRET alike on all ranks, or give it longer with --join-timeout",
                              launch->rank, launch->host, launch->port, reason);
        }
        first->socket = open_socket(launch->host, launch->port, false, &reason);
        if (first->socket < 0) continue;
        if (greet(launch, first->socket, &welcome, fmin(now + HANDSHAKE_SECONDS, deadline), &reason)) break;
        close(first->socket);
        if (noted) continue;
        fprintf(stderr, "train: note: rank %d tries to join rank 0 at %s:%d, and %s\n", launch->rank, launch->host,
                launch->port, reason);
        noted = true;
    }
    first->pid = welcome.pid;
    if (welcome.goes_on && !receive_by(first->socket, &welcome, sizeof(welcome), deadline + 5)) {
        return data_error(error, "rank 0 at %s has ended before all ranks had come", launch->host);
    }
    if (!welcome.goes_on) exit(2);  // rank 0 has said why
    return true;
}
