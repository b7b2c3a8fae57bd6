// Products with a block of keys and values that few rows need: straight from the pages, nothing is written down.
//
// With fewer rows than it takes to pay for packing. The sums run in the same order as over panels, so the results are
// the same to the bit.
#pragma once

#include "pack.h"

namespace radixrt {

// Measured with 3 rows, one thread: 1.5 ms against 1.9 ms packed for 32 sequences of 1,024 (H=9, G=3, D=64).
constexpr int kMaxDirectRows = kLanes == 16 ? 4 : 0;
// Positions whose values are added for one head before the next has its turn: few, so that memory is read nearly in the
// order of its addresses; more save loads of the sums.
constexpr int64_t kValuePositions = 8;

// Whether head_dim elements fill whole vectors, which both products need.
template <class T>
constexpr bool fits_directly(int64_t head_dim) {
    return head_dim % kPanel == 0 && head_dim / kWordElements<T> % kLanes == 0;
}

// Lines that near requests run ahead of what is read: 48 and 96 were no better.
constexpr int64_t kNearLead = 64;

// scores[r][i] = q[r] . keys[i] for i < kLanes; key i starts at keys[i] + at.
template <class T, int kRows>
[[gnu::always_inline]] inline void score_directly(const Word* q, int64_t row_words, const Word* const* keys, int64_t at,
                                                  float* scores, int64_t score_stride, FarLines& far,
                                                  NearLines& near) {
    Floats sums[kRows] = {};
    for (int64_t k = 0; k < row_words; k += kLanes) {
        Words block[kLanes];
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
            if (i % 8 == 0) near.advance<8>();
            block[i] = load<Words>(keys[i] + at + k);
        }
        transpose(block);
#pragma GCC unroll 16
        for (int i = 0; i < kLanes; ++i) {
            if (i % 8 == 0) far.advance<8>();
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r)
                sums[r] = multiply_add<T>(sums[r], block[i], splat_word(q[r * row_words + k + i]));
        }
    }
    for (int r = 0; r < kRows; ++r) store(scores + r * score_stride, sums[r]);
}

// One step of kVectors vectors of values: one position (float) or two.
template <int kVectors>
inline void load_values(const float* const* values, int64_t at, Words (&step)[kVectors]) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) step[v] = load<Words>(values[0] + at + v * kLanes);
}

template <int kVectors>
inline void load_values(const BFloat16* const* values, int64_t at, Words (&step)[kVectors]) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v += 2)
        interleave(values[0] + at + v * kLanes, values[1] + at + v * kLanes, step[v], step[v + 1]);
}

// Add to running[r] the weighted values of kVectors vectors of dimensions, num_steps steps; those of a position start
// at values[i] + at.
template <class T, int kRows, int kVectors>
[[gnu::always_inline]] inline void add_values_directly(const Word* weights, int64_t weight_stride,
                                                       const T* const* values, int64_t at, int64_t num_steps,
                                                       float* running, int64_t running_stride, FarLines& far,
                                                       NearLines& near) {
    Floats sums[kRows][kVectors];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sums[r][v] = load<Floats>(running + r * running_stride + v * kLanes);
    for (int64_t k = 0; k < num_steps; ++k) {
        far.advance<kVectors>();
        Words step[kVectors];
        load_values(values + k * kWordElements<T>, at, step);
        near.advance<kVectors>();
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
            Words weight = splat_word(weights[r * weight_stride + k]);
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) sums[r][v] = multiply_add<T>(sums[r][v], step[v], weight);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) store(running + r * running_stride + v * kLanes, sums[r][v]);
}

}  // namespace radixrt
