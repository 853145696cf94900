// The path for numbers that float32 holds exactly: float32 sums of a few rows about a value near the thread's own elements,
// accumulated in float64.

#if QUICK
// Values of a row that all threads of a warp share: the hash of their line of the digest, `turn`, which maps groups to slots,
// and the part of the sign's hash that does not depend on the thread.
struct RowFacts {
    u32 hash, turn, seed, spare;
};

// For the four batches from `batch` on, one row for each lane; `scale` is the unit of `turn`.
__device__ __forceinline__ void prepare(RowFacts *facts, const Rows &rows, u32 batch, u32 slot, u32 scale) {
    u32 lane = threadIdx.x & 31, row = first_row(rows, batch + lane / BATCH) + lane % BATCH;
#if PLACED
    row += rows.base;
#endif
    u32 turn = mix(row ^ ROW_SEED) & (SLOTS - 1);
    u32 seed = (row / 4 * SLOTS) ^ SIGN_SEED;
    if (row >> 27) seed ^= mix(row >> 27);  // the high word of the hashed number
    RowFacts mine = {};
    mine.hash = line_hash(u64(row) * BYTES + WORDS * slot / 256);  // the same for a warp: WORDS is at most 8
    mine.turn = turn * scale;
    mine.seed = seed ^ (seed >> 16);
    __syncwarp();
    facts[lane] = mine;
    __syncwarp();
}

// The thread's part of `sign_bits`, for all four rows.
__device__ __forceinline__ u32 signs_of(u32 seed, u32 slot) {
    u32 x = (seed ^ slot) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

struct Quick {
    float sketch[8];
    float about, sum, squares, l1, zeros, low, high;
    double sums, many_squares, many_l1;
    u64 digest;
};

__device__ __forceinline__ void add_group(const u32 *w, u32 signs, Quick &q) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        float x = fast_value(w, j);
        float d = x - q.about;
        q.sum += d;
        q.squares = fmaf(d, d, q.squares);
        q.l1 += fabsf(x);
        q.sketch[j] += __uint_as_float(__float_as_uint(x) ^ ((signs << (31 - j)) & 0x80000000u));
        q.low = fminf(q.low, x);
        q.high = fmaxf(q.high, x);
        q.zeros += x == 0.0f ? 1.0f : 0.0f;
    }
}

template <int N>
__device__ __forceinline__ void add_rows(const Work &work, const u32 *weights, u32 slot, u32 row, const RowFacts *facts, Quick &q) {
    u32 w[N][WORDS];
#pragma unroll
    for (int k = 0; k < N; ++k) load(work, row + k, slot ^ facts[k].turn, w[k]);
#pragma unroll
    for (int k = 0; k < N; ++k) {
        RowFacts fact = facts[k];
        q.digest += weigh(w[k], weights, slot) * fact.hash;
        add_group(w[k], signs_of(fact.seed, slot) >> 8 * ((row + k) % 4), q);
    }
    q.sums += double(q.sum), q.many_squares += double(q.squares), q.many_l1 += double(q.l1);
    q.sum = q.squares = q.l1 = 0;
}

// Adds all whole rows. Returns false if float32 cannot hold their sums.
__device__ FAST_CALL bool go_fast(const Work &work, const u32 *weights, RowFacts *facts, u32 slot, Rows rows, Sums &s) {
    Quick q;
#pragma unroll
    for (int j = 0; j < 8; ++j) q.sketch[j] = 0;
    q.sum = q.squares = q.l1 = q.zeros = 0;
    q.sums = q.many_squares = q.many_l1 = 0;
    q.digest = 0;
    q.low = __uint_as_float(0x7F800000u), q.high = __uint_as_float(0xFF800000u);
    u32 w[WORDS];
    load(work, first_row(rows, 0), slot, w);
    float sum = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += fast_value(w, j);
    q.about = fabsf(sum) < 1e30f ? sum * 0.125f : 0.0f;
    u32 batch = 0;
    for (; batch < rows.batches; ++batch) {
        if (batch % (STAGE / BATCH) == 0) prepare(facts, rows, batch, slot, 1);
        u32 row = first_row(rows, batch);
        const RowFacts *now = facts + BATCH * batch % STAGE;
        add_rows<BATCH / 2>(work, weights, slot, row, now, q);
        add_rows<BATCH / 2>(work, weights, slot, row + BATCH / 2, now + BATCH / 2, q);
    }
    if (rows.rest) {
        prepare(facts, rows, batch, slot, 1);
        for (u32 k = 0; k < rows.rest; ++k) add_rows<1>(work, weights, slot, rows.first + k, facts + k, q);
    }
    u32 count = 8 * whole_rows(rows);
    bool moved = q.low != q.about || q.high != q.about;
    bool lost = !(q.many_squares < 1e300) || (q.many_squares < 1e-26 && moved) || at_edge(q.low) || at_edge(q.high);
    if (__any_sync(~0u, lost)) return false;
#pragma unroll
    for (int j = 0; j < 8; ++j) s.sketch[j] = q.sketch[j];
    double shift = double(q.about) - s.about;
    s.sum = q.sums + count * shift;
    s.squares = q.many_squares + 2 * shift * q.sums + count * shift * shift;
    s.l1 = q.many_l1;
    s.low = q.low, s.high = q.high;
    s.digest = q.digest;
    s.zeros = u32(q.zeros);
    return true;
}
#endif
