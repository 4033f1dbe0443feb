// The derivatives of one token's gated clipped policy loss. Formulas: kernels/policy_loss.py; definition:
// kernels/reference/loss_rows.py. Losses and metrics of all tokens come from `token_loss`, once, after the last chunk.
#pragma once

#include "common/host_device.h"

namespace headrace {

enum KlKindCode : int32_t { KL_K1 = 1, KL_K2 = 2, KL_K3 = 3 };

struct LossTerms {
    int32_t cispo;    // else ppo; a sequence ratio does not fit here, since it needs more than one row
    int32_t kl_kind;  // KlKindCode
    float clip_low, clip_high;
    float dual_clip;  // +inf for none
    float tis_cap;    // +inf for none
    float kl_coef, entropy_coef, surprisal_coef;
};

struct TokenInputs {
    const float *old_logprobs, *advantages, *weights;         // [N]
    const float *gates, *ref_logprobs, *proximal_logprobs;    // [N] or null
    const uint8_t* mask;                                      // [N] or null
};

// One token's inputs; those of a masked token are never read.
struct Token {
    bool counted;
    float old_logprob, advantage, weight, gate, ref_logprob, proximal_logprob;
};

struct Coefficients {
    float logprob, entropy;
};

HEADRACE_HD Token load_token(const TokenInputs& inputs, int64_t row) {
    if (inputs.mask && !inputs.mask[row]) return {false, 0, 0, 0, 1, 0, 0};
    float old_logprob = inputs.old_logprobs[row];
    return {true,
            old_logprob,
            inputs.advantages[row],
            inputs.weights[row],
            inputs.gates ? inputs.gates[row] : 1.0f,
            inputs.ref_logprobs ? inputs.ref_logprobs[row] : 0.0f,
            inputs.proximal_logprobs ? inputs.proximal_logprobs[row] : old_logprob};
}

constexpr float LOG_RATIO_BOUND = 20.0f;
constexpr float K3_BOUND = 10.0f;

HEADRACE_HD float bounded(float value, float low, float high) { return value < low ? low : value > high ? high : value; }

HEADRACE_HD float bounded_ratio(float log_ratio) { return std::exp(bounded(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)); }

HEADRACE_HD float surrogate_slope(const LossTerms& terms, float log_ratio, float credit) {
    float ratio = bounded_ratio(log_ratio), low = 1.0f - terms.clip_low, high = 1.0f + terms.clip_high;
    if (terms.cispo) return -bounded(ratio, low, high) * credit;
    bool clipped = (credit < 0.0f && (ratio < low || ratio > terms.dual_clip)) || (credit > 0.0f && ratio > high);
    return clipped || std::fabs(log_ratio) > LOG_RATIO_BOUND ? 0.0f : -ratio * credit;
}

HEADRACE_HD float reference_slope(const LossTerms& terms, float log_ratio) {
    if (std::fabs(log_ratio) > LOG_RATIO_BOUND) return 0.0f;
    if (terms.kl_kind == KL_K1) return 1.0f;
    if (terms.kl_kind == KL_K2) return -log_ratio;
    float grown = std::expm1(log_ratio);
    return grown - log_ratio > K3_BOUND ? 0.0f : -grown;
}

// d loss / d log-prob and d loss / d entropy.
HEADRACE_HD Coefficients coefficients_of(const LossTerms& terms, const TokenInputs& inputs, const Token& token, float logprob) {
    if (!token.counted) return {0.0f, 0.0f};
    float credit = token.advantage > 0.0f ? token.gate * token.advantage : token.advantage;
    float slope = surrogate_slope(terms, logprob - token.proximal_logprob, credit);
    if (inputs.proximal_logprobs) {
        float importance = bounded_ratio(token.proximal_logprob - token.old_logprob);
        slope *= importance > terms.tis_cap ? terms.tis_cap : importance;
    }
    if (inputs.ref_logprobs) slope += terms.kl_coef * reference_slope(terms, token.ref_logprob - logprob);
    return {token.weight * (slope - terms.surprisal_coef), -terms.entropy_coef * token.weight};
}

}  // namespace headrace
