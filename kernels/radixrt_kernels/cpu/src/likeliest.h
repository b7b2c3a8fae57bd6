// The largest output of each row, found while the outputs are made: reading them once more would take as long as a layer.
#pragma once

#include <limits>

#include "aligned.h"
#include "columns.h"

namespace radixrt {

// Each thread keeps, for each row and lane, the largest output that it has made and the panel it came from.
class Likeliest {
public:
    void begin(int num_threads, int64_t num_rows) {
        num_threads_ = num_threads;
        num_rows_ = num_rows;
        found_.assign(num_threads * num_rows * kPanelVectors, Found{splat(-kInfinity), {}});
    }

    // A panel's outputs of a row; called once for each, in any order.
    void see(int thread, int64_t row, int64_t panel, const Lanes& lanes, const Floats* outputs) {
        Found* found = &found_[(thread * num_rows_ + row) * kPanelVectors];
        const Words place = splat_word((Word)panel);
        for (int v = 0; v < kPanelVectors; ++v) {
            const Floats x = lanes.allowed == kAllLanes ? outputs[v] : refuse(lanes, v, outputs[v]);
            const Floats best = found[v].value;
            // What is no number is the largest, whatever came before.
            const auto is_better = (x > best) | (x != x) | ((x == best) & (place < found[v].panel));
            found[v].value = is_better ? x : best;
            found[v].panel = is_better ? place : found[v].panel;
        }
    }

    // Of equal outputs the first. Once all panels were seen: token_ids [num_rows], values [num_rows].
    void write(int64_t* token_ids, float* values) const {
        for (int64_t row = 0; row < num_rows_; ++row) {
            token_ids[row] = 0;
            values[row] = -kInfinity;
            for (int thread = 0; thread < num_threads_; ++thread)
                for (int v = 0; v < kPanelVectors; ++v) {
                    const Found& found = found_[(thread * num_rows_ + row) * kPanelVectors + v];
                    for (int lane = 0; lane < kLanes; ++lane)
                        take(found.value[lane], found.panel[lane] * kPanel + v * kLanes + lane, token_ids + row,
                             values + row);
                }
        }
    }

private:
    static constexpr float kInfinity = std::numeric_limits<float>::infinity();

    struct Found {
        Floats value;
        Words panel;
    };

    static void take(float value, int64_t token_id, int64_t* best_id, float* best) {
        if (value > *best || value != value || (value == *best && token_id < *best_id)) {
            *best = value;
            *best_id = token_id;
        }
    }

    int num_threads_ = 0;
    int64_t num_rows_ = 0;
    Aligned<Found> found_;
};

}  // namespace radixrt
