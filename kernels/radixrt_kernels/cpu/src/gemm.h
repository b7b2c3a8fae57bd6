// Rows times packed weights, cut into items for the team.
#pragma once

#include <type_traits>

#include "amx_product.h"
#include "half_product.h"
#include "pack.h"
#include "team.h"
#include "wide_product.h"

namespace radixrt {

// Rows of a block: their inputs stay in a core's second-level cache while all panels pass by.
constexpr int64_t kRowBlockBytes = 384 << 10;

// A packed weight: panels of num_steps steps each.
struct Weight {
    const Word* panels;
    int64_t num_panels;
    int64_t num_steps;
};

// Where multiply_all's `store` puts a row's outputs of a panel. They lie in no near cache, so they are asked for before
// a tile multiplies: 1.06 times the speed with 512 rows.
struct Target {
    const void* data;
    int64_t row_bytes, panel_bytes;

    void ask(int64_t first_row, int64_t num_rows, int64_t panel) const {
        const char* at = static_cast<const char*>(data) + first_row * row_bytes + panel * panel_bytes;
        for (int64_t r = 0; r < num_rows; ++r, at += row_bytes)
            for (int64_t i = 0; i < panel_bytes; i += kLineBytes) __builtin_prefetch(at + i, 1, 3);
    }
};

// How far ahead a lone tile of rows asks for weights: a whole panel takes 1.05 times as long, with 8 rows.
constexpr int64_t kAheadBytes = 16 << 10;
// With no more rows nothing is gained by asking: they are done before the memory answers, and the hardware sees one
// long run.
constexpr int64_t kFewRows = 4;

// How multiply_all_vectors multiplies rows of words with panels of the same type.
template <class T>
class WordProduct {
public:
    // Of the tiles of a panel, how many ask for the next panel. Two take 1.08 times as long with 16 rows.
    static constexpr int kAskingTiles = 1;
    static int64_t panel_words(int64_t num_steps) { return num_steps * kPanel; }

    WordProduct(const Word* inputs, int64_t row_stride, int64_t num_steps)
        : inputs_(inputs), row_stride_(row_stride), num_steps_(num_steps) {}

    void take(int64_t first_row, int64_t) { block_ = inputs_ + first_row * row_stride_; }

    // Rows [first, first + kRows) of those that were taken.
    template <int kRows>
    void multiply(int64_t first, const Word* panel, Floats (&sums)[kRows][kPanelVectors], NextLines next) const {
        for (int r = 0; r < kRows; ++r)
            for (int v = 0; v < kPanelVectors; ++v) sums[r][v] = Floats{};
        radixrt::multiply<T, kRows>(block_ + first * row_stride_, row_stride_, panel, kPanel, num_steps_, sums,
                                    next);
    }

private:
    const Word* const inputs_;
    const int64_t row_stride_, num_steps_;
    const Word* block_ = nullptr;
};

// multiply_all on vectors.
template <class Product, class Store>
inline void multiply_all_vectors(Team& team, int thread, Product& product, int64_t num_rows, const Weight& weight,
                                 const Target& target, Store&& store) {
    const int64_t panel_words = Product::panel_words(weight.num_steps);
    int64_t block_rows = kRowBlockBytes / (4 * weight.num_steps) / kMaxTileRows * kMaxTileRows;
    block_rows = block_rows < kMaxTileRows ? kMaxTileRows : block_rows;
    int64_t num_blocks = (num_rows + block_rows - 1) / block_rows;
    team.for_each(thread, num_blocks * weight.num_panels, [&](int64_t item) {
        int64_t block = item / weight.num_panels, panel_index = item % weight.num_panels;
        int64_t first_row = num_rows * block / num_blocks, stop_row = num_rows * (block + 1) / num_blocks;
        const Word* panel = weight.panels + panel_index * panel_words;
        product.take(first_row, stop_row);
        // Panels lie one after another, and the last tiles ask for the next one, two lines at each of their steps together.
        const int64_t item_rows = stop_row - first_row, panel_bytes = panel_words * (int64_t)sizeof(Word);
        const bool is_lone = item_rows <= kMaxTileRows;
        const int64_t num_asking = is_lone ? 1 : Product::kAskingTiles;
        const char* next = reinterpret_cast<const char*>(panel) + (is_lone ? kAheadBytes : panel_bytes);
        for_each_tile(item_rows, [&](int64_t first, auto count) {
            constexpr int kRows = decltype(count)::value;
            constexpr int64_t kStepLines = kPanel * sizeof(Word) / kLineBytes;
            const int64_t later = (item_rows - first - 1) / kMaxTileRows;  // tiles
            const bool asks = later < num_asking && item_rows > kFewRows;
            Floats sums[kRows][kPanelVectors];
            target.ask(first_row + first, kRows, panel_index);
            product.template multiply<kRows>(first, panel, sums, NextLines{next, asks ? kStepLines / num_asking : 0});
            if (asks) next += panel_bytes / num_asking;
            for (int r = 0; r < kRows; ++r) store(first_row + first + r, panel_index, sums[r]);
        });
    });
}

#if defined(RADIXRT_HAS_TILES)

// Of the 32 lines of a run of steps. One pass is over long before the memory answers, so nothing is gained by asking;
// with more, the next panel comes during the first two.
inline int64_t lines_ahead_of_run(int64_t num_passes, int64_t pass) {
    constexpr int64_t kRunLines = kTileSteps * kPanel * sizeof(Word) / kLineBytes;
    return num_passes > 1 && pass < 2 ? kRunLines / 2 : 0;
}

// multiply_all on the matrix unit (amx_product.h), for bfloat16.
template <class Store>
inline void multiply_all_tiles(Team& team, int thread, TileUnit& unit, const Word* inputs, int64_t row_stride,
                               int64_t num_rows, const Weight& weight, const Target& target, Store&& store) {
    TileCut cut(num_rows);
    int64_t num_pairs = (cut.num_tiles + 1) / 2, pair_bytes = 2 * cut.height * 4 * weight.num_steps;
    int64_t block_pairs = num_rows ? std::max<int64_t>(1, kRowBlockBytes / pair_bytes) : 1;
    int64_t num_blocks = (num_pairs + block_pairs - 1) / block_pairs;
    if (num_rows) unit.use(cut);
    team.for_each(thread, num_blocks * weight.num_panels, [&](int64_t item) {
        int64_t block = item / weight.num_panels, panel_index = item % weight.num_panels;
        int64_t first_pair = num_pairs * block / num_blocks, stop_pair = num_pairs * (block + 1) / num_blocks;
        const Word* panel = weight.panels + panel_index * weight.num_steps * kPanel;
        const char* next = reinterpret_cast<const char*>(panel + weight.num_steps * kPanel);
        auto begin = [&](int64_t first_row, int64_t count) { target.ask(first_row, count, panel_index); };
        auto ask = [&](int64_t pass) {
            int64_t num_lines = lines_ahead_of_run(stop_pair - first_pair, pass);
            for (int64_t i = 0; i < num_lines; ++i, next += kLineBytes) __builtin_prefetch(next, 0, 2);
        };
        multiply_panel(inputs, row_stride, cut, 2 * first_pair, std::min(2 * stop_pair, cut.num_tiles), panel,
                       weight.num_steps, begin, ask,
                       [&](int64_t row, const Floats* sums) { store(row, panel_index, sums); });
    });
}

#endif

// What a thread keeps for its products, from one to the next.
struct ProductRoom {
    TileUnit unit;
    HalfRows halves;
    Aligned<float> wide;

    // At the end of a step.
    void release() { unit.release(); }
};

template <class T>
inline WordProduct<T> product_of(T, ProductRoom&, const Word* inputs, int64_t row_stride, int64_t num_steps) {
    return {inputs, row_stride, num_steps};
}

inline WideProduct product_of(Wide, ProductRoom& room, const Word* inputs, int64_t row_stride, int64_t num_steps) {
    return {room.wide, inputs, row_stride, num_steps};
}

#if defined(RADIXRT_HAS_HALVES)
inline HalfProduct product_of(Half, ProductRoom& room, const Word* inputs, int64_t row_stride, int64_t num_steps) {
    return {room.halves, inputs, row_stride, num_steps};
}
#endif

// Multiply num_rows rows of inputs (row_stride words apart) with every panel; all threads of the team call this.
//   T: of the panels and how they are multiplied. Half, Wide: the inputs are bfloat16.
//   target: what `store` will change.
// store(row, panel index, sums) gets kPanelVectors vectors: the panel's outputs for that row.
//   room: the calling thread's; who runs the phases releases it after the last.
template <class T, class Store>
inline void multiply_all(Team& team, int thread, ProductRoom& room, const Word* inputs, int64_t row_stride,
                         int64_t num_rows, const Weight& weight, const Target& target, Store&& store) {
    if constexpr (kHasTiles && std::is_same_v<T, BFloat16>) {
        multiply_all_tiles(team, thread, room.unit, inputs, row_stride, num_rows, weight, target, store);
    } else {
        auto product = product_of(T{}, room, inputs, row_stride, weight.num_steps);
        multiply_all_vectors(team, thread, product, num_rows, weight, target, store);
    }
}

}  // namespace radixrt
