// Philox4x32-10 for 16 consecutive counters: the random bits of 64 consecutive tokens. See kernels/reference/noise.py.

constexpr int GRANULE = 64;

struct NoiseKey {
    uint32_t position_low, position_high, seed_low, seed_high;
};

#if defined(__x86_64__)
#if LANES == 16
#define WIDE(name) _mm512_##name
typedef __m512i Wide;
#elif LANES == 8
#define WIDE(name) _mm256_##name
typedef __m256i Wide;
#else
#define WIDE(name) _mm_##name
typedef __m128i Wide;
#endif

// Both halves of the 64-bit products a · factor.
static inline void multiply(UintVec a, uint32_t factor, UintVec& high, UintVec& low) {
    Wide x = reinterpret_cast<Wide>(a), f = WIDE(set1_epi32)(factor);
    UintVec even = reinterpret_cast<UintVec>(WIDE(mul_epu32)(x, f));
    UintVec odd = reinterpret_cast<UintVec>(WIDE(mul_epu32)(WIDE(srli_epi64)(x, 32), f));
    UintVec upper = reinterpret_cast<UintVec>(WIDE(slli_epi64)(WIDE(set1_epi32)(-1), 32));
    high = reinterpret_cast<UintVec>(WIDE(srli_epi64)(reinterpret_cast<Wide>(even), 32)) | (odd & upper);
    low = (even & ~upper) | reinterpret_cast<UintVec>(WIDE(slli_epi64)(reinterpret_cast<Wide>(odd), 32));
}

// Four words of every counter, side by side. Transposing inside lanes of 128 bits yields the counters in the order that
// `counter_of` gave them.
static inline void write_words(UintVec a, UintVec b, UintVec c, UintVec d, uint32_t* bits) {
    Wide w = reinterpret_cast<Wide>(a), x = reinterpret_cast<Wide>(b), y = reinterpret_cast<Wide>(c), z = reinterpret_cast<Wide>(d);
    Wide low_wx = WIDE(unpacklo_epi32)(w, x), low_yz = WIDE(unpacklo_epi32)(y, z);
    Wide high_wx = WIDE(unpackhi_epi32)(w, x), high_yz = WIDE(unpackhi_epi32)(y, z);
    LooseUintVec* out = reinterpret_cast<LooseUintVec*>(bits);
    out[0] = reinterpret_cast<UintVec>(WIDE(unpacklo_epi64)(low_wx, low_yz));
    out[1] = reinterpret_cast<UintVec>(WIDE(unpackhi_epi64)(low_wx, low_yz));
    out[2] = reinterpret_cast<UintVec>(WIDE(unpacklo_epi64)(high_wx, high_yz));
    out[3] = reinterpret_cast<UintVec>(WIDE(unpackhi_epi64)(high_wx, high_yz));
}

static inline int counter_of(int lane) { return lane % 4 * (LANES / 4) + lane / 4; }
#undef WIDE
#else
static inline void multiply(UintVec a, uint32_t factor, UintVec& high, UintVec& low) {
    for (int i = 0; i < LANES; ++i) {
        uint64_t product = uint64_t(factor) * a[i];
        high[i] = uint32_t(product >> 32);
        low[i] = uint32_t(product);
    }
}

static inline void write_words(UintVec a, UintVec b, UintVec c, UintVec d, uint32_t* bits) {
    for (int i = 0; i < LANES; ++i) {
        uint32_t* token = bits + 4 * i;
        token[0] = a[i];
        token[1] = b[i];
        token[2] = c[i];
        token[3] = d[i];
    }
}

static inline int counter_of(int lane) { return lane; }
#endif

static void random_bits(uint32_t first_counter, const NoiseKey& key, uint32_t* bits) {
    for (int start = 0; start < GRANULE / 4; start += LANES) {
        UintVec a, b = key.position_low - UintVec{}, c = key.position_high - UintVec{}, d{};
        for (int i = 0; i < LANES; ++i) a[i] = first_counter + start + counter_of(i);
        uint32_t low = key.seed_low, high = key.seed_high;
        for (int round = 0; round < 10; ++round) {
            UintVec first_high, first_low, second_high, second_low;
            multiply(a, 0xD2511F53u, first_high, first_low);
            multiply(c, 0xCD9E8D57u, second_high, second_low);
            a = second_high ^ b ^ low;
            b = second_low;
            c = first_high ^ d ^ high;
            d = first_low;
            low += 0x9E3779B9u;
            high += 0xBB67AE85u;
        }
        write_words(a, b, c, d, bits + 4 * start);
    }
}

// No noise is above this.
constexpr float LARGEST_NOISE = 22.88f;

static inline float gumbel(uint32_t bits) {
    float uniform = (float(bits) + 0.5f) * 0x1p-32f;
    uniform = uniform > 1 - 0x1p-24f ? 1 - 0x1p-24f : uniform;
    return -__builtin_logf(-__builtin_log1pf(-uniform));
}
