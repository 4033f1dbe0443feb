// Running statistics of two rows over the same columns: each row's softmax and the cross sums from which KL both ways follows.
#pragma once

#include "common/softmax.h"

namespace headrace {

struct Pair {
    Softmax own, other;
    float cross = 0.0f;        // sum of e^(z-m) ((z-m) - (z'-m'))
    float cross_other = 0.0f;  // the same with the roles swapped
};

// The same sums against higher maxima.
HEADRACE_HD Pair rebased(const Pair& part, float top, float top_other) {
    float rise = top - part.own.top, rise_other = top_other - part.other.top;
    return {rebased(part.own, top), rebased(part.other, top_other),
            scaled_by(part.cross + part.own.total * (rise_other - rise), fast_exp(-rise)),
            scaled_by(part.cross_other + part.other.total * (rise - rise_other), fast_exp(-rise_other))};
}

HEADRACE_HD Pair join(const Pair& a, const Pair& b) {
    float top = larger(a.own.top, b.own.top), top_other = larger(a.other.top, b.other.top);
    Pair x = rebased(a, top, top_other), y = rebased(b, top, top_other);
    return {{top, x.own.total + y.own.total, x.own.weighted + y.own.weighted},
            {top_other, x.other.total + y.other.total, x.other.weighted + y.other.weighted},
            x.cross + y.cross,
            x.cross_other + y.cross_other};
}

// Add one column to a part whose maxima are already at least z and z'.
HEADRACE_HD void add_below(Pair& part, float z, float z_other) {
    float below = z - part.own.top, below_other = z_other - part.other.top;
    float mass = fast_exp(below), mass_other = fast_exp(below_other);
    part.own.total += mass;
    part.own.weighted += scaled_by(below, mass);
    part.other.total += mass_other;
    part.other.weighted += scaled_by(below_other, mass_other);
    part.cross += scaled_by(below - below_other, mass);
    part.cross_other += scaled_by(below_other - below, mass_other);
}

// One column's share of 2 JS and 2 TV.
struct Divergence {
    float mixture = 0.0f, variation = 0.0f;
};

HEADRACE_HD void add_column(Divergence& sum, const Normaliser& row, const Normaliser& other, float z, float z_other) {
    float log_prob = (z - row.top) - row.log_total, log_prob_other = (z_other - other.top) - other.log_total;
    float prob = fast_exp(log_prob), prob_other = fast_exp(log_prob_other), difference = log_prob - log_prob_other;
    // log p - log((p + p')/2) = log 2 - log(1 + e^-d), and log(1 + e^-+d) = max(-+d, 0) + log(1 + e^-|d|)
    float bend = 0.6931471805599453f - std::log(1.0f + fast_exp(-std::fabs(difference)));
    sum.mixture += scaled_by(bend - larger(0.0f, -difference), prob) + scaled_by(bend - larger(0.0f, difference), prob_other);
    sum.variation += std::fabs(prob - prob_other);
}

}  // namespace headrace
