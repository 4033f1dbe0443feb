#include "cuda/launch.cuh"
#include "cuda/launch.h"
#include "cuda/pair.cuh"

namespace headrace {
namespace {

constexpr int THREADS = 512;

// Two blocks a multiprocessor where the rows allow it.
constexpr int64_t PREFERRED_BLOCK = (228 << 10) / 2 - (1 << 10), LARGEST_BLOCK = 227 << 10;

int64_t share_of(int64_t columns, int64_t cluster) { return (columns + 4 * cluster - 1) / (4 * cluster) * 4; }

int64_t shared_of(int64_t share) { return int64_t(sizeof(PairBoard)) + 2 * share * int64_t(sizeof(float)); }

}  // namespace

int32_t pair_cluster(int64_t columns) {
    for (int32_t cluster = 1; cluster <= MAX_CLUSTER; cluster *= 2)
        if (shared_of(share_of(columns, cluster)) <= PREFERRED_BLOCK) return cluster;
    return shared_of(share_of(columns, MAX_CLUSTER)) <= LARGEST_BLOCK ? MAX_CLUSTER : 0;
}

void launch_pair(PairClusterArgs args, int64_t rows, void* stream) {
    args.cluster = pair_cluster(args.columns);
    if (args.cluster == 0) throw std::runtime_error("two rows of these logits do not fit on chip");
    args.share = int32_t(share_of(args.columns, args.cluster));
    launch_clusters(&pair_kernel<THREADS>, args, rows * args.cluster, args.cluster, THREADS, int(shared_of(args.share)), stream);
}

}  // namespace headrace
