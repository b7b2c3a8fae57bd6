// Draws a row's token: bias, penalties, bans, mask, temperature, top-k, top-p, min-p, then the inverse of the cumulated
// weights at one number.
//
//     logits -> adjusted -> the largest -> weights 2^((x - largest) / T log2 e), float64 -> the last one kept
//            -> sums by block -> the block -> the token
//
// Most rows take no float64 weights, or those of a few tokens only: rough_draw.h.
// Equal weights rank by token id. Weights are not normalized, and those below 2^-1021 are 0: a draw differs from the plain
// rule where the number, top_p or min_p falls within rounding of a border between two tokens, and where two logits are so
// near that only their order, not their weights, tells them apart.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "adjust.h"
#include "aligned.h"
#include "doubles.h"
#include "pack.h"
#include "rough_draw.h"

namespace radixrt {

// Where one thread draws, row after row.
class DrawRoom {
public:
    // Ask for all room now: where several threads draw, none may find that there is no more.
    void reserve(int64_t num_columns) {
        if (num_reserved_ >= num_columns) return;
        row_.reserve(num_columns);
        rough_.reserve(num_columns);
        weights_.resize(round_up(num_columns, kPanel));
        band_.reserve(num_columns);
        sums_.reserve(num_columns / kBlock + 1);
        num_reserved_ = num_columns;  // the last: it tells that all is there
    }

    // Room is reserved. Gives the token, and the largest adjusted logit; where that is not finite, nothing has a weight, and
    // the token is the likeliest.
    int64_t draw(const Draw& draw, int64_t num_columns, float* largest) {
        row_.begin(draw, num_columns);
        *largest = draw.largest;
        const int64_t likeliest = draw.likeliest >= 0 ? draw.likeliest : row_.find_likeliest(largest);
        if (draw.temperature == 0.0 || !std::isfinite(*largest)) return likeliest;
        largest_ = *largest;
        // Finite, as 0 times it is to be 0.
        scale_ = std::min(1.44269504088896340736 / draw.temperature, std::numeric_limits<double>::max());
        const int64_t token_id = RoughWeights::can_scale(scale_) ? draw_roughly(draw, num_columns) : -1;
        return token_id >= 0 ? token_id : draw_exactly(draw, num_columns);
    }

private:
    static constexpr int64_t kBlock = 512;
    static constexpr double kLeastWeight = 0x1p-1022;
    static constexpr int64_t kManySorted = 256;
    static constexpr int kMostSplits = 12;

    // What is drawn from has a place: of all tokens its id, of a few the place in their order.
    struct Candidate {
        double weight;
        int64_t place;

        bool operator<(const Candidate& other) const {
            return weight > other.weight || (weight == other.weight && place < other.place);
        }
    };
    // Of the weights that are at least some bound.
    struct Mass {
        double sum = 0.0;
        int64_t count = 0;
    };

    int64_t num_padded() const { return round_up(num_places_, kDoubles); }

    // -1: rough weights do not tell.
    int64_t draw_roughly(const Draw& draw, int64_t num_columns) {
        rough_.weigh(row_, scale_, largest_, !draw.is_whole());
        if (draw.is_whole()) return rough_.place_of(draw.uniform);
        if (!rough_.find_candidates(draw, num_columns)) return -1;
        const std::vector<int32_t>& token_ids = rough_.token_ids();
        num_places_ = token_ids.size();
        for (int64_t i = 0; i < num_padded(); i += kDoubles) {
            HalfFloats x;
            for (int j = 0; j < kDoubles; ++j) x[j] = i + j < num_places_ ? row_[token_ids[i + j]] : -kInfinity;
            weigh(i, x);
        }
        begin(draw);
        const double rest = rough_.rest();
        if (!find_last(draw, mass_from(kLeastWeight).sum + rest, RoughWeights::kRestError * rest)) return -1;
        return token_ids[place_of(draw.uniform)];
    }

    int64_t draw_exactly(const Draw& draw, int64_t num_columns) {
        num_places_ = num_columns;
        for (int64_t panel = 0; panel < row_.num_panels(); ++panel) {
            Floats values[kPanelVectors];
            row_.load(panel, values);
            for (int j = 0; j < kPanel; j += kDoubles)
                weigh(panel * kPanel + j, load<HalfFloats>(reinterpret_cast<const float*>(values) + j));
        }
        begin(draw);
        find_last(draw, mass_from(kLeastWeight).sum, 0.0);
        return place_of(draw.uniform);
    }

    void weigh(int64_t place, HalfFloats x) {
        store(&weights_[place], exp2(__builtin_convertvector(x - largest_, Doubles) * scale_));
    }

    void begin(const Draw& draw) {
        least_ = draw.min_p;
        last_ = {-1.0, 0};
    }

    Mass mass_from(double bound) const {
        Doubles sum = {};
        Longs count = {};
        for (int64_t i = 0; i < num_padded(); i += kDoubles) {
            const Doubles weight = load<Doubles>(&weights_[i]);
            const Longs is_in = weight >= bound;
            sum += is_in ? weight : Doubles{};
            count -= is_in;
        }
        int64_t total = 0;
        for (int j = 0; j < kDoubles; ++j) total += count[j];
        return {sum_lanes(sum), total};
    }

    // The last token, in order of weights, that top-k and top-p keep. A band of weights that holds it is sorted: of top-k
    // first, as top-p is a share of what that keeps. Without top-k it is a share of the total, which may be off by an error;
    // false: then another may be the last.
    bool find_last(const Draw& draw, double total, double error) {
        if (draw.top_k > 0 && take_band([&](const Mass& mass) { return mass.count >= draw.top_k; })) {
            const int64_t num_own = draw.top_k - before_.count;
            total = before_.sum;
            error = 0.0;
            for (int64_t i = 0; i < num_own; ++i) total += band_[i].weight;
            last_ = band_[num_own - 1];
        }
        if (draw.top_p >= 1.0) return true;
        const double share = draw.top_p * total;
        error *= draw.top_p;
        // By rounding, all weights together may be less than a share next to 1.
        if (!take_band([&](const Mass& mass) { return mass.sum >= share; })) return error == 0.0;
        double sum = before_.sum;
        int64_t place = 0;
        while (place + 1 < (int64_t)band_.size() && sum + band_[place].weight < share) sum += band_[place++].weight;
        if (last_.weight < 0.0 || band_[place] < last_) last_ = band_[place];
        return error == 0.0 || (sum < share - error && sum + band_[place].weight >= share + error);
    }

    // Sort the first band of weights with which is_enough(all from there on), into band_, and note what is before it; false:
    // all weights are not enough.
    template <class IsEnough>
    bool take_band(IsEnough&& is_enough) {
        double above = std::numeric_limits<double>::infinity(), bound = 1.0;  // the largest weight is 1
        before_ = {};
        Mass mass = mass_from(bound);
        for (int power = 3; !is_enough(mass); power *= 2) {
            if (bound == kLeastWeight) return false;
            before_ = mass;
            above = bound;
            bound = std::max(std::ldexp(1.0, -power), kLeastWeight);
            mass = mass_from(bound);
        }
        // Halves of its logarithms, as a pass costs less than sorting many. Equal weights do not part.
        for (int i = 0; i < kMostSplits && bound < 1.0 && mass.count - before_.count > kManySorted; ++i) {
            const double middle = std::sqrt(bound) * std::sqrt(above);
            const Mass upper = mass_from(middle);
            if (is_enough(upper)) {
                mass = upper;
                bound = middle;
            } else {
                before_ = upper;
                above = middle;
            }
        }
        collect(bound, above);
        return true;
    }

    void collect(double bound, double above) {
        band_.clear();
        for (int64_t i = 0; i < num_padded(); i += kDoubles) {
            const Doubles weight = load<Doubles>(&weights_[i]);
            const Longs is_in = (weight >= bound) & (weight < above);
            if (!any(is_in)) continue;
            for (int j = 0; j < kDoubles; ++j)
                if (is_in[j]) band_.push_back({weight[j], i + j});
        }
        if (!std::is_sorted(band_.begin(), band_.end())) std::sort(band_.begin(), band_.end());
    }

    // The weights that are kept, of the lanes from a place on.
    Doubles kept_from(int64_t i) const {
        const Doubles weight = load<Doubles>(&weights_[i]);
        Longs place;
        for (int j = 0; j < kDoubles; ++j) place[j] = i + j;
        const Longs is_kept = ((weight > last_.weight) | ((weight == last_.weight) & (place <= last_.place))) &
                              (weight >= least_);
        return is_kept ? weight : Doubles{};
    }

    // The first place whose cumulated weight exceeds a share of all; it has a weight of its own.
    int64_t place_of(double uniform) {
        sums_.clear();
        double total = 0.0;
        for (int64_t block = 0; block < num_padded(); block += kBlock) {
            Doubles sum = {};
            for (int64_t i = block; i < std::min(block + kBlock, num_padded()); i += kDoubles) sum += kept_from(i);
            sums_.push_back(sum_lanes(sum));
            total += sums_.back();
        }
        const double target = uniform * total;
        while (sums_.back() == 0.0) sums_.pop_back();
        // Rounding may leave the target unreached: then the last place that has a weight is drawn.
        const int64_t last_block = sums_.size() - 1;
        double reached = 0.0;
        int64_t block = 0, last = 0;
        for (; block < last_block && reached + sums_[block] <= target; ++block) reached += sums_[block];
        for (int64_t i = block * kBlock; i < num_padded(); i += kDoubles) {
            const Doubles kept = kept_from(i);
            for (int j = 0; j < kDoubles; ++j) {
                if (kept[j] == 0.0) continue;
                last = i + j;
                reached += kept[j];
                if (reached > target) return last;
            }
        }
        return last;
    }

    static constexpr float kInfinity = std::numeric_limits<float>::infinity();

    int64_t num_reserved_ = 0, num_places_ = 0;
    float largest_ = 0.0f;
    double scale_ = 0.0, least_ = 0.0;
    Candidate last_{};
    Mass before_;  // the band
    AdjustedRow row_;
    RoughWeights rough_;
    Aligned<double> weights_;
    std::vector<Candidate> band_;
    std::vector<double> sums_;
};

}  // namespace radixrt
