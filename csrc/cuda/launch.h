// Launches of the CUDA kernels on a stream; nothing here allocates or waits.
#pragma once

#include <cstdint>

namespace headrace {

struct LossGradientArgs;
struct PairClusterArgs;
struct TopTokenArgs;

enum class Element : int32_t { float32, float16, bfloat16 };

// Blocks per row, and thereby the share of each, or 0 where a row (two rows) does not fit on chip.
int32_t loss_gradient_cluster(int64_t columns);
int32_t pair_cluster(int64_t columns);

// Fills in `share` and `cluster`.
void launch_loss_gradient(LossGradientArgs args, int64_t rows, Element out, void* stream);
void launch_pair(PairClusterArgs args, int64_t rows, void* stream);
void launch_top_token(TopTokenArgs args, int64_t rows, Element in, void* stream);

}  // namespace headrace
