// What the machine itself gives: the measures that kernels are held against. No code is shared with the kernels.
#pragma once

#include <stddef.h>

#include <string>
#include <vector>

namespace potok {

// Widths of vector that this CPU has and fma_macs_per_second takes, narrowest first: "baseline", "avx2", "avx512".
std::vector<std::string> fma_widths();

// P: float32 multiply-adds a second of `threads` threads together, from registers. The best of several runs.
// Throws std::invalid_argument when threads < 1 or the width is not among fma_widths().
double fma_macs_per_second(int threads, const std::string& width);

// W: bytes a second that `threads` threads together read from `bytes` of memory on huge pages (or on small ones), each
// its own part from begin to end, again and again. The best of several runs. Throws std::invalid_argument or
// std::bad_alloc.
double stream_bytes_per_second(int threads, size_t bytes, bool huge_pages);

// The clock of a busy core, from a chain of operations of known latency.
double clock_hz();

}  // namespace potok
