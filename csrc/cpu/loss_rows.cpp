#include "loss_rows.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace headrace {
void token_loss(const LossArgs& args, const LossSpec& spec, int64_t rows) {
    double sums[METRICS] = {};
    float smallest = std::numeric_limits<float>::infinity(), largest = -smallest;
    bool broken = false;
    for (int64_t i = 0; i < rows; ++i) {
        if (args.mask && !args.mask[i]) {
            args.losses[i] = args.grad_logprobs[i] = args.grad_entropies[i] = 0;
            continue;
        }
        float logprob = args.logprobs[i], old = args.old_logprobs[i], advantage = args.advantages[i], weight = args.weights[i];
        float anchor = args.proximal_logprobs ? args.proximal_logprobs[i] : old;
        float log_ratio = args.log_ratios ? args.log_ratios[i] : logprob - anchor;
        float ratio = std::exp(clamp_log_ratio(log_ratio));
        float gate = args.gates && advantage > 0 ? args.gates[i] : 1.0f;
        Surrogate s = surrogate(spec, logprob, log_ratio, ratio, gate * advantage);
        float importance = args.proximal_logprobs ? std::exp(clamp_log_ratio(anchor - old)) : 1.0f;
        bool capped = importance > spec.tis_cap;
        importance = capped ? spec.tis_cap : importance;
        Estimate kl = args.ref_logprobs ? reference_kl(spec, logprob, args.ref_logprobs[i]) : Estimate{};

        args.losses[i] = weight * (importance * s.value + spec.kl_coef * kl.value - spec.entropy_coef * args.entropies[i] -
                                   spec.surprisal_coef * logprob);
        args.grad_logprobs[i] = weight * (importance * s.slope + spec.kl_coef * kl.slope - spec.surprisal_coef);
        args.grad_entropies[i] = -spec.entropy_coef * weight;

        float drift = clamp_log_ratio(logprob - old);
        const double values[METRICS] = {1.0, double(s.low), double(s.high), double(s.dual), -drift, std::expm1(drift) - drift,
                                        kl.value, ratio, double(ratio) * ratio, args.entropies[i], -logprob, double(capped),
                                        double(advantage > 0), advantage > 0 ? gate : 0.0};
        for (int metric = 0; metric < RATIO_MIN; ++metric) sums[metric] += values[metric];
        smallest = std::min(smallest, ratio);
        largest = std::max(largest, ratio);
        broken |= std::isnan(ratio);
    }
    for (int metric = 0; metric < RATIO_MIN; ++metric) args.metrics[metric] = float(sums[metric]);
    args.metrics[RATIO_MIN] = broken ? std::numeric_limits<float>::quiet_NaN() : smallest;
    args.metrics[RATIO_MAX] = broken ? std::numeric_limits<float>::quiet_NaN() : largest;
}

}  // namespace headrace
