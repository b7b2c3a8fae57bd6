// Vectors that begin with a line of the cache.
#pragma once

#include <new>
#include <vector>

namespace radixrt {

template <class T>
struct LineAllocator {
    using value_type = T;
    static constexpr std::align_val_t kLine{64};

    LineAllocator() = default;
    template <class Other>
    LineAllocator(const LineAllocator<Other>&) {}

    T* allocate(std::size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), kLine)); }
    void deallocate(T* data, std::size_t) { ::operator delete(data, kLine); }
    bool operator==(const LineAllocator&) const { return true; }
};

// A tile of the matrix unit takes a line of each row; rows that begin in the middle of one would take two.
template <class T>
using Aligned = std::vector<T, LineAllocator<T>>;

}  // namespace radixrt
