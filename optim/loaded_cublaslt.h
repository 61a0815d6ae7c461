// cuBLASLt for the library, which does not link it: rules that read matrices open it when an optimizer on a GPU has
// one. The kernels call cuBLASLt by its own names; the functions of these names in loaded_cublaslt.cu pass the calls
// on.
#pragma once
#include "../kernels/common.cuh"

// Gives a GPU what products of matrices need: cuBLASLt, its workspace (32 MB of device memory) and room for plans. Does
// nothing for the CPU, or if the device has it. Reports through user_error, for `rule`, if cuBLASLt is not there.
void products_open(Device* dev, const char* rule);
void products_close(Device* dev);
