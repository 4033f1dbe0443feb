// Statistics, loss coefficients and gradient of logit rows with one read and one write of each.
//
// A row of 151,936 fp32 logits is larger than a multiprocessor, so a cluster of blocks holds it: every block copies its share
// into shared memory and never reads it again. Blocks exchange 16 bytes each through distributed shared memory, all of them
// then know the row's statistics and the token's coefficients, and write the gradient of their share.
//
// The result may overlay the front of its own row in a narrower dtype: all blocks have read all of the row before any writes.
#pragma once

#include "cuda/lanes.cuh"

namespace headrace {

struct SharePart {
    Softmax softmax;
    float score;  // z of the target, -inf elsewhere
};

// What the threads of a block tell each other; the share of the row follows it in shared memory.
struct alignas(16) LossBoard {
    Softmax warps[WARP];
    SharePart part;
    Normaliser normaliser;
    Coefficients coefficients;
};

// Folds this thread's vectors first, first + step, ... below last.
__device__ inline void fold_share(Softmax& own, const float* share, int first, int last, int step, float inv_temperature) {
    for (int vector = first; vector < last; vector += step) {
        Four z = load4(share + 4 * vector);
        float top = own.top;
        for (float& value : z.value) {
            value *= inv_temperature;
            top = larger(top, value);
        }
        if (top > own.top) own = rebased(own, top);
        for (float value : z.value) add_below(own, value);
    }
}

template <typename Out, int THREADS, int RESIDENT>
__global__ void __launch_bounds__(THREADS, RESIDENT) loss_gradient_kernel(const LossGradientArgs args) {
    constexpr int STAGES = 4;
    static_assert(THREADS % WARP == 0 && THREADS / WARP <= WARP, "one warp joins the others");
    const int thread = thread_index(), lane = thread % WARP, warp = thread / WARP, rank = cluster_rank();
    const int64_t row = block_index() / args.cluster;
    LossBoard& board = *reinterpret_cast<LossBoard*>(dynamic_shared());
    float* share = reinterpret_cast<float*>(&board + 1);

    const int begin = min(rank * args.share, args.columns), vectors = (min(begin + args.share, args.columns) - begin) / 4;
    const int stage = (vectors + STAGES - 1) / STAGES;
    const float* source = args.logits + row * args.stride + begin;
    for (int s = 0; s < STAGES; ++s) {
        for (int vector = s * stage + thread; vector < min((s + 1) * stage, vectors); vector += THREADS)
            copy_async(share + 4 * vector, source + 4 * vector);
        commit_copies();
    }
    const float inv_temperature = args.inv_temperature[row];
    const int64_t target = args.targets[row];
    Token token{};
    if (thread == 0) token = load_token(args.inputs, row);

    // A thread folds what it copied itself, so it waits for its own copies alone.
    Softmax own;
    wait_copies<3>();
    fold_share(own, share, thread, min(stage, vectors), THREADS, inv_temperature);
    wait_copies<2>();
    fold_share(own, share, stage + thread, min(2 * stage, vectors), THREADS, inv_temperature);
    wait_copies<1>();
    fold_share(own, share, 2 * stage + thread, min(3 * stage, vectors), THREADS, inv_temperature);
    wait_copies<0>();
    fold_share(own, share, 3 * stage + thread, vectors, THREADS, inv_temperature);

    own = join_lanes(own);
    if (lane == 0) board.warps[warp] = own;
    sync_block();
    if (warp == 0) {
        own = join_lanes(lane < THREADS / WARP ? board.warps[lane] : Softmax{});
        const bool here = target >= begin && target < begin + 4 * int64_t(vectors);
        if (lane == 0) board.part = {own, here ? share[target - begin] * inv_temperature : -INFINITY};
    }
    sync_cluster();  // every share of the row is read and every part is published
    if (warp == 0) {
        SharePart part{Softmax{}, -INFINITY};
        if (lane < args.cluster) part = *at_peer(&board.part, lane);
        const Softmax all = join_lanes(part.softmax);
        const float score = best_lane(part.score);
        if (lane == 0) {
            board.normaliser = normaliser_of(all);
            const float logprob = (score - all.top) - board.normaliser.log_total;
            board.coefficients = coefficients_of(args.spec, args.inputs, token, logprob);
            if (rank == 0) {
                float* state = args.state + 4 * row;
                state[0] = all.total == 0.0f ? -INFINITY : all.top;
                state[1] = all.total;
                state[2] = all.weighted;
                state[3] = score;
            }
        }
    }
    sync_cluster();  // the coefficients are there, and no block leaves while another reads its part

    const Normaliser normaliser = board.normaliser;
    const float grad_logprob = board.coefficients.logprob, grad_entropy = board.coefficients.entropy;
    const int hit = target >= 0 && target < args.columns ? int(target) - begin : -1;
    const bool silent = grad_logprob == 0.0f && grad_entropy == 0.0f;
    Out* out = static_cast<Out*>(args.out) + row * args.out_stride + begin;
    for (int s = 0; s < STAGES; ++s) {
        for (int vector = s * stage + thread; vector < min((s + 1) * stage, vectors); vector += THREADS) {
            Four result{};
            if (!silent) {
                const Four z = load4(share + 4 * vector);
                for (int i = 0; i < 4; ++i) {
                    const float push = 4 * vector + i == hit ? grad_logprob : 0.0f;
                    result.value[i] = (push - pull_of(normaliser, z.value[i] * inv_temperature, grad_logprob, grad_entropy)) * inv_temperature;
                }
            }
            store4(out + 4 * vector, result);
        }
    }
}

}  // namespace headrace
