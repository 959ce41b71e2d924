#include "runtime/arena.h"

#include <sys/mman.h>

#include <new>

namespace potok {
namespace {

constexpr size_t kHuge = 2u << 20;
constexpr size_t kRun = 64u << 20;

size_t round_up(size_t n, size_t to) {
    return (n + to - 1) / to * to;
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
#if defined(MADV_HUGEPAGE)
        madvise(next_, left_ / kHuge * kHuge, MADV_HUGEPAGE);
#endif
    }
    uint8_t* p = next_;
    next_ += bytes;
    left_ -= bytes;
    return p;
}

}  // namespace potok
