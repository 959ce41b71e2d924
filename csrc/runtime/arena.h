// Zeroed memory from the system in large runs.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <vector>

namespace potok {

// What memory lies on. huge_pages: on huge pages where the system gives them. nodes: spread evenly over these memory
// nodes (NUMA), unless somebody chose a policy for this process already; fewer than two: where it is touched first.
struct Placement {
    bool huge_pages = true;
    std::vector<int> nodes;
};

class Arena {
 public:
    explicit Arena(Placement placement = {}) : placement_(placement) {}
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    // 64-byte aligned, zeroed, lives as long as the arena. Throws std::bad_alloc.
    uint8_t* allocate(size_t bytes);

    const Placement& placement() const { return placement_; }

 private:
    struct Run {
        void* base;
        size_t bytes;
    };
    const Placement placement_;
    std::vector<Run> runs_;
    uint8_t* next_ = nullptr;
    size_t left_ = 0;
};

}  // namespace potok
