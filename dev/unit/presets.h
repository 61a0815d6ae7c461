// The names of the presets, for tests that loop over them; those whose rule reads rows or matrices are rows.cu's and
// matrix.cu's.
#pragma once
#include "../../optim/table.cuh"

constexpr const char* GRADS_NAMES[] = {OPTIM_GRADS(OPTIM_NAME)};

struct RuleKind {
    const char* name;
    bool whole;
};
#define RULE_KIND(NAME, NOTE, SLOWER, TYPE) {NAME, TYPE::BY_ROWS || TYPE::MATRIX != MATRIX_NONE},
constexpr RuleKind RULE_KINDS[] = {OPTIM_ALL_RULES(RULE_KIND)};

constexpr bool reads_whole(const PresetRow& row) {
    for (const RuleKind& kind : RULE_KINDS) {
        int i = 0;
        while (kind.name[i] && kind.name[i] == row.rule[i]) i++;
        if (kind.name[i] == row.rule[i]) return kind.whole;
    }
    return false;
}

constexpr int element_preset_count() {
    int count = 0;
    for (const PresetRow& row : PRESETS) count += !reads_whole(row);
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
        if (!reads_whole(row)) names.name[i++] = row.name;
    }
    return names;
}

static constexpr PresetNames all_presets = preset_names_create();
