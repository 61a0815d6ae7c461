// Linear layers as the trainer uses them. Every function multiplies either as matmul.cuh does, in the activations'
// type, or with fp8 codes (fp8.cuh); `use` says which.
//
// With fp8, a layer's input has codes by rows for the forward product, and by columns for the gradient of the weights.
// The latter are kept for the backward pass (1 byte per element instead of 2). The output's gradient has both kinds.
// The kernel that makes a tensor writes its codes by rows (producers_quantize: layernorm, attention's backward, the
// classifier), and they are transposed here, for 2 bytes per element; the products next to GELU (matmul_gelu_fp8.cuh)
// write both kinds; other tensors are cast, for 4. The first step, which finds its scales itself, casts everything.
//
// Weights are cast in both passes, for 3 bytes per element each. Weights that the optimizer stores as e4m3 codes with
// one scale per tensor are read as they are stored, with the optimizer's scale (fp8_begin), and transposed for the
// backward pass, for 2; nothing is rounded a second time.
//
// GELU and its gradient are computed inside a cast if no product of our own does it. Products of the forward pass use
// fast sums; those of the backward pass, except matmul_gelu_fp8.cuh's, use sums of full length, since they run over up
// to all rows of a micro-batch.
#pragma once
#include "fp8.cuh"
#include "matmul.cuh"
#ifdef __CUDACC__
#include "matmul_gelu_fp8.cuh"
#endif

// The codes in use, in the activations' device memory. scales NULL: no fp8.
struct Fp8Use {
    Fp8* scales;
    bool producers_quantize;    // a kernel that writes a tensor also writes its codes
    bool attention_quantizes;   // so does attention's backward pass
    bool gelu_quantizes;        // so do the GEMMs next to GELU: by rows into dcolumns forward, rows backward
    uint8_t* rows;              // (N, 4C) a layer's input
    uint8_t* weight;            // (4C, C) or (C, 4C) a layer's weights, unless these are read where they are stored
    uint8_t *drows, *dcolumns;  // (N, 4C), (4C, N) an output's gradient
    uint8_t *head[2], *head_columns;  // the head's weights (Vp, C), (C, Vp); its input (C, logit_rows)
    uint8_t *dhead, *dhead_columns;   // (logit_rows, Vp), (Vp, logit_rows) the gradient of the logits
};

// A layer's weights: (OC, C) `values`; or, with fp8, `codes` by rows if they are stored as codes.
template <typename X>
struct LinearWeight {
    const X* values;
    const uint8_t* codes;  // NULL: codes are made of the values
};

// A layer has three slots among the scales: for its input, its weights and its output's gradient, in this order. In the
// functions below, `slot` is the number of the first.
constexpr int FP8_WEIGHT = 1, FP8_GRADIENT = 2, FP8_SLOTS = 3;

// Returns where the kernel that makes the tensor of slot `own` writes its codes, if it does (producers_quantize).
inline Fp8Codes linear_codes(const Fp8Use* use, int own, uint8_t* rows, Fp8Type type, bool quantized) {
    if (!quantized) return {};
    const Fp8* f = use->scales;
    return {rows, f->scale + own, f->amax + own, f->amax + f->slots, type};
}

// The same for a layer's input, for its output's gradient, and for the gradient of the logits.
inline Fp8Codes linear_input_codes(const Fp8Use* use, int slot) {
    return linear_codes(use, slot, use->rows, FP8_E4M3, use->producers_quantize);
}
inline Fp8Codes linear_gradient_codes(const Fp8Use* use, int slot, bool quantized) {
    return linear_codes(use, slot + FP8_GRADIENT, use->drows, use->scales ? use->scales->gradients : FP8_E5M2,
                        quantized);
}
inline Fp8Codes linear_logit_codes(const Fp8Use* use, int slot) {
    return linear_codes(use, slot + FP8_GRADIENT, use->dhead, FP8_E5M2, use->producers_quantize && use->dhead);
}

template <typename X>
void linear_cast_input(const Device* dev, const Fp8Use* use, int slot, Fp8Op op, const X* inp, uint8_t* rows,
                       uint8_t* columns, int64_t N, int C) {
    const Fp8Operand to = {rows, columns, slot, FP8_E4M3};
    fp8_cast<X>(dev, use->scales, &to, op, inp, (const X*)nullptr, (float*)nullptr, nullptr, N, C, false);
}

// Returns the codes of weight: (OC, C), by rows or by columns: those that are stored, or codes made in use->weight.
template <typename X>
const uint8_t* linear_weight_codes(const Device* dev, const Fp8Use* use, int slot, LinearWeight<X> weight, bool columns,
                                   int C, int OC) {
    if (weight.codes && !columns) return weight.codes;
    if (weight.codes) {
        fp8_by_columns(dev, use->weight, weight.codes, OC, C);
        return use->weight;
    }
    const Fp8Operand to = {columns ? nullptr : use->weight, columns ? use->weight : nullptr, slot + FP8_WEIGHT,
                           FP8_E4M3};
    fp8_cast<X>(dev, use->scales, &to, FP8_COPY, weight.values, (const X*)nullptr, (float*)nullptr, nullptr, OC, C,
                false);
    return use->weight;
}

// out: (N, OC) = inp weight^T + bias, from codes of inp by rows
template <typename X>
void linear_product_fp8(const Device* dev, const Fp8Use* use, int slot, X* out, const uint8_t* rows,
                        LinearWeight<X> weight, const X* bias, int64_t N, int C, int OC) {
    const uint8_t* codes = linear_weight_codes(dev, use, slot, weight, false, C, OC);
    fp8_product<X>(dev, use->scales, out, rows, slot, FP8_E4M3, codes, slot + FP8_WEIGHT, FP8_E4M3, bias, N, OC, C,
                   true, false);
}

// out: (N, OC) = op(inp) weight^T + bias; columns: (C, N) codes of op(inp), kept; quantized: codes by rows exist.
template <typename X>
void linear_forward_fp8(const Device* dev, const Fp8Use* use, int slot, bool quantized, Fp8Op op, X* out, const X* inp,
                        uint8_t* columns, LinearWeight<X> weight, const X* bias, int64_t N, int C, int OC) {
    if (quantized) fp8_by_columns(dev, columns, use->rows, N, C);
    if (!quantized) linear_cast_input(dev, use, slot, op, inp, use->rows, columns, N, C);
    linear_product_fp8(dev, use, slot, out, use->rows, weight, bias, N, C, OC);
}

// True if the layer before GELU, from (N, C) to OC outputs, and the one after GELU have products of our own.
inline bool linear_gelu_fits([[maybe_unused]] const Device* dev, [[maybe_unused]] int64_t N, [[maybe_unused]] int C,
                             [[maybe_unused]] int OC) {
#ifdef __CUDACC__
    return dev->gpu && matmul_gelu_fp8_fits(dev, N, OC, C);
#endif
    return false;
}

// Takes room for the codes of a layer's input and weights, and sets which kernels write codes of what they make. A plan
// (without memory) asks no kernel, since the GPU may not be here. attention_quantizes is the caller's to set.
inline Fp8Use linear_use(Layout* layout, const Device* dev, const Fp8* scales, int64_t N, int C) {
    Fp8Use use = {};
    use.scales = (Fp8*)scales;
    use.rows = layout_take<uint8_t>(layout, N * 4 * C), use.weight = layout_take<uint8_t>(layout, 4 * (int64_t)C * C);
    use.producers_quantize = layout->base && dev->gpu && !scales->use_current_scaling;
    use.gelu_quantizes = use.producers_quantize && linear_gelu_fits(dev, N, C, 4 * C);
    return use;
}

// Takes room for the codes of the head, which is then in fp8.
inline void linear_use_head(Layout* layout, Fp8Use* use, int64_t logit_rows, int64_t C, int64_t Vp) {
    for (uint8_t*& weight : use->head) weight = layout_take<uint8_t>(layout, Vp * C);
    use->head_columns = layout_take<uint8_t>(layout, logit_rows * C);
    use->dhead = layout_take<uint8_t>(layout, logit_rows * Vp);
    use->dhead_columns = layout_take<uint8_t>(layout, logit_rows * Vp);
}

#ifdef __CUDACC__
// For the products next to GELU: the place for the codes of the result, slot `to`, and the scales of the operands,
// slots `left` and `right`.
inline MatmulGeluCodes linear_gelu_codes(const Fp8Use* use, int to, uint8_t* rows, uint8_t* transposed, Fp8Type type,
                                         int left, int right) {
    const Fp8* f = use->scales;
    return {linear_codes(use, to, rows, type, true), transposed, f->scale_inv + 4 * left, f->scale_inv + 4 * right};
}
#endif

// pre_gelu: (N, OC) = inp weight^T + bias, and the codes of its GELU, the next layer's input: into use->dcolumns and,
// by columns, into gelu_columns. On a GPU where use->gelu_quantizes.
inline void linear_forward_gelu_fp8([[maybe_unused]] const Device* dev, [[maybe_unused]] const Fp8Use* use,
                                    [[maybe_unused]] int slot, [[maybe_unused]] bf16* pre_gelu,
                                    [[maybe_unused]] uint8_t* columns, [[maybe_unused]] uint8_t* gelu_columns,
                                    [[maybe_unused]] LinearWeight<bf16> weight, [[maybe_unused]] const bf16* bias,
                                    [[maybe_unused]] int64_t N, [[maybe_unused]] int C, [[maybe_unused]] int OC) {
#ifdef __CUDACC__
    fp8_by_columns(dev, columns, use->rows, N, C);
    const uint8_t* weight_codes = linear_weight_codes(dev, use, slot, weight, false, C, OC);
    const MatmulGeluCodes codes =
        linear_gelu_codes(use, slot + FP8_SLOTS, use->dcolumns, gelu_columns, FP8_E4M3, slot, slot + FP8_WEIGHT);
    matmul_gelu_fp8_forward(dev, &codes, pre_gelu, use->rows, weight_codes, bias, N, C, OC);
#endif
}

// out: (N, OC) = inp weight^T + bias; inp: (N, C); weight: (OC, C); columns: (C, N) codes of inp, with fp8; quantized:
// the kernel that made inp wrote linear_input_codes instead.
template <typename X>
void linear_forward(const Device* dev, const Fp8Use* use, int slot, bool quantized, X* out, const X* inp,
                    uint8_t* columns, LinearWeight<X> weight, const X* bias, int64_t N, int C, int OC) {
    if (use->scales)
        return linear_forward_fp8(dev, use, slot, quantized, FP8_COPY, out, inp, columns, weight, bias, N, C, OC);
    matmul_forward<X>(dev, out, nullptr, inp, weight.values, bias, N, C, OC);
}

// The layer before GELU: pre_gelu: (N, OC) = inp weight^T + bias, out = gelu(pre_gelu). With fp8, out is not written:
// the product makes the codes of gelu that are kept, gelu_columns (OC, N), or the next layer does.
template <typename X>
void linear_forward_before_gelu(const Device* dev, const Fp8Use* use, int slot, X* out, X* pre_gelu, const X* inp,
                                uint8_t* columns, [[maybe_unused]] uint8_t* gelu_columns, LinearWeight<X> weight,
                                const X* bias, int64_t N, int C, int OC) {
    if constexpr (std::is_same_v<X, bf16>) {
        if (use->gelu_quantizes)
            return linear_forward_gelu_fp8(dev, use, slot, pre_gelu, columns, gelu_columns, weight, bias, N, C, OC);
    }
    if (use->scales)
        return linear_forward(dev, use, slot, use->producers_quantize, pre_gelu, inp, columns, weight, bias, N, C, OC);
    matmul_forward<X>(dev, out, pre_gelu, inp, weight.values, bias, N, C, OC);
}

// The layer after GELU: out: (N, OC) = gelu weight^T + bias. gelu: (N, C) is gelu(pre_gelu), whose codes are made here,
// with fp8, if the layer before did not make them.
template <typename X>
void linear_forward_after_gelu(const Device* dev, const Fp8Use* use, int slot, X* out, const X* gelu, const X* pre_gelu,
                               uint8_t* columns, LinearWeight<X> weight, const X* bias, int64_t N, int C, int OC) {
    if (use->gelu_quantizes) return linear_product_fp8(dev, use, slot, out, use->dcolumns, weight, bias, N, C, OC);
    if (use->scales)
        return linear_forward_fp8(dev, use, slot, false, FP8_GELU, out, pre_gelu, columns, weight, bias, N, C, OC);
    matmul_forward<X>(dev, out, nullptr, gelu, weight.values, bias, N, C, OC);
}

// Recomputes gelu: (N, C), or its codes, from pre_gelu.
template <typename X>
void linear_gelu_again(const Device* dev, const Fp8Use* use, int slot, X* gelu, const X* pre_gelu, uint8_t* columns,
                       int64_t N, int C) {
    if (use->scales) return linear_cast_input(dev, use, slot, FP8_GELU, pre_gelu, nullptr, columns, N, C);
    gelu_forward<X>(dev, gelu, pre_gelu, N * C);
}

// Backward. The functions of a layer are called in this order: linear_gradient; then dinp, dweight.

// Makes the codes of the output's gradient; quantized: the kernel that made dout wrote linear_gradient_codes.
template <typename X>
void linear_gradient(const Device* dev, const Fp8Use* use, int slot, bool quantized, const X* dout, int64_t N, int OC) {
    if (!use->scales) return;
    if (quantized) return fp8_by_columns(dev, use->dcolumns, use->drows, N, OC);
    const Fp8Operand to = {use->drows, use->dcolumns, slot + FP8_GRADIENT, use->scales->gradients};
    fp8_cast<X>(dev, use->scales, &to, FP8_COPY, dout, (const X*)nullptr, (float*)nullptr, nullptr, N, OC, false);
}

// drows: (N, OC) codes of the output's gradient.
template <typename X>
void linear_backward_input_fp8(const Device* dev, const Fp8Use* use, int slot, X* dinp, const uint8_t* drows,
                               LinearWeight<X> weight, int64_t N, int C, int OC) {
    const uint8_t* codes = linear_weight_codes(dev, use, slot, weight, true, C, OC);
    fp8_product<X>(dev, use->scales, dinp, drows, slot + FP8_GRADIENT, use->scales->gradients, codes, slot + FP8_WEIGHT,
                   FP8_E4M3, (const X*)nullptr, N, C, OC, false, false);
}

// dinp: (N, C) = dout weight; dout: (N, OC); weight: (OC, C)
template <typename X>
void linear_backward_input(const Device* dev, const Fp8Use* use, int slot, X* dinp, const X* dout,
                           LinearWeight<X> weight, int64_t N, int C, int OC) {
    if (use->scales) return linear_backward_input_fp8(dev, use, slot, dinp, use->drows, weight, N, C, OC);
    matmul_backward_input<X>(dev, dinp, dout, weight.values, N, C, OC);
}

// dweight: (OC, C) (+)= dout^T inp; columns: (C, N) codes of inp, if fp8 is used
template <typename X, typename G>
void linear_backward_weight(const Device* dev, const Fp8Use* use, int slot, G* dweight, const X* dout, const X* inp,
                            const uint8_t* columns, int64_t N, int C, int OC, bool accumulate) {
    if (!use->scales) return matmul_backward_weight<X, G>(dev, dweight, dout, inp, N, C, OC, accumulate);
    fp8_product<G>(dev, use->scales, dweight, use->dcolumns, slot + FP8_GRADIENT, use->scales->gradients, columns, slot,
                   FP8_E4M3, (const G*)nullptr, OC, C, N, false, accumulate);
}

// Returns `use` for the backward pass of the layer before GELU, with the places where linear_backward_gelu left the
// codes of its output's gradient. dwide: (N, OC), the dinp of that call.
template <typename X>
Fp8Use linear_use_before_gelu(const Fp8Use* use, X* dwide) {
    Fp8Use own = *use;
    if (use->gelu_quantizes) own.drows = use->rows, own.dcolumns = (uint8_t*)dwide;
    return own;
}

// The codes of (dout weight) * gelu'(pre_gelu): (N, C) into use->rows and, by columns, into `columns`; dbias: (C) (+)=
// its column sums. On a GPU where use->gelu_quantizes.
template <typename G>
void linear_backward_gelu_fp8([[maybe_unused]] const Device* dev, [[maybe_unused]] const Fp8Use* use,
                              [[maybe_unused]] int slot, [[maybe_unused]] uint8_t* columns, [[maybe_unused]] G* dbias,
                              [[maybe_unused]] float* scratch, [[maybe_unused]] LinearWeight<bf16> weight,
                              [[maybe_unused]] const bf16* pre_gelu, [[maybe_unused]] int64_t N, [[maybe_unused]] int C,
                              [[maybe_unused]] int OC, [[maybe_unused]] bool accumulate) {
#ifdef __CUDACC__
    const uint8_t* weight_codes = linear_weight_codes(dev, use, slot, weight, true, C, OC);
    const MatmulGeluCodes codes = linear_gelu_codes(use, slot - FP8_SLOTS + FP8_GRADIENT, use->rows, columns,
                                                    use->scales->gradients, slot + FP8_GRADIENT, slot + FP8_WEIGHT);
    matmul_gelu_fp8_backward(dev, &codes, dbias, scratch, use->drows, weight_codes, pre_gelu, N, C, OC, accumulate);
#endif
}

// The backward pass of the layer after GELU, down to GELU's input: dinp: (N, C) = (dout weight) * gelu'(pre_gelu), and
// dbias: (C), the gradient of the bias before GELU, (+)= its column sums. With fp8, either codes of dinp are left in
// use->rows and, by columns, in dinp's memory; or dinp is dout weight, and linear_gradient_gelu does the rest.
template <typename X, typename G>
void linear_backward_gelu(const Device* dev, const Fp8Use* use, int slot, X* dinp, G* dbias, float* scratch,
                          const X* dout, LinearWeight<X> weight, const X* pre_gelu, int64_t N, int C, int OC,
                          bool accumulate) {
    if constexpr (std::is_same_v<X, bf16>) {
        if (use->gelu_quantizes)
            return linear_backward_gelu_fp8<G>(dev, use, slot, (uint8_t*)dinp, dbias, scratch, weight, pre_gelu, N, C,
                                               OC, accumulate);
    }
    if (use->scales) return linear_backward_input_fp8(dev, use, slot, dinp, use->drows, weight, N, C, OC);
    matmul_backward_gelu<X, G>(dev, dinp, dbias, scratch, dout, weight.values, pre_gelu, N, C, OC, accumulate);
}

// Makes the codes of dout * gelu'(pre_gelu), the output gradient of the layer before GELU, and dbias: (OC) (+)= its
// column sums, unless linear_backward_gelu has done it.
template <typename X, typename G>
void linear_gradient_gelu(const Device* dev, const Fp8Use* use, int slot, const X* dout, G* dbias, float* scratch,
                          const X* pre_gelu, int64_t N, int OC, bool accumulate) {
    if (!use->scales) return;
    if (use->gelu_quantizes) return;
    const Fp8Operand to = {use->drows, use->dcolumns, slot + FP8_GRADIENT, use->scales->gradients};
    fp8_cast<X, G>(dev, use->scales, &to, FP8_GELU_BACKWARD, dout, pre_gelu, dbias, scratch, N, OC, accumulate);
}

// The head is a layer without a bias. Its rows are taken in pieces. It is in fp8 if use->head[0] is not NULL.

// The trainer calls this before the head's first rows. It makes the codes of the weights (Vp, C), and sets the scale of
// the logits' gradient, which is at most dloss.
template <typename X>
void linear_head_begin(const Device* dev, const Fp8Use* use, int slot, const X* weight, float dloss, int C, int Vp) {
    if (!use->head[0]) return;
    const Fp8Operand to = {use->head[0], use->head[1], slot + FP8_WEIGHT, FP8_E4M3};
    fp8_cast<X>(dev, use->scales, &to, FP8_COPY, weight, (const X*)nullptr, (float*)nullptr, nullptr, Vp, C, false);
    fp8_fix(dev, use->scales, slot + FP8_GRADIENT, dloss, FP8_E5M2);
}

// logits: (rows, Vp) = inp weight^T
template <typename X>
void linear_head_forward(const Device* dev, const Fp8Use* use, int slot, X* logits, const X* inp, const X* weight,
                         int64_t rows, int C, int Vp) {
    if (!use->head[0]) return matmul_forward<X>(dev, logits, nullptr, inp, weight, nullptr, rows, C, Vp);
    linear_cast_input(dev, use, slot, FP8_COPY, inp, use->rows, use->head_columns, rows, C);
    fp8_product<X>(dev, use->scales, logits, use->rows, slot, FP8_E4M3, use->head[0], slot + FP8_WEIGHT, FP8_E4M3,
                   (const X*)nullptr, rows, Vp, C, true, false);
}

// dinp: (rows, C) = dlogits weight, from linear_logit_codes where the classifier wrote them
template <typename X>
void linear_head_backward_input(const Device* dev, const Fp8Use* use, int slot, X* dinp, const X* dlogits,
                                const X* weight, int64_t rows, int C, int Vp) {
    if (!use->head[0]) return matmul_backward_input<X>(dev, dinp, dlogits, weight, rows, C, Vp);
    if (use->producers_quantize) {
        fp8_by_columns(dev, use->dhead_columns, use->dhead, rows, Vp);
    } else {
        Fp8 fixed = *use->scales;
        fixed.use_current_scaling = false;
        const Fp8Operand to = {use->dhead, use->dhead_columns, slot + FP8_GRADIENT, FP8_E5M2};
        fp8_cast<X>(dev, &fixed, &to, FP8_COPY, dlogits, (const X*)nullptr, (float*)nullptr, nullptr, rows, Vp, false);
    }
    fp8_product<X>(dev, use->scales, dinp, use->dhead, slot + FP8_GRADIENT, FP8_E5M2, use->head[1], slot + FP8_WEIGHT,
                   FP8_E4M3, (const X*)nullptr, rows, C, Vp, false, false);
}

// dweight: (Vp, C) (+)= dlogits^T inp
template <typename X>
void linear_head_backward_weight(const Device* dev, const Fp8Use* use, int slot, float* dweight, const X* dlogits,
                                 const X* inp, int64_t rows, int C, int Vp, bool accumulate) {
    if (!use->head[0]) return matmul_backward_weight<X, float>(dev, dweight, dlogits, inp, rows, C, Vp, accumulate);
    fp8_product<float>(dev, use->scales, dweight, use->dhead_columns, slot + FP8_GRADIENT, FP8_E5M2, use->head_columns,
                       slot, FP8_E4M3, (const float*)nullptr, Vp, C, rows, false, accumulate);
}
