// See launch.h. First the environment, then --gpus, the watch, and messages between ranks.
#include "launch.h"
#include <errno.h>
#include <omp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include "../../data/files.h"
#include "../../data/signals.h"
#include "../../data/text.h"
#include "rendezvous.h"

enum {
    MOST_RANKS = 1024,
    TEXT_BYTES = 4000,  // of a message
    STOP_SECONDS = 5,   // after a failure, until the other ranks are killed
    MAGIC = 0x6e69626c  // "nibl"
};

// Who this rank is.

// Returns a whole number in the environment; -1 if it is absent or not a number.
static int variable(const char* name) {
    const char* text = getenv(name);
    char* end;
    long number = text ? strtol(text, &end, 10) : -1;
    return text && end != text && *end == 0 && number >= 0 && number <= INT32_MAX ? (int)number : -1;
}

static const char* text_variable(const char* name) {
    const char* text = getenv(name);
    return text ? text : "";
}

bool launch_first_host(const char* list, char* host, size_t bytes) {
    const size_t name = strcspn(list, "[,");
    const bool several = list[name] == '[';
    const char *number = several ? list + name + 1 : "", *end = several ? strchr(number, ']') : NULL;
    const size_t digits = strspn(number, "0123456789");
    if (name == 0 || (several && (digits == 0 || !end))) return false;
    const char* suffix = end ? end + 1 : "";  // of a name such as gpu[1-2]-eth
    const int length =
        snprintf(host, bytes, "%.*s%.*s%.*s", (int)name, list, (int)digits, number, (int)strcspn(suffix, "[,"), suffix);
    return length < (int)bytes;
}

// Returns a port for a job, below the range that systems give out by themselves.
static int port_of(const char* job) {
    uint32_t hash = crc32c(0, job, (int64_t)strlen(job));
    return 20000 + (int)(hash % 1250) * PORTS;
}

static void set_address(Launch* launch, const char* host) {
    const char* typed = text_variable("MASTER_ADDR");
    snprintf(launch->host, sizeof(launch->host), "%s", typed[0] ? typed : host);
    int port = variable("MASTER_PORT");
    launch->port = port > 0 ? port : port_of(launch->job);
}

// True if the environment has the rank, the local rank and the number of ranks.
static bool is_rank(const Launch* launch) {
    return launch->rank >= 0 && launch->world >= 1 && launch->local_rank >= 0;
}

static bool from_torchrun(Launch* launch) {
    const bool elastic = text_variable("TORCHELASTIC_RUN_ID")[0];
    launch->source = elastic ? "torchrun's variables" : "RANK, WORLD_SIZE, ...";
    launch->rank = variable("RANK"), launch->world = variable("WORLD_SIZE");
    launch->local_rank = variable("LOCAL_RANK"), launch->local_world = variable("LOCAL_WORLD_SIZE");
    if (!is_rank(launch) || !text_variable("MASTER_ADDR")[0] || variable("MASTER_PORT") < 1) return false;
    // The port too: without --rdzv-id all jobs have one id, and their ports may be less than PORTS apart.
    snprintf(launch->job, sizeof(launch->job), "torchrun %.60s %.20s %d", text_variable("TORCHELASTIC_RUN_ID"),
             text_variable("TORCHELASTIC_RESTART_COUNT"), variable("MASTER_PORT"));
    set_address(launch, "");
    launch->port += elastic;  // torchrun itself listens at MASTER_PORT
    return true;
}

static bool from_open_mpi(Launch* launch) {
    launch->source = "Open MPI's variables";
    launch->rank = variable("OMPI_COMM_WORLD_RANK"), launch->world = variable("OMPI_COMM_WORLD_SIZE");
    launch->local_rank = variable("OMPI_COMM_WORLD_LOCAL_RANK");
    launch->local_world = variable("OMPI_COMM_WORLD_LOCAL_SIZE");
    if (!is_rank(launch)) return false;
    snprintf(launch->job, sizeof(launch->job), "mpi %.60s%.60s", text_variable("OMPI_MCA_ess_base_jobid"),
             text_variable("PMIX_NAMESPACE"));
    set_address(launch, launch->local_world == launch->world ? "127.0.0.1" : "");
    return true;
}

// False in the batch script itself, which is one process although SLURM_NTASKS is set.
static bool from_slurm(Launch* launch) {
    const int step = variable("SLURM_STEP_ID"), tasks = variable("SLURM_STEP_NUM_TASKS");
    const bool one_node = variable("SLURM_STEP_NUM_NODES") == 1;
    launch->source = "Slurm's variables";
    launch->rank = variable("SLURM_PROCID"), launch->world = tasks > 0 ? tasks : variable("SLURM_NTASKS");
    launch->local_rank = variable("SLURM_LOCALID"), launch->local_world = one_node ? launch->world : 0;
    if (!is_rank(launch) || step < 0) return false;
    snprintf(launch->job, sizeof(launch->job), "slurm %d.%d", variable("SLURM_JOB_ID"), step);
    char host[256] = "127.0.0.1";
    const char* list = text_variable("SLURM_STEP_NODELIST");
    if (!list[0]) list = text_variable("SLURM_JOB_NODELIST");
    if (!one_node && !launch_first_host(list, host, sizeof(host))) host[0] = 0;
    set_address(launch, host);
    return true;
}

// Returns the name of a launcher that started several processes without the variables by which they find each other, or
// NULL.
static const char* incomplete_set(void) {
    if (variable("OMPI_COMM_WORLD_SIZE") > 1) return "Open MPI's OMPI_COMM_WORLD_RANK, _SIZE and _LOCAL_RANK";
    if (variable("SLURM_STEP_NUM_TASKS") > 1 || variable("SLURM_PROCID") > 0)
        return "Slurm's SLURM_PROCID, _LOCALID, _STEP_ID and _STEP_NUM_TASKS";
    if (variable("PMI_SIZE") > 1)
        return "RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT (PMI's are not read)";
    return NULL;
}

// Makes the run's key from NIBBLE_SECRET, a text of any length. Without it anybody can make the same key.
static void take_secret(Launch* launch) {
    const char *secret = text_variable("NIBBLE_SECRET"), *purpose = "nibble rendezvous";
    launch->has_secret = secret[0] != 0;
    hmac_sha256(secret, strlen(secret), purpose, strlen(purpose), launch->key);
}

bool launch_environment(Launch* launch, int64_t gpus, char* error) {
    const Launch alone = {.world = 1, .source = ""};
    *launch = alone;
    bool found = from_torchrun(launch) || from_open_mpi(launch) || from_slurm(launch);
    if (!found) *launch = alone;
    const char *rank = text_variable("RANK"), *world = text_variable("WORLD_SIZE");
    // One rank of several must not train alone; a single rank is alone.
    if (!found && strcmp(world, "1") != 0 && (world[0] || (rank[0] && strcmp(rank, "0") != 0))) {
        return data_error(
            error,
            "RANK is '%s', WORLD_SIZE is '%s', and these two, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are "
            "not all set to what can be; set them, or unset RANK and WORLD_SIZE and type --gpus N",
            rank, world);
    }
    const char* set = found ? NULL : incomplete_set();
    if (set) {
        return data_error(error,
                          "a launcher has made several processes, but not all of %s are set; set them, or start "
                          "without it, with --gpus N",
                          set);
    }
    if (launch->world > 1 && launch->port + PORTS > 65536) {
        return data_error(error, "MASTER_PORT is %s; set it to one from 1024 to %d", text_variable("MASTER_PORT"),
                          65535 - PORTS);
    }
    if (launch->world > 1 && gpus > 1) {
        return data_error(error, "--gpus %lld makes ranks of its own and %s have made %d; leave --gpus out",
                          (long long)gpus, launch->source, launch->world);
    }
    if (launch->rank >= launch->world || launch->world > MOST_RANKS) {
        return data_error(error, "%s: rank %d of %d is impossible; ranks count from 0, and are at most %d",
                          launch->source, launch->rank, launch->world, MOST_RANKS);
    }
    if (launch->world > 1 && !launch->host[0]) {
        return data_error(error, "%s do not say where rank 0 is; set MASTER_ADDR to its host (mpirun -x MASTER_ADDR)",
                          launch->source);
    }
    if (launch->world == 1) *launch = alone;
    if (launch->world > 1) take_secret(launch);
    return true;
}

// Sets the number of OpenMP threads: the ranks of a machine share its cores.
static void share_cores(int local_world) {
    if (getenv("OMP_NUM_THREADS") || local_world < 2) return;
    int cores = omp_get_num_procs() / local_world;
    omp_set_num_threads(cores > 0 ? cores : 1);
}

// --gpus.

static void set_variable(const char* name, int number) {
    setenv(name, text_kept("%d", number), 1);
}

// Returns the code that the run ends with, now that a rank has ended. A signal takes precedence over the codes of
// others.
static int rank_ended(int rank, pid_t pid, int status, bool killed, int code) {
    if (!WIFSIGNALED(status)) return code ? code : WEXITSTATUS(status);
    if (killed || code > 128) return code;
    fprintf(stderr, "train: error: rank %d (process %d) was ended by signal %d (%s); all ranks stop\n", rank, (int)pid,
            WTERMSIG(status), strsignal(WTERMSIG(status)));
    return 128 + WTERMSIG(status);
}

// Waits for the ranks and forwards signals to them. After the first failure the others have STOP_SECONDS to end.
static void supervise(const pid_t* ranks, int count, const sigset_t* signals) {
    int left = count, code = 0;
    double failed = 0;
    SCOPED bool* over = memory_zero((size_t)count, sizeof(bool));
    while (left > 0) {
        struct timespec second = {1, 0};
        int signal = sigtimedwait(signals, NULL, &second);
        for (int i = 0; i < count; i++) {
            int status = 0;
            if (over[i]) continue;
            if (signal > 0 && signal != SIGCHLD) kill(ranks[i], signal);
            bool late = failed > 0 && seconds_now() - failed > STOP_SECONDS;
            if (late) kill(ranks[i], SIGKILL);
            if (waitpid(ranks[i], &status, WNOHANG) != ranks[i]) continue;
            over[i] = true;
            left--;
            code = rank_ended(i, ranks[i], status, late, code);
            // A rank that a signal stopped has saved, and the others do the same in their own time.
            const bool stopped = WIFEXITED(status) && WEXITSTATUS(status) > 128;
            if (code != 0 && !stopped && failed == 0) failed = seconds_now();
        }
    }
    exit(code);
}

bool launch_fork(Launch* launch, int gpus, char* error) {
    sigset_t signals, before;
    *launch = (Launch){.world = gpus, .local_world = gpus, .source = "--gpus", .host = "127.0.0.1"};
    if (getrandom(launch->key, sizeof(launch->key), 0) != sizeof(launch->key)) {
        return data_error(error, "--gpus %d: the system gives no random numbers: %s", gpus, strerror(errno));
    }
    launch->has_secret = true;  // the ranks inherit it in memory, not in the environment
    if (!rendezvous_listen(launch, 1, error)) return false;
    snprintf(launch->job, sizeof(launch->job), "fork %d", (int)getpid());
    signals_handled(&signals);
    sigaddset(&signals, SIGCHLD), sigaddset(&signals, SIGQUIT);
    sigprocmask(SIG_BLOCK, &signals, &before);
    pid_t parent = getpid(), *ranks = memory_zero((size_t)gpus, sizeof(pid_t));
    fflush(NULL);
    for (int rank = 0; rank < gpus; rank++) {
        ranks[rank] = fork();
        if (ranks[rank] < 0) {
            for (int i = 0; i < rank; i++) kill(ranks[i], SIGKILL);
            return data_error(error, "--gpus %d: rank %d cannot be started: %s", gpus, rank, strerror(errno));
        }
        if (ranks[rank] > 0) continue;
        prctl(PR_SET_PDEATHSIG, SIGKILL);  // this process ends with its parent
        if (getppid() != parent) _exit(1);
        if (rank > 0) signals_quiet();
        sigprocmask(SIG_SETMASK, &before, NULL);
        free(ranks);
        launch->rank = launch->local_rank = rank;
        if (rank > 0) rendezvous_close(launch);
        set_variable("RANK", rank), set_variable("WORLD_SIZE", gpus), set_variable("LOCAL_RANK", rank);
        return true;
    }
    rendezvous_close(launch);
    supervise(ranks, gpus, &signals);
    return false;
}

// The watch: a thread on every rank.

typedef enum { BEAT, FAILED, BYE } Kind;

typedef struct {
    uint32_t magic;
    int32_t bytes;  // of the message, up to the end of the text
    int32_t kind, code, patience;
    int64_t progress;
    char text[TEXT_BYTES];  // of FAILED, the message; of BEAT, what the rank does
} Message;

enum { MESSAGE_HEAD = offsetof(Message, text) };

struct LaunchWatch {
    int rank, world, local_rank, silence;
    bool forked;
    Peer* peers;  // (world); rank 0 is connected to all others, they to peers[0] alone
    pthread_t thread;
    pthread_mutex_t sending;
    atomic_bool failing, leaving;
    atomic_int patience;  // seconds in which this rank must make progress; 0: no limit
    atomic_llong progress;
    _Atomic(const char*) what;
    // The thread's own, of each peer.
    struct Heard {
        Message message;
        size_t bytes;  // received of the message
        bool left;
        double at, moved;  // when it was last heard, and last made progress
        int64_t progress;
        int patience;
        char what[64];
    } * heard;
};

static LaunchWatch* watching;  // global, since callers of launch_failed know nothing of ranks

static bool is_peer(const LaunchWatch* watch, int r) {
    return r != watch->rank && (watch->rank == 0 || r == 0) && watch->peers[r].socket[CONTROL] >= 0;
}

static void send_message(LaunchWatch* watch, Kind kind, int code, const char* text) {
    Message message = {.magic = MAGIC, .kind = kind, .code = code};
    message.patience = atomic_load(&watch->patience);
    message.progress = atomic_load(&watch->progress);
    snprintf(message.text, sizeof(message.text), "%s", text);
    message.bytes = MESSAGE_HEAD + (int32_t)strlen(message.text);
    pthread_mutex_lock(&watch->sending);
    for (int r = 0; r < watch->world; r++) {
        // A rank that does not read is found silent long before its heartbeats fill the system's buffers.
        if (is_peer(watch, r)) {
            (void)!send(watch->peers[r].socket[CONTROL], &message, (size_t)message.bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
        }
    }
    pthread_mutex_unlock(&watch->sending);
}

// Waits until all others have closed their side, so that what was sent last is not lost with the socket.
static void drain(LaunchWatch* watch, double limit) {
    double deadline = seconds_now() + limit;
    char bytes[4096];
    for (int r = 0; r < watch->world; r++) {
        if (!is_peer(watch, r)) continue;
        struct pollfd one = {watch->peers[r].socket[CONTROL], POLLIN, 0};
        shutdown(one.fd, SHUT_WR);
        for (double left; (left = deadline - seconds_now()) > 0;) {
            if (poll(&one, 1, (int)(left * 1000) + 1) > 0 && recv(one.fd, bytes, sizeof(bytes), MSG_DONTWAIT) <= 0)
                break;
        }
    }
}

// Ends this process, and on rank 0 all ranks. `spoken`: the message has been printed already.
__attribute__((noreturn, format(printf, 4, 5))) static void end_all(LaunchWatch* watch, int code, bool spoken,
                                                                    const char* format, ...) {
    char text[DATA_ERROR_BYTES + 256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    if (code < 1 || code > 255) code = 1;  // what another rank sent must not look like success
    if (atomic_exchange(&watch->failing, true)) {
        for (;;) sleep_ms(1000);  // another thread is already ending the process
    }
    if (!spoken) fputs(text, stderr), fflush(stderr);
    send_message(watch, FAILED, code, text);
    drain(watch, 2);
    _exit(code);
}

// Takes the place of the function of this name in data/errors.c. The message is printed once, by rank 0.
void launch_failed(int code, const char* text) {
    LaunchWatch* watch = watching;
    if (!watch) return;
    if (watch->rank == 0) end_all(watch, code, false, "%s", text);
    // If all ranks make the same mistake, rank 0 should report it; it then ends this process too.
    sleep_ms(500);
    send_message(watch, FAILED, code, text);
    sleep_ms(5000);
    end_all(watch, code, false, "%s", text);
}

// Ends all ranks, on rank 0, after another rank has reported its failure.
static void peer_failed(LaunchWatch* watch, int r, const Message* message) {
    const char *prefix = "train: error: ", *rest = message->text;
    if (strncmp(rest, prefix, strlen(prefix)) == 0) rest += strlen(prefix);
    end_all(watch, message->code, false, "%srank %d on %s: %s", prefix, r, watch->peers[r].host, rest);
}

static void peer_lost(LaunchWatch* watch, int r, const char* how) {
    const Peer* peer = &watch->peers[r];
    // If --gpus started the rank, its parent reports how it ended; if rank 0 is gone, the first rank to notice does.
    bool ended = strncmp(how, "has ended", 9) == 0;
    bool other = watch->rank > 1 && watch->local_rank > 0;
    end_all(watch, 1, other || (ended && watch->forked),
            "train: error: rank %d on %s (process %d) %s; all ranks stop\n", r, peer->host, peer->pid, how);
}

static void note_progress(struct Heard* heard, double now, int64_t progress, int patience, const char* what) {
    if (progress != heard->progress || patience != heard->patience) heard->moved = now;
    heard->progress = progress;
    heard->patience = patience;
    snprintf(heard->what, sizeof(heard->what), "%.60s", what);
}

static void take_message(LaunchWatch* watch, int r, const Message* message) {
    struct Heard* heard = &watch->heard[r];
    if (message->kind == BYE) heard->left = true;
    if (message->kind == FAILED && watch->rank == 0) peer_failed(watch, r, message);
    if (message->kind == FAILED) end_all(watch, message->code, true, "%s", message->text);
    heard->at = seconds_now();
    note_progress(heard, heard->at, message->progress, message->patience, message->text);
}

static void read_peer(LaunchWatch* watch, int r) {
    struct Heard* heard = &watch->heard[r];
    int socket = watch->peers[r].socket[CONTROL];
    for (;;) {
        size_t want = heard->bytes < MESSAGE_HEAD ? MESSAGE_HEAD : (size_t)heard->message.bytes;
        ssize_t got = recv(socket, (char*)&heard->message + heard->bytes, want - heard->bytes, MSG_DONTWAIT);
        if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
        if (got <= 0) {
            if (!heard->left) peer_lost(watch, r, "has ended without a word");
            close(socket);
            watch->peers[r].socket[CONTROL] = -1;
            return;
        }
        heard->bytes += (size_t)got;
        if (heard->bytes < MESSAGE_HEAD) continue;
        Message* message = &heard->message;
        bool sane = message->magic == MAGIC && message->bytes >= MESSAGE_HEAD &&
                    message->bytes < (int)sizeof(Message) && message->kind >= BEAT && message->kind <= BYE &&
                    message->patience >= 0 && message->progress >= 0;
        if (!sane) peer_lost(watch, r, "has sent what is no message");
        if (heard->bytes < (size_t)message->bytes) continue;
        ((char*)message)[message->bytes] = 0;
        text_disarm(message->text, true);
        heard->bytes = 0;
        take_message(watch, r, message);
    }
}

// Ends all ranks if none has made progress within its patience. The rank that is furthest behind is at fault.
static void check_progress(LaunchWatch* watch, double now) {
    int64_t min = INT64_MAX, max = -1;
    int behind = 0;
    for (int r = 0; r < watch->world; r++) {
        const struct Heard* heard = &watch->heard[r];
        if (heard->left || heard->patience == 0 || now - heard->moved < heard->patience) return;
        if (heard->progress < min) min = heard->progress, behind = r;
        if (heard->progress > max) max = heard->progress;
    }
    const struct Heard* last = &watch->heard[behind];
    if (min == max) {
        end_all(watch, 1, false, "train: error: no rank has made progress for %d s (%s); all ranks stop\n",
                last->patience, last->what);
    }
    end_all(watch, 1, false,
            "train: error: rank %d on %s hangs: the others have waited for it for %d s (%s); all ranks stop\n", behind,
            behind ? watch->peers[behind].host : "this host", last->patience, last->what);
}

static void check_silence(LaunchWatch* watch, double now) {
    for (int r = 0; r < watch->world; r++) {
        if (!is_peer(watch, r) || now - watch->heard[r].at <= watch->silence) continue;
        peer_lost(
            watch, r,
            text_kept("has been silent for %d s: it is stopped, or its machine cannot be reached", watch->silence));
    }
    if (watch->rank != 0) return;
    note_progress(&watch->heard[0], now, atomic_load(&watch->progress), atomic_load(&watch->patience),
                  atomic_load(&watch->what));
    check_progress(watch, now);
}

static void* watch_thread(void* argument) {
    LaunchWatch* watch = argument;
    SCOPED struct pollfd* polled = memory_zero((size_t)watch->world, sizeof(struct pollfd));
    SCOPED int* rank_of = memory_zero((size_t)watch->world, sizeof(int));
    double beat = 0, before = seconds_now();
    while (!atomic_load(&watch->leaving)) {
        int count = 0;
        for (int r = 0; r < watch->world; r++) {
            if (!is_peer(watch, r)) continue;
            polled[count] = (struct pollfd){watch->peers[r].socket[CONTROL], POLLIN, 0};
            rank_of[count++] = r;
        }
        poll(polled, (nfds_t)count, 200);
        double now = seconds_now();
        // After a pause of this process (Ctrl-Z, a suspended machine), the other ranks have not been silent.
        for (int r = 0; r < watch->world && now - before > 3; r++) watch->heard[r].at = watch->heard[r].moved = now;
        before = now;
        for (int i = 0; i < count; i++) {
            if (polled[i].revents) read_peer(watch, rank_of[i]);
        }
        if (now - beat >= 1) send_message(watch, BEAT, 0, atomic_load(&watch->what)), beat = now;
        check_silence(watch, now);
    }
    return NULL;
}

bool launch_join(Launch* launch, int64_t limit, char* error) {
    if (launch->world == 1) return true;
    set_variable("RANK", launch->rank);  // for error messages, with any launcher
    share_cores(launch->local_world);
    Peer* peers = memory_zero((size_t)launch->world, sizeof(Peer));
    for (int r = 0; r < launch->world; r++) {
        peers[r].socket[TALK] = peers[r].socket[CONTROL] = -1;
        if (r == 0) snprintf(peers[r].host, sizeof(peers[r].host), "%.60s", launch->host);
    }
    bool ok = launch->rank == 0 ? rendezvous_gather(launch, peers, limit, error)
                                : rendezvous_reach(launch, &peers[0], limit, error);
    if (!ok) return false;
    for (int r = 0; r < launch->world; r++) {
        if (peers[r].socket[TALK] >= 0) set_time_limit(peers[r].socket[TALK], 0);
    }
    LaunchWatch* watch = memory_zero(1, sizeof(LaunchWatch));
    watch->rank = launch->rank, watch->world = launch->world, watch->local_rank = launch->local_rank;
    watch->silence = variable("NIBBLE_SILENCE") > 0 ? variable("NIBBLE_SILENCE") : SILENCE_SECONDS;
    watch->forked = strcmp(launch->source, "--gpus") == 0;
    watch->peers = peers;
    watch->heard = memory_zero((size_t)launch->world, sizeof(*watch->heard));
    for (int r = 0; r < launch->world; r++) watch->heard[r].at = watch->heard[r].moved = seconds_now();
    pthread_mutex_init(&watch->sending, NULL);
    atomic_store(&watch->what, "starting");
    const int status = signals_thread(&watch->thread, watch_thread, watch);
    if (status != 0) return data_error(error, "the thread that watches the ranks cannot start: %s", strerror(status));
    launch->watch = watching = watch;
    return true;
}

// Messages between ranks.

// Waits for the watch to report that the other side has ended and to end this process.
__attribute__((noreturn)) static void wait_for_end(void) {
    sleep_ms(5000);
    end_all(watching, 1, false, "train: error: a rank has ended for which others still wait; all ranks stop\n");
}

static void give_bytes(const Launch* launch, int to, const void* bytes, size_t count) {
    if (!send_all(launch->watch->peers[to].socket[TALK], bytes, count)) wait_for_end();
}

static void take_bytes(const Launch* launch, int from, void* bytes, size_t count) {
    if (!receive_all(launch->watch->peers[from].socket[TALK], bytes, count)) wait_for_end();
}

void launch_broadcast(const Launch* launch, int from, void* bytes, int64_t count) {
    if (launch->world == 1) return;
    if (from > 0 && launch->rank == 0) take_bytes(launch, from, bytes, (size_t)count);
    if (from > 0 && launch->rank == from) give_bytes(launch, 0, bytes, (size_t)count);
    if (launch->rank > 0) take_bytes(launch, 0, bytes, (size_t)count);
    for (int r = 1; r < launch->world && launch->rank == 0; r++) give_bytes(launch, r, bytes, (size_t)count);
}

void launch_all_reduce(const Launch* launch, double* values, int count, LaunchReduction how) {
    if (launch->world == 1) return;
    size_t bytes = (size_t)count * sizeof(double);
    SCOPED double* others = memory_take(bytes);
    if (launch->rank > 0) give_bytes(launch, 0, values, bytes);
    for (int r = 1; r < launch->world && launch->rank == 0; r++) {
        take_bytes(launch, r, others, bytes);
        for (int i = 0; i < count; i++) {
            if (how == LAUNCH_SUM) values[i] += others[i];
            if (how == LAUNCH_MAX && !(values[i] >= others[i])) values[i] = others[i];
        }
    }
    launch_broadcast(launch, 0, values, (int64_t)bytes);
}

bool launch_any(const Launch* launch, bool flag) {
    double value = flag;
    launch_all_reduce(launch, &value, 1, LAUNCH_MAX);
    return value > 0;
}

void launch_hurry(const Launch* launch, const char* what, double patience) {
    LaunchWatch* watch = launch->watch;
    if (!watch) return;
    atomic_store(&watch->what, what);
    atomic_store(&watch->patience, patience > watch->silence ? (int)patience : watch->silence);
    atomic_fetch_add(&watch->progress, 1);
}

void launch_rest(const Launch* launch) {
    if (launch->watch) atomic_store(&launch->watch->patience, 0);
}

void launch_leave(Launch* launch) {
    LaunchWatch* watch = launch->watch;
    if (!watch) return;
    launch_rest(launch);
    launch_any(launch, false);  // waits for all ranks
    send_message(watch, BYE, 0, "");
    launch_any(launch, false);
    watching = NULL;
    atomic_store(&watch->leaving, true);
    pthread_join(watch->thread, NULL);
    for (int r = 0; r < launch->world; r++) {
        for (int c = 0; c < CHANNELS; c++) {
            if (watch->peers[r].socket[c] >= 0) close(watch->peers[r].socket[c]);
        }
    }
    pthread_mutex_destroy(&watch->sending);
    free(watch->peers), free(watch->heard), free(watch);
    launch->watch = NULL;
}
