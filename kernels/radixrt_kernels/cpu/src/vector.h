// Vectors as wide as this build's registers, in GCC's vector extension: one source for AVX-512, AVX2 and plain builds.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace radixrt {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

// A word is 32 bits of input to a product: one float, or two neighbouring bfloat16 (the first in the low half).
using Word = uint32_t;
struct BFloat16 {
    uint16_t bits;
};

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef Word Words __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
typedef uint16_t WideHalves __attribute__((vector_size(4 * kLanes)));

template <class Vector>
inline Vector load(const void* source) {
    Vector result;
    std::memcpy(&result, source, sizeof(Vector));
    return result;
}

template <class Vector>
inline void store(void* target, Vector vector) {
    std::memcpy(target, &vector, sizeof(Vector));
}

inline Floats splat(float value) { return value - Floats{}; }
inline Words splat_word(Word value) { return value | Words{}; }
inline Floats as_floats(Words words) { return (Floats)words; }
inline Words as_words(Floats floats) { return (Words)floats; }

// Of a and b, where one is no number, b.
inline Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
    return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

inline float sum_lanes(Floats x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    for (int half = kLanes / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) x[i] += x[i + half];
    return x[0];
#endif
}

inline float largest_lane(Floats x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float result = x[0];
    for (int i = 1; i < kLanes; ++i) result = x[i] > result ? x[i] : result;
    return result;
#endif
}

inline float to_float(BFloat16 x) {
    Word bits = (Word)x.bits << 16;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}
inline float to_float(float x) { return x; }

// Round to nearest even.
inline void narrow(float x, BFloat16* target) {
    Word bits;
    std::memcpy(&bits, &x, 4);
    target->bits = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline void narrow(float x, float* target) { *target = x; }

inline void store_narrow(BFloat16* target, Floats x) {
#if defined(__AVX512BF16__)
    __m256bh halves = _mm512_cvtneps_pbh((__m512)x);
    std::memcpy(target, &halves, sizeof halves);
#else
    Words bits = as_words(x);
    store(target, __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, Halves));
#endif
}
inline void store_narrow(float* target, Floats x) { store(target, x); }

inline Floats load_wide(const BFloat16* source) {
    return as_floats(__builtin_convertvector(load<Halves>(source), Words) << 16);
}
inline Floats load_wide(const float* source) { return load<Floats>(source); }

// 2^f for |f| <= 1/2; the series ends at f^7 / 7!.
inline Floats exp2_fraction(Floats f) {
    Floats sum = splat(1.5252734e-5f);
    sum = sum * f + 1.5403530e-4f;
    sum = sum * f + 1.3333558e-3f;
    sum = sum * f + 9.6181291e-3f;
    sum = sum * f + 5.5504109e-2f;
    sum = sum * f + 2.4022651e-1f;
    sum = sum * f + 6.9314718e-1f;
    return sum * f + 1.0f;
}

// 2^x for x <= 127; below -126 it gives 2^-126 or so, which is nothing next to the 1 of the largest score.
// 2^x = 2^n 2^f with |f| <= 1/2.
inline Floats exp2(Floats x) {
    x = larger(x, splat(-126.0f));
#if defined(__AVX512F__)
    const Floats n = (Floats)_mm512_roundscale_ps((__m512)x, 0);
    const Floats f = x - n;
#else
    // Adding 1.5 * 2^23 leaves n in the low bits of the sum.
    const Floats shift = splat(12582912.0f);
    const Floats n = x + shift;
    const Floats f = x - (n - shift);
#endif
    const Floats sum = exp2_fraction(f);
#if defined(__AVX512F__)
    return (Floats)_mm512_scalef_ps((__m512)sum, (__m512)n);
#else
    return as_floats(as_words(sum) + (as_words(n) << 23));
#endif
}

constexpr float kLog2E = 1.44269504f;

// x * sigmoid(x). Past the clamp the sigmoid is 0 to float32.
inline Floats silu(Floats x) {
    Floats power = x * -kLog2E;
    power = power > 126.0f ? splat(126.0f) : power;
    return x / (exp2(power) + 1.0f);
}

}  // namespace radixrt
