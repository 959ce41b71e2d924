#include "runtime/arena.h"

#include <sys/mman.h>
#if defined(__linux__)
#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <new>

namespace potok {
namespace {

constexpr size_t kHuge = 2u << 20;
constexpr size_t kRun = 64u << 20;

size_t round_up(size_t n, size_t to) {
    return (n + to - 1) / to * to;
}

// A wish: where the kernel refuses it (containers often do), memory lies where it is touched first, as without it.
void spread(void* base, size_t bytes, const std::vector<int>& nodes) {
#if defined(__linux__)
    int policy = MPOL_DEFAULT;
    if (nodes.size() < 2 || syscall(SYS_get_mempolicy, &policy, nullptr, 0, nullptr, 0) != 0) return;
    if (policy != MPOL_DEFAULT) return;  // numactl
    constexpr int kWord = 8 * sizeof(unsigned long);
    unsigned long mask[1024 / kWord] = {};
    for (int node : nodes) {
        if (node < 1024) mask[node / kWord] |= 1ul << node % kWord;
    }
    (void)!syscall(SYS_mbind, base, bytes, MPOL_INTERLEAVE, mask, 1024 + 1, 0);  // the kernel takes one bit less
#else
    (void)base, (void)bytes, (void)nodes;
#endif
}

}  // namespace

Arena::~Arena() {
    for (const Run& r : runs_) munmap(r.base, r.bytes);
}

uint8_t* Arena::allocate(size_t bytes) {
    bytes = round_up(bytes, 64);
    if (bytes > left_) {
        const size_t run = round_up(bytes > kRun ? bytes : kRun, kHuge) + kHuge;
        void* base = mmap(nullptr, run, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (base == MAP_FAILED) throw std::bad_alloc();
        runs_.push_back({base, run});
        next_ = (uint8_t*)round_up((size_t)base, kHuge);
        left_ = (size_t)((uint8_t*)base + run - next_);
        spread(base, run, placement_.nodes);
#if defined(MADV_HUGEPAGE)
        madvise(next_, left_ / kHuge * kHuge, placement_.huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#endif
    }
    uint8_t* p = next_;
    next_ += bytes;
    left_ -= bytes;
    return p;
}

}  // namespace potok
