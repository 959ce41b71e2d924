// Threads that execute one step together: they spin inside a step, and sleep between steps.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace potok {

class Pool {
 public:
    // `threads` workers in all; worker 0 is whoever calls run().
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int size() const { return size_; }

    // Calls job(context, worker) on every worker at once and returns when all are done.
    void run(void (*job)(void*, int), void* context);

    // All workers of the running job meet here; what was written before is visible after.
    void barrier();

 private:
    void work(int worker);

    const int size_;
    std::vector<std::thread> threads_;
    std::mutex mutex_;
    std::condition_variable wake_;
    bool stop_ = false;
    void (*job_)(void*, int) = nullptr;
    void* context_ = nullptr;
    alignas(64) std::atomic<uint32_t> step_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> generation_{0};
};

}  // namespace potok
