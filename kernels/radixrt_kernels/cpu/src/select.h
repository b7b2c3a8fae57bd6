// Some rows of a step as a batch of their own.
#pragma once

#include <algorithm>
#include <vector>

#include "plan.h"

namespace radixrt {

// Rows that follow one another within a sequence become the new tokens of one with the same pages, which ends with them.
class Selection {
public:
    void choose(const Batch& batch, const int64_t* rows, int64_t num_rows) {
        num_columns_ = batch.num_columns;
        page_table_.clear();
        context_lens_.clear();
        query_start_.clear();
        for (int64_t i = 0, b = 0; i < num_rows; ++i) {
            const bool follows = i > 0 && rows[i] == rows[i - 1] + 1 && rows[i] < batch.query_start[b + 1];
            if (follows) {
                ++context_lens_.back();
                continue;
            }
            const int32_t* starts = batch.query_start;
            b = std::upper_bound(starts, starts + batch.num_sequences + 1, rows[i]) - starts - 1;
            query_start_.push_back((int32_t)i);
            context_lens_.push_back((int32_t)(num_cached(batch, b) + rows[i] - starts[b] + 1));
            page_table_.insert(page_table_.end(), pages_of(batch, b), pages_of(batch, b) + num_columns_);
        }
        query_start_.push_back((int32_t)num_rows);
    }

    // Valid until the next choose().
    Batch batch() const {
        return {query_start_.back(), (int64_t)context_lens_.size(), num_columns_,
                page_table_.data(),  query_start_.data(),           context_lens_.data()};
    }

private:
    int64_t num_columns_ = 0;
    std::vector<int32_t> page_table_, query_start_, context_lens_;
};

}  // namespace radixrt
