// What cuBLASLt's algorithms do at the trainer's shapes. For each product of a training step: the first proposal, the
// fastest, and the fastest whose output has the first one's bits (the only ones that a search may take: the same
// command must give the same losses whatever the clock said), which is what the trainer runs. How long the search took.
// Before an algorithm is timed, a column of its product is checked against plain C.
// Median of 9 by CUDA events, random data.
//   make build/dev/matmul && ./build/dev/matmul [all]      all: every candidate
#include "../kernels/matmul.cuh"
#include "../data/clock.h"
#include "variants.h"

struct Product {
    const char* name;
    int64_t m, n, k;  // cuBLASLt's terms
    cublasOperation_t op_a, op_b;
    bool fp32;  // output
    cublasLtEpilogue_t epilogue;
};

template <typename Value>
static int algorithm_config(const cublasLtMatmulAlgo_t* algorithm, cublasLtMatmulAlgoConfigAttributes_t attribute) {
    Value value = 0;
    size_t written;
    if (cublasLtMatmulAlgoConfigGetAttribute(algorithm, attribute, &value, sizeof(value), &written) !=
        CUBLAS_STATUS_SUCCESS)
        return -1;
    return (int)value;
}

struct Arrays {
    bf16 *a, *b, *d, *aux, *bias;
    unsigned long long* hash;
};

// Returns column j of the product with its epilogue: (m).
static float* plain_column(Room* room, const Product* p, const Arrays* arrays, int64_t j) {
    const bool rows = p->op_a == CUBLAS_OP_T, columns = p->op_b == CUBLAS_OP_N;  // whether sums run along memory
    const float *a = host_floats(room, arrays->a, p->m * p->k), *bias = host_floats(room, arrays->bias, p->m);
    bf16* b = room->host<bf16>(p->k);
    check(cudaMemcpy2D(b, 2, arrays->b + (columns ? j * p->k : j), columns ? 2 : 2 * p->n, 2, p->k,
                       cudaMemcpyDeviceToHost));
    const bool gelu = p->epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
    float* want = room->host<float>(p->m);
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < p->m; i++) {
        double sum = gelu || p->epilogue == CUBLASLT_EPILOGUE_BIAS ? bias[i] : 0.0;
        for (int64_t l = 0; l < p->k; l++)
            sum += (double)a[rows ? i * p->k + l : l * p->m + i] * __bfloat162float(b[l]);
        want[i] = (float)sum;
    }
    if (gelu) gelu_forward_cpu(want, want, p->m);
    if (p->epilogue == CUBLASLT_EPILOGUE_DGELU)
        gelu_backward_inplace_cpu(want, host_floats(room, arrays->aux + j * p->m, p->m), p->m);
    return want;
}

static void run_product(const Device* dev, const Product* p, const Arrays* arrays, bool all) {
    MatmulShape shape;
    memset(&shape, 0, sizeof(shape));
    shape.m = p->m, shape.n = p->n, shape.k = p->k, shape.op_a = p->op_a, shape.op_b = p->op_b;
    shape.input = CUDA_R_16BF, shape.output = p->fp32 ? CUDA_R_32F : CUDA_R_16BF;
    shape.epilogue = p->epilogue, shape.alignment = 256;
    bool biased = p->epilogue == CUBLASLT_EPILOGUE_BIAS || p->epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
    bool aux = p->epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS || p->epilogue == CUBLASLT_EPILOGUE_DGELU;
    MatmulPointers pointers = {arrays->a, arrays->b, arrays->d, biased ? arrays->bias : nullptr,
                               aux ? arrays->aux : nullptr};
    device_sync(dev);
    double begin = seconds_now();
    MatmulPlan plan = matmul_plan_create(dev, &shape, &pointers);
    double search_ms = 1e3 * (seconds_now() - begin);
    matmul_point(&plan, &pointers);
    MatmulTrial trial = {pointers, arrays->hash, p->m * p->n * (p->fp32 ? 4 : 2), 0, false};
    cublasLtMatmulAlgo_t algorithm[MATMUL_CANDIDATES];
    int count = matmul_candidates(dev, &plan, algorithm, MATMUL_CANDIDATES);
    double ms[MATMUL_CANDIDATES], flops = 2.0 * p->m * p->n * p->k;
    uint64_t bits[MATMUL_CANDIDATES];
    int best = 0, best_equal = 0;
    Room room(dev);
    const int64_t column = p->n - 1;
    const float* want = plain_column(&room, p, arrays, column);
    for (int i = 0; i < count; i++) {
        matmul_run(dev, &plan, &pointers, &algorithm[i], 0.0f);
        const double error = p->fp32 ? off(&room, (const float*)arrays->d + column * p->m, want, p->m, 1e-4)
                                     : off(&room, arrays->d + column * p->m, want, p->m, 2.0 / 256);
        ms[i] = INFINITY, bits[i] = 0;
        if (!(error <= 1.0)) printf("%-16s algorithm %d WRONG: error %.2f of its bound\n", p->name, i, error);
        if (!(error <= 1.0)) continue;
        ms[i] = median_ms(dev, 9, [&] { matmul_run(dev, &plan, &pointers, &algorithm[i], 0.0f); });
        bits[i] = matmul_hash(dev, &trial);
        if (ms[i] < ms[best]) best = i;
        if (bits[i] == bits[0] && ms[i] < ms[best_equal]) best_equal = i;
    }
    int equal = 0;
    for (int i = 0; i < count; i++) equal += bits[i] == bits[0];
    printf(
        "%-16s %6lld x %6lld x %6lld  first %7.4f ms %5.0f | best %7.4f %5.0f | best equal %7.4f %5.0f TFLOP/s | %d of "
        "%d equal | search %.0f ms\n",
        p->name, (long long)p->m, (long long)p->n, (long long)p->k, ms[0], flops / ms[0] * 1e-9, ms[best],
        flops / ms[best] * 1e-9, ms[best_equal], flops / ms[best_equal] * 1e-9, equal, count, search_ms);
    for (int i = 0; i < count; i++) {
        if (!all && i != 0 && i != best && i != best_equal) continue;
        printf(
            "    %2d: %7.4f ms %5.0f TFLOP/s %s id %d tile %d stages %d split %d reduction %d swizzle %d custom %d "
            "inner %d cluster %d\n",
            i, ms[i], flops / ms[i] * 1e-9, bits[i] == bits[0] ? "equal" : "     ",
            algorithm_config<int32_t>(&algorithm[i], CUBLASLT_ALGO_CONFIG_ID),
            algorithm_config<uint32_t>(&algorithm[i], CUBLASLT_ALGO_CONFIG_TILE_ID),
            algorithm_config<uint32_t>(&algorithm[i], CUBLASLT_ALGO_CONFIG_STAGES_ID),
            algorithm_config<int32_t>(&algorithm[i], CUBLASLT_ALGO_CONFIG_SPLITK_NUM),
            algorithm_config<uint32_t>(&algorithm[i], CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME),
            algorithm_config<uint32_t>(&algorithm[i], CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING),
            algorithm_config<uint32_t>(&algorithm[i], CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION),
            algorithm_config<uint16_t>(&algorithm[i], CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID),
            algorithm_config<uint16_t>(&algorithm[i], CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID));
    }
    fflush(stdout);
}

static void run_model(const Device* dev, const char* name, int64_t N, int64_t rows, int64_t C, bool all) {
    const int64_t Vp = 50304;
    const cublasOperation_t T = CUBLAS_OP_T, O = CUBLAS_OP_N;
    const cublasLtEpilogue_t plain = CUBLASLT_EPILOGUE_DEFAULT, bias = CUBLASLT_EPILOGUE_BIAS;
    const Product products[] = {
        {"qkv", 3 * C, N, C, T, O, false, bias},
        {"attproj", C, N, C, T, O, false, bias},
        {"fc, no gelu", 4 * C, N, C, T, O, false, bias},
        {"fc, gelu", 4 * C, N, C, T, O, false, CUBLASLT_EPILOGUE_GELU_AUX_BIAS},
        {"fcproj", C, N, 4 * C, T, O, false, bias},
        {"head", Vp, rows, C, T, O, false, plain},
        {"d head input", C, rows, Vp, O, O, false, plain},
        {"d head weight", C, Vp, rows, O, T, true, plain},
        {"d fcproj, no gelu", 4 * C, N, C, O, O, false, plain},
        {"d fcproj, gelu", 4 * C, N, C, O, O, false, CUBLASLT_EPILOGUE_DGELU},
        {"d fcproj weight", 4 * C, C, N, O, T, true, plain},
        {"d fc input", C, N, 4 * C, O, O, false, plain},
        {"d fc weight", C, 4 * C, N, O, T, true, plain},
        {"d attproj input", C, N, C, O, O, false, plain},
        {"d attproj weight", C, C, N, O, T, true, plain},
        {"d qkv input", C, N, 3 * C, O, O, false, plain},
        {"d qkv weight", C, 3 * C, N, O, T, true, plain},
    };
    printf("%s: %lld rows, C %lld\n", name, (long long)N, (long long)C);
    for (const Product& p : products) {
        Room room(dev);
        const Arrays arrays = {filled(&room, p.m * p.k, 1.0f, 0), filled(&room, p.k * p.n, 1.0f, 0),
                               room.device<bf16>(2 * p.m * p.n),  filled(&room, p.m * p.n, 1.0f, 0),
                               filled(&room, p.m, 1.0f, 0),       room.device<unsigned long long>(1)};
        run_product(dev, &p, &arrays, all);
    }
}

int main(int argc, char** argv) {
    Device dev;
    device_open(&dev, true, 0);
    dev.warms_up = true;  // products are tried in their own memory
    bool all = argc > 1 && strcmp(argv[1], "all") == 0;
    printf("%s\n", dev.name);
    run_model(&dev, "gpt2, batch 64", 65536, 16384, 768, all);
    run_model(&dev, "gpt2-xl, batch 16", 16384, 16384, 1600, all);
    device_close(&dev);
    return 0;
}
