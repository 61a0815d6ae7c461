// See rendezvous.h. The protocol:
//
// 1. Rank 0 listens at the first address of MASTER_ADDR that its machine has, and at MASTER_PORT. Each other rank
//    connects to it, again and again until --join-timeout has passed.
// 2. Rank 0 sends a Challenge, a random number.
// 3. The rank sends a Hello: who it is, a random number, and its proof, the HMAC-SHA256 of the Challenge and the Hello
//    under a key that follows from NIBBLE_SECRET, the job, the number of ranks and the version of these messages.
// 4. Rank 0 sends a Welcome with a proof of its own, or closes a connection that has proven nothing.
// 5. The rank does the same for its second channel.
// 6. When all ranks are there, or --join-timeout has passed, rank 0 closes its listening socket and sends every rank a
//    byte: whether the run goes on.
//
// Rank 0 handles one handshake after another, each within HANDSHAKE_SECONDS, so a silent stranger delays the ranks by
// no more than that. The secret is not sent, and an old proof is worth nothing. What follows the handshake is neither
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
#include "../../data/text.h"

static const double HANDSHAKE_SECONDS = 0.5;

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

bool send_all(int socket, const void* bytes, size_t count) {
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

// Rank 0's side of a handshake. True if a channel of a rank was missing and this is it.
static bool admit(const Launch* launch, Peer* peers, int socket) {
    const double deadline = seconds_now() + HANDSHAKE_SECONDS;
    Challenge challenge;
    Hello hello;
    Welcome welcome = {.pid = getpid()};
    if (getrandom(&challenge, sizeof(challenge), 0) != sizeof(challenge)) return false;
    if (!send_all(socket, &challenge, sizeof(challenge)) || !receive_by(socket, &hello, sizeof(hello), deadline) ||
        !verify_proof(launch, "rank", &challenge, &hello, hello.proof))
        return false;
    if (hello.rank < 1 || hello.rank >= launch->world || hello.channel < 0 || hello.channel >= CHANNELS) return false;
    Peer* peer = &peers[hello.rank];
    // If two processes say that they are the same rank, the first one counts.
    if (peer->socket[hello.channel] >= 0) return false;
    if (hello.channel > 0 && memcmp(hello.random, peer->hello.random, HMAC_BYTES) != 0) return false;
    rendezvous_prove(launch, "rank 0", &challenge, &hello, welcome.proof);
    if (!send_all(socket, &welcome, sizeof(welcome))) return false;
    peer->socket[hello.channel] = socket, peer->hello = hello;
    peer->hello.host[sizeof(hello.host) - 1] = 0;
    text_disarm(peer->hello.host, false);
    return true;
}

// Lists missing ranks, such as "1, 3, 5", but not too many.
static const char* list_missing(const Launch* launch, const Peer* peers) {
    int listed = 0;
    const char* text = "";
    for (int r = 1; r < launch->world; r++) {
        if (peers[r].socket[BEATS] < 0 && listed++ < 16) text = text_kept("%s%s%d", text, *text ? ", " : "", r);
    }
    return listed > 16 ? text_kept("%s and %d more", text, listed - 16) : text;
}

bool rendezvous_gather(Launch* launch, Peer* peers, int64_t limit, char* error) {
    const double deadline = seconds_now() + (double)limit;
    int missing = (launch->world - 1) * CHANNELS;
    if (launch->listener <= 0 && !rendezvous_listen(launch, error)) return false;
    if (!launch->has_secret) {
        fprintf(stderr,
                "train: note: NIBBLE_SECRET is not set, so anybody who reaches %s:%d could join this run; set it to "
                "the same random text on all ranks (openssl rand -hex 16 makes one)\n",
                launch->host, launch->port);
    }
    while (missing > 0 && seconds_now() < deadline) {
        struct pollfd waits = {launch->listener, POLLIN, 0};
        if (poll(&waits, 1, 100) <= 0) continue;
        const int one = accept4(launch->listener, NULL, NULL, SOCK_CLOEXEC);
        if (one < 0 && !(errno == EMFILE && more_descriptors())) sleep_ms(20);
        if (one < 0) continue;
        const bool admitted = admit(launch, peers, one);
        missing -= admitted;
        if (!admitted) close(one);
    }
    const char goes_on = missing == 0;
    for (int r = 1; r < launch->world; r++) {  // watch.c finds a dead one
        if (peers[r].socket[MESSAGES] >= 0) send_all(peers[r].socket[MESSAGES], &goes_on, 1);
    }
    close(launch->listener);
    launch->listener = 0;
    return goes_on ||
           data_error(error,
                      "after %lld s these of the %d ranks have not come to rank 0 at %s:%d: %s; look at what they say, "
                      "start all with the same NIBBLE_SECRET and number of ranks, each as a rank of its own, or give "
                      "them longer with --join-timeout",
                      (long long)limit, launch->world, launch->host, launch->port, list_missing(launch, peers));
}

// A rank's side of a handshake. False, with the reason, if it has not reached rank 0 of this run.
static bool reach(const Launch* launch, Peer* first, Hello* hello, double deadline, const char** reason) {
    Challenge challenge;
    Welcome welcome;
    const int one = open_socket(launch->host, launch->port, false, reason);
    if (one < 0) return false;
    *reason = "who answers there is of another run, or has another NIBBLE_SECRET, number of ranks or version of nibble";
    bool ok = receive_by(one, &challenge, sizeof(challenge), deadline);
    if (ok) rendezvous_prove(launch, "rank", &challenge, hello, hello->proof);
    ok = ok && send_all(one, hello, sizeof(*hello)) && receive_by(one, &welcome, sizeof(welcome), deadline) &&
         verify_proof(launch, "rank 0", &challenge, hello, welcome.proof);
    if (!ok) return close(one), false;
    first->socket[hello->channel] = one, first->hello.pid = welcome.pid;
    return true;
}

bool rendezvous_reach(const Launch* launch, Peer* first, int64_t limit, char* error) {
    const double deadline = seconds_now() + (double)limit;
    const char* reason = "the system gives no random numbers";
    char goes_on = 0;
    Hello hello = {.rank = launch->rank, .pid = getpid()};
    gethostname(hello.host, sizeof(hello.host) - 1);
    bool ok = getrandom(hello.random, HMAC_BYTES, 0) == HMAC_BYTES;
    for (; ok && hello.channel < CHANNELS; hello.channel++) {
        while (!reach(launch, first, &hello, deadline, &reason) && (ok = seconds_now() < deadline)) sleep_ms(50);
    }
    if (!ok) {
        return data_error(error,
                          "rank %d could not join rank 0 at %s:%d: %s; look at what rank 0 says, set MASTER_ADDR, "
                          "MASTER_PORT and NIBBLE_SECRET alike on all ranks, or give it longer with --join-timeout",
                          launch->rank, launch->host, launch->port, reason);
    }
    if (!receive_by(first->socket[MESSAGES], &goes_on, 1, deadline + 5)) {
        return data_error(error, "rank 0 at %s has ended before all ranks had come", launch->host);
    }
    if (!goes_on) exit(2);  // rank 0 has said why
    return true;
}
