// Which outputs of a row can be drawn: the first of the vocabulary, and of these what the row's mask allows. A panel's are
// the bits of a word, as in the mask itself.
#pragma once

#include <limits>

#include "tile.h"

namespace radixrt {

static_assert(kPanel == 32);
constexpr Word kAllLanes = ~Word{0};

// Of a panel's outputs: those that are no padding, and of these the allowed.
struct Lanes {
    Word real, allowed;
};

class Columns {
public:
    // masks: by row, a bit for each of num_columns outputs; null where all are allowed, or in place of all masks.
    void choose(int64_t num_columns, const Word* const* masks) {
        num_columns_ = num_columns;
        masks_ = masks;
    }

    Lanes lanes(int64_t row, int64_t panel) const {
        const int64_t count = num_columns_ - panel * kPanel;
        if (count <= 0) return {0, 0};
        const Word real = count >= kPanel ? kAllLanes : (Word{1} << count) - 1;
        const Word* mask = masks_ ? masks_[row] : nullptr;
        return {real, mask ? real & mask[panel] : real};
    }

private:
    int64_t num_columns_ = 0;
    const Word* const* masks_ = nullptr;
};

// Lane by lane of a vector: x where the bit is set, else y.
inline Floats choose(Word bits, Floats x, Floats y) {
#if defined(__AVX512F__)
    return (Floats)_mm512_mask_blend_ps((__mmask16)bits, (__m512)y, (__m512)x);
#else
    Words own;
    for (int i = 0; i < kLanes; ++i) own[i] = Word{1} << i;
    return (splat_word(bits) & own) != 0 ? x : y;
#endif
}

// Padding is less than all numbers, and so is what is refused; but infinity and no number stay what no answer comes from.
inline Floats refuse(const Lanes& lanes, int v, Floats x) {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    const Floats refused = choose(lanes.allowed >> v * kLanes, x, x - kInfinity);
    return choose(lanes.real >> v * kLanes, refused, splat(-kInfinity));
}

}  // namespace radixrt
