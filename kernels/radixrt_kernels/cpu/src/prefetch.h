// Asking for memory early, a little at a time.
#pragma once

#include <algorithm>
#include <cstdint>

namespace radixrt {

constexpr int64_t kLineBytes = 64;
// The smallest page that an address is translated by. The processor may keep translations of this size only, even
// where the system gives out larger pages: a virtual machine's memory can lie in small pages outside.
constexpr int64_t kTranslatedBytes = 4096;

// Memory in one piece, asked for some lines at each step of a product.
struct NextLines {
    const char* at;
    int64_t lines_per_step;

    void operator()() {
        for (int64_t i = 0; i < lines_per_step; ++i, at += kLineBytes) __builtin_prefetch(at, 0, 2);
    }
};

// A list of memory, asked for a few lines at a time, into the second-level cache: the first is smaller than a block of
// all heads. A core keeps some 20 misses in flight; asked for more at once it waits or drops them, so the lines of the
// next block are spread over the work on this one.
// No path of advance() calls a function: around a call, loops with sums in registers would store them.
class FarLines {
public:
    static constexpr int kMaxRuns = 512;
    static constexpr int kMaxUnits = 8;

    FarLines() { clear(); }

    void clear() {
        num_runs_ = 0;
        num_pairs_ = 0;
        lines_per_unit_ = 1;
        start();
    }

    // Add num_rows rows of row_bytes, each `stride` bytes after the one before.
    void add(const void* start, int64_t row_bytes, int64_t num_rows, int64_t stride) {
        const char* first = static_cast<const char*>(start);
        if (row_bytes == stride) {
            add_pairs(first, kPairBytes, (row_bytes * num_rows + kPairBytes - 1) / kPairBytes);
        } else {
            for (int64_t column = 0; column < row_bytes; column += kPairBytes)
                add_pairs(first + column, stride, num_rows);
        }
    }

    // Begin with what was added.
    void start() {
        // After the last run: a line that is in the cache, for ever.
        runs_[num_runs_] = {reinterpret_cast<const char*>(this), 0, INT64_MAX};
        run_ = 0;
        open_run();
    }

    // Ask for everything while `advance` is told of num_units units of work; without this, a line a unit.
    void spread(int64_t num_units) { lines_per_unit_ = (2 * num_pairs_ + num_units - 1) / num_units; }

    // Ask for a line of every page (of rows apart, of the first ones): 1.1 times the speed. Requests into the
    // second-level cache seem to be lost while their address is not translated.
    void translate() const {
        for (int i = 0; i < num_runs_; ++i) {
            const char* stop = runs_[i].start + runs_[i].num_pairs * kPairBytes;
            for (const char* at = runs_[i].start; at < stop; at += kTranslatedBytes)
                __builtin_prefetch(at, 0, 2);
        }
    }

    // Args: kUnits: even.
    template <int kUnits>
    [[gnu::always_inline]] inline void advance() {
        static_assert(kUnits % 2 == 0 && kUnits <= kMaxUnits);
        for (int64_t i = lines_per_unit_; i > 0; --i) {
            if (__builtin_expect(stop_ - next_ >= kUnits * kLineBytes, 1)) {
#pragma GCC unroll 8
                for (int j = 0; j < kUnits; ++j) __builtin_prefetch(next_ + j * kLineBytes, 0, 2);
                next_ += kUnits * kLineBytes;
            } else {
                if (pairs_left_ <= 0) open_run();
                for (int j = 0; j < kUnits / 2; ++j, next_ += stride_) {
                    __builtin_prefetch(next_, 0, 2);
                    __builtin_prefetch(next_ + kLineBytes, 0, 2);
                }
                pairs_left_ -= kUnits / 2;
            }
        }
    }

private:
    static constexpr int64_t kPairBytes = 2 * kLineBytes;
    struct Run {
        const char* start;
        int64_t stride, num_pairs;
    };

    // As runs of a multiple of the pairs of an advance: of memory in one piece a little more, of other rows the last
    // ones several times.
    void add_pairs(const char* start, int64_t stride, int64_t count) {
        constexpr int64_t kMultiple = kMaxUnits / 2;
        if (stride == kPairBytes) return add_run({start, stride, (count + kMultiple - 1) / kMultiple * kMultiple});
        int64_t whole = count / kMultiple * kMultiple;
        if (whole) add_run({start, stride, whole});
        for (int64_t i = whole; i < count; ++i) add_run({start + i * stride, 0, kMultiple});
    }

    // Past the limit memory is not asked for, only read.
    void add_run(const Run& run) {
        if (num_runs_ == kMaxRuns) return;
        runs_[num_runs_++] = run;
        num_pairs_ += run.num_pairs;
    }

    // Memory in one piece lies between next_ and stop_, other runs are counted in pairs_left_.
    [[gnu::always_inline]] inline void open_run() {
        const Run& run = runs_[run_++];
        next_ = run.start;
        stride_ = run.stride;
        const bool is_one_piece = stride_ == kPairBytes;
        stop_ = is_one_piece ? next_ + run.num_pairs * kPairBytes : next_;
        pairs_left_ = is_one_piece ? 0 : run.num_pairs;
    }

    Run runs_[kMaxRuns + 1];
    int num_runs_ = 0, run_ = 0;
    int64_t num_pairs_ = 0, lines_per_unit_ = 1, stride_ = 0, pairs_left_ = 0;
    const char *next_ = nullptr, *stop_ = nullptr;
};

}  // namespace radixrt
