// The top-token mask and the sampler. Included once per instruction set, after head_rows.h and philox.h.

constexpr int64_t TOKENS = 1024;  // read at a time; a multiple of GRANULE

// The top of a row and the rest, which is summed against a value of its own, at most HEADROOM below its maximum.
struct Rest {
    float top = -INFINITE, second = -INFINITE, base = -INFINITE;
    int64_t top_id = 0;
    double mass = 0;      // Σ e^(z − base) without the top token
    double hot_mass = 0;  // Σ e^((z − base) / T)

    inline void rebase(float raised, double scale) {
        if (base > -INFINITE) {
            double shift = double(base) - double(raised);
            mass *= __builtin_exp(shift);
            hot_mass *= __builtin_exp(shift * scale);
        }
        base = raised;
    }
};

// The two best runners of the Gumbel race: if the mask takes the winner out, the other is the masked draw.
struct Race {
    float best = -INFINITE, next = -INFINITE;
    int64_t best_id = 0, next_id = 0;

    inline void enter(float value, int64_t id) {
        if (value > best) {
            next = best;
            next_id = best_id;
            best = value;
            best_id = id;
        } else if (value > next) {
            next = value;
            next_id = id;
        }
    }
};

// Blocks of one row of logits with banned tokens at −inf; copied only where there are any.
struct Row {
    const float* logits;
    int64_t columns;
    const int64_t* banned;
    const int64_t* banned_end;
    float scratch[TOKENS];

    inline const float* block(int64_t start, int64_t count) {
        if (banned == banned_end || *banned >= start + count) return logits + start;
        __builtin_memcpy(scratch, logits + start, count * sizeof(float));
        for (; banned != banned_end && *banned < start + count; ++banned) scratch[*banned - start] = -INFINITE;
        return scratch;
    }
};

// Σ e^((z − base) · scale) of a block, and its largest logit on the way.
static double block_mass(const float* logits, int64_t count, float base, float scale, float& largest) {
    Vec total[2] = {}, best[2] = {broadcast(-INFINITE), broadcast(-INFINITE)};
    int64_t i = 0;
    if (scale == 1.0f)
        for (; i + 2 * LANES <= count; i += 2 * LANES)
            for (int half = 0; half < 2; ++half) {
                Vec part = load(logits + i + half * LANES);
                best[half] = larger(part, best[half]);
                total[half] += exponential(part - base);
            }
    for (; i < count; i += LANES) {
        Vec part = i + LANES <= count ? load(logits + i) : load_some(logits + i, count - i, -INFINITE);
        best[0] = larger(part, best[0]);
        total[0] += exponential((part - base) * scale);
    }
    largest = largest_lane(larger(best[0], best[1]));
    return sum_of_lanes(total[0] + total[1]);
}

static int64_t first_equal(const float* logits, int64_t count, float value) {
    for (int64_t i = 0; i < count; ++i)
        if (logits[i] == value) return i;
    return 0;
}

// A block with a new top: the top leaves it for the rest to be summed without, the old one joins the rest.
static const float* replace_top(Rest& rest, Row& row, const float* logits, int64_t start, int64_t count, float largest, double scale) {
    if (logits != row.scratch) __builtin_memcpy(row.scratch, logits, count * sizeof(float));
    int64_t at = first_equal(row.scratch, count, largest);
    row.scratch[at] = -INFINITE;
    float old = rest.top, left = block_maximum(row.scratch, count);
    rest.top = largest;
    rest.top_id = start + at;
    rest.second = left > old ? left : old;
    if (rest.second > rest.base + HEADROOM || rest.base == -INFINITE) rest.rebase(rest.second, scale);
    if (old > -INFINITE) {
        rest.mass += __builtin_exp(double(old) - rest.base);
        rest.hot_mass += __builtin_exp((double(old) - rest.base) * scale);
    }
    return row.scratch;
}

static void fold(Rest& rest, Row& row, const float* logits, int64_t start, int64_t count, float scale) {
    float largest;
    double mass = 0;
    if (rest.base > -INFINITE)
        mass = block_mass(logits, count, rest.base, 1.0f, largest);
    else
        largest = block_maximum(logits, count);
    bool again = rest.base == -INFINITE;
    if (largest > rest.top) {
        logits = replace_top(rest, row, logits, start, count, largest, scale);
        again = true;
    } else if (largest > rest.second) {
        rest.second = largest;
        if (again || largest > rest.base + HEADROOM) {
            rest.rebase(largest, scale);
            again = true;
        }
    }
    float base = rest.base == -INFINITE ? 0.0f : rest.base;
    if (again) mass = block_mass(logits, count, base, 1.0f, largest);
    rest.mass += mass;
    rest.hot_mass += scale == 1.0f ? mass : block_mass(logits, count, base, scale, largest);
}

// Enter the tokens of a block that could still come in at least second. The noise −log(−log(1 − u)) is below −log u, so a token
// needs u < e^(z/T − next); only the few that pass have their noise worked out.
static void race(Race& race, const float* block, int64_t start, int64_t count, float temperature, const NoiseKey& key) {
    float scale = 1.0f / temperature;
    alignas(64) uint32_t bits[GRANULE];
    alignas(64) float limits[GRANULE], padded[GRANULE];
    for (int64_t at = 0; at < count; at += GRANULE) {
        const float* logits = block + at;
        int64_t tokens = GRANULE;
        if (count - at < GRANULE) {
            tokens = count - at;
            for (int i = 0; i < GRANULE; ++i) padded[i] = i < tokens ? logits[i] : -INFINITE;
            logits = padded;
        }
        float slack = 1e-3f + 1e-6f * (race.next < 0 ? -race.next : race.next);
        bool open = race.next == -INFINITE;
        float reach = block_maximum(logits, GRANULE) * scale + LARGEST_NOISE;
        if (reach == -INFINITE || (!open && reach + slack <= race.next)) continue;
        random_bits(uint32_t((start + at) / 4), key, bits);
        IntVec passed{};
        for (int i = 0; i < GRANULE; i += LANES) {
            Vec margin = load(logits + i) * scale - (open ? -INFINITE : race.next - slack);
            Vec limit = exponential(margin > 0.0f ? Vec{} : margin) * 0x1p32f + 256.0f;
            UintVec drawn = *reinterpret_cast<const LooseUintVec*>(bits + i);
            passed |= __builtin_convertvector(drawn, Vec) <= limit;
            store(limits + i, limit);
        }
        if (!any(passed)) continue;
        for (int64_t i = 0; i < tokens; ++i)
            if (float(bits[i]) <= limits[i]) race.enter(logits[i] / temperature + gumbel(bits[i]), start + at + i);
    }
}

static int64_t runner_up(Row row, const Rest& rest) {
    for (int64_t start = 0; start < row.columns; start += TOKENS) {
        int64_t count = row.columns - start < TOKENS ? row.columns - start : TOKENS;
        const float* logits = row.block(start, count);
        for (int64_t i = 0; i < count; ++i)
            if (logits[i] == rest.second && start + i != rest.top_id) return start + i;
    }
    return rest.top_id;
}

static void write_draw(const TopTokenArgs& args, int64_t index, const Row& row, const Rest& rest, const Race& race, bool fired) {
    float temperature = args.temperature[index];
    bool greedy = temperature == 0;
    bool lost = rest.top == -INFINITE || rest.mass != rest.mass;
    int64_t token = race.best_id;
    if (fired && token == rest.top_id) token = race.next_id;
    if (greedy) token = fired ? runner_up(row, rest) : rest.top_id;
    double scale = greedy ? 1.0 : 1.0 / temperature;
    double log_rest = __builtin_log(greedy ? rest.mass : rest.hot_mass);
    double whole = __builtin_log1p(__builtin_exp((double(rest.base) - rest.top) * scale + log_rest));
    double logit = row.logits[token];
    double raw = (logit - rest.top) * scale - whole;
    double behaviour = fired ? (logit - rest.base) * scale - log_rest : raw;
    args.token[index] = lost ? -1 : token;
    args.raw_logprob[index] = lost ? __builtin_nanf("") : float(raw);
    args.logprob[index] = lost ? __builtin_nanf("") : greedy ? 0.0f : float(behaviour);
}

static void top_token(const TopTokenArgs& args, int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
        Row row{args.logits + index * args.stride, args.columns, args.banned, args.banned + args.banned_count, {}};
        const Row fresh = row;
        float temperature = args.seeds ? args.temperature[index] : 1.0f;
        bool draws = args.seeds && temperature > 0;
        float scale = draws ? 1.0f / temperature : 1.0f;
        NoiseKey key{};
        if (draws) {
            uint64_t seed = args.seeds[index], position = args.positions[index];
            key = {uint32_t(position), uint32_t(position >> 32), uint32_t(seed), uint32_t(seed >> 32)};
        }
        Rest rest;
        Race runners;
        for (int64_t start = 0; start < row.columns; start += TOKENS) {
            int64_t count = row.columns - start < TOKENS ? row.columns - start : TOKENS;
            const float* logits = row.block(start, count);
            if (draws) race(runners, logits, start, count, temperature, key);
            fold(rest, row, logits, start, count, scale);
        }
        double log_rest = __builtin_log(rest.mass);
        double odds = rest.base == -INFINITE && rest.mass == 0 ? -INFINITE : double(rest.base) - rest.top + log_rest;
        bool empty = rest.top == -INFINITE;
        float top_prob = empty ? 0.0f : float(1.0 / (1.0 + __builtin_exp(odds)));
        double raw = empty ? double(rest.top) : rest.top + __builtin_log1p(__builtin_exp(odds));
        bool fired = args.eligible[index] && top_prob > args.threshold[index] && rest.second > -INFINITE &&
                     !(args.spared && args.spared[rest.top_id]);
        args.fired[index] = fired;
        args.top_id[index] = rest.top_id;
        args.top_prob[index] = top_prob;
        if (args.seeds) {
            write_draw(args, index, fresh, rest, runners, fired);
        } else {
            args.raw_lse[index] = float(raw);
            args.masked_lse[index] = float(fired ? rest.base + log_rest : raw);
        }
    }
}
