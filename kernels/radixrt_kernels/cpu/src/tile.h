// The one inner product of the step: a few rows against a panel of 32 outputs, kept in registers. (Where there is a
// matrix unit, products with weights have another one: amx_product.h.)
//
// A panel holds, step by step, one word of each of its 32 outputs; a step is one element (float) or two (bfloat16):
//
//     panel:  step 0 [w0 w1 ... w31] | step 1 [w0 w1 ... w31] | ...        row:  [x0][x1]...
//
// Every result is the sum over steps in order, whatever the number of rows: so a row's result does not depend on the
// rows beside it. Weights, a sequence's keys and its values all come as panels.
#pragma once

#include "vector.h"

namespace radixrt {

constexpr int kPanel = 32;
constexpr int kPanelVectors = kPanel / kLanes;
// Accumulators may fill the registers but for a panel's step and one broadcast: 32 registers, else 16.
constexpr int kMaxTileRows = kLanes == 16 ? 12 : kLanes == 8 ? 3 : 1;

template <class T>
constexpr int kWordElements = 4 / sizeof(T);

template <class T>
inline Floats multiply_add(Floats sum, Words panel, Words row);

template <>
inline Floats multiply_add<float>(Floats sum, Words panel, Words row) {
    return sum + as_floats(panel) * as_floats(row);
}

template <>
inline Floats multiply_add<BFloat16>(Floats sum, Words panel, Words row) {
#if defined(__AVX512BF16__)
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)panel, (__m512bh)row);
#else
    const Words high = splat_word(0xffff0000);
    sum = sum + as_floats(panel << 16) * as_floats(row << 16);
    return sum + as_floats(panel & high) * as_floats(row & high);
#endif
}

// Add to sums[r] the product of row r with the panel.
//   each_step: called once a step, to ask for memory.
//   rows: kRows rows of num_steps words, row_stride words apart; panel: steps of kPanel words, step_stride words apart.
template <class T, int kRows, class Each>
inline void multiply(const Word* rows, int64_t row_stride, const Word* panel, int64_t step_stride, int64_t num_steps,
                     Floats (&sums)[kRows][kPanelVectors], Each&& each_step) {
    // Groups of four rows share a base, so that every address is a base plus one of three strides.
    constexpr int kGroups = (kRows + 3) / 4;
    const Word* base[kGroups];
    for (int g = 0; g < kGroups; ++g) base[g] = rows + 4 * g * row_stride;
    for (int64_t k = 0; k < num_steps; ++k) {
        each_step();
        const Word* step = panel + k * step_stride;
        Words outputs[kPanelVectors];
#pragma GCC unroll 8
        for (int v = 0; v < kPanelVectors; ++v) outputs[v] = load<Words>(step + v * kLanes);
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) {
            Words row = splat_word(base[r / 4][(r % 4) * row_stride + k]);
#pragma GCC unroll 8
            for (int v = 0; v < kPanelVectors; ++v) sums[r][v] = multiply_add<T>(sums[r][v], outputs[v], row);
        }
    }
}

template <int kRows>
struct RowCount {
    static constexpr int value = kRows;
};

// Call function(RowCount<num_rows>), 1 <= num_rows <= kRows.
template <int kRows = kMaxTileRows, class Function>
inline void with_row_count(int64_t num_rows, Function& function) {
    if constexpr (kRows > 1) {
        if (num_rows < kRows) return with_row_count<kRows - 1>(num_rows, function);
    }
    function(RowCount<kRows>{});
}

// Cut num_rows into as few tiles as possible, all nearly equal: calls function(first row, RowCount).
template <class Function>
inline void for_each_tile(int64_t num_rows, Function&& function) {
    int64_t num_tiles = (num_rows + kMaxTileRows - 1) / kMaxTileRows;
    for (int64_t i = 0; i < num_tiles; ++i) {
        int64_t first = num_rows * i / num_tiles, stop = num_rows * (i + 1) / num_tiles;
        auto run = [&](auto count) { function(first, count); };
        with_row_count(stop - first, run);
    }
}

}  // namespace radixrt
