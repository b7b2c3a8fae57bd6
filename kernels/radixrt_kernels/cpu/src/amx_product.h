// Rows against a panel (tile.h) on the matrix unit, for bfloat16. Sixteen steps of a panel are two tiles as they lie in
// memory, one for each half of its outputs:
//
//     panel:  step 0  [w0 ... w15 | w16 ... w31]        rows:  [x0 ... x15 | x16 ... ] 16 words of up to 16 rows
//             ...         left    |    right                    ...
//             step 15 [w0 ... w15 | w16 ... w31]
//
// A row's sum is over runs of 16 steps in order, whatever the number of rows; zeros fill the last run. The unit adds a
// run's even and odd elements apart, the vector instructions do not: a weight is never multiplied by both.
#pragma once

#include <algorithm>

#include "amx.h"
#include "tile.h"

namespace radixrt {

#if defined(RADIXRT_HAS_TILES)

constexpr bool kHasTiles = true;
constexpr int kTileSteps = amx::kTileRows;

// Rows in as few tiles as possible, all of one height, so that one configuration serves a whole step and no row that is
// not there is read: the last tile begins early enough to end with the rows, and what it computes anew is dropped.
struct TileCut {
    explicit TileCut(int64_t num_rows)
        : num_rows(num_rows),
          num_tiles((num_rows + amx::kTileRows - 1) / amx::kTileRows),
          height(num_tiles ? (num_rows + num_tiles - 1) / num_tiles : 0) {}

    int64_t start(int64_t tile) const { return std::min(tile * height, num_rows - height); }
    // Rows that no tile before has.
    int64_t first_own(int64_t tile) const { return tile * height; }
    int64_t stop(int64_t tile) const { return start(tile) + height; }

    int64_t num_rows, num_tiles, height;
};

// A thread's configuration. LDTILECFG takes a hundred cycles or more, so it is kept from product to product; `release`
// at the end of a step spares the system 8 KB per change of threads.
class TileUnit {
public:
    // Tiles: 0-3 sums, 4-5 rows, 6-7 halves of the panel. A single tile of rows needs two sums only: then 2-3 are
    // halves as well, so that loads need not wait for the products before them.
    void use(const TileCut& cut) {
        if (height_ == cut.height && is_single_ == (cut.num_tiles == 1)) return;
        height_ = cut.height;
        is_single_ = cut.num_tiles == 1;
        amx::Config config;
        for (int tile = 0; tile < amx::kTiles; ++tile) {
            bool is_half = tile >= 6 || (is_single_ && (tile == 2 || tile == 3));
            config.rows[tile] = is_half ? kTileSteps : (uint8_t)height_;
            config.row_bytes[tile] = amx::kTileRowBytes;
        }
        amx::configure(config);
    }

    void release() {
        if (height_) amx::release();
        height_ = 0;
    }

private:
    int64_t height_ = 0;  // 0: not configured
    bool is_single_ = false;
};

// Where a product takes its operands of one run of steps.
struct TileInputs {
    const Word* first;   // a tile's rows
    const Word* second;  // the next tile's, or null
    int64_t stride_bytes;
    const Word* panel;
};

template <bool kTwo, int kRows, int kLeft, int kRight>
inline void multiply_run(const TileInputs& inputs) {
    amx::load<kLeft>(inputs.panel, kPanel * sizeof(Word));
    amx::load<kRows>(inputs.first, inputs.stride_bytes);
    amx::multiply_add<0, kRows, kLeft>();
    amx::load<kRight>(inputs.panel + kPanel / 2, kPanel * sizeof(Word));
    amx::multiply_add<1, kRows, kRight>();
    if constexpr (kTwo) {
        amx::load<5>(inputs.second, inputs.stride_bytes);
        amx::multiply_add<2, 5, kLeft>();
        amx::multiply_add<3, 5, kRight>();
    }
}

// One or two tiles of rows against a panel.
//   each_run: called before every run of kTileSteps steps, to ask for memory.
//   sums: [2 * kTileRows, kPanel]; the second tile's from row kTileRows on.
template <bool kTwo, bool kSingle, class Each>
inline void multiply_tiles(TileInputs inputs, const TileInputs* rest, int64_t num_runs, float* sums, Each&& each_run) {
    constexpr int kStride = kPanel * sizeof(float), kHalf = kPanel / 2;
    auto advance = [&] {
        inputs.first += kTileSteps;
        if constexpr (kTwo) inputs.second += kTileSteps;
        inputs.panel += kTileSteps * kPanel;
    };
    amx::zero<0>(), amx::zero<1>();
    if constexpr (kTwo) amx::zero<2>(), amx::zero<3>();
    for (int64_t i = 0; i < num_runs; ++i, advance()) {
        each_run();
        if constexpr (kSingle) {
            multiply_run<false, 5, 2, 3>(inputs);
            if (++i == num_runs) break;
            advance();
            each_run();
        }
        multiply_run<kTwo, 4, 6, 7>(inputs);
    }
    if (rest) multiply_run<kTwo, 4, 6, 7>(*rest);
    amx::store<0>(sums, kStride), amx::store<1>(sums + kHalf, kStride);
    if constexpr (kTwo) {
        sums += amx::kTileRows * kPanel;
        amx::store<2>(sums, kStride), amx::store<3>(sums + kHalf, kStride);
    }
}

// The steps past the last whole run, filled with zeros: what lies after a row or a panel is not read.
class TileRest {
public:
    TileRest(const Word* panel, int64_t num_steps)
        : first_step_(num_steps / kTileSteps * kTileSteps), num_steps_(num_steps - first_step_) {
        if (!num_steps_) return;
        std::memset(rows_, 0, sizeof rows_);
        std::memset(panel_, 0, sizeof panel_);
        std::memcpy(panel_, panel + first_step_ * kPanel, num_steps_ * kPanel * sizeof(Word));
    }

    // Null: there are no such steps.
    const TileInputs* take(const TileInputs& inputs, int64_t row_stride, int64_t height) {
        if (!num_steps_) return nullptr;
        const Word* sources[] = {inputs.first, inputs.second};
        for (int tile = 0; tile < 2 && sources[tile]; ++tile)
            for (int64_t r = 0; r < height; ++r)
                std::memcpy(rows_[tile][r], sources[tile] + r * row_stride + first_step_, num_steps_ * sizeof(Word));
        inputs_ = {rows_[0][0], rows_[1][0], amx::kTileRowBytes, panel_[0]};
        return &inputs_;
    }

private:
    int64_t first_step_, num_steps_;
    TileInputs inputs_;
    alignas(64) Word rows_[2][amx::kTileRows][kTileSteps];
    alignas(64) Word panel_[kTileSteps][kPanel];
};

// Multiply the tiles [first_tile, stop_tile) of rows with a panel; store(row, sums) gets all rows that are theirs.
//   begin(first row, number of rows): called before a pass.
//   each_run(pass): called before every run of steps; a pass is two tiles of rows, or a last one.
template <class Begin, class Each, class Store>
inline void multiply_panel(const Word* rows, int64_t row_stride, const TileCut& cut, int64_t first_tile,
                           int64_t stop_tile, const Word* panel, int64_t num_steps, Begin&& begin, Each&& each_run,
                           Store&& store) {
    TileRest rest(panel, num_steps);
    alignas(64) float sums[2 * amx::kTileRows][kPanel];
    int64_t num_runs = num_steps / kTileSteps, pass = 0;
    for (int64_t tile = first_tile; tile < stop_tile; tile += 2, ++pass) {
        bool is_two = tile + 1 < stop_tile;
        begin(cut.first_own(tile), cut.stop(tile + is_two) - cut.first_own(tile));
        TileInputs inputs{rows + cut.start(tile) * row_stride,
                          is_two ? rows + cut.start(tile + 1) * row_stride : nullptr,
                          row_stride * (int64_t)sizeof(Word), panel};
        const TileInputs* last = rest.take(inputs, row_stride, cut.height);
        auto each = [&] { each_run(pass); };
        if (cut.num_tiles == 1) {
            multiply_tiles<false, true>(inputs, last, num_runs, sums[0], each);
        } else if (is_two) {
            multiply_tiles<true, false>(inputs, last, num_runs, sums[0], each);
        } else {
            multiply_tiles<false, false>(inputs, last, num_runs, sums[0], each);
        }
        for (int64_t i = 0; i < 1 + is_two; ++i)
            for (int64_t row = cut.first_own(tile + i); row < cut.stop(tile + i); ++row) {
                Floats vectors[kPanelVectors];
                const float* source = sums[i * amx::kTileRows + row - cut.start(tile + i)];
                for (int v = 0; v < kPanelVectors; ++v) vectors[v] = load<Floats>(source + v * kLanes);
                store(row, vectors);
            }
    }
}

#else

constexpr bool kHasTiles = false;

class TileUnit {
public:
    void release() {}
};

#endif

}  // namespace radixrt
