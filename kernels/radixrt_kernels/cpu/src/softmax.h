// The running softmax of one row: scores of a block of keys -> weights, sums of weights, and what the sums so far are
// scaled by.
#pragma once

#include "plan.h"

namespace radixrt {

constexpr float kNothingSeen = -1e30f;

// 2^x for x <= 0, as exactly as the type that it is narrowed to can tell: to 3e-6 for bfloat16, whose steps are 4e-3.
template <class T>
inline Floats weight_of(Floats x) {
    return exp2(x);
}

#if defined(__AVX512F__)
template <>
inline Floats weight_of<BFloat16>(Floats x) {
    const Floats n = (Floats)_mm512_roundscale_ps((__m512)x, 0);
    const Floats f = x - n;
    Floats sum = splat(9.5701003e-3f);
    sum = sum * f + 5.5917859e-2f;
    sum = sum * f + 2.4024744e-1f;
    sum = sum * f + 6.9312179e-1f;
    sum = sum * f + 9.9999928e-1f;
    return (Floats)_mm512_scalef_ps((__m512)sum, (__m512)n);
}
#endif

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

// Turn the scores of a whole block into weights. Args: kHides: kNothingSeen stands among them.
// Changes: maximum, totals [kLanes], weights. Gives what a new maximum scales the row's sums by, 1 without one.
template <class T, bool kHides>
inline float weigh(const float* scores, float log2_scale, float& maximum, float* totals, T* weights) {
    Floats best = load<Floats>(scores), total = load<Floats>(totals);
    for (int64_t i = kLanes; i < kKeyBlock; i += kLanes) best = larger(best, load<Floats>(scores + i));
    best *= log2_scale;
    float factor = 1.0f;
    if (any_above(best, maximum)) {
        float new_maximum = largest_lane(best);
        factor = exp2(splat(maximum - new_maximum))[0];
        total *= factor;
        maximum = new_maximum;
    }
#pragma GCC unroll 4
    for (int64_t i = 0; i < kKeyBlock; i += kLanes) {
        Floats score = load<Floats>(scores + i);
        Floats weight = weight_of<T>(score * log2_scale - maximum);
        if constexpr (kHides) weight = score > kNothingSeen ? weight : Floats{};
        total += weight;
        store_narrow(weights + i, weight);
    }
    store(totals, total);
    return factor;
}

}  // namespace radixrt
