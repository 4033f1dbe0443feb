// csrc/cuda/launch.h over emulated blocks of few threads, so that a row of some hundred columns takes several clusters' worth
// of paths: shares of unequal length, threads without columns, several vectors a thread.
#include <stdexcept>

#include "cuda/launch.h"
#include "cuda/loss_gradient.cuh"
#include "cuda/pair.cuh"
#include "cuda/top_token.cuh"

namespace headrace {
namespace {

constexpr int THREADS = 64;

int32_t share_of(int64_t columns, int64_t cluster) { return int32_t((columns + 4 * cluster - 1) / (4 * cluster) * 4); }

template <typename Out>
void run(const LossGradientArgs& args, int64_t rows) {
    run_clusters(loss_gradient_kernel<Out, THREADS, 1>, args, rows * args.cluster, args.cluster, THREADS,
                 sizeof(LossBoard) + sizeof(float) * args.share);
}

template <typename In>
void run(const TopTokenArgs& args, int64_t rows) {
    auto kernel = args.token ? top_token_kernel<In, true, THREADS> : top_token_kernel<In, false, THREADS>;
    run_clusters(kernel, args, rows * TOP_TOKEN_CLUSTER, TOP_TOKEN_CLUSTER, THREADS, sizeof(RaceBoard));
}

}  // namespace

int32_t loss_gradient_cluster(int64_t columns) { return columns < 64 ? 1 : columns < 2048 ? 2 : columns < 100000 ? 4 : 0; }

int32_t pair_cluster(int64_t columns) { return loss_gradient_cluster(columns); }

void launch_pair(PairClusterArgs args, int64_t rows, void*) {
    args.cluster = pair_cluster(args.columns);
    args.share = share_of(args.columns, args.cluster);
    run_clusters(pair_kernel<THREADS>, args, rows * args.cluster, args.cluster, THREADS, sizeof(PairBoard) + 2 * sizeof(float) * args.share);
}

void launch_loss_gradient(LossGradientArgs args, int64_t rows, Element out, void*) {
    args.cluster = loss_gradient_cluster(args.columns);
    args.share = share_of(args.columns, args.cluster);
    if (out == Element::float32) return run<float>(args, rows);
    if (out == Element::float16) return run<Half>(args, rows);
    run<BFloat16>(args, rows);
}

void launch_top_token(TopTokenArgs args, int64_t rows, Element in, void*) {
    args.share = share_of(args.columns, TOP_TOKEN_CLUSTER);
    if (in == Element::float32) return run<float>(args, rows);
    if (in == Element::float16) return run<Half>(args, rows);
    run<BFloat16>(args, rows);
}

}  // namespace headrace
