// A recorded plan, lowered to native operations, and its replay for the tokens of one step.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "formats/pack.h"
#include "kernels/table.h"
#include "plan/attention.h"
#include "plan/step.h"
#include "runtime/arena.h"
#include "runtime/phases.h"
#include "runtime/pool.h"

namespace potok {

enum class OpKind : int32_t {
    Embed = 0,
    RmsNorm = 1,
    Linear = 2,
    RopeKv = 3,
    Attention = 4,
    Swiglu = 5,  // of two linears
    Gather = 6,
    AttentionAhead = 7  // stands before every Attention once a plan is set; never recorded
};

// A place for rows of one value; places are reused once nobody reads them any more.
struct Place {
    int32_t cols;
    bool f32, a8, a16;  // forms that are written here
};

struct Op {
    OpKind kind;
    int32_t input, residual, output;  // places; -1: none
    bool sampled;                     // rows are the sampled rows, not the tokens
    int32_t layer;
    std::vector<int32_t> weights;  // packed weights, or for RmsNorm one vector
    std::vector<int32_t> biases;   // vectors; -1: none; empty: none at all
};

struct Shape {
    int32_t layers, heads, kv_heads, head_dim, rope_dim, vocab;
    bool rope_halves;
    float norm_eps;
};

class Replay {
 public:
    // placement: of weights and KV.
    Replay(const Kernels& kernels, int threads, Placement placement = {});

    // Memory of a weight, whose rows are packed afterwards: all zero until then.
    int add_weight(Packed format, Act act, int n, int k);
    // Packs n rows with all threads, to `first` on, a multiple of 16; they may go away afterwards. source: of the
    // weight's form.
    void pack_rows(int weight, Source source, int first, int n, const uint8_t* rows);
    int add_vector(const float* values, int n);
    void set_plan(const Shape& shape, std::vector<Place> places, std::vector<Op> ops, int logits);
    // cos_sin: [max_positions][rope_dim]: cosines then sines.
    void allocate(int num_blocks, int block_size, KvType kv_type, const float* cos_sin, int max_positions);

    void step(const StepView& step);
    // [vocab]: of a sampled row of the last step; raw where the row has no penalties and no biases.
    const float* logits(int row) const { return rows_[logits_].acts.f32 + (size_t)row * rows_[logits_].ld; }

    int threads() const { return pool_.size(); }
    const char* isa() const { return kernels_.isa; }
    size_t packed_bytes() const { return packed_bytes_; }
    const PackedWeight& weight(int i) const { return weights_[i]; }
    int vocab() const { return shape_.vocab; }
    int reserved_sampled() const { return reserved_sampled_; }
    const Kernels& kernels() const { return kernels_; }
    // Writes NaN over the KV of these blocks (tests: nothing may ever read a slot that it did not write).
    void poison(const int32_t* blocks, int n);
    // The KV of one block, all layers; null unless there is such a block.
    uint8_t* kv_block(int block) const { return block >= 0 && block < num_blocks_ ? layer_kv(block, 0) : nullptr; }
    size_t block_bytes() const { return block_stride_; }

 private:
    struct Rows {  // what one place holds now
        ActRows acts;
        int32_t ld;  // floats between rows of the f32 form
    };
    struct Split {  // of one operation's rows and columns into tasks, for one step
        int32_t rows, row_block, chunks, chunk;
        int32_t large, large_chunk;  // of the chunks, the first are larger
        int32_t tasks() const { return (rows + row_block - 1) / row_block * chunks; }
        int32_t first_unit(int32_t c) const {  // of chunk c
            return c < large ? c * large_chunk : large * large_chunk + (c - large) * chunk;
        }
    };

    void reserve(int tokens, int sampled);
    Split split(const Op& op) const;
    Split by_panels(const Op& op, int units) const;
    void work(int worker);
    void run_task(int index, int task, int worker);
    LinearTask linear_task(const Op& op, int w, int row0, int row1, int panel0, int panel1) const;
    void run_linear(const Op& op, int row0, int row1, int panel, int end);
    void run_swiglu(const Op& op, int row0, int row1, int group, int end, int worker);
    void run_attention(const Op& op, const AttentionItem& item, int worker);
    void sample(int row, int worker);
    void emit(const Rows& place, int row, const float* x, int first, int cols);
    uint8_t* layer_kv(int block, int layer) const;
    float* scratch(int worker);

    const Kernels& kernels_;
    Arena arena_;
    size_t packed_bytes_ = 0;
    std::vector<PackedWeight> weights_;
    bool sums_of_16_ = false;  // wanted by a weight
    std::vector<const float*> vectors_;
    Shape shape_{};
    std::vector<Place> places_;
    std::vector<Op> ops_;
    int logits_ = -1;

    std::unique_ptr<Arena> kv_arena_;
    uint8_t* kv_ = nullptr;
    KvType kv_type_ = KvType::F16;
    size_t block_stride_ = 0, layer_stride_ = 0;  // bytes
    int block_size_ = 0, num_blocks_ = 0;
    std::vector<float> cos_sin_;

    int reserved_tokens_ = 0, reserved_sampled_ = 0;
    std::vector<std::vector<uint8_t>> memory_;  // of each place
    std::vector<Rows> rows_;
    std::vector<std::vector<float>> scratch_;  // of each worker
    std::vector<std::vector<uint8_t>> sample_scratch_;
    Phases phases_;  // one for each operation, and the last one samples
    std::vector<Split> splits_;
    AttentionPlan attention_;
    const StepView* step_ = nullptr;
    Pool pool_;  // last: its threads end before what they look at
};

}  // namespace potok
