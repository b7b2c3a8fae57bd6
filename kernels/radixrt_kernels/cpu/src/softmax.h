// The running softmax of one row: scores of a block of keys -> weights, sums of weights, and what the sums so far are
// scaled by.
#pragma once

#include "plan.h"

namespace radixrt {

constexpr float kNothingSeen = -1e30f;

// 2^x for x <= 0, as exactly as the type that it is narrowed to can tell: to 8e-5 for bfloat16, whose steps are 4e-3.
template <class T>
inline Floats weight_of(Floats x) {
    return exp2(x);
}

#if defined(__AVX512F__)
template <>
inline Floats weight_of<BFloat16>(Floats x) {
    if constexpr (kWidens) {
        // The same series around the middle of [0, 1): what is past the whole part, which is taken below, comes at once.
        const Floats f = (Floats)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
        Floats sum = splat(7.80245226e-2f);
        sum = sum * f + 2.26067167e-1f;
        sum = sum * f + 6.95833508e-1f;
        sum = sum * f + 9.99925213e-1f;
        return (Floats)_mm512_scalef_ps((__m512)sum, (__m512)x);
    }
    const Floats n = (Floats)_mm512_roundscale_ps((__m512)x, 0);
    const Floats f = x - n;
    Floats sum = splat(5.5171669e-2f);
    sum = sum * f + 2.4261113e-1f;
    sum = sum * f + 6.9326097e-1f;
    sum = sum * f + 9.9992806e-1f;
    return (Floats)_mm512_scalef_ps((__m512)sum, (__m512)n);
}
#endif

// Narrow two vectors at once: half the price.
inline void store_weights(BFloat16* target, Floats a, Floats b) {
#if defined(__AVX512BF16__)
    __m512bh halves = _mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
    std::memcpy(target, &halves, sizeof halves);
#else
    store_narrow(target, a);
    store_narrow(target + kLanes, b);
#endif
}
inline void store_weights(float* target, Floats a, Floats b) {
    store(target, a);
    store(target + kLanes, b);
}

inline bool any_above(Floats x, float limit) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
#else
    return largest_lane(x) > limit;
#endif
}

// Of a block, a row sees the positions [low, high): hide all others.
inline void hide(float* scores, int64_t low, int64_t high) {
    typedef int32_t Positions __attribute__((vector_size(4 * kLanes)));
    const int32_t first = (int32_t)std::max<int64_t>(low, 0), stop = (int32_t)std::min(high, kKeyBlock);
    for (int64_t i = 0; i < kKeyBlock; i += kLanes) {
        Positions position = load<Positions>(kPositionAt.data() + i);
        store(scores + i, (position >= first) & (position < stop) ? load<Floats>(scores + i) : splat(kNothingSeen));
    }
}

// How far, as a power of two, scores may grow before what was summed is scaled anew, which is dear: a branch foretold
// wrongly. A row's largest weight is then between 2^-kSlack and 1, so it must not be rounded: to bfloat16 that gave up to
// 1.4 times the error where one key leads.
template <class T>
constexpr float kSlack = std::is_same_v<Held<T>, float> ? 8.0f : 0.0f;

// Turn the scores of a whole block into weights: powers of two above `ceiling`, which no score passes. Args: kHides:
// kNothingSeen stands among them.
// Changes: ceiling, totals [kLanes], weights. Gives what a new ceiling scales the row's sums by, 1 without one.
template <class T, bool kHides>
inline float weigh(const float* scores, float log2_scale, float& ceiling, float* totals, Held<T>* weights) {
    Floats best = load<Floats>(scores), total = load<Floats>(totals);
    for (int64_t i = kLanes; i < kKeyBlock; i += kLanes) best = larger(best, load<Floats>(scores + i));
    best *= log2_scale;
    float factor = 1.0f;
    if (any_above(best, ceiling)) {
        float new_ceiling = largest_lane(best) + kSlack<T>;
        factor = exp2(splat(ceiling - new_ceiling))[0];
        total *= factor;
        ceiling = new_ceiling;
    }
#pragma GCC unroll 2
    for (int64_t i = 0; i < kKeyBlock; i += 2 * kLanes) {
        Floats pair[2];
#pragma GCC unroll 2
        for (int j = 0; j < 2; ++j) {
            Floats score = load<Floats>(scores + i + j * kLanes);
            Floats weight = weight_of<T>(score * log2_scale - ceiling);
            if constexpr (kHides) weight = score > kNothingSeen ? weight : Floats{};
            total += weight;
            pair[j] = weight;
        }
        store_weights(weights + i, pair[0], pair[1]);
    }
    store(totals, total);
    return factor;
}

}  // namespace radixrt
