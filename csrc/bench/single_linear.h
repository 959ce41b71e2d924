// One linear with all that it needs around it, for tests and measures of single kernels.
#pragma once

#include <new>
#include <vector>

#include "formats/pack.h"
#include "kernels/table.h"
#include "runtime/arena.h"

namespace potok {

// As in a step, activations begin at a cache line: what straddles two costs a tile of AMX several times as much.
template <class T>
struct AtCacheLine {
    using value_type = T;
    AtCacheLine() = default;
    template <class U>
    explicit AtCacheLine(const AtCacheLine<U>&) {}
    T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t{64})); }
    void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t{64}); }
    bool operator==(const AtCacheLine&) const { return true; }
    bool operator!=(const AtCacheLine&) const { return false; }
};

template <class T>
struct Integers {
    Integers(int rows, int cols, bool sums_of_16)
        : q((size_t)rows * cols),
          d((size_t)rows * (cols / kGroup)),
          s(d.size()),
          sum(d.size()),
          s16(sums_of_16 ? 2 * d.size() : 0) {}
    IntRows<T> view() { return {q.data(), d.data(), s.data(), sum.data(), s16.empty() ? nullptr : s16.data()}; }
    std::vector<T, AtCacheLine<T>> q;
    std::vector<float> d, s;
    std::vector<int32_t> sum;
    std::vector<float> s16;
};

// Activations in every form; buffers live as long as this. x: [rows][cols].
struct Activations {
    Activations(const Kernels& kernels, const float* x, int rows, int cols)
        : f32(x, x + (size_t)rows * cols), a8(rows, cols, true), a16(rows, cols, true), cols(cols) {
        for (int r = 0; r < rows; r++) {
            const size_t at = (size_t)r * cols;
            kernels.quantize_a8(x + at, cols, a8.view(), at);
            kernels.quantize_a16(x + at, cols, a16.view(), at);
        }
    }
    ActRows view() { return {f32.data(), a8.view(), a16.view(), cols}; }
    std::vector<float> f32;
    Integers<int8_t> a8;
    Integers<int16_t> a16;
    int cols;
};

class SingleLinear {
 public:
    // Packs [n][k] weights from the bytes of a file's tensor.
    SingleLinear(const Kernels& kernels, Source source, Act act, const uint8_t* rows, int n, int k)
        : kernels_(kernels) {
        const Packed format = packed_form(source);
        const int panels = (n + kPanel - 1) / kPanel;
        uint8_t* packed = arena_.allocate((size_t)panels * panel_bytes(format, k));
        pack_panels(source, rows, n, k, 0, panels, packed);
        weight_ = {format, act, n, k, packed};
    }

    int n() const { return weight_.n; }
    int k() const { return weight_.k; }

    // out: [rows][n]. The kernel runs `repeat` times on the same rows.
    void run(Activations& x, int rows, float* out, int repeat) const {
        const ActRows acts = x.view();
        LinearTask t{};
        t.weight = &weight_;
        t.acts = &acts;
        t.row1 = rows;
        t.panel1 = (weight_.n + kPanel - 1) / kPanel;
        t.out = out;
        t.ld_out = weight_.n;
        for (int i = 0; i < repeat; i++) kernels_.linear(t);
    }

    const Kernels& kernels() const { return kernels_; }

 private:
    const Kernels& kernels_;
    Arena arena_;
    PackedWeight weight_{};
};

}  // namespace potok
