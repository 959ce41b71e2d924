#include "bench/ceiling.h"

#include <stdint.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <new>
#include <stdexcept>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace potok {
namespace {

// An interrupt, a neighbour on the same core or a clock that still rises only ever make a run slower.
constexpr int kRuns = 20;

using Clock = std::chrono::steady_clock;

double seconds(Clock::duration d) {
    return std::chrono::duration<double>(d).count();
}

// Runs work(thread) on all threads at once, kRuns times; the shortest time from the first start to the last end.
template <class Work>
double best_seconds(int threads, Work work) {
    if (threads < 1) throw std::invalid_argument("threads must be at least 1");
    struct Span {
        Clock::time_point start, end;
    };
    std::vector<Span> spans((size_t)threads * kRuns);
    std::atomic<int> arrived{0};
    const auto body = [&](int thread) {
        for (int run = 0; run < kRuns; run++) {
            arrived.fetch_add(1);
            while (arrived.load() < (run + 1) * threads) std::this_thread::yield();
            Span& span = spans[(size_t)run * threads + thread];
            span.start = Clock::now();
            work(thread);
            span.end = Clock::now();
        }
    };
    std::vector<std::thread> others;
    for (int t = 1; t < threads; t++) others.emplace_back(body, t);
    body(0);
    for (std::thread& t : others) t.join();
    double best = 1e30;
    for (int run = 0; run < kRuns; run++) {
        Span whole = spans[(size_t)run * threads];
        for (int t = 1; t < threads; t++) {
            const Span& span = spans[(size_t)run * threads + t];
            whole.start = std::min(whole.start, span.start);
            whole.end = std::max(whole.end, span.end);
        }
        best = std::min(best, seconds(whole.end - whole.start));
    }
    return best;
}

// The compiler must believe that the value is used, and changed.
#if defined(__x86_64__)
#define POTOK_OPAQUE(v) __asm__ volatile("" : "+x"(v))
#else
#define POTOK_OPAQUE(v) __asm__ volatile("" : "+w"(v))
#endif

// 12 chains: latency 4 or 5 times 2 a cycle, and they fit the 16 registers of AVX2.
constexpr int kChains = 12;
constexpr int kFmaRounds = 1 << 20;

// GCC's own vectors: 4 floats are what every 64-bit CPU has. Contracted to one instruction where there is one.
typedef float Four __attribute__((vector_size(16)));

void fma_baseline() {
    Four c[kChains], a = {0.5f, 0.5f, 0.5f, 0.5f}, b = a;
    for (Four& v : c) v = a;
    POTOK_OPAQUE(b);
    for (int i = 0; i < kFmaRounds; i++) {
#pragma GCC unroll 12
        for (int j = 0; j < kChains; j++) c[j] = c[j] * a + b;
        POTOK_OPAQUE(a);
    }
    for (Four& v : c) POTOK_OPAQUE(v);
}

void read_words(const uint8_t* p, size_t bytes) {
    uint64_t sum[8] = {};
    for (size_t i = 0; i + 64 <= bytes; i += 64) {
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++) sum[j] ^= *(const uint64_t*)(p + i + 8 * j);
    }
    for (uint64_t& s : sum) __asm__ volatile("" : "+r"(s));
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) void fma_avx2() {
    __m256 c[kChains], a = _mm256_set1_ps(0.5f), b = a;
    for (__m256& v : c) v = a;
    POTOK_OPAQUE(b);
    for (int i = 0; i < kFmaRounds; i++) {
#pragma GCC unroll 12
        for (int j = 0; j < kChains; j++) c[j] = _mm256_fmadd_ps(c[j], a, b);
        POTOK_OPAQUE(a);
    }
    for (__m256& v : c) POTOK_OPAQUE(v);
}

__attribute__((target("avx512f"))) void fma_avx512() {
    __m512 c[kChains], a = _mm512_set1_ps(0.5f), b = a;
    for (__m512& v : c) v = a;
    POTOK_OPAQUE(b);
    for (int i = 0; i < kFmaRounds; i++) {
#pragma GCC unroll 12
        for (int j = 0; j < kChains; j++) c[j] = _mm512_fmadd_ps(c[j], a, b);
        POTOK_OPAQUE(a);
    }
    for (__m512& v : c) POTOK_OPAQUE(v);
}

__attribute__((target("avx2"))) void read_avx2(const uint8_t* p, size_t bytes) {
    __m256i sum[8];
    for (__m256i& s : sum) s = _mm256_setzero_si256();
    for (size_t i = 0; i + 256 <= bytes; i += 256) {
#pragma GCC unroll 8
        for (int j = 0; j < 8; j++)
            sum[j] = _mm256_xor_si256(sum[j], _mm256_load_si256((const __m256i*)(p + i + 32 * j)));
    }
    for (__m256i& s : sum) POTOK_OPAQUE(s);
}
#endif

bool has(const char* width) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const std::string w = width;
    if (w == "avx2") return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (w == "avx512") return __builtin_cpu_supports("avx512f");
#else
    (void)width;
#endif
    return false;
}

struct Width {
    const char* name;
    int lanes;
    void (*run)();
};

std::vector<Width> widths() {
    std::vector<Width> all = {{"baseline", 4, fma_baseline}};
#if defined(__x86_64__)
    if (has("avx2")) all.push_back({"avx2", 8, fma_avx2});
    if (has("avx512")) all.push_back({"avx512", 16, fma_avx512});
#endif
    return all;
}

// Memory on huge pages where the system gives them, or on small ones.
struct Region {
    Region(size_t n, bool huge_pages) : bytes(n), mapped(n + kHuge) {
        base = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (base == MAP_FAILED) throw std::bad_alloc();
        data = (uint8_t*)(((uintptr_t)base + kHuge - 1) / kHuge * kHuge);
#if defined(MADV_HUGEPAGE)
        madvise(data, bytes, huge_pages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#else
        (void)huge_pages;
#endif
    }
    ~Region() { munmap(base, mapped); }
    Region(const Region&) = delete;
    Region& operator=(const Region&) = delete;

    static constexpr size_t kHuge = 2u << 20;
    size_t bytes, mapped;
    void* base;
    uint8_t* data;
};

}  // namespace

std::vector<std::string> fma_widths() {
    std::vector<std::string> names;
    for (const Width& w : widths()) names.push_back(w.name);
    return names;
}

double fma_macs_per_second(int threads, const std::string& width) {
    for (const Width& w : widths()) {
        if (width != w.name) continue;
        const double best = best_seconds(threads, [&](int) { w.run(); });
        return (double)threads * kFmaRounds * kChains * w.lanes / best;
    }
    throw std::invalid_argument("width '" + width + "' is not among fma_widths()");
}

double stream_bytes_per_second(int threads, size_t bytes, bool huge_pages) {
    if (threads < 1) throw std::invalid_argument("threads must be at least 1");
    const size_t part = bytes / threads / 4096 * 4096;
    if (part == 0) throw std::invalid_argument("bytes must be at least a page of 4096 for each thread");
    const Region region(part * threads, huge_pages);
    void (*read)(const uint8_t*, size_t) = read_words;
#if defined(__x86_64__)
    if (has("avx2")) read = read_avx2;
#endif
    // Whoever touches memory first decides which node it lies on.
    std::vector<std::thread> owners;
    for (int t = 0; t < threads; t++) {
        owners.emplace_back([&, t] {
            for (size_t i = 0; i < part; i += 4096) region.data[t * part + i] = 1;
        });
    }
    for (std::thread& t : owners) t.join();
    const double best = best_seconds(threads, [&](int t) { read(region.data + t * part, part); });
    return (double)part * threads / best;
}

double clock_hz() {
    constexpr int kRounds = 1 << 16, kLinks = 16;
#if defined(__x86_64__)
    constexpr int kCycles = 3;  // of a 64-bit multiplication, on every core since 2008
#else
    constexpr int kCycles = 1;  // of an addition
#endif
    uint64_t x = 3;
    const double best = best_seconds(1, [&](int) {
        for (int i = 0; i < kRounds; i++) {
#pragma GCC unroll 16
            for (int j = 0; j < kLinks; j++) {
#if defined(__x86_64__)
                __asm__ volatile("imul %0, %0" : "+r"(x));
#elif defined(__aarch64__)
                __asm__ volatile("add %0, %0, %0" : "+r"(x));
#else
                x += x;
                __asm__ volatile("" : "+r"(x));
#endif
            }
        }
    });
    return (double)kRounds * kLinks * kCycles / best;
}

}  // namespace potok
