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
    using Job = void (*)(void* context, int worker);

    // `threads` workers in all; worker 0 is whoever calls.
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int size() const { return size_; }

    // Has the other workers call job(context, worker), as soon as each of them can; does not wait for them. One that is
    // still at an earlier job joins late or not at all, so the work must not need it, and context must outlive the
    // pool.
    void start(Job job, void* context);

    // Calls job(context, worker) on every worker and returns when all are done.
    void run(Job job, void* context);

 private:
    void announce(Job job, void* context, std::atomic<int>* left);
    void work(int worker);

    const int size_;
    std::vector<std::thread> threads_;
    std::mutex mutex_;
    std::condition_variable wake_;
    bool stop_ = false;
    Job job_ = nullptr;
    void* context_ = nullptr;
    std::atomic<int>* left_ = nullptr;  // workers that run() still waits for; null after start()
    alignas(64) std::atomic<uint32_t> jobs_{0};
};

// For waiting a short while: pauses first, then gives the core away at every call. `turn` counts the calls.
void relax(int turn);

}  // namespace potok
