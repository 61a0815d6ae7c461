// Memory of the tests and of the programs in dev/: what a Room gives goes with the Room.
#pragma once
#include <vector>

#include "../kernels/common.cuh"

struct Room {
    const Device* dev;
    std::vector<void*> on_host, on_device;

    explicit Room(const Device* of) : dev(of) {}
    Room(const Room&) = delete;
    ~Room() { clear(); }

    void clear() {
        for (void* block : on_host) free(block);
        for (void* block : on_device) device_free(dev, block);
        on_host.clear(), on_device.clear();
    }

    // n values, not initialised.
    template <typename T>
    T* host(int64_t n) {
        on_host.push_back(memory_take(n * (int64_t)sizeof(T) + 1));
        return (T*)on_host.back();
    }

    template <typename T>
    T* zeros(int64_t n) {
        return (T*)memset((void*)host<T>(n), 0, (size_t)n * sizeof(T));
    }

    template <typename T>
    T* device(int64_t n) {
        on_device.push_back(device_alloc(dev, n * (int64_t)sizeof(T)));
        return (T*)on_device.back();
    }

    // Copies of n values: of the host on the host, and of each side on the other.
    template <typename T>
    T* copy(const T* from, int64_t n) {
        return (T*)memcpy((void*)host<T>(n), from, n * (int64_t)sizeof(T));
    }

    template <typename T>
    T* to_device(const T* from, int64_t n) {
        T* to = device<T>(n);
        copy_to_device(dev, to, from, n * (int64_t)sizeof(T));
        return to;
    }

    template <typename T>
    T* to_host(const T* from, int64_t n) {
        T* to = host<T>(n);
        copy_to_host(dev, to, from, n * (int64_t)sizeof(T));
        return to;
    }
};
