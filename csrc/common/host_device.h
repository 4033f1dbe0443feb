// Functions that a GPU and a CPU compile from one text, so that formulas are tested where there is no GPU.
#pragma once

#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define HEADRACE_HD __host__ __device__ __forceinline__
#else
#define HEADRACE_HD inline
#endif

namespace headrace {

// e^x; on a GPU the hardware's power of two, relative error 2^-21 near 0 and about 1e-5 at x = -88, where it no longer counts.
HEADRACE_HD float fast_exp(float x) {
#ifdef __CUDA_ARCH__
    return __expf(x);
#else
    return std::exp(x);
#endif
}

// Maximum of no columns: finite, so that a difference from it is never NaN. Its sum is 0, so it never counts.
constexpr float LOWEST = -3.4028234663852886e38f;

// value * factor, 0 where the factor is 0 whatever the value.
HEADRACE_HD float scaled_by(float value, float factor) { return factor == 0.0f ? 0.0f : value * factor; }

// The larger; NaN in `candidate` is passed over.
HEADRACE_HD float larger(float best, float candidate) { return candidate > best ? candidate : best; }

}  // namespace headrace
