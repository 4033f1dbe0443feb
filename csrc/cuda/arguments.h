// What the CUDA kernels are given. Pointers are to device memory.
#pragma once

#include "common/token_loss.h"

namespace headrace {

constexpr int MAX_CLUSTER = 8;

struct LossGradientArgs {
    const float* logits;  // [N, columns], rows `stride` elements apart; row starts are multiples of 16 bytes
    void* out;            // [N, columns], rows `out_stride` elements apart
    const int64_t* targets;        // [N]
    const float* inv_temperature;  // [N]
    float* state;                  // [N, 4], written
    int64_t stride, out_stride;
    int32_t columns;  // a multiple of 4
    int32_t share;    // columns of one block, a multiple of 4
    int32_t cluster;  // blocks of one row
    TokenInputs inputs;
    LossSpec spec;
};

struct PairClusterArgs {
    const float *logits, *logits_cf;  // [N, columns], rows `stride` and `stride_cf` elements apart, starting at multiples of 16 bytes
    const int64_t* targets;           // [N]
    const float* inv_temperature;     // [N]
    float* state;                     // [N, 10], written
    float *js, *tv;                   // [N], written
    int64_t stride, stride_cf;
    int32_t columns, share, cluster;  // as above
};

struct TopTokenArgs {
    const void* logits;  // [B, columns], rows `stride` elements apart
    int64_t stride;
    int32_t columns;
    int32_t share;           // columns of one block, a multiple of 4
    const uint8_t* banned;   // [columns], 1 at banned ids, or null
    const uint8_t* spared;   // [columns] or null
    const uint8_t* eligible;  // [B]
    const float* threshold;   // [B]
    const int64_t* seeds;       // [B]; for the draw
    const int64_t* positions;   // [B]
    const float* temperature;   // [B], 0 is greedy
    uint8_t* fired;             // [B]
    int64_t* top_id;            // [B]
    float* top_prob;            // [B]
    float* raw;                 // [B] log-sum-exp of the row; for the draw the token's raw log-prob
    float* masked;              // [B] log-sum-exp of what can be drawn; for the draw the token's log-prob
    int64_t* token;             // [B]; for the draw
};

}  // namespace headrace
