// Draws a row's token: bias, penalties, bans, mask, temperature, top-k, top-p, min-p, then the inverse of the cumulated
// weights at one number.
//
//     logits -> adjusted -> the largest -> weights 2^((x - largest) / T log2 e), float64 -> the last one kept
//            -> sums by block -> the block -> the token
//
// Equal weights rank by token id. Weights are not normalized, and those below 2^-1021 are 0: a draw differs from the plain
// rule where the number, top_p or min_p falls within rounding of a border between two tokens, and where two logits are so
// near that only their order, not their weights, tells them apart.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "aligned.h"
#include "columns.h"
#include "likeliest.h"
#include "pack.h"

namespace radixrt {

constexpr int kDoubles = kLanes / 2;
typedef double Doubles __attribute__((vector_size(4 * kLanes)));
typedef int64_t Longs __attribute__((vector_size(4 * kLanes)));
typedef float HalfFloats __attribute__((vector_size(2 * kLanes)));

inline Doubles splat_double(double value) { return value - Doubles{}; }
inline double sum_lanes(Doubles x) {
    double sum = 0.0;
    for (int i = 0; i < kDoubles; ++i) sum += x[i];
    return sum;
}

// 2^x for x <= 0; 0 below 2^-1021. 2^x = 2^n 2^f with |f| <= 1/2; the series ends at (f ln 2)^12 / 12!.
inline Doubles exp2(Doubles x) {
    constexpr double kLn2 = 0.69314718055994530942;
    const Doubles least = splat_double(-1021.0), kept = x < least ? least : x;
    // Adding 1.5 * 2^52 leaves n in the low bits of the sum.
    const Doubles shift = splat_double(6755399441055744.0), shifted = kept + shift;
    const Doubles power = (kept - (shifted - shift)) * kLn2;
    Doubles sum = splat_double(1.0 / 479001600);
    constexpr double kTerms[] = {1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720,
                                 1.0 / 120,      1.0 / 24,      1.0 / 6,      1.0 / 2,     1.0,        1.0};
    for (double term : kTerms) sum = sum * power + term;
    const Doubles result = (Doubles)((Longs)sum + ((Longs)shifted << 52));
    return x < least ? Doubles{} : result;
}

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
    double temperature;        // 0: the likeliest
    double top_p, min_p, uniform;
    float repetition, presence, frequency;  // penalties
};

// Where one thread draws, row after row.
class DrawRoom {
public:
    // Ask for all room now: where several threads draw, none may find that there is no more.
    void reserve(int64_t num_columns) {
        num_columns_ = num_columns;
        if ((int64_t)counts_.size() >= num_columns) return;
        weights_.resize(num_padded());
        adjusted_.resize(num_panels() * kPanel);
        band_.reserve(num_columns);
        sums_.reserve(num_columns / kBlock + 1);
        likeliest_.begin(1, 1);
        counts_.resize(num_columns, 0);  // the last: it tells that all is there
    }

    // Room is reserved. Gives the token, and the largest adjusted logit; where that is not finite, nothing has a weight, and
    // the token is the likeliest.
    int64_t draw(const Draw& draw, int64_t num_columns, float* largest) {
        num_columns_ = num_columns;
        columns_.choose(num_columns, draw.mask ? &draw.mask : nullptr);
        values_ = adjust(draw);
        const int64_t likeliest = find_likeliest(largest);
        if (draw.temperature == 0.0 || !std::isfinite(*largest)) return likeliest;
        weigh(draw.temperature, *largest);
        least_ = draw.min_p;
        last_ = {-1.0, 0};
        if (draw.top_k || draw.top_p < 1.0) find_last(draw);
        return place_of(draw.uniform);
    }

private:
    static constexpr int64_t kBlock = 512;
    static constexpr double kLeastWeight = 0x1p-1022;
    static constexpr int64_t kManySorted = 256;
    static constexpr int kMostSplits = 12;

    struct Candidate {
        double weight;
        int64_t token_id;

        bool operator<(const Candidate& other) const {
            return weight > other.weight || (weight == other.weight && token_id < other.token_id);
        }
    };
    // Of the weights that are at least some bound.
    struct Mass {
        double sum = 0.0;
        int64_t count = 0;
    };

    int64_t num_padded() const { return round_up(num_columns_, kDoubles); }
    int64_t num_panels() const { return (num_columns_ + kPanel - 1) / kPanel; }

    // The adjusted logits: the row itself where nothing applies, else a copy.
    const float* adjust(const Draw& draw) {
        const bool counts = draw.presence != 0.0f || draw.frequency != 0.0f, repeats = draw.repetition != 1.0f;
        if (!draw.mask && !draw.num_biases && !draw.num_banned && !counts && !repeats) return draw.logits;
        float* values = adjusted_.data();
        std::copy_n(draw.logits, num_columns_, values);
        for (int64_t i = 0; i < draw.num_biases; ++i)
            if (is_column(draw.bias_ids[i])) values[draw.bias_ids[i]] += draw.biases[i];
        if (repeats || counts) penalize(draw, values, counts, repeats);
        for (int64_t i = 0; i < draw.num_banned; ++i)
            if (is_column(draw.banned_ids[i])) values[draw.banned_ids[i]] = -kInfinity;
        if (draw.mask)
            for (int64_t panel = 0; panel < num_panels(); ++panel)
                for (int v = 0; v < kPanelVectors; ++v) {
                    float* at = values + panel * kPanel + v * kLanes;
                    store(at, refuse(columns_.lanes(0, panel), v, load<Floats>(at)));
                }
        return values;
    }

    bool is_column(int64_t token_id) const { return token_id >= 0 && token_id < num_columns_; }

    // Each of the sequence's tokens once. What repeats counts in the prompt too, the others in the output only.
    void penalize(const Draw& draw, float* values, bool counts, bool repeats) {
        auto for_each = [&](int64_t first, auto&& function) {
            for (int64_t i = first; i < draw.num_tokens; ++i)
                if (is_column(draw.token_ids[i])) function(counts_[draw.token_ids[i]], values[draw.token_ids[i]]);
        };
        if (repeats) {
            for_each(0, [&](int32_t& count, float& value) {
                if (count++ == 0) value = value > 0.0f ? value / draw.repetition : value * draw.repetition;
            });
            for_each(0, [](int32_t& count, float&) { count = 0; });
        }
        if (!counts) return;
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

    int64_t find_likeliest(float* largest) {
        likeliest_.begin(1, 1);
        for (int64_t panel = 0; panel < num_panels(); ++panel) {
            const float* at = values_ + panel * kPanel;
            float last[kPanel] = {};
            if ((panel + 1) * kPanel > num_columns_) {
                std::copy_n(at, num_columns_ - panel * kPanel, last);
                at = last;
            }
            Floats outputs[kPanelVectors];
            for (int v = 0; v < kPanelVectors; ++v) outputs[v] = load<Floats>(at + v * kLanes);
            likeliest_.see(0, 0, panel, columns_.lanes(0, panel), outputs);
        }
        int64_t token_id;
        likeliest_.write(&token_id, largest);
        return token_id;
    }

    void weigh(double temperature, float largest) {
        // Finite, as 0 times it is to be 0.
        const double scale = std::min(1.44269504088896340736 / temperature, std::numeric_limits<double>::max());
        for (int64_t i = 0; i < num_padded(); i += kDoubles) {
            HalfFloats x;
            const int64_t count = num_columns_ - i;
            if (count >= kDoubles) {
                x = load<HalfFloats>(values_ + i);
            } else {
                for (int j = 0; j < kDoubles; ++j) x[j] = j < count ? values_[i + j] : -kInfinity;
            }
            const HalfFloats gap = x - largest;
            store(&weights_[i], exp2(__builtin_convertvector(gap, Doubles) * scale));
        }
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
    // first, as top-p is a share of what that keeps.
    void find_last(const Draw& draw) {
        double kept;
        if (draw.top_k > 0 && take_band([&](const Mass& mass) { return mass.count >= draw.top_k; })) {
            const int64_t num_own = draw.top_k - before_.count;
            kept = before_.sum;
            for (int64_t i = 0; i < num_own; ++i) kept += band_[i].weight;
            last_ = band_[num_own - 1];
        } else {
            kept = mass_from(kLeastWeight).sum;
        }
        if (draw.top_p >= 1.0) return;
        const double share = draw.top_p * kept;
        // By rounding, all weights together may be less than a share next to 1.
        if (!take_band([&](const Mass& mass) { return mass.sum >= share; })) return;
        double sum = before_.sum;
        int64_t place = 0;
        while (place + 1 < (int64_t)band_.size() && sum + band_[place].weight < share) sum += band_[place++].weight;
        if (last_.weight < 0.0 || band_[place] < last_) last_ = band_[place];
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

    static bool any(Longs lanes) {
        int64_t all = 0;
        for (int j = 0; j < kDoubles; ++j) all |= lanes[j];
        return all;
    }

    // The weights that are kept, of the lanes from a token on.
    Doubles kept_from(int64_t i) const {
        const Doubles weight = load<Doubles>(&weights_[i]);
        Longs token_id;
        for (int j = 0; j < kDoubles; ++j) token_id[j] = i + j;
        const Longs is_kept = ((weight > last_.weight) | ((weight == last_.weight) & (token_id <= last_.token_id))) &
                              (weight >= least_);
        return is_kept ? weight : Doubles{};
    }

    // The first token whose cumulated weight exceeds a share of all; it has a weight of its own.
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
        // Rounding may leave the target unreached: then the last token that has a weight is drawn.
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

    int64_t num_columns_ = 0;
    double least_ = 0.0;
    Candidate last_{};
    Mass before_;  // the band
    const float* values_ = nullptr;
    Columns columns_;
    Likeliest likeliest_;
    Aligned<float> adjusted_;
    std::vector<int32_t> counts_;  // by token, zeros between rows
    Aligned<double> weights_;
    std::vector<Candidate> band_;
    std::vector<double> sums_;
};

}  // namespace radixrt
