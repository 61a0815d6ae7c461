// See loaded_cublaslt.h. This looks for libcublasLt at NIBBLE_CUBLASLT, or else takes the one that the process has
// loaded (torch's, say), or else one that is found under the usual names.
#include "loaded_cublaslt.h"

#ifdef __CUDACC__
#include <dlfcn.h>

struct Cublaslt {
    void* library;
    decltype(&cublasLtCreate) create;
    decltype(&cublasLtDestroy) destroy;
    decltype(&cublasLtGetStatusName) status_name;
    decltype(&cublasLtGetStatusString) status_string;
    decltype(&cublasLtMatmul) matmul;
    decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic;
    decltype(&cublasLtMatmulDescCreate) desc_create;
    decltype(&cublasLtMatmulDescDestroy) desc_destroy;
    decltype(&cublasLtMatmulDescSetAttribute) desc_set;
    decltype(&cublasLtMatmulPreferenceCreate) preference_create;
    decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy;
    decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set;
    decltype(&cublasLtMatrixLayoutCreate) layout_create;
    decltype(&cublasLtMatrixLayoutDestroy) layout_destroy;
    decltype(&cublasLtMatrixLayoutSetAttribute) layout_set;
};

template <class Function>
static bool bind(void* library, const char* name, Function* function) {
    *function = (Function)dlsym(library, name);
    return *function != nullptr;
}

static void* library_open() {
    static const char* const names[] = {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so",
                                        "/usr/local/cuda/lib64/libcublasLt.so"};
    const char* own = getenv("NIBBLE_CUBLASLT");
    if (own && *own) return dlopen(own, RTLD_NOW | RTLD_LOCAL);
    for (int flag : {RTLD_NOLOAD, 0}) {  // the one that the process has, torch's, say, before others
        for (const char* name : names) {
            void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL | flag);
            if (library) return library;
        }
    }
    return nullptr;
}

// Loads the functions. The result has no library if there is none or it lacks one of them.
static Cublaslt cublaslt_load() {
    Cublaslt its = {};
    void* library = library_open();
    const bool all =
        library && bind(library, "cublasLtCreate", &its.create) && bind(library, "cublasLtDestroy", &its.destroy) &&
        bind(library, "cublasLtGetStatusName", &its.status_name) &&
        bind(library, "cublasLtGetStatusString", &its.status_string) && bind(library, "cublasLtMatmul", &its.matmul) &&
        bind(library, "cublasLtMatmulAlgoGetHeuristic", &its.heuristic) &&
        bind(library, "cublasLtMatmulDescCreate", &its.desc_create) &&
        bind(library, "cublasLtMatmulDescDestroy", &its.desc_destroy) &&
        bind(library, "cublasLtMatmulDescSetAttribute", &its.desc_set) &&
        bind(library, "cublasLtMatmulPreferenceCreate", &its.preference_create) &&
        bind(library, "cublasLtMatmulPreferenceDestroy", &its.preference_destroy) &&
        bind(library, "cublasLtMatmulPreferenceSetAttribute", &its.preference_set) &&
        bind(library, "cublasLtMatrixLayoutCreate", &its.layout_create) &&
        bind(library, "cublasLtMatrixLayoutDestroy", &its.layout_destroy) &&
        bind(library, "cublasLtMatrixLayoutSetAttribute", &its.layout_set);
    its.library = all ? library : nullptr;
    return its;
}

static const Cublaslt& cublaslt() {
    static const Cublaslt loaded = cublaslt_load();  // once, whichever thread comes first
    return loaded;
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
    return cublaslt().create(handle);
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
    return cublaslt().destroy(handle);
}

const char* cublasLtGetStatusName(cublasStatus_t status) {
    return cublaslt().status_name(status);
}

const char* cublasLtGetStatusString(cublasStatus_t status) {
    return cublaslt().status_string(status);
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void* alpha, const void* a,
                              cublasLtMatrixLayout_t a_layout, const void* b, cublasLtMatrixLayout_t b_layout,
                              const void* beta, const void* c, cublasLtMatrixLayout_t c_layout, void* d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* algorithm, void* workspace,
                              size_t workspace_bytes, cudaStream_t stream) {
    return cublaslt().matmul(handle, desc, alpha, a, a_layout, b, b_layout, beta, c, c_layout, d, d_layout, algorithm,
                             workspace, workspace_bytes, stream);
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int most,
                                              cublasLtMatmulHeuristicResult_t* results, int* found) {
    return cublaslt().heuristic(handle, desc, a, b, c, d, preference, most, results, found);
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* desc, cublasComputeType_t compute, cudaDataType_t scale) {
    return cublaslt().desc_create(desc, compute, scale);
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) {
    return cublaslt().desc_destroy(desc);
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t bytes) {
    return cublaslt().desc_set(desc, attribute, value, bytes);
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
    return cublaslt().preference_create(preference);
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
    return cublaslt().preference_destroy(preference);
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void* value,
                                                    size_t bytes) {
    return cublaslt().preference_set(preference, attribute, value, bytes);
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type, uint64_t rows,
                                          uint64_t cols, int64_t leading) {
    return cublaslt().layout_create(layout, type, rows, cols, leading);
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
    return cublaslt().layout_destroy(layout);
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute, const void* value,
                                                size_t bytes) {
    return cublaslt().layout_set(layout, attribute, value, bytes);
}
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
#else
    (void)rule;
#endif
}

void products_close(Device* dev) {
    if (dev->matmul_plans && dev->matmul_plans->close) dev->matmul_plans->close(dev->matmul_plans);
    free(dev->matmul_plans);
    if (dev->workspace) check(cudaFree(dev->workspace));
    if (dev->cublaslt) check(cublasLtDestroy(dev->cublaslt));
}
