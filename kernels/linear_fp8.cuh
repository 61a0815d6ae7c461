// The operands of a model's linear layers (linear.cuh): the memory that layers share for fp8 codes, and which kernels
// write codes. Without fp8, operands are values alone.
//
// With fp8, a layer's input has codes by rows for the forward product, and by columns for the gradient of the weights.
// The latter are kept for the backward pass (1 byte per element instead of 2). The output's gradient has both kinds.
// The kernel that makes a tensor writes its codes by rows (layernorm, attention's backward, the classifier), and they
// are transposed here, for 2 bytes per element; the products next to GELU (matmul_gelu_fp8.cuh) write both kinds; other
// tensors are cast, for 4. The first step, which finds its scales itself, casts all but, on a GPU, the logits'
// gradient.
//
// Weights are cast in both passes, for 3 bytes per element each. Weights that the optimizer stores as e4m3 codes with
// one scale per tensor are read as they are stored, with the optimizer's scale (fp8_begin), and transposed for the
// backward pass, for 2; nothing is rounded a second time.
//
// GELU and its gradient are computed inside a cast if no product of our own does it. Products of the forward pass use
// fast sums; those of the backward pass, except matmul_gelu_fp8.cuh's, use sums of full length, since they run over up
// to all rows of a micro-batch.
#pragma once
#include "linear.cuh"

// The memory that layers share for codes, and which kernels write codes. scales NULL: no fp8.
struct Fp8Use {
    Fp8* scales;
    Fp8Made layernorm_makes;    // Layernorm writes these codes.
    Fp8Made attention_makes;    // Attention's backward pass writes these.
    Fp8Made gelu_makes;         // The products next to GELU write these.
    uint8_t* rows;              // (N, 4C) a layer's input
    uint8_t* weight;            // (4C, C) or (C, 4C) a layer's weights, unless these are read where they are stored
    uint8_t *drows, *dcolumns;  // (N, 4C), (4C, N) an output's gradient
    uint8_t *head[2], *head_columns;  // the head's weights (Vp, C), (C, Vp); its input (C, logit_rows)
    uint8_t *dhead, *dhead_columns;   // (logit_rows, Vp), (Vp, logit_rows) the gradient of the logits
};

// Takes room for the codes of outputs' gradients.
inline void linear_use_gradients(Layout* layout, Fp8Use* use, int64_t N, int C) {
    use->drows = layout_take<uint8_t>(layout, N * 4 * C), use->dcolumns = layout_take<uint8_t>(layout, N * 4 * C);
}

// Takes room for the codes of the head, which is then in fp8.
inline void linear_use_head(Layout* layout, Fp8Use* use, int64_t logit_rows, int64_t C, int64_t Vp) {
    for (uint8_t*& weight : use->head) weight = layout_take<uint8_t>(layout, Vp * C);
    use->head_columns = layout_take<uint8_t>(layout, logit_rows * C);
    use->dhead = layout_take<uint8_t>(layout, logit_rows * Vp);
    use->dhead_columns = layout_take<uint8_t>(layout, logit_rows * Vp);
}

// Takes room for the codes of a layer's input and weights.
inline void linear_use_layer(Layout* layout, Fp8Use* use, int64_t N, int C) {
    use->rows = layout_take<uint8_t>(layout, N * 4 * C), use->weight = layout_take<uint8_t>(layout, 4 * (int64_t)C * C);
}

// Sets the scales, and which kernels of this step write codes. attention: its backward pass can.
inline void linear_use_begin(Fp8Use* use, const Device* dev, Fp8* scales, bool attention, int64_t N, int C) {
    use->scales = scales;
    if (!dev->gpu || scales->use_current_scaling) return;
    use->layernorm_makes = FP8_BY_ROWS;
    if (attention) use->attention_makes = FP8_BY_ROWS;
#ifdef __CUDACC__
    if (matmul_gelu_fp8_fits(dev, N, 4 * C, C)) use->gelu_makes = FP8_BOTH;
#endif
}

// Sets what the products of a layer read, whose first slot this is: its input, of which the memory is set; its weights,
// or the codes that they are stored as (NULL: they are not); and the gradient of its output. made, dmade: the codes of
// the input and of that gradient that kernels make.
template <typename X, typename G>
void linear_set(const Fp8Use* use, Linear<X, G>* l, int slot, X* weight, const uint8_t* codes, X* dout, Fp8Made made,
                Fp8Made dmade) {
    l->inp = {l->inp.values, use->rows, l->inp.columns, use->scales, slot};
    l->inp.made = made;
    l->weight = {weight, codes ? (uint8_t*)codes : use->weight, use->weight, use->scales, slot + FP8_WEIGHT};
    if (codes) l->weight.made = FP8_BY_ROWS;
    l->dout = {dout, use->drows, use->dcolumns, use->scales, slot + FP8_GRADIENT};
    l->dout.made = dmade;
}

// Sets GELU's result, the input of the layer after it, and the gradient of GELU's input, the output of the layer
// before. The memory of that gradient's values has its codes by columns, which take half.
template <typename X, typename G>
void linear_gelu(const Fp8Use* use, Linear<X, G>* before, Linear<X, G>* after, X* pre_gelu) {
    if (!use->scales) return;
    Operand<X>*gelu = &after->inp, *dpre = &before->dout;
    gelu->values = pre_gelu, gelu->op = FP8_GELU, dpre->op = FP8_GELU_BACKWARD;
    if (use->gelu_makes == FP8_NOTHING) return;
    gelu->rows = use->dcolumns, gelu->made = use->gelu_makes;
    dpre->rows = use->rows, dpre->columns = (uint8_t*)dpre->values, dpre->made = use->gelu_makes;
}

// Returns the head, whose rows are taken in pieces. It makes the weights' codes, and sets the scale of the logits'
// gradient, which is at most dloss.
template <typename X>
Linear<X, float> linear_head_begin(const Device* dev, const Fp8Use* use, int slot, X* inp, X* weight, X* logits,
                                   float* dweight, float dloss, int C, int Vp) {
    const Fp8Use none = {}, *own = use->head[0] ? use : &none;
    Linear<X, float> head = {C, Vp, {inp, nullptr, own->head_columns}, {}, {}, nullptr, dweight, nullptr};
    linear_set(own, &head, slot, weight, nullptr, logits, FP8_NOTHING, FP8_NOTHING);
    if (own == &none) return head;
    head.weight.rows = use->head[0], head.weight.columns = use->head[1];
    head.dout.rows = use->dhead, head.dout.columns = use->dhead_columns, head.dout.type = FP8_E5M2;
    operand_need(dev, &head.weight, true, true, Vp, C);
    head.weight.made = FP8_BOTH;
    if (dev->gpu) head.dout.made = FP8_BY_ROWS;  // by the classifier
    fp8_rescale(dev, use->scales, head.dout.slot, dloss, FP8_E5M2);
    return head;
}
