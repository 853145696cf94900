// The summary of a tensor in one read of its memory. `kernels/reference.py` defines every number.
//
// 128 threads work on a row of 1024 elements, each on the 8 neighbours that one hash signs. A thread owns one slot of
// the sketch: it loads the group that this row's permutation puts there, so its eight bucket sums stay in registers and
// nothing is gathered or added atomically. Blocks leave partial results; `finish` adds those of many tensors in one launch
// and in a fixed order, so the same tensor always gives the same bits.
//
// There are three ways through a block's rows, and each leaves what it cannot do to the next:
//   packed  16-bit floats, two to a word, in float32 about 0; their rows come by themselves into shared memory. Fails on what
//           is not finite, over- or underflows, or is far from 0 compared with its spread.
//   fast    float32 sums of a few rows about a value near the thread's own elements, carried on in float64. Fails on what
//           is not finite, over- or underflows.
//   slow    element by element in float64. Never fails.

// A few elements, spread out, as one number: whether a tensor that was seen before is still the same.
__device__ __forceinline__ u32 look(const Work &work) {
    u32 lane = threadIdx.x & 31;
    u64 step = work.elements / 32;
    u64 index = step ? lane * step : lane;
    u32 bits = 0;
    if (index < work.elements) {
#if LAYOUT == 2
        i64 at = place(work, index);
#elif LAYOUT == 1
        i64 at = place(work, index / 8) + i64(index % 8);
#else
        i64 at = i64(index);
#endif
        const u8 *byte = (const u8 *)work.data + at * BYTES;
        for (int k = 0; k < BYTES; ++k) bits = mix(bits ^ byte[k] ^ (k << 8)) + 0x9E37u;
    }
    return sum_of_warp(mix(bits + lane * 0x85EBCA6Bu));
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_EACH) summarize(const __grid_constant__ Work work) {
    __shared__ __align__(16) u32 weights[256];
    extern __shared__ __align__(128) u8 room[];  // for rows that arrive, then for everybody's part of the sketch
    __shared__ u32 same;
#if FAST
    __shared__ __align__(16) RowFacts facts[WARPS][STAGE];
#endif
    u32 thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, slot = thread & (SLOTS - 1);
    Partial *partial = work.partials + blockIdx.x;
    Rows rows = rows_of_half(work, 2 * blockIdx.x + thread / SLOTS);
    if (blockIdx.x == work.blocks) {  // one block more than there is work for, so that nobody waits for the probe
        u32 seen = look(work);
        if (thread == 0) *work.probe = seen;
        return;
    }
    if (work.expected) {
        if (warp == 0) {
            u32 seen = look(work);
            if (lane == 0) same = *work.expected == seen;
        }
        __syncthreads();
        if (same) {
            if (thread == 0) partial->unchanged = 1;
            return;
        }
    }
#if PACKED
    __shared__ Bells bells[2];
    Source source(work, rows, room + thread / SLOTS * (RING / 2), &bells[thread / SLOTS]);
    source.begin();
#endif
    u32 weight, first[WORDS];  // the latter is needed last
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(weight) : "l"(work.weights + thread));
    load_first(work, first);
#if PACKED
    source.ask_first();
#endif
    weights[thread] = weight;
    __syncthreads();
    Sums s;
    clear(s);
    bool done = !whole_rows(rows);
#if PACKED
    bool packed = !done && go_packed(source, weights, facts[warp], slot, s);
    done |= packed;
#endif
    double about = value(first, 0);
    s.about = fabs(about) < 1e300 ? about : 0;
#if PACKED
    if (packed) move(s, 8 * whole_rows(rows));
#endif
#if FAST
    if (!done) done = go_fast(work, weights, facts[warp], slot, rows, s);
#endif
    if (!done || rows.cut) go_slowly(work, weights, slot, rows, !done, s);

    float (*buckets)[9] = (float (*)[9])room;  // 9: no two threads of a warp in one bank
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 8; ++j) buckets[thread][j] = s.sketch[j];
    Share *share = &partial->shares[warp];
    u64 added = sums_of_warp(s.sum, s.squares, s.l1, s.digest);
    if (lane % 8 == 0) ((u64 *)&share->sum)[lane / 8] = added;
#if FAST
    float low = min_of_warp(float(s.low)), high = -min_of_warp(float(-s.high));
#else
    double low = min_of_warp(s.low), high = -min_of_warp(-s.high);
#endif
    u32 zeros = count_of_warp(s.zeros), nan = 0, posinf = 0, neginf = 0;
    if (__any_sync(~0u, s.nan | s.posinf | s.neginf))
        nan = count_of_warp(s.nan), posinf = count_of_warp(s.posinf), neginf = count_of_warp(s.neginf);
    if (lane == 0) {
        share->low = low, share->high = high;
        share->nan = nan, share->posinf = posinf, share->neginf = neginf, share->zeros = zeros;
    }
    if (thread == 0) partial->about = s.about, partial->unchanged = 0;
    __syncthreads();
    // Bucket b gets element j of slot (b - 29 j) / 2: every second j, from both halves of the block.
    float bucket = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        u32 j = 2 * i + (thread & 1), from = ((thread - 29 * j) & 255) >> 1;
        bucket += buckets[from][j] + buckets[from + SLOTS][j];
    }
    partial->sketch[thread] = bucket;
}
