// What strangers send while the ranks of a run find each other, and afterwards: the greeting as rank 0 and as another
// rank hear it, the messages of the watch, and what the environment says. The first byte of an input says which of
// them, the second whether the proof is to be right, which nobody can guess.
#include <fcntl.h>
#include <unistd.h>

#include "fuzz.h"
#define _exit(code) fuzz_leave()  // where the watch ends the process
#include "../../kernels/ranks/launch.c"
#include "../../kernels/ranks/rendezvous.c"
#include "../../kernels/ranks/watch.c"

// Two ends of a connection. Their numbers are out of the way: what is tested closes some ends itself, and the
// sanitizers open pipes meanwhile, which a second close of a low number would hit.
static const int ends[2] = {200, 201};

// Connects the ends anew; the other one, ends[1], has said `input`.
static void connect_pair(FuzzInput input) {
    int pair[2];
    demand(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
    for (int i = 0; i < 2; i++) demand(dup3(pair[i], ends[i], O_CLOEXEC) == ends[i] && close(pair[i]) == 0);
    demand(send_message(ends[1], input.bytes, input.count));
}

static void greet_first(FuzzInput input, bool proves) {
    char error[DATA_ERROR_BYTES] = "";
    const Launch launch = {.rank = 0, .world = 3, .port = 1};
    Peer peers[3] = {{.socket = -1}, {.socket = -1}, {.socket = -1}};
    Handshake handshake = {.socket = ends[0]};
    Listener listener = {.launch = &launch, .peers = peers, .ok = true, .error = error};
    Hello hello;
    memset(&hello, 0, sizeof(hello));
    memcpy(&hello, input.bytes, input.count < sizeof(hello) ? input.count : sizeof(hello));
    if (proves) rendezvous_prove(&launch, "rank", &handshake.challenge, &hello, hello.proof);
    connect_pair((FuzzInput){(const char*)&hello, proves ? sizeof(hello) : input.count % (sizeof(hello) + 1)});
    shutdown(ends[1], SHUT_WR);
    while (read_handshake(&listener, &handshake)) {
    }
    demand(listener.ok ? listener.came == (handshake.socket < 0) : error[0] != 0);
    demand(memchr(peers[1].host, 0, sizeof(peers[1].host)));
}

static void greet_other(FuzzInput input) {
    const Launch launch = {.rank = 1, .world = 3, .port = 1};
    const char* reason;
    Welcome welcome;
    connect_pair(input);
    shutdown(ends[1], SHUT_WR);
    demand(!greet(&launch, ends[0], &welcome, seconds_now() + 5, &reason) && reason[0]);
}

// Ends in fuzz_leave() where a message ends the run.
static void hear_watch(FuzzInput input, bool first) {
    static Peer peers[3];
    for (int r = 0; r < 3; r++) {
        Peer* peer = &peers[r];
        *peer = (Peer){.socket = -1, .in = peer->in, .out = peer->out, .data = peer->data};
        peer->in.count = peer->out.count = peer->data.count = 0;
    }
    watch.peers = peers, watch.rank = first ? 0 : 1, watch.world = 3, watch.silence = 20, watch.ending = false;
    connect_pair(input);
    close(ends[1]);
    Peer* peer = &peers[first ? 1 : 0];
    for (peer->socket = ends[0]; peer->socket >= 0;) read_peer(first ? 1 : 0);
}

// Lines of NAME=VALUE, of the variables that launchers set.
static void read_environment(FuzzInput input) {
    static const char* const names[] = {"RANK",
                                        "WORLD_SIZE",
                                        "LOCAL_RANK",
                                        "LOCAL_WORLD_SIZE",
                                        "MASTER_ADDR",
                                        "MASTER_PORT",
                                        "SLURM_PROCID",
                                        "SLURM_STEP_NUM_TASKS",
                                        "SLURM_LOCALID",
                                        "SLURM_JOB_ID",
                                        "SLURM_STEP_ID",
                                        "SLURM_JOB_NODELIST",
                                        "SLURM_STEP_NODELIST",
                                        "SLURM_STEP_NUM_NODES",
                                        "OMPI_COMM_WORLD_RANK",
                                        "OMPI_COMM_WORLD_SIZE",
                                        "OMPI_COMM_WORLD_LOCAL_RANK",
                                        "NIBBLE_SECRET"};
    const int count = sizeof(names) / sizeof(names[0]);
    char error[DATA_ERROR_BYTES] = "", host[16], *text = strndup(input.bytes, input.count), *rest = NULL;
    Launch launch;
    launch_first_host(text, host, sizeof(host));
    for (char* line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        char* value = strchr(line, '=');
        if (value) *value++ = 0;
        for (int i = 0; i < count && value; i++) {
            if (strcmp(line, names[i]) == 0) setenv(line, value, 1);
        }
    }
    if (!launch_environment(&launch, 1, error)) demand(error[0]);
    for (int i = 0; i < count; i++) unsetenv(names[i]);
    free(text);
}

void fuzz_rendezvous(FuzzInput input) {
    if (input.count < 2) return;
    const int kind = input.bytes[0] % 4;
    const bool flag = input.bytes[1] % 2 != 0;
    input.bytes += 2, input.count -= 2;
    if (kind == 0) greet_first(input, flag);
    if (kind == 1) greet_other(input);
    if (kind == 2) hear_watch(input, flag);
    if (kind == 3) read_environment(input);
}
