// Rows against a panel (tile.h) in float16, for weights and rows of bfloat16: on CPUs that multiply float16 at twice the
// rate of float32, and pairs of bfloat16 at half of it.
//
//     weight row  w = s u,  input row  x = t y:   s, t powers of two that bring the largest of u and y to [8, 16)
//     panel:  [log2 s0 ... log2 s31] | step 0 [u0 ... u31] | step 1 ...      a word is two neighbouring u of one output
//
// So every product is below 2^8 and no sum of kMostTerms overflows, whatever finite numbers there are; what is less than
// 2^-21 of its row's largest is rounded, all else of bfloat16 is exact in float16.
//
// Sums of float16 round: a run of products keeps their error near that of inputs in bfloat16 (RESULTS.md), a few runs are
// added pair by pair, and those sums are carried on in float32. Even and odd inputs have sums of their own. All that depends on
// the number of inputs alone: a row's result is the same whatever rows are beside it.
#pragma once

#include <cmath>

#include "aligned.h"
#include "half.h"
#include "pack.h"

namespace radixrt {

#if defined(RADIXRT_HAS_HALVES)

constexpr bool kHasHalves = true;
struct Half {};

// Products of a run, and runs that are added in float16.
constexpr int kRunSteps = 24, kRuns = 4;
constexpr int kMostTerms = kRunSteps * kRuns;
constexpr int kLargestExponent = 3;  // of u and y
static_assert(kMostTerms << (2 * kLargestExponent + 2) < 65504);

// Of the power of two that `largest` is divided by to come to [8, 16): 0 for what has none.
inline int exponent_of(float largest) {
    if (!(largest > 0.0f) || std::isinf(largest)) return 0;
    // The inverse is to be a number: where all are less than 2^-117, some lose bits.
    return std::max(std::ilogb(largest) - kLargestExponent, -120);
}

// A row in float16. Args: num_inputs: a multiple of 2. Gives the exponent of its unit.
inline float take_halves(const BFloat16* x, int64_t num_inputs, Word* words) {
    Floats largest = {};
    float most = 0.0f;
    int64_t i = 0;
    for (; i + kLanes <= num_inputs; i += kLanes) {
        const Floats value = load_wide(x + i);
        largest = larger(value, larger(-value, largest));
    }
    for (int64_t j = i; j < num_inputs; ++j) most = std::max(most, std::fabs(to_float(x[j])));
    most = std::max(most, largest_lane(largest));
    const int exponent = exponent_of(most);
    const float inverse = std::ldexp(1.0f, -exponent);
    for (i = 0; i + kHalfLanes <= num_inputs; i += kHalfLanes)
        store(words + i / 2, narrow_to_halves(load_wide(x + i) * inverse, load_wide(x + i + kLanes) * inverse));
    for (; i < num_inputs; i += 2) {
        const Floats pair = {to_float(x[i]) * inverse, to_float(x[i + 1]) * inverse};
        words[i / 2] = narrow_to_halves(pair, Floats{})[0];
    }
    return (float)exponent;
}

// Words of a panel of weights.
inline int64_t half_panel_words(int64_t num_steps) { return (num_steps + 1) * kPanel; }

// A weight [num_outputs, num_inputs], rows contiguous -> panels. Paired: as of pack_weight.
inline void pack_halves(const BFloat16* weight, int64_t num_outputs, int64_t num_inputs, bool paired, Word* panels) {
    const int64_t num_steps = num_inputs / 2;
    std::vector<Word> words(kPanel * num_steps);
    FarLines nothing;
    for_each_panel(weight, num_outputs, num_inputs, paired, [&](int64_t p, const BFloat16* const* rows) {
        Word* panel = panels + p * half_panel_words(num_steps);
        const Word* halves[kPanel];
        for (int i = 0; i < kPanel; ++i) {
            const float exponent = take_halves(rows[i], num_inputs, &words[i * num_steps]);
            std::memcpy(panel + i, &exponent, sizeof exponent);
            halves[i] = &words[i * num_steps];
        }
        pack_panel(halves, 0, num_steps, panel + kPanel, nothing);
    });
}

// The sums of one run of steps. Changes: next, which is asked for without a branch.
template <int kRows>
[[gnu::always_inline]] inline void multiply_run(const Word* const* base, int64_t row_stride, const Word* panel,
                                                int64_t num_steps, HalfVector* sums, const char*& next,
                                                int64_t next_stride) {
    HalfVector run[kRows][kPanelVectors] = {};
    for (int64_t k = 0; k < num_steps; ++k, next += next_stride) {
        __builtin_prefetch(next, 0, 2);
        __builtin_prefetch(next + kLineBytes, 0, 2);
        HalfVector outputs[kPanelVectors];
#pragma GCC unroll 2
        for (int v = 0; v < kPanelVectors; ++v) outputs[v] = as_halves(load<Words>(panel + k * kPanel + v * kLanes));
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) {
            const HalfVector row = as_halves(splat_word(base[r / 4][(r % 4) * row_stride + k]));
#pragma GCC unroll 2
            for (int v = 0; v < kPanelVectors; ++v) run[r][v] = multiply_add(run[r][v], outputs[v], row);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < kPanelVectors; ++v) sums[r * kPanelVectors + v] = run[r][v];
}

// Runs' sums, added pair by pair.
template <int kSums>
inline HalfVector add_runs(const HalfVector (&runs)[kRuns][kSums], int i) {
    static_assert(kRuns == 4);
    return add(add(runs[0][i], runs[1][i]), add(runs[2][i], runs[3][i]));
}

// What kSums vectors of words have summed in float32: of each its first outputs, then its last ones, even and odd inputs
// apart.
template <int kSums>
class HalfTotals {
public:
    template <bool kIsFirst>
    void add(const HalfVector (&runs)[kRuns][kSums]) {
        for (int i = 0; i < kSums; ++i) {
            const HalfVector sum = add_runs(runs, i);
            totals_[i][0] = kIsFirst ? widen_low(sum) : totals_[i][0] + widen_low(sum);
            totals_[i][1] = kIsFirst ? widen_high(sum) : totals_[i][1] + widen_high(sum);
        }
    }

    void write(Floats* sums) const {
        Words even, odd;
        for (int i = 0; i < kLanes; ++i) even[i] = 2 * i, odd[i] = 2 * i + 1;
        for (int i = 0; i < kSums; ++i)
            sums[i] = __builtin_shuffle(totals_[i][0], totals_[i][1], even) +
                      __builtin_shuffle(totals_[i][0], totals_[i][1], odd);
    }

private:
    Floats totals_[kSums][2];
};

// sums[r] = the product of row r with the panel, in units of both.
//   rows: kRows rows of num_steps words, row_stride words apart; panel: its steps.
//   next: memory to ask for, two lines a step, next_stride bytes further with each; 0: the same again.
// Not inline: what is around it would fill the registers that addresses need.
template <int kRows>
[[gnu::noinline]] void multiply_halves(const Word* rows, int64_t row_stride, const Word* panel, int64_t num_steps,
                                       Floats* sums, const char* next, int64_t next_stride) {
    constexpr int kSums = kRows * kPanelVectors, kGroups = (kRows + 3) / 4;
    HalfVector runs[kRuns][kSums];
    HalfTotals<kSums> totals;
    const Word* base[kGroups];
    for (int g = 0; g < kGroups; ++g) base[g] = rows + 4 * g * row_stride;
    for (bool is_first = true; num_steps > 0; is_first = false) {
        for (int i = 0; i < kRuns; ++i) {
            const int64_t count = std::min<int64_t>(kRunSteps, num_steps);  // 0 gives zeros
            multiply_run<kRows>(base, row_stride, panel, count, runs[i], next, next_stride);
            for (int g = 0; g < kGroups; ++g) base[g] += count;
            panel += count * kPanel;
            num_steps -= count;
        }
        is_first ? totals.template add<true>(runs) : totals.template add<false>(runs);
    }
    totals.write(sums);
}

// A thread's rows in float16: those of the block that it works on.
class HalfRows {
public:
    // Rows [first, stop) of words of bfloat16, stride words apart.
    void take(const Word* inputs, int64_t stride, int64_t first, int64_t stop, int64_t num_steps) {
        const int64_t count = stop - first;
        if ((int64_t)exponents_.size() < count) exponents_.resize(count);
        if ((int64_t)words_.size() < count * num_steps) words_.resize(count * num_steps);
        for (int64_t i = 0; i < count; ++i)
            exponents_[i] = take_halves(reinterpret_cast<const BFloat16*>(inputs + (first + i) * stride), 2 * num_steps,
                                        &words_[i * num_steps]);
    }

    const Word* words() const { return words_.data(); }
    float exponent(int64_t i) const { return exponents_[i]; }

private:
    Aligned<Word> words_;
    std::vector<float> exponents_;
};

// How multiply_all_vectors multiplies rows of bfloat16 with panels of float16.
class HalfProduct {
public:
    static constexpr int kAskingTiles = 2;
    static int64_t panel_words(int64_t num_steps) { return half_panel_words(num_steps); }

    HalfProduct(HalfRows& rows, const Word* inputs, int64_t row_stride, int64_t num_steps)
        : rows_(rows), inputs_(inputs), row_stride_(row_stride), num_steps_(num_steps) {}

    // Every thread brings the rows that it needs to float16 itself: that costs less than to meet once more.
    void take(int64_t first_row, int64_t stop_row) {
        if (first_row == first_ && stop_row == stop_) return;
        first_ = first_row, stop_ = stop_row;
        rows_.take(inputs_, row_stride_, first_row, stop_row, num_steps_);
    }

    template <int kRows>
    void multiply(int64_t first, const Word* panel, Floats (&sums)[kRows][kPanelVectors], NextLines next) const {
        const bool asks = next.lines_per_step > 0;
        multiply_halves<kRows>(rows_.words() + first * num_steps_, num_steps_, panel + kPanel, num_steps_, sums[0],
                               asks ? next.at : reinterpret_cast<const char*>(panel), next.lines_per_step * kLineBytes);
        // By both units at once: one after the other might pass the range on the way.
        for (int v = 0; v < kPanelVectors; ++v) {
            const Floats exponents = load<Floats>(panel + v * kLanes);
            for (int r = 0; r < kRows; ++r)
                sums[r][v] = (Floats)_mm512_scalef_ps((__m512)sums[r][v],
                                                      (__m512)(exponents + rows_.exponent(first + r)));
        }
    }

private:
    HalfRows& rows_;
    const Word* const inputs_;
    const int64_t row_stride_, num_steps_;
    int64_t first_ = 0, stop_ = 0;  // rows that were taken
};

#else

constexpr bool kHasHalves = false;
struct Half {};

class HalfRows {};

#endif

}  // namespace radixrt
