#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "bind/bind.h"
#include "bind/buffer.h"
#include "plan/replay.h"
#include "runtime/isa.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace potok {
namespace {

using PlaceTuple = std::tuple<int, bool, bool, bool>;
using OpTuple = std::tuple<int, int, int, int, bool, int, std::vector<int>, std::vector<int>>;
using Ints = Vector<const int32_t>;
using Floats = Vector<const float>;

int add_weight(Replay& self, int source, int act, int n, int k) {
    if (k % source_qblock((Source)source) != 0) throw std::invalid_argument("k is no multiple of the type's qblock");
    return self.add_weight(packed_form((Source)source), (Act)act, n, k);
}

void pack_rows(Replay& self, int weight, int source, int first, Matrix<const uint8_t> rows) {
    const Source s = (Source)source;
    const PackedWeight& w = self.weight(weight);
    if (packed_form(s) != w.format || rows.shape(1) != source_row_bytes(s, w.k)) {
        throw std::invalid_argument("rows are not those of the weight");
    }
    const int n = (int)rows.shape(0);
    if (first % kPanel != 0 || first < 0 || n > w.n - first) throw std::invalid_argument("rows have no place there");
    nb::gil_scoped_release release;
    self.pack_rows(weight, s, first, n, rows.data());
}

void set_plan(Replay& self, std::tuple<int, int, int, int, int, int> sizes, bool rope_halves, float norm_eps,
              const std::vector<PlaceTuple>& places, const std::vector<OpTuple>& ops, int logits) {
    Shape shape{};
    std::tie(shape.layers, shape.heads, shape.kv_heads, shape.head_dim, shape.rope_dim, shape.vocab) = sizes;
    shape.rope_halves = rope_halves;
    shape.norm_eps = norm_eps;
    if (shape.head_dim % 16 != 0 || shape.head_dim > kMaxHeadDim) {
        throw std::invalid_argument("head_dim must be a multiple of 16 and at most 256");
    }
    std::vector<Place> p;
    for (const auto& [cols, f32, a8, a16] : places) p.push_back({cols, f32, a8, a16});
    std::vector<Op> o;
    for (const auto& [kind, input, residual, output, sampled, layer, weights, biases] : ops) {
        o.push_back({(OpKind)kind, input, residual, output, sampled, layer, weights, biases});
    }
    self.set_plan(shape, std::move(p), std::move(o), logits);
}

// SETTINGS of potok.sampling.rows.
struct RowSettings {
    float temperature;
    int32_t top_k;
    float top_p, min_p;
    uint64_t seed;
    int32_t choice;
    float presence, frequency, repetition;
    int32_t logprobs;
} __attribute__((packed));

// One list of ids with values for each row, of potok.sampling.rows.Lists; none at all where Python has None.
template <class T>
class Lists {
 public:
    explicit Lists(nb::handle lists) {
        if (lists.is_none()) return;
        indptr_.emplace(field(lists, 0));
        ids_.emplace(field(lists, 1));
        values_.emplace(field(lists, 2));
    }
    int of(size_t row, const int32_t*& ids, const T*& values) const {
        if (!indptr_) return 0;
        const int32_t* p = indptr_->data() + row;
        ids = ids_->data() + p[0];
        values = values_->data() + p[0];
        return p[1] - p[0];
    }

 private:
    std::optional<Buffer<const int32_t>> indptr_, ids_;
    std::optional<Buffer<const T>> values_;
};

// The arguments are StepInputs.buffers, SampleRows and Sampled of potok.backends.api, fields in the order there. Gives
// the nanoseconds that the step took.
int64_t step(Replay& self, nb::handle inputs, nb::handle sample_rows, nb::handle sampled) {
    const Buffer<const int32_t> tokens(field(inputs, 0)), positions(field(inputs, 1)), q_indptr(field(inputs, 2)),
        kv_indptr(field(inputs, 3)), kv_blocks(field(inputs, 4)), out_rows(field(inputs, 5)), copies(field(inputs, 6));
    const Buffer<const RowSettings> settings(field(sample_rows, 0));
    const Buffer<const int32_t> position(field(sample_rows, 1));
    const size_t width = nb::cast<size_t>(field(sample_rows, 2));
    const bool want_hashes = nb::cast<bool>(field(sample_rows, 3));
    const Lists<int32_t> seen(field(sample_rows, 4));
    const Lists<float> biases(field(sample_rows, 5));
    const Buffer<int32_t> ids(field(sampled, 0));
    const Buffer<float> logprob(field(sampled, 1));
    std::optional<Buffer<int32_t>> top_ids;  // most steps report none, and nothing but tokens
    std::optional<Buffer<float>> top_logprobs;
    std::optional<Buffer<uint64_t>> hashes;
    if (width > 0) {
        top_ids.emplace(field(sampled, 2));
        top_logprobs.emplace(field(sampled, 3));
        std::fill_n(top_ids->data(), top_ids->size(), -1);
        std::fill_n(top_logprobs->data(), top_logprobs->size(), 0.0f);
    }
    if (want_hashes) hashes.emplace(field(sampled, 4));

    const size_t count = out_rows.size();
    if (settings.size() != count || position.size() != count || ids.size() != count || logprob.size() != count) {
        throw std::invalid_argument("rows that are sampled, their settings and their places differ in number");
    }
    if (width > 0 && (top_ids->size() != count * width || top_logprobs->size() != count * width)) {
        throw std::invalid_argument("the places of reported ids are not as many as the rows report");
    }
    std::vector<SampleRow> rows(count);
    std::vector<SampleOut> out(count);
    for (size_t i = 0; i < count; i++) {
        const RowSettings& s = settings.data()[i];
        SampleRow& r = rows[i];
        r.temperature = s.temperature;
        r.top_k = s.top_k;
        r.top_p = s.top_p;
        r.min_p = s.min_p;
        r.seed = s.seed;
        r.choice = (uint32_t)s.choice;
        r.position = (uint32_t)position.data()[i];
        r.presence = s.presence;
        r.frequency = s.frequency;
        r.repetition = s.repetition;
        r.num_seen = seen.of(i, r.seen_ids, r.seen_counts);
        r.num_bias = biases.of(i, r.bias_ids, r.bias_values);
        r.num_logprobs = s.logprobs;
        r.want_hash = want_hashes;
        out[i].top_ids = width > 0 ? top_ids->data() + i * width : nullptr;
        out[i].top_logprobs = width > 0 ? top_logprobs->data() + i * width : nullptr;
    }
    const StepView view{(int32_t)tokens.size(),
                        (int32_t)q_indptr.size() - 1,
                        (int32_t)count,
                        tokens.data(),
                        positions.data(),
                        q_indptr.data(),
                        kv_indptr.data(),
                        kv_blocks.data(),
                        out_rows.data(),
                        (int32_t)copies.size() / 2,
                        copies.data(),
                        rows.data(),
                        out.data()};
    const auto started = std::chrono::steady_clock::now();
    {
        nb::gil_scoped_release release;
        self.step(view);
    }
    const auto ended = std::chrono::steady_clock::now();
    for (size_t i = 0; i < count; i++) {
        ids.data()[i] = out[i].id;
        logprob.data()[i] = out[i].logprob;
        if (want_hashes) hashes->data()[i] = out[i].hash;
    }
    return std::chrono::duration_cast<std::chrono::nanoseconds>(ended - started).count();
}

nb::object unpack(const Replay& self, int weight, Matrix<float> out) {
    const PackedWeight& w = self.weight(weight);
    if ((int)out.shape(0) != w.n || (int)out.shape(1) != w.k) throw std::invalid_argument("out is not [n, k]");
    for (int r = 0; r < w.n; r++) self.kernels().unpack_row(w, r, out.data() + (size_t)r * w.k);
    return nb::cast(out);
}

nb::object logits(const Replay& self, Matrix<float> out) {
    const int rows = (int)out.shape(0), vocab = self.vocab();
    if (rows > self.reserved_sampled() || (int)out.shape(1) != vocab) {
        throw std::invalid_argument("out is not [sampled rows, vocab]");
    }
    for (int r = 0; r < rows; r++) std::copy_n(self.logits(r), vocab, out.data() + (size_t)r * vocab);
    return nb::cast(out);
}

}  // namespace

void bind_replay(nb::module_& m) {
    nb::class_<Replay>(m, "Replay", "Weights in packed form, KV memory, and the replay of one plan.")
        .def(
            "__init__",
            [](Replay* self, const std::string& isa, int threads, bool huge_pages, const std::vector<int>& nodes) {
                if (threads < 1) throw std::invalid_argument("threads must be at least 1");
                new (self) Replay(kernels_of(isa), threads, Placement{huge_pages, nodes});
            },
            "isa"_a, "threads"_a, "huge_pages"_a = true, "nodes"_a = std::vector<int>())
        .def("add_weight", &add_weight, "source"_a, "act"_a, "n"_a, "k"_a,
             "Memory for a tensor type of the file, or of rewritten.LISTED and LISTED_K; gives the weight's index.")
        .def("pack_rows", &pack_rows, "weight"_a, "source"_a, "first"_a, "rows"_a,
             "Packs rows [some, bytes] of the weight, from `first` on, a multiple of 16.")
        .def(
            "add_vector", [](Replay& self, Floats v) { return self.add_vector(v.data(), (int)v.shape(0)); }, "values"_a)
        .def("set_plan", &set_plan, "sizes"_a, "rope_halves"_a, "norm_eps"_a, "places"_a, "ops"_a, "logits"_a)
        .def(
            "allocate",
            [](Replay& self, int num_blocks, int block_size, int kv_type, Matrix<const float> cos_sin) {
                self.allocate(num_blocks, block_size, (KvType)kv_type, cos_sin.data(), (int)cos_sin.shape(0));
            },
            "num_blocks"_a, "block_size"_a, "kv_type"_a, "cos_sin"_a)
        .def("step", &step)
        .def("logits", &logits, "out"_a, "The first sampled rows of the last step [rows, vocab].")
        .def("unpack", &unpack, "weight"_a, "out"_a, "A packed weight as float32 [n, k].")
        .def(
            "poison", [](Replay& self, Ints blocks) { self.poison(blocks.data(), (int)blocks.shape(0)); }, "blocks"_a,
            "Writes NaN over the KV of these blocks.")
        .def(
            "kv_block",
            [](nb::handle_t<Replay> self, int block) {
                const Replay& replay = nb::cast<const Replay&>(self);
                uint8_t* kv = replay.kv_block(block);
                if (kv == nullptr) throw std::invalid_argument("no such block");
                return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(kv, {replay.block_bytes()}, self);
            },
            "block"_a, "The KV of one block as it lies in memory; writable.")
        .def_prop_ro("threads", &Replay::threads)
        .def_prop_ro("isa", [](const Replay& self) { return std::string(self.isa()); })
        .def_prop_ro("packed_bytes", &Replay::packed_bytes);
}

}  // namespace potok
