// Unit tests of kernels/ranks/launch.h: whose rank the environment says this is, Slurm's host lists, and ranks in
// processes of their own that agree and rest.
#include <sys/resource.h>

#include "ranks.h"

// Returns what launch_environment makes of an environment that holds "NAME=value NAME=value" and nothing else.
static bool read_environment(const char* set, int gpus, Launch* launch, char* error) {
    char *nothing[] = {nullptr}, **before = environ, *copy = strdup(set), *rest = nullptr;
    environ = nothing;
    for (char* word = strtok_r(copy, " ", &rest); word; word = strtok_r(nullptr, " ", &rest)) {
        char* equals = strchr(word, '=');
        *equals = 0;
        setenv(word, equals + 1, 1);
    }
    bool fine = launch_environment(launch, gpus, error);
    environ = before;
    return fine;
}

#define TORCHRUN "RANK=3 WORLD_SIZE=8 LOCAL_RANK=1 MASTER_ADDR=gpu1 MASTER_PORT=29500 "
#define OPEN_MPI "OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_SIZE=6 OMPI_COMM_WORLD_LOCAL_RANK=2 "
#define SLURM "SLURM_PROCID=7 SLURM_STEP_NUM_TASKS=16 SLURM_LOCALID=7 SLURM_STEP_ID=0 SLURM_JOB_ID=42 "

TEST(launch_environment) {
    // Rank, world and local rank follow, and the port; 0: any.
    const std::tuple<const char*, const char*, const char*, int, int, int, int> cases[] = {
        {"", "", "", 0, 1, 0, 0},
        {TORCHRUN, "torchrun's variables", "gpu1", 3, 8, 1, 29500},
        {TORCHRUN "TORCHELASTIC_RUN_ID=none", "torchrun's variables", "gpu1", 3, 8, 1, 29501},
        {TORCHRUN OPEN_MPI SLURM "SLURM_STEP_NODELIST=a", "torchrun's variables", "gpu1", 3, 8, 1, 29500},
        {"RANK=3 WORLD_SIZE=8 LOCAL_RANK=1 MASTER_ADDR=gpu1", "torchrun's variables", "gpu1", 3, 8, 1, 0},
        {"RANK=3 " OPEN_MPI "MASTER_ADDR=gpu2", "Open MPI's variables", "gpu2", 5, 6, 2, 0},
        {OPEN_MPI "OMPI_COMM_WORLD_LOCAL_SIZE=6", "Open MPI's variables", "127.0.0.1", 5, 6, 2, 0},
        {"PMI_RANK=1 PMI_SIZE=4 MPI_LOCALRANKID=0 MASTER_ADDR=a", "MPICH's variables", "a", 1, 4, 0, 0},
        {SLURM "SLURM_STEP_NODELIST=gpu[003-007]", "Slurm's variables", "gpu003", 7, 16, 7, 0},
        {SLURM "SLURM_STEP_NODELIST=gpu[003-007] MASTER_PORT=77", "Slurm's variables", "gpu003", 7, 16, 7, 77},
        {SLURM "SLURM_STEP_NUM_NODES=1", "Slurm's variables", "127.0.0.1", 7, 16, 7, 0},
        // These are a batch script's own process, which is no step, and a step of one task.
        {"SLURM_PROCID=0 SLURM_NTASKS=16 SLURM_LOCALID=0 SLURM_JOB_ID=42", "", "", 0, 1, 0, 0},
        {"SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 SLURM_LOCALID=0 SLURM_STEP_ID=0", "", "", 0, 1, 0, 0},
        {"RANK=0", "", "", 0, 1, 0, 0},
        {"RANK=0 WORLD_SIZE=1", "", "", 0, 1, 0, 0},
    };
    for (const auto& [set, source, host, rank, world, local_rank, port] : cases) {
        Launch launch;
        bool fine = read_environment(set, 1, &launch, error);
        expect(fine, "%s: %s", set, error);
        expect(launch.rank == rank && launch.world == world && launch.local_rank == local_rank, "%s: %d %d %d", set,
               launch.rank, launch.world, launch.local_rank);
        expect(strcmp(launch.source, source) == 0 && strcmp(launch.host, host) == 0, "%s: %s, %s", set, launch.source,
               launch.host);
        bool low = launch.world == 1 || (launch.port >= 20000 && launch.port < 30000);
        expect(port ? launch.port == port : low, "%s: port %d", set, launch.port);
    }
    const std::tuple<const char*, const char*, int> wrong[] = {
        {"WORLD_SIZE=4 RANK=2", "RANK ('2'), WORLD_SIZE ('4') and LOCAL_RANK ('')", 1},
        {TORCHRUN, "leave --gpus out", 4},
        {"RANK=8 WORLD_SIZE=8 LOCAL_RANK=1 MASTER_ADDR=gpu1 MASTER_PORT=29500", "rank 8 of 8 is impossible", 1},
        {"RANK=8 WORLD_SIZE=8 LOCAL_RANK=0 " SLURM "SLURM_STEP_NODELIST=a", "rank 8 of 8 is impossible", 1},
        {"RANK=0 WORLD_SIZE=1025 LOCAL_RANK=0 MASTER_ADDR=gpu1", "and are at most 1024", 1},
        {"RANK=3", "WORLD_SIZE ('')", 1},
        {"RANK=0 WORLD_SIZE=0", "WORLD_SIZE ('0')", 1},
        {"RANK=0 WORLD_SIZE=four LOCAL_RANK=0 MASTER_ADDR=gpu1 MASTER_PORT=29500", "WORLD_SIZE ('four')", 1},
        {"RANK=1 WORLD_SIZE=8 LOCAL_RANK=1 MASTER_PORT=29500", "set MASTER_ADDR", 1},
        {"RANK=1 WORLD_SIZE=8 LOCAL_RANK=1 MASTER_ADDR=gpu1 MASTER_PORT=70000", "MASTER_PORT '70000'", 1},
        {TORCHRUN "TORCHELASTIC_RUN_ID=none MASTER_PORT=2147483647", "MASTER_PORT '2147483647'", 1},
        {"OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4", "OMPI_COMM_WORLD_LOCAL_RANK ('')", 1},
        {"SLURM_PROCID=3 SLURM_NTASKS=8 SLURM_STEP_ID=0", "SLURM_LOCALID ('')", 1},
        {"PMI_RANK=1 PMI_SIZE=4", "PMI_SIZE ('4') and MPI_LOCALRANKID ('')", 1},
        {OPEN_MPI, "set MASTER_ADDR", 1},
        {SLURM, "set MASTER_ADDR", 1},
    };
    for (const auto& [set, needle, gpus] : wrong) {
        Launch launch;
        error[0] = 0;
        bool fine = read_environment(set, gpus, &launch, error);
        expect(!fine && strstr(error, needle), "%s: '%s', want '%s'", set, error, needle);
    }
}

TEST(launch_first_host) {
    // NULL: refused.
    const char* const cases[][2] = {
        {"gpu", "gpu"},          {"gpu7,login1", "gpu7"},     {"gpu[003-007,9],login", "gpu003"},
        {"gpu[12,14]", "gpu12"}, {"n[1-2]-eth,n9", "n1-eth"}, {"", nullptr},
        {"[1-2]", nullptr},      {"gpu[", nullptr},           {"gpu[x]", nullptr},
        {"gpu[1-2", nullptr}};
    for (const auto& [list, want] : cases) {
        char host[64] = "";
        bool fine = launch_first_host(list, host, sizeof(host));
        expect(fine == (want != nullptr), "%s: %d", list, fine);
        if (fine) expect(strcmp(host, want) == 0, "%s: %s, want %s", list, host, want);
    }
    char tight[6];
    expect(launch_first_host("gpu[12]", tight, sizeof(tight)) && strcmp(tight, "gpu12") == 0, "%s", tight);
    expect(!launch_first_host("gpu[123]", tight, sizeof(tight)), "a name that is cut: %s", tight);
}

// Ranks agree upon numbers that are then the same everywhere; 7 is for "not so".
static void agree_main(Launch* l) {
    double values[3] = {(double)l->rank, -1.0 * l->rank, l->rank == 2 ? NAN : 1.0}, sum = 0.1 * (l->rank + 1),
           want = 0.1;
    launch_all_reduce(l, values, 3, LAUNCH_MAX);
    launch_all_reduce(l, &sum, 1, LAUNCH_SUM);
    for (int r = 1; r < l->world; r++) want += 0.1 * (r + 1);  // in the order of the ranks, to the bit
    require_rank(values[0] == l->world - 1 && values[1] == 0 && sum == want);
    constexpr int WORDS = 100000;  // more than a socket takes at once
    static int64_t word[WORDS], all[16 * WORDS];
    for (int i = 0; i < WORDS; i++) word[i] = l->rank * WORDS + i;
    launch_gather(l, word, sizeof(word), all);
    for (int i = 0; i < l->world * WORDS; i++) require_rank(all[i] == i);
    launch_broadcast(l, word, sizeof(word));
    for (int i = 0; i < WORDS; i++) require_rank(word[i] == i);
    for (int r = 0; r < l->world; r++) {
        require_rank(launch_any(l, r == l->rank) && !launch_any(l, false));
    }
}

TEST(launch_agrees) {
    struct rlimit before, few;
    for (int ranks : {2, 3, 7}) expect_ended(test, run_ranks(ranks, agree_main), 0);
    getrlimit(RLIMIT_NOFILE, &before);
    const int next = dup(0);  // the lowest number that is free
    close(next);
    few = before, few.rlim_cur = (rlim_t)next + 20;  // rank 0 raises it
    setrlimit(RLIMIT_NOFILE, &few);
    expect_ended(test, run_ranks(16, agree_main), 0);
    setrlimit(RLIMIT_NOFILE, &before);
}

// Ranks that hang or fail, alone or all at once: exchange_patience, multi_failures, multi_refused.
TEST(launch_rests) {
    // A rank may take longer than the others wait, if it says so.
    const auto rests = [](Launch* l) {
        watchdog_arm(l, "working", 1);
        if (l->rank == 1) watchdog_disarm(l), sleep(4);
        launch_any(l, false);
    };
    expect_ended(test, run_ranks(3, rests), 0);
}

// A rank that ends before it comes is named, and how it ended.
TEST(launch_ends_early) {
    for (int how : {0, 7, SIGKILL}) {
        const Ended its = run_apart([how] {
            Launch launch;
            signal(SIGCHLD, SIG_IGN);  // as a careless parent leaves it
            if (!launch_fork(&launch, 4, error)) _exit(3);
            if (launch.rank == 2 && how == SIGKILL) raise(SIGKILL);
            if (launch.rank == 2) _exit(how);
            if (!launch_join(&launch, 20, error)) user_error("%s", error);
        });
        const char* says = formatted(how == SIGKILL ? ") has been ended by signal %d (Killed) before it came\n"
                                                    : ") has ended with exit code %d before it came\n",
                                     how);
        expect_ended(test, its, 2, {"train: error: rank 2 (process ", says});
    }
}

// launch_leave returns the code of a rank that fails behind it; a stop has the same code on all ranks.
TEST(launch_leaves) {
    const int cases[][4] = {{0, 0, 0, 0}, {0, 5, 6, 5}, {0, 0, 137, 137}, {143, 143, 143, 143}, {143, 143, 134, 134}};
    for (const auto& [first, second, third, want] : cases) {
        const int codes[3] = {first, second, third};
        const Ended its = run_apart([&codes] {
            Launch launch;
            if (!launch_fork(&launch, 3, error) || !launch_join(&launch, 20, error)) _exit(3);
            const int code = launch_leave(&launch, codes[0]);
            if (launch.rank > 0 && codes[launch.rank] == 137) raise(SIGKILL);
            _exit(launch.rank > 0 ? codes[launch.rank] : code);
        });
        expect_ended(test, its, want);
    }
}
