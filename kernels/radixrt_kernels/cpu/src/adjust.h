// A row of logits to draw from, with its bias, penalties, bans and mask.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "aligned.h"
#include "columns.h"
#include "likeliest.h"

namespace radixrt {

// One row's draw. Ids outside of [0, num_columns) are passed over.
struct Draw {
    const float* logits;       // [num_columns]
    const Word* mask;          // a bit for each of them; null: all are allowed
    const int64_t* bias_ids;   // [num_biases], distinct
    const float* biases;       // [num_biases]
    const int64_t* banned_ids; // [num_banned]
    const int32_t* token_ids;  // [num_tokens], the sequence so far, the prompt first
    int64_t num_biases, num_banned, num_tokens, num_prompt;
    int64_t top_k;             // 0: all
    int64_t likeliest;         // of the adjusted logits the first of the largest; -1: to be found
    double temperature;        // 0: the likeliest
    double top_p, min_p, uniform;
    float repetition, presence, frequency;  // penalties
    float largest;             // the likeliest's logit

    bool counts() const { return presence != 0.0f || frequency != 0.0f; }
    bool repeats() const { return repetition != 1.0f; }
    bool is_whole() const { return !top_k && top_p >= 1.0 && min_p == 0.0; }
};
static_assert(sizeof(Draw) == 144);  // draw.py, DRAW

// The row itself where nothing but a mask applies, which is heeded where it is read; else a copy.
class AdjustedRow {
public:
    void reserve(int64_t num_columns) {
        if ((int64_t)counts_.size() >= num_columns) return;
        adjusted_.resize((num_columns + kPanel - 1) / kPanel * kPanel);
        likeliest_.begin(1, 1);
        counts_.resize(num_columns, 0);  // the last: it tells that all is there
    }

    // Room is reserved.
    void begin(const Draw& draw, int64_t num_columns) {
        num_columns_ = num_columns;
        mask_ = draw.mask;
        columns_.choose(num_columns, mask_ ? &mask_ : nullptr);
        values_ = adjust(draw);
        const int64_t num_whole = num_columns / kPanel * kPanel;
        std::fill_n(std::copy_n(values_ + num_whole, num_columns - num_whole, last_), kPanel - num_columns + num_whole,
                    -kInfinity);
    }

    int64_t num_panels() const { return (num_columns_ + kPanel - 1) / kPanel; }
    float operator[](int64_t token_id) const { return values_[token_id]; }

    // Logits of a panel, whose padding and refused tokens are -inf. They are numbers: the likeliest tells if not.
    void load(int64_t panel, Floats* values) const {
        const float* at = address(panel);
        for (int v = 0; v < kPanelVectors; ++v) values[v] = radixrt::load<Floats>(at + v * kLanes);
        if (!mask_) return;
        const Word allowed = columns_.lanes(0, panel).allowed;
        if (allowed == kAllLanes) return;
        for (int v = 0; v < kPanelVectors; ++v) values[v] = choose(allowed >> v * kLanes, values[v], splat(-kInfinity));
    }

    int64_t find_likeliest(float* largest) {
        likeliest_.begin(1, 1);
        for (int64_t panel = 0; panel < num_panels(); ++panel) {
            Floats values[kPanelVectors];
            for (int v = 0; v < kPanelVectors; ++v)
                values[v] = radixrt::load<Floats>(address(panel) + v * kLanes);
            likeliest_.see(0, 0, panel, columns_.lanes(0, panel), values);
        }
        int64_t token_id;
        likeliest_.write(&token_id, largest);
        return token_id;
    }

private:
    static constexpr float kInfinity = std::numeric_limits<float>::infinity();

    const float* address(int64_t panel) const {
        return (panel + 1) * kPanel > num_columns_ ? last_ : values_ + panel * kPanel;
    }

    const float* adjust(const Draw& draw) {
        if (!draw.num_biases && !draw.num_banned && !draw.counts() && !draw.repeats()) return draw.logits;
        float* values = adjusted_.data();
        std::copy_n(draw.logits, num_columns_, values);
        for (int64_t i = 0; i < draw.num_biases; ++i)
            if (is_column(draw.bias_ids[i])) values[draw.bias_ids[i]] += draw.biases[i];
        if (draw.repeats() || draw.counts()) penalize(draw, values);
        for (int64_t i = 0; i < draw.num_banned; ++i)
            if (is_column(draw.banned_ids[i])) values[draw.banned_ids[i]] = -kInfinity;
        return values;
    }

    bool is_column(int64_t token_id) const { return token_id >= 0 && token_id < num_columns_; }

    // Each of the sequence's tokens once. What repeats counts in the prompt too, the others in the output only.
    void penalize(const Draw& draw, float* values) {
        auto for_each = [&](int64_t first, auto&& function) {
            for (int64_t i = first; i < draw.num_tokens; ++i)
                if (is_column(draw.token_ids[i])) function(counts_[draw.token_ids[i]], values[draw.token_ids[i]]);
        };
        if (draw.repeats()) {
            for_each(0, [&](int32_t& count, float& value) {
                if (count++ == 0) value = value > 0.0f ? value / draw.repetition : value * draw.repetition;
            });
            for_each(0, [](int32_t& count, float&) { count = 0; });
        }
        if (!draw.counts()) return;
        for_each(draw.num_prompt, [](int32_t& count, float&) { ++count; });
        for_each(draw.num_prompt, [&](int32_t& count, float& value) {
            if (count > 0) value -= rounded(draw.frequency * (float)count) + draw.presence;
            count = 0;
        });
    }

    // A product that is not fused with the sum after it: the plain rule rounds it.
    static float rounded(float product) {
        volatile float result = product;
        return result;
    }

    int64_t num_columns_ = 0;
    const float* values_ = nullptr;
    const Word* mask_ = nullptr;
    float last_[kPanel] = {};  // of the last panel, where it is not full
    Columns columns_;
    Likeliest likeliest_;
    Aligned<float> adjusted_;
    std::vector<int32_t> counts_;  // by token, zeros between rows
};

}  // namespace radixrt
