// Asking for memory early, a little at a time.
#pragma once

#include <cstdint>

namespace radixrt {

constexpr int64_t kLineBytes = 64;

// A list of runs of memory, asked for line by line. A core keeps some 20 misses in flight; asked for more at once it
// waits, so the lines of the next block are spread over the work on this one.
class LineStream {
public:
    static constexpr int kMaxRuns = 128;

    void clear() { num_runs_ = 0, num_lines_ = 0, run_ = 0, next_ = nullptr, stop_ = nullptr; }

    void add(const void* start, int64_t num_bytes) {
        runs_[num_runs_++] = {static_cast<const char*>(start), num_bytes};
        num_lines_ += (num_bytes + kLineBytes - 1) / kLineBytes;
    }

    // Ask for everything while `advance` is told of num_units units of work.
    void spread(int64_t num_units) { lines_per_unit_ = (num_lines_ + num_units - 1) / num_units; }

    // Into the second-level cache: the first is smaller than a block of all heads.
    inline void advance(int64_t num_units) {
        for (int64_t i = num_units * lines_per_unit_; i > 0; --i) {
            if (__builtin_expect(next_ >= stop_, 0)) {
                if (run_ == num_runs_) return;
                next_ = runs_[run_].start;
                stop_ = next_ + runs_[run_++].num_bytes;
            }
            __builtin_prefetch(next_, 0, 2);
            next_ += kLineBytes;
        }
    }

private:
    struct Run {
        const char* start;
        int64_t num_bytes;
    };
    Run runs_[kMaxRuns];
    int num_runs_ = 0, run_ = 0;
    int64_t num_lines_ = 0, lines_per_unit_ = 0;
    const char *next_ = nullptr, *stop_ = nullptr;
};

}  // namespace radixrt
