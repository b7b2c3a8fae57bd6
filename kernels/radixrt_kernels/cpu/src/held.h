// In which form products of attention take keys, values, queries and weights.
//
// As they are stored, a word a step (tile.h): a float, or a pair of bfloat16. Or widened, where products of floats have
// twice the rate of pairs, as on Intel's CPUs with AVX512-FP16: a pair becomes two steps of float, in packed blocks once,
// straight from the pages in registers. Products of bfloat16 are exact in float32, and weights need not be rounded.
//
// Not as float16: keys and values may be anything that bfloat16 holds, and scores of 100 need more than 11 bits.
#pragma once

#include <type_traits>

#include "tile.h"

namespace radixrt {

#if defined(__AVX512FP16__) || defined(RADIXRT_EMULATE_FP16)
constexpr bool kWidens = true;
#else
constexpr bool kWidens = false;
#endif

template <class T>
using Held = std::conditional_t<kWidens, float, T>;

// Steps that a word of T is held as.
template <class T>
constexpr int kHeldSteps = kWordElements<T> / kWordElements<Held<T>>;

// Words as steps of their own: of a pair of bfloat16 the first, then the second.
inline void split(Words words, Words (&steps)[1]) { steps[0] = words; }
inline void split(Words words, Words (&steps)[2]) {
    steps[0] = words << 16;
    steps[1] = words & splat_word(0xffff0000);
}

inline void to_floats(const BFloat16* row, int64_t num_elements, float* floats) {
    typedef uint16_t Halves8 __attribute__((vector_size(16)));
    typedef Word Words8 __attribute__((vector_size(32)));
    int64_t i = 0;
    for (; i + 8 <= num_elements; i += 8)
        store(floats + i, __builtin_convertvector(load<Halves8>(row + i), Words8) << 16);
    for (; i < num_elements; ++i) floats[i] = to_float(row[i]);
}

// A row in the form that products take.
template <class T>
inline void hold(const T* row, int64_t num_elements, Word* steps) {
    if constexpr (kHeldSteps<T> == 1) {
        std::memcpy(steps, row, num_elements * sizeof(T));
    } else {
        to_floats(row, num_elements, reinterpret_cast<float*>(steps));
    }
}

}  // namespace radixrt
