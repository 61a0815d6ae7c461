// The names of the presets, for tests that loop over them.
#pragma once
#include "../../optim/table.cuh"

struct PresetNames {
    const char* name[PRESET_COUNT];
};

constexpr PresetNames preset_names_create() {
    PresetNames names = {};
    for (int i = 0; i < PRESET_COUNT; i++) names.name[i] = PRESETS[i].name;
    return names;
}

static constexpr PresetNames all_presets = preset_names_create();
