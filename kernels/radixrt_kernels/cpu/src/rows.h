// What a step does to single rows: embedding, norms, rotation.
#pragma once

#include <cmath>

#include "pack.h"

namespace radixrt {

// 1 / sqrt(mean of squares + epsilon)
inline float inverse_rms(const float* x, int64_t size, double epsilon) {
    Floats squares = {};
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        Floats v = load<Floats>(x + i);
        squares += v * v;
    }
    float sum = sum_lanes(squares);
    for (; i < size; ++i) sum += x[i] * x[i];
    return 1.0f / std::sqrt(sum / (float)size + (float)epsilon);
}

template <class T>
inline void normalize(const float* x, const float* weight, int64_t size, double epsilon, T* output) {
    float factor = inverse_rms(x, size, epsilon);
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes)
        store_narrow(output + i, load<Floats>(x + i) * factor * load<Floats>(weight + i));
    for (; i < size; ++i) narrow(x[i] * factor * weight[i], output + i);
}

template <class T>
inline void narrow_row(const float* x, int64_t size, T* output) {
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) store_narrow(output + i, load<Floats>(x + i));
    for (; i < size; ++i) narrow(x[i], output + i);
}

// Take one output's row out of packed panels.
template <class T>
inline void unpack_row(const Word* panels, int64_t num_steps, int64_t row, int64_t size, float* output) {
    const Word* lane = panels + row / kPanel * num_steps * kPanel + row % kPanel;
    for (int64_t i = 0; i < size; ++i) {
        T element;
        Word word = lane[i / kWordElements<T> * kPanel];
        std::memcpy(&element, reinterpret_cast<const char*>(&word) + i % kWordElements<T> * sizeof(T), sizeof(T));
        output[i] = to_float(element);
    }
}

// Turn the pairs (x[i], x[i + size / 2]) by their angles, after scaling: x[i] -> x[i] * factor * weight[i].
// Without weight nothing is scaled. Changes x.
template <class T>
inline void rotate(float* x, const float* weight, float factor, const float* cosine, const float* sine, int64_t size,
                   T* output) {
    if (weight) {
        for (int64_t i = 0; i < size; ++i) x[i] = x[i] * factor * weight[i];
    }
    int64_t half = size / 2, i = 0;
    for (; i + kLanes <= half; i += kLanes) {
        Floats a = load<Floats>(x + i), b = load<Floats>(x + half + i);
        Floats c = load<Floats>(cosine + i), s = load<Floats>(sine + i);
        store_narrow(output + i, a * c - b * s);
        store_narrow(output + half + i, b * c + a * s);
    }
    for (; i < half; ++i) {
        float a = x[i], b = x[half + i];
        narrow(a * cosine[i] - b * sine[i], output + i);
        narrow(b * cosine[i] + a * sine[i], output + half + i);
    }
}

}  // namespace radixrt
