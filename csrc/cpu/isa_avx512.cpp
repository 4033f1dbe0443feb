// The row operations for processors with AVX-512.
#include "table.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#endif

namespace headrace {
namespace avx512 {
#define LANES 16
#include "instruction_set.h"
}  // namespace avx512

const Table avx512_table = {
    "avx512",           avx512::statistics,           avx512::gradient,           avx512::pair_statistics, avx512::pair_divergences,
    avx512::top_token, avx512::exponential_in_place, avx512::logarithm_in_place,
};
}  // namespace headrace

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
