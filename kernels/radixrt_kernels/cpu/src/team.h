// The threads of a step: started once, woken once per step, meeting at spin barriers between its phases.
#pragma once

#include <sched.h>

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

namespace radixrt {

inline void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// Invariant: outside `run` all workers sleep; inside, every thread goes through the same phases.
class Team {
public:
    explicit Team(int num_threads) : num_threads_(num_threads), claimed_(num_threads), cores_(num_threads) {
        for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this, i] { work(i); });
    }

    ~Team() {
        stops_ = true;
        start();
        for (std::thread& worker : workers_) worker.join();
    }

    int num_threads() const { return num_threads_; }

    // Run job(thread index) on every thread, the caller's included, until all have returned.
    void run(const std::function<void(int)>& job) {
        job_ = &job;
        cores_[0].value.store(sched_getcpu(), std::memory_order_relaxed);
        start();
        job(0);
        barrier();
    }

    // Call work(item) for the items [0, num_items) of a phase; all threads of the team call this, and leave together.
    // Each thread has a range of its own, so that it reads long runs of memory; who is done helps the others.
    template <class Work>
    void for_each(int thread, int64_t num_items, Work&& work) {
        for (int i = 0; i < num_threads_; ++i) {
            int owner = (thread + i) % num_threads_;
            int64_t start = num_items * owner / num_threads_, stop = num_items * (owner + 1) / num_threads_;
            for (int64_t item; (item = start + claim(owner)) < stop;) work(item);
        }
        barrier();
    }

    // Call work() on the caller's thread; all threads of the team call this, and leave together.
    template <class Work>
    void once(int thread, Work&& work) {
        if (thread == 0) work();
        barrier();
    }

private:
    static constexpr int kSpins = 4000;

    struct alignas(64) Count {
        std::atomic<int64_t> value{0};
    };

    int64_t claim(int owner) { return claimed_[owner].value.fetch_add(1, std::memory_order_relaxed); }

    // Wait until all threads are here. Ends a phase: ranges are whole again.
    void barrier() {
        int generation = generation_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == num_threads_ - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            for (Count& count : claimed_) count.value.store(0, std::memory_order_relaxed);
            generation_.store(generation + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; generation_.load(std::memory_order_acquire) == generation; ++spins) {
            // A core may be lent to someone else: then give ours away too.
            if (spins < kSpins) {
                pause_briefly();
            } else {
                sched_yield();
            }
        }
    }

    void start() {
        epoch_.fetch_add(1, std::memory_order_release);
        epoch_.notify_all();
    }

    void work(int thread) {
        int seen = 0;
        for (;;) {
            epoch_.wait(seen, std::memory_order_acquire);
            seen = epoch_.load(std::memory_order_acquire);
            if (stops_) return;
            leave_shared_core(thread);
            (*job_)(thread);
            barrier();
        }
    }

    // Linux likes to wake a worker on the core of the thread that wakes it, and leaves both there: they would take turns
    // at every barrier, five times as slow, while another core idles.
    void leave_shared_core(int thread) {
        int core = sched_getcpu();
        cpu_set_t allowed, others;
        bool is_shared = false;
        for (int i = 0; i < thread; ++i) is_shared |= cores_[i].value.load(std::memory_order_relaxed) == core;
        if (is_shared && sched_getaffinity(0, sizeof allowed, &allowed) == 0) {
            others = allowed;
            for (int i = 0; i < num_threads_; ++i)
                if (i != thread) CPU_CLR(cores_[i].value.load(std::memory_order_relaxed), &others);
            // Moved now, and free to be moved again: what else runs here is the system's to know.
            if (CPU_COUNT(&others) && sched_setaffinity(0, sizeof others, &others) == 0)
                sched_setaffinity(0, sizeof allowed, &allowed);
            core = sched_getcpu();
        }
        cores_[thread].value.store(core, std::memory_order_relaxed);
    }

    const int num_threads_;
    std::vector<Count> claimed_;  // items taken of each thread's range
    std::vector<Count> cores_;    // where each thread began its last step
    std::vector<std::thread> workers_;
    const std::function<void(int)>* job_ = nullptr;
    bool stops_ = false;
    std::atomic<int> epoch_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> generation_{0};
};

}  // namespace radixrt
