// The top-token mask and the sampler. Included once per instruction set, after head_rows.h and philox.h.

constexpr int64_t TOKENS = 1024;  // read at a time; a multiple of GRANULE

// The top of a row and the rest, which is summed against its own maximum.
struct Rest {
    float top = -INFINITE, second = -INFINITE;
    int64_t top_id = 0;
    double mass = 0;      // Σ e^(z − second) without the top token
    double hot_mass = 0;  // the same at the temperature of the draw
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

static double block_mass(const float* logits, int64_t count, float base, float scale) {
    Vec total[2] = {};
    int64_t i = 0;
    for (; i + 2 * LANES <= count; i += 2 * LANES) {
        total[0] += exponential((load(logits + i) - base) * scale);
        total[1] += exponential((load(logits + i + LANES) - base) * scale);
    }
    for (; i < count; i += LANES) total[0] += exponential((load_some(logits + i, count - i, -INFINITE) - base) * scale);
    return sum_of_lanes(total[0] + total[1]);
}

static int64_t first_equal(const float* logits, int64_t count, float value) {
    for (int64_t i = 0; i < count; ++i)
        if (logits[i] == value) return i;
    return 0;
}

static void raise_second(Rest& rest, float second, float scale) {
    if (second > rest.second && rest.second > -INFINITE) {
        double shift = double(rest.second) - double(second);
        rest.mass *= __builtin_exp(shift);
        rest.hot_mass *= __builtin_exp(shift * scale);
    }
    rest.second = second > rest.second ? second : rest.second;
}

static void fold(Rest& rest, Row& row, const float* logits, int64_t start, int64_t count, float scale) {
    float largest = block_maximum(logits, count);
    if (largest > rest.top) {
        // A new top: it leaves the block, the old one joins the rest.
        if (logits != row.scratch) __builtin_memcpy(row.scratch, logits, count * sizeof(float));
        logits = row.scratch;
        int64_t at = first_equal(logits, count, largest);
        row.scratch[at] = -INFINITE;
        float old = rest.top;
        largest = block_maximum(logits, count);
        raise_second(rest, largest > old ? largest : old, scale);
        if (old > -INFINITE) {
            double gap = double(old) - double(rest.second);
            rest.mass += __builtin_exp(gap);
            rest.hot_mass += __builtin_exp(gap * scale);
        }
        rest.top_id = start + at;
        rest.top = row.logits[rest.top_id];
    } else {
        raise_second(rest, largest, scale);
    }
    float base = rest.second == -INFINITE ? 0.0f : rest.second;
    double mass = block_mass(logits, count, base, 1.0f);
    rest.mass += mass;
    rest.hot_mass += scale == 1.0f ? mass : block_mass(logits, count, base, scale);
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
    double whole = __builtin_log1p(__builtin_exp((double(rest.second) - rest.top) * scale + log_rest));
    double logit = row.logits[token];
    double raw = (logit - rest.top) * scale - whole;
    double behaviour = fired ? (logit - rest.second) * scale - log_rest : raw;
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
        double odds = rest.second == -INFINITE && rest.mass == 0 ? -INFINITE : double(rest.second) - rest.top + log_rest;
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
            args.masked_lse[index] = float(fired ? rest.second + log_rest : raw);
        }
    }
}
