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

using HalfVector = __m512i;

inline HalfVector as_halves(Words words) { return (HalfVector)words; }

// Function(quarter's lanes of each argument, as float64), rounded once to float16.
template <class Function, class... Vectors>
inline HalfVector by_quarters(Function&& function, const Vectors&... x) {
    HalfVector result;
    for (int i = 0; i < 4; ++i) {
        const __m512d exact = function(
            _mm512_cvtps_pd(_mm256_cvtph_ps(load<__m128i>(reinterpret_cast<const char*>(&x) + i * sizeof(__m128i))))...);
        // To float32 towards zero, with the last bit set where that is not exact: then the next rounding is right.
        __m256i cut = (__m256i)_mm512_cvt_roundpd_ps(exact, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
        const __mmask8 is_cut = _mm512_cmp_pd_mask(_mm512_cvtps_pd((__m256)cut), exact, _CMP_NEQ_OQ);
        cut = _mm256_mask_or_epi32(cut, is_cut, cut, _mm256_set1_epi32(1));
        store(reinterpret_cast<char*>(&result) + i * sizeof(__m128i), _mm256_cvtps_ph((__m256)cut, 0));
    }
    return result;
}
// The product is exact in float64, and so is nearly every sum.
inline HalfVector multiply_add(HalfVector sum, HalfVector a, HalfVector b) {
    return by_quarters([](__m512d s, __m512d x, __m512d y) { return _mm512_fmadd_pd(x, y, s); }, sum, a, b);
}
inline HalfVector add(HalfVector a, HalfVector b) {
    return by_quarters([](__m512d x, __m512d y) { return _mm512_add_pd(x, y); }, a, b);
}
inline Floats widen_low(HalfVector x) { return (Floats)_mm512_cvtph_ps(_mm512_castsi512_si256(x)); }
inline Floats widen_high(HalfVector x) { return (Floats)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(x, 1)); }

#endif

}  // namespace radixrt

#endif
