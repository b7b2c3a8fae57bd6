// Rows of words -> panels.
#pragma once

#include <vector>

#include "prefetch.h"
#include "tile.h"

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

// Transpose a square: swap the off-diagonal quarters of ever smaller squares.
inline void transpose(Words (&block)[kLanes]) {
    if constexpr (kLanes > 8) exchange_all<8>(block);
    if constexpr (kLanes > 4) exchange_all<4>(block);
    exchange_all<2>(block);
    exchange_all<1>(block);
}

// Write a panel from kPanel rows of num_words words. Advances the stream with every square.
inline void pack_panel(const Word* const* rows, int64_t num_words, Word* panel, LineStream& stream) {
    int64_t whole = num_words / kLanes * kLanes;
    for (int first = 0; first < kPanel; first += kLanes) {
        for (int64_t k = 0; k < whole; k += kLanes) {
            stream.advance(4);
            Words block[kLanes];
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; ++i) block[i] = load<Words>(rows[first + i] + k);
            transpose(block);
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; ++i) store(panel + (k + i) * kPanel + first, block[i]);
        }
        for (int64_t k = whole; k < num_words; ++k)
            for (int i = 0; i < kLanes; ++i) panel[k * kPanel + first + i] = rows[first + i][k];
    }
}

// A weight [num_outputs, num_inputs], rows contiguous -> panels of 32 outputs, zeros after the last.
// Paired: the weight stacks two matrices, and a panel holds outputs [16 p, 16 p + 16) of the first, then of the second,
// so that one tile has a gate and its up.
template <class T>
inline void pack_weight(const T* weight, int64_t num_outputs, int64_t num_inputs, bool paired, Word* panels) {
    constexpr int kHalf = kPanel / 2;
    const std::vector<Word> zeros(num_inputs);
    LineStream nothing;
    int64_t num_words = num_inputs / kWordElements<T>, half = num_outputs / 2;
    int64_t num_panels = paired ? (half + kHalf - 1) / kHalf : (num_outputs + kPanel - 1) / kPanel;
    for (int64_t p = 0; p < num_panels; ++p) {
        const Word* rows[kPanel];
        for (int64_t i = 0; i < kPanel; ++i) {
            int64_t output = p * kPanel + i, limit = num_outputs;
            if (paired) {
                output = p * kHalf + i % kHalf;
                limit = half;
            }
            const T* row = weight + (output + (paired && i >= kHalf ? half : 0)) * num_inputs;
            rows[i] = output < limit ? reinterpret_cast<const Word*>(row) : zeros.data();
        }
        pack_panel(rows, num_words, panels + p * num_words * kPanel, nothing);
    }
}

// Rows of values of consecutive positions, head_dim elements each -> steps over positions, `width` outputs each
// (head_dim rounded up to whole panels). A pair of rows is one step of bfloat16: the row after an odd last one is read.
// Advances the stream every two rows.
inline void pack_values(const float* const* rows, int64_t num_rows, int64_t head_dim, int64_t width, Word* steps,
                        LineStream& stream) {
    for (int64_t t = 0; t < num_rows; ++t) {
        if (t % 2 == 0) stream.advance(2);
        std::memcpy(steps + t * width, rows[t], head_dim * sizeof(float));
    }
}

// Two rows of 2 * kLanes elements -> words of an element of the first, then of the second.
inline void interleave(const BFloat16* first, const BFloat16* second, Words& low, Words& high) {
    WideHalves to_low, to_high, a = load<WideHalves>(first), b = load<WideHalves>(second);
    for (int i = 0; i < 2 * kLanes; ++i) {
        to_low[i] = i / 2 + (i % 2) * 2 * kLanes;
        to_high[i] = kLanes + to_low[i];
    }
    low = (Words)__builtin_shuffle(a, b, to_low);
    high = (Words)__builtin_shuffle(a, b, to_high);
}

inline void pack_values(const BFloat16* const* rows, int64_t num_rows, int64_t head_dim, int64_t width, Word* steps,
                        LineStream& stream) {
    int64_t whole = head_dim / (2 * kLanes) * (2 * kLanes);
    for (int64_t t = 0; t < num_rows; t += 2, steps += width) {
        stream.advance(2);
        const BFloat16 *first = rows[t], *second = rows[t + 1];
        for (int64_t d = 0; d < whole; d += 2 * kLanes) {
            Words low, high;
            interleave(first + d, second + d, low, high);
            store(steps + d, low);
            store(steps + d + kLanes, high);
        }
        for (int64_t d = whole; d < head_dim; ++d) steps[d] = first[d].bits | (Word)second[d].bits << 16;
    }
}

}  // namespace radixrt
