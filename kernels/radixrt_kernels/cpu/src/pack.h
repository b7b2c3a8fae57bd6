// Rows of words -> panels.
#pragma once

#include <vector>

#include "held.h"
#include "prefetch.h"

namespace radixrt {

inline int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

template <int kStride>
inline void exchange(Words& a, Words& b) {
    Words first, second;
    for (int lane = 0; lane < kLanes; ++lane) {
        first[lane] = lane & kStride ? kLanes + lane - kStride : lane;
        second[lane] = lane & kStride ? kLanes + lane : lane + kStride;
    }
    Words old = a;
    a = __builtin_shuffle(old, b, first);
    b = __builtin_shuffle(old, b, second);
}

template <int kStride>
inline void exchange_all(Words (&block)[kLanes]) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i)
        if (!(i & kStride)) exchange<kStride>(block[i], block[i + kStride]);
}

#if defined(__AVX512F__)
// Transpose 4 x 4 words within every quarter of four vectors.
[[gnu::always_inline]] inline void transpose_quarters(Words* block) {
    const __m512i a = (__m512i)block[0], b = (__m512i)block[1], c = (__m512i)block[2], d = (__m512i)block[3];
    const __m512i low = _mm512_unpacklo_epi32(a, b), high = _mm512_unpackhi_epi32(a, b);
    const __m512i next_low = _mm512_unpacklo_epi32(c, d), next_high = _mm512_unpackhi_epi32(c, d);
    block[0] = (Words)_mm512_unpacklo_epi64(low, next_low);
    block[1] = (Words)_mm512_unpackhi_epi64(low, next_low);
    block[2] = (Words)_mm512_unpacklo_epi64(high, next_high);
    block[3] = (Words)_mm512_unpackhi_epi64(high, next_high);
}

// Quarter j of vector i becomes quarter i of vector j.
[[gnu::always_inline]] inline void exchange_quarters(Words& a, Words& b, Words& c, Words& d) {
    const __m512i even = _mm512_shuffle_i32x4((__m512i)a, (__m512i)b, 0x88);
    const __m512i odd = _mm512_shuffle_i32x4((__m512i)a, (__m512i)b, 0xdd);
    const __m512i next_even = _mm512_shuffle_i32x4((__m512i)c, (__m512i)d, 0x88);
    const __m512i next_odd = _mm512_shuffle_i32x4((__m512i)c, (__m512i)d, 0xdd);
    a = (Words)_mm512_shuffle_i32x4(even, next_even, 0x88);
    b = (Words)_mm512_shuffle_i32x4(odd, next_odd, 0x88);
    c = (Words)_mm512_shuffle_i32x4(even, next_even, 0xdd);
    d = (Words)_mm512_shuffle_i32x4(odd, next_odd, 0xdd);
}

// Transpose a square: 4 x 4 within quarters of vectors, then the quarters. Half the price of general permutations.
inline void transpose(Words (&block)[kLanes]) {
#pragma GCC unroll 4
    for (int i = 0; i < kLanes; i += 4) transpose_quarters(block + i);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) exchange_quarters(block[i], block[i + 4], block[i + 8], block[i + 12]);
}
#else
// Transpose a square: swap the off-diagonal quarters of ever smaller squares.
inline void transpose(Words (&block)[kLanes]) {
    if constexpr (kLanes > 8) exchange_all<8>(block);
    if constexpr (kLanes > 4) exchange_all<4>(block);
    exchange_all<2>(block);
    exchange_all<1>(block);
}
#endif

// Where the words of a row of keys, and of queries, stand in panels. A score whose row fills whole vectors is four sums,
// one over each quarter of all vectors: products straight from the pages then need only transpose quarters (direct.h).
// The words of each sum stand together.
constexpr int kQuarterWords = 4;

inline bool has_quarters(int64_t num_words) { return kLanes == 4 * kQuarterWords && num_words % kLanes == 0; }

inline int64_t quartered(int64_t word, int64_t num_words) {
    int64_t lane = word % kLanes;
    return lane / kQuarterWords * (num_words / 4) + word / kLanes * kQuarterWords + lane % kQuarterWords;
}

// Write a panel from kPanel rows of num_words words, which start at rows[i] + at. Advances the stream with every
// square. Args: kIsQuartered: has_quarters(num_words), and the words are to stand so. kSteps: of a word (held.h).
template <bool kIsQuartered = false, int kSteps = 1>
inline void pack_panel(const Word* const* rows, int64_t at, int64_t num_words, Word* panel, FarLines& far) {
    int64_t whole = num_words / kLanes * kLanes;
    for (int first = 0; first < kPanel; first += kLanes) {
        for (int64_t k = 0; k < whole; k += kLanes) {
            far.advance<8>();
            Words block[kLanes];
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; ++i) block[i] = load<Words>(rows[first + i] + at + k);
            transpose(block);
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; ++i) {
                int64_t step = kIsQuartered ? quartered(k + i, num_words) : k + i;
                Words steps[kSteps];
                split(block[i], steps);
#pragma GCC unroll 2
                for (int s = 0; s < kSteps; ++s) store(panel + (step * kSteps + s) * kPanel + first, steps[s]);
            }
        }
        for (int64_t k = whole; k < num_words; ++k)
            for (int i = 0; i < kLanes; ++i) {
                Words steps[kSteps];
                split(splat_word(rows[first + i][at + k]), steps);
                for (int s = 0; s < kSteps; ++s) panel[(k * kSteps + s) * kPanel + first + i] = steps[s][0];
            }
    }
}

// Call function(panel index, its 32 rows) for every panel of a weight [num_outputs, num_inputs], rows contiguous; rows of zeros
// fill the last one. Paired: the weight stacks two matrices, and a panel holds outputs [16 p, 16 p + 16) of the first, then
// of the second, so that one tile has a gate and its up.
template <class T, class Function>
inline void for_each_panel(const T* weight, int64_t num_outputs, int64_t num_inputs, bool paired, Function&& function) {
    constexpr int kHalf = kPanel / 2;
    const std::vector<T> zeros(num_inputs);
    const int64_t half = num_outputs / 2;
    const int64_t num_panels = paired ? (half + kHalf - 1) / kHalf : (num_outputs + kPanel - 1) / kPanel;
    for (int64_t p = 0; p < num_panels; ++p) {
        const T* rows[kPanel];
        for (int64_t i = 0; i < kPanel; ++i) {
            int64_t output = p * kPanel + i, limit = num_outputs;
            if (paired) {
                output = p * kHalf + i % kHalf;
                limit = half;
            }
            const T* row = weight + (output + (paired && i >= kHalf ? half : 0)) * num_inputs;
            rows[i] = output < limit ? row : zeros.data();
        }
        function(p, rows);
    }
}

template <class T>
inline void pack_weight(const T* weight, int64_t num_outputs, int64_t num_inputs, bool paired, Word* panels) {
    FarLines nothing;
    const int64_t num_words = num_inputs / kWordElements<T>;
    for_each_panel(weight, num_outputs, num_inputs, paired, [&](int64_t p, const T* const* rows) {
        const Word* words[kPanel];
        for (int i = 0; i < kPanel; ++i) words[i] = reinterpret_cast<const Word*>(rows[i]);
        pack_panel(words, 0, num_words, panels + p * num_words * kPanel, nothing);
    });
}

// Rows of values of consecutive positions, head_dim elements each from rows[i] + at on -> steps over positions, `width`
// outputs each (head_dim rounded up to whole panels). A pair of rows is one step of bfloat16: the row after an odd last
// one is read. Advances the stream every two rows. The last argument is of the type that they are held in.
inline void pack_values(const float* const* rows, int64_t at, int64_t num_rows, int64_t head_dim, int64_t width,
                        Word* steps, FarLines& far, float) {
    for (int64_t t = 0; t < num_rows; ++t) {
        if (t % 2 == 0) far.advance<2>();
        std::memcpy(steps + t * width, rows[t] + at, head_dim * sizeof(float));
    }
}

// Two rows of 2 * kLanes elements -> words of an element of the first, then of the second. With AVX-512 the words of
// low and high take turns in fours, which costs less: put_in_order() undoes that in their sums.
inline void interleave(const BFloat16* first, const BFloat16* second, Words& low, Words& high) {
#if defined(__AVX512F__)
    low = (Words)_mm512_unpacklo_epi16(load<__m512i>(first), load<__m512i>(second));
    high = (Words)_mm512_unpackhi_epi16(load<__m512i>(first), load<__m512i>(second));
#else
    WideHalves to_low, to_high, a = load<WideHalves>(first), b = load<WideHalves>(second);
    for (int i = 0; i < 2 * kLanes; ++i) {
        to_low[i] = i / 2 + (i % 2) * 2 * kLanes;
        to_high[i] = kLanes + to_low[i];
    }
    low = (Words)__builtin_shuffle(a, b, to_low);
    high = (Words)__builtin_shuffle(a, b, to_high);
#endif
}

// Put the sums [num_elements] over steps of values into the order of the elements. Args: of the types that these are
// stored and held in.
inline void put_in_order(float*, int64_t, float, float) {}

inline void put_in_order(float* sums, int64_t num_elements, BFloat16, BFloat16) {
#if defined(__AVX512F__)
    Words to_low, to_high;
    for (int i = 0; i < kLanes; ++i) {
        to_low[i] = i / 8 * 4 + i % 4 + (i % 8 / 4) * kLanes;
        to_high[i] = 8 + to_low[i];
    }
    for (int64_t d = 0; d + 2 * kLanes <= num_elements; d += 2 * kLanes) {
        Floats low = load<Floats>(sums + d), high = load<Floats>(sums + d + kLanes);
        store(sums + d, __builtin_shuffle(low, high, to_low));
        store(sums + d + kLanes, __builtin_shuffle(low, high, to_high));
    }
#endif
}

inline void pack_values(const BFloat16* const* rows, int64_t at, int64_t num_rows, int64_t head_dim, int64_t width,
                        Word* steps, FarLines& far, BFloat16) {
    int64_t whole = head_dim / (2 * kLanes) * (2 * kLanes);
    for (int64_t t = 0; t < num_rows; t += 2, steps += width) {
        far.advance<2>();
        const BFloat16 *first = rows[t] + at, *second = rows[t + 1] + at;
        for (int64_t d = 0; d < whole; d += 2 * kLanes) {
            Words low, high;
            interleave(first + d, second + d, low, high);
            store(steps + d, low);
            store(steps + d + kLanes, high);
        }
        for (int64_t d = whole; d < head_dim; ++d) steps[d] = first[d].bits | (Word)second[d].bits << 16;
    }
}

// Widened: of 2 * kLanes elements the even ones, then the odd ones.
inline void pack_values(const BFloat16* const* rows, int64_t at, int64_t num_rows, int64_t head_dim, int64_t width,
                        Word* steps, FarLines& far, float) {
    int64_t whole = head_dim / (2 * kLanes) * (2 * kLanes);
    for (int64_t t = 0; t < num_rows; ++t, steps += width) {
        if (t % 2 == 0) far.advance<2>();
        const BFloat16* row = rows[t] + at;
        for (int64_t d = 0; d < whole; d += 2 * kLanes) {
            Words halves[2];
            split(load<Words>(row + d), halves);
            store(steps + d, halves[0]);
            store(steps + d + kLanes, halves[1]);
        }
        for (int64_t d = whole; d < head_dim; ++d) steps[d] = (Word)row[d].bits << 16;
    }
}

inline void put_in_order(float* sums, int64_t num_elements, BFloat16, float) {
    Words to_low, to_high;
    for (int i = 0; i < kLanes; ++i) {
        to_low[i] = i / 2 + i % 2 * kLanes;
        to_high[i] = kLanes / 2 + to_low[i];
    }
    for (int64_t d = 0; d + 2 * kLanes <= num_elements; d += 2 * kLanes) {
        Floats even = load<Floats>(sums + d), odd = load<Floats>(sums + d + kLanes);
        store(sums + d, __builtin_shuffle(even, odd, to_low));
        store(sums + d + kLanes, __builtin_shuffle(even, odd, to_high));
    }
}

}  // namespace radixrt
