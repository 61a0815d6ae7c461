// See rendezvous.h. First addresses and messages, then rank 0, then the other ranks.
#include "rendezvous.h"
#include <errno.h>
#include <fcntl.h>
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

// Addresses.

static bool is_loopback(const struct sockaddr* address) {
    if (address->sa_family == AF_INET) {
        return ntohl(((const struct sockaddr_in*)address)->sin_addr.s_addr) >> 24 == 127;
    }
    return address->sa_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6*)address)->sin6_addr);
}

void rendezvous_close(Launch* launch) {
    for (int i = 0; i < launch->listeners; i++) close(launch->listener[i]);
    launch->listeners = 0;
}

// True if the list has the same address before `one`, as some hosts files cause.
static bool is_repeated(const struct addrinfo* list, const struct addrinfo* one) {
    for (const struct addrinfo* at = list; at != one; at = at->ai_next) {
        if (at->ai_addrlen == one->ai_addrlen && memcmp(at->ai_addr, one->ai_addr, one->ai_addrlen) == 0) return true;
    }
    return false;
}

// Listens at this port of every address in the list that this machine has. False, with errno, if it has none
// (EADDRNOTAVAIL) or if the port is taken at one of them.
static bool listen_at(Launch* launch, struct addrinfo* list, int port) {
    for (struct addrinfo* at = list; at && launch->listeners < LAUNCH_LISTENERS; at = at->ai_next) {
        int yes = 1;
        if (at->ai_family == AF_INET) ((struct sockaddr_in*)at->ai_addr)->sin_port = htons((uint16_t)port);
        if (at->ai_family == AF_INET6) ((struct sockaddr_in6*)at->ai_addr)->sin6_port = htons((uint16_t)port);
        if (is_repeated(list, at)) continue;
        int one = socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (one < 0) continue;  // a system without IPv6
        setsockopt(one, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
        if (at->ai_family == AF_INET6) setsockopt(one, IPPROTO_IPV6, IPV6_V6ONLY, &yes, sizeof(yes));
        if (bind(one, at->ai_addr, at->ai_addrlen) == 0 && listen(one, 512) == 0) {
            launch->listener[launch->listeners++] = one;
            continue;
        }
        int reason = errno;
        close(one);
        if (reason == EADDRNOTAVAIL) continue;
        rendezvous_close(launch);
        errno = reason;
        return false;
    }
    errno = EADDRNOTAVAIL;
    return launch->listeners > 0;
}

static bool listen_at_ports(Launch* launch, struct addrinfo* list, int ports) {
    for (int i = 0; i < ports; i++) {
        struct sockaddr_in6 own;
        socklen_t bytes = sizeof(own);
        if (!listen_at(launch, list, launch->port + i)) continue;
        getsockname(launch->listener[0], (struct sockaddr*)&own, &bytes);
        launch->port = ntohs(own.sin6_port);  // which stands where IPv4 has it too
        return true;
    }
    return false;
}

// Debian's /etc/hosts names the machine itself 127.0.1.1, where ranks on other machines do not find it. True for such a
// name: it is neither "localhost" nor a number, and all of its addresses are loopback.
static bool is_own_name(const Launch* launch, const struct addrinfo* list) {
    struct addrinfo hints = {.ai_flags = AI_NUMERICHOST}, *number = NULL;
    if (launch->local_world == launch->world || strstr(launch->host, "localhost")) return false;
    for (const struct addrinfo* at = list; at; at = at->ai_next) {
        if (!is_loopback(at->ai_addr)) return false;
    }
    if (getaddrinfo(launch->host, NULL, &hints, &number) != 0) return true;
    freeaddrinfo(number);
    return false;
}

bool rendezvous_listen(Launch* launch, int ports, char* error) {
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE}, *list = NULL, *all = NULL;
    int unknown = getaddrinfo(launch->host, NULL, &hints, &list);
    if (unknown != 0) {
        return data_error(error, "rank 0 knows no host %s (%s); set MASTER_ADDR to an address of rank 0's machine",
                          launch->host, gai_strerror(unknown));
    }
    bool own = is_own_name(launch, list);
    bool ok = !own && listen_at_ports(launch, list, ports);
    int reason = errno;
    // If the host has an address that this machine does not know, as behind a gateway, listening at all addresses would
    // admit anybody, so it takes a secret.
    bool foreign = !own && !ok && reason == EADDRNOTAVAIL;
    if (!ok && (own || (foreign && launch->has_secret)) && getaddrinfo(NULL, "0", &hints, &all) == 0) {
        ok = listen_at_ports(launch, all, ports);
        reason = errno;
        freeaddrinfo(all);
    }
    freeaddrinfo(list);
    if (ok) return true;
    if (foreign && !launch->has_secret) {
        return data_error(error,
                          "rank 0 cannot listen at %s, which is no address of its machine; set MASTER_ADDR to one, or "
                          "set NIBBLE_SECRET to the same text on all ranks: rank 0 then listens at all its addresses",
                          launch->host);
    }
    return data_error(error, "rank 0 cannot listen at ports %d to %d of %s: %s; set MASTER_PORT to a free one",
                      launch->port, launch->port + ports - 1, launch->host, strerror(reason));
}

// Messages.

bool send_all(int socket, const void* bytes, size_t count) {
    for (size_t done = 0; done < count;) {
        ssize_t sent = send(socket, (const char*)bytes + done, count - done, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR) continue;
        if (sent <= 0) return false;
        done += (size_t)sent;
    }
    return true;
}

bool receive_all(int socket, void* bytes, size_t count) {
    for (size_t done = 0; done < count;) {
        ssize_t got = recv(socket, (char*)bytes + done, count - done, 0);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return false;
        done += (size_t)got;
    }
    return true;
}

// The same with a deadline for all of the bytes; a limit of the socket's counts anew for each byte.
static bool receive_by(int socket, void* bytes, size_t count, double deadline) {
    for (size_t done = 0; done < count;) {
        struct pollfd one = {socket, POLLIN, 0};
        double left = deadline - seconds_now();
        if (left <= 0) return false;
        if (poll(&one, 1, (int)(left * 1000) + 1) <= 0) continue;
        ssize_t got = recv(socket, (char*)bytes + done, count - done, MSG_DONTWAIT);
        if (got < 0 && (errno == EINTR || errno == EAGAIN)) continue;
        if (got <= 0) return false;
        done += (size_t)got;
    }
    return true;
}

void set_time_limit(int socket, int limit) {
    struct timeval time = {limit, 0};
    int yes = 1;
    setsockopt(socket, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof(time));
    setsockopt(socket, SOL_SOCKET, SO_SNDTIMEO, &time, sizeof(time));
    setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
}

// True if the other side, which must not send anything now, has closed the connection: it gave up waiting.
static bool is_closed(int socket) {
    char byte;
    ssize_t got = recv(socket, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR);
}

// Copies a text of a message, whose final NUL may be missing, so that a terminal can show it.
static void copy_text(char* to, size_t bytes, const char* from, size_t from_bytes) {
    snprintf(to, bytes, "%.*s", (int)from_bytes, from);
    text_disarm(to, false);
}

void rendezvous_prove(const unsigned char key[HMAC_BYTES], const char* role, int port, const Hello* hello,
                      const Challenge* challenge, const Welcome* welcome, unsigned char proof[HMAC_BYTES]) {
    struct {
        char role[8];
        int32_t port;  // so that a proof cannot be carried to another port of this machine
        Hello hello;
        Challenge challenge;
        Welcome welcome;
    } all;
    memset(&all, 0, sizeof(all));
    memcpy(all.role, role, strlen(role));
    all.port = port;
    all.hello = *hello;
    all.challenge = *challenge;
    if (welcome) all.welcome = *welcome;
    memset(all.welcome.proof, 0, sizeof(all.welcome.proof));
    hmac_sha256(key, HMAC_BYTES, &all, sizeof(all), proof);
}

static bool draw_random(unsigned char random[HMAC_BYTES]) {
    return getrandom(random, HMAC_BYTES, 0) == HMAC_BYTES;
}

// Rank 0.

// A connection whose other side has not yet proven that it belongs to this run.
typedef struct {
    int socket;  // -1: this place is free
    double since;
    size_t bytes;     // received of the hello or, after the challenge, of the proof
    bool challenged;  // the challenge has been sent
    Hello hello;
    Challenge challenge;
    unsigned char proof[HMAC_BYTES];
} Greeting;

typedef struct {
    const Launch* launch;
    Peer* peers;
    int came;         // connected channels
    bool told_of[2];  // refuse_stranger has printed its note, by kind
    bool ok;          // false: the run cannot go on, and `error` says why
    char* error;
    Greeting greeting[GREETINGS];
} Door;

static void end_greeting(Greeting* greeting) {
    close(greeting->socket);
    greeting->socket = -1;
}

typedef enum { OTHER_VERSION, OTHER_SECRET } Stranger;

// Prints, once for each kind, that a connection was refused, since it may be from a rank that was started wrongly.
static void refuse_stranger(Door* door, const Greeting* greeting, Stranger kind) {
    struct sockaddr_storage address;
    socklen_t bytes = sizeof(address);
    char from[64] = "?";
    if (door->told_of[kind]) return;
    door->told_of[kind] = true;
    if (getpeername(greeting->socket, (struct sockaddr*)&address, &bytes) == 0) {
        getnameinfo((struct sockaddr*)&address, bytes, from, sizeof(from), NULL, 0, NI_NUMERICHOST);
    }
    const char* what = kind == OTHER_VERSION
                           ? "has another version of nibble is not let in; build all ranks from the same source"
                           : text_kept(
                                 "says it is rank %d is not let in, since it does not know this run's secret; if "
                                 "it is yours, set NIBBLE_SECRET to the same text on all ranks",
                                 greeting->hello.rank);
    fprintf(stderr, "train: note: a process at %s that %s\n", from, what);
}

// Answers a complete hello. False if the connection is to be closed.
static bool challenge(Door* door, Greeting* greeting) {
    Challenge* out = &greeting->challenge;
    *out = (Challenge){.magic = RENDEZVOUS_MAGIC, .version = RENDEZVOUS_VERSION};
    bool ours = memcmp(greeting->hello.job, door->launch->job, sizeof(door->launch->job)) == 0;
    out->accepted = ours && draw_random(out->random);
    greeting->challenged = true;
    greeting->bytes = 0;
    // This message fits into the buffers of a new connection, so sending it does not wait.
    return send_all(greeting->socket, out, sizeof(*out)) && out->accepted;
}

// Admits a rank that has proven itself, or ends the run if that rank does not fit.
static bool admit(Door* door, Greeting* greeting) {
    const Launch* launch = door->launch;
    const Hello* hello = &greeting->hello;
    Welcome welcome = {.magic = RENDEZVOUS_MAGIC, .pid = getpid()};
    char host[sizeof(hello->host) + 1];
    copy_text(host, sizeof(host), hello->host, sizeof(hello->host));
    bool fits = hello->world == launch->world && hello->rank > 0 && hello->rank < launch->world &&
                hello->channel >= 0 && hello->channel < CHANNELS;
    Peer* peer = fits ? &door->peers[hello->rank] : NULL;
    int* known = fits ? &peer->socket[hello->channel] : NULL;
    if (known && *known >= 0 && is_closed(*known)) close(*known), *known = -1, door->came--;
    if (!fits) {
        door->ok = data_error(door->error,
                              "rank %d of %d came from %s and this run has %d ranks; start all with the same number",
                              hello->rank, hello->world, host, launch->world);
    } else if (*known >= 0) {
        door->ok = data_error(door->error,
                              "two processes say that they are rank %d: on %s and on %s; give each a rank of its own",
                              hello->rank, peer->host, host);
    }
    welcome.accepted = door->ok;
    if (!door->ok) snprintf(welcome.error, sizeof(welcome.error), "%.500s", door->error);
    rendezvous_prove(launch->key, "rank 0", launch->port, hello, &greeting->challenge, &welcome, welcome.proof);
    if (!send_all(greeting->socket, &welcome, sizeof(welcome)) || !door->ok) return false;
    fcntl(greeting->socket, F_SETFL, fcntl(greeting->socket, F_GETFL) & ~O_NONBLOCK);
    *known = greeting->socket;
    greeting->socket = -1;
    snprintf(peer->host, sizeof(peer->host), "%.63s", host);
    peer->pid = hello->pid;
    door->came++;
    return true;
}

// Checks a complete proof. False if the connection is to be closed.
static bool judge(Door* door, Greeting* greeting) {
    const Launch* launch = door->launch;
    Welcome none = {.magic = RENDEZVOUS_MAGIC};
    unsigned char want[HMAC_BYTES];
    rendezvous_prove(launch->key, "rank", launch->port, &greeting->hello, &greeting->challenge, NULL, want);
    if (is_closed(greeting->socket)) return false;
    if (hmac_equal(want, greeting->proof)) return admit(door, greeting);
    refuse_stranger(door, greeting, OTHER_SECRET);
    send_all(greeting->socket, &none, sizeof(none));
    return false;
}

// Reads what has arrived, and answers it. False if the connection is to be closed.
static bool hear(Door* door, Greeting* greeting) {
    while (greeting->socket >= 0) {
        char* to = greeting->challenged ? (char*)greeting->proof : (char*)&greeting->hello;
        size_t want = greeting->challenged ? sizeof(greeting->proof) : sizeof(greeting->hello);
        ssize_t got = recv(greeting->socket, to + greeting->bytes, want - greeting->bytes, MSG_DONTWAIT);
        if (got < 0 && (errno == EAGAIN || errno == EINTR)) return true;
        if (got <= 0) return false;
        greeting->bytes += (size_t)got;
        if (!greeting->challenged && greeting->bytes >= 2 * sizeof(uint32_t)) {
            if (greeting->hello.magic != RENDEZVOUS_MAGIC) return false;
            if (greeting->hello.version != RENDEZVOUS_VERSION) {
                refuse_stranger(door, greeting, OTHER_VERSION);
                challenge(door, greeting);
                return false;
            }
        }
        if (greeting->bytes < want) continue;
        if (!(greeting->challenged ? judge(door, greeting) : challenge(door, greeting))) return false;
    }
    return true;
}

// Accepts a waiting connection if a place is free.
static void open_greeting(Door* door, int listener) {
    Greeting* place = NULL;
    for (int i = 0; i < GREETINGS && !place; i++) {
        if (door->greeting[i].socket < 0) place = &door->greeting[i];
    }
    int one = place ? accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK) : -1;
    if (one < 0 && place && errno == EMFILE && more_descriptors()) return;  // the listener is still ready
    if (one >= 0) *place = (Greeting){.socket = one, .since = seconds_now()};
    if (one < 0 && place && errno != EAGAIN) sleep_ms(20);  // no more files may be opened: wait for some to be closed
}

// Handles connections and messages that arrive within `wait` seconds. Closes greetings that take longer than
// GREETING_SECONDS, or, when all places are taken, a quarter of a second.
static void serve(Door* door, double wait) {
    struct pollfd polled[LAUNCH_LISTENERS + GREETINGS];
    Greeting* of[LAUNCH_LISTENERS + GREETINGS];
    int count = 0, taken = 0;
    double now = seconds_now();
    for (int i = 0; i < GREETINGS; i++) taken += door->greeting[i].socket >= 0;
    double limit = taken == GREETINGS ? 0.25 : GREETING_SECONDS;
    for (int i = 0; i < GREETINGS; i++) {
        Greeting* greeting = &door->greeting[i];
        if (greeting->socket >= 0 && now - greeting->since > limit) end_greeting(greeting), taken--;
        if (greeting->socket < 0) continue;
        polled[count] = (struct pollfd){greeting->socket, POLLIN, 0};
        of[count++] = greeting;
    }
    for (int i = 0; i < door->launch->listeners && taken < GREETINGS; i++) {
        polled[count] = (struct pollfd){door->launch->listener[i], POLLIN, 0};
        of[count++] = NULL;
    }
    if (wait > 0.25) wait = 0.25;
    if (poll(polled, (nfds_t)count, (int)(wait * 1000) + 1) <= 0) return;
    for (int i = 0; i < count && door->ok; i++) {
        if (!polled[i].revents) continue;
        if (!of[i]) open_greeting(door, polled[i].fd);
        if (of[i] && !hear(door, of[i])) end_greeting(of[i]);
    }
}

// Lists missing ranks, such as "1, 3 and 5", but not too many.
static const char* list_missing(const Launch* launch, const Peer* peers) {
    int listed = 0;
    const char* text = "";
    for (int r = 1; r < launch->world; r++) {
        const int* to = peers[r].socket;
        if (to[TALK] >= 0 && to[CONTROL] >= 0 && !is_closed(to[TALK])) continue;
        if (listed++ < 16) text = text_kept("%s%s%d", text, *text ? ", " : "", r);
    }
    return listed > 16 ? text_kept("%s and %d more", text, listed - 16) : text;
}

// Tells every other rank whether all are connected.
static void tell_all(const Launch* launch, const Peer* peers, bool ok, const char* error) {
    Welcome word = {.magic = RENDEZVOUS_MAGIC, .accepted = ok};
    if (!ok) snprintf(word.error, sizeof(word.error), "%.500s", error);
    for (int r = 1; r < launch->world; r++) {
        if (peers[r].socket[TALK] >= 0) send_all(peers[r].socket[TALK], &word, sizeof(word));
    }
}

static void warn_of_no_secret(const Launch* launch) {
    bool local = true;
    for (int i = 0; i < launch->listeners; i++) {
        struct sockaddr_storage own = {0};
        socklen_t bytes = sizeof(own);
        getsockname(launch->listener[i], (struct sockaddr*)&own, &bytes);
        local = local && is_loopback((struct sockaddr*)&own);
    }
    fprintf(stderr,
            "train: note: NIBBLE_SECRET is not set, so anybody on %s could join this run at %s:%d; set it to the same "
            "random text on all ranks (openssl rand -hex 16 makes one)\n",
            local ? "this machine" : "the network", launch->host, launch->port);
}

bool rendezvous_gather(Launch* launch, Peer* peers, int64_t limit, char* error) {
    const int want = CHANNELS * (launch->world - 1);
    const double deadline = seconds_now() + (double)limit;
    static const Greeting none = {.socket = -1};
    Door door = {.launch = launch, .peers = peers, .ok = true, .error = error};
    for (int i = 0; i < GREETINGS; i++) door.greeting[i] = none;
    if (launch->listeners == 0 && !rendezvous_listen(launch, PORTS, error)) return false;
    if (!launch->has_secret) warn_of_no_secret(launch);
    while (door.came < want && door.ok) {
        double left = deadline - seconds_now();
        if (left > 0) {
            serve(&door, left);
            continue;
        }
        door.ok = data_error(error,
                             "after %lld s these of the %d ranks have not come to rank 0 at %s:%d: %s; look at what "
                             "they say, or give them longer with --join-timeout",
                             (long long)limit, launch->world, launch->host, launch->port, list_missing(launch, peers));
    }
    tell_all(launch, peers, door.ok, error);
    for (int i = 0; i < GREETINGS; i++) {
        if (door.greeting[i].socket >= 0) end_greeting(&door.greeting[i]);
    }
    rendezvous_close(launch);
    return door.ok;
}

// The other ranks.

// A rank that looks for rank 0 counts here what it has met; the error message follows from it.
typedef struct {
    double deadline;     // of all tries
    int unknown;         // what getaddrinfo last said of the host; 0: it has an address
    bool other_version;  // a program of another version answered
    bool other_secret;   // a program with another secret answered
} Met;

// Connects within a second; -1 if that fails.
static int connect_to(const char* host, int port, int* unknown) {
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found = NULL;
    *unknown = getaddrinfo(host, text_kept("%d", port), &hints, &found);
    if (*unknown != 0) return -1;
    int made = -1;
    for (struct addrinfo* at = found; at && made < 0; at = at->ai_next) {
        made = socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (made < 0) continue;
        set_time_limit(made, 1);  // of connect too
        if (connect(made, at->ai_addr, at->ai_addrlen) == 0) break;
        close(made);
        made = -1;
    }
    freeaddrinfo(found);
    return made;
}

// Prints once why an answer was refused, since it may come from this run's rank 0 with a wrong setting.
static void note_false_first(const Launch* launch, int port, bool* told, const char* what) {
    if (!*told) {
        fprintf(stderr, "train: note: rank %d: who answers at %s:%d %s\n", launch->rank, launch->host, port, what);
    }
    *told = true;
}

// A rank's side of the greeting. Fills `welcome` and returns true if the other side is rank 0 of this run.
static bool greet(const Launch* launch, int socket, int port, const Hello* hello, Welcome* welcome, Met* met) {
    Challenge challenge;
    unsigned char proof[HMAC_BYTES];
    double deadline = fmin(seconds_now() + GREETING_SECONDS, met->deadline);
    if (!send_all(socket, hello, sizeof(*hello))) return false;
    if (!receive_by(socket, &challenge, sizeof(challenge), deadline)) return false;
    if (challenge.magic != RENDEZVOUS_MAGIC) return false;
    if (challenge.version != RENDEZVOUS_VERSION) {
        note_false_first(launch, port, &met->other_version,
                         "has another version of nibble; build all ranks from the same source");
        return false;
    }
    if (!challenge.accepted) return false;
    rendezvous_prove(launch->key, "rank", port, hello, &challenge, NULL, proof);
    if (!send_all(socket, proof, sizeof(proof))) return false;
    if (!receive_by(socket, welcome, sizeof(*welcome), deadline) || welcome->magic != RENDEZVOUS_MAGIC) return false;
    rendezvous_prove(launch->key, "rank 0", port, hello, &challenge, welcome, proof);
    if (hmac_equal(proof, welcome->proof)) return true;
    note_false_first(launch, port, &met->other_secret,
                     "does not know this run's secret; set NIBBLE_SECRET to the same text on all ranks");
    return false;
}

// Connects one channel to rank 0. False: the caller tries again or, if `error` has a sentence, gives up.
static bool knock(const Launch* launch, int port, int channel, Peer* first, Met* met, char* error) {
    Hello hello = {.magic = RENDEZVOUS_MAGIC, .version = RENDEZVOUS_VERSION};
    Welcome welcome;
    hello.rank = launch->rank, hello.world = launch->world, hello.channel = channel, hello.pid = getpid();
    memcpy(hello.job, launch->job, sizeof(hello.job));
    gethostname(hello.host, sizeof(hello.host) - 1);
    if (!draw_random(hello.random)) return data_error(error, "the system gives no random numbers");
    int socket = connect_to(launch->host, port, &met->unknown);
    if (socket < 0) return false;
    bool proven = greet(launch, socket, port, &hello, &welcome, met);
    if (proven && welcome.accepted) {
        first->socket[channel] = socket;
        first->pid = welcome.pid;
        return true;
    }
    if (proven) copy_text(error, sizeof(welcome.error), welcome.error, sizeof(welcome.error));
    close(socket);
    return false;
}

static bool no_answer(const Launch* launch, const Met* met, int64_t limit, char* error) {
    if (met->unknown != 0) {
        return data_error(error, "rank %d knows no host %s (%s); set MASTER_ADDR to rank 0's host", launch->rank,
                          launch->host, gai_strerror(met->unknown));
    }
    if (met->other_secret || met->other_version) {
        return data_error(error, "rank %d has met nobody at %s:%d for %lld s who %s", launch->rank, launch->host,
                          launch->port, (long long)limit,
                          met->other_secret ? "knows this run's secret; set NIBBLE_SECRET to the same text on all ranks"
                                            : "has its version of nibble; build all ranks from the same source");
    }
    return data_error(error,
                      "rank %d has had no answer from rank 0 at %s:%d for %lld s; look at what rank 0 says, set "
                      "MASTER_ADDR to its host, or give it longer with --join-timeout",
                      launch->rank, launch->host, launch->port, (long long)limit);
}

bool rendezvous_reach(Launch* launch, Peer* first, int64_t limit, char* error) {
    int ports = strcmp(launch->source, "--gpus") == 0 ? 1 : PORTS;
    Met met = {.deadline = seconds_now() + (double)limit};
    error[0] = 0;
    for (int at = 0;; at++) {
        int port = launch->port + at % ports;
        if (knock(launch, port, TALK, first, &met, error) && knock(launch, port, CONTROL, first, &met, error)) break;
        if (error[0]) return false;
        if (first->socket[TALK] >= 0) close(first->socket[TALK]), first->socket[TALK] = -1;
        if (seconds_now() >= met.deadline) return no_answer(launch, &met, limit, error);
        if (at % ports == ports - 1) sleep_ms(50);
    }
    Welcome word;
    bool answered = receive_by(first->socket[TALK], &word, sizeof(word), met.deadline + 5);
    if (!answered || word.magic != RENDEZVOUS_MAGIC) {
        return data_error(error, "rank 0 at %s has ended before all ranks had come", launch->host);
    }
    if (!word.accepted) exit(2);  // rank 0 has said why
    return true;
}
