// Tests of ./train use this to start ranks as a launcher does, and to connect to their port.
#pragma once
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include "../../kernels/ranks/rendezvous.h"
#include "cli.h"

// Returns a port of this process's own, so that tests at the same time do not meet.
inline int own_port(int which) {
    return 10000 + (getpid() * 16 + which * 1000) % 9000;
}

// Connects to a port of this machine. Returns the socket, -1 if nobody listens for twenty seconds.
inline int connect_to(int port) {
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

// A launcher sets these variables; "rank", "local", "ranks", "half" and "port" stand for numbers. They tell of two
// machines with half the ranks each.
struct Variable {
    const char *name, *value;
};

inline const Variable torchrun[] = {
    {"LOCAL_WORLD_SIZE", "half"}, {"RANK", "rank"},        {"MASTER_ADDR", "localhost"},   {"WORLD_SIZE", "ranks"},
    {"MASTER_PORT", "port"},      {"LOCAL_RANK", "local"}, {"TORCHELASTIC_RUN_ID", "none"}};

#define VARIABLES(set) set, (int)(sizeof(set) / sizeof(set[0]))

// Starts a rank with them in `folder`, NULL: where this program runs.
inline void start_launched(Child* child, const Variable* variables, int count, int rank, int ranks, int port,
                           const char* words, const char* folder = nullptr, const char* secret = "of these tests") {
    const std::tuple<const char*, int> numbers[] = {
        {"rank", rank}, {"local", rank % (ranks / 2)}, {"ranks", ranks}, {"half", ranks / 2}, {"port", port}};
    for (int i = 0; i < count; i++) {
        const char* value = variables[i].value;
        for (const auto& [word, number] : numbers) {
            if (strcmp(variables[i].value, word) == 0) value = formatted("%d", number);
        }
        setenv(variables[i].name, value, 1);
    }
    setenv("NIBBLE_STAND_IN", "1", 1), setenv("NIBBLE_SECRET", secret, 1);
    *child = new_child(false, folder);
    child->keeps_rank = true;
    start(child, "%s", words);
    for (int i = 0; i < count; i++) unsetenv(variables[i].name);
    unsetenv("NIBBLE_STAND_IN"), unsetenv("NIBBLE_SECRET");
}
