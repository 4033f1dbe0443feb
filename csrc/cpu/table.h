// The CPU row operations as plain functions over a range of rows, compiled once for every instruction set.
//
// Pointers are to contiguous memory unless a stride is named; the layouts are those of kernels/rows.py.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headrace {

// Running statistics of logit rows: columns of a state are maximum, sum, weighted sum and target logit.
struct StatisticsArgs {
    const float* logits;           // [N, columns]
    const int64_t* targets;        // [N]
    const float* inv_temperature;  // [N]
    float* state;                  // [N, 4], updated
    int64_t columns;
    int64_t offset;  // vocabulary id of the first column
};

// d loss / d logits, written over the logits. Row k of the result comes from row sources[k], or k if there are no sources.
struct GradientArgs {
    float* logits;                 // [N, columns], consumed
    const int64_t* targets;        // [N]
    const float* inv_temperature;  // [N]
    const float* state;            // [N, 4]
    const float* grad_logprobs;    // [N]
    const float* grad_entropies;   // [N]
    const int64_t* sources;        // [M] or null
    int64_t columns;
    int64_t offset;
};

// Two rows over one vocabulary. A pair state holds both rows' statistics, then the two cross sums.
struct PairArgs {
    const float* logits;           // [N, columns]
    const float* logits_cf;        // [N, columns]
    const int64_t* targets;        // [N]
    const float* inv_temperature;  // [N]
    float* state;                  // [N, 10], updated by the first read, input of the second
    float* js;                     // [N], second read only
    float* tv;                     // [N]
    int64_t columns;
    int64_t offset;
};

struct TopTokenArgs {
    const float* logits;  // [B, columns], rows `stride` elements apart
    int64_t stride;
    int64_t columns;
    const bool* eligible;    // [B]
    const float* threshold;  // [B]
    const int64_t* banned;   // sorted ids, or null
    int64_t banned_count;
    const bool* spared;  // [columns] or null
    bool* fired;         // [B]
    int64_t* top_id;     // [B]
    float* top_prob;     // [B]
    float* raw_lse;      // [B], mask only
    float* masked_lse;   // [B], mask only
    // The draw; null for the mask alone.
    const int64_t* seeds;      // [B]
    const int64_t* positions;  // [B]
    const float* temperature;  // [B], 0 is greedy
    int64_t* token;            // [B]
    float* logprob;            // [B]
    float* raw_logprob;        // [B]
};

struct Table {
    const char* name;
    void (*statistics)(const StatisticsArgs&, int64_t begin, int64_t end);
    void (*gradient)(const GradientArgs&, int64_t begin, int64_t end);
    void (*pair_statistics)(const PairArgs&, int64_t begin, int64_t end);
    void (*pair_divergences)(const PairArgs&, int64_t begin, int64_t end);
    void (*top_token)(const TopTokenArgs&, int64_t begin, int64_t end);
    void (*exponential)(float* values, int64_t count);  // in place; for the accuracy test
    void (*logarithm)(float* values, int64_t count);
};

extern const Table baseline_table;
#if defined(__x86_64__)
extern const Table avx2_table;
extern const Table avx512_table;
#endif

}  // namespace headrace
