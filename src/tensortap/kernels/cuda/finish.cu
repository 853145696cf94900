// Adds up the partial results of many tensors, four blocks a tensor, each in the order of its blocks.

#define THREADS 512
#define MOST 64
#define QUARTER 64
#define PARTS (THREADS / QUARTER)

struct Item {
    u32 first, blocks, slot, spare;
};

struct Batch {
    const Partial *partials;
    Result *results;
    Item items[MOST];
};

extern "C" __global__ void __launch_bounds__(THREADS) finish(const __grid_constant__ Batch batch) {
    __shared__ double buckets[PARTS][QUARTER];
    __shared__ double doubles[THREADS / 32][5];
    __shared__ u64 wholes[THREADS / 32][5];
    Item item = batch.items[blockIdx.x / 4];
    u32 quarter = blockIdx.x % 4;
    const Partial *partials = batch.partials + item.first;
    Result *result = batch.results + item.slot;
    u32 thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, column = thread % QUARTER;
    if (partials->unchanged) {
        if (quarter == 0 && thread == 0) result->unchanged = 1;
        return;
    }
    double bucket = 0;
#pragma unroll 8
    for (u32 k = thread / QUARTER; k < item.blocks; k += PARTS) bucket += partials[k].sketch[quarter * QUARTER + column];
    buckets[thread / QUARTER][column] = bucket;
    __syncthreads();
    if (thread < QUARTER) {
        for (int k = 1; k < PARTS; ++k) bucket += buckets[k][thread];
        result->sketch[quarter * QUARTER + thread] = float(bucket);
    }
    if (quarter) return;

    double sum = 0, squares = 0, l1 = 0, low = INF, high = -INF;
    u64 digest = 0, nan = 0, posinf = 0, neginf = 0, zeros = 0;
    for (u32 k = thread; k < item.blocks * WARPS; k += THREADS) {
        const Share &p = partials[k / WARPS].shares[k % WARPS];
        sum += p.sum, squares += p.squares, l1 += p.l1;
        low = fmin(low, p.low), high = fmax(high, p.high);
        digest += p.digest;
        nan += p.nan, posinf += p.posinf, neginf += p.neginf, zeros += p.zeros;
    }
    sum = sum_of_warp(sum), squares = sum_of_warp(squares), l1 = sum_of_warp(l1);
    low = min_of_warp(low), high = -min_of_warp(-high);
    digest = sum_of_warp(digest), nan = sum_of_warp(nan), posinf = sum_of_warp(posinf);
    neginf = sum_of_warp(neginf), zeros = sum_of_warp(zeros);
    if (lane == 0) {
        doubles[warp][0] = sum, doubles[warp][1] = squares, doubles[warp][2] = l1;
        doubles[warp][3] = low, doubles[warp][4] = high;
        wholes[warp][0] = digest, wholes[warp][1] = nan, wholes[warp][2] = posinf;
        wholes[warp][3] = neginf, wholes[warp][4] = zeros;
    }
    __syncthreads();
    if (thread) return;
    for (int k = 1; k < THREADS / 32; ++k) {
        sum += doubles[k][0], squares += doubles[k][1], l1 += doubles[k][2];
        low = fmin(low, doubles[k][3]), high = fmax(high, doubles[k][4]);
        digest += wholes[k][0], nan += wholes[k][1], posinf += wholes[k][2];
        neginf += wholes[k][3], zeros += wholes[k][4];
    }
    result->about = partials->about, result->sum = sum, result->squares = squares, result->l1 = l1;
    result->low = low, result->high = high;
    result->digest = digest, result->nan = nan, result->posinf = posinf, result->neginf = neginf, result->zeros = zeros;
    result->unchanged = 0;
}
