// Single kernels of a named table, for tests that compare tables bit by bit and for micro-benchmarks.
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <memory>
#include <stdexcept>
#include <vector>

#include "bench/single_linear.h"
#include "bind/bind.h"
#include "formats/pack.h"
#include "runtime/isa.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace potok {
namespace {

std::unique_ptr<SingleLinear> make_linear(const std::string& isa, int source, int act, Matrix<const uint8_t> weight,
                                          int k) {
    const Kernels& kernels = kernels_of(isa);
    if (weight.shape(1) != source_row_bytes((Source)source, k)) {
        throw std::invalid_argument("weight rows do not have k elements");
    }
    return std::make_unique<SingleLinear>(kernels, (Source)source, (Act)act, weight.data(), (int)weight.shape(0), k);
}

void run_linear(const SingleLinear& linear, Matrix<const float> x, Matrix<float> out, int repeat) {
    if ((int)x.shape(1) != linear.k()) throw std::invalid_argument("x is not [rows, k]");
    if (out.shape(0) != x.shape(0) || (int)out.shape(1) != linear.n()) {
        throw std::invalid_argument("out is not [rows, n]");
    }
    nb::gil_scoped_release release;
    Activations activations(linear.kernels(), x.data(), (int)x.shape(0), linear.k());
    linear.run(activations, (int)x.shape(0), out.data(), repeat);
}

void linear(const std::string& isa, int source, int act, Matrix<const uint8_t> weight, Matrix<const float> x,
            Matrix<float> out) {
    run_linear(*make_linear(isa, source, act, weight, (int)x.shape(1)), x, out, 1);
}

void quantize_a8(const std::string& isa, Vector<const float> x, Vector<int8_t> q, Vector<float> d, Vector<float> s,
                 Vector<int32_t> sum) {
    kernels_of(isa).quantize_a8(x.data(), (int)x.shape(0), {q.data(), d.data(), s.data(), sum.data()});
}

void quantize_a16(const std::string& isa, Vector<const float> x, Vector<int16_t> q, Vector<float> d, Vector<float> s,
                  Vector<int32_t> sum) {
    kernels_of(isa).quantize_a16(x.data(), (int)x.shape(0), {q.data(), d.data(), s.data(), sum.data()});
}

void rms_norm(const std::string& isa, Vector<const float> x, Vector<const float> weight, float eps, Vector<float> out) {
    kernels_of(isa).rms_norm(x.data(), weight.data(), (int)x.shape(0), eps, out.data());
}

void swiglu(const std::string& isa, Vector<const float> gate, Vector<const float> up, Vector<float> out) {
    kernels_of(isa).swiglu(gate.data(), up.data(), (int)gate.shape(0), out.data());
}

void rope_kv(const std::string& isa, Vector<const float> qkv, Vector<const float> cos_sin, int heads, int kv_heads,
             int block_size, int slot, bool halves, Vector<float> q, Vector<uint8_t> kv, int kv_type) {
    RopeTask t{};
    t.qkv = qkv.data();
    t.q = q.data();
    t.kv = kv.data();
    t.kv_type = (KvType)kv_type;
    t.slot = slot;
    t.cos_sin = cos_sin.data();
    t.num_heads = heads;
    t.num_kv_heads = kv_heads;
    t.head_dim = (int)qkv.shape(0) / (heads + 2 * kv_heads);
    t.rope_dim = (int)cos_sin.shape(0);
    t.block_size = block_size;
    t.halves = halves;
    t.scale = 0.125f;
    kernels_of(isa).rope_kv(t);
}

void attention(const std::string& isa, Matrix<const float> q, Matrix<const uint8_t> kv, Vector<const int32_t> blocks,
               int kv_heads, int head_dim, int block_size, int position, Matrix<float> out, int rows_per_task,
               int kv_type, int repeat) {
    const Kernels& kernels = kernels_of(isa);
    AttentionTask t{};
    t.q = q.data();
    t.ld_q = (int)q.shape(1);
    t.kv = kv.data();
    t.kv_type = (KvType)kv_type;
    t.block_stride = kv.shape(1);
    t.blocks = blocks.data();
    t.block_size = block_size;
    t.head_dim = head_dim;
    t.num_kv_heads = kv_heads;
    t.group = (int)q.shape(1) / head_dim / kv_heads;
    t.out = out.data();
    t.ld_out = t.ld_q;
    std::vector<float> scratch(attention_scratch_floats(rows_per_task * t.group, head_dim));
    t.scratch = scratch.data();
    const int rows = (int)q.shape(0);
    nb::gil_scoped_release release;
    for (int i = 0; i < repeat; i++) {
        for (int h = 0; h < kv_heads; h++) {
            for (int r = 0; r < rows; r += rows_per_task) {
                t.kv_head = h;
                t.row0 = r;
                t.row1 = r + rows_per_task < rows ? r + rows_per_task : rows;
                t.position = position + r;
                kernels.attention(t);
            }
        }
    }
}

}  // namespace

void bind_kernels(nb::module_& m) {
    nb::module_ k = m.def_submodule("kernels", "Single kernels of a named table.");
    k.def("linear", &linear, "isa"_a, "source"_a, "act"_a, "weight"_a, "x"_a, "out"_a);
    nb::class_<SingleLinear>(k, "Linear", "A packed weight [n, k], and the linear over it.")
        .def(nb::new_(&make_linear), "isa"_a, "source"_a, "act"_a, "weight"_a, "k"_a)
        .def("run", &run_linear, "x"_a, "out"_a, "repeat"_a = 1);
    k.def("quantize_a8", &quantize_a8, "isa"_a, "x"_a, "q"_a, "d"_a, "s"_a, "sum"_a);
    k.def("quantize_a16", &quantize_a16, "isa"_a, "x"_a, "q"_a, "d"_a, "s"_a, "sum"_a);
    k.def("rms_norm", &rms_norm, "isa"_a, "x"_a, "weight"_a, "eps"_a, "out"_a);
    k.def("swiglu", &swiglu, "isa"_a, "gate"_a, "up"_a, "out"_a);
    k.def("rope_kv", &rope_kv, "isa"_a, "qkv"_a, "cos_sin"_a, "heads"_a, "kv_heads"_a, "block_size"_a, "slot"_a,
          "halves"_a, "q"_a, "kv"_a, "kv_type"_a = 0);
    k.def("attention", &attention, "isa"_a, "q"_a, "kv"_a, "blocks"_a, "kv_heads"_a, "head_dim"_a, "block_size"_a,
          "position"_a, "out"_a, "rows_per_task"_a, "kv_type"_a = 0, "repeat"_a = 1);
    bind_sampling(k);
}

}  // namespace potok
