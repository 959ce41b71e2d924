#include "plan/replay.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

namespace potok {
namespace {

constexpr int kAlign = 64;
// Rows so many bytes apart, or a multiple, share one set of a first-level cache, which holds 8 to 12 of them.
constexpr int kSetBytes = 4096;
// Gates, and as many values they apply to, that one task holds at a time: with the levels of a panel they stay in the
// first-level cache. Rows are cut so that this is at least a group of columns.
constexpr int kGates = 4096, kGatedRows = kGates / kGroup;
// Bytes of activations that one linear task walks for each panel; half of a small second-level cache.
constexpr int kActivationBytes = 256 << 10;

size_t round_up(size_t n, size_t to) {
    return (n + to - 1) / to * to;
}
uint8_t* aligned(uint8_t* p) {
    return reinterpret_cast<uint8_t*>(round_up(reinterpret_cast<size_t>(p), kAlign));
}
int ceil_div(int a, int b) {
    return (a + b - 1) / b;
}

// Where the parts of integer rows lie in a place's memory.
struct IntegerPlaces {
    size_t q, d, s, sum, s16;  // the last is 0 where there is none
    template <class T>
    IntRows<T> rows(uint8_t* base) const {
        return {reinterpret_cast<T*>(base + q), reinterpret_cast<float*>(base + d), reinterpret_cast<float*>(base + s),
                reinterpret_cast<int32_t*>(base + sum), s16 ? reinterpret_cast<float*>(base + s16) : nullptr};
    }
};

}  // namespace

Replay::Replay(const Kernels& kernels, int threads, Placement placement)
    : kernels_(kernels), arena_(placement), pool_(threads) {}

int Replay::add_weight(Packed format, Act act, int n, int k) {
    const size_t bytes = ceil_div(n, kPanel) * panel_bytes(format, k);
    packed_bytes_ += bytes;
    if (has_minimum(format) && scales_per_group(format) == 2) sums_of_16_ = true;
    weights_.push_back({format, act, n, k, arena_.allocate(bytes)});
    return (int)weights_.size() - 1;
}

void Replay::pack_rows(int weight, Source source, int first, int n, const uint8_t* rows) {
    const PackedWeight& w = weights_[weight];
    struct Job {
        Source source;
        int n, k, panels;
        const uint8_t* rows;
        uint8_t* out;
        std::atomic<int> next{0};
    } job{source, n, w.k, ceil_div(n, kPanel), rows, nullptr};
    // The arena's memory, which nobody else writes.
    job.out = const_cast<uint8_t*>(w.data) + first / kPanel * panel_bytes(w.format, w.k);
    pool_.run(
        [](void* context, int) {
            Job& j = *static_cast<Job*>(context);
            constexpr int kChunk = 8;
            for (int p = j.next.fetch_add(kChunk); p < j.panels; p = j.next.fetch_add(kChunk)) {
                pack_panels(j.source, j.rows, j.n, j.k, p, std::min(p + kChunk, j.panels), j.out);
            }
        },
        &job);
}

int Replay::add_vector(const float* values, int n) {
    float* out = reinterpret_cast<float*>(arena_.allocate(round_up((size_t)n * 4, kAlign)));
    memcpy(out, values, (size_t)n * 4);
    vectors_.push_back(out);
    return (int)vectors_.size() - 1;
}

void Replay::set_plan(const Shape& shape, std::vector<Place> places, std::vector<Op> ops, int logits) {
    shape_ = shape;
    places_ = std::move(places);
    ops_.clear();
    for (Op& op : ops) {
        if (op.kind == OpKind::Attention) {
            ops_.push_back(op);
            ops_.back().kind = OpKind::AttentionAhead;
        }
        ops_.push_back(std::move(op));
    }
    logits_ = logits;
    memory_.resize(places_.size());
    rows_.resize(places_.size());
    phases_.resize((int)ops_.size() + 1);
    splits_.resize(ops_.size());
    int widest = 0;
    for (const Place& p : places_) widest = std::max(widest, p.cols);
    if (shape.heads / shape.kv_heads > kTaskRows) throw std::invalid_argument("too many heads share keys and values");
    const size_t attention = attention_scratch_floats(kTaskRows, shape.head_dim);
    const size_t most = std::max({attention, (size_t)widest, (size_t)2 * kGates});
    scratch_.assign(pool_.size(), std::vector<float>(most + kAlign / 4));
    sample_scratch_.assign(pool_.size(), std::vector<uint8_t>(sample_scratch_bytes(shape.vocab) + kAlign));
}

void Replay::allocate(int num_blocks, int block_size, KvType kv_type, const float* cos_sin, int max_positions) {
    kv_type_ = kv_type;
    layer_stride_ = shape_.kv_heads * kv_head_bytes(kv_type, block_size, shape_.head_dim);
    block_stride_ = layer_stride_ * shape_.layers;
    block_size_ = block_size;
    num_blocks_ = num_blocks;
    kv_arena_.reset(new Arena(arena_.placement()));
    kv_ = kv_arena_->allocate(block_stride_ * num_blocks);
    cos_sin_.assign(cos_sin, cos_sin + (size_t)max_positions * shape_.rope_dim);
}

void Replay::poison(const int32_t* blocks, int n) {
    // All bits set is NaN in every float type, the scales of bytes included.
    for (int i = 0; i < n; i++) memset(kv_ + (size_t)blocks[i] * block_stride_, 0xff, block_stride_);
}

uint8_t* Replay::layer_kv(int block, int layer) const {
    return kv_ + (size_t)block * block_stride_ + (size_t)layer * layer_stride_;
}

float* Replay::scratch(int worker) {
    return reinterpret_cast<float*>(aligned(reinterpret_cast<uint8_t*>(scratch_[worker].data())));
}

// Memory of every place for this many rows; grows and never shrinks.
void Replay::reserve(int tokens, int sampled) {
    if (tokens <= reserved_tokens_ && sampled <= reserved_sampled_) return;
    reserved_tokens_ = std::max(reserved_tokens_, tokens);
    reserved_sampled_ = std::max(reserved_sampled_, sampled);
    for (size_t i = 0; i < places_.size(); i++) {
        const Place& p = places_[i];
        const bool is_logits = (int)i == logits_;
        const size_t rows = is_logits ? reserved_sampled_ : reserved_tokens_, groups = p.cols / kGroup;
        const int whole = is_logits ? (int)round_up(p.cols, 64) : p.cols;
        const int ld = whole * 4 % kSetBytes ? whole : whole + 64;
        size_t bytes = kAlign;
        const auto take = [&](bool wanted, size_t n) {
            const size_t at = bytes;
            if (wanted) bytes += round_up(n, kAlign);
            return at;
        };
        const auto take_integers = [&](bool wanted, size_t element) {
            IntegerPlaces at{};
            at.q = take(wanted, rows * p.cols * element);
            for (size_t* part : {&at.d, &at.s, &at.sum}) *part = take(wanted, rows * groups * 4);
            if (sums_of_16_) at.s16 = take(wanted, rows * groups * 8);
            return at;
        };
        const size_t f32 = take(p.f32, rows * ld * 4);
        const IntegerPlaces a8 = take_integers(p.a8, 1), a16 = take_integers(p.a16, 2);
        memory_[i].assign(bytes + kAlign, 0);
        uint8_t* base = aligned(memory_[i].data());
        ActRows& a = rows_[i].acts;
        a.k = p.cols;
        a.f32 = p.f32 ? reinterpret_cast<float*>(base + f32) : nullptr;
        a.a8 = p.a8 ? a8.rows<int8_t>(base) : IntRows<int8_t>{};
        a.a16 = p.a16 ? a16.rows<int16_t>(base) : IntRows<int16_t>{};
        rows_[i].ld = ld;
    }
}

void Replay::step(const StepView& step) {
    reserve(step.tokens, std::max(step.sampled, 1));
    for (int i = 0; i < step.num_copies; i++) {
        const int32_t* copy = step.copies + 2 * i;
        memcpy(layer_kv(copy[1], 0), layer_kv(copy[0], 0), block_stride_);
    }
    step_ = &step;
    attention_.make(step, {shape_.heads, shape_.kv_heads, shape_.head_dim, block_size_, pool_.size()});
    for (size_t i = 0; i < ops_.size(); i++) splits_[i] = split(ops_[i]);
    const int last = (int)ops_.size();
    phases_.begin([&](int i) { return i == last ? step.sampled : splits_[i].tasks(); });
    pool_.start([](void* self, int worker) { static_cast<Replay*>(self)->work(worker); }, this);
    work(0);
    step_ = nullptr;
}

// Takes part in the current round until it is over. Only inside a task may a worker look at the step: between tasks
// the round may end, and the next begin, without it.
void Replay::work(int worker) {
    const uint64_t round = phases_.round();
    for (int i = 0; i < phases_.size(); i++) {
        for (int task = phases_.take(round, i); task >= 0; task = phases_.take(round, i)) {
            run_task(i, task, worker);
            phases_.finish(i);
        }
        for (int turn = 0; !phases_.over(round, i); turn++) relax(turn);
    }
}

// Quantises `cols` elements from column `first` of one row into the forms that the place's readers want.
void Replay::emit(const Rows& place, int row, const float* x, int first, int cols) {
    const ActRows& a = place.acts;
    const size_t at = (size_t)row * a.k + first;
    if (a.a8.q) kernels_.quantize_a8(x, cols, a.a8, at);
    if (a.a16.q) kernels_.quantize_a16(x, cols, a.a16, at);
}

Replay::Split Replay::split(const Op& op) const {
    const int rows = op.sampled ? step_->sampled : step_->tokens, threads = pool_.size();
    // A task costs about 0.1 us to take, a row of a norm 0.3 us: a few tasks for each thread, of several rows.
    const Split by_rows{rows, std::max(1, rows / (4 * threads)), 1, 0, 0, 0};
    switch (op.kind) {
        case OpKind::Linear: {
            int panels = 0;
            for (const int w : op.weights) panels += ceil_div(weights_[w].n, kPanel);
            return by_panels(op, panels);
        }
        case OpKind::Swiglu:
            return by_panels(op, ceil_div(weights_[op.weights[0]].n, kGroup));
        case OpKind::Attention:
            return {(int)attention_.ending().size(), 1, 1, 0, 0, 0};
        case OpKind::AttentionAhead:
            return {(int)attention_.ahead().size(), 1, 1, 0, 0, 0};
        default:
            return by_rows;
    }
}

// Of a linear's rows and of `units` panels, or groups of them.
Replay::Split Replay::by_panels(const Op& op, int units) const {
    const int rows = op.sampled ? step_->sampled : step_->tokens, threads = pool_.size();
    // Each thread begins with most of its share in one task, which streams its panels and sets the tile registers up
    // once; the rest, in small tasks, goes to whoever is done first. Against equal tasks of one panel or two, steps of
    // the smallest model took 7 % less at 1 row, 13 % at 8, 20 % at 12 to 32 and 5 % at 256.
    const int share = units / threads, large = share * 3 / 4, chunk = std::max(1, share / 16);
    const int first = large ? threads : 0, chunks = first + ceil_div(units - first * large, chunk);
    const Act act = weights_[op.weights[0]].act;
    const int row_bytes = rows_[op.input].acts.k * (act == Act::F32 ? 4 : act == Act::A16 ? 2 : 1);
    const int row_block = std::max(32, kActivationBytes / row_bytes / 4 * 4);
    return {rows, row_block, chunks, chunk, first, large};
}

void Replay::run_task(int index, int task, int worker) {
    if (index == (int)ops_.size()) return sample(task, worker);
    const Op& op = ops_[index];
    const StepView& s = *step_;
    const Split& split = splits_[index];
    const int row0 = task / split.chunks * split.row_block, row1 = std::min(row0 + split.row_block, split.rows);
    const Rows& out = rows_[op.output];
    const Rows& in = op.input < 0 ? out : rows_[op.input];
    switch (op.kind) {
        case OpKind::Embed:
            for (int r = row0; r < row1; r++) {
                kernels_.unpack_row(weights_[op.weights[0]], s.token_ids[r], out.acts.f32 + (size_t)r * out.ld);
            }
            break;
        case OpKind::RmsNorm:
            for (int r = row0; r < row1; r++) {
                float* y = out.acts.f32 ? out.acts.f32 + (size_t)r * out.ld : scratch(worker);
                const float* x = in.acts.f32 + (size_t)r * in.ld;
                kernels_.rms_norm(x, vectors_[op.weights[0]], in.acts.k, shape_.norm_eps, y);
                emit(out, r, y, 0, out.acts.k);
            }
            break;
        case OpKind::Linear: {
            const int c = task % split.chunks;
            run_linear(op, row0, row1, split.first_unit(c), split.first_unit(c + 1));
            break;
        }
        case OpKind::RopeKv: {
            RopeTask t{};
            t.num_heads = shape_.heads;
            t.num_kv_heads = shape_.kv_heads;
            t.head_dim = shape_.head_dim;
            t.rope_dim = shape_.rope_dim;
            t.block_size = block_size_;
            t.kv_type = kv_type_;
            t.halves = shape_.rope_halves;
            t.scale = 1.0f / std::sqrt((float)shape_.head_dim);
            for (int r = row0; r < row1; r++) {
                const int segment =
                    (int)(std::upper_bound(s.q_indptr, s.q_indptr + s.segments + 1, r) - s.q_indptr) - 1;
                const int position = s.positions[r];
                const int block = s.kv_blocks[s.kv_indptr[segment] + position / block_size_];
                t.qkv = in.acts.f32 + (size_t)r * in.ld;
                t.q = out.acts.f32 + (size_t)r * out.ld;
                t.kv = layer_kv(block, op.layer);
                t.slot = position % block_size_;
                t.cos_sin = cos_sin_.data() + (size_t)position * shape_.rope_dim;
                kernels_.rope_kv(t);
            }
            break;
        }
        case OpKind::Attention:
            run_attention(op, attention_.ending()[task], worker);
            break;
        case OpKind::AttentionAhead:
            run_attention(op, attention_.ahead()[task], worker);
            break;
        case OpKind::Swiglu: {
            const int c = task % split.chunks;
            run_swiglu(op, row0, row1, split.first_unit(c), split.first_unit(c + 1), worker);
            break;
        }
        case OpKind::Gather:
            for (int r = row0; r < row1; r++) {
                memcpy(out.acts.f32 + (size_t)r * out.ld, in.acts.f32 + (size_t)s.out_rows[r] * in.ld,
                       (size_t)in.acts.k * 4);
            }
            break;
    }
}

// Of one of the operation's weights, but for where its results go.
LinearTask Replay::linear_task(const Op& op, int w, int row0, int row1, int panel0, int panel1) const {
    LinearTask t{};
    t.weight = &weights_[op.weights[w]];
    t.acts = &rows_[op.input].acts;
    t.row0 = row0;
    t.row1 = row1;
    t.panel0 = panel0;
    t.panel1 = panel1;
    t.bias = op.biases.empty() || op.biases[w] < 0 ? nullptr : vectors_[op.biases[w]];
    return t;
}

// Panels [panel, end), counted over the operation's weights side by side.
void Replay::run_linear(const Op& op, int row0, int row1, int panel, int end) {
    const Rows& out = rows_[op.output];
    int first = 0, column = 0;  // of the weight at hand
    for (size_t w = 0; w < op.weights.size() && panel < end; w++) {
        const PackedWeight& weight = weights_[op.weights[w]];
        const int n = ceil_div(weight.n, kPanel);
        if (panel < first + n) {
            LinearTask t = linear_task(op, (int)w, row0, row1, panel - first, std::min(end, first + n) - first);
            const int at = column + t.panel0 * kPanel;
            t.out = out.acts.f32 + (size_t)row0 * out.ld + at;
            t.ld_out = out.ld;
            if (op.residual >= 0) {
                const Rows& residual = rows_[op.residual];
                t.residual = residual.acts.f32 + (size_t)row0 * residual.ld + at;
                t.ld_residual = residual.ld;
            }
            kernels_.linear(t);
            panel = first + t.panel1;
        }
        first += n;
        column += weight.n;
    }
}

// Groups [group, end) of the columns: both linears, then their SwiGLU while its inputs are in the cache.
void Replay::run_swiglu(const Op& op, int row0, int row1, int group, int end, int worker) {
    const Rows& out = rows_[op.output];
    float *gates = scratch(worker), *gated = gates + kGates;
    const int parts = ceil_div(row1 - row0, kGatedRows), part = (int)round_up(ceil_div(row1 - row0, parts), 16);
    for (int row = row0; row < row1; row += part) {
        const int rows = std::min(part, row1 - row), ld = kGates / rows / kGroup * kGroup;
        for (int first = group * kGroup; first < end * kGroup; first += ld) {
            const int cols = std::min({ld, end * kGroup - first, out.acts.k - first});
            for (int w = 0; w < 2; w++) {
                const int panel = first / kPanel;
                LinearTask t = linear_task(op, w, row, row + rows, panel, panel + ceil_div(cols, kPanel));
                t.out = w ? gated : gates;
                t.ld_out = ld;
                kernels_.linear(t);
            }
            for (int r = 0; r < rows; r++) {
                float* gate = gates + r * ld;
                float* y = out.acts.f32 ? out.acts.f32 + (size_t)(row + r) * out.ld + first : gate;
                kernels_.swiglu(gate, gated + r * ld, cols, y);
                emit(out, row + r, y, first, cols);
            }
        }
    }
}

void Replay::run_attention(const Op& op, const AttentionItem& item, int worker) {
    const Rows &in = rows_[op.input], &out = rows_[op.output];
    const bool ends = op.kind == OpKind::Attention;
    AttentionTask t{};
    attention_.describe(item, t);
    t.q = in.acts.f32;
    t.ld_q = in.ld;
    t.kv = kv_ + (size_t)op.layer * layer_stride_;
    t.kv_type = kv_type_;
    t.block_stride = block_stride_;
    t.out = ends ? out.acts.f32 : nullptr;
    t.ld_out = out.ld;
    t.scratch = scratch(worker);
    kernels_.attention(t);
    if (!ends) return;
    const int cols = t.group * t.head_dim, first = item.kv_head * cols;
    for (int i = 0; i < t.num_rows; i++) {
        emit(out, t.rows[i], out.acts.f32 + (size_t)t.rows[i] * out.ld + first, first, cols);
    }
}

void Replay::sample(int row, int worker) {
    const StepView& s = *step_;
    const Rows& logits = rows_[logits_];
    float* x = logits.acts.f32 + (size_t)row * logits.ld;
    for (int i = shape_.vocab; i < logits.ld; i++) x[i] = -INFINITY;
    kernels_.sample_row(x, shape_.vocab, s.rows[row], s.out[row], aligned(sample_scratch_[worker].data()));
}

}  // namespace potok
