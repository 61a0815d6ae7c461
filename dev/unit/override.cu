// Tests of --override: what matches, and what is refused. That tensors get their rules, rates and decays is tested in
// laws_oracle.cu, their formats in laws_narrow, and rules that
// do not go together in commands.txt.
#include "../../optim/override.h"
#include "steps.h"

TEST(override_patterns) {
    const std::tuple<const char*, const char*, bool> rows[] = {
        {"wpe", "wpe.weight", true},
        {"wpe", "xwpe.weight", false},
        {"wpe", "wpex.weight", false},
        {"wpe|ln*", "h.3.ln_1.weight", true},
        {"wpe|ln*", "ln_f.bias", true},
        {"wpe|ln*", "h.3.mlp.c_fc.weight", false},
        {"*.bias", "h.3.mlp.c_fc.bias", true},
        {"*.bias", "h.3.mlp.c_fc.weight", false},
        {"h.3", "h.3.ln_1.weight", true},
        {"h.3", "h.31.ln_1.weight", false},
        {"h.?.attn", "h.3.attn.c_attn.weight", true},
        {"h.?.attn", "h.31.attn.c_attn.weight", false},
        {"c_attn.weight", "h.3.attn.c_attn.weight", true},
        {"*", "wte.weight", true},
        {"wte.weight", "wte.weight", true},
        {"wte.weight.more", "wte.weight", false},
        {"h.*.c_attn.weight", "h.3.attn.c_attn.weight", true},
        {"h.*.c_attn", "h.3.attn.c_attn.weight", true},
        {"*t*n*.bias", "h.3.attn.c_attn.bias", true},
        {"*t*n*.bias", "h.3.attn.c_attn.weight", false},
        {"l*_?", "h.3.ln_1.weight", true},
        {"l*_?", "h.3.ln_12.weight", false},
        {"***", "wte.weight", true},
        {"****************************************z", "h.3.mlp.c_fc.weight", false}};
    for (const auto& [patterns, name, matches] : rows) {
        char text[128];
        Override parsed[OVERRIDES];
        int count;
        snprintf(text, sizeof(text), " %s : lr=2 ;", patterns);
        expect(overrides_parse(text, parsed, &count, error) && count == 1, "%s", error);
        expect(patterns_match(parsed[0].patterns, name) == matches, "%s and %s", patterns, name);
    }
    char longest[200] = "w";
    for (int i = 0; i < 11; i++) strcat(longest, "|h.3.attn.c_");
    Override parsed[OVERRIDES];
    int count;
    strcat(longest, ":m=fp32");
    expect_refused(overrides_parse(longest, parsed, &count, error), error, "more than 127");
    expect(overrides_parse(longest + 10, parsed, &count, error), "%s", error);
}
