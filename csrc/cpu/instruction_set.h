// All row operations for one instruction set: the including file has opened a namespace and set LANES and the target.

#include "simd.h"
#include "head_rows.h"
#include "pair_rows.h"
#include "philox.h"
#include "top_token_rows.h"

static void exponential_in_place(float* values, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) store_some(values + i, count - i < LANES ? count - i : LANES,
                                                          exponential(load_some(values + i, count - i, 0)));
}

static void logarithm_in_place(float* values, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) store_some(values + i, count - i < LANES ? count - i : LANES,
                                                          logarithm(load_some(values + i, count - i, 1)));
}
