// Products with a block of keys and values that few rows need: straight from the pages, nothing is written down.
//
// With fewer rows than it takes to pay for packing. The sums run in the same order as over panels, so the results are
// the same to the bit.
#pragma once

#include "pack.h"

namespace radixrt {

// Measured with 3 rows, one thread: 2.1 ms against 2.6 ms packed for 32 sequences of 1,024 (H=9, G=3, D=64).
constexpr int kMaxDirectRows = kLanes == 16 ? 4 : 0;
// How often the two products below advance a stream: per word of 16 keys, and per step of a panel of values.
constexpr int64_t kKeyUnits = 1, kValueUnits = 2;

// Whether head_dim elements fill whole vectors, which both products need.
template <class T>
constexpr bool fits_directly(int64_t head_dim) {
    return head_dim % kPanel == 0 && head_dim / kWordElements<T> % kLanes == 0;
}

// scores[r][i] = q[r] . keys[i] for i < num_keys, rounded up to whole vectors; keys there must be readable.
template <class T, int kRows>
inline void score_directly(const Word* q, int64_t row_words, const Word* const* keys, int64_t num_keys, float* scores,
                           int64_t score_stride, LineStream& stream) {
    for (int64_t first = 0; first < num_keys; first += kLanes) {
        Floats sums[kRows] = {};
        for (int64_t k = 0; k < row_words; k += kLanes) {
            Words block[kLanes];
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; ++i) block[i] = load<Words>(keys[first + i] + k);
            transpose(block);
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; ++i) {
                stream.advance(kKeyUnits);
#pragma GCC unroll 4
                for (int r = 0; r < kRows; ++r)
                    sums[r] = multiply_add<T>(sums[r], block[i], splat_word(q[r * row_words + k + i]));
            }
        }
        for (int r = 0; r < kRows; ++r) store(scores + r * score_stride + first, sums[r]);
    }
}

// One step of a panel of values: one position (float) or two.
inline void load_values(const float* const* values, int64_t d, Words (&step)[kPanelVectors]) {
    for (int v = 0; v < kPanelVectors; ++v) step[v] = load<Words>(values[0] + d + v * kLanes);
}

inline void load_values(const BFloat16* const* values, int64_t d, Words (&step)[kPanelVectors]) {
    for (int v = 0; v < kPanelVectors; v += 2)
        interleave(values[0] + d + v * kLanes, values[1] + d + v * kLanes, step[v], step[v + 1]);
}

// Add to sums[r] the weighted values of dimensions [d, d + kPanel), num_steps steps.
template <class T, int kRows>
inline void add_values_directly(const Word* weights, int64_t weight_stride, const T* const* values, int64_t d,
                                int64_t num_steps, Floats (&sums)[kRows][kPanelVectors], LineStream& stream) {
    for (int64_t k = 0; k < num_steps; ++k) {
        stream.advance(kValueUnits);
        Words step[kPanelVectors];
        load_values(values + k * kWordElements<T>, d, step);
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
            Words weight = splat_word(weights[r * weight_stride + k]);
            for (int v = 0; v < kPanelVectors; ++v) sums[r][v] = multiply_add<T>(sums[r][v], step[v], weight);
        }
    }
}

}  // namespace radixrt
