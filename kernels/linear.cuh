// Layers as the trainer uses them: linear layers, and the layernorms before them. A product is either matmul.cuh's, in
// the activations' type, or one of fp8 codes (fp8.cuh), which its operands say.
#pragma once
#include "fp8.cuh"
#include "layernorm.cuh"
#include "matmul.cuh"
#include "profile.h"
#ifdef __CUDACC__
#include "matmul_gelu_fp8.cuh"
#endif

// A layer has three slots among the scales: for its input, its weights and its output's gradient, in this order.
constexpr int FP8_WEIGHT = 1, FP8_GRADIENT = 2, FP8_SLOTS = 3;

// Makes the codes of (N, C) values.
template <typename X>
void operand_cast(const Device* dev, const Operand<X>* o, bool rows, bool columns, int64_t N, int C) {
    Operand<X> wanted = *o;
    if (!rows) wanted.rows = nullptr;
    if (!columns) wanted.columns = nullptr;
    fp8_cast(dev, &wanted, N, C);
}

// Makes those that are not there.
template <typename X>
void operand_need(const Device* dev, const Operand<X>* o, bool rows, bool columns, int64_t N, int C) {
    if (o->made == FP8_NOTHING) operand_cast(dev, o, rows, columns, N, C);
    if (o->made == FP8_BY_ROWS && columns) fp8_by_columns(dev, o->columns, o->rows, N, C);
}

// A linear layer: what its products read, and where its gradients go.
template <typename X, typename G>
struct Linear {
    int C, OC;
    Operand<X> inp, weight, dout;  // (N, C), (OC, C), (N, OC)
    X* bias;                       // (OC) or NULL
    G *dweight, *dbias;            // (OC, C), (OC)
};

// A layernorm over rows of C elements.
template <typename X, typename G>
struct Norm {
    int C;
    X *weight, *bias;    // (C)
    G *dweight, *dbias;  // (C)
    float *mean, *rstd;  // (N)
};

// out: (N, C) = the normalised rows of inp or, if there is a branch, of inp + branch, which go to `residual`.
template <typename X, typename G>
void norm_forward(const Device* dev, const Operand<X>* out, const Norm<X, G>* n, int64_t N, const X* inp,
                  const X* branch = nullptr, X* residual = nullptr) {
    residual_layernorm_forward(named(dev, "residual + layernorm"), residual, out->values, n->mean, n->rstd, inp, branch,
                               n->weight, n->bias, N, n->C, operand_codes(out));
}

// Adds the gradient of inp to dinp, from dout, that of inp's normalised rows. dinp is then the gradient of the output
// of the linear layer `below` (NULL: there is none), whose bias gradient comes from it as column sums.
template <typename X, typename G>
void norm_backward(const Device* dev, X* dinp, const X* dout, const Norm<X, G>* n, const X* inp,
                   const Linear<X, G>* below, float* scratch, int64_t N, bool accumulate) {
    layernorm_backward(named(dev, "layernorm backward"), dinp, n->dweight, n->dbias, below ? below->dbias : nullptr,
                       scratch, dout, inp, n->weight, n->mean, n->rstd, N, n->C, accumulate,
                       below ? operand_codes(&below->dout) : Fp8Codes{});
}

// out: (N, OC) = inp weight^T + bias. With `gelu`, what follows is GELU: gelu(out) is made too, its values, or its
// codes if no cast is to make them.
template <typename X, typename G>
void linear_forward(const Device* dev, X* out, const Linear<X, G>* l, int64_t N, const Operand<X>* gelu = nullptr) {
    const Operand<X>*inp = &l->inp, *weight = &l->weight;
    if (!inp->fp8) {
        return matmul_forward<X>(dev, gelu ? gelu->values : out, gelu ? out : nullptr, inp->values, weight->values,
                                 l->bias, N, l->C, l->OC);
    }
    operand_need(dev, inp, true, true, N, l->C);
    operand_need(dev, weight, true, false, l->OC, l->C);
#ifdef __CUDACC__
    if constexpr (std::is_same_v<X, bf16>) {
        if (gelu && gelu->made == FP8_BOTH)
            return matmul_gelu_fp8_forward(dev, gelu, out, operand_rows(inp), operand_rows(weight), l->bias, N, l->C,
                                           l->OC);
    }
#endif
    fp8_product<X>(dev, out, operand_rows(inp), operand_rows(weight), l->bias, N, l->OC, l->C, true, false);
}

// dinp: (N, C) = dout weight, dweight (+)= dout^T inp. With fp8, dinp may be NULL: only dweight and all codes are made.
template <typename X, typename G>
void linear_backward(const Device* dev, X* dinp, const Linear<X, G>* l, int64_t N, bool accumulate) {
    const Operand<X>*dout = &l->dout, *inp = &l->inp, *weight = &l->weight;
    const int C = l->C, OC = l->OC;
    if (!dout->fp8) {
        matmul_backward_input<X>(dev, dinp, dout->values, weight->values, N, C, OC);
        return matmul_backward_weight<X, G>(dev, l->dweight, dout->values, inp->values, N, C, OC, accumulate);
    }
    operand_need(dev, dout, true, true, N, OC);
    operand_need(dev, weight, false, true, OC, C);
    if (dinp) fp8_product<X>(dev, dinp, operand_rows(dout), operand_columns(weight), nullptr, N, C, OC, false, false);
    fp8_product<G>(dev, l->dweight, operand_columns(dout), operand_columns(inp), nullptr, OC, C, N, false, accumulate);
}

// Makes gelu: (N, C), or its codes by columns, again.
template <typename X>
void linear_gelu_again(const Device* dev, const Operand<X>* gelu, const X* pre_gelu, int64_t N, int C) {
    if (gelu->fp8) return operand_cast(dev, gelu, false, true, N, C);
    gelu_forward<X>(dev, gelu->values, pre_gelu, N * C);
}

// The backward pass of layer l, after GELU, down to GELU's input: before->dout: (N, C) = (dout weight) *
// gelu'(pre_gelu), values or codes; before->dbias (+)= its column sums; dweight (+)= dout^T gelu. With fp8, the values
// of before->dout are memory for a product that a cast then reads.
template <typename X, typename G>
void linear_backward_gelu(const Device* dev, Linear<X, G>* before, const Linear<X, G>* l, const X* pre_gelu,
                          float* scratch, int64_t N, bool accumulate) {
    Operand<X>* dpre = &before->dout;
    const Operand<X>*dout = &l->dout, *weight = &l->weight;
    const int C = l->C, OC = l->OC;
    if (!dout->fp8) {
        matmul_backward_gelu<X, G>(dev, dpre->values, before->dbias, scratch, dout->values, weight->values, pre_gelu, N,
                                   C, OC, accumulate);
        return matmul_backward_weight<X, G>(dev, l->dweight, dout->values, l->inp.values, N, C, OC, accumulate);
    }
    const bool fused = dpre->made == FP8_BOTH;
    linear_backward(dev, fused ? nullptr : dpre->values, l, N, accumulate);
    if (!fused) {
        fp8_cast(dev, dpre, N, C, pre_gelu, before->dbias, scratch, accumulate);
        dpre->made = FP8_BOTH;
        return;
    }
#ifdef __CUDACC__
    if constexpr (std::is_same_v<X, bf16>)
        matmul_gelu_fp8_backward(dev, dpre, before->dbias, scratch, operand_rows(dout), operand_columns(weight),
                                 pre_gelu, N, C, OC, accumulate);
#endif
}
