// All-to-all exchange of device memory between ranks, one per GPU: every rank of a link sends bytes to every other
// (comm_exchange). shard.cuh builds the reduction of gradients and the gathering of weights on it.
//
// W ranks are K nodes (machines) of R: rank = node * R + local. One link has the R ranks of a node, the other the K
// ranks with one local number. If machines have different numbers of ranks, each rank counts as a node.
//
// GPUs of one machine that reach each other use their DMA copy engines (peer.cuh), others NCCL's send and receive; one
// communicator serves both links, since it connects only ranks that exchange something.
// Exchanges run on a stream of their own, beside the device's. Both transports only move bytes, so no result depends on
// which one is used, or on what NCCL chooses. All pieces are in flight at the same time.
//
// Without GPUs, ranks exchange over the messages of launch.h, a stand-in for the tests (NIBBLE_STAND_IN=1), synchronous
// and slow.
#pragma once
#include <assert.h>
#include <dlfcn.h>

#include "../../data/files.h"
#include "../common.cuh"
#include "../gpus.cuh"
#include "launch.h"
#include "peer.cuh"

#if defined(__CUDACC__) && __has_include(<nccl.h>)
#include <nccl.h>
#define COMM_HAS_NCCL 1
#else
#define COMM_HAS_NCCL 0
typedef struct {
    char internal[128];
} ncclUniqueId;
typedef struct ncclComm* ncclComm_t;
typedef int ncclResult_t;
typedef int ncclDataType_t;
constexpr ncclResult_t ncclSuccess = 0;
constexpr ncclDataType_t ncclUint8 = 1;
#endif

// NCCL's functions. The library, 200 MB, is loaded only if ranks need it.
struct NcclLibrary {
    ncclResult_t (*get_unique_id)(ncclUniqueId*);
    ncclResult_t (*init_rank)(ncclComm_t*, int, ncclUniqueId, int);
    ncclResult_t (*destroy)(ncclComm_t);
    ncclResult_t (*send)(const void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t);
    ncclResult_t (*receive)(void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t);
    ncclResult_t (*group_begin)();
    ncclResult_t (*group_end)();
    ncclResult_t (*get_version)(int*);
    const char* (*error_string)(ncclResult_t);
    const char* (*last_error)(ncclComm_t);
};

// Ranks that exchange.
struct Link {
    int rank, world;    // this rank's number in the link; 0 of 1: it has nothing to exchange there
    int first, stride;  // member r is rank first + r * stride
    int at, span;       // and is sent sums of the slices at + r * span to at + (r + 1) * span - 1
    int64_t sent;       // bytes, by this rank in comm_exchange
};

struct Comm {
    const Launch* launch;
    const Device* dev;
    int rank, world;
    int position;         // of the rank's slices: local * K + node, so that those of one local number are one range
    Link node, net;       // within a node, and between nodes
    int members;          // of the larger link
    cudaStream_t stream;  // exchanges run here, one after another
    cudaEvent_t event;
    Peers* peers;  // of the node; NULL: NCCL
    NcclLibrary nccl;
    ncclComm_t communicator;
    int64_t bytes;  // of device memory that the transport uses
    double rate;    // bytes per second that the slowest rank sends on the slowest link; 0 on the CPU
};

inline int link_rank(const Link* link, int member) {
    return link->first + member * link->stride;
}

inline bool link_copies(const Comm* comm, const Link* link) {
    return comm->peers && link == &comm->node;
}

// Sets the links and the position of a rank where ranks are this many nodes.
inline void comm_link(Comm* comm, int nodes) {
    const int local_world = comm->world / nodes, node = comm->rank / local_world, local = comm->rank % local_world;
    comm->node = {local, local_world, node * local_world, 1, 0, nodes, 0};
    comm->net = {node, nodes, local, local_world, local * nodes, 1, 0};
    comm->position = local * nodes + node, comm->members = local_world > nodes ? local_world : nodes;
}

struct CommPiece {
    void* data;
    int64_t bytes;  // 0: nothing to send or receive
};

// The result of a call of NCCL, with the library that can describe it.
struct NcclStatus {
    const Comm* comm;
    ncclResult_t code;
};

inline NcclStatus nccl_status(const Comm* comm, ncclResult_t code) {
    return {comm, code};
}

inline void check_status(NcclStatus status, const char* expression, const char* file, int line) {
    if (status.code == ncclSuccess) return;
    const NcclLibrary* nccl = &status.comm->nccl;
    const char* text = text_kept("%s; %s (NCCL_DEBUG=WARN in the environment says more)",
                                 nccl->error_string(status.code), nccl->last_error(status.comm->communicator));
    check_failed("NCCL", "", text, expression, file, line);
}

inline void nccl_open(NcclLibrary* nccl) {
    // In the order of NcclLibrary's members.
    const char* const functions[] = {"ncclGetUniqueId",    "ncclCommInitRank", "ncclCommDestroy", "ncclSend",
                                     "ncclRecv",           "ncclGroupStart",   "ncclGroupEnd",    "ncclGetVersion",
                                     "ncclGetErrorString", "ncclGetLastError"};
    static_assert(sizeof(functions) == sizeof(NcclLibrary), "a name for each member");
    const char* own = getenv("NIBBLE_NCCL");
    const bool named = own && *own;
    void* library = dlopen(named ? own : "libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
    if (!library && !named) library = dlopen("libnccl.so", RTLD_NOW | RTLD_LOCAL);
    if (!COMM_HAS_NCCL) user_error("this ./train was built without nccl.h; install libnccl-dev and type make again");
    if (!library) {
        user_error(
            "several GPUs need NCCL and libnccl.so.2 cannot be opened (%s); install libnccl2, or set "
            "NIBBLE_NCCL=/path/to/libnccl.so.2",
            dlerror());
    }
    for (size_t i = 0; i < sizeof(functions) / sizeof(functions[0]); i++) {
        void* function = dlsym(library, functions[i]);
        if (!function) user_error("libnccl.so.2 lacks a function that NCCL 2.13 and later have; install a newer one");
        memcpy((void**)nccl + i, &function, sizeof(function));
    }
}

// The stand-in: the host's messages.

inline bool stand_in_asked() {
    const char* asked = getenv("NIBBLE_STAND_IN");
    return asked && strcmp(asked, "1") == 0;
}

// Sends every rank's pieces for its link to all ranks, which take what is theirs. All pieces get as much room as the
// largest.
inline void stand_in_exchange(const Comm* comm, const Link* link, const CommPiece* sends, const CommPiece* receives) {
    double most = 0;
    for (int r = 0; r < link->world; r++) most = fmax(most, r == link->rank ? 0 : (double)sends[r].bytes);
    launch_all_reduce(comm->launch, &most, 1, LAUNCH_MAX);
    const int64_t room = (int64_t)most, bytes = link->world * room;
    char *own = (char*)memory_zero((size_t)bytes + 1, 1), *all = (char*)memory_take((size_t)(comm->world * bytes) + 1);
    for (int r = 0; r < link->world; r++) {
        assert(r == link->rank || sends[r].bytes <= room);  // otherwise the ranks have called different functions
        if (r != link->rank && sends[r].bytes > 0) memcpy(own + r * room, sends[r].data, (size_t)sends[r].bytes);
    }
    launch_gather(comm->launch, own, bytes, all);
    for (int r = 0; r < link->world; r++) {
        const char* from = all + link_rank(link, r) * bytes + link->rank * room;
        if (r != link->rank && receives[r].bytes > 0) memcpy(receives[r].data, from, (size_t)receives[r].bytes);
    }
    free(own), free(all);
}

// The DMA copy engines.

// False if NIBBLE_NCCL or NCCL_P2P_DISABLE (copies between GPUs are broken) asks for NCCL.
inline bool peers_wanted() {
    const char* disabled = getenv("NCCL_P2P_DISABLE");
    return !getenv("NIBBLE_NCCL") && !(disabled && atoi(disabled) != 0);
}

// Returns NULL, on all ranks, if one cannot write to another's memory or asks for NCCL.
inline Peers* peers_open(const Launch* launch, const Link* node, cudaStream_t stream) {
    Peers* peers = (Peers*)memory_zero(1, sizeof(Peers));
    PeerCard own = peers_begin(peers, stream, node->rank, peers_wanted() && node->world > 1 ? node->world : 0);
    bool failed = launch_any(launch, !own.good);
    PeerCard* card = (PeerCard*)memory_zero((size_t)launch->world, sizeof(PeerCard));
    if (!failed) launch_gather(launch, &own, sizeof(own), card);
    for (int r = 0; r < node->world && !failed; r++) {
        if (r != node->rank) failed = !peers_connect(peers, &card[link_rank(node, r)], r);
    }
    free(card);
    if (!launch_any(launch, failed)) {
        exchange_stream(&peers->out, &peers->event);
        return peers;
    }
    peers_close(peers, launch);
    return nullptr;
}

// `in_place`: no bytes are copied from where they arrive; receives[r].data is set to this place.
inline void peers_exchange(const Comm* comm, const Link* link, const CommPiece* sends, CommPiece* receives,
                           bool in_place) {
    int64_t max = 0;
    for (int r = 0; r < link->world; r++) {
        if (r == link->rank) continue;
        max = sends[r].bytes > max ? sends[r].bytes : max;
        max = receives[r].bytes > max ? receives[r].bytes : max;
    }
    assert(!in_place || max <= PEER_PART);
    stream_after(comm->peers->out, comm->stream, comm->peers->event);
    for (int64_t at = 0; at < max; at += PEER_PART) {
        for (int i = 1; i < link->world; i++) {
            // Each rank begins with another, so that no receiver has all senders at once.
            int to = (link->rank + i) % link->world, from = (link->rank - i + link->world) % link->world;
            CommPiece* in = &receives[from];
            peer_send(comm->peers, sends[to].data, sends[to].bytes, at, to);
            if (!in_place) peer_receive(comm->peers, comm->stream, in->data, in->bytes, at, from);
            if (in_place && in->bytes > 0) in->data = peer_await(comm->peers, comm->stream, from);
        }
    }
    stream_after(comm->stream, comm->peers->out, comm->peers->event);
}

// The transport.

inline void comm_close(Comm* comm) {
    if (!comm->dev->gpu) return;
    check(cudaDeviceSynchronize());
    launch_any(comm->launch, false);
    if (comm->peers) peers_close(comm->peers, comm->launch);
    if (comm->communicator) check(nccl_status(comm, comm->nccl.destroy(comm->communicator)));
    check(cudaEventDestroy(comm->event));
    check(cudaStreamDestroy(comm->stream));
}

// "from torchrun  NCCL 2.28.9, 300 GB/s each way", for the banner; it lives as long as the program.
inline const char* comm_describe(const Comm* comm) {
    int version = 0;
    const char* how = !comm->dev->gpu ? "messages, a stand-in for tests" : comm->peers ? "by DMA copy engines" : "";
    if (comm->communicator) {
        check(nccl_status(comm, comm->nccl.get_version(&version)));
        how = text_format("%s%sNCCL %d.%d.%d", how, *how ? " and " : "", version / 10000, version / 100 % 100,
                          version % 100);
    }
    if (comm->net.world > 1) how = text_format("%d nodes, %s", comm->net.world, how);
    const char* rate = comm->dev->gpu ? text_kept(", %.0f GB/s each way", 1e-9 * comm->rate) : "";
    return text_format("from %s  %s%s", comm->launch->source, how, rate);
}

// Makes the comm's stream wait for the device's stream; the next function does the reverse.
inline void comm_after_device(const Comm* comm) {
    if (comm->dev->gpu) stream_after(comm->stream, comm->dev->stream, comm->event);
}

inline void device_after_comm(const Comm* comm) {
    if (comm->dev->gpu) stream_after(comm->dev->stream, comm->stream, comm->event);
}

// Sends sends[r] to member r of a link and receives receives[r] from it; the rank's own entries are ignored. What r
// sends to s must have as many bytes as s receives from r. All ranks call it. A link of one rank does nothing: NCCL is
// not loaded where a node's copy engines serve all ranks. With `in_place`, pieces are read once, and have at most
// PEER_PART bytes: receives[r].data becomes the place where a piece arrived, if that saves a copy. The caller queues
// what reads the pieces on the comm's stream, and then calls comm_release.
inline void comm_exchange(Comm* comm, Link* link, const CommPiece* sends, CommPiece* receives, bool in_place = false) {
    if (link->world == 1) return;
    for (int r = 0; r < link->world; r++) link->sent += r == link->rank ? 0 : sends[r].bytes;
    if (!comm->dev->gpu) return stand_in_exchange(comm, link, sends, receives);
    if (link_copies(comm, link)) return peers_exchange(comm, link, sends, receives, in_place);
    check(nccl_status(comm, comm->nccl.group_begin()));
    for (int i = 1; i < link->world; i++) {
        // Each rank begins with another, so that no receiver has all senders at once.
        int to = (link->rank + i) % link->world, from = (link->rank - i + link->world) % link->world;
        const CommPiece *out = &sends[to], *in = &receives[from];
        if (out->bytes > 0) {
            check(nccl_status(comm, comm->nccl.send(out->data, (size_t)out->bytes, ncclUint8, link_rank(link, to),
                                                    comm->communicator, comm->stream)));
        }
        if (in->bytes > 0) {
            check(nccl_status(comm, comm->nccl.receive(in->data, (size_t)in->bytes, ncclUint8, link_rank(link, from),
                                                       comm->communicator, comm->stream)));
        }
    }
    check(nccl_status(comm, comm->nccl.group_end()));
}

// Lets the senders write to these places again.
inline void comm_release(const Comm* comm, const Link* link, const CommPiece* receives) {
    for (int r = 0; r < link->world && link_copies(comm, link); r++) {
        if (r != link->rank && receives[r].bytes > 0) peer_release(comm->peers, comm->stream, r);
    }
}

// Begins or ends a group of exchanges on a link, which NCCL launches at once; other transports ignore it, and so does a
// link of one rank.
inline void comm_group(const Comm* comm, const Link* link, bool begin) {
    if (comm->dev->gpu && link->world > 1 && !link_copies(comm, link))
        check(nccl_status(comm, begin ? comm->nccl.group_begin() : comm->nccl.group_end()));
}

// Copies bytes within this rank, on the comm's stream.
inline void comm_copy(const Comm* comm, void* to, const void* from, int64_t bytes) {
    copy_on(comm->dev, comm->stream, to, from, bytes);
}

// Opening.

// Returns the bytes of a piece of the first exchange: with those of all members, sent and received, 64 MiB at most.
inline int64_t link_trial_bytes(const Device* dev, int world) {
    return dev->gpu ? (32 << 20) / world / 256 * 256 : 256;
}

// Connects a link by a first exchange, so that failures show at the start and the memory plan knows what NCCL
// allocates, and checks that bytes arrive as they were sent. On GPUs it measures the rate of the slowest rank: the best
// of a few exchanges, on an idle device.
inline void comm_try_link(Comm* comm, Link* link, double patience) {
    const Device* dev = comm->dev;
    const int64_t world = link->world, piece = link_trial_bytes(dev, link->world);
    unsigned char* memory = (unsigned char*)device_alloc(dev, 2 * world * piece);
    CommPiece *sends = (CommPiece*)memory_zero(2 * world, sizeof(CommPiece)), *receives = sends + world;
    for (int r = 0; r < world; r++) {
        sends[r] = {memory + r * piece, piece}, receives[r] = {memory + (world + r) * piece, piece};
        device_fill(dev, sends[r].data, 1 + (link->rank * 7 + r) % 251, piece);
    }
    device_sync(dev);
    watchdog_arm(comm->launch, "first exchange; try NCCL_P2P_DISABLE=1 in the environment", patience);
    comm_exchange(comm, link, sends, receives);
    if (dev->gpu) check(cudaStreamSynchronize(comm->stream));
    watchdog_disarm(comm->launch);
    for (int r = 0; r < world; r++) {
        unsigned char last = 0;
        copy_to_host(dev, &last, (unsigned char*)receives[r].data + piece - 1, 1);
        if (r == link->rank || last == 1 + (r * 7 + link->rank) % 251) continue;
        user_error(
            "what rank %d sends to rank %d does not arrive as it was sent; try NCCL_P2P_DISABLE=1 in the "
            "environment, and look at the machine's IOMMU",
            link_rank(link, r), comm->rank);
    }
    double seconds = INFINITY;
    for (int run = 0; run < 5 && dev->gpu; run++) {
        seconds = fmin(seconds, 1e-3 * stream_ms(comm->stream, [&] { comm_exchange(comm, link, sends, receives); }));
    }
    device_free(dev, memory);
    free(sends);
    if (!dev->gpu) return;
    launch_all_reduce(comm->launch, &seconds, 1, LAUNCH_MAX);
    const double rate = (double)((world - 1) * piece) / seconds;
    comm->rate = comm->rate > 0 && comm->rate < rate ? comm->rate : rate;
}

inline void comm_try(Comm* comm, double patience) {
    for (Link* link : {&comm->node, &comm->net}) {
        if (link->world > 1) comm_try_link(comm, link, patience);
    }
}

inline void nccl_join(Comm* comm) {
    ncclUniqueId id = {};
    check(cudaDeviceSetLimit(cudaLimitStackSize, 1024));  // as NCCL finds it elsewhere
    nccl_open(&comm->nccl);
    if (comm->rank == 0) check(nccl_status(comm, comm->nccl.get_unique_id(&id)));
    launch_broadcast(comm->launch, &id, sizeof(id));
    check(nccl_status(comm, comm->nccl.init_rank(&comm->communicator, comm->world, id, comm->rank)));
}

// Returns how many nodes the ranks of a run are: each as many consecutive ranks of one machine, or each one rank.
// NIBBLE_NODES=K in the environment makes K of one machine, for tests.
inline int comm_nodes(const Launch* launch) {
    const int world = launch->world;
    const char* asked = getenv("NIBBLE_NODES");
    char own[64] = "", (*machine)[64] = (char(*)[64])memory_zero((size_t)world, sizeof(own));
    FILE* file = asked ? nullptr : fopen("/proc/sys/kernel/random/boot_id", "r");  // changes when it boots
    if (!file || !fgets(own, sizeof(own), file))
        snprintf(own, sizeof(own), "%lld", launch->rank * (asked ? atoll(asked) : world) / world);
    if (file) fclose(file);
    launch_gather(launch, own, sizeof(own), machine);
    int local = 1;
    while (local < world && strcmp(machine[local], machine[0]) == 0) local++;
    bool even = world % local == 0;
    for (int r = 0; r < world; r++) even = even && strcmp(machine[r], machine[r / local * local]) == 0;
    free(machine);
    return even ? world / local : world;
}

// Opens the transport between all ranks of `launch`. The run ends if that takes longer than `patience` seconds.
inline void comm_open(Comm* comm, const Launch* launch, const Device* dev, double patience = 120) {
    memset(comm, 0, sizeof(*comm));
    comm->launch = launch, comm->dev = dev, comm->rank = launch->rank, comm->world = launch->world;
    watchdog_arm(launch, "connecting; NCCL_DEBUG=INFO says more", patience);
    comm_link(comm, comm_nodes(launch));
    if (!dev->gpu) return comm_try(comm, patience);
    int64_t before = memory_used(dev);
    comm->peers = peers_open(launch, &comm->node, dev->stream);
    if (!comm->peers || comm->net.world > 1) nccl_join(comm);
    exchange_stream(&comm->stream, &comm->event);
    comm_try(comm, patience);
    comm->bytes = memory_used(dev) - before;
}

// Returns which of the `gpus` that this process sees is the rank's. `asked` is --gpus; `cpu`: --device cpu was typed.
inline int rank_device(const Launch* launch, int64_t asked, bool cpu, int gpus) {
    if (gpus == 0 || cpu) {
        if (stand_in_asked()) return 0;
        user_error("%d ranks were asked for and each needs a GPU of its own, %s; leave --gpus, or the launcher, out",
                   launch->world, cpu ? "and --device cpu is typed" : "and no GPU answers");
    }
    if (gpus == 1 && asked == 1) return 0;
    if (asked > gpus) {
        user_error("--gpus %lld was typed and this machine shows %d; type --gpus %d", (long long)asked, gpus, gpus);
    }
    if (launch->local_rank >= gpus) {
        user_error("rank %d is number %d on this machine, which shows %d GPU%s; start %d here", launch->rank,
                   launch->local_rank + 1, gpus, gpus == 1 ? "" : "s", gpus);
    }
    return launch->local_rank;
}

// Opens the device that --device names: "auto", "gpu" or "cpu". `launch` is NULL for a program without ranks.
inline void device_choose(Device* dev, const char* name, const Launch* launch, int64_t asked) {
    const bool cpu = strcmp(name, "cpu") == 0;
    int gpus = 0;
    const cudaError_t status = cpu ? cudaSuccess : count_gpus(&gpus);
    if (strcmp(name, "gpu") == 0 && gpus == 0) {
        user_error("--device gpu: no GPU answers (%s); type --device cpu, or --dry-run --memory 24G to plan for one",
                   no_gpu_reason(status, driver_version()));
    }
    if (status != cudaSuccess && driver_version() > 0 && status != cudaErrorNoDevice) {
        notice(text_kept("train: notice: no GPU answers (%s)\n", no_gpu_reason(status, driver_version())));
    }
    int index = launch && launch->world > 1 ? rank_device(launch, asked, cpu, gpus) : 0;
    device_open(dev, gpus > 0 && !cpu, index);
    if (dev->gpu && dev->compute < 80) {
        user_error("%s has compute capability %d.%d; nibble's kernels need 8.0 (type --device cpu)", dev->name,
                   dev->compute / 10, dev->compute % 10);
    }
}

// Ends the run if `text`, what a rank was started with and has read, each part followed by a byte 1, differs from rank
// 0's.
inline void comm_require_same(const Launch* launch, const char* text) {
    int64_t bytes = (int64_t)strlen(text) + 1, at = 0;
    launch_broadcast(launch, &bytes, sizeof(bytes));
    char* first = (char*)memory_zero((size_t)bytes, 1);
    if (launch->rank == 0) strcpy(first, text);
    launch_broadcast(launch, first, bytes);
    while (text[at] && text[at] == first[at]) at++;
    if (text[at] == first[at]) return free(first);
    while (at > 0 && text[at - 1] != 1) at--;  // where the first part that differs begins
    user_error("it has other options or other data than rank 0: %.*s, and rank 0 %.*s; start all alike",
               (int)strcspn(text + at, "\1"), text + at, (int)strcspn(first + at, "\1"), first + at);
}

// Starts the ranks of --gpus and connects all; `launch` has what the environment says.
inline void comm_launch(Launch* launch, int64_t gpus, bool cpu, int64_t timeout) {
    char error[DATA_ERROR_BYTES];
    if (gpus > 1 && cpu && !stand_in_asked()) {
        user_error("--gpus %lld goes with GPUs and --device cpu was typed; leave --gpus out, or --device cpu",
                   (long long)gpus);
    }
    require(gpus <= 1 || launch_fork(launch, (int)gpus, error), error);
    require(launch_join(launch, timeout, error), error);
}
