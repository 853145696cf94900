// The path that handles all rows: element by element in float64.

struct Sums {
    float sketch[8];
    double about, sum, squares, l1, low, high;
    u64 digest;
    u32 nan, posinf, neginf, zeros, edge;
};

__device__ __forceinline__ void clear(Sums &s) {
#pragma unroll
    for (int j = 0; j < 8; ++j) s.sketch[j] = 0;
    s.sum = s.squares = s.l1 = 0;
    s.low = INF, s.high = -INF;
    s.digest = 0;
    s.nan = s.posinf = s.neginf = s.zeros = s.edge = 0;
}

// Converts sums about 0 to sums about `about`.
__device__ __forceinline__ void move(Sums &s, double count) {
    s.squares += count * s.about * s.about - 2 * s.about * s.sum;
    s.sum -= count * s.about;
}

// Adds one row, which the end of the tensor may truncate.
__device__ __forceinline__ void add_slowly(const Work &work, const u32 *weights, u32 slot, u32 row, double *sketch, Sums &s) {
    u32 w[WORDS];
#if LAYOUT == 3
    Window window = window_of(work, row);
    row = window.row;
    u32 present = load_part(work, window, slot ^ (mix(row ^ ROW_SEED) & (SLOTS - 1)), w);
    if (!present) return;
#else
    u32 here = row;
#if PLACED
    row += work.base;
#endif
    u32 group = slot ^ (mix(row ^ ROW_SEED) & (SLOTS - 1));
    int elements = 8;
    if ((u64(here) + 1) * ROW <= work.elements) load(work, here, group, w);
    else elements = load_cut(work, here, group, w);
    if (!elements) return;
#endif
    s.digest += weigh(w, weights, slot) * line_hash(u64(row) * BYTES + (WORDS * slot) / 256);
    u32 signs = sign_bits(row, slot);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#if LAYOUT == 3
        if (!(present >> j & 1)) continue;
#else
        if (j >= elements) continue;
#endif
        double x = value(w, j);
        if (x != x) { ++s.nan; continue; }
        if (at_edge(x)) {  // or infinite: counts as 1 of its sign in the sketch
            sketch[j] += (signs >> j & 1) == (x > 0) ? -1 : 1;
            if (x == INF) { ++s.posinf; continue; }
            if (x == -INF) { ++s.neginf; continue; }
            ++s.edge;
            s.low = x < s.low ? x : s.low;
            s.high = x > s.high ? x : s.high;
            continue;
        }
        double d = x - s.about;
        s.sum += d;
        s.squares += d * d;
        s.l1 += fabs(x);
        s.low = x < s.low ? x : s.low;
        s.high = x > s.high ? x : s.high;
        s.zeros += x == 0;
        sketch[j] += signs >> j & 1 ? -x : x;
    }
}

// Adds all rows, or only the truncated one.
__device__ __noinline__ void go_slowly(const Work &work, const u32 *weights, u32 slot, Rows rows, bool all, Sums &s) {
    double sketch[8];
    for (int j = 0; j < 8; ++j) sketch[j] = s.sketch[j];
    for (u32 k = 0, count = all ? whole_rows(rows) : 0; k < count; ++k)
        add_slowly(work, weights, slot, first_row(rows, k / BATCH) + k % BATCH, sketch, s);
    if (rows.cut) add_slowly(work, weights, slot, u32(work.elements / ROW), sketch, s);
    for (int j = 0; j < 8; ++j) s.sketch[j] = float(sketch[j]);
}
