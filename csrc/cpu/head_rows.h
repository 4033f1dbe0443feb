// Statistics of logit rows and the gradient through them. Included once per instruction set, after simd.h.

// Columns folded between two looks at the running maximum: 8 KB, so that the second pass reads the first-level cache.
constexpr int64_t BLOCK = 2048;

struct Sums {
    double total = 0;     // Σ e^(z−m)
    double weighted = 0;  // Σ e^(z−m) (z−m)
};

// Largest logit of a block, before the temperature. NaN is passed over here; it shows in the sums.
static float block_maximum(const float* logits, int64_t count) {
    Vec best[4] = {broadcast(-INFINITE), broadcast(-INFINITE), broadcast(-INFINITE), broadcast(-INFINITE)};
    int64_t i = 0;
    for (; i + 4 * LANES <= count; i += 4 * LANES)
        for (int lane = 0; lane < 4; ++lane) best[lane] = larger(load(logits + i + lane * LANES), best[lane]);
    for (; i + LANES <= count; i += LANES) best[0] = larger(load(logits + i), best[0]);
    if (i < count) best[1] = larger(load_some(logits + i, count - i, -INFINITE), best[1]);
    return largest_lane(larger(larger(best[0], best[1]), larger(best[2], best[3])));
}

static inline void add_mass(Vec logits, float scale, float top, Vec& total, Vec& weighted) {
    Vec shifted = logits * scale - top;
    Vec mass = exponential(shifted);
    total += mass;
    weighted += weigh(mass, shifted);
}

// Sums of a block against a given maximum, and the block's own maximum on the way.
static Sums block_sums(const float* logits, int64_t count, float scale, float top, float& largest) {
    Vec total[2] = {}, weighted[2] = {}, best[2] = {broadcast(-INFINITE), broadcast(-INFINITE)};
    int64_t i = 0;
    for (; i + 2 * LANES <= count; i += 2 * LANES)
        for (int half = 0; half < 2; ++half) {
            Vec part = load(logits + i + half * LANES);
            best[half] = larger(part, best[half]);
            add_mass(part, scale, top, total[half], weighted[half]);
        }
    for (; i < count; i += LANES) {
        Vec part = load_some(logits + i, count - i, -INFINITE);
        best[0] = larger(part, best[0]);
        add_mass(part, scale, top, total[0], weighted[0]);
    }
    largest = largest_lane(larger(best[0], best[1])) * scale;
    return {sum_of_lanes(total[0] + total[1]), sum_of_lanes(weighted[0] + weighted[1])};
}

// Re-base sums from one maximum to a higher one. `e^shift` in double: this happens once per block, the sums once per logit.
static inline void rebase(Sums& sums, float before, float after) {
    if (before == after || before == -INFINITE) return;
    double shift = double(before) - double(after);
    double decay = __builtin_exp(shift);
    sums.weighted = (sums.weighted + sums.total * shift) * decay;
    sums.total *= decay;
}

// How far a logit may exceed the value its row is summed against before the sum is taken again: e^8 costs no digits.
constexpr float HEADROOM = 8.0f;

static void statistics(const StatisticsArgs& args, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
        const float* logits = args.logits + row * args.columns;
        float scale = args.inv_temperature[row];
        float* state = args.state + row * 4;
        float top = state[0], base = top;
        Sums sums{state[1], state[2]};
        for (int64_t start = 0; start < args.columns; start += BLOCK) {
            int64_t count = args.columns - start < BLOCK ? args.columns - start : BLOCK;
            float largest;
            Sums block;
            if (base == -INFINITE)
                largest = block_maximum(logits + start, count) * scale;
            else
                block = block_sums(logits + start, count, scale, base, largest);
            if (base == -INFINITE || largest > base + HEADROOM) {
                rebase(sums, base, largest);
                base = largest;
                block = block_sums(logits + start, count, scale, base == -INFINITE ? 0.0f : base, largest);
            }
            top = largest > top ? largest : top;
            sums.total += block.total;
            sums.weighted += block.weighted;
        }
        rebase(sums, base, top);
        int64_t target = args.targets[row] - args.offset;
        if (target >= 0 && target < args.columns) state[3] = logits[target] * scale;
        state[0] = top;
        state[1] = float(sums.total);
        state[2] = float(sums.weighted);
    }
}

struct RowGradient {
    float scale, top, log_sum;
    float constant, slope;  // d loss / d logit = p (constant + slope · log p), away from the target

    inline Vec operator()(Vec logits) const {
        Vec log_prob = (logits * scale - top) - log_sum;
        log_prob = log_prob < -1e4f ? broadcast(-1e4f) : log_prob;  // −inf times probability 0 must be 0
        return exponential(log_prob) * (log_prob * slope + constant);
    }
};

static void gradient(const GradientArgs& args, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
        int64_t source = args.sources ? args.sources[row] : row;
        float* out = args.logits + row * args.columns;
        const float* logits = args.logits + source * args.columns;
        float by_logprob = args.grad_logprobs[source], by_entropy = args.grad_entropies[source];
        if (by_logprob == 0 && by_entropy == 0) {
            __builtin_memset(out, 0, args.columns * sizeof(float));
            continue;
        }
        const float* state = args.state + source * 4;
        float scale = args.inv_temperature[source];
        float log_sum = __builtin_logf(state[1]);
        float entropy = log_sum - state[2] / state[1];
        entropy = entropy < 0 ? 0 : entropy;
        RowGradient form{scale, state[0], log_sum, -scale * (by_logprob + by_entropy * entropy), -scale * by_entropy};
        int64_t i = 0;
        for (; i + LANES <= args.columns; i += LANES) store(out + i, form(load(logits + i)));
        if (i < args.columns) store_some(out + i, args.columns - i, form(load_some(logits + i, args.columns - i, 0)));
        int64_t target = args.targets[source] - args.offset;
        if (target >= 0 && target < args.columns) out[target] += by_logprob * scale;
    }
}
