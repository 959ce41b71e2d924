// The sampler of a named table, one row at a time, for tests that compare it with its definition in numpy.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "bind/bind.h"
#include "runtime/isa.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace potok {
namespace {

using Ints = Vector<const int32_t>;
using Floats = Vector<const float>;
using Result = std::tuple<int, float, uint64_t, std::vector<int32_t>, std::vector<float>>;

Result sample_row(const std::string& isa, Floats logits, float temperature, int top_k, float top_p, float min_p,
                  uint64_t seed, uint32_t choice, uint32_t position, float presence, float frequency, float repetition,
                  Ints seen_ids, Ints seen_counts, Ints bias_ids, Floats bias_values, int num_logprobs, bool want_hash,
                  int repeat) {
    const int vocab = (int)logits.shape(0);
    if (vocab < 1 || vocab > kMaxSampleVocab) throw std::invalid_argument("logits must be 1 to 2^19");
    if (seen_ids.shape(0) != seen_counts.shape(0)) throw std::invalid_argument("seen_ids and seen_counts differ");
    if (bias_ids.shape(0) != bias_values.shape(0)) throw std::invalid_argument("bias_ids and bias_values differ");
    for (const Ints* ids : {&seen_ids, &bias_ids}) {
        for (size_t i = 0; i < ids->shape(0); i++) {
            if (ids->data()[i] < 0 || ids->data()[i] >= vocab) throw std::invalid_argument("an id is not in the row");
        }
    }
    SampleRow row{};
    row.temperature = temperature;
    row.top_k = top_k;
    row.top_p = top_p;
    row.min_p = min_p;
    row.seed = seed;
    row.choice = choice;
    row.position = position;
    row.presence = presence;
    row.frequency = frequency;
    row.repetition = repetition;
    row.seen_ids = seen_ids.data();
    row.seen_counts = seen_counts.data();
    row.num_seen = (int)seen_ids.shape(0);
    row.bias_ids = bias_ids.data();
    row.bias_values = bias_values.data();
    row.num_bias = (int)bias_ids.shape(0);
    row.num_logprobs = num_logprobs;
    row.want_hash = want_hash;

    const size_t tops = (size_t)std::max(num_logprobs, 0);
    std::vector<int32_t> top_ids(tops);
    std::vector<float> top_logprobs(tops);
    SampleOut out{};
    out.top_ids = top_ids.data();
    out.top_logprobs = top_logprobs.data();

    const size_t padded = (size_t)padded_vocab(vocab);
    std::vector<float> x(padded, -std::numeric_limits<float>::infinity());
    std::copy(logits.data(), logits.data() + vocab, x.begin());
    // An earlier row may have left anything in the scratch.
    std::vector<uint8_t> scratch(sample_scratch_bytes(vocab) + 64, 0xa5);
    uint8_t* aligned = scratch.data() + (64 - (size_t)scratch.data() % 64);
    const Kernels& kernels = kernels_of(isa);
    for (int i = 0; i < repeat; i++) kernels.sample_row(x.data(), vocab, row, out, aligned);
    return {out.id, out.logprob, out.hash, std::move(top_ids), std::move(top_logprobs)};
}

}  // namespace

void bind_sampling(nb::module_& m) {
    m.def("sample_row", &sample_row, "isa"_a, "logits"_a, "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "seed"_a,
          "choice"_a, "position"_a, "presence"_a, "frequency"_a, "repetition"_a, "seen_ids"_a, "seen_counts"_a,
          "bias_ids"_a, "bias_values"_a, "num_logprobs"_a, "want_hash"_a, "repeat"_a = 1,
          "(id, logprob, hash, top_ids, top_logprobs) of one row; fields as in SampleRow of kernels/sampling.h. "
          "Penalties and biases change the row: only one without any may be repeated.");
}

}  // namespace potok
