// Running softmax statistics of a set of columns: maximum m, sum of e^(z-m), sum of e^(z-m) (z-m).
#pragma once

#include "common/host_device.h"

namespace headrace {

struct Softmax {
    float top = LOWEST, total = 0.0f, weighted = 0.0f;
};

HEADRACE_HD Softmax rebased(Softmax part, float top) {
    float shift = part.top - top, scale = fast_exp(shift);
    return {top, part.total * scale, scaled_by(part.weighted + part.total * shift, scale)};
}

HEADRACE_HD Softmax join(Softmax a, Softmax b) {
    float top = larger(a.top, b.top);
    a = rebased(a, top);
    b = rebased(b, top);
    return {top, a.total + b.total, a.weighted + b.weighted};
}

// Add one column to a part whose maximum is already at least z.
HEADRACE_HD void add_below(Softmax& part, float z) {
    float below = z - part.top, mass = fast_exp(below);
    part.total += mass;
    part.weighted += scaled_by(below, mass);
}

// What the gradient of a row needs of its statistics.
struct Normaliser {
    float top, log_total, entropy;
};

HEADRACE_HD Normaliser normaliser_of(const Softmax& row) {
    float log_total = std::log(row.total), entropy = log_total - row.weighted / row.total;
    return {row.top, log_total, entropy < 0.0f ? 0.0f : entropy};
}

// p (g + h (log p + H)): minus d loss / d z of a column that is not the target.
HEADRACE_HD float pull_of(const Normaliser& row, float z, float grad_logprob, float grad_entropy) {
    float log_prob = (z - row.top) - row.log_total;
    return scaled_by(grad_logprob + grad_entropy * (log_prob + row.entropy), fast_exp(log_prob));
}

}  // namespace headrace
