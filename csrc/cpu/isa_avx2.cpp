// The row operations for processors with AVX2 and FMA.
#include "table.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif

namespace headrace {
namespace avx2 {
#define LANES 8
#include "instruction_set.h"
}  // namespace avx2

const Table avx2_table = {
    "avx2",           avx2::statistics,           avx2::gradient,           avx2::pair_statistics, avx2::pair_divergences,
    avx2::top_token, avx2::exponential_in_place, avx2::logarithm_in_place,
};
}  // namespace headrace

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
