// The row operations for any processor of the architecture (SSE2, NEON, or what the compiler makes of four lanes).
#include "table.h"

namespace headrace {
namespace baseline {
#define LANES 4
#include "instruction_set.h"
}  // namespace baseline

const Table baseline_table = {
    "baseline",          baseline::statistics,           baseline::gradient,           baseline::pair_statistics,
    baseline::pair_divergences, baseline::top_token, baseline::exponential_in_place, baseline::logarithm_in_place,
};
}  // namespace headrace
