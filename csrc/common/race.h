// What a row's top-token decision and draw need of a set of its columns, and how two such summaries become one. The largest
// logit stays out of the sums, so the rest loses no digits however close its probability comes to one.
#pragma once

#include <climits>

#include "common/host_device.h"

namespace headrace {

constexpr float NO_SCORE = -INFINITY;

struct Race {
    float top = NO_SCORE;
    int32_t top_id = INT_MAX;
    float rest_top = LOWEST, rest_sum = 0.0f;
    float heated_sum = 0.0f;                          // the rest at the sampler's temperature
    float first = NO_SCORE, second = NO_SCORE;        // the two best logits plus noise
    int32_t first_id = INT_MAX, second_id = INT_MAX;
};

template <bool DRAWS>
HEADRACE_HD void add_to_rest(Race& race, float z, float inv_temperature) {
    float distance = z - race.rest_top, small = fast_exp(-std::fabs(distance));
    float heated = DRAWS ? fast_exp(-std::fabs(distance) * inv_temperature) : 0.0f;
    if (distance > 0.0f) {
        race.rest_top = z;
        race.rest_sum = race.rest_sum * small + 1.0f;
        if (DRAWS) race.heated_sum = race.heated_sum * heated + 1.0f;
    } else {
        race.rest_sum += small;
        if (DRAWS) race.heated_sum += heated;
    }
}

template <bool DRAWS>
HEADRACE_HD void add_logit(Race& race, float z, int32_t id, float inv_temperature) {
    float loser = z;
    if (z > race.top || race.top_id == INT_MAX) {
        loser = z > race.top ? race.top : z;
        race.top = z > race.top ? z : race.top;
        race.top_id = id;
    }
    add_to_rest<DRAWS>(race, loser, inv_temperature);
}

HEADRACE_HD bool ahead(float a, int32_t a_id, float b, int32_t b_id) { return a > b || (a == b && a_id < b_id); }

HEADRACE_HD void add_runner(Race& race, float score, int32_t id) {
    if (ahead(score, id, race.first, race.first_id)) {
        race.second = race.first;
        race.second_id = race.first_id;
        race.first = score;
        race.first_id = id;
    } else if (ahead(score, id, race.second, race.second_id)) {
        race.second = score;
        race.second_id = id;
    }
}

template <bool DRAWS>
HEADRACE_HD Race join(Race a, const Race& b, float inv_temperature) {
    bool other = ahead(b.top, b.top_id, a.top, a.top_id);
    float loser = other ? a.top : b.top;
    if (other) {
        a.top = b.top;
        a.top_id = b.top_id;
    }
    float top = larger(larger(a.rest_top, b.rest_top), loser);
    a.rest_sum = a.rest_sum * fast_exp(a.rest_top - top) + b.rest_sum * fast_exp(b.rest_top - top) + fast_exp(loser - top);
    if (DRAWS) {
        a.heated_sum = a.heated_sum * fast_exp((a.rest_top - top) * inv_temperature) +
                       b.heated_sum * fast_exp((b.rest_top - top) * inv_temperature) + fast_exp((loser - top) * inv_temperature);
        add_runner(a, b.first, b.first_id);
        add_runner(a, b.second, b.second_id);
    }
    a.rest_top = top;
    return a;
}

// The decision for a row, from the summary of all its columns.
struct Verdict {
    bool fired, lost;
    float top_prob, raw_lse, masked_lse;
};

HEADRACE_HD Verdict verdict_of(const Race& race, bool may_fire, float threshold) {
    bool empty = race.top == NO_SCORE;
    float rest_lse = race.rest_top + std::log(race.rest_sum);
    float odds = fast_exp((race.rest_top - race.top) + std::log(race.rest_sum));
    float top_prob = empty ? 0.0f : race.top == INFINITY ? NAN : 1.0f / (1.0f + odds);
    float raw = empty ? race.top : race.top + std::log1p(odds);
    bool fired = may_fire && top_prob > threshold && race.rest_sum > 0.0f;
    return {fired, empty || raw != raw, top_prob, raw, fired ? rest_lse : raw};
}

// Log-probs of a drawn logit under the row as it was and as it could be drawn from, each against the maximum of its own set.
struct DrawnLogprobs {
    float raw, open;
};

HEADRACE_HD DrawnLogprobs logprobs_of(const Race& race, bool fired, float chosen, float inv_temperature, bool greedy) {
    float log_heated = std::log(race.heated_sum);
    float whole = std::log1p(fast_exp((race.rest_top - race.top) * inv_temperature + log_heated));
    float raw = (chosen - race.top) * inv_temperature - whole;
    float open = fired ? (chosen - race.rest_top) * inv_temperature - log_heated : raw;
    return {raw, greedy ? 0.0f : open};
}

}  // namespace headrace
