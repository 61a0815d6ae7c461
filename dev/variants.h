// Tables of variants, for the programs in dev/. A row says how to run a variant and how far it is from the plain C
// version; one that is wrong at a small shape is not timed.
#pragma once
#include "timing.h"

// The sizes that a variant works on. Programs that need fewer sizes leave the others 0.
struct Shape {
    int64_t N;
    int C = 0, OC = 0, NH = 0, T = 0;
};

// Arrays is a Room that is made of a device and a Shape, has it as `shape`, and says by unit() what `work` counts.
template <class Arrays>
struct Variant {
    const char* name;
    void (*run)(const Device* dev, const Arrays* arrays);
    double work;  // bytes or FLOPs of a run, in units of Arrays
    // Runs it once. Returns its error as a multiple of what rounding explains, so that 1 is the most.
    double (*error)(const Variant* v, Arrays* arrays);
};

// Returns the larger of two errors, or the one that is no number.
inline double worst(double a, double b) {
    return isnan(a) || a > b ? a : b;
}

// Returns how far an array is from what it should be, as a multiple of the bound of ||got - want|| / ||want||.
inline double off(Room* room, const bf16* got, const float* want, int64_t n, double bound = 1.0 / 256) {
    return relative_error(host_floats(room, got, n), want, n) / bound;
}
inline double off(Room* room, const float* got, const float* want, int64_t n, double bound = 1e-5) {
    return relative_error(room->to_host(got, n), want, n) / bound;
}

// Returns 0 if bytes on the device are as wanted.
inline double off_bits(Room* room, const void* got, const void* want, int64_t bytes) {
    return memcmp(room->to_host((const char*)got, bytes), want, (size_t)bytes) == 0 ? 0.0 : INFINITY;
}

// Checks each row at each of the small shapes. Returns the rows that are right.
template <class Arrays, size_t ROWS>
std::vector<Variant<Arrays>> right_ones(const Device* dev, const Variant<Arrays> (&rows)[ROWS],
                                        const std::vector<Shape>& small) {
    std::vector<Variant<Arrays>> right;
    for (const Variant<Arrays>& v : rows) {
        bool fine = true;
        for (const Shape& s : small) {
            Arrays arrays(dev, s);
            const double error = v.error(&v, &arrays);
            fine = fine && error <= 1.0;
            printf("%-38s N %6lld C %5d T %5d  error %.2f of its bound  %s\n", v.name, (long long)s.N, s.C, s.T, error,
                   error <= 1.0 ? "ok" : "WRONG");
        }
        if (fine) right.push_back(v);
    }
    return right;
}

// Times variants in turns on a warm card: half a second of the first, then seven rounds, in which each runs for 20 ms
// before its 20 ms count. `copy`, if not 0, is the rate of copies to compare bytes with; without it work is FLOPs.
template <class Arrays>
void time_in_turns(const Device* dev, const std::vector<Variant<Arrays>>& rows, const Shape& shape, double copy) {
    const Arrays arrays(dev, shape);
    std::vector<Times> times(rows.size());
    std::vector<int> repeat(rows.size(), 1);
    const auto ms_of = [&](size_t i) {
        const auto runs = [&] {
            for (int k = 0; k < repeat[i]; k++) rows[i].run(dev, &arrays);
        };
        return elapsed_ms(dev, runs) / repeat[i];
    };
    for (double warm = 0.0; !rows.empty() && warm < 500.0;) warm += ms_of(0);
    for (size_t i = 0; i < rows.size(); i++) repeat[i] = 1 + (int)(20.0 / ms_of(i));
    for (int round = 0; round < 7; round++) {
        for (size_t i = 0; i < rows.size(); i++) {
            ms_of(i);
            times[i].add(ms_of(i));
        }
    }
    for (size_t i = 0; i < rows.size(); i++) {
        const double ms = times[i].median(), work = rows[i].work * arrays.unit();
        printf("%-38s N %6lld C %5d T %5d %8.4f ms (%.4f to %.4f)", rows[i].name, (long long)shape.N, shape.C, shape.T,
               ms, times[i].ms[0], times[i].ms[times[i].count - 1]);
        if (copy > 0.0) printf(" %6.0f GB/s %5.1f %% of copy\n", work / ms * 1e-6, 100 * work / (1e-3 * ms) / copy);
        if (copy <= 0.0) printf(" %6.1f TFLOP/s\n", work / ms * 1e-9);
    }
    fflush(stdout);
}

// Checks each variant of a table at the small shapes, and times the right ones at the other shapes. A variant's work is
// counted in bytes, which are compared with the copy rate, or in FLOPs. Returns the exit status, and closes the device.
template <class Arrays, size_t ROWS>
int check_and_time(Device* dev, const Variant<Arrays> (&rows)[ROWS], const std::vector<Shape>& small,
                   const std::vector<Shape>& shapes, bool is_bytes) {
    const auto right = right_ones(dev, rows, small);
    if (!is_bytes) printf("%s\n", dev->name);
    const double copy = is_bytes ? print_copy_rate(dev, 2ll << 30) : 0.0;
    dev->warms_up = true;  // cuBLASLt's algorithms are searched for, in the operands' memory
    for (const Shape& s : shapes) time_in_turns(dev, right, s, copy);
    device_close(dev);
    return right.size() < ROWS;
}
