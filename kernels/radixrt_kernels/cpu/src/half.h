// Vectors of 32 float16, for CPUs that multiply and add them: twice as many a cycle as float32.
//
// Two forms of the same few operations: the instructions (AVX512-FP16), and plain C++ for tests on CPUs without them.
#pragma once

#include "vector.h"

#if defined(__AVX512FP16__) || defined(RADIXRT_EMULATE_FP16)
#define RADIXRT_HAS_HALVES 1

namespace radixrt {

static_assert(kLanes == 16);
constexpr int kHalfLanes = 2 * kLanes;

// Of float32, rounded to nearest even: the low 16 lanes of the result are a's.
inline Words narrow_to_halves(Floats a, Floats b) {
    const __m256i low = _mm512_cvtps_ph((__m512)a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m256i high = _mm512_cvtps_ph((__m512)b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return (Words)_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

#if defined(__AVX512FP16__)

using HalfVector = __m512h;

inline HalfVector as_halves(Words words) { return (HalfVector)words; }
// a * b + sum, rounded once.
inline HalfVector multiply_add(HalfVector sum, HalfVector a, HalfVector b) { return _mm512_fmadd_ph(a, b, sum); }
inline HalfVector add(HalfVector a, HalfVector b) { return _mm512_add_ph(a, b); }
inline Floats widen_low(HalfVector x) {
    return (Floats)_mm512_cvtxph_ps((__m256h)_mm512_castsi512_si256((__m512i)x));
}
inline Floats widen_high(HalfVector x) {
    return (Floats)_mm512_cvtxph_ps((__m256h)_mm512_extracti64x4_epi64((__m512i)x, 1));
}

#else

struct HalfVector {
    _Float16 lanes[kHalfLanes] = {};
};

inline HalfVector as_halves(Words words) {
    HalfVector result;
    std::memcpy(result.lanes, &words, sizeof words);
    return result;
}
// The product is exact in float64, and so is nearly every sum: it is rounded once.
inline HalfVector multiply_add(HalfVector sum, const HalfVector& a, const HalfVector& b) {
    for (int i = 0; i < kHalfLanes; ++i)
        sum.lanes[i] = (_Float16)((double)a.lanes[i] * (double)b.lanes[i] + (double)sum.lanes[i]);
    return sum;
}
inline HalfVector add(HalfVector a, const HalfVector& b) {
    for (int i = 0; i < kHalfLanes; ++i) a.lanes[i] = (_Float16)((double)a.lanes[i] + (double)b.lanes[i]);
    return a;
}
inline Floats widen_low(const HalfVector& x) { return (Floats)_mm512_cvtph_ps(load<__m256i>(x.lanes)); }
inline Floats widen_high(const HalfVector& x) { return (Floats)_mm512_cvtph_ps(load<__m256i>(x.lanes + kLanes)); }

#endif

}  // namespace radixrt

#endif
