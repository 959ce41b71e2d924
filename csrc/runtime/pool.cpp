#include "runtime/pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace potok {
namespace {

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// A barrier of two threads costs 0.3 us spinning and 20 us through the kernel, and a layer has nine; but a peer that
// lost its core to another process should get it back, so after about 50 us of pauses the waiter gives its core away.
constexpr int kSpins = 2000;
// Between steps the gap is Python's (about 100 us); beyond it the machine is idle and must use no CPU.
constexpr int kSpinsBetweenSteps = 4000;

}  // namespace

Pool::Pool(int threads) : size_(threads) {
    for (int i = 1; i < size_; i++) threads_.emplace_back(&Pool::work, this, i);
}

Pool::~Pool() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
        step_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    for (std::thread& t : threads_) t.join();
}

void Pool::run(void (*job)(void*, int), void* context) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        job_ = job;
        context_ = context;
        step_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    job(context, 0);
    barrier();
}

void Pool::work(int worker) {
    uint32_t seen = 0;
    for (;;) {
        for (int i = 0; i < kSpinsBetweenSteps && step_.load(std::memory_order_acquire) == seen; i++) relax();
        {
            std::unique_lock<std::mutex> lock(mutex_);
            wake_.wait(lock, [&] { return step_.load(std::memory_order_relaxed) != seen; });
            seen = step_.load(std::memory_order_relaxed);
            if (stop_) return;
        }
        job_(context_, worker);
        barrier();
    }
}

void Pool::barrier() {
    if (size_ == 1) return;
    const uint32_t generation = generation_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
        arrived_.store(0, std::memory_order_relaxed);
        generation_.store(generation + 1, std::memory_order_release);
        return;
    }
    for (int i = 0; generation_.load(std::memory_order_acquire) == generation; i++) {
        if (i < kSpins) {
            relax();
        } else {
            std::this_thread::yield();
        }
    }
}

}  // namespace potok
