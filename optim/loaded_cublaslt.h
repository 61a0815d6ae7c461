// Loads cuBLASLt for libnibble_optim, which does not link it. The library opens it when an optimizer on a GPU has a
// rule that reads matrices. The kernels call cuBLASLt by its own names; loaded_cublaslt.cu defines functions of these
// names that pass the calls on.
#pragma once
#include "../kernels/common.cuh"

// Gives a device what matrix products need: a handle of cuBLASLt, its workspace (32 MB of device memory) and room for
// plans. products_close frees them. It does nothing for the CPU, or if the device has them already. Reports through
// user_error, naming `rule`, if cuBLASLt cannot be opened.
void products_open(Device* dev, const char* rule);
void products_close(Device* dev);
