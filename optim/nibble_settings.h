// The optimizer of nibble_optim.h, and the functions that set it up from the caller's settings and tensors.
#pragma once
#include "../kernels/ranks/slices.cuh"
#include "nibble_optim.h"
#include "placed.h"

// Blocks of memory that a call has taken and not freed.
struct Taken {
    void** block;
    int64_t count, room;
};

struct NibbleOptim {
    Device dev;
    int gpu;  // its index; -1: the CPU
    Optim* optim;
    PlacedTables* tables;
    OptimConfig config;
    OptimType compute;
    NibbleTensor* tensor;  // (count), with names of their own
    OptimTensor* local;    // (count) what lies here, as the optimizer knows it
    OptimTensor* whole;    // (count) all tensors with their places in the model
    PlacedTensor* placed;  // (count)
    bool* stale;           // (count) the weights kept beside a parameter must be made from it again
    int count;
    int64_t share, shares;  // the share that is kept here, -1: tensors without owners; 0 shares: all tensors
    int* owner;             // (count) the share that has a tensor, or -1
    bool releases;          // each tensor has its own optimizer and is stepped in the backward pass
    const char* stacked;    // of the settings, or null
    int64_t element, end;
    void* (*allocate)(void* context, int64_t bytes);  // the caller's, or null
    void* context;
    char describe[256];
    Taken blocks;  // all host memory of the optimizer
};

// The options of rules that each step's groups bring.
constexpr const char* GROUP_OPTIONS[] = {"beta1", "beta2", "eps", "weight_decay"};

// Returns where the value of a text setting is; null if there is no such setting.
const char** setting_text(NibbleOptim* optim, const char* key);
// Sets the optimizer's configuration, and resolves it.
void settings_read(NibbleOptim* optim, const char* const* settings);
// Refuses weights that parameters of this type cannot hold.
void require_weights(const NibbleOptim* optim, const Plan* plan);
// Copies and checks the caller's tensors, and lays out the arena.
void tensors_take(NibbleOptim* optim, const NibbleTensor* tensors);
// Returns true if another optimizer has the tensor (the setting `shares`).
bool is_elsewhere(const NibbleOptim* optim, int tensor);
