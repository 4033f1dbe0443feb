// Two rows of logits over the same vocabulary. Included once per instruction set, after head_rows.h.

struct PairSums {
    Sums own, other;
    double cross = 0, cross_other = 0;  // Σ e^(z−m) ((z−m) − (z'−m')) and the same with the roles swapped
};

struct PairVecs {
    Vec total{}, weighted{}, total_other{}, weighted_other{}, cross{}, cross_other{};

    inline void add(Vec logits, Vec logits_other, float scale, float top, float top_other) {
        Vec shifted = logits * scale - top, shifted_other = logits_other * scale - top_other;
        Vec mass = exponential(shifted), mass_other = exponential(shifted_other);
        Vec gap = shifted - shifted_other;
        total += mass;
        total_other += mass_other;
        weighted += weigh(mass, shifted);
        weighted_other += weigh(mass_other, shifted_other);
        cross += weigh(mass, gap);
        cross_other -= weigh(mass_other, gap);
    }
};

static void add_block(PairSums& sums, const float* a, const float* b, int64_t count, float scale, float top, float top_other) {
    PairVecs vecs;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) vecs.add(load(a + i), load(b + i), scale, top, top_other);
    if (i < count)
        vecs.add(load_some(a + i, count - i, -INFINITE), load_some(b + i, count - i, -INFINITE), scale, top, top_other);
    sums.own.total += sum_of_lanes(vecs.total);
    sums.own.weighted += sum_of_lanes(vecs.weighted);
    sums.other.total += sum_of_lanes(vecs.total_other);
    sums.other.weighted += sum_of_lanes(vecs.weighted_other);
    sums.cross += sum_of_lanes(vecs.cross);
    sums.cross_other += sum_of_lanes(vecs.cross_other);
}

// Express all sums against higher maxima. The cross sums also hold the difference of the two maxima, which moves.
static void rebase_pair(PairSums& sums, float top, float top_other, float raised, float raised_other) {
    double shift = top == -INFINITE ? 0 : double(top) - double(raised);
    double shift_other = top_other == -INFINITE ? 0 : double(top_other) - double(raised_other);
    double move = shift - shift_other;
    sums.cross = (sums.cross + sums.own.total * move) * __builtin_exp(shift);
    sums.cross_other = (sums.cross_other - sums.other.total * move) * __builtin_exp(shift_other);
    rebase(sums.own, top, raised);
    rebase(sums.other, top_other, raised_other);
}

static void pair_statistics(const PairArgs& args, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
        const float* a = args.logits + row * args.columns;
        const float* b = args.logits_cf + row * args.columns;
        float scale = args.inv_temperature[row];
        float* state = args.state + row * 10;
        PairSums sums{{state[1], state[2]}, {state[5], state[6]}, state[8], state[9]};
        float top = state[0], top_other = state[4];
        for (int64_t start = 0; start < args.columns; start += BLOCK) {
            int64_t count = args.columns - start < BLOCK ? args.columns - start : BLOCK;
            float raised = block_maximum(a + start, count) * scale, raised_other = block_maximum(b + start, count) * scale;
            raised = raised > top ? raised : top;
            raised_other = raised_other > top_other ? raised_other : top_other;
            if (raised != top || raised_other != top_other) rebase_pair(sums, top, top_other, raised, raised_other);
            top = raised;
            top_other = raised_other;
            add_block(sums, a + start, b + start, count, scale, top == -INFINITE ? 0.0f : top,
                      top_other == -INFINITE ? 0.0f : top_other);
        }
        int64_t target = args.targets[row] - args.offset;
        if (target >= 0 && target < args.columns) {
            state[3] = a[target] * scale;
            state[7] = b[target] * scale;
        }
        const double values[] = {top, sums.own.total, sums.own.weighted, top_other, sums.other.total, sums.other.weighted};
        for (int i = 0; i < 3; ++i) {
            state[i] = float(values[i]);
            state[4 + i] = float(values[3 + i]);
        }
        state[8] = float(sums.cross);
        state[9] = float(sums.cross_other);
    }
}

struct Divergence {
    float scale, top, log_sum, top_other, log_sum_other;
    Vec js{}, tv{};

    // log p − log((p + q)/2) = log 2 − log(1 + e^−d) with d = log p − log q: no logarithm of a sum of probabilities.
    inline void add(Vec logits, Vec logits_other) {
        Vec log_p = (logits * scale - top) - log_sum, log_q = (logits_other * scale - top_other) - log_sum_other;
        log_p = log_p < -1e4f ? broadcast(-1e4f) : log_p;
        log_q = log_q < -1e4f ? broadcast(-1e4f) : log_q;
        Vec p = exponential(log_p), q = exponential(log_q);
        Vec d = log_p - log_q, zero{};
        Vec distance = d < 0.0f ? -d : d;
        Vec common = 0.69314718f - logarithm(exponential(-distance) + 1.0f);
        js += p * (common - (d < 0.0f ? distance : zero)) + q * (common - (d < 0.0f ? zero : distance));
        Vec apart = p - q;
        tv += apart < 0.0f ? -apart : apart;
    }
};

static void pair_divergences(const PairArgs& args, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
        const float* a = args.logits + row * args.columns;
        const float* b = args.logits_cf + row * args.columns;
        const float* state = args.state + row * 10;
        double js = 0, tv = 0;
        for (int64_t start = 0; start < args.columns; start += BLOCK) {
            int64_t stop = args.columns - start < BLOCK ? args.columns : start + BLOCK;
            Divergence sums{args.inv_temperature[row], state[0], __builtin_logf(state[1]), state[4], __builtin_logf(state[5])};
            int64_t i = start;
            for (; i + LANES <= stop; i += LANES) sums.add(load(a + i), load(b + i));
            if (i < stop) sums.add(load_some(a + i, stop - i, -INFINITE), load_some(b + i, stop - i, -INFINITE));
            js += sum_of_lanes(sums.js);
            tv += sum_of_lanes(sums.tv);
        }
        js *= 0.5;
        args.js[row] = float(js < 0 ? 0 : js);
        args.tv[row] = float(0.5 * tv);
    }
}
