// The gated clipped policy loss of single tokens. Formulas: kernels/policy_loss.py.
#pragma once

#include <cstdint>

#include "common/token_loss.h"

namespace headrace {

// Offsets as in kernels/policy_spec.py.
enum Metric {
    TOKENS, CLIPPED_LOW, CLIPPED_HIGH, CLIPPED_DUAL, K1, K3, REFERENCE_KL, RATIO, RATIO_SQUARED, ENTROPY, SURPRISAL, TIS_CAPPED,
    POSITIVES, GATE_ON_POSITIVES, RATIO_MIN, RATIO_MAX, METRICS
};

struct LossArgs {
    const float *logprobs, *entropies, *old_logprobs, *advantages, *weights;  // [N]
    const float *gates, *ref_logprobs, *proximal_logprobs, *log_ratios;       // [N] or null
    const bool* mask;                                                         // [N] or null
    float *losses, *grad_logprobs, *grad_entropies;                           // [N], written
    float* metrics;                                                           // [METRICS], written
};

void token_loss(const LossArgs& args, const LossSpec& spec, int64_t rows);

}  // namespace headrace
