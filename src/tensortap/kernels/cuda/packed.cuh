// The path for 16-bit floats, two to a word: most instructions work on both at once.

#if PACKED
#if ELEMENT == BF16
#define LARGEST 0x7F7F7F7Fu
#define FARTHEST 16.0f  // largest ratio of mean square to variance for which sums about 0 are exact enough
#else
#define LARGEST 0x7BFF7BFFu
#define FARTHEST 4.0f  // squares have 22 bits, so their sum rounds
#endif

// Sums of a few rows, before they are accumulated in float64.
struct Few {
    float squares, l1;
};

struct Packed {
    u32 low, high;  // pairs
    float plus[8], minus[8];  // sums of the elements whose signs the sketch keeps, and of those whose signs it flips
    float sketch[8];
    u32 zeros;
    double sum, squares, l1;
    u64 words[WORDS];  // multiplied by their lines' hashes, not yet by the weights of their columns
};

// Adds one row of a thread; `least` has a zero if the row has one.
__device__ __forceinline__ void add_packed(const u32 *w, u32 hash, u32 signs, u32 &least, Few &few, Packed &p) {
    least = pair_least(least, pair_times(w[0], w[1]));
    least = pair_least(least, pair_times(w[2], w[3]));
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        p.words[k] += u64(w[k]) * hash;
        p.low = pair_min(p.low, w[k]);
        p.high = pair_max(p.high, w[k]);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            float x = fast_value(w + k, j);
            few.squares = fmaf(x, x, few.squares);
            few.l1 += fabsf(x);
            if (signs >> (2 * k + j) & 1) p.minus[2 * k + j] += x;  // all eight bits become predicates at once
            else p.plus[2 * k + j] += x;
        }
    }
}

__device__ __forceinline__ void carry(const Few &few, Packed &p) {
    p.squares += double(few.squares);
    p.l1 += double(few.l1);
}

// Folds both kinds of sums: plus + minus is the sum, plus - minus the sketch. Then clears them.
__device__ __forceinline__ void end_stage(Packed &p) {
    float sums[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        sums[j] = p.plus[j] + p.minus[j];
        p.sketch[j] += p.plus[j] - p.minus[j];
        p.plus[j] = p.minus[j] = 0;
    }
    p.sum += double(((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7])));
}

__device__ __forceinline__ bool has_zero(u32 least) { return !(least & 0x7FFFu) || !(least & 0x7FFF0000u); }

__device__ __forceinline__ u32 count_zeros(const u32 *w) {
    u32 count = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) count += !(w[k] & 0x7FFFu) + !(w[k] & 0x7FFF0000u);
    return count;
}

// Adds all whole rows. Returns false if they need the next path.
__device__ __forceinline__ bool go_packed(Source &source, u32 turn, const u32 *weights, RowFacts *facts, u32 slot, const Rows &rows, Sums &s) {
    Packed p;
#pragma unroll
    for (int j = 0; j < 8; ++j) p.sketch[j] = p.plus[j] = p.minus[j] = 0;
#pragma unroll
    for (int k = 0; k < WORDS; ++k) p.words[k] = 0;
    p.sum = p.squares = p.l1 = 0;
    p.zeros = 0;
    p.low = LARGEST, p.high = LARGEST | 0x80008000u;
    u32 signs = 0;  // of four rows, eight bits each
    for (u32 batch = 0; batch < rows.batches; ++batch) {
        if (batch % (STAGE / BATCH) == 0) {
            if (batch) end_stage(p);
            prepare(facts, rows, batch, slot, 16);
        }
        const RowFacts *now = facts + BATCH * batch % STAGE;
        Few few = {};
#pragma unroll
        for (int half = 0; half < PARTS_EACH; ++half) {
            source.arrive();
            u32 least = LARGEST;
#pragma unroll
            for (int k = 0; k < PART; ++k) {
                u32 w[WORDS];
                RowFacts fact = now[half * PART + k];
                source.take(k, fact.turn, slot, w);
                if (k % 4 == 0) signs = signs_of(fact.seed, slot);
                add_packed(w, fact.hash, signs >> 8 * (k % 4), least, few, p);
            }
            // Most tensors have no zeros: they are counted, in the rows still in memory, only if there are some.
            if (__any_sync(~0u, has_zero(least))) {
#pragma unroll 1
                for (u32 k = 0; k < PART; ++k) {
                    u32 w[WORDS];
                    source.take(k, now[half * PART + k].turn, slot, w);
                    p.zeros += count_zeros(w);
                }
            }
            source.leave(turn);
        }
        carry(few, p);
    }
    if (rows.rest) {
        prepare(facts, rows, rows.batches, slot, 16);
        Few few = {};
        u32 least = LARGEST;
        for (u32 k = 0; k < rows.rest; ++k) {
            u32 w[WORDS];
            if (k % PART == 0) source.arrive();
            RowFacts fact = facts[k];
            source.take(k % PART, fact.turn, slot, w);
            if (k % 4 == 0) signs = signs_of(fact.seed, slot);
            add_packed(w, fact.hash, signs >> 8 * (k % 4), least, few, p);
            p.zeros += count_zeros(w);
            if (k % PART == PART - 1 || k == rows.rest - 1) source.leave(turn);
        }
        carry(few, p);
    }
    end_stage(p);
    float low = fminf(fast_value(&p.low, 0), fast_value(&p.low, 1)), high = fmaxf(fast_value(&p.high, 0), fast_value(&p.high, 1));
    // Whether float32 was exact enough, for the whole warp.
    float all = float(p.sum), squares = float(p.squares);
#pragma unroll
    for (int d = 16; d; d >>= 1) all += __shfl_xor_sync(~0u, all, d), squares += __shfl_xor_sync(~0u, squares, d);
    float spread = fmaf(-all, all / (256.0f * float(whole_rows(rows))), squares);  // rounds the same way in all kernels
    bool lost = !(squares < 1e37f) || (squares < 1e-24f && (low != 0 || high != 0)) || !(spread * FARTHEST >= squares);
    lost |= at_edge(low) || at_edge(high);
    if (__any_sync(~0u, lost)) return false;
#pragma unroll
    for (int j = 0; j < 8; ++j) s.sketch[j] = p.sketch[j];
    s.sum = p.sum, s.squares = p.squares, s.l1 = p.l1;
    s.low = low, s.high = high;
#pragma unroll
    for (int k = 0; k < WORDS; ++k) s.digest += p.words[k] * weights[(WORDS * slot + k) % 256];
    s.zeros = p.zeros;
    return true;
}
#endif
