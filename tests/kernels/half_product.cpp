// Products in float16 as the decoder makes them, for tests.
#include "gemm.h"

using namespace radixrt;

extern "C" {

int32_t most_terms() { return kMostTerms; }

// found [num_rows, num_outputs rounded up to panels] = rows [num_rows, num_inputs] times weight [num_outputs, num_inputs],
// both bfloat16. Paired: as of pack_weight.
void multiply(const uint16_t* rows, int64_t num_rows, int64_t num_inputs, const uint16_t* weight, int64_t num_outputs,
              int32_t paired, int32_t num_threads, float* found) {
    const int64_t num_steps = num_inputs / 2, num_panels = (num_outputs + kPanel - 1) / kPanel;
    Aligned<Word> panels(num_panels * half_panel_words(num_steps));
    pack_halves(reinterpret_cast<const BFloat16*>(weight), num_outputs, num_inputs, paired, panels.data());
    const Target target{found, 4 * num_panels * kPanel, 4 * kPanel};
    std::vector<ProductRoom> rooms(num_threads);
    Team team(num_threads);
    team.run([&](int thread) {
        multiply_all<Half>(team, thread, rooms[thread], reinterpret_cast<const Word*>(rows), num_steps, num_rows,
                           Weight{panels.data(), num_panels, num_steps}, target,
                           [&](int64_t row, int64_t panel, const Floats* sums) {
                               float* to = found + (row * num_panels + panel) * kPanel;
                               for (int v = 0; v < kPanelVectors; ++v) store(to + v * kLanes, sums[v]);
                           });
    });
}

}  // extern "C"
