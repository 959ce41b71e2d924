// One row of logits to one token id. The order of operations is defined in potok.sampling, bit for bit.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace potok {

struct SampleRow {
    float temperature;  // below 1e-5: greedy
    int32_t top_k;      // 0 or less: off
    float top_p, min_p;
    uint64_t seed;
    uint32_t choice, position;
    float presence, frequency, repetition;
    const int32_t* seen_ids;     // distinct ids of prompt and output
    const int32_t* seen_counts;  // how often the output holds each
    int32_t num_seen;
    const int32_t* bias_ids;  // distinct
    const float* bias_values;
    int32_t num_bias;
    int32_t num_logprobs;  // -1: none, and logprob stays 0; else entries of top_ids and top_logprobs
    bool want_hash;
};

struct SampleOut {
    int32_t id;        // -1: a logit was NaN or infinite
    float logprob;     // of id, from the raw logits
    uint64_t hash;     // of the raw logits
    int32_t* top_ids;  // [num_logprobs], -1 past the vocabulary
    float* top_logprobs;
};

constexpr int kSpan = 64;                 // logits that share one maximum
constexpr int kMaxSampleVocab = 1 << 19;  // sums of more weights than this could round

static inline int padded_vocab(int vocab) {
    return (vocab + kSpan - 1) / kSpan * kSpan;
}

// Scratch of one sample_row call; 64-byte aligned.
static inline size_t sample_scratch_bytes(int vocab) {
    const size_t n = (size_t)padded_vocab(vocab), spans = (n / kSpan + 15) / 16 * 16;
    const size_t pools = 6 * (n + 16) * sizeof(float);
    return n * (2 * sizeof(uint64_t) + 3 * sizeof(float)) + pools + spans * (sizeof(float) + 1);
}

}  // namespace potok
