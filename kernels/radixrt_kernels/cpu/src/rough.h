// A row's likeliest output without most of its outputs. A rough product of 8-bit weights with 8-bit inputs gives every
// output and a bound on its error; only what may be the largest is then computed as ever. So of a bfloat16 weight half the
// memory is read, and the answer is the same to the bit.
//
//     w = s q + d,  x = a h + r,  q and h whole numbers:     w . x = s a (q . h) + s q . r + d . x
//
// The last two are the error: |s q| |r| + |d| |x| at most (lengths of vectors), and what the exact product rounds. Where
// that leaves an output open, r is split once more, r = b l + r', and s b (q . l) is added: the weights are near then.
#pragma once

#include <atomic>
#include <cmath>
#include <limits>
#include <memory>

#include "columns.h"
#include "gemm.h"

// Where products with weights run on a matrix unit, their sums are in another order than those of single rows here.
#if defined(__AVX512VNNI__) && !defined(RADIXRT_HAS_TILES)
#define RADIXRT_HAS_ROUGH
#endif

namespace radixrt {

// Of a panel's outputs: the step s, and the lengths of s q and d.
struct RoughPanel {
    float step[kPanel], length[kPanel], rest[kPanel];
};

// Null: there are none.
struct RoughWeight {
    const Word* panels;        // four inputs a word; a multiple of kRoughSteps steps
    const RoughPanel* bounds;  // [num_panels]
};

// Sums of products stay below 2^31.
constexpr int64_t kMaxRoughInputs = 65536;
constexpr int kRoughSteps = 4;

inline int64_t rough_steps(int64_t num_inputs) { return round_up((num_inputs + 3) / 4, kRoughSteps); }

#if defined(RADIXRT_HAS_ROUGH)

constexpr bool kHasRough = true;
// The instruction wants one side unsigned: weights are kept as q + 128.
constexpr int kOffset = 128, kMostByte = 127;
// Less than this is taken for 0, so that its inverse is a number.
constexpr float kLeastStep = 1e-35f;
// Longer weights or inputs, and shorter inputs, leave outputs open: products might overflow on their way to a sum that does
// not, or vanish. With the least rest of weights, errors are larger than all that is flushed to zero.
constexpr float kMostLength = 1e18f, kLeastLength = 1e-10f, kLeastRest = 1e-20f;

struct Byte {};

// Sums are whole numbers, in the bits of a float.
template <>
inline Floats multiply_add<Byte>(Floats sum, Words panel, Words row) {
    // _mm512_dpbusd_epi32 would do, but GCC 12 copies a sum at each change of its type, and runs out of registers.
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(panel), "v"(row));
    return sum;
}

inline float inverse_step(float step) { return step < kLeastStep ? 0.0f : 1.0f / step; }

// Write one output's bytes, and give its step and lengths. words: of its lane, kPanel apart, zeros before.
template <class T>
inline void pack_rough_row(const T* weight, int64_t num_inputs, int64_t lane, RoughPanel& bounds, Word* words) {
    float largest = 0.0f;
    for (int64_t i = 0; i < num_inputs; ++i) largest = std::max(largest, std::fabs(to_float(weight[i])));
    const float step = largest / kMostByte, inverse = inverse_step(step);
    double length = 0.0, rest = 0.0;
    for (int64_t i = 0; i < num_inputs; ++i) {
        const float value = to_float(weight[i]);
        const float scaled = std::min(std::max(value * inverse, (float)-kMostByte), (float)kMostByte);
        const int q = scaled == scaled ? (int)std::nearbyint(scaled) : 0;
        const double near = (double)step * q;
        length += near * near;
        rest += (value - near) * (value - near);
        words[i / 4 * kPanel] |= (Word)(uint8_t)(q + kOffset) << 8 * (i % 4);
    }
    bounds.step[lane] = step;
    bounds.length[lane] = (float)std::sqrt(length);
    const bool is_usual = std::sqrt(length) <= kMostLength && std::sqrt(rest) <= kMostLength;  // false without numbers
    bounds.rest[lane] =
        is_usual ? std::max((float)std::sqrt(rest), kLeastRest) : std::numeric_limits<float>::infinity();
}

// A weight [num_outputs, num_inputs], rows contiguous -> panels, zeros where nothing is.
template <class T>
inline void pack_rough(const T* weight, int64_t num_outputs, int64_t num_inputs, Word* panels, RoughPanel* bounds) {
    const int64_t panel_words = rough_steps(num_inputs) * kPanel;
    const int64_t num_panels = (num_outputs + kPanel - 1) / kPanel;
    std::fill_n(panels, num_panels * panel_words, 0);
    std::fill_n(bounds, num_panels, RoughPanel{});
    for (int64_t i = 0; i < num_outputs; ++i) {
        const int64_t panel = i / kPanel, lane = i % kPanel;
        pack_rough_row(weight + i * num_inputs, num_inputs, lane, bounds[panel], panels + panel * panel_words + lane);
    }
}

// The search of one step: for each row, the least that its largest output can be, which all threads raise; and by thread,
// the panels that may hold it. With a least of their own, threads whose outputs are small would look at half of them twice.
class RoughSearch {
public:
    void begin(int num_threads, int64_t num_rows, int64_t num_inputs) {
        num_inputs_ = num_inputs;
        num_steps_ = rough_steps(num_inputs);
        // An exact product rounds by 2^-24 of its terms at most num_inputs times; conversions and lengths some more.
        slack_ = (float)(num_inputs + 64) * 0x1p-23f;
        if (num_rows > (int64_t)rows_.size()) rows_ = std::vector<Row>(num_rows);
        for (Row& row : rows_) row.least.store(-kInfinity, std::memory_order_relaxed);
        words_.resize(num_rows * row_stride());
        threads_.resize(num_threads);
        for (Thread& thread : threads_) {
            if (num_rows > (int64_t)thread.open.size()) thread.open.resize(num_rows);
            for (std::vector<Open>& open : thread.open) open.clear();
        }
    }

    // Rows of words: h [num_steps], then l [num_steps].
    const Word* words() const { return words_.data(); }
    int64_t row_stride() const { return 2 * num_steps_; }
    int64_t num_steps() const { return num_steps_; }

    // Split a row of inputs.
    template <class T>
    void take_row(int64_t row, const T* x) {
        int8_t* bytes[2];
        for (int part = 0; part < 2; ++part) {
            bytes[part] = reinterpret_cast<int8_t*>(&words_[row * row_stride() + part * num_steps_]);
            std::fill_n(bytes[part], 4 * num_steps_, 0);
        }
        Floats largest = {}, squares = {};
        for (int64_t i = 0; i < num_inputs_; i += kLanes) {
            const Floats value = load_some(x + i, num_inputs_ - i);
            largest = larger(value, larger(-value, largest));
            squares += value * value;
        }
        const float length = std::sqrt(sum_lanes(squares));
        Row& taken = rows_[row];
        taken.step[0] = taken.step[1] = 0.0f;
        taken.offset[0] = taken.offset[1] = 0;
        if (!(length >= kLeastLength && length <= kMostLength)) {
            taken.error[0] = taken.error[1] = taken.rest_error = kInfinity;  // every output is open
            return;
        }
        taken.step[0] = largest_lane(largest) / kMostByte;
        taken.step[1] = taken.step[0] / (2 * kMostByte);
        Floats rests[2] = {};
        __m512i sums[2] = {};
        const float inverses[2] = {inverse_step(taken.step[0]), inverse_step(taken.step[1])};
        for (int64_t i = 0; i < num_inputs_; i += kLanes) {
            Floats value = load_some(x + i, num_inputs_ - i);
            for (int part = 0; part < 2; ++part) {
                const __m512i whole = _mm512_cvtps_epi32((__m512)(value * inverses[part]));
                const __m128i narrow = _mm512_cvtsepi32_epi8(whole);
                const __m512i kept = _mm512_cvtepi8_epi32(narrow);
                store(bytes[part] + i, narrow);
                value -= (Floats)_mm512_cvtepi32_ps(kept) * taken.step[part];
                rests[part] += value * value;
                sums[part] = _mm512_add_epi32(sums[part], kept);
            }
        }
        for (int part = 0; part < 2; ++part) {
            taken.offset[part] = kOffset * _mm512_reduce_add_epi32(sums[part]);
            taken.error[part] = kMargin * std::sqrt(sum_lanes(rests[part])) + slack_ * length;
        }
        taken.rest_error = (kMargin + slack_) * length;
    }

    // A panel's products with the h of a row; called once for each.
    void see(int thread, int64_t row, int64_t panel, const Lanes& lanes, const RoughWeight& weight,
             const Floats* sums) {
        const RoughPanel& bounds = weight.bounds[panel];
        Row& taken = rows_[row];
        float least = taken.least.load(std::memory_order_relaxed);
        Floats values[kPanelVectors];
        __mmask16 open = 0;
        for (int v = 0; v < kPanelVectors; ++v) {
            values[v] = value_of(sums[v], bounds, taken, 0, v);
            open |= may_count(values[v] + error_of(bounds, taken, 0, v), least, lanes, v);
        }
        if (!open) return;
        Floats rests[kPanelVectors];
        multiply_rest(row, weight.panels + panel * num_steps_ * kPanel, rests);
        float most = -kInfinity;
        for (int v = 0; v < kPanelVectors; ++v) {
            const Floats value = values[v] + value_of(rests[v], bounds, taken, 1, v);
            const Floats error = error_of(bounds, taken, 1, v), lower = value - error, upper = value + error;
            // What is no number is never sure.
            const __mmask16 allowed = lanes.allowed >> v * kLanes;
            const __mmask16 sure = allowed & _mm512_cmp_ps_mask((__m512)lower, (__m512)lower, _CMP_ORD_Q);
            least = std::max(least, _mm512_mask_reduce_max_ps(sure, (__m512)lower));
            most = std::max(most, _mm512_mask_reduce_max_ps(allowed, (__m512)upper));
            if (not_below(upper, kInfinity) & lanes.real >> v * kLanes) most = kInfinity;
        }
        if (most < least) return;
        raise(taken.least, least);
        threads_[thread].open[row].push_back({panel, most});
    }

    // Once all panels were seen: how many are to be computed, of all rows.
    int64_t num_open(int64_t num_rows) const {
        int64_t count = 0;
        for (int64_t row = 0; row < num_rows; ++row) for_each_open(row, [&](int64_t) { ++count; });
        return count;
    }

    // Once all panels were seen: call function(panel) for those that may hold the row's largest output.
    template <class Function>
    void for_each_open(int64_t row, Function&& function) const {
        const float least = rows_[row].least.load(std::memory_order_relaxed);
        for (const Thread& thread : threads_)
            for (const Open& open : thread.open[row])
                if (open.most >= least) function(open.panel);
    }

private:
    static constexpr float kInfinity = std::numeric_limits<float>::infinity();
    static constexpr float kMargin = 1.001f;  // for roundings in lengths

    // Of h and l: the step, what the offset of weights adds, and the error for each length of s q; and of d.
    struct Row {
        float step[2], error[2], rest_error;
        int32_t offset[2];
        std::atomic<float> least;
    };
    struct Open {
        int64_t panel;
        float most;
    };
    struct alignas(kLineBytes) Thread {
        std::vector<std::vector<Open>> open;  // by row
    };

    static void raise(std::atomic<float>& least, float value) {
        float known = least.load(std::memory_order_relaxed);
        while (known < value && !least.compare_exchange_weak(known, value, std::memory_order_relaxed)) {
        }
    }

    template <class T>
    static Floats load_some(const T* x, int64_t count) {
        if (count >= kLanes) return load_wide(x);
        Floats result = {};
        for (int64_t i = 0; i < count; ++i) result[i] = to_float(x[i]);
        return result;
    }

    static Floats value_of(Floats sums, const RoughPanel& bounds, const Row& row, int part, int v) {
        const __m512i products = _mm512_sub_epi32((__m512i)sums, _mm512_set1_epi32(row.offset[part]));
        return (Floats)_mm512_cvtepi32_ps(products) * (load<Floats>(bounds.step + v * kLanes) * row.step[part]);
    }

    static Floats error_of(const RoughPanel& bounds, const Row& row, int part, int v) {
        return load<Floats>(bounds.length + v * kLanes) * row.error[part] +
               load<Floats>(bounds.rest + v * kLanes) * row.rest_error;
    }

    // Lanes whose outputs may be the largest, or may be no number, which counts in refused ones as well.
    static __mmask16 may_count(Floats upper, float least, const Lanes& lanes, int v) {
        return (not_below(upper, least) & lanes.allowed >> v * kLanes) |
               (not_below(upper, kInfinity) & lanes.real >> v * kLanes);
    }

    static __mmask16 not_below(Floats x, float limit) {
        return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(limit), _CMP_NLT_UQ);
    }

    // Four sums at a time, as each waits for the one before.
    void multiply_rest(int64_t row, const Word* panel, Floats (&sums)[kPanelVectors]) const {
        const Word* words = &words_[row * row_stride() + num_steps_];
        Floats parts[kRoughSteps][kPanelVectors] = {};
        for (int64_t k = 0; k < num_steps_; k += kRoughSteps)
            for (int j = 0; j < kRoughSteps; ++j)
                for (int v = 0; v < kPanelVectors; ++v)
                    parts[j][v] = multiply_add<Byte>(parts[j][v], load<Words>(panel + (k + j) * kPanel + v * kLanes),
                                                     splat_word(words[k + j]));
        for (int v = 0; v < kPanelVectors; ++v) {
            __m512i sum = (__m512i)parts[0][v];
            for (int j = 1; j < kRoughSteps; ++j) sum = _mm512_add_epi32(sum, (__m512i)parts[j][v]);
            sums[v] = (Floats)sum;
        }
    }

    int64_t num_inputs_ = 0, num_steps_ = 0;
    float slack_ = 0;
    std::vector<Row> rows_;
    Aligned<Word> words_;
    std::vector<Thread> threads_;
};

// After some searches in a row that did not gain there is none for some steps, then one on trial: so weights without good 8
// bits cost little, and a single row that might go on in many ways stops nothing.
class Patience {
public:
    bool may_search() {
        if (pause_ == 0) return true;
        --pause_;
        return false;
    }

    void learn(bool gained) {
        num_vain_ = gained ? 0 : num_vain_ + 1;
        if (num_vain_ >= kMostVain) pause_ = kPause;
    }

private:
    static constexpr int kMostVain = 4, kPause = 64;

    int num_vain_ = 0;  // in a row
    int pause_ = 0;     // steps to go without one
};

#else

constexpr bool kHasRough = false;

#endif

}  // namespace radixrt
