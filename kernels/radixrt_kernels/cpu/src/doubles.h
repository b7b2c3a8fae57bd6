// Vectors of float64, for weights whose sums tell tokens apart.
#pragma once

#include "vector.h"

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

inline bool any(Longs lanes) {
    int64_t all = 0;
    for (int j = 0; j < kDoubles; ++j) all |= lanes[j];
    return all;
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

}  // namespace radixrt
