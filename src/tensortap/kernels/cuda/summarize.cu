// The summaries of one or more tensors, each in one read of its memory. `kernels/summary/reference.py` defines every number.
//
// 128 threads work on a row of 1024 elements, each on a group of 8 neighbours. A thread owns one slot: it loads the group that
// this row's permutation puts there. Its eight bucket sums stay in registers, the digest's weights are always the same, and
// there is no gather and no atomic addition. A tensor is divided into pieces, and each leaves a partial result. `finish` adds
// up those of many tensors in one launch and in a fixed order, so that a tensor always gives the same bits.
//
// There are three paths through a piece's rows; each falls back to the next:
//   packed  16-bit floats, two to a word, summed in float32 about 0; rows are copied asynchronously into shared memory.
//           Falls back on elements that are not ordinary, overflow, underflow, or a mean that is large compared with the spread.
//   fast    float32 sums of a few rows about a value near the thread's own elements, accumulated in float64. Falls back on
//           elements that are not ordinary, overflow or underflow.
//   slow    element by element in float64. Handles everything.

// Hash of a few scattered elements: shows whether a tensor has changed since it was last read.
__device__ __forceinline__ u32 probe_of(const Work &work) {
    u32 lane = threadIdx.x & 31;
#if LAYOUT == 3
    u64 elements = work.count;
#else
    u64 elements = work.elements;
#endif
    u64 step = elements / 32;
    u64 index = step ? lane * step + u64(lane) * 0x9E3779B1u % step : lane;  // not all of the same channel
    u32 bits = 0;
    if (index < elements) {
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

// Stores the partial result of a piece's rows for `finish`.
__device__ __forceinline__ void leave(const Sums &s, float (*buckets)[9], Partial *partial) {
    u32 thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
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
    u32 zeros = count_of_warp(s.zeros), nan = 0, posinf = 0, neginf = 0, edge = 0;
    if (__any_sync(~0u, s.nan | s.posinf | s.neginf | s.edge))
        nan = count_of_warp(s.nan), posinf = count_of_warp(s.posinf), neginf = count_of_warp(s.neginf), edge = count_of_warp(s.edge);
    if (lane == 0) {
        share->low = low, share->high = high;
        share->nan = nan, share->posinf = posinf, share->neginf = neginf, share->zeros = zeros, share->edge = edge;
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

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_EACH) summarize(const __grid_constant__ Works works) {
    __shared__ __align__(16) u32 weights[256];
    __shared__ float buckets[THREADS][9];  // 9: no two threads of a warp in one bank
#if QUICK
    __shared__ __align__(16) RowFacts facts[WARPS][STAGE];
#endif
    __shared__ Turns turns;
    u32 thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, slot = thread & (SLOTS - 1);
    u32 count = MOST == 1 ? 1 : works.count;
    if (thread == 0) turns.begin();
    if (blockIdx.x == gridDim.x - 1) {  // has nothing to read unless there are more pieces than other blocks
        for (u32 k = warp; k < count; k += WARPS) {
            u32 seen = probe_of(works.list[k]);
            if (lane == 0) *works.list[k].probe = seen;
        }
        if (thread == 0) *works.next = 0;
    }
#if MOST == 1
    const Work *list = works.list;
    if (list->expected) {
        __shared__ u32 same;
        if (warp == 0) {
            u32 seen = probe_of(*list);
            if (lane == 0) same = *list->expected == seen;
        }
        __syncthreads();
        if (same) {
            if (thread == 0 && blockIdx.x == 0) list->partials->unchanged = 1;
            return;
        }
    }
#else
    __shared__ Work list[MOST];  // the first access to a parameter has a high latency
    for (u32 k = thread; k < count * (sizeof(Work) / 4); k += THREADS) ((u32 *)list)[k] = ((const u32 *)works.list)[k];
#endif
    __syncthreads();
#if PACKED
    SHARED_RING;  // for rows that are copied asynchronously
    __shared__ Barriers barriers[2];
    Source source(list, works, turns, ring + thread / SLOTS * (RING / 2), &barriers[thread / SLOTS]);
    source.begin();
#endif
    u32 weight = read_here(works.weights + thread);
    for (u32 turn = 0, piece; (piece = turns.piece(turn)) < works.pieces; ++turn) {
        const Work &work = list[tensor_of(list, count, piece)];
        piece -= work.first;
        Rows rows = rows_of_half(work, piece);
        u32 first[WORDS], next;  // needed last
        load_first(work, first);
        if (thread == 0) next = turns.take(works, turn);
#if PACKED
        source.ask_ahead(turn);
#endif
        if (!turn) {
            weights[thread] = weight;
            __syncthreads();
        }
        Sums s;
        clear(s);
        bool done = !whole_rows(rows);
#if PACKED
        bool packed = !done && go_packed(source, turn, weights, facts[warp], slot, rows, s);
        done |= packed;
#endif
        double about = value(first, 0);
        s.about = fabs(about) < 1e300 && !at_edge(about) ? about : 0;
#if PACKED
        if (packed) move(s, 8 * whole_rows(rows));
#endif
        if (!done || rows.cut) {
            Sums careful = s;  // a copy, so that the original needs no address and stays in registers
#if QUICK
            if (!done) done = go_fast(work, weights, facts[warp], slot, rows, careful);
#endif
            if (!done || rows.cut) go_slowly(work, weights, slot, rows, !done, careful);
            s = careful;
        }
        if (turn) __syncthreads();  // the previous turn's content of `buckets` has been read
        if (thread == 0) turns.pieces[(turn + 2) % 4] = next;
        leave(s, buckets, work.partials + piece);
    }
}
