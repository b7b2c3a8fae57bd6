// Products on the matrix unit as the decoder makes them, and single tile instructions, for tests.
#include "check.h"

using namespace radixrt;

extern "C" {

int32_t request_permission() { return amx::request_permission(); }
int32_t check_passes() { return products_are_right(); }

// Adds to sums [num_rows, 32 * num_panels], so that a row stored twice is seen.
//   num_before: rows of a product before, for nothing, by the same threads.
void multiply_rows(const uint32_t* rows, int64_t row_stride, int64_t num_rows, const uint32_t* panels,
                   int64_t num_panels, int64_t num_steps, int32_t num_threads, int64_t num_before, float* sums) {
    Team team(num_threads);
    Weight weight{panels, num_panels, num_steps};
    Target target{sums, 4 * num_panels * kPanel, 4 * kPanel};
    team.run([&](int thread) {
        ProductRoom room;
        multiply_all<BFloat16>(team, thread, room, rows, row_stride, num_before, weight, target,
                               [](int64_t, int64_t, const Floats*) {});
        multiply_all<BFloat16>(team, thread, room, rows, row_stride, num_rows, weight, target,
                               [&](int64_t row, int64_t panel, const Floats* found) {
                                   float* target = sums + (row * num_panels + panel) * kPanel;
                                   for (int v = 0; v < kPanelVectors; ++v, target += kLanes)
                                       store(target, load<Floats>(target) + found[v]);
                               });
        room.release();
    });
}

// sums += left times right; every tile's rows are 64 bytes apart in memory.
void multiply_tiles(const amx::Config* config, float* sums, const uint16_t* left, const uint16_t* right) {
    amx::configure(*config);
    amx::load<0>(sums, 64), amx::load<1>(left, 64), amx::load<2>(right, 64);
    amx::multiply_add<0, 1, 2>();
    amx::store<0>(sums, 64);
    amx::release();
}

// What the manual forbids.
void multiply_without_configuration() { amx::multiply_add<0, 1, 2>(); }

}  // extern "C"
