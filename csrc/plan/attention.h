// How the attention of one step is cut into tasks; the same tasks serve every layer.
//
// Most rows are ended by one task for each KV head. Two things are worth a task ahead of that one, which leaves
// partials of what it visits (docs/numerics.md: rows carry them on, and merge them in ascending order, so not a bit
// changes): whole tiles that several segments hold in the same blocks are read once for all their rows; and where there
// are too few rows for the threads, a long context is visited by several tasks.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/table.h"
#include "plan/step.h"

namespace potok {

// Sizes that stay the same from step to step.
struct AttentionSizes {
    int32_t heads, kv_heads, head_dim, block_size, threads;
    int group() const { return heads / kv_heads; }
};

// Rows of one KV head over tokens [begin, end) of the block table of `segment`. row0 counts in the plan's own list.
struct AttentionItem {
    int32_t segment, kv_head, row0, num_rows, begin, end;
    int64_t cost;
};

class AttentionPlan {
 public:
    // The step must stay where it is as long as the plan is used.
    void make(const StepView& step, const AttentionSizes& sizes);

    // Tasks that leave partials. They need nothing of each other.
    const std::vector<AttentionItem>& ahead() const { return ahead_; }
    // Tasks that end rows, when all those are done.
    const std::vector<AttentionItem>& ending() const { return ending_; }
    // The rows of an item in the step.
    const int32_t* rows(const AttentionItem& item) const { return rows_.data() + item.row0; }
    // Fills in what depends on the item: neither q, out and scratch, nor where and what K and V are.
    void describe(const AttentionItem& item, AttentionTask& task);

 private:
    // Rows that visit tokens [begin, end) ahead; begin is the first of a span.
    struct Run {
        int32_t segment, row0, num_rows, begin, end;
    };

    int rows_of(int segment) const { return step_->q_indptr[segment + 1] - step_->q_indptr[segment]; }
    int context(int segment) const { return step_->positions[step_->q_indptr[segment + 1] - 1] + 1; }
    int64_t cost(int rows, int tokens) const;
    void share();
    void cover(int first, int last, int begin);
    void run_ahead(const std::vector<int32_t>& segments, int begin, int end);
    void cut(const Run& run, int64_t limit);
    void end_segment(int segment);
    void keep_partials();

    const StepView* step_ = nullptr;
    AttentionSizes sizes_{};
    int rows_per_task_ = 0;
    std::vector<AttentionItem> ahead_, ending_;
    std::vector<Run> runs_;
    std::vector<int32_t> rows_;  // all rows of the step, then those of the runs
    // Of each segment of the step: the task that ends it visits tokens [from, to) itself.
    std::vector<int32_t> from_, to_;
    std::vector<int32_t> sharing_;  // segments in the order of their block tables
    std::vector<int32_t> common_;   // tokens that each shares with the one before, in whole tiles
    std::vector<int32_t> partial0_;
    std::vector<float> partials_;
};

}  // namespace potok
