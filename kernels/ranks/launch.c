// See launch.h. First the environment, then --gpus.
#include "launch.h"
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <unistd.h>
#include "../../data/files.h"
#include "../../data/memory.h"
#include "../../data/signals.h"
#include "rendezvous.h"

const Launch LAUNCH_ALONE = {.world = 1, .source = ""};

enum { MOST_RANKS = 1024 };

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

// The variables of each launcher. Together with two that name the job they say who a rank is.
static const struct {
    const char *source, *rank, *world, *local_rank, *local_world, *job, *job_part;
} LAUNCHERS[] = {
    {"torchrun's variables", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID",
     "TORCHELASTIC_RESTART_COUNT"},
    {"Open MPI's variables", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
     "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE"},
    {"Slurm's variables", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "", "SLURM_JOB_ID", "SLURM_STEP_ID"},
    {"MPICH's variables", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "", ""},
};
enum { TORCHRUN, OPEN_MPI, SLURM, MPICH, LAUNCHER_COUNT };

// Reads row i. False if it is incomplete, as in Slurm's batch script, which is one process and no step.
static bool read_rank(Launch* launch, int i) {
    *launch = (Launch){.source = LAUNCHERS[i].source, .rank = variable(LAUNCHERS[i].rank)};
    launch->world = variable(LAUNCHERS[i].world), launch->local_rank = variable(LAUNCHERS[i].local_rank);
    launch->local_world = variable(LAUNCHERS[i].local_world);
    if (i == SLURM && variable("SLURM_STEP_NUM_NODES") == 1) launch->local_world = launch->world;
    snprintf(launch->job, sizeof(launch->job), "%s %.60s %.40s", LAUNCHERS[i].rank, text_variable(LAUNCHERS[i].job),
             text_variable(LAUNCHERS[i].job_part));
    return launch->rank >= 0 && launch->world >= 1 && launch->local_rank >= 0 &&
           (i != SLURM || variable("SLURM_STEP_ID") >= 0);
}

// Finds where rank 0 listens, for row i. Without MASTER_PORT the port follows from the job.
static bool read_address(Launch* launch, int i) {
    const char *typed = text_variable("MASTER_ADDR"), *list = text_variable("SLURM_STEP_NODELIST");
    const bool one_machine = launch->local_world == launch->world && i != TORCHRUN;
    const int port = variable("MASTER_PORT");
    launch->port = port >= 0 ? port : 20000 + (int)(crc32c(0, launch->job, (int64_t)strlen(launch->job)) % 10000);
    // torchrun itself listens at MASTER_PORT.
    launch->port += i == TORCHRUN && text_variable(LAUNCHERS[i].job)[0] && port < 65535;
    snprintf(launch->host, sizeof(launch->host), "%s", one_machine ? "127.0.0.1" : "");
    if (i == SLURM && !one_machine) {
        launch_first_host(*list ? list : text_variable("SLURM_JOB_NODELIST"), launch->host, sizeof(launch->host));
    }
    if (*typed) snprintf(launch->host, sizeof(launch->host), "%s", typed);
    return launch->host[0] && launch->port > 0 && launch->port < 65536;
}

bool launch_environment(Launch* launch, int64_t gpus, char* error) {
    const char* secret = text_variable("NIBBLE_SECRET");
    int i = 0, half = -1;
    for (; i < LAUNCHER_COUNT && !read_rank(launch, i); i++) {
        const char* world = text_variable(LAUNCHERS[i].world);
        if (launch->rank > 0 || (*world && strcmp(world, "1") != 0)) half = i;
    }
    if (i == LAUNCHER_COUNT && half >= 0) {
        const char* names[3] = {LAUNCHERS[half].rank, LAUNCHERS[half].world, LAUNCHERS[half].local_rank};
        return data_error(error,
                          "a launcher has made several processes, but %s ('%s'), %s ('%s') and %s ('%s') do not say "
                          "who this one is; set them, or unset all of them and type --gpus N",
                          names[0], text_variable(names[0]), names[1], text_variable(names[1]), names[2],
                          text_variable(names[2]));
    }
    if (i < LAUNCHER_COUNT && (launch->rank >= launch->world || launch->world > MOST_RANKS)) {
        return data_error(error, "%s: rank %d of %d is impossible; ranks count from 0, and are at most %d",
                          launch->source, launch->rank, launch->world, MOST_RANKS);
    }
    if (i == LAUNCHER_COUNT || launch->world == 1) {
        *launch = (Launch){.world = 1, .source = ""};
        return true;
    }
    if (gpus > 1) {
        return data_error(error, "--gpus %lld makes ranks of its own and %s have made %d; leave --gpus out",
                          (long long)gpus, launch->source, launch->world);
    }
    if (!read_address(launch, i)) {
        return data_error(
            error,
            "%s do not say where rank 0 is (MASTER_ADDR is '%s', MASTER_PORT '%s'); set MASTER_ADDR to "
            "its host (mpirun -x MASTER_ADDR), and MASTER_PORT to a number from 1024 to 65534, or unset it",
            launch->source, launch->host, text_variable("MASTER_PORT"));
    }
    launch->has_secret = secret[0] != 0;
    SCOPED char* text = text_format("nibble rendezvous 8 of %d ranks, %s: %s", launch->world, launch->job, secret);
    rendezvous_key(launch, text);
    return true;
}

// --gpus.

bool launch_fork(Launch* launch, int gpus, char* error) {
    // The ranks inherit the secret in memory, not in the environment.
    *launch = (Launch){.world = gpus, .local_world = gpus, .source = "--gpus", .host = "127.0.0.1", .has_secret = true};
    signal(SIGCHLD, SIG_DFL);  // where it is ignored, nobody learns how a rank has ended
    int* forked = memory_zero((size_t)gpus, sizeof(int));
    launch->forked = forked;
    if (getrandom(launch->key, sizeof(launch->key), 0) != sizeof(launch->key)) {
        return data_error(error, "--gpus %d: the system gives no random numbers: %s", gpus, strerror(errno));
    }
    if (!rendezvous_listen(launch, error)) return false;
    const pid_t first = getpid();
    fflush(NULL);
    for (int rank = 1; rank < gpus; rank++) {
        forked[rank] = fork();
        // Ranks that have been made end with this process.
        if (forked[rank] < 0)
            return data_error(error, "--gpus %d: rank %d cannot be started: %s", gpus, rank, strerror(errno));
        if (forked[rank] > 0) continue;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != first) _exit(1);
        signals_quiet(), close(launch->listener);
        launch->rank = launch->local_rank = rank;
        return true;
    }
    return true;
}
