// Rows against a panel of bfloat16 (tile.h) in float32: for CPUs with float16 products, which take four times as long for pairs
// of bfloat16 (vdpbf16ps) as for the same number of float32 products. Exact products, float32 sums: for what bounds are proved
// of (rough.h).
#pragma once

#include "aligned.h"
#include "held.h"
#include "prefetch.h"

namespace radixrt {

struct Wide {};

// sums[r] = the product of row r with the panel: of every step the first input, then the second.
//   rows: kRows rows of 2 * num_steps floats, row_stride apart.
template <int kRows>
[[gnu::noinline]] void multiply_wide(const float* rows, int64_t row_stride, const Word* panel, int64_t num_steps,
                                     Floats (&sums)[kRows][kPanelVectors], NextLines next) {
    constexpr int kGroups = (kRows + 3) / 4;
    const Words high = splat_word(0xffff0000);
    const float* base[kGroups];
    for (int g = 0; g < kGroups; ++g) base[g] = rows + 4 * g * row_stride;
    Floats found[kRows][kPanelVectors] = {};
    for (int64_t k = 0; k < num_steps; ++k, panel += kPanel) {
        next();
        Floats first[kPanelVectors], second[kPanelVectors];
#pragma GCC unroll 8
        for (int v = 0; v < kPanelVectors; ++v) {
            const Words words = load<Words>(panel + v * kLanes);
            first[v] = as_floats(words << 16), second[v] = as_floats(words & high);
        }
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) {
            const float* inputs = base[r / 4] + (r % 4) * row_stride + 2 * k;
            const Floats even = splat(inputs[0]), odd = splat(inputs[1]);
#pragma GCC unroll 8
            for (int v = 0; v < kPanelVectors; ++v) {
                found[r][v] += first[v] * even;
                found[r][v] += second[v] * odd;
            }
        }
    }
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kPanelVectors; ++v) sums[r][v] = found[r][v];
}

// How multiply_all_vectors multiplies them. Every thread widens the rows that it needs itself.
class WideProduct {
public:
    static constexpr int kAskingTiles = 2;
    static int64_t panel_words(int64_t num_steps) { return num_steps * kPanel; }

    WideProduct(Aligned<float>& rows, const Word* inputs, int64_t row_stride, int64_t num_steps)
        : rows_(rows), inputs_(inputs), row_stride_(row_stride), num_steps_(num_steps) {}

    void take(int64_t first_row, int64_t stop_row) {
        if (first_row == first_ && stop_row == stop_) return;
        first_ = first_row, stop_ = stop_row;
        const int64_t width = 2 * num_steps_;
        if ((int64_t)rows_.size() < (stop_row - first_row) * width) rows_.resize((stop_row - first_row) * width);
        float* to = rows_.data();
        for (int64_t row = first_row; row < stop_row; ++row, to += width)
            to_floats(reinterpret_cast<const BFloat16*>(inputs_ + row * row_stride_), width, to);
    }

    template <int kRows>
    void multiply(int64_t first, const Word* panel, Floats (&sums)[kRows][kPanelVectors], NextLines next) const {
        multiply_wide<kRows>(rows_.data() + first * 2 * num_steps_, 2 * num_steps_, panel, num_steps_, sums, next);
    }

private:
    Aligned<float>& rows_;
    const Word* const inputs_;
    const int64_t row_stride_, num_steps_;
    int64_t first_ = 0, stop_ = 0;  // rows that were taken
};

}  // namespace radixrt
