#include "cuda/launch.cuh"
#include "cuda/launch.h"
#include "cuda/loss_gradient.cuh"

namespace headrace {
namespace {

constexpr int THREADS = 512;

// Three blocks a multiprocessor: while one waits for its row another computes and a third writes.
constexpr int RESIDENT = 3;
constexpr int64_t MULTIPROCESSOR = 228 << 10, RESERVED = 1 << 10, LARGEST_BLOCK = 227 << 10;
constexpr int64_t PREFERRED_BLOCK = MULTIPROCESSOR / RESIDENT - RESERVED;

int64_t share_of(int64_t columns, int64_t cluster) { return (columns + 4 * cluster - 1) / (4 * cluster) * 4; }

int64_t shared_of(int64_t share) { return int64_t(sizeof(LossBoard)) + share * int64_t(sizeof(float)); }

template <typename Out>
void launch(const LossGradientArgs& args, int64_t rows, void* stream) {
    launch_clusters(&loss_gradient_kernel<Out, THREADS, RESIDENT>, args, rows * args.cluster, args.cluster, THREADS,
                    int(shared_of(args.share)), stream);
}

}  // namespace

int32_t loss_gradient_cluster(int64_t columns) {
    for (int32_t cluster = 1; cluster <= MAX_CLUSTER; cluster *= 2)
        if (shared_of(share_of(columns, cluster)) <= PREFERRED_BLOCK) return cluster;
    return shared_of(share_of(columns, MAX_CLUSTER)) <= LARGEST_BLOCK ? MAX_CLUSTER : 0;
}

void launch_loss_gradient(LossGradientArgs args, int64_t rows, Element out, void* stream) {
    args.cluster = loss_gradient_cluster(args.columns);
    if (args.cluster == 0) throw std::runtime_error("a row of these logits does not fit on chip");
    args.share = int32_t(share_of(args.columns, args.cluster));
    if (out == Element::float32) return launch<float>(args, rows, stream);
    if (out == Element::float16) return launch<Half>(args, rows, stream);
    launch<BFloat16>(args, rows, stream);
}

}  // namespace headrace
