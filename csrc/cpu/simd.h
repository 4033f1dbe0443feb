// Vectors of floats with the few functions the row operations need, for whichever instruction set the including file targets.
//
// No include guard and no standard header: this text is compiled inside a namespace of its own for each instruction set, and
// a standard inline function compiled there could replace the one that older processors run.

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t IntVec __attribute__((vector_size(4 * LANES)));
typedef float LooseVec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

typedef uint32_t UintVec __attribute__((vector_size(4 * LANES)));
typedef uint32_t LooseUintVec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

constexpr float INFINITE = __builtin_inff();

static inline Vec load(const float* from) { return *reinterpret_cast<const LooseVec*>(from); }
static inline void store(float* to, Vec value) { *reinterpret_cast<LooseVec*>(to) = value; }
static inline Vec broadcast(float value) { return value - Vec{}; }

static inline Vec load_some(const float* from, int64_t count, float filler) {
    float lanes[LANES];
    for (int i = 0; i < LANES; ++i) lanes[i] = i < count ? from[i] : filler;
    return load(lanes);
}

static inline void store_some(float* to, int64_t count, Vec value) {
    float lanes[LANES];
    store(lanes, value);
    for (int64_t i = 0; i < count; ++i) to[i] = lanes[i];
}

// The larger of each lane; NaN in `candidate` is passed over.
static inline Vec larger(Vec candidate, Vec best) { return candidate > best ? candidate : best; }

static inline float largest_lane(Vec value) {
    float best = -INFINITE;
    for (int i = 0; i < LANES; ++i) best = value[i] > best ? value[i] : best;
    return best;
}

static inline float sum_of_lanes(Vec value) {
    float total[LANES];
    store(total, value);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) total[i] += total[i + width];
    return total[0];
}

static inline bool any(IntVec mask) {
    int32_t found = 0;
    for (int i = 0; i < LANES; ++i) found |= mask[i];
    return found != 0;
}

// mass · value, 0 where there is no mass whatever the value (−inf · 0 included).
static inline Vec weigh(Vec mass, Vec value) { return mass == 0.0f ? Vec{} : mass * value; }

// e^x for x ≤ 88, relative error below 2e-7 + 8e-8 |x|; 0 for −∞, NaN for NaN.
#if defined(__x86_64__) && LANES == 16
// 2^t = 2^n 2^f with t = n + f, |f| ≤ ½. AVX-512 splits and scales in one instruction each, and both know about infinities.
static inline Vec exponential(Vec x) {
    Vec t = x * 1.44269504f;
    Vec f = reinterpret_cast<Vec>(_mm512_reduce_ps(reinterpret_cast<__m512>(t), 0));
    Vec n = t - f;
    Vec p = 1.32647239e-3f * f + 9.67151287e-3f;
    p = p * f + 5.55073375e-2f;
    p = p * f + 2.40222421e-1f;
    p = p * f + 6.93146978e-1f;
    p = p * f + 1.0f;
    return reinterpret_cast<Vec>(_mm512_scalef_ps(reinterpret_cast<__m512>(p), reinterpret_cast<__m512>(n)));
}
#else
// x = n log 2 + r with |r| ≤ log 2 / 2; e^r by a fitted polynomial; 2^n through the exponent bits. 0 below −87.
static inline Vec exponential(Vec x) {
    const float smallest = -87.0f;
    const float shifter = 12582912.0f;  // 1.5 · 2^23: adding it rounds to an integer in the low mantissa bits
    Vec inside = x < smallest ? broadcast(smallest) : x;
    Vec shifted = inside * 1.44269504f + shifter;
    Vec n = shifted - shifter;
    Vec r = inside - n * 0.693359375f;  // log 2 in two parts, the first exact in few bits
    r = r - n * -2.12194440e-4f;
    Vec p = 1.38145965e-3f * r + 8.36871751e-3f;
    p = p * r + 4.16683890e-2f;
    p = p * r + 1.66665211e-1f;
    p = p * r + 4.99999940e-1f;
    Vec e = (r * r) * p + r + 1.0f;
    Vec scaled = reinterpret_cast<Vec>(reinterpret_cast<IntVec>(e) + (reinterpret_cast<IntVec>(shifted) << 23));
    return x < smallest ? Vec{} : scaled;
}
#endif

// log x for normal x > 0, relative error below 2e-7 (absolute near 1).
// x = 2^n m with m in [√½, √2); log m = 2 artanh(s), s = (m − 1)/(m + 1), by a fitted odd polynomial (1e-9).
static inline Vec logarithm(Vec x) {
    IntVec bits = reinterpret_cast<IntVec>(x);
    IntVec exponent = (bits - 0x3f3504f3) >> 23;
    Vec m = reinterpret_cast<Vec>(bits - (exponent << 23));
    Vec n = __builtin_convertvector(exponent, Vec);
    Vec f = m - 1.0f;
    Vec s = f / (f + 2.0f);
    Vec q = s * s;
    Vec tail = 0.29872285f * q + 0.39977528f;
    tail = tail * q + 0.66666776f;
    // log m = f − s (f − q · tail), which keeps the digits of f.
    Vec low = n * -2.12194440e-4f - s * (f - q * tail);
    return n * 0.693359375f + (f + low);
}
