// Rows of words -> panels.
#pragma once

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

// Write a panel from kPanel rows of num_words words; a null row counts as zeros. Advances the stream once a square.
inline void pack_panel(const Word* const* rows, int64_t num_words, Word* panel, LineStream& stream) {
    int64_t whole = num_words / kLanes * kLanes;
    for (int first = 0; first < kPanel; first += kLanes) {
        for (int64_t k = 0; k < whole; k += kLanes) {
            stream.advance(4);
            Words block[kLanes];
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; ++i) block[i] = rows[first + i] ? load<Words>(rows[first + i] + k) : Words{};
            transpose(block);
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; ++i) store(panel + (k + i) * kPanel + first, block[i]);
        }
        for (int64_t k = whole; k < num_words; ++k)
            for (int i = 0; i < kLanes; ++i) panel[k * kPanel + first + i] = rows[first + i] ? rows[first + i][k] : 0;
    }
}

// A weight [num_outputs, num_inputs], rows contiguous -> panels of 32 outputs, zeros after the last.
// Paired: the weight stacks two matrices, and a panel holds outputs [16 p, 16 p + 16) of the first, then of the second,
// so that one tile has a gate and its up.
template <class T>
inline void pack_weight(const T* weight, int64_t num_outputs, int64_t num_inputs, bool paired, Word* panels) {
    constexpr int kHalf = kPanel / 2;
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
            rows[i] = output < limit ? reinterpret_cast<const Word*>(row) : nullptr;
        }
        pack_panel(rows, num_words, panels + p * num_words * kPanel, nothing);
    }
}

// Rows of values of consecutive positions, head_dim elements each -> steps over positions, `width` outputs each
// (head_dim rounded up to whole panels). An odd last position is paired with zeros. Advances the stream every two.
inline void pack_values(const float* const* rows, int64_t num_rows, int64_t head_dim, int64_t width, Word* steps,
                        LineStream& stream) {
    for (int64_t t = 0; t < num_rows; ++t) {
        if (t % 2 == 0) stream.advance(2);
        std::memcpy(steps + t * width, rows[t], head_dim * sizeof(float));
    }
}

inline void pack_values(const BFloat16* const* rows, int64_t num_rows, int64_t head_dim, int64_t width, Word* steps,
                        LineStream& stream) {
    WideHalves low, high;
    for (int i = 0; i < 2 * kLanes; ++i) {
        low[i] = i / 2 + (i % 2) * 2 * kLanes;
        high[i] = kLanes + low[i];
    }
    int64_t whole = head_dim / (2 * kLanes) * (2 * kLanes);
    for (int64_t t = 0; t < num_rows; t += 2, steps += width) {
        stream.advance(2);
        const BFloat16 *first = rows[t], *second = t + 1 < num_rows ? rows[t + 1] : nullptr;
        for (int64_t d = 0; d < whole; d += 2 * kLanes) {
            WideHalves a = load<WideHalves>(first + d), b = second ? load<WideHalves>(second + d) : WideHalves{};
            store(steps + d, __builtin_shuffle(a, b, low));
            store(steps + d + kLanes, __builtin_shuffle(a, b, high));
        }
        for (int64_t d = whole; d < head_dim; ++d)
            steps[d] = first[d].bits | (second ? (Word)second[d].bits << 16 : 0);
    }
}

}  // namespace radixrt
