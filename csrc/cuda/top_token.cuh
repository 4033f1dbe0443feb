// The top-token mask and the sampler: one launch, one read of each row. A cluster of blocks shares a row and joins its
// summaries through distributed shared memory; its size is fixed, so a row's result does not depend on the batch.
#pragma once

#include "common/noise.h"
#include "common/race.h"
#include "cuda/arguments.h"
#include "cuda/device.cuh"

namespace headrace {

constexpr int TOP_TOKEN_CLUSTER = 8;

struct alignas(16) RaceBoard {
    Race warps[WARP];
    Race part;
};

template <bool DRAWS>
__device__ Race join_lanes(Race race, float inv_temperature) {
    for (int lanes = WARP / 2; lanes > 0; lanes /= 2) {
        Race other;
        other.top = shuffle_down(race.top, lanes);
        other.top_id = shuffle_down(race.top_id, lanes);
        other.rest_top = shuffle_down(race.rest_top, lanes);
        other.rest_sum = shuffle_down(race.rest_sum, lanes);
        if (DRAWS) {
            other.heated_sum = shuffle_down(race.heated_sum, lanes);
            other.first = shuffle_down(race.first, lanes);
            other.first_id = shuffle_down(race.first_id, lanes);
            other.second = shuffle_down(race.second, lanes);
            other.second_id = shuffle_down(race.second_id, lanes);
        }
        race = join<DRAWS>(race, other, inv_temperature);
    }
    return race;
}

// Four logits from `column` on, -inf where banned; `aligned` says whether four fit one load.
template <typename In>
__device__ Four open_logits(const In* row, const uint8_t* banned, int column, int columns, bool aligned) {
    Four z;
    if (aligned && column + 4 <= columns) {
        z = load4(row + column);
    } else {
        for (int i = 0; i < 4; ++i) z.value[i] = column + i < columns ? load1(row + column + i) : NO_SCORE;
    }
    if (banned) {
        for (int i = 0; i < 4; ++i)
            if (column + i < columns && banned[column + i]) z.value[i] = NO_SCORE;
    }
    return z;
}

template <typename In, bool DRAWS, int THREADS>
__global__ void __launch_bounds__(THREADS) top_token_kernel(const TopTokenArgs args) {
    static_assert(THREADS % WARP == 0 && THREADS / WARP <= WARP, "one warp joins the others");
    const int thread = thread_index(), lane = thread % WARP, warp = thread / WARP, rank = cluster_rank();
    const int64_t index = block_index() / TOP_TOKEN_CLUSTER;
    const In* row = static_cast<const In*>(args.logits) + index * args.stride;
    const bool aligned = reinterpret_cast<uintptr_t>(row) % (4 * sizeof(In)) == 0;
    RaceBoard& board = *reinterpret_cast<RaceBoard*>(dynamic_shared());

    float inv_temperature = 1.0f, loudness = 0.0f;
    int64_t seed = 0, position = 0;
    if (DRAWS) {
        const float temperature = args.temperature[index];
        if (temperature != 0.0f) {
            inv_temperature = 1.0f / temperature;
            loudness = 1.0f;
        }
        seed = args.seeds[index];
        position = args.positions[index];
    }

    Race race;
    const int begin = min(rank * args.share, args.columns), end = min(begin + args.share, args.columns);
    for (int column = begin + 4 * thread; column < end; column += 4 * THREADS) {
        const Four z = open_logits(row, args.banned, column, args.columns, aligned);
        float best = NO_SCORE;
        for (int i = 0; i < 4; ++i) {
            if (column + i < end) add_logit<DRAWS>(race, z.value[i], column + i, inv_temperature);
            best = larger(best, z.value[i]);
        }
        // Four tokens that cannot win a place with the loudest noise need none.
        if (DRAWS && !(best * inv_temperature + loudness * NOISE_BOUND < race.second)) {
            const Words bits = loudness != 0.0f ? random_words(seed, position, uint32_t(column) / 4) : Words{};
            for (int i = 0; i < 4; ++i) {
                const float noise = loudness != 0.0f ? gumbel_of(bits.word[i]) : 0.0f;
                if (column + i < end) add_runner(race, z.value[i] * inv_temperature + noise, column + i);
            }
        }
    }

    race = join_lanes<DRAWS>(race, inv_temperature);
    if (lane == 0) board.warps[warp] = race;
    sync_block();
    if (warp == 0) {
        race = join_lanes<DRAWS>(lane < THREADS / WARP ? board.warps[lane] : Race{}, inv_temperature);
        if (lane == 0) board.part = race;
    }
    sync_cluster();
    if (rank == 0 && warp == 0) {
        race = join_lanes<DRAWS>(lane < TOP_TOKEN_CLUSTER ? *at_peer(&board.part, lane) : Race{}, inv_temperature);
        if (lane == 0) {
            const bool may_fire = args.eligible[index] && !(args.spared && args.spared[race.top_id]);
            const Verdict verdict = verdict_of(race, may_fire, args.threshold[index]);
            args.fired[index] = verdict.fired;
            args.top_id[index] = race.top_id;
            args.top_prob[index] = verdict.top_prob;
            args.raw[index] = verdict.raw_lse;
            args.masked[index] = verdict.masked_lse;
            if (DRAWS) {
                const int32_t token = verdict.fired && race.first_id == race.top_id ? race.second_id : race.first_id;
                DrawnLogprobs drawn{NAN, NAN};
                if (!verdict.lost) drawn = logprobs_of(race, verdict.fired, load1(row + token), inv_temperature, loudness == 0.0f);
                args.token[index] = verdict.lost ? -1 : token;
                args.raw[index] = drawn.raw;
                args.masked[index] = drawn.open;
            }
        }
    }
    sync_cluster();  // no block leaves while the first one reads its part
}

}  // namespace headrace
