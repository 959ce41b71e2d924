#include "runtime/pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace potok {
namespace {

// A phase ends 0.3 us after its last task when the others spin, 20 us when they sleep, and a layer has nine; but a
// peer that lost its core to another process should get it back, so after about 50 us of pauses a waiter gives way.
constexpr int kPauses = 1000;
// Between steps the gap is Python's (about 100 us); beyond it the machine is idle and must use no CPU.
constexpr int kPausesBetweenSteps = 4000;

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

void relax(int turn) {
    if (turn < kPauses) {
        pause();
    } else {
        std::this_thread::yield();
    }
}

Pool::Pool(int threads) : size_(threads) {
    for (int i = 1; i < size_; i++) threads_.emplace_back(&Pool::work, this, i);
}

Pool::~Pool() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
        jobs_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    for (std::thread& t : threads_) t.join();
}

void Pool::announce(Job job, void* context, std::atomic<int>* left) {
    if (size_ == 1) return;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        job_ = job;
        context_ = context;
        left_ = left;
        jobs_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
}

void Pool::start(Job job, void* context) {
    announce(job, context, nullptr);
}

void Pool::run(Job job, void* context) {
    std::atomic<int> left{size_ - 1};
    announce(job, context, &left);
    job(context, 0);
    for (int turn = 0; left.load(std::memory_order_acquire) > 0; turn++) relax(turn);
}

void Pool::work(int worker) {
    uint32_t seen = 0;
    for (;;) {
        for (int i = 0; i < kPausesBetweenSteps && jobs_.load(std::memory_order_acquire) == seen; i++) pause();
        Job job;
        void* context;
        std::atomic<int>* left;
        {
            std::unique_lock<std::mutex> lock(mutex_);
            wake_.wait(lock, [&] { return jobs_.load(std::memory_order_relaxed) != seen; });
            seen = jobs_.load(std::memory_order_relaxed);
            if (stop_) return;
            job = job_;
            context = context_;
            left = left_;
        }
        job(context, worker);
        if (left) left->fetch_sub(1, std::memory_order_release);
    }
}

}  // namespace potok
