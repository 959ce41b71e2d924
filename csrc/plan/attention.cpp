#include "plan/attention.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace potok {
namespace {

// Query rows of one task at least, where more tasks are wanted: fewer would convert the tiles too often.
constexpr int kFewRows = 24;
// The largest task may be this part of what a thread has to do, where it can be cut.
constexpr int kTasksOfThread = 8;
// Reading a token's K and V costs about as much as so many query rows.
constexpr int kReadRows = 2;

int down(int n, int to) {
    return n / to * to;
}
int up(int n, int to) {
    return (n + to - 1) / to * to;
}

}  // namespace

void AttentionPlan::make(const StepView& step, const AttentionSizes& sizes) {
    step_ = &step;
    sizes_ = sizes;
    const int tasks = kTasksOfThread * sizes.threads, group = sizes.group();
    const int wanted = step.tokens * group * sizes.kv_heads / tasks;
    rows_per_task_ = std::max(1, std::min(kTaskRows, std::max(kFewRows, wanted)) / group);

    ahead_.clear();
    ending_.clear();
    runs_.clear();
    rows_.resize(step.tokens);
    std::iota(rows_.begin(), rows_.end(), 0);
    from_.assign(step.segments, 0);
    to_.resize(step.segments);
    for (int s = 0; s < step.segments; s++) to_[s] = context(s);

    share();
    int64_t total = 0;
    for (const Run& run : runs_) total += cost(run.num_rows, run.end - run.begin);
    for (int s = 0; s < step.segments; s++) total += cost(rows_of(s), to_[s] - from_[s]);
    const int64_t limit = total * sizes.kv_heads / tasks;
    for (int s = 0; s < step.segments; s++) {
        const int begin = up(from_[s], kSpanTokens);
        if (rows_of(s) > rows_per_task_ || to_[s] - begin <= kSpanTokens) continue;
        if (cost(rows_of(s), to_[s] - begin) <= limit) continue;
        runs_.push_back({s, step.q_indptr[s], rows_of(s), begin, to_[s]});
        to_[s] = begin;
    }
    for (const Run& run : runs_) cut(run, limit);
    for (int s = 0; s < step.segments; s++) end_segment(s);
    keep_partials();

    // Heaviest first, so that the last ones to finish are short.
    for (std::vector<AttentionItem>* items : {&ahead_, &ending_}) {
        std::stable_sort(items->begin(), items->end(),
                         [](const AttentionItem& a, const AttentionItem& b) { return a.cost > b.cost; });
    }
}

int64_t AttentionPlan::cost(int rows, int tokens) const {
    return (int64_t)(rows * sizes_.group() + kReadRows) * tokens;
}

// Finds segments that begin with the same blocks. Only whole tiles before a segment's first row are looked at: their
// blocks were whole before this step, and nobody writes into them.
void AttentionPlan::share() {
    const StepView& s = *step_;
    const int block_size = sizes_.block_size;
    const auto table = [&](int segment) { return s.kv_blocks + s.kv_indptr[segment]; };
    const auto blocks = [&](int segment) { return down(s.positions[s.q_indptr[segment]], kTileTokens) / block_size; };
    sharing_.clear();
    for (int i = 0; i < s.segments; i++) {
        if (blocks(i) > 0 && rows_of(i) <= rows_per_task_) sharing_.push_back(i);
    }
    // In any order that brings equal beginnings together; memcmp is the fastest.
    std::sort(sharing_.begin(), sharing_.end(), [&](int a, int b) {
        const int order = memcmp(table(a), table(b), sizeof(int32_t) * std::min(blocks(a), blocks(b)));
        return order != 0 ? order < 0 : blocks(a) < blocks(b);
    });
    common_.assign(sharing_.size(), 0);
    for (size_t i = 1; i < sharing_.size(); i++) {
        const int a = sharing_[i - 1], b = sharing_[i], n = std::min(blocks(a), blocks(b));
        const int same = (int)(std::mismatch(table(a), table(a) + n, table(b)).first - table(a));
        common_[i] = down(same * block_size, kTileTokens);
    }
    if (sharing_.size() > 1) cover(0, (int)sharing_.size(), 0);
}

// Runs for the segments sharing_[first, last), at least two, of which all tokens before `begin` are visited by others.
// What all of them share is one run. Where some share more than that, they have a run of their own: it begins with a
// span, so those tokens are read again, unless that is dearer than what is won.
void AttentionPlan::cover(int first, int last, int begin) {
    const auto least = [&](int from, int to) { return *std::min_element(&common_[from] + 1, &common_[0] + to); };
    const int end = least(first, last), whole = down(end, kSpanTokens);
    std::vector<int32_t> all(sharing_.begin() + first, sharing_.begin() + last), rest;
    for (int i = first; i < last;) {
        int next = i + 1;
        while (next < last && common_[next] > end) next++;
        if (next - i > 1 && (next - i - 1) * (least(i, next) - end) > end - whole) {
            cover(i, next, whole);
        } else {
            rest.insert(rest.end(), sharing_.begin() + i, sharing_.begin() + next);
        }
        i = next;
    }
    if (rest.size() < all.size()) {
        run_ahead(all, begin, whole);
        begin = whole;
    }
    if (rest.size() > 1) run_ahead(rest, begin, end);
}

void AttentionPlan::run_ahead(const std::vector<int32_t>& segments, int begin, int end) {
    if (begin >= end) return;
    const int row0 = (int)rows_.size();
    for (const int s : segments) {
        from_[s] = std::max(from_[s], end);
        for (int row = step_->q_indptr[s]; row < step_->q_indptr[s + 1]; row++) rows_.push_back(row);
    }
    runs_.push_back({segments[0], row0, (int)rows_.size() - row0, begin, end});
}

// Items of even heights; where they cost more than `limit`, of several spans.
void AttentionPlan::cut(const Run& run, int64_t limit) {
    const int most = std::max(1, kTaskRows / sizes_.group()), parts = (run.num_rows + most - 1) / most;
    for (int part = 0; part < parts; part++) {
        const int row0 = run.num_rows * part / parts, rows = run.num_rows * (part + 1) / parts - row0;
        const int64_t fitting = down((int)std::min<int64_t>(limit / cost(rows, 1), run.end), kSpanTokens);
        const int tokens = std::max(kSpanTokens, (int)fitting);
        for (int begin = run.begin; begin < run.end; begin += tokens) {
            const int end = std::min(begin + tokens, run.end);
            for (int h = 0; h < sizes_.kv_heads; h++) {
                ahead_.push_back({run.segment, h, run.row0 + row0, rows, begin, end, cost(rows, end - begin)});
            }
        }
    }
}

void AttentionPlan::end_segment(int segment) {
    const int first = step_->q_indptr[segment], last = step_->q_indptr[segment + 1];
    for (int row = first; row < last; row += rows_per_task_) {
        const int rows = std::min(rows_per_task_, last - row),
                  end = std::min(to_[segment], step_->positions[row + rows - 1] + 1);
        for (int h = 0; h < sizes_.kv_heads; h++) {
            ending_.push_back({segment, h, row, rows, from_[segment], end, cost(rows, end - from_[segment])});
        }
    }
}

// Room for the partials of every row that some task works ahead for.
void AttentionPlan::keep_partials() {
    partial0_.resize(step_->tokens);
    size_t kept = 0;
    for (int s = 0; s < step_->segments; s++) {
        if (from_[s] == 0 && to_[s] == context(s)) continue;
        for (int row = step_->q_indptr[s]; row < step_->q_indptr[s + 1]; row++) {
            partial0_[row] = (int32_t)kept;
            kept += (size_t)up(context(s), kSpanTokens) / kSpanTokens * sizes_.heads;
        }
    }
    const size_t floats = kept * partial_floats(sizes_.head_dim) + 16;
    if (partials_.size() < floats) partials_.resize(floats);
}

void AttentionPlan::describe(const AttentionItem& item, AttentionTask& task) {
    task.blocks = step_->kv_blocks + step_->kv_indptr[item.segment];
    task.block_size = sizes_.block_size;
    task.head_dim = sizes_.head_dim;
    task.num_kv_heads = sizes_.kv_heads;
    task.group = sizes_.group();
    task.kv_head = item.kv_head;
    task.rows = rows(item);
    task.positions = step_->positions;
    task.num_rows = item.num_rows;
    task.begin = item.begin;
    task.end = item.end;
    task.partials = reinterpret_cast<float*>(((size_t)partials_.data() + 63) / 64 * 64);
    task.partial0 = partial0_.data();
}

}  // namespace potok
