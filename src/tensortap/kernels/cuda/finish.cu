// Adds up the partial results of many tensors, one block a tensor, each in the order of its blocks.

#define THREADS 1024
#define WARPS (THREADS / 32)
#define MOST 64

struct Item {
    u32 first, blocks, slot, spare;
};

struct Batch {
    const Partial *partials;
    Result *results;
    Item items[MOST];
};

extern "C" __global__ void __launch_bounds__(THREADS) finish(const __grid_constant__ Batch batch) {
    __shared__ double quarters[4][256];
    __shared__ double doubles[WARPS][5];
    __shared__ u64 wholes[WARPS][5];
    Item item = batch.items[blockIdx.x];
    const Partial *partials = batch.partials + item.first;
    Result *result = batch.results + item.slot;
    u32 thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    if (partials->unchanged) {
        if (thread == 0) result->unchanged = 1;
        return;
    }
    double bucket = 0;
#pragma unroll 16
    for (u32 k = thread / 256; k < item.blocks; k += 4) bucket += partials[k].sketch[thread % 256];
    quarters[thread / 256][thread % 256] = bucket;

    double sum = 0, squares = 0, l1 = 0, low = INF, high = -INF;
    u64 digest = 0, nan = 0, posinf = 0, neginf = 0, zeros = 0;
    for (u32 k = thread; k < item.blocks; k += THREADS) {
        const Partial &p = partials[k];
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
    if (thread < 256)
        result->sketch[thread] = float((quarters[0][thread] + quarters[1][thread]) + (quarters[2][thread] + quarters[3][thread]));
    if (thread == 0) {
        for (int k = 1; k < WARPS; ++k) {
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
}
