// The gated clipped policy loss of one token. Formulas: kernels/policy_loss.py; definition: kernels/reference/loss_rows.py.
#pragma once

#include "common/host_device.h"

namespace headrace {

enum class LossKind : int32_t { ppo, cispo };  // gspo is ppo with the log-ratios given
enum class KlKind : int32_t { k1, k2, k3 };

struct LossSpec {
    LossKind kind;
    KlKind kl_kind;
    float clip_low, clip_high;
    float dual_clip;  // +inf for none
    float tis_cap;    // +inf for none
    float kl_coef, entropy_coef, surprisal_coef;
};

constexpr float LOG_RATIO_LIMIT = 20.0f;
constexpr float K3_LIMIT = 10.0f;

// NaN stays NaN, as everywhere below: a row that counts must not hide one.
HEADRACE_HD float clamp(float value, float low, float high) { return value < low ? low : value > high ? high : value; }
HEADRACE_HD float clamp_log_ratio(float value) { return clamp(value, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT); }

// The surrogate to minimise, its derivative by the log-prob, and which clips are active.
struct Surrogate {
    float value, slope;
    bool low, high, dual;
};

HEADRACE_HD Surrogate surrogate(const LossSpec& spec, float logprob, float log_ratio, float ratio, float credit) {
    float low = 1 - spec.clip_low, high = 1 + spec.clip_high;
    if (spec.kind == LossKind::cispo) {
        float slope = -clamp(ratio, low, high) * credit;
        return {slope * logprob, slope, ratio < low, ratio > high, false};
    }
    Surrogate s{0, 0, credit < 0 && ratio < low, credit > 0 && ratio > high, credit < 0 && ratio > spec.dual_clip};
    float effective = s.low ? low : s.high ? high : s.dual ? spec.dual_clip : ratio;
    bool constant = s.low || s.high || s.dual || std::fabs(log_ratio) > LOG_RATIO_LIMIT;
    s.value = -effective * credit;
    s.slope = constant ? 0.0f : -ratio * credit;
    return s;
}

struct Estimate {
    float value = 0, slope = 0;
};

// The estimate of KL(policy, reference) and its derivative by the log-prob.
HEADRACE_HD Estimate reference_kl(const LossSpec& spec, float logprob, float reference) {
    float raw = reference - logprob, d = clamp_log_ratio(raw);
    Estimate kl;
    if (spec.kl_kind == KlKind::k1) {
        kl = {-d, 1};
    } else if (spec.kl_kind == KlKind::k2) {
        kl = {d * d / 2, -d};
    } else {
        float grown = std::expm1(d), value = grown - d;
        kl = value > K3_LIMIT ? Estimate{K3_LIMIT, 0} : Estimate{value, -grown};
    }
    if (std::fabs(raw) > LOG_RATIO_LIMIT) kl.slope = 0;
    return kl;
}

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

// d loss / d log-prob and d loss / d entropy.
HEADRACE_HD Coefficients coefficients_of(const LossSpec& spec, const TokenInputs& inputs, const Token& token, float logprob) {
    if (!token.counted) return {0.0f, 0.0f};
    float credit = token.advantage > 0.0f ? token.gate * token.advantage : token.advantage;
    float log_ratio = logprob - token.proximal_logprob;
    float slope = surrogate(spec, logprob, log_ratio, std::exp(clamp_log_ratio(log_ratio)), credit).slope;
    if (inputs.proximal_logprobs) {
        float importance = std::exp(clamp_log_ratio(token.proximal_logprob - token.old_logprob));
        slope *= importance > spec.tis_cap ? spec.tis_cap : importance;
    }
    if (inputs.ref_logprobs) slope += spec.kl_coef * reference_kl(spec, logprob, token.ref_logprob).slope;
    return {token.weight * (slope - spec.surprisal_coef), -spec.entropy_coef * token.weight};
}

}  // namespace headrace
