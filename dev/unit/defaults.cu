// Tests of the defaults that formats and storages leave members to (optim/formats/storage.cuh).
#include "cache.h"

// A format of 8 bits for numbers in [0, 1], elementwise; the argument says whether it has negative levels.
static const char* const unsigned_format =
    "struct Unit8 : FormatDefaults {\n"
    "    typedef uint8_t Code;\n"
    "    static constexpr const char* DTYPE = \"U8\";\n"
    "    MEMBER\n"
    "    static OPTIM_INLINE float decode(uint8_t code) { return exact_mul((float)code, 1.0f / 255.0f); }\n"
    "    static OPTIM_INLINE uint8_t encode(float x) { return (uint8_t)exact_min(x * 255.0f + 0.5f, 255.0f); }\n"
    "};\n"
    "OPTIM_FORMAT(\"unit8\", \"for v\", Elementwise<Unit8, NEAREST>)\n";

// An elementwise format without a sign serves v and is refused for m, in --m and in --override.
CACHE_TEST(JIT_TEST, defaults_unsigned_elementwise_is_not_for_m) {
    const char* folder = new_folder();
    const char* const rows[][6] = {
        {"a.cuh", "static constexpr bool SIGNED = false;", "fp32", "unit8", "", nullptr},
        {"b.cuh", "static constexpr bool SIGNED = false;", "unit8", "fp32", "", "holds no negative numbers"},
        {"c.cuh", "static constexpr bool SIGNED = false;", "fp32", "fp32", "wpe: m=unit8", "holds no negative numbers"},
        {"d.cuh", "", "unit8", "unit8", "", nullptr},
    };
    for (const auto& [name, member, m, v, overrides, holds] : rows) {
        put_text(joined(folder, name), replaced(unsigned_format, "MEMBER", member));
        OptimConfig config = {"", "", "fp32", "fp32", m, v, 0.9f, 0.95f, 1e-8f, 0.1f, 1};
        config.overrides = overrides;
        config.formats = joined(folder, name);
        error[0] = 0;
        bool good = optim_resolve(&config, error);
        expect(good == !holds, "--m %s --v %s %s: %s", m, v, overrides, error);
        if (holds) expect(strstr(error, holds), "\"%s\" should hold \"%s\"", error, holds);
    }
}
