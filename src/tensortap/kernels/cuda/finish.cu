// Adds up the partial results of many tensors, in the order of their pieces. BLOCKS blocks work on a tensor: four of them on a
// quarter of its sketch each, the last one on all the rest. The latency of reading partial results dominates, so each thread
// loads several of them at once. It is compiled for THREADS in a block and at most MOST tensors.

#define QUARTER (BUCKETS / 4)
#define ABREAST (4 * THREADS / QUARTER)  // partial results that the threads read at a time, four buckets each
#define AT_ONCE 4                        // loads that each thread issues before it uses the first

struct Item {
    u32 first, pieces, slot, spare;
};

struct Batch {
    const Partial *partials;
    Result *results;
    Item items[MOST];
};

__device__ __forceinline__ void add_sketches(const Partial *partials, u32 pieces, float *sketch, u32 first) {
    __shared__ double of_warps[THREADS / 32][QUARTER];
    u32 thread = threadIdx.x, column = thread % (QUARTER / 4) * 4;
    double sums[4] = {};
    for (u32 k = thread / (QUARTER / 4); k < pieces; k += ABREAST * AT_ONCE) {
        float4 some[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            u32 piece = k + i * ABREAST;
            some[i] = piece < pieces ? *(const float4 *)(partials[piece].sketch + first + column) : make_float4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) sums[0] += some[i].x, sums[1] += some[i].y, sums[2] += some[i].z, sums[3] += some[i].w;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        sums[j] += __shfl_xor_sync(~0u, sums[j], 16);  // the other half of the warp has the same buckets
        if (thread % 32 < 16) of_warps[thread / 32][column + j] = sums[j];
    }
    __syncthreads();
    if (thread >= QUARTER) return;
    double bucket = 0;
#pragma unroll
    for (int k = 0; k < THREADS / 32; ++k) bucket += of_warps[k][thread];
    sketch[first + thread] = float(bucket);
}

struct Totals {
    double sum, squares, l1, low, high;
    u64 digest, nan, posinf, neginf, zeros, edge;
};

__device__ __forceinline__ void add_totals(Totals &t, const Totals &other) {
    t.sum += other.sum, t.squares += other.squares, t.l1 += other.l1;
    t.low = fmin(t.low, other.low), t.high = fmax(t.high, other.high);
    t.digest += other.digest;
    t.nan += other.nan, t.posinf += other.posinf, t.neginf += other.neginf, t.zeros += other.zeros;
    t.edge += other.edge;
}

__device__ __forceinline__ void add_shares(const Partial *partials, u32 pieces, Result *result) {
    __shared__ Totals of_warps[THREADS / 32];
    u32 thread = threadIdx.x;
    Totals t = {0, 0, 0, INF, -INF, 0, 0, 0, 0, 0, 0};
#pragma unroll 2
    for (u32 k = thread; k < pieces * WARPS; k += THREADS) {
        Share s = partials[k / WARPS].shares[k % WARPS];
        add_totals(t, {s.sum, s.squares, s.l1, s.low, s.high, s.digest, s.nan, s.posinf, s.neginf, s.zeros, s.edge});
    }
    t.sum = sum_of_warp(t.sum), t.squares = sum_of_warp(t.squares), t.l1 = sum_of_warp(t.l1);
    t.low = min_of_warp(t.low), t.high = -min_of_warp(-t.high);
    t.digest = sum_of_warp(t.digest), t.nan = sum_of_warp(t.nan), t.posinf = sum_of_warp(t.posinf);
    t.neginf = sum_of_warp(t.neginf), t.zeros = sum_of_warp(t.zeros), t.edge = sum_of_warp(t.edge);
    if (thread % 32 == 0) of_warps[thread / 32] = t;
    __syncthreads();
    if (thread) return;
#pragma unroll
    for (int k = 1; k < THREADS / 32; ++k) add_totals(t, of_warps[k]);
    result->about = partials->about, result->sum = t.sum, result->squares = t.squares, result->l1 = t.l1;
    result->low = t.low, result->high = t.high, result->digest = t.digest;
    result->nan = t.nan, result->posinf = t.posinf, result->neginf = t.neginf, result->zeros = t.zeros, result->edge = t.edge;
}

extern "C" __global__ void __launch_bounds__(THREADS) finish(const __grid_constant__ Batch batch) {
    const Item &item = batch.items[blockIdx.x / BLOCKS];
    u32 part = blockIdx.x % BLOCKS;
    const Partial *partials = batch.partials + item.first;
    Result *result = batch.results + item.slot;
    bool unchanged = partials->unchanged;
    if (part == BLOCKS - 1 && threadIdx.x == 0) result->unchanged = unchanged;
    if (unchanged) return;
    if (part < BLOCKS - 1) add_sketches(partials, item.pieces, result->sketch, part * QUARTER);
    else add_shares(partials, item.pieces, result);
}
