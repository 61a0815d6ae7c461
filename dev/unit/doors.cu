// Tests of what strangers can do to a run over the network (rendezvous.h, launch.h of kernels/ranks): nothing that
// shows in its exit code, its time or its terminal, as long as they do not know its secret.
#include "../../kernels/ranks/rendezvous.h"
#include "../../data/text.h"
#include "apart.h"
#include "launched.h"

static Launch door_launch(int rank, int world, int port, const char* secret, const char* host = "127.0.0.1") {
    Launch launch = {};
    launch.rank = rank, launch.world = world, launch.port = port;
    launch.source = "these tests";
    snprintf(launch.host, sizeof(launch.host), "%s", host);
    snprintf(launch.job, sizeof(launch.job), "doors");
    launch.has_secret = secret[0] != 0;
    hmac_sha256(secret, strlen(secret), "doors", 5, launch.key);
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
        launch_leave(&own);
    });
}

static void rank_end(Rank* rank) {
    *(Ended*)rank = apart_end(rank->child);
    rank->took = seconds_now() - rank->took;
}

// Checks what holds in every stranger's run: nothing of a terminal's control codes, and at most `lines` lines.
static void expect_calm(Test* test, const char* what, const Rank* rank, int lines) {
    int found = 0;
    for (const char* c = rank->text; *c; c++) {
        found += *c == '\n';
        bool control = (unsigned char)*c < 32 && *c != '\n' && *c != '\t';
        expect(!control && *c != 127, "%s: byte %d is printed", what, *c);
        if (control) break;
    }
    expect(found <= lines, "%s: %d lines: %s", what, found, rank->text);
}

static Hello door_hello(const Launch& launch, int rank, int channel) {
    Hello hello = {RENDEZVOUS_MAGIC, RENDEZVOUS_VERSION, rank, launch.world, channel, (int32_t)getpid(), {}, {}, {}};
    memcpy(hello.job, launch.job, sizeof(hello.job));
    snprintf(hello.host, sizeof(hello.host), "stranger");
    return hello;
}

// Greets rank 0 as `launch`; returns true if it was let in, and what it was told.
static bool door_greet(const Launch& launch, const Hello& hello, int* made, Welcome* welcome) {
    Challenge challenge;
    unsigned char proof[HMAC_BYTES];
    memset(welcome, 0, sizeof(*welcome));
    *made = connect_to(launch.port);
    if (*made < 0 || !send_all(*made, &hello, sizeof(hello))) return false;
    if (!receive_all(*made, &challenge, sizeof(challenge)) || !challenge.accepted) return false;
    rendezvous_prove(launch.key, "rank", launch.port, &hello, &challenge, nullptr, proof);
    if (!send_all(*made, proof, sizeof(proof)) || !receive_all(*made, welcome, sizeof(*welcome))) return false;
    rendezvous_prove(launch.key, "rank 0", launch.port, &hello, &challenge, welcome, proof);
    return hmac_equal(proof, welcome->proof) && welcome->accepted;
}

TEST(doors_hmac) {
    // RFC 4231, cases 1, 2, 3, 6 and 7.
    char key1[21], key3[21], data3[51], key6[132];
    memset(key1, 0x0b, 20), memset(key3, 0xaa, 20), memset(data3, 0xdd, 50), memset(key6, 0xaa, 131);
    const std::tuple<const char*, const char*, int, int, const char*> cases[] = {
        {key1, "Hi There", 20, 8, "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"},
        {"Jefe", "what do ya want for nothing?", 4, 28,
         "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"},
        {key3, data3, 20, 50, "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"},
        {key6, "Test Using Larger Than Block-Size Key - Hash Key First", 131, 54,
         "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"},
        {key6,
         "This is a test using a larger than block-size key and a larger than block-size data. The key needs to be "
         "hashed before being used by the HMAC algorithm.",
         131, 152, "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2"},
    };
    for (const auto& [key, data, key_bytes, data_bytes, want] : cases) {
        unsigned char hash[HMAC_BYTES];
        char text[2 * HMAC_BYTES + 1];
        hmac_sha256(key, (size_t)key_bytes, data, (size_t)data_bytes, hash);
        for (int i = 0; i < HMAC_BYTES; i++) snprintf(text + 2 * i, 3, "%02x", hash[i]);
        expect(strcmp(text, want) == 0, "%s, want %s", text, want);
        unsigned char other[HMAC_BYTES];
        memcpy(other, hash, sizeof(other));
        expect(hmac_equal(hash, other), "a hash differs from itself");
        other[31] ^= 1;
        expect(!hmac_equal(hash, other), "hashes of which the last bit differs");
    }
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
    int count = 0;
    *open = 0;
    for_sockets([&](const char* address, int at, unsigned state) {
        if (at != port || state != 10) return;
        const bool local = strlen(address) == 8 ? strcmp(address + 6, "7F") == 0
                                                : strcmp(address, "00000000000000000000000001000000") == 0;
        count++, *open += !local;
    });
    return count;
}

// Rank 0 listens where MASTER_ADDR says, and nowhere else unless a secret guards it.
TEST(doors_bind_the_named_address) {
    const std::tuple<const char*, const char*, bool, bool, const char*> cases[] = {
        {"127.0.0.1", "", true, false, ""},
        {"127.0.0.2", "", true, false, ""},
        {"localhost", "", true, false, ""},
        {"::1", "", true, false, ""},
        {"0.0.0.0", "", true, true, ""},
        {"192.0.2.1", "", false, false, "is no address of its machine; set MASTER_ADDR"},
        {"192.0.2.1", "secret", true, true, ""},
        {"nowhere.invalid", "secret", false, false, "knows no host nowhere.invalid"},
    };
    for (const auto& [host, secret, listens, to_all, needle] : cases) {
        Launch launch = door_launch(0, 2, own_port(0), secret, host);
        bool fine = rendezvous_listen(&launch, PORTS, error);
        if (!fine && strcmp(host, "::1") == 0) continue;  // a machine without IPv6
        expect(fine == listens && strstr(error, needle), "%s: %d, '%s'", host, fine, error);
        if (!fine) continue;
        int open, count = listeners_at(launch.port, &open);
        expect(count > 0 && count == launch.listeners && (open > 0) == to_all, "%s: %d sockets, %d open to all", host,
               count, open);
        rendezvous_close(&launch);
    }
    // A port that another program has is passed over; if all are taken, a sentence says so.
    Launch first = door_launch(0, 2, own_port(0), ""), second = first, third = first;
    expect(rendezvous_listen(&first, PORTS, error), "%s", error);
    expect(rendezvous_listen(&second, PORTS, error) && second.port > first.port, "%d: %s", second.port, error);
    third.port = first.port;
    expect(!rendezvous_listen(&third, 1, error) && strstr(error, "in use") && strstr(error, "MASTER_PORT"), "%s",
           error);
    rendezvous_close(&first), rendezvous_close(&second);
}

// More connections than rank 0 hears at a time, which say nothing, half of a greeting, or what is none, delay a rank by
// less than a second or two, and end nothing.
TEST(doors_strangers_delay_nobody) {
    const char* say[] = {"", "GET / HTTP/1.0\r\n\r\n", "dbin", "\033[2J\033[2J\033[2J"};
    constexpr int STRANGERS = 300;
    int stranger[STRANGERS];
    static Rank rank[2];
    Launch launch = door_launch(0, 2, own_port(1), "a secret"), other = door_launch(1, 2, launch.port, "a secret");
    rank_begin(&rank[0], launch, 30);
    for (int i = 0; i < STRANGERS; i++) {
        stranger[i] = connect_to(launch.port);
        expect(stranger[i] >= 0, "nobody listens");
        Hello hello = door_hello(launch, 1, TALK);
        if (i % 8 == 7) send_all(stranger[i], &hello, 100 + i % 100);
        if (i % 8 < 4) send_all(stranger[i], say[i % 4], strlen(say[i % 4]));
    }
    rank_begin(&rank[1], other, 30);
    for (Rank& r : rank) rank_end(&r);
    for (Rank& r : rank) expect(r.code == 0 && r.text[0] == 0, "code %d: %s", r.code, r.text);
    expect(rank[1].took < 4, "the rank took %.1f s to join and leave", rank[1].took);
    note(test, "%d strangers, %.2f s", STRANGERS, rank[1].took);
    for (int one : stranger) close(one);
}

// The deadline holds while strangers send a byte from time to time.
TEST(doors_deadline_holds) {
    static Rank rank;
    Launch launch = door_launch(0, 2, own_port(2), "a secret");
    rank_begin(&rank, launch, 2);
    Hello hello = door_hello(launch, 1, TALK);
    int drip[4];
    for (int& one : drip) one = connect_to(launch.port);
    for (int i = 0; i < 30; i++, pause_ms(100)) {
        for (int one : drip) (void)!send(one, (const char*)&hello + i, 1, MSG_NOSIGNAL);
    }
    rank_end(&rank);
    expect(rank.code == 2 && strstr(rank.text, "have not come to rank 0") && strstr(rank.text, ": 1;"), "%d: %s",
           rank.code, rank.text);
    expect(rank.took < 4.5, "%.1f s of 2", rank.took);
    expect_calm(test, "drip", &rank, 1);
    for (int one : drip) close(one);
}

// Who does not know the secret is not let in, learns nothing, and ends nothing; rank 0 says so once.
TEST(doors_secret_is_needed) {
    const char* const secrets[][2] = {{"right", "wrong"}, {"right", ""}, {"", "wrong"}};
    for (int i = 0; i < 3; i++) {
        static Rank rank[2];
        Launch launch = door_launch(0, 2, own_port(3 + i), secrets[i][0]);
        Launch stranger = door_launch(1, 2, launch.port, secrets[i][1]), own = launch;
        own.rank = 1;
        rank_begin(&rank[0], launch, 20);
        Hello hello = door_hello(stranger, 1, TALK);
        memcpy(hello.host, "\033[2J", 4);
        unsigned char zero[HMAC_BYTES] = {};
        for (int k = 0; k < 3; k++) {
            int made;
            Welcome welcome;
            expect(!door_greet(stranger, hello, &made, &welcome), "a stranger was let in");
            expect(!welcome.accepted && memcmp(welcome.proof, zero, HMAC_BYTES) == 0, "rank 0 proved itself");
            close(made);
        }
        rank_begin(&rank[1], own, 20);
        for (Rank& r : rank) rank_end(&r);
        for (Rank& r : rank) expect(r.code == 0, "code %d: %s", r.code, r.text);
        expect_calm(test, "wrong secret", &rank[0], secrets[i][0][0] ? 1 : 2);
        expect(strstr(rank[0].text, "127.0.0.1 that says it is rank 1 is not let in"), "%s", rank[0].text);
    }
}

// If a rank and rank 0 have different secrets, both say so and fail.
TEST(doors_different_secrets) {
    static Rank rank[2];
    rank_begin(&rank[0], door_launch(0, 2, own_port(6), "one"), 2);
    rank_begin(&rank[1], door_launch(1, 2, own_port(6), "another"), 2);
    for (Rank& r : rank) rank_end(&r);
    for (Rank& r : rank) {
        expect(r.code == 2 && strstr(r.text, "set NIBBLE_SECRET to the same text on all ranks"), "%d: %s", r.code,
               r.text);
        expect_calm(test, "different secrets", &r, 2);
    }
    expect(strstr(rank[1].text, "error: rank 1 has met nobody at "), "%s", rank[1].text);
}

// A false rank 0 answers. Its challenge is right, but its welcome has no final NUL and no proof.
TEST(doors_false_rank_0) {
    static Rank rank;
    Launch launch = door_launch(0, 2, own_port(7), ""), victim = door_launch(1, 2, own_port(7), "secret");
    expect(rendezvous_listen(&launch, 1, error), "%s", error);
    rank_begin(&rank, victim, 2);
    for (int k : {0, 1, 2, 4, 5, 3}) {  // the last is cut, so that the rank waits for the rest
        struct pollfd one = {launch.listener[0], POLLIN, 0};
        if (poll(&one, 1, 3000) <= 0) break;
        int made = accept(one.fd, nullptr, nullptr);
        Hello hello;
        unsigned char proof[HMAC_BYTES];
        Challenge challenge = {RENDEZVOUS_MAGIC, RENDEZVOUS_VERSION, 1, {}};
        Welcome welcome = {RENDEZVOUS_MAGIC, 1, 1, {}, {}};
        set_time_limit(made, 3);
        welcome.accepted = k % 2;
        memset(welcome.error, k < 2 ? 0x1b : 'A', sizeof(welcome.error));
        if (k == 4) challenge.version++;
        if (k == 5) challenge.magic++;
        if (receive_all(made, &hello, sizeof(hello)) && send_all(made, &challenge, sizeof(challenge)) && k < 4) {
            receive_all(made, proof, sizeof(proof));
            rendezvous_prove(launch.key, "rank 0", launch.port, &hello, &challenge, &welcome, welcome.proof);
            send_all(made, &welcome, sizeof(welcome) - (k == 3));
        }
        close(made);
    }
    rendezvous_close(&launch);
    rank_end(&rank);
    expect(rank.code == 2 && strstr(rank.text, "has met nobody at "), "%d: %s", rank.code, rank.text);
    expect(rank.took < 4.5, "%.1f s of 2", rank.took);
    expect_calm(test, "false rank 0", &rank, 3);
}

// Some who know the secret cannot be part of this run; their greetings are refused.
TEST(doors_greetings_that_do_not_fit) {
    const std::tuple<const char*, int, int, int, int, uint32_t, const char*> cases[] = {
        {"another world", 1, 3, TALK, 2, RENDEZVOUS_VERSION, "train: error: rank 1 of 3 came from ?[2Jhh"},
        {"rank 0", 0, 2, TALK, 2, RENDEZVOUS_VERSION, "start all with the same number"},
        {"negative", -1, 2, TALK, 2, RENDEZVOUS_VERSION, "start all with the same number"},
        {"too large", 2, 2, TALK, 2, RENDEZVOUS_VERSION, "start all with the same number"},
        {"channel", 1, 2, CHANNELS, 2, RENDEZVOUS_VERSION, "start all with the same number"},
        {"negative channel", 1, 2, -1, 2, RENDEZVOUS_VERSION, "start all with the same number"},
        {"version", 1, 2, TALK, 2, RENDEZVOUS_VERSION + 1, "has another version of nibble is not let in"},
        {"twice", 1, 2, TALK, 2, RENDEZVOUS_VERSION, "two processes say that they are rank 1: on ?[2J"},
    };
    for (const auto& [what, number, world, channel, code, version, needle] : cases) {
        static Rank rank;
        Launch launch = door_launch(0, 2, own_port(8), "secret");
        rank_begin(&rank, launch, version == RENDEZVOUS_VERSION ? 20 : 2);
        int made[2] = {-1, -1};
        for (int k = 0; k <= (strcmp(what, "twice") == 0); k++) {
            Hello hello = door_hello(launch, number, channel);
            Welcome welcome;
            hello.world = world, hello.version = version;
            memset(hello.host, 'h', sizeof(hello.host));  // without a NUL
            memcpy(hello.host, "\033[2J", 4);
            door_greet(launch, hello, &made[k], &welcome);
        }
        rank_end(&rank);
        expect(rank.code == code && strstr(rank.text, needle), "%s: %d, %s", what, rank.code, rank.text);
        expect_calm(test, what, &rank, 2);
        for (int one : made) close(one);
    }
}

// A rank that was let in may send anything over its second channel: however wrong, the run ends, not with 0 and not by
// a signal, and a terminal prints it as text. The head of a message is in launch.c.
TEST(doors_messages_of_a_rank) {
    struct Head {
        uint32_t magic;
        int32_t bytes, kind, code, patience;
        int64_t progress;
    };
    constexpr uint32_t MAGIC = 0x6e69626c;
    constexpr int32_t HEAD = 32, FAILED = 1;
    const std::tuple<const char*, Head, const char*, int, const char*> cases[] = {
        {"failed with 0", {MAGIC, HEAD + 4, FAILED, 0, 0, 0}, "why?", 1, "rank 1 on stranger: why?"},
        {"failed with 256", {MAGIC, HEAD, FAILED, 256, 0, 0}, "", 1, ""},
        {"failed with -1", {MAGIC, HEAD, FAILED, -1, 0, 0}, "", 1, ""},
        {"failed with 3", {MAGIC, HEAD + 8, FAILED, 3, 0, 0}, "\033[2J\007\x9b\x0b+", 3, "?[2J???+"},
        {"no magic", {7, HEAD, 0, 0, 0, 0}, "", 1, "has sent what is no message"},
        {"no length", {MAGIC, 0, 0, 0, 0, 0}, "", 1, "has sent what is no message"},
        {"negative length", {MAGIC, -5, 0, 0, 0, 0}, "", 1, "has sent what is no message"},
        {"huge length", {MAGIC, INT32_MAX, 0, 0, 0, 0}, "", 1, "has sent what is no message"},
        {"unknown kind", {MAGIC, HEAD, 77, 0, 0, 0}, "", 1, "has sent what is no message"},
        {"negative patience", {MAGIC, HEAD, 0, 0, -1, 0}, "", 1, "has sent what is no message"},
        {"negative progress", {MAGIC, HEAD, 0, 0, 0, -1}, "", 1, "has sent what is no message"},
        {"half a message", {MAGIC, HEAD + 3000, 0, 0, 0, 0}, "half", 1, "has ended without a word"},
        {"good-bye at once", {MAGIC, HEAD, 2, 0, 0, 0}, "", 1, "ended for which others still wait"},
    };
    for (const auto& [what, head, text, code, needle] : cases) {
        static Rank rank;
        Launch launch = door_launch(0, 2, own_port(9), "secret");
        int made[CHANNELS];
        rank_begin(&rank, launch, 20);
        for (int channel = 0; channel < CHANNELS; channel++) {
            Welcome welcome;
            bool in = door_greet(launch, door_hello(launch, 1, channel), &made[channel], &welcome);
            expect(in, "%s: not let in: %s", what, welcome.error);
        }
        send_all(made[CONTROL], &head, HEAD);
        send_all(made[CONTROL], text, strlen(text));
        for (int one : made) shutdown(one, SHUT_WR);
        rank_end(&rank);
        expect(rank.code == code && strstr(rank.text, needle), "%s: %d, %s", what, rank.code, rank.text);
        expect_calm(test, what, &rank, 1);
        for (int one : made) close(one);
    }
}

// A run that a launcher starts works without a secret, and rank 0 says once who could join; with a secret it says
// nothing.
TEST(doors_warning) {
    static const Variable plain[] = {{"RANK", "rank"},
                                     {"LOCAL_RANK", "rank"},
                                     {"WORLD_SIZE", "ranks"},
                                     {"MASTER_ADDR", "127.0.0.1"},
                                     {"MASTER_PORT", "port"}};
    for (const char* secret : {"", "a secret"}) {
        const char* work = work_folder();
        Child child[2];
        const char* words = formatted(BRIEF "/run --tokens-per-step 128 --steps 1 --device cpu", work, work);
        for (int rank : {0, 1}) {
            start_launched(&child[rank], VARIABLES(plain), rank, 2, own_port(*secret ? 11 : 10), words, nullptr,
                           secret);
        }
        for (Child& c : child) finish(&c);
        for (Child& c : child) expect(c.code == 0, "%d: %s", c.code, ERR(c));
        const char *said = ERR(child[0]), *end = strchr(said, '\n');
        bool once =
            strncmp(said, "train: note: NIBBLE_SECRET is not set, so anybody on this machine could join", 76) == 0 &&
            end && end[1] == 0;
        expect(*secret ? *said == 0 : once, "'%s': %s", secret, said);
        expect(ERR(child[1])[0] == 0, "'%s': rank 1: %s", secret, ERR(child[1]));
    }
}
