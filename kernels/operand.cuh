// Operands of matrix products: values, or fp8 codes of them (fp8.cuh makes the codes and multiplies them).
#pragma once
#include "fp8_scales.cuh"

// A cast may change a value before it rounds it: not at all; to gelu(x); to x * gelu'(pre_gelu).
enum Fp8Op { FP8_COPY, FP8_GELU, FP8_GELU_BACKWARD };

// Says which codes of an operand kernels have made; a product that needs others casts or transposes to make them.
enum Fp8Made { FP8_NOTHING, FP8_BY_ROWS, FP8_BOTH };

// A matrix (N, C) that a product reads, as values or as codes of op(values).
template <typename X>
struct Operand {
    X* values = nullptr;
    uint8_t *rows = nullptr, *columns = nullptr;  // (N, C), (C, N) codes
    Fp8* fp8 = nullptr;                           // their scales; NULL: products read the values
    int slot = 0;                                 // the number of their scale
    Fp8Type type = FP8_E4M3;
    Fp8Op op = FP8_COPY;
    Fp8Made made = FP8_NOTHING;
};

// Returns where the kernel that makes an operand writes its codes, if it does.
template <typename X>
Fp8Codes operand_codes(const Operand<X>* o) {
    if (o->made == FP8_NOTHING) return {};
    const Fp8* f = o->fp8;
    return {o->rows, f->scale + o->slot, f->amax + o->slot, f->amax + f->slots};
}

// One of the two factors of a product: an operand's codes, the summed dimension last.
struct Fp8Factor {
    const uint8_t* codes;
    const float* scale_inv;  // device scalar
    Fp8Type type;
};

template <typename X>
Fp8Factor operand_rows(const Operand<X>* o) {
    return {o->rows, o->fp8->scale_inv + 4 * o->slot, o->type};
}
template <typename X>
Fp8Factor operand_columns(const Operand<X>* o) {
    return {o->columns, o->fp8->scale_inv + 4 * o->slot, o->type};
}
