#include "cuda/launch.cuh"
#include "cuda/launch.h"
#include "cuda/top_token.cuh"

namespace headrace {
namespace {

constexpr int THREADS = 512;

template <typename In, bool DRAWS>
void launch(const TopTokenArgs& args, int64_t rows, void* stream) {
    launch_clusters(&top_token_kernel<In, DRAWS, THREADS>, args, rows * TOP_TOKEN_CLUSTER, TOP_TOKEN_CLUSTER, THREADS,
                    int(sizeof(RaceBoard)), stream);
}

template <typename In>
void launch(const TopTokenArgs& args, int64_t rows, void* stream) {
    args.token ? launch<In, true>(args, rows, stream) : launch<In, false>(args, rows, stream);
}

}  // namespace

void launch_top_token(TopTokenArgs args, int64_t rows, Element in, void* stream) {
    args.share = (args.columns + 4 * TOP_TOKEN_CLUSTER - 1) / (4 * TOP_TOKEN_CLUSTER) * 4;
    if (in == Element::float32) return launch<float>(args, rows, stream);
    if (in == Element::float16) return launch<Half>(args, rows, stream);
    launch<BFloat16>(args, rows, stream);
}

}  // namespace headrace
