// What strangers send while the ranks of a run find each other, and afterwards: the greeting as rank 0 and as another
// rank hear it, the messages of the watch, and what the environment says. The first byte of an input says which of
// them, the second whether proofs are to be right, which nobody can guess.
#include <fcntl.h>
#include <unistd.h>

#include "fuzz.h"
#define _exit(code) fuzz_leave()  // where the watch ends the process
#include "../../kernels/ranks/launch.c"
#include "../../kernels/ranks/rendezvous.c"

// Two ends of a connection. Their numbers are out of the way: what is tested closes some ends itself, and the
// sanitizers open pipes meanwhile, which a second close of a low number would hit.
static const int ends[2] = {200, 201};

// Connects the ends anew; the other one, ends[1], has said `input`.
static void connect_pair(FuzzInput input) {
    int pair[2];
    demand(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
    for (int i = 0; i < 2; i++) demand(dup3(pair[i], ends[i], O_CLOEXEC) == ends[i] && close(pair[i]) == 0);
    demand(send_all(ends[1], input.bytes, input.count));
}

static void greet_first(FuzzInput input, bool proves) {
    static Door door;
    char error[DATA_ERROR_BYTES] = "";
    unsigned char proof[HMAC_BYTES];
    Launch launch = {.rank = 0, .world = 3, .port = 1};
    Peer peers[3];
    memset(peers, -1, sizeof(peers));
    const size_t first = input.count < sizeof(Hello) ? input.count : sizeof(Hello);
    connect_pair((FuzzInput){input.bytes, first});
    door = (Door){.launch = &launch, .peers = peers, .ok = true, .error = error};
    Greeting* greeting = &door.greeting[0];
    *greeting = (Greeting){.socket = ends[0]};
    bool going = hear(&door, greeting);
    if (going && proves && greeting->challenged) {
        rendezvous_prove(launch.key, "rank", launch.port, &greeting->hello, &greeting->challenge, NULL, proof);
        demand(send_all(ends[1], proof, sizeof(proof)));
    } else {
        send_all(ends[1], input.bytes + first, input.count - first);
        shutdown(ends[1], SHUT_WR);
    }
    if (going) hear(&door, greeting);
    demand(door.ok || error[0]);
    demand(memchr(peers[1].host, 0, sizeof(peers[1].host)) || peers[1].socket[TALK] < 0);
}

static void greet_other(FuzzInput input, bool proves) {
    const size_t bytes = sizeof(Challenge) + sizeof(Welcome);
    struct {
        Challenge challenge;
        Welcome welcome;
    } said;
    Launch launch = {.rank = 1, .world = 3, .port = 1};
    Hello hello = {.magic = RENDEZVOUS_MAGIC, .version = RENDEZVOUS_VERSION, .rank = 1, .world = 3};
    Welcome welcome;
    Met met = {.deadline = seconds_now() + 5, .other_version = true, .other_secret = true};
    char error[DATA_ERROR_BYTES] = "";
    memset(&said, 0, sizeof(said));
    memcpy(&said, input.bytes, input.count < bytes ? input.count : bytes);
    if (proves) {
        rendezvous_prove(launch.key, "rank 0", launch.port, &hello, &said.challenge, &said.welcome, said.welcome.proof);
    }
    connect_pair((FuzzInput){(const char*)&said, input.count < bytes ? input.count : bytes});
    shutdown(ends[1], SHUT_WR);
    if (!greet(&launch, ends[0], launch.port, &hello, &welcome, &met)) return;
    copy_text(error, sizeof(welcome.error), welcome.error, sizeof(welcome.error));
}

// Ends in fuzz_leave() where a message ends the run.
static void hear_watch(FuzzInput input, bool first) {
    static struct Heard heard[3];
    static Peer peers[3];
    static LaunchWatch watch;
    memset(heard, 0, sizeof(heard));
    memset(peers, -1, sizeof(peers));
    memset(peers[1].host, 0, sizeof(peers[1].host));
    watch = (LaunchWatch){.rank = first ? 0 : 1, .world = 3, .silence = 20, .peers = peers, .heard = heard};
    pthread_mutex_init(&watch.sending, NULL);
    connect_pair(input);
    close(ends[1]);
    peers[first ? 1 : 0].socket[CONTROL] = ends[0];
    read_peer(&watch, first ? 1 : 0);
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
                                        "SLURM_NTASKS",
                                        "SLURM_LOCALID",
                                        "SLURM_JOB_ID",
                                        "SLURM_NODELIST",
                                        "SLURM_JOB_NODELIST",
                                        "SLURM_STEP_NODELIST",
                                        "SLURM_NTASKS_PER_NODE",
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
    if (kind == 1) greet_other(input, flag);
    if (kind == 2) hear_watch(input, flag);
    if (kind == 3) read_environment(input);
}
