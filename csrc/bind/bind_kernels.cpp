// Single kernels of a named table, for tests that compare tables bit by bit and for micro-benchmarks.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "bench/single_linear.h"
#include "bind/bind.h"
#include "formats/pack.h"
#include "plan/attention.h"
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
    kernels_of(isa).quantize_a8(x.data(), (int)x.shape(0), {q.data(), d.data(), s.data(), sum.data(), nullptr}, 0);
}

void quantize_a16(const std::string& isa, Vector<const float> x, Vector<int16_t> q, Vector<float> d, Vector<float> s,
                  Vector<int32_t> sum) {
    kernels_of(isa).quantize_a16(x.data(), (int)x.shape(0), {q.data(), d.data(), s.data(), sum.data(), nullptr}, 0);
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

// One step's attention on one thread, cut as for `threads`. Gives the number of tiles of 64 tokens that all its tasks
// visit for one KV head, and of tasks that worked ahead.
std::pair<int, int> attention(const std::string& isa, Matrix<const float> q, Matrix<const uint8_t> kv,
                              Vector<const int32_t> q_indptr, Vector<const int32_t> positions,
                              Vector<const int32_t> kv_indptr, Vector<const int32_t> kv_blocks, int kv_heads,
                              int head_dim, int block_size, Matrix<float> out, int kv_type, int threads, int repeat) {
    const Kernels& kernels = kernels_of(isa);
    StepView step{};
    step.tokens = (int32_t)q.shape(0);
    step.segments = (int32_t)q_indptr.shape(0) - 1;
    step.positions = positions.data();
    step.q_indptr = q_indptr.data();
    step.kv_indptr = kv_indptr.data();
    step.kv_blocks = kv_blocks.data();
    AttentionPlan plan;
    plan.make(step, {(int)q.shape(1) / head_dim, kv_heads, head_dim, block_size, threads});
    std::vector<float> scratch(attention_scratch_floats(kTaskRows, head_dim) + 16);
    AttentionTask t{};
    t.q = q.data();
    t.ld_q = t.ld_out = (int)q.shape(1);
    t.kv = kv.data();
    t.kv_type = (KvType)kv_type;
    t.block_stride = kv.shape(1);
    t.scratch = reinterpret_cast<float*>(((size_t)scratch.data() + 63) / 64 * 64);
    nb::gil_scoped_release release;
    for (int i = 0; i < repeat; i++) {
        for (const std::vector<AttentionItem>* items : {&plan.ahead(), &plan.ending()}) {
            t.out = items == &plan.ahead() ? nullptr : out.data();
            for (const AttentionItem& item : *items) {
                plan.describe(item, t);
                kernels.attention(t);
            }
        }
    }
    int tiles = 0;
    for (const std::vector<AttentionItem>* items : {&plan.ahead(), &plan.ending()}) {
        for (const AttentionItem& item : *items) tiles += (item.end - item.begin + kTileTokens - 1) / kTileTokens;
    }
    return {tiles / kv_heads, (int)plan.ahead().size() / kv_heads};
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
    k.def("attention", &attention, "isa"_a, "q"_a, "kv"_a, "q_indptr"_a, "positions"_a, "kv_indptr"_a, "kv_blocks"_a,
          "kv_heads"_a, "head_dim"_a, "block_size"_a, "out"_a, "kv_type"_a = 0, "threads"_a = 1, "repeat"_a = 1);
    bind_sampling(k);
}

}  // namespace potok
