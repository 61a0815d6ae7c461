// Tests of what strangers can do to a run over the network (kernels/ranks/rendezvous.c): nothing that
// shows in its exit code, its time or its terminal, as long as they do not know its secret.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <time.h>

#include <string>

#include "../../data/clock.h"
#include "../../data/files.h"
#include "../../kernels/ranks/rendezvous.h"
#include "apart.h"

static void pause_ms(double ms) {
    struct timespec time = {(time_t)(ms / 1000), (long)(fmod(ms, 1000) * 1e6)};
    nanosleep(&time, nullptr);
}

// Returns a port of this process's own, so that tests at the same time do not meet.
static int own_port(int which) {
    return 10000 + (getpid() * 16 + which * 1000) % 9000;
}

// Connects to a port of this machine. Returns the socket, -1 if nobody listens for twenty seconds.
static int connect_to(int port) {
    struct sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons((uint16_t)port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    for (double begin = seconds_now(); seconds_now() - begin < 20; pause_ms(10)) {
        int one = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (connect(one, (const struct sockaddr*)&address, sizeof(address)) == 0) return one;
        close(one);
    }
    return -1;
}

static Launch door_launch(int rank, int world, int port, const char* secret, const char* host = "127.0.0.1") {
    Launch launch = {};
    launch.rank = rank, launch.world = world, launch.port = port;
    launch.source = "these tests";
    snprintf(launch.host, sizeof(launch.host), "%s", host);
    launch.has_secret = secret[0] != 0;
    rendezvous_key(&launch, secret);
    return launch;
}

struct Rank : Ended {
    Apart child;
    double took;
};

static void rank_begin(Rank* rank, const Launch& launch, int limit) {
    rank->took = seconds_now();
    rank->child = apart_begin([&] {
        Launch own = launch;
        setenv("NIBBLE_SILENCE", "4", 1);
        if (!launch_join(&own, limit, error)) {
            fprintf(stderr, "train: error: %s\n", error);
            _exit(2);
        }
        for (int i = 0; i < 3; i++) launch_any(&own, false);
        launch_leave(&own, 0);
    });
}

static void rank_end(Rank* rank) {
    *(Ended*)rank = apart_end(rank->child);
    rank->took = seconds_now() - rank->took;
}

// Expects a code, a text, and what holds in every stranger's run: at most `lines` lines without control codes.
static void expect_calm(Test* test, const char* what, const Rank* rank, int code, const char* says, int lines) {
    int found = 0;
    bool control = false;
    for (const char* c = rank->text; *c; c++) {
        found += *c == '\n';
        control = control || ((unsigned char)*c < 32 && *c != '\n' && *c != '\t') || *c == 127;
    }
    expect(rank->code == code && strstr(rank->text, says) && !control && found <= lines,
           "%s: code %d, want %d and '%s' in %d lines: %s", what, rank->code, code, says, lines, rank->text);
}

static Hello door_hello(int rank, int channel) {
    Hello hello = {rank, channel, (int32_t)getpid(), 0, {}, {}};
    memset(hello.host, 'h', sizeof(hello.host));  // without a NUL
    memcpy(hello.host, "\033[2J", 4);
    return hello;
}

static bool say(int socket, const void* bytes, size_t count) {
    return send(socket, bytes, count, MSG_NOSIGNAL) == (ssize_t)count;
}

// Greets rank 0 as `launch`. Returns the connection; -1 if rank 0 does not answer, or proves nothing.
static int door_greet(const Launch& launch, Hello hello) {
    Hello first;
    const int made = connect_to(launch.port);
    const double deadline = seconds_now() + 10;
    if (receive_by(made, &first, sizeof(first), deadline)) {
        uint64_t proof = rendezvous_proof(&launch, &hello, &first);
        say(made, &hello, sizeof(hello)), say(made, &proof, sizeof(proof));
        if (receive_by(made, &proof, sizeof(proof), deadline) && proof == rendezvous_proof(&launch, &first, &hello))
            return made;
    }
    char byte;
    return recv(made, &byte, 1, 0), close(made), -1;
}

static const double flag = 0;  // that launch_any sends to rank 0
// Returns true if rank 0 answers this many ranks.
static bool door_answers(int socket, int world) {
    double flags[1024];
    return receive_by(socket, flags, world * sizeof(double), seconds_now() + 20);
}

// The paper's example of 15 bytes, and others of its authors' table (vectors_sip64): the key is 00 01 ... 0f, and the
// bytes are 00 01 02 ...
TEST(doors_siphash) {
    const std::pair<size_t, uint64_t> cases[] = {
        {0, 0x726fdb47dd0e0e31}, {8, 0x93f5f5799a932462}, {15, 0xa129ca6149be45e5}, {63, 0x958a324ceb064572}};
    unsigned char bytes[64];
    uint64_t key[2];
    for (int i = 0; i < 64; i++) bytes[i] = (unsigned char)i;
    memcpy(key, bytes, sizeof(key));
    for (const auto& [count, want] : cases) {
        const uint64_t hash = siphash(key, bytes, count);
        expect(hash == want, "%zu bytes: %016llx", count, (unsigned long long)hash);
    }
}

// Every byte of a long secret counts.
TEST(doors_long_secrets) {
    const std::string same(299, 's');
    const Launch one = door_launch(0, 2, 1, (same + "a").c_str()), other = door_launch(0, 2, 1, (same + "b").c_str());
    const Launch again = door_launch(0, 2, 1, (same + "a").c_str());
    expect(one.key[0] != other.key[0] && one.key[1] != other.key[1], "the last byte is ignored");
    expect(memcmp(one.key, again.key, sizeof(one.key)) == 0, "the same secret gives two keys");
}

TEST(doors_text_is_disarmed) {
    const std::tuple<const char*, bool, const char*> cases[] = {
        {"plain", false, "plain"},
        {"\033[2J\033]0;x\007", false, "?[2J?]0;x?"},
        {"a\nb\tc\r", false, "a?b?c?"},
        {"a\nb\tc\r", true, "a\nb\tc?"},
        {"gr\xc3\xbc\xc3\x9f", false, "gr\xc3\xbc\xc3\x9f"},
        {"\xc2\x9b"
         "31m",
         false, "??31m"},  // the control sequence introducer in UTF-8
        {"\x9b"
         "31m\xff",
         false, "?31m?"},  // and as a byte
        {"\xe2\x80\xae"
         "abc",
         false, "???abc"},  // writing from right to left
        {"cut \xe2\x80", false, "cut ??"},
        {"\x7f", true, "?"},
        {"", true, ""},
    };
    for (const auto& [given, lines, want] : cases) {
        char* text = strdup(given);
        text_disarm(text, lines);
        expect(strcmp(text, want) == 0, "'%s', want '%s'", text, want);
    }
}

// A file gets a text as it is, and a terminal no control characters, and a character when it is whole.
TEST(doors_text_is_printed) {
    const char given[] = "\033[2Ja\0\xe2\x82", *const want = "?[2Ja?";
    const size_t bytes = sizeof(given) - 1;
    const int ours = posix_openpt(O_RDWR | O_NOCTTY);
    expect(ours >= 0 && grantpt(ours) == 0 && unlockpt(ours) == 0, "%s", strerror(errno));
    FILE *terminal = fopen(ptsname(ours), "w"), *file = tmpfile();
    char shown[64] = "", kept[64] = "";
    expect(text_print(terminal, given, bytes) == 2 && fflush(terminal) == 0, "the begun character");
    expect(read(ours, shown, sizeof(shown) - 1) == (ssize_t)strlen(want) && strcmp(shown, want) == 0, "%s", shown);
    expect(text_print(file, given, bytes) == 0 && fseek(file, 0, SEEK_SET) == 0, "a file");
    expect(fread(kept, 1, sizeof(kept), file) == bytes && memcmp(kept, given, bytes) == 0, "not as it is: %s", kept);
    fclose(terminal), fclose(file), close(ours);
}

// Counts the sockets of this machine that listen at a port, of which `open` do so at other addresses than loopback.
static int listeners_at(int port, int* open) {
    char line[512], address[64];
    unsigned at, state;
    int count = 0;
    *open = 0;
    for (const char* path : {"/proc/net/tcp", "/proc/net/tcp6"}) {
        FILE* file = fopen(path, "r");
        while (file && fgets(line, sizeof(line), file)) {
            if (sscanf(line, "%*d: %63[0-9A-F]:%x %*x:%*x %x", address, &at, &state) != 3) continue;
            if ((int)at != port || state != 10) continue;
            const bool local = strlen(address) == 8 ? strcmp(address + 6, "7F") == 0
                                                    : strcmp(address, "00000000000000000000000001000000") == 0;
            count++, *open += !local;
        }
        if (file) fclose(file);
    }
    return count;
}

// Rank 0 listens where MASTER_ADDR says, and nowhere else.
TEST(doors_bind_the_named_address) {
    const std::tuple<const char*, bool, bool, const char*> cases[] = {
        {"127.0.0.1", true, false, ""},
        {"127.0.0.2", true, false, ""},
        {"localhost", true, false, ""},
        {"::1", true, false, ""},
        {"0.0.0.0", true, true, ""},
        {"192.0.2.1", false, false, "set MASTER_ADDR to an address of its machine"},
        {"nowhere.invalid", false, false, "cannot listen at nowhere.invalid:"},
    };
    for (const auto& [host, listens, to_all, needle] : cases) {
        Launch launch = door_launch(0, 2, own_port(0), "secret", host);
        bool fine = rendezvous_listen(&launch, error);
        if (!fine && strcmp(host, "::1") == 0) continue;  // a machine without IPv6
        expect(fine == listens && strstr(error, needle), "%s: %d, '%s'", host, fine, error);
        if (!fine) continue;
        int open, count = listeners_at(launch.port, &open);
        expect(count == 1 && open == to_all, "%s: %d sockets, %d open to all", host, count, open);
        Launch second = launch;
        fine = rendezvous_listen(&second, error);
        expect(!fine && strstr(error, "in use") && strstr(error, "MASTER_PORT to a free"), "%s: %s", host, error);
        close(launch.listener);
    }
}

// Connections that say nothing, half of a greeting, what is none, or a byte from time to time, and greetings that prove
// nothing or are none of a missing rank, delay a rank by half a second each at most, and end nothing.
TEST(doors_strangers_are_not_let_in) {
    const char* text[] = {"", "GET / HTTP/1.0\r\n\r\n", "bin", "\033[2J\033[2J\033[2J"};
    static Rank rank[2];
    int stranger[4];
    Launch launch = door_launch(0, 3, own_port(1), "right"), own = launch;
    rank_begin(&rank[0], launch, 30);
    for (int i = 0; i < 4; i++) {
        stranger[i] = connect_to(launch.port);
        say(stranger[i], text[i], strlen(text[i]));
    }
    for (const char* secret : {"wrong", ""}) {
        expect(door_greet(door_launch(1, 3, launch.port, secret), door_hello(1, MESSAGES)) < 0, "'%s'", secret);
    }
    for (int number : {-1, 0, 3}) expect(door_greet(launch, door_hello(number, MESSAGES)) < 0, "rank %d", number);
    for (int channel : {-1, (int)CHANNELS}) expect(door_greet(launch, door_hello(1, channel)) < 0, "%d", channel);
    // The first of two that say they are rank 2 is taken, and both of its channels.
    Hello second = door_hello(2, MESSAGES), its = second;
    second.random[0] = 1;
    const int taken = door_greet(launch, its);
    expect(taken >= 0 && door_greet(launch, second) < 0, "two ranks 2");
    second.channel = its.channel = BEATS;
    expect(door_greet(launch, second) < 0, "the second channel of another process");
    const int beats = door_greet(launch, its);
    expect(beats >= 0, "the second channel");
    own.rank = 1;
    rank_begin(&rank[1], own, 30);
    expect(say(taken, &flag, sizeof(flag)) && door_answers(taken, 3), "the run does not go on");
    close(beats), close(taken);
    for (Rank& r : rank) rank_end(&r);
    expect_calm(test, "rank 0", &rank[0], 1, "rank 2 on ?[2Jhhh", 1);
    expect_calm(test, "rank 1", &rank[1], 1, "", 0);
    expect(rank[0].took < 10, "the ranks took %.1f s", rank[0].took);
    for (int one : stranger) close(one);
}

// 1,024 ranks are all admitted, and rank 0 answers each when all have sent a message.
TEST(doors_many_ranks) {
    constexpr int RANKS = 1024;
    static Rank rank;
    int made[RANKS][CHANNELS], told = 0;
    Launch launch = door_launch(0, RANKS, own_port(12), "secret");
    more_descriptors();
    rank_begin(&rank, launch, 30);
    for (int r = 1; r < RANKS; r++) {
        for (int channel : {MESSAGES, BEATS}) made[r][channel] = door_greet(launch, door_hello(r, channel));
    }
    for (int r = 1; r < RANKS; r++) say(made[r][MESSAGES], &flag, sizeof(flag));
    for (int r = 1; r < RANKS; r++) told += door_answers(made[r][MESSAGES], RANKS);
    expect(told == RANKS - 1, "%d of %d ranks get an answer", told, RANKS - 1);
    for (int r = 1; r < RANKS; r++) close(made[r][MESSAGES]), close(made[r][BEATS]);
    rank_end(&rank);
    expect_calm(test, "many", &rank, 1, "has ended without a word", 1);
    note(test, "%d ranks, %.2f s", RANKS, rank.took);
}

// A rank that launch_fork has made closes its sockets seconds before a signal ends it, as one that has memory of a GPU:
// rank 0 says which signal it was, though its own message fails at once.
TEST(doors_rank_ends_late) {
    const Ended its = run_apart([] {
        Launch launch;
        setenv("NIBBLE_SILENCE", "10", 1);
        if (!launch_fork(&launch, 3, error)) _exit(3);
        if (launch.rank == 1) {
            int made[CHANNELS];
            for (int channel : {MESSAGES, BEATS}) made[channel] = door_greet(launch, door_hello(1, channel));
            for (int one : made) close(one);
            pause_ms(4000);
            raise(SIGKILL);
        }
        if (!launch_join(&launch, 20, error)) _exit(4);
    });
    expect(its.code == 128 + SIGKILL && strstr(its.text, "rank 1 on ") && strstr(its.text, "been ended by signal 9") &&
               !strstr(its.text, "rank 0"),
           "code %d: %s", its.code, its.text);
}

// The deadline holds while strangers send a byte from time to time.
TEST(doors_deadline_holds) {
    static Rank rank;
    Launch launch = door_launch(0, 2, own_port(2), "a secret");
    rank_begin(&rank, launch, 2);
    Hello hello = door_hello(1, MESSAGES);
    int drip[4];
    for (int& one : drip) one = connect_to(launch.port);
    for (int i = 0; i < 30; i++, pause_ms(100)) {
        for (int one : drip) say(one, (const char*)&hello + i, 1);
    }
    rank_end(&rank);
    expect_calm(test, "drip", &rank, 2, "have not come to rank 0 at 127.0.0.1:", 1);
    expect(strstr(rank.text, ": 1;") && rank.took < 4.5, "%.1f s of 2: %s", rank.took, rank.text);
    for (int one : drip) close(one);
}

// A false rank 0 answers: its welcome has no proof, is cut, or never comes.
TEST(doors_false_rank_0) {
    static Rank rank;
    Launch launch = door_launch(0, 2, own_port(7), ""), victim = door_launch(1, 2, own_port(7), "secret");
    expect(rendezvous_listen(&launch, error), "%s", error);
    rank_begin(&rank, victim, 2);
    for (int k = 0; k < 3; k++) {
        struct pollfd one = {launch.listener, POLLIN, 0};
        if (poll(&one, 1, 3000) <= 0) break;
        const int made = accept(one.fd, nullptr, nullptr);
        Hello first = {}, hello = {};
        uint64_t proof = 0;
        say(made, &first, sizeof(first));
        receive_by(made, &hello, sizeof(hello), seconds_now() + 3);
        receive_by(made, &proof, sizeof(proof), seconds_now() + 3);
        proof = rendezvous_proof(&launch, &first, &hello);
        say(made, &proof, sizeof(proof) - (k > 0));
        if (k == 2) pause_ms(2500);
        close(made);
    }
    close(launch.listener);
    rank_end(&rank);
    expect_calm(test, "false rank 0", &rank, 2, "error: rank 1 could not join rank 0 at 127.0.0.1:", 1);
    expect(rank.took < 4.5, "%.1f s of 2", rank.took);
}

// A rank that was let in may send anything: the run ends, not with 0 and not by a signal, whether all ranks have come
// or, of 3, one is still to come.
TEST(doors_messages_of_a_rank) {
    const std::tuple<const char*, Beat, size_t, int, const char*> cases[] = {
        {"failed with 3", {3, 0, 0}, sizeof(Beat), 3, ""},
        {"failed with 256", {256, 0, 0}, sizeof(Beat), 1, ""},
        {"failed with -1", {-1, 0, 0}, sizeof(Beat), 1, ""},
        {"negative patience", {0, -1, -1}, sizeof(Beat), 1, "has ended without a word"},
        {"half a beat", {}, 7, 1, "has ended without a word"},
    };
    for (int i = 0; i < 10; i++) {
        const auto& [what, beat, bytes, code, needle] = cases[i / 2];
        static Rank rank;
        Launch launch = door_launch(0, 2 + i % 2, own_port(9), "secret");
        rank_begin(&rank, launch, 20);
        int made[CHANNELS];
        for (int channel : {MESSAGES, BEATS}) made[channel] = door_greet(launch, door_hello(1, channel));
        say(made[BEATS], &beat, bytes);
        shutdown(made[BEATS], SHUT_WR);
        rank_end(&rank);
        expect_calm(test, what, &rank, code, needle, 1);
        for (int one : made) close(one);
    }
}
