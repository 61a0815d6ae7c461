// See loaded_cublaslt.h. It opens libcublasLt at the path NIBBLE_CUBLASLT, else the one that the process has loaded
// (such as torch's), else one under its usual names.
#include "loaded_cublaslt.h"

#include "jit.h"

#ifdef __CUDACC__
#include <dlfcn.h>

// The functions that matrix products call: return type, name, parameters and arguments.
#define CUBLASLT_FUNCTIONS(X)                                                                                      \
    X(cublasStatus_t, cublasLtCreate, (cublasLtHandle_t * handle), (handle))                                       \
    X(cublasStatus_t, cublasLtDestroy, (cublasLtHandle_t handle), (handle))                                        \
    X(const char*, cublasLtGetStatusName, (cublasStatus_t status), (status))                                       \
    X(const char*, cublasLtGetStatusString, (cublasStatus_t status), (status))                                     \
    X(cublasStatus_t, cublasLtMatmul,                                                                              \
      (cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void* alpha, const void* a,                       \
       cublasLtMatrixLayout_t a_layout, const void* b, cublasLtMatrixLayout_t b_layout, const void* beta,          \
       const void* c, cublasLtMatrixLayout_t c_layout, void* d, cublasLtMatrixLayout_t d_layout,                   \
       const cublasLtMatmulAlgo_t* algorithm, void* workspace, size_t bytes, cudaStream_t stream),                 \
      (handle, desc, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout, algorithm, workspace, bytes, \
       stream))                                                                                                    \
    X(cublasStatus_t, cublasLtMatmulAlgoGetHeuristic,                                                              \
      (cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,     \
       cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t preference, int most,        \
       cublasLtMatmulHeuristicResult_t* results, int* found),                                                      \
      (handle, desc, a, b, c, d, preference, most, results, found))                                                \
    X(cublasStatus_t, cublasLtMatmulDescCreate,                                                                    \
      (cublasLtMatmulDesc_t * desc, cublasComputeType_t compute, cudaDataType_t scale), (desc, compute, scale))    \
    X(cublasStatus_t, cublasLtMatmulDescDestroy, (cublasLtMatmulDesc_t desc), (desc))                              \
    X(cublasStatus_t, cublasLtMatmulDescSetAttribute,                                                              \
      (cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t name, const void* value, size_t bytes),           \
      (desc, name, value, bytes))                                                                                  \
    X(cublasStatus_t, cublasLtMatmulPreferenceCreate, (cublasLtMatmulPreference_t * preference), (preference))     \
    X(cublasStatus_t, cublasLtMatmulPreferenceDestroy, (cublasLtMatmulPreference_t preference), (preference))      \
    X(cublasStatus_t, cublasLtMatmulPreferenceSetAttribute,                                                        \
      (cublasLtMatmulPreference_t preference, cublasLtMatmulPreferenceAttributes_t name, const void* value,        \
       size_t bytes),                                                                                              \
      (preference, name, value, bytes))                                                                            \
    X(cublasStatus_t, cublasLtMatrixLayoutCreate,                                                                  \
      (cublasLtMatrixLayout_t * layout, cudaDataType type, uint64_t rows, uint64_t cols, int64_t leading),         \
      (layout, type, rows, cols, leading))                                                                         \
    X(cublasStatus_t, cublasLtMatrixLayoutDestroy, (cublasLtMatrixLayout_t layout), (layout))                      \
    X(cublasStatus_t, cublasLtMatrixLayoutSetAttribute,                                                            \
      (cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t name, const void* value, size_t bytes),      \
      (layout, name, value, bytes))

#define MEMBER(RESULT, NAME, PARAMETERS, ARGUMENTS) RESULT(*NAME) PARAMETERS;
struct Cublaslt {
    void* library;
    CUBLASLT_FUNCTIONS(MEMBER)
};

// Loads the functions. `library` of the result is null if there is no library or if it lacks a function.
static Cublaslt cublaslt_load() {
    Cublaslt functions = {};
    functions.library = open_library("NIBBLE_CUBLASLT", "libcublasLt", true);
#define LOAD(RESULT, NAME, PARAMETERS, ARGUMENTS)                                                  \
    if (functions.library) functions.NAME = (RESULT(*) PARAMETERS)dlsym(functions.library, #NAME); \
    if (!functions.NAME) functions.library = nullptr;
    CUBLASLT_FUNCTIONS(LOAD)
    return functions;
}

static const Cublaslt& cublaslt() {
    static const Cublaslt loaded = cublaslt_load();  // once, whichever thread comes first
    return loaded;
}

#define FORWARD(RESULT, NAME, PARAMETERS, ARGUMENTS) \
    RESULT NAME PARAMETERS {                         \
        return cublaslt().NAME ARGUMENTS;            \
    }
CUBLASLT_FUNCTIONS(FORWARD)
#endif

void products_open(Device* dev, const char* rule) {
    if (!dev->gpu || dev->matmul_plans) return;
#ifdef __CUDACC__
    if (!cublaslt().library) {
        const char* own = getenv("NIBBLE_CUBLASLT");
        user_error(
            "%s multiplies matrices, and %s could not be opened: install cuBLAS (pip install nvidia-cublas, or apt-get "
            "install libcublas-13-0), set NIBBLE_CUBLASLT to the library's path, or take a rule such as adamw",
            rule, own && *own ? own : "libcublasLt.so.13 or .12");
    }
    check(cublasLtCreate(&dev->cublaslt));
    check(cudaMalloc(&dev->workspace, WORKSPACE_BYTES));
    dev->matmul_plans = (MatmulPlans*)memory_zero(1, sizeof(MatmulPlans));
#endif
}

void products_close(Device* dev) {
    if (dev->matmul_plans && dev->matmul_plans->close) dev->matmul_plans->close(dev->matmul_plans);
    free(dev->matmul_plans);
    if (dev->workspace) check(cudaFree(dev->workspace));
    if (dev->cublaslt) check(cublasLtDestroy(dev->cublaslt));
}
