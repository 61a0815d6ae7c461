// The names of the presets, for tests that loop over them; those whose rule reads matrices are matrix.cu's.
#pragma once
#include "../../optim/table.cuh"

constexpr bool is_matrix_preset(const PresetRow& row) {
    constexpr const char* rules[] = {OPTIM_MATRIX_RULES(OPTIM_NAME)};
    for (const char* rule : rules) {
        int i = 0;
        while (rule[i] && rule[i] == row.rule[i]) i++;
        if (rule[i] == row.rule[i]) return true;
    }
    return false;
}

constexpr int element_preset_count() {
    int count = 0;
    for (const PresetRow& row : PRESETS) count += !is_matrix_preset(row);
    return count;
}
constexpr int ELEMENT_PRESETS = element_preset_count();

struct PresetNames {
    const char* name[ELEMENT_PRESETS];
};

constexpr PresetNames preset_names_create() {
    PresetNames names = {};
    int i = 0;
    for (const PresetRow& row : PRESETS) {
        if (!is_matrix_preset(row)) names.name[i++] = row.name;
    }
    return names;
}

static constexpr PresetNames all_presets = preset_names_create();
