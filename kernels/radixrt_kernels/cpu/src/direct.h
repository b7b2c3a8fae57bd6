// Products with a block of keys and values that few rows need: straight from the pages, nothing is written down.
//
// With fewer rows than it takes to pay for packing. The sums run in the same order as over panels, so the results are
// the same to the bit.
#pragma once

#include "pack.h"

namespace radixrt {

// Measured with 3 rows, one thread: 1.5 ms against 1.9 ms packed for 32 sequences of 1,024 (H=9, G=3, D=64).
constexpr int kMaxDirectRows = kLanes == 16 ? 4 : 0;
// More rows in two passes over a block. Measured where pairs are widened, one thread, 32 sequences of 1,024: 1.07 to
// 1.22 times as fast as packed with 5 to 8 rows. Elsewhere it was not measured.
constexpr int kDirectPasses = kWidens ? 2 : 1;
// Positions whose values are added for one head before the next has its turn: few, so that memory is read nearly in the
// order of its addresses; more save loads of the sums.
constexpr int64_t kValuePositions = 8;

// Whether head_dim elements fill whole vectors, which both products need.
template <class T>
constexpr bool fits_directly(int64_t head_dim) {
    return head_dim % kPanel == 0 && head_dim / kWordElements<T> % kLanes == 0;
}

#if defined(__AVX512F__)
// Write each step of a row in the order of quartered() four times: what a quarter of four keys' words is multiplied by.
inline void widen(const Word* q, int64_t num_steps, Word* wide) {
    const int64_t quarter = num_steps / 4;
    for (int64_t k = 0; k < quarter; k += kQuarterWords, wide += 4 * kLanes) {
        __m512i words = _mm512_castsi128_si512(load<__m128i>(q + k));
        words = _mm512_inserti32x4(words, load<__m128i>(q + quarter + k), 1);
        words = _mm512_inserti32x4(words, load<__m128i>(q + 2 * quarter + k), 2);
        words = _mm512_inserti32x4(words, load<__m128i>(q + 3 * quarter + k), 3);
        store(wide, _mm512_shuffle_epi32(words, _MM_PERM_AAAA));
        store(wide + kLanes, _mm512_shuffle_epi32(words, _MM_PERM_BBBB));
        store(wide + 2 * kLanes, _mm512_shuffle_epi32(words, _MM_PERM_CCCC));
        store(wide + 3 * kLanes, _mm512_shuffle_epi32(words, _MM_PERM_DDDD));
    }
}

// scores[r][i] = q[r] . keys[i] for i < kLanes; key i starts at keys[i] + at. Asks for the lines at near[i] + near_at.
//   wide_q: rows of widen().
template <class T, int kRows>
[[gnu::always_inline]] inline void score_directly(const Word* wide_q, int64_t row_words, const Word* const* keys,
                                                  int64_t at, const Word* const* near, int64_t near_at, float* scores,
                                                  int64_t score_stride, FarLines& far) {
    constexpr int kSteps = kHeldSteps<T>;
    Floats sums[kRows][4] = {};
    for (int64_t k = 0; k < row_words; k += kLanes) {
#pragma GCC unroll 2
        for (int first = 0; first < 4; first += 2) {
            Words block[8];
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) {
                __builtin_prefetch(near[4 * first + i] + near_at + k, 0, 3);
                block[i] = load<Words>(keys[4 * first + i] + at + k);
            }
            transpose_quarters(block);
            transpose_quarters(block + 4);
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) {
                far.advance<2>();
                Words one[kSteps], two[kSteps];
                split(block[i], one);
                split(block[4 + i], two);
#pragma GCC unroll 4
                for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
                    for (int s = 0; s < kSteps; ++s) {
                        Words q = load<Words>(wide_q + ((r * row_words + k) * 4 + i * kLanes) * kSteps + s * kLanes);
                        sums[r][first] = multiply_add<Held<T>>(sums[r][first], one[s], q);
                        sums[r][first + 1] = multiply_add<Held<T>>(sums[r][first + 1], two[s], q);
                    }
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
        Words a = as_words(sums[r][0]), b = as_words(sums[r][1]), c = as_words(sums[r][2]), d = as_words(sums[r][3]);
        exchange_quarters(a, b, c, d);
        store(scores + r * score_stride, as_floats(a) + as_floats(b) + as_floats(c) + as_floats(d));
    }
}
#endif

// kVectors vectors of values of one position (float), or of two: as one step of pairs, or as two of floats. Asks for
// the same at `near`.
template <int kVectors>
inline void load_values(const float* const* values, int64_t at, const float* const* near, int64_t near_at,
                        Words (&steps)[1][kVectors]) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
        __builtin_prefetch(near[0] + near_at + v * kLanes, 0, 3);
        steps[0][v] = load<Words>(values[0] + at + v * kLanes);
    }
}

template <int kVectors>
inline void load_values(const BFloat16* const* values, int64_t at, const BFloat16* const* near, int64_t near_at,
                        Words (&steps)[1][kVectors]) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; v += 2) {
        __builtin_prefetch(near[0] + near_at + v * kLanes, 0, 3);
        __builtin_prefetch(near[1] + near_at + v * kLanes, 0, 3);
        interleave(values[0] + at + v * kLanes, values[1] + at + v * kLanes, steps[0][v], steps[0][v + 1]);
    }
}

template <int kVectors>
inline void load_values(const BFloat16* const* values, int64_t at, const BFloat16* const* near, int64_t near_at,
                        Words (&steps)[2][kVectors]) {
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; v += 2) {
            __builtin_prefetch(near[i] + near_at + v * kLanes, 0, 3);
            Words halves[2];
            split(load<Words>(values[i] + at + v * kLanes), halves);
            steps[i][v] = halves[0], steps[i][v + 1] = halves[1];
        }
}

// Add to running[r] the weighted values of kVectors vectors of dimensions, num_words words of weights as they would be
// stored; the values of a position start at values[i] + at.
template <class T, int kRows, int kVectors>
[[gnu::always_inline]] inline void add_values_directly(const Word* weights, int64_t weight_stride,
                                                       const T* const* values, int64_t at, const T* const* near,
                                                       int64_t near_at, int64_t num_words,
                                                       float* running, int64_t running_stride, FarLines& far) {
    Floats sums[kRows][kVectors];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) sums[r][v] = load<Floats>(running + r * running_stride + v * kLanes);
    constexpr int kSteps = kHeldSteps<T>;
    for (int64_t k = 0; k < num_words; ++k) {
        far.advance<kVectors>();
        Words steps[kSteps][kVectors];
        load_values(values + k * kWordElements<T>, at, near + k * kWordElements<T>, near_at, steps);
#pragma GCC unroll 2
        for (int s = 0; s < kSteps; ++s)
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) {
                Words weight = splat_word(weights[r * weight_stride + k * kSteps + s]);
#pragma GCC unroll 4
                for (int v = 0; v < kVectors; ++v) sums[r][v] = multiply_add<Held<T>>(sums[r][v], steps[s][v], weight);
            }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) store(running + r * running_stride + v * kLanes, sums[r][v]);
}

}  // namespace radixrt
