// Both rows' statistics, KL both ways, Jensen-Shannon divergence and total variation with one read of each row: the two
// divergences that need the normalisers first find the rows still in the shared memory of a cluster.
#pragma once

#include "common/pair.h"
#include "cuda/lanes.cuh"

namespace headrace {

struct PairPart {
    Pair pair;
    float score, score_other;  // z of the target in either row, -inf elsewhere
};

struct alignas(16) PairBoard {
    Pair warps[WARP];
    PairPart part;
    Normaliser normaliser, normaliser_other;
    Divergence divergence_warps[WARP];
    Divergence divergence;
};

__device__ inline Pair join_lanes(Pair part) {
    for (int lanes = WARP / 2; lanes > 0; lanes /= 2)
        part = join(part, {shuffled(part.own, lanes), shuffled(part.other, lanes), shuffle_down(part.cross, lanes),
                           shuffle_down(part.cross_other, lanes)});
    return part;
}

__device__ inline Divergence add_lanes(Divergence sum) {
    for (int lanes = WARP / 2; lanes > 0; lanes /= 2) {
        sum.mixture += shuffle_down(sum.mixture, lanes);
        sum.variation += shuffle_down(sum.variation, lanes);
    }
    return sum;
}

// Folds this thread's vectors first, first + step, ... below last of both shares.
__device__ inline void fold_shares(Pair& own, const float* share, const float* share_other, int first, int last, int step,
                                   float inv_temperature) {
    for (int vector = first; vector < last; vector += step) {
        Four z = load4(share + 4 * vector), z_other = load4(share_other + 4 * vector);
        float top = own.own.top, top_other = own.other.top;
        for (int i = 0; i < 4; ++i) {
            top = larger(top, z.value[i] *= inv_temperature);
            top_other = larger(top_other, z_other.value[i] *= inv_temperature);
        }
        if (top > own.own.top || top_other > own.other.top) own = rebased(own, top, top_other);
        for (int i = 0; i < 4; ++i) add_below(own, z.value[i], z_other.value[i]);
    }
}

template <int THREADS>
__global__ void __launch_bounds__(THREADS) pair_kernel(const PairClusterArgs args) {
    constexpr int STAGES = 4;
    static_assert(THREADS % WARP == 0 && THREADS / WARP <= WARP, "one warp joins the others");
    const int thread = thread_index(), lane = thread % WARP, warp = thread / WARP, rank = cluster_rank();
    const int64_t row = block_index() / args.cluster;
    PairBoard& board = *reinterpret_cast<PairBoard*>(dynamic_shared());
    float* share = reinterpret_cast<float*>(&board + 1);
    float* share_other = share + args.share;

    const int begin = min(rank * args.share, args.columns), vectors = (min(begin + args.share, args.columns) - begin) / 4;
    const int stage = (vectors + STAGES - 1) / STAGES;
    const float* source = args.logits + row * args.stride + begin;
    const float* source_other = args.logits_cf + row * args.stride_cf + begin;
    for (int s = 0; s < STAGES; ++s) {
        for (int vector = s * stage + thread; vector < min((s + 1) * stage, vectors); vector += THREADS) {
            copy_async(share + 4 * vector, source + 4 * vector);
            copy_async(share_other + 4 * vector, source_other + 4 * vector);
        }
        commit_copies();
    }
    const float inv_temperature = args.inv_temperature[row];
    const int64_t target = args.targets[row];

    Pair own;
    wait_copies<3>();
    fold_shares(own, share, share_other, thread, min(stage, vectors), THREADS, inv_temperature);
    wait_copies<2>();
    fold_shares(own, share, share_other, stage + thread, min(2 * stage, vectors), THREADS, inv_temperature);
    wait_copies<1>();
    fold_shares(own, share, share_other, 2 * stage + thread, min(3 * stage, vectors), THREADS, inv_temperature);
    wait_copies<0>();
    fold_shares(own, share, share_other, 3 * stage + thread, vectors, THREADS, inv_temperature);

    own = join_lanes(own);
    if (lane == 0) board.warps[warp] = own;
    sync_block();
    if (warp == 0) {
        own = join_lanes(lane < THREADS / WARP ? board.warps[lane] : Pair{});
        const bool here = target >= begin && target < begin + 4 * int64_t(vectors);
        if (lane == 0) {
            board.part = {own, -INFINITY, -INFINITY};
            if (here) {
                board.part.score = share[target - begin] * inv_temperature;
                board.part.score_other = share_other[target - begin] * inv_temperature;
            }
        }
    }
    sync_cluster();  // every part is published
    if (warp == 0) {
        PairPart part{Pair{}, -INFINITY, -INFINITY};
        if (lane < args.cluster) part = *at_peer(&board.part, lane);
        const Pair all = join_lanes(part.pair);
        const float score = best_lane(part.score), score_other = best_lane(part.score_other);
        if (lane == 0) {
            board.normaliser = normaliser_of(all.own);
            board.normaliser_other = normaliser_of(all.other);
            if (rank == 0) {
                float* state = args.state + 10 * row;
                const Softmax* softmax[] = {&all.own, &all.other};
                for (int i = 0; i < 2; ++i) {
                    state[4 * i] = softmax[i]->total == 0.0f ? -INFINITY : softmax[i]->top;
                    state[4 * i + 1] = softmax[i]->total;
                    state[4 * i + 2] = softmax[i]->weighted;
                    state[4 * i + 3] = i == 0 ? score : score_other;
                }
                state[8] = all.cross;
                state[9] = all.cross_other;
            }
        }
    }
    sync_block();

    const Normaliser normaliser = board.normaliser, normaliser_other = board.normaliser_other;
    Divergence sum;
    for (int s = 0; s < STAGES; ++s) {
        for (int vector = s * stage + thread; vector < min((s + 1) * stage, vectors); vector += THREADS) {
            const Four z = load4(share + 4 * vector), z_other = load4(share_other + 4 * vector);
            for (int i = 0; i < 4; ++i)
                add_column(sum, normaliser, normaliser_other, z.value[i] * inv_temperature, z_other.value[i] * inv_temperature);
        }
    }
    sum = add_lanes(sum);
    if (lane == 0) board.divergence_warps[warp] = sum;
    sync_block();
    if (warp == 0) {
        sum = add_lanes(lane < THREADS / WARP ? board.divergence_warps[lane] : Divergence{});
        if (lane == 0) board.divergence = sum;
    }
    sync_cluster();
    if (rank == 0 && warp == 0) {
        sum = add_lanes(lane < args.cluster ? *at_peer(&board.divergence, lane) : Divergence{});
        if (lane == 0) {
            args.js[row] = sum.mixture < 0.0f ? 0.0f : 0.5f * sum.mixture;
            args.tv[row] = 0.5f * sum.variation;
        }
    }
    sync_cluster();  // no block leaves while the first one reads its sums
}

}  // namespace headrace
