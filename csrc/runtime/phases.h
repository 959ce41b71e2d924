// A sequence of phases, each cut into tasks that any worker may take.
//
// A phase is over when its tasks are done, not when all workers have arrived: a worker that lost its core between two
// tasks holds up nobody, the others take what it would have taken. It may even come late by whole rounds: everything it
// could touch carries the number of the round, and is refused.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace potok {

class Phases {
 public:
    // Before the first round.
    void resize(int phases) {
        phases_.reset(new Phase[phases]);
        size_ = phases;
    }
    int size() const { return size_; }

    // Starts the next round; `tasks(i)` is the number of tasks of phase i. For the one thread that leads, which has
    // waited for the last phase of the round before.
    template <class Count>
    void begin(const Count& tasks) {
        const uint64_t round = round_.load(std::memory_order_relaxed) + 1;
        for (int i = 0; i < size_; i++) {
            phases_[i].tasks.store((uint32_t)tasks(i), std::memory_order_relaxed);
            phases_[i].done.store(round << 32, std::memory_order_relaxed);
            // Whoever takes a task of this round sees its count: a failed exchange means that the round has changed.
            phases_[i].next.store(round << 32, std::memory_order_release);
        }
        round_.store(round, std::memory_order_release);
    }

    uint64_t round() const { return round_.load(std::memory_order_acquire); }

    // A task of the phase, or -1 when none is left or the round is over.
    int take(uint64_t round, int phase) {
        Phase& p = phases_[phase];
        uint64_t next = p.next.load(std::memory_order_acquire);
        do {
            if (next >> 32 != round || (uint32_t)next >= p.tasks.load(std::memory_order_relaxed)) return -1;
        } while (!p.next.compare_exchange_weak(next, next + 1, std::memory_order_acquire));
        return (int)(uint32_t)next;
    }

    void finish(int phase) { phases_[phase].done.fetch_add(1, std::memory_order_release); }

    // Whether all tasks of the phase are done, or the round is over.
    bool over(uint64_t round, int phase) const {
        const Phase& p = phases_[phase];
        const uint64_t done = p.done.load(std::memory_order_acquire);
        return done >> 32 != round || (uint32_t)done == p.tasks.load(std::memory_order_relaxed);
    }

 private:
    // next and done: the number of the round in the upper half, a count in the lower.
    struct alignas(64) Phase {
        std::atomic<uint64_t> next{0};
        std::atomic<uint32_t> tasks{0};
        alignas(64) std::atomic<uint64_t> done{0};
    };
    std::unique_ptr<Phase[]> phases_;
    int size_ = 0;
    alignas(64) std::atomic<uint64_t> round_{0};
};

}  // namespace potok
