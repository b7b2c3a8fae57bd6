// What a build computes on the matrix unit, tried before it is used.
#pragma once

#include <cmath>

#include "gemm.h"

namespace radixrt {

#if defined(RADIXRT_HAS_TILES)

// Numbers without pattern; any would do.
class Numbers {
public:
    uint32_t below(uint32_t limit) {
        state_ = state_ * 6364136223846793005u + 1442695040888963407u;
        return (uint32_t)(state_ >> 33) % limit;
    }
    float sign() { return below(2) ? 1.0f : -1.0f; }

private:
    uint64_t state_ = 1;
};

// Rows and a weight, as they are and as a step has them.
class Trial {
public:
    // element(numbers, place in the row, is a weight): a bfloat16.
    template <class Element>
    Trial(int64_t num_rows, int64_t num_outputs, int64_t num_inputs, Element&& element)
        : num_outputs_(num_outputs),
          num_inputs_(num_inputs),
          num_panels_((num_outputs + kPanel - 1) / kPanel),
          rows_(num_rows * num_inputs),
          weight_(num_outputs * num_inputs),
          narrow_rows_(rows_.size()),
          panels_(num_panels_ * kPanel * num_inputs / 2) {
        Numbers numbers;
        for (size_t i = 0; i < rows_.size(); ++i) {
            rows_[i] = element(numbers, i % num_inputs, false);
            narrow(rows_[i], &narrow_rows_[i]);
        }
        std::vector<BFloat16> narrow_weight(weight_.size());
        for (size_t i = 0; i < weight_.size(); ++i) {
            weight_[i] = element(numbers, i % num_inputs, true);
            narrow(weight_[i], &narrow_weight[i]);
        }
        pack_weight(narrow_weight.data(), num_outputs, num_inputs, false, panels_.data());
    }

    // [rows, num_panels * kPanel]
    std::vector<float> multiply(int64_t first_row, int64_t num_rows) const {
        Team team(1);
        ProductRoom room;
        int64_t num_steps = num_inputs_ / 2, width = num_panels_ * kPanel;
        std::vector<float> found(num_rows * width);
        multiply_all<BFloat16>(team, 0, room, reinterpret_cast<const Word*>(&narrow_rows_[first_row * num_inputs_]),
                               num_steps, num_rows, Weight{panels_.data(), num_panels_, num_steps},
                               Target{found.data(), 4 * width, 4 * kPanel},
                               [&](int64_t row, int64_t panel, const Floats* sums) {
                                   float* target = &found[row * width + panel * kPanel];
                                   for (int v = 0; v < kPanelVectors; ++v) store(target + v * kLanes, sums[v]);
                               });
        room.release();
        return found;
    }

    bool is_exact() const {
        int64_t num_rows = rows_.size() / num_inputs_, width = num_panels_ * kPanel;
        std::vector<float> found = multiply(0, num_rows);
        bool is_exact = true;
        for (int64_t row = 0; row < num_rows; ++row)
            for (int64_t output = 0; output < num_outputs_; ++output) {
                double sum = 0;
                for (int64_t k = 0; k < num_inputs_; ++k)
                    sum += (double)rows_[row * num_inputs_ + k] * (double)weight_[output * num_inputs_ + k];
                is_exact &= found[row * width + output] == (float)sum;
            }
        return is_exact;
    }

    bool is_alike_alone(int64_t row) const {
        int64_t num_rows = rows_.size() / num_inputs_, width = num_panels_ * kPanel;
        std::vector<float> together = multiply(0, num_rows), alone = multiply(row, 1);
        return !std::memcmp(&together[row * width], alone.data(), width * sizeof(float));
    }

private:
    int64_t num_outputs_, num_inputs_, num_panels_;
    std::vector<float> rows_, weight_;
    std::vector<BFloat16> narrow_rows_;
    std::vector<Word> panels_;
};

// Two laws. Exact: the powers of two of a row's element and of its weights cancel, so that every sum is a whole number
// below 2^24, the same in whatever order it is computed. Alone as together: sums that do round, in rows beside others.
inline bool products_are_right() {
    auto whole = [](Numbers& numbers, int64_t k, bool is_weight) {
        int exponent = (int)(k * 5 % 41 - 20);
        return numbers.sign() * std::ldexp((float)(1 + numbers.below(7)), is_weight ? -exponent : exponent);
    };
    auto rough = [](Numbers& numbers, int64_t, bool) {
        return numbers.sign() * std::ldexp((float)(128 + numbers.below(128)), -(int)numbers.below(10));
    };
    // One row, few, a whole tile, two that overlap, three; steps below, at and past whole runs.
    constexpr int64_t kSizes[][3] = {{1, 33, 64}, {5, 32, 14}, {16, 32, 98}, {17, 64, 32}, {37, 40, 74}};
    for (auto [num_rows, num_outputs, num_inputs] : kSizes) {
        if (!Trial(num_rows, num_outputs, num_inputs, whole).is_exact()) return false;
        Trial trial(num_rows, num_outputs, num_inputs, rough);
        if (!trial.is_alike_alone(0) || !trial.is_alike_alone(num_rows - 1)) return false;
    }
    return true;
}

#endif

}  // namespace radixrt
