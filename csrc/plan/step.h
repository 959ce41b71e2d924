// One step as the caller describes it.
#pragma once

#include <cstdint>

#include "kernels/sampling.h"

namespace potok {

// Pointers into the caller's arrays, as in potok.backends.api.StepInputs and SampleRows.
struct StepView {
    int32_t tokens, segments, sampled;
    const int32_t *token_ids, *positions, *q_indptr, *kv_indptr, *kv_blocks, *out_rows;
    int32_t num_copies;
    const int32_t* copies;  // [num_copies][2]
    const SampleRow* rows;
    SampleOut* out;
};

}  // namespace potok
