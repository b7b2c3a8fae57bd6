// Rows times packed weights, cut into items for the team.
#pragma once

#include "pack.h"
#include "team.h"

namespace radixrt {

// Rows of a block: their inputs stay in a core's second-level cache while all panels pass by.
constexpr int64_t kRowBlockBytes = 384 << 10;

// A packed weight: panels of num_steps steps each.
struct Weight {
    const Word* panels;
    int64_t num_panels;
    int64_t num_steps;
};

// Lines of the next panel to ask for per step, of the two that a step has. Few rows are done before the memory answers:
// the hardware, which sees one long run, does as well for them.
inline int64_t lines_ahead(int64_t num_rows, int64_t tile) {
    constexpr int64_t kFewRows = 4;
    if (num_rows <= kFewRows) return 0;
    return num_rows <= kMaxTileRows ? 2 : tile < 2;
}

// Multiply num_rows rows of inputs (row_stride words apart) with every panel; all threads of the team call this.
// store(row, panel index, sums) gets kPanelVectors vectors: the panel's outputs for that row.
template <class T, class Store>
inline void multiply_all(Team& team, int thread, const Word* inputs, int64_t row_stride, int64_t num_rows,
                         const Weight& weight, Store&& store) {
    int64_t block_rows = kRowBlockBytes / (4 * weight.num_steps) / kMaxTileRows * kMaxTileRows;
    block_rows = block_rows < kMaxTileRows ? kMaxTileRows : block_rows;
    int64_t num_blocks = (num_rows + block_rows - 1) / block_rows;
    team.for_each(thread, num_blocks * weight.num_panels, [&](int64_t item) {
        int64_t block = item / weight.num_panels, panel_index = item % weight.num_panels;
        int64_t first_row = num_rows * block / num_blocks, stop_row = num_rows * (block + 1) / num_blocks;
        const Word* panel = weight.panels + panel_index * weight.num_steps * kPanel;
        // The next panel comes from memory while the first tiles multiply this one.
        int64_t item_rows = stop_row - first_row, num_tiles = 0;
        const char* next = reinterpret_cast<const char*>(panel + weight.num_steps * kPanel);
        for_each_tile(item_rows, [&](int64_t first, auto count) {
            constexpr int kRows = decltype(count)::value;
            int64_t lines_per_step = lines_ahead(item_rows, num_tiles++);
            Floats sums[kRows][kPanelVectors] = {};
            multiply<T, kRows>(inputs + (first_row + first) * row_stride, row_stride, panel, kPanel, weight.num_steps,
                               sums, [&] {
                                   for (int64_t i = 0; i < lines_per_step; ++i, next += kLineBytes)
                                       __builtin_prefetch(next, 0, 2);
                               });
            for (int r = 0; r < kRows; ++r) store(first_row + first + r, panel_index, sums[r]);
        });
    });
}

}  // namespace radixrt
