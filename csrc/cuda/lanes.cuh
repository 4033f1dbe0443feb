// Reductions over the lanes of a warp, always in the same order; lane 0 has the result.
#pragma once

#include "common/softmax.h"
#include "cuda/arguments.h"
#include "cuda/device.cuh"

namespace headrace {

__device__ inline Softmax shuffled(const Softmax& part, int lanes) {
    return {shuffle_down(part.top, lanes), shuffle_down(part.total, lanes), shuffle_down(part.weighted, lanes)};
}

__device__ inline Softmax join_lanes(Softmax part) {
    for (int lanes = WARP / 2; lanes > 0; lanes /= 2) part = join(part, shuffled(part, lanes));
    return part;
}

// The score of the block that has the target, or NaN if that is what it found; one lane a block.
__device__ inline float best_lane(float score) {
    for (int lanes = MAX_CLUSTER / 2; lanes > 0; lanes /= 2) {
        float other = shuffle_down(score, lanes);
        score = other > score || other != other ? other : score;
    }
    return score;
}

}  // namespace headrace
