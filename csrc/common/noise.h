// The sampler's noise for four consecutive tokens. Definition: kernels/reference/noise.py.
#pragma once

#include "common/host_device.h"

namespace headrace {

// No Gumbel noise is above this.
constexpr float NOISE_BOUND = 22.88f;

struct Words {
    uint32_t word[4];
};

HEADRACE_HD uint32_t high_product(uint32_t a, uint32_t b) { return uint32_t((uint64_t(a) * b) >> 32); }

// Philox4x32-10: the random bits of tokens 4 block ... 4 block + 3.
HEADRACE_HD Words random_words(int64_t seed, int64_t position, uint32_t block) {
    uint32_t a = block, b = uint32_t(position), c = uint32_t(uint64_t(position) >> 32), d = 0;
    uint32_t low = uint32_t(seed), high = uint32_t(uint64_t(seed) >> 32);
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (int round = 0; round < 10; ++round) {
        uint32_t next_a = high_product(c, 0xCD9E8D57u) ^ b ^ low, next_c = high_product(a, 0xD2511F53u) ^ d ^ high;
        b = c * 0xCD9E8D57u;
        d = a * 0xD2511F53u;
        a = next_a;
        c = next_c;
        low += 0x9E3779B9u;
        high += 0xBB67AE85u;
    }
    return {{a, b, c, d}};
}

HEADRACE_HD float gumbel_of(uint32_t bits) {
    float uniform = (float(bits) + 0.5f) * 2.3283064365386963e-10f;
    uniform = uniform > 1.0f - 5.9604644775390625e-08f ? 1.0f - 5.9604644775390625e-08f : uniform;
    return -std::log(-std::log1p(-uniform));
}

}  // namespace headrace
