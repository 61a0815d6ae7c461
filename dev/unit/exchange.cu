// Unit tests of kernels/ranks: transports, and how long ranks wait.
#include "../../kernels/ranks/collect.cuh"
#include "../../optim/formats/bf16.cuh"
#include "../room.h"
#include "gpus.h"
#include "ranks.h"

constexpr int TILES = 5;

// Makes gradients of all magnitudes: most are around 1e-6, and some tiles are tiny, huge or zero.
static void fill_gradients(float* grads, int seed) {
    for (int i = 0; i < TILES * TILE_ELEMENTS; i++) {
        float x = test_uniform(seed, i), magnitude = ldexpf(1.0f, (int)(20 * test_uniform(seed + 50, i)) - 20);
        int tile = i / TILE_ELEMENTS;
        grads[i] = tile == 1 ? x * 1e-39f : tile == 2 ? x * 1e30f : tile == 3 ? 0.0f : x * magnitude;
    }
}

#ifdef __CUDACC__
// A driver that is older than the toolkit is said to be so.
TEST(exchange_old_driver) {
    const char* said = no_gpu_reason(cudaErrorInsufficientDriver, 11040);
    expect(strstr(said, "the driver has CUDA 11.4 and this program ") && strstr(said, "install NVIDIA's driver "), "%s",
           said);
    said = no_gpu_reason(cudaErrorNoDevice, 11040);
    expect(strcmp(said, cudaGetErrorString(cudaErrorNoDevice)) == 0, "%s", said);
}
#endif

// Compares the kernels with the plain C versions, to the bit.
template <typename G>
static void check_kernels(Test* test, const Device* dev, const char* what) {
    constexpr int world = 3;
    int64_t tile_bytes = TILE_ELEMENTS * (int64_t)sizeof(G), n = TILES * TILE_ELEMENTS;
    Room room(dev);
    float* grads = room.host<float>(world * n);
    G *typed = room.host<G>(world * n), *sum = room.host<G>(n), *got = room.host<G>(n);
    for (int r = 0; r < world; r++) fill_gradients(grads + r * n, 20 + r);
    for (int64_t i = 0; i < world * n; i++) typed[i] = from_float<G>(grads[i]), grads[i] = to_float(typed[i]);
    const Device cpu = {};
    Contributions c = {(const char*)(typed + n), (const char*)typed, TILES * tile_bytes, tile_bytes, 1, world};

    G *d_grads = room.to_device(typed, world * n), *d_sum = room.device<G>(n);
    Contributions d = c;
    d.mine = (const char*)(d_grads + n), d.others = (const char*)d_grads;
    for (bool add : {false, true}) {
        for_each(dev, ShardSum<G>{d_sum, d, add}, TILES * ShardSum<G>::vecs);
        for_each(&cpu, ShardSum<G>{sum, c, add}, TILES * ShardSum<G>::vecs);
        copy_to_host(dev, got, d_sum, n * sizeof(G));
        expect(memcmp(got, sum, n * sizeof(G)) == 0, "%s: the GPU sums otherwise, add %d", what, add);
    }
}

TEST(exchange_kernels_gpu) {
    Device dev = test_device(true);
    check_kernels<float>(test, &dev, "fp32");
    check_kernels<bf16>(test, &dev, "bf16");
}

// Between ranks, over the stand-in.

static unsigned char byte_of(int from, int to, int64_t i) {
    return (unsigned char)((i * 7 + (i >> 20) + from * 16 + to) % 251);
}

// Puts `bytes` of what rank `from` sends to rank `to` into device memory.
static char* bytes_on(Room* room, int from, int to, int64_t bytes) {
    char* host = room->host<char>(bytes + 1);
    for (int64_t i = 0; i <= bytes; i++) host[i] = (char)byte_of(from, to, i);
    return room->to_device(host, bytes + 1);  // one more, so that none at all have a place, too
}

static void require_bytes(Room* room, int from, int to, const void* device, int64_t bytes) {
    const unsigned char* host = room->to_host((const unsigned char*)device, bytes);
    for (int64_t i = 0; i < bytes; i++) require_rank(host[i] == byte_of(from, to, i));
}

// Sends pieces of other sizes between all pairs, some empty and some of several slots. Their sizes are about multiples
// of `unit`.
static void check_transport(Comm* comm, int64_t unit) {
    Room room(comm->dev);
    int me = comm->rank;
    auto length = [unit](int from, int to) { return (from * 5 + to * 3) % 4 * unit + (to + from) % 2; };
    CommPiece sends[8], receives[8];
    for (int r = 0; r < comm->world; r++) {
        sends[r] = {bytes_on(&room, me, r, length(me, r)), length(me, r)};
        receives[r] = {bytes_on(&room, me, me, length(r, me)), length(r, me)};
    }
    for (int again = 0; again < 3; again++) {
        comm_after_device(comm);
        comm_exchange(comm, &comm->node, sends, receives);
        device_after_comm(comm);
    }
    for (int r = 0; r < comm->world; r++) {
        if (r != me) require_bytes(&room, r, me, receives[r].data, receives[r].bytes);
    }
}

static void transport_main(Launch* launch) {
    Device dev = test_device(false);
    Comm comm;
    comm_open(&comm, launch, &dev);
    check_transport(&comm, 100000);
    comm_close(&comm);
}

// Sends by DMA copy engines. Ranks share GPUs where there are fewer, which NCCL would not do.
static void peers_main(Launch* launch) {
    Device dev;
    Comm comm;
    int gpus = 0;
    require_rank(cudaGetDeviceCount(&gpus) == cudaSuccess && gpus > 0);
    device_open(&dev, true, launch->rank % gpus);
    comm_open(&comm, launch, &dev);
    require_rank(comm.peers);
    check_transport(&comm, PEER_PART - 1000000);
    comm_close(&comm);
}

TEST(exchange_lost) {
    // Ranks end if they wait before the first exchange, such as in NCCL's own rendezvous.
    const auto unconnected = [](Launch* launch) {
        Device dev = test_device(false);
        Comm comm;
        if (launch->rank == 0) comm_open(&comm, launch, &dev, 1);
        watchdog_arm(launch, "connecting", 1);
        sleep(30);
    };
    // Without its flag a stream waits for ever: then the ranks end, and say what to try.
    const auto lost = [](Launch* launch) {
        Device dev = test_device(false);
        Comm comm;
        comm_open(&comm, launch, &dev);
        if (launch->rank == 0) comm_try(&comm, 1);
        watchdog_arm(launch, "first exchange", 1);  // as in comm_try, but nothing is sent
        sleep(30);
    };
    expect_ranks(test, 2, unconnected, 1, "(connecting; NCCL_DEBUG=INFO says more)");
    expect_ranks(test, 2, lost, 1, "(first exchange; try NCCL_P2P_DISABLE=1 in the environment)");
}

// The advice in the message about a broken path takes the DMA copy engines out.
TEST(exchange_peers_wanted) {
    for (const char* name : {"NCCL_P2P_DISABLE", "NIBBLE_NCCL"}) unsetenv(name);
    expect(peers_wanted(), "with nothing set");
    const std::tuple<const char*, const char*, bool> rows[] = {
        {"NCCL_P2P_DISABLE", "0", true}, {"NCCL_P2P_DISABLE", "1", false}, {"NIBBLE_NCCL", "libnccl.so.2", false}};
    for (const auto& [name, value, wanted] : rows) {
        setenv(name, value, 1);
        expect(peers_wanted() == wanted, "%s=%s", name, value);
        unsetenv(name);
    }
}

// These stand for the driver's functions of peer.cuh. They do what those say, or refuse to; a count is in host memory.
static CUresult driver_answer[2];

static CUresult driver_write(CUstream, CUdeviceptr address, cuuint32_t value, unsigned) {
    if (driver_answer[0] == CUDA_SUCCESS) *(uint32_t*)address = value;
    return driver_answer[0];
}

static CUresult driver_wait(CUstream, CUdeviceptr address, cuuint32_t value, unsigned) {
    if (driver_answer[1] == CUDA_SUCCESS && *(uint32_t*)address != value) abort();
    return driver_answer[1];
}

// check() says whose error it is, its name, the call and the line.
TEST(exchange_check) {
    Comm broken = {}, *comm = &broken;
    comm->nccl.error_string = [](ncclResult_t) -> const char* { return "its words"; };
    comm->nccl.last_error = [](ncclComm_t) -> const char* { return "and more"; };
    expect_ended(test, run_apart([] { check(CUDA_SUCCESS); }), 0);
    const char* line = formatted("exchange.cu:%d, ", __LINE__ + 1);
    Ended its = run_apart([] { check(CUDA_ERROR_NOT_SUPPORTED); });
    expect_ended(test, its, 1, {"CUDA driver error cudaErrorNotSupported", line});
    its = run_apart([comm] { check(nccl_status(comm, (ncclResult_t)3)); });
    expect_ended(test, its, 1, {"NCCL error", "its words; and more"});
    expect_ended(test, run_apart([comm] { check(nccl_status(comm, ncclSuccess)); }), 0);
}

// A function that the driver lacks is none, not an error.
TEST(exchange_driver_bind_gpu) {
    CUresult (*version)(int*);
    CUresult (*none)();
    int number = 0;
    expect(driver_bind("cuDriverGetVersion", &version) && version(&number) == CUDA_SUCCESS && number >= 12000,
           "version %d", number);
    expect(!driver_bind("cuDriverGetVersionOfTomorrow", &none) && !none, "a function that nobody has");
    Peers peers = {};
    expect(peers_bind(&peers) && peers.wait_value && peers.write_value, "no stream memory operations");
}

// NCCL is taken if streams cannot wait for counts; it is no error.
TEST(exchange_peers_refused) {
    Peers peers = {};
    uint32_t count = 0;
    peers.write_value = driver_write, peers.wait_value = driver_wait;
    for (int refused = 0; refused < 3; refused++) {
        for (int i = 0; i < 2; i++) driver_answer[i] = refused == i + 1 ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
        expect(peers_probe(&peers, nullptr, &count) == (refused == 0), "%d", refused);
        expect(count == 0, "the count is %u", count);
    }
}

TEST(exchange_peers_gpu) {
    if (getenv("NIBBLE_SANITIZE")) skip("processes of their own");
    if (!gpus_reach_each_other_asked_apart(8)) skip("these GPUs do not reach each other's memory");
    unsetenv("NIBBLE_NCCL");  // it is there where the other cases are to run over NCCL
    for (int ranks : {2, 3, 4, 8}) expect_ranks(test, ranks, peers_main);
}

// nodes.cu and the cases multi_ of commands.txt have the sums of gradients, and what is kept, gathered and collected,
// in every mode.
TEST(exchange_between_ranks) {
    for (int ranks : {2, 3, 5}) expect_ranks(test, ranks, transport_main);
}

// Micro-batches that take longer than a rank may be silent are no hang; ranks that stand still in shorter ones are.
static void slow_main(Launch* launch) {
    Device cpu = {};
    Shard s = {};
    const float scalars[SCALARS] = {};
    s.comm.launch = launch, s.comm.dev = &cpu;
    shard_micro_batch(&s, true, true);
    sleep(3);  // the first step may take its time
    shard_agreed(&s, scalars, 1.5);
    shard_micro_batch(&s, true, true);
    sleep(5);
    launch_any(launch, false);
    shard_agreed(&s, scalars, 0.1);
    sleep(3);  // and so may what lies between two steps
    shard_micro_batch(&s, true, true);
    if (launch->rank == 1) sleep(30);
    shard_micro_batch(&s, false, true);
    launch_any(launch, false);
}

TEST(exchange_patience) {
    expect_ended(test, run_ranks(2, slow_main), 1, {"rank 1 on ", "has not made progress for 2 s (training)"});
}
