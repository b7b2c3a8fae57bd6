// Draws by float32 weights, which take a quarter of the time of float64 ones; says so where those might draw another token.
//
// A weight is off by its share of kError, so sums are off by kError of their total at most: a token is told where the number
// falls further than that from its borders. Where top-k, top-p and min-p leave few tokens, the few that may stay are found.
//
// Why kError, with fused products: a logarithm's fraction is off by 2 roundings of at most 2^-25, its power by 1e-7, a block's
// sum by 12 roundings: together 8.6e-7. Without, a logarithm y is off by 2 more, |y| 2^-23, and the sum of p |y| ln 2 is at
// most ln V; of V = 2^20 tokens that is 1.7e-6. (Sums of float64 would be off by a third of that, and take 6 us more a row.)
#pragma once

#include <algorithm>
#include <vector>

#include "adjust.h"

namespace radixrt {

class RoughWeights {
public:
#if defined(__FMA__)
    static constexpr double kError = 0x1p-20;
#else
    static constexpr double kError = 0x1p-18;
#endif
    // The rest of a block is added up lane by lane, so that 19, 34 or 65 roundings come together (16, 8 or 4 lanes).
    static constexpr double kRestError = 4 * kError;

    void reserve(int64_t num_columns) {
        weights_.reserve((num_columns + kPanel - 1) / kPanel * kPanel);
        sums_.reserve(num_columns / kBlock + 1);
        token_ids_.reserve(num_columns + kPanel);  // any number may lie next to a cut
    }

    // All that float32 can tell of scale * (x - largest), in base 2.
    static bool can_scale(double scale) { return scale >= 0x1p-60 && scale <= 0x1p60; }

    // Weigh all tokens. Valid as long as the row is.
    void weigh(const AdjustedRow& row, double scale, float largest, bool keeps_weights) {
        row_ = &row;
        scale_ = (float)scale;
        scale_rest_ = (float)(scale - scale_);
        least_gap_ = -126.0f / scale_;
        largest_ = largest;
        sums_.clear();
        total_ = 0.0;
        if (keeps_weights) weights_.resize(row.num_panels() * kPanel);
        for (int64_t first = 0; first < row.num_panels(); first += kBlockPanels) {
            float* target = keeps_weights ? &weights_[first * kPanel] : nullptr;
            sums_.push_back(weigh_block(first, target));
            total_ += sums_.back();
        }
    }

    // The first token whose cumulated weight exceeds a share of all; -1: float64 weights may tell of another.
    int64_t place_of(double uniform) const {
        const double target = uniform * total_;
        const int64_t last_block = sums_.size() - 1;
        double reached = 0.0;
        int64_t block = 0;
        for (; block < last_block && reached + sums_[block] <= target; ++block) reached += sums_[block];
        alignas(64) float weights[kBlock];
        weigh_block(block * kBlockPanels, weights);
        const int64_t num_own = std::min(kBlockPanels, row_->num_panels() - block * kBlockPanels) * kPanel;
        for (int64_t i = 0; i < num_own; ++i) {
            const double next = reached + weights[i];
            if (next > target) {
                const double margin = 2 * kError * next;  // of what is cumulated, and of the target
                const bool is_sure = target - reached >= margin && next - target >= margin;
                return is_sure ? block * kBlock + i : -1;
            }
            reached = next;
        }
        return -1;
    }

    // Find tokens among which all are that top-k, top-p and min-p keep; false: they would be many. Weights are kept.
    bool find_candidates(const Draw& draw, int64_t num_columns) {
        const int64_t most = most_candidates(num_columns);
        if (draw.top_k > most) return false;
        token_ids_.clear();
        if (!draw.top_k && draw.top_p >= 1.0)
            return draw.min_p >= kLeastCut && mass_from(draw.min_p).count <= most && collect(draw.min_p);
        const double share = draw.top_p * total_ * (1 + kSlack);
        auto is_enough = [&](const Mass& mass) { return draw.top_k ? mass.count >= draw.top_k : mass.sum >= share; };
        for (float cut = 0.25f; cut >= kLeastCut; cut *= 0.25f) {
            const Mass mass = mass_from(cut);
            if (!is_enough(mass)) {
                if (mass.count > most) return false;
                continue;
            }
            if (mass.count > kFew && is_enough(mass_from(2 * cut))) cut *= 2;
            return (mass.count <= most || mass_from(cut).count <= most) && collect(cut);
        }
        return false;
    }

    const std::vector<int32_t>& token_ids() const { return token_ids_; }
    // The sum of all weights but theirs; off by kRestError of it at most.
    double rest() const { return rest_; }

private:
    static constexpr int64_t kBlockPanels = 8, kBlock = kBlockPanels * kPanel, kFew = 256;
    static constexpr float kLeastCut = 0x1p-20f;
    // More than a weight of kLeastCut or more is off by, and than sums are.
    static constexpr double kSlack = 0x1p-16;

    struct Mass {
        double sum = 0.0;
        int64_t count = 0;
    };

    // Of more, nothing is won.
    static int64_t most_candidates(int64_t num_columns) { return std::max(num_columns / 4, kFew); }

    // 2^(gap log2 e / T), gap <= 0; some 2^-126 for less.
    Floats weight_of(Floats gap) const {
        gap = larger(gap, splat(least_gap_));
#if defined(__AVX512F__)
        const __m512 x = (__m512)gap, scale = _mm512_set1_ps(scale_);
        const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, scale), 0);
        const __m512 f = _mm512_fmadd_ps(x, _mm512_set1_ps(scale_rest_), _mm512_fmsub_ps(x, scale, n));
        return (Floats)_mm512_scalef_ps((__m512)exp2_fraction((Floats)f), n);
#else
        const Floats shift = splat(12582912.0f), shifted = gap * scale_ + shift, n = shifted - shift;
#if defined(__FMA__)
        const __m256 x = (__m256)gap, whole = _mm256_fmsub_ps(x, _mm256_set1_ps(scale_), (__m256)n);
        const Floats f = (Floats)_mm256_fmadd_ps(x, _mm256_set1_ps(scale_rest_), whole);
#else
        const Floats f = gap * scale_ - n + gap * scale_rest_;
#endif
        return as_floats(as_words(exp2_fraction(f)) + (as_words(shifted) << 23));
#endif
    }

    double weigh_block(int64_t first, float* target) const {
        Floats sums[kPanelVectors] = {};
        const int64_t num_panels = std::min(kBlockPanels, row_->num_panels() - first);
        for (int64_t i = 0; i < num_panels; ++i) {
            Floats values[kPanelVectors];
            row_->load(first + i, values);
            for (int v = 0; v < kPanelVectors; ++v) {
                const Floats weight = weight_of(values[v] - largest_);
                sums[v] += weight;
                if (target) store(target + i * kPanel + v * kLanes, weight);
            }
        }
        for (int count = kPanelVectors / 2; count; count /= 2)
            for (int v = 0; v < count; ++v) sums[v] += sums[v + count];
        return sum_lanes(sums[0]);
    }

    // Of the weights that are at least so large.
    Mass mass_from(float cut) const {
        Mass mass;
        for_each_block(cut, [&](int64_t start, int64_t stop) {
            Floats sum = {};
            for (int64_t i = start; i < stop; i += kLanes) {
                const Floats weight = load<Floats>(&weights_[i]);
                const Word bits = at_least(weight, splat(cut));
                mass.count += __builtin_popcount(bits);
                sum += choose(bits, weight, Floats{});
            }
            mass.sum += sum_lanes(sum);
        });
        return mass;
    }

    // Those too whose weights may be as large, and so, in the order of weights, before one that is.
    bool collect(double cut) {
        const float least = cut * (1 - kSlack);
        double rest = 0.0;
        rest_ = for_each_block(least, [&](int64_t start, int64_t stop) {
            Floats sum = {};
            for (int64_t i = start; i < stop; i += kLanes) {
                const Floats weight = load<Floats>(&weights_[i]);
                Word bits = at_least(weight, splat(least));
                sum += choose(bits, Floats{}, weight);
                for (; bits; bits &= bits - 1) token_ids_.push_back((int32_t)i + __builtin_ctz(bits));
            }
            rest += sum_lanes(sum);
        });
        rest_ += rest;
        return true;
    }

    // The blocks that may have a weight so large: none is larger than its block's sum. Gives the sum of the others.
    template <class Function>
    double for_each_block(float least, Function&& function) const {
        double rest = 0.0;
        for (int64_t block = 0; block < (int64_t)sums_.size(); ++block) {
            if (sums_[block] < least) {
                rest += sums_[block];
            } else {
                function(block * kBlock, std::min<int64_t>((block + 1) * kBlock, weights_.size()));
            }
        }
        return rest;
    }

    static Word at_least(Floats x, Floats least) {
#if defined(__AVX512F__)
        return _mm512_cmp_ps_mask((__m512)x, (__m512)least, _CMP_GE_OQ);
#elif defined(__AVX2__)
        return _mm256_movemask_ps(_mm256_cmp_ps((__m256)x, (__m256)least, _CMP_GE_OQ));
#else
        Word bits = 0;
        for (int lane = 0; lane < kLanes; ++lane) bits |= (Word)(x[lane] >= least[lane]) << lane;
        return bits;
#endif
    }

    const AdjustedRow* row_ = nullptr;
    float scale_ = 0.0f, scale_rest_ = 0.0f, least_gap_ = 0.0f, largest_ = 0.0f;
    double total_ = 0.0, rest_ = 0.0;
    std::vector<double> sums_;  // by block
    Aligned<float> weights_;
    std::vector<int32_t> token_ids_;
};

}  // namespace radixrt
