// The table of kernels: one per ISA, filled by one translation unit each. The scalar table defines the bits;
// every other table is compared with it by memcmp.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "kernels/packed.h"
#include "kernels/sampling.h"

namespace potok {

// Activations as a linear takes them: float rows, or integers with one scale per 32 (A8: |q| <= 127, A16: <= 32767).
enum class Act : int32_t { F32 = 0, A8 = 1, A16 = 2 };

constexpr int kMaxHeadDim = 256;  // a multiple of 16
constexpr int kTileTokens = 64;   // attention visits KV in tiles of this many tokens at absolute positions,
constexpr int kSpanTokens = 512;  // inside spans of this many, merged in ascending order
constexpr int kTileRows = 6;      // query rows (token, head of the group) that share the loads of a tile
constexpr int kTaskRows = 96;     // query rows of one attention task at most

struct PackedWeight {
    Packed format;
    Act act;
    int32_t n;  // output columns
    int32_t k;  // input columns
    const uint8_t* data;
};

// Rows as integers: q [rows][k]; per group of 32, d [rows][k / 32], s = d * sum(q), and sum(q). A16 in pair order.
// s16: as s, of each 16, [rows][k / 16]; null where no weight has a minimum for each 16.
template <class T>
struct IntRows {
    T* q;
    float *d, *s;
    int32_t* sum;
    float* s16;
};

// Rows of one value, in the forms that its readers want; unused ones are null. k elements a row.
struct ActRows {
    float* f32;  // [rows][k]
    IntRows<int8_t> a8;
    IntRows<int16_t> a16;
    int32_t k;
};

struct LinearTask {
    const PackedWeight* weight;
    const ActRows* acts;
    int32_t row0, row1;      // rows of acts and of out
    int32_t panel0, panel1;  // panels of the weight
    float* out;              // of row0 and the first column of panel0
    int32_t ld_out;
    const float* bias;      // [n] or null
    const float* residual;  // as out, or null; may be out itself
    int32_t ld_residual;
};

// Element type of K and V in memory. I8 has one float scale for each token and head, of K and of V.
enum class KvType : int32_t { F16 = 0, F32 = 1, I8 = 2 };

static constexpr int kv_element_bytes(KvType t) {
    return t == KvType::I8 ? 1 : t == KvType::F16 ? 2 : 4;
}
static constexpr size_t kv_head_bytes(KvType t, int block_size, int head_dim) {
    return (size_t)2 * block_size * (head_dim * kv_element_bytes(t) + (t == KvType::I8 ? 4 : 0));
}

// A block holds all layers, so that it is one run of memory. In block b of this layer, at kv + b * block_stride bytes,
// heads follow each other: K transposed [head_dim][block_size], then V [block_size][head_dim], then for I8 the scales
// of K [block_size] and of V [block_size].
//
// Query rows of one KV head visit tokens [begin, end) of one block table, whole tiles. Without `out` the task works
// ahead: it leaves one partial for each query row and span; begin is the first token of one. With `out` it
// ends its rows: the partials of all tokens outside are there, it merges, and writes the result.
struct AttentionTask {
    const float* q;  // [rows of the step][num_heads * head_dim], rotated and scaled
    int32_t ld_q;
    const uint8_t* kv;  // of the layer
    KvType kv_type;
    size_t block_stride;    // bytes
    const int32_t* blocks;  // the block table; all rows of the task have the same blocks as far as it goes
    int32_t block_size, head_dim, num_kv_heads, kv_head, group;
    const int32_t* rows;       // [num_rows] rows of q and of out; num_rows * group <= kTaskRows
    const int32_t* positions;  // absolute position of every row of q
    int32_t num_rows;
    int32_t begin, end;       // absolute tokens; a row sees none past its position
    float* partials;          // of the step: partial_floats(head_dim) each, aligned to 64 bytes
    const int32_t* partial0;  // of every row of q: its first; they follow each other span by span, head by head
    float* out;               // [rows of the step][num_heads * head_dim], or null
    int32_t ld_out;
    float* scratch;  // attention_scratch_floats(num_rows * group, head_dim)
};

struct RopeTask {
    const float* qkv;  // one row: q heads, k heads, v heads
    float* q;          // one row, out
    uint8_t* kv;       // of the layer and block
    KvType kv_type;
    int32_t slot;
    const float* cos_sin;  // [rope_dim / 2] cosines, then as many sines, of this position
    int32_t num_heads, num_kv_heads, head_dim, rope_dim, block_size;
    bool halves;
    float scale;  // multiplies the rotated q: 1 / sqrt(head_dim)
};

struct Kernels {
    const char* isa;
    void (*linear)(const LinearTask&);
    void (*rms_norm)(const float* x, const float* weight, int cols, float eps, float* out);
    // To elements [at, at + cols) of out, counted over its rows; both are multiples of 32.
    void (*quantize_a8)(const float* x, int cols, const IntRows<int8_t>& out, size_t at);
    void (*quantize_a16)(const float* x, int cols, const IntRows<int16_t>& out, size_t at);
    void (*swiglu)(const float* gate, const float* up, int cols, float* out);
    void (*rope_kv)(const RopeTask&);
    void (*attention)(const AttentionTask&);
    void (*unpack_row)(const PackedWeight&, int row, float* out);
    void (*sample_row)(float* logits, int vocab, const SampleRow&, SampleOut&, void* scratch);
};

// What a query row has seen of one span: sum of weighted values [head_dim], greatest score, sum of weights.
constexpr size_t partial_floats(int head_dim) {
    return (size_t)head_dim + 16;
}
// Two partials and the query of each query row, the scores of a tile of rows, and a tile of K and V as floats.
constexpr size_t attention_scratch_floats(int rows, int head_dim) {
    return rows * (2 * partial_floats(head_dim) + partial_floats(kMaxHeadDim)) + kTileRows * kTileTokens +
           2 * (size_t)kTileTokens * head_dim;
}

namespace scalar {
const Kernels& kernels();
}
namespace avx2 {
const Kernels& kernels();
}
namespace avxvnni {
const Kernels& kernels();
}
namespace avx512vnni {
const Kernels& kernels();
}
namespace amx {
const Kernels& kernels();
}

}  // namespace potok
