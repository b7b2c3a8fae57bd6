// What a thread keeps from group to group.
#pragma once

#include "aligned.h"
#include "direct.h"
#include "plan.h"

namespace radixrt {

// Where one thread keeps a group's rows and a block's keys and values. Rows of a group:
// kv head after kv head, member after member, token after token, the head's R query heads in order. wide_q, weights and
// scores hold only the rows in use.
class AttentionScratch {
public:
    Aligned<Word> q, wide_q, keys, values, weights, zeros;
    Aligned<float> scores, sums, ceilings, totals;
    std::vector<int64_t> positions;

    void resize(int64_t num_rows, int64_t row_steps, int64_t width, int64_t num_heads) {
        auto grow = [](auto& buffer, int64_t count) {
            if ((int64_t)buffer.size() < count) buffer.resize(count);
        };
        grow(q, num_rows * row_steps);
        grow(wide_q, num_heads * kDirectPasses * kMaxDirectRows * row_steps * kQuarterWords);
        grow(keys, kKeyBlock * row_steps);
        grow(values, kKeyBlock * width);
        const int64_t num_in_use = std::max<int64_t>(kMaxTileRows, num_heads * kMaxDirectRows);
        grow(weights, num_in_use * kKeyBlock);
        grow(scores, num_in_use * kKeyBlock);
        grow(sums, num_rows * width);
        grow(ceilings, num_rows);
        grow(totals, num_rows * kLanes);
        grow(positions, num_rows);
        grow(zeros, num_heads * width);
    }
};

}  // namespace radixrt
