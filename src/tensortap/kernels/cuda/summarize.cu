// The summary of a tensor in one read of its memory. `kernels/reference.py` defines every number.
//
// 128 threads work on a row of 1024 elements, each on the 8 neighbours that one hash signs. A thread owns one slot of
// the sketch: it loads the group that this row's permutation puts there, so its eight bucket sums stay in registers and
// nothing is gathered or added atomically. Blocks leave partial results; `finish` adds those of many tensors in one launch
// and in a fixed order, so the same tensor always gives the same bits.
//
// There are three ways through a block's rows, and each leaves what it cannot do to the next:
//   packed  16-bit floats, two to a word. Signs, zeros, lowest and highest are found on both at once, and a thread's four
//           words are just its part of a 16 x 16 matrix as the tensor cores want it, so these add up the sketch (times the
//           identity) and the sum (times ones). Fails on what is not finite, over- or underflows, or is far from 0 compared
//           with its spread.
//   fast    float32 sums of a few rows about a value near the thread's own elements, carried on in float64. Fails on what
//           is not finite, over- or underflows.
//   slow    element by element in float64. Never fails.
// Compiled at run time with ELEMENT (a code below) and LAYOUT (0 rows as they lie in memory, 1 whole groups at strides,
// 2 single elements at strides).

#define BF16 0
#define F16 1
#define F32 2
#define F64 3
#define E4M3 4
#define E5M2 5
#define I8 6
#define I16 7
#define I32 8
#define I64 9
#define U8 10
#define U16 11
#define U32 12
#define U64 13

#if ELEMENT == F64 || ELEMENT == I64 || ELEMENT == U64
#define BYTES 8
#elif ELEMENT == F32 || ELEMENT == I32 || ELEMENT == U32
#define BYTES 4
#elif ELEMENT == BF16 || ELEMENT == F16 || ELEMENT == I16 || ELEMENT == U16
#define BYTES 2
#else
#define BYTES 1
#endif
// Elements that float32 holds exactly can go the fast way.
#define FAST (BYTES < 4 || ELEMENT == F32)
#define PACKED ((ELEMENT == BF16 || ELEMENT == F16) && LAYOUT < 2 && __CUDA_ARCH__ >= 900)

#define THREADS 256
#define SLOTS 128
#define ROW 1024
#define WORDS (2 * BYTES)      // 32-bit words in a group of 8 elements
#define BATCH 8                // rows of packed numbers that are added together
#define STAGE 32               // rows whose hashes a warp works out at a time, one a lane
#define MOST_DIMS 6

#define SIGN_SEED 0x9E3779B9u
#define ROW_SEED 0x85EBCA6Bu
#define GOLDEN 0x9E3779B97F4A7C15ull

#if PACKED
#define FAST_CALL __noinline__
#else
#define FAST_CALL __forceinline__
#endif

struct Work {
    const void *data;
    Partial *partials;
    const u32 *weights;
    u32 *probe;           // the probe of this tensor: written, or compared with where `expected` says so
    const u32 *expected;
    u64 elements;
    u32 rows_each;        // for half a block
    u32 blocks;
    u32 dims, spare;
    u32 sizes[MOST_DIMS];     // innermost first; of groups (LAYOUT 1) or elements (LAYOUT 2)
    i64 strides[MOST_DIMS];   // in elements
};

__device__ __forceinline__ u32 mix(u32 x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

__device__ __forceinline__ u64 row_hash(u64 row) {
    u64 z = row + GOLDEN;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return (z ^ (z >> 31)) | 1ull;
}

__device__ __forceinline__ float half_to_float(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ __forceinline__ float e4m3_to_float(u32 bits) {
    u32 sign = (bits & 0x80u) << 24, magnitude = bits & 0x7Fu;
    if (magnitude == 0x7Fu) return __uint_as_float(0x7FC00000u);
    float value = magnitude < 8 ? float(magnitude) * 0.001953125f : __uint_as_float((magnitude << 20) + (120u << 23));
    return __uint_as_float(__float_as_uint(value) | sign);
}

// Element j of a group, from its words.
__device__ __forceinline__ float fast_value(const u32 *w, int j) {
#if ELEMENT == BF16
    return __uint_as_float(j & 1 ? w[j >> 1] & 0xFFFF0000u : w[j >> 1] << 16);
#elif ELEMENT == F16
    return half_to_float(u16(j & 1 ? w[j >> 1] >> 16 : w[j >> 1]));
#elif ELEMENT == F32
    return __uint_as_float(w[j]);
#elif ELEMENT == I16
    return float(short(w[j >> 1] >> (16 * (j & 1))));
#elif ELEMENT == U16
    return float(u16(w[j >> 1] >> (16 * (j & 1))));
#else
    u32 byte = (w[j >> 2] >> (8 * (j & 3))) & 0xFFu;
#if ELEMENT == E4M3
    return e4m3_to_float(byte);
#elif ELEMENT == E5M2
    return half_to_float(u16(byte << 8));
#elif ELEMENT == I8
    return float((signed char)byte);
#else
    return float(byte);
#endif
#endif
}

__device__ __forceinline__ double value(const u32 *w, int j) {
#if FAST
    return double(fast_value(w, j));
#elif BYTES == 4
    return ELEMENT == I32 ? double(int(w[j])) : double(w[j]);
#else
    u64 bits = w[2 * j] | u64(w[2 * j + 1]) << 32;
    return ELEMENT == F64 ? __longlong_as_double(i64(bits)) : ELEMENT == I64 ? double(i64(bits)) : double(bits);
#endif
}

__device__ __forceinline__ i64 place(const Work &work, u64 index) {
    i64 offset = 0;
    for (u32 d = 0; d + 1 < work.dims; ++d) {
        u64 next = index / work.sizes[d];
        offset += i64(index - next * work.sizes[d]) * work.strides[d];
        index = next;
    }
    return work.dims ? offset + i64(index) * work.strides[work.dims - 1] : 0;
}

#if LAYOUT < 2
__device__ __forceinline__ const u8 *address(const Work &work, u32 row, u32 group) {
    u64 g = u64(row) * SLOTS + group;
    return (const u8 *)work.data + (LAYOUT == 1 ? place(work, g) * BYTES : i64(g * (8 * BYTES)));
}
#endif

// What is read here is not read again by the same processor: it need not stay in its cache.
__device__ __forceinline__ uint4 read(const uint4 *at) {
    uint4 v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}

// The words of a whole group.
__device__ __forceinline__ void load(const Work &work, u32 row, u32 group, u32 *w) {
#if LAYOUT == 2
    u64 g = u64(row) * SLOTS + group;
    const u8 *base = (const u8 *)work.data;
#pragma unroll
    for (int k = 0; k < WORDS; ++k) w[k] = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const u8 *at = base + place(work, 8 * g + j) * BYTES;
#if BYTES == 1
        w[j >> 2] |= u32(*at) << (8 * (j & 3));
#elif BYTES == 2
        w[j >> 1] |= u32(*(const u16 *)at) << (16 * (j & 1));
#elif BYTES == 4
        w[j] = *(const u32 *)at;
#else
        w[2 * j] = ((const u32 *)at)[0];
        w[2 * j + 1] = ((const u32 *)at)[1];
#endif
    }
#else
    const u8 *at = address(work, row, group);
#if BYTES == 1
    uint2 v = __ldg((const uint2 *)at);
    w[0] = v.x, w[1] = v.y;
#else
#pragma unroll
    for (int k = 0; k < WORDS; k += 4) {
        uint4 v = read((const uint4 *)at + k / 4);
        w[k] = v.x, w[k + 1] = v.y, w[k + 2] = v.z, w[k + 3] = v.w;
    }
#endif
#endif
}

// The words of a group that the tensor's end cuts off, zeros behind it. Returns how many elements it has.
__device__ __noinline__ int load_cut(const Work &work, u32 row, u32 group, u32 *w) {
    u64 first = (u64(row) * SLOTS + group) * 8;
    if (first >= work.elements) return 0;
    u64 left = work.elements - first;
    int count = left < 8 ? int(left) : 8;
    for (int k = 0; k < WORDS; ++k) w[k] = 0;
    for (int j = 0; j < count; ++j) {
#if LAYOUT == 2
        i64 at = place(work, first + j);
#elif LAYOUT == 1
        i64 at = place(work, first / 8) + j;
#else
        i64 at = i64(first) + j;
#endif
#if BYTES == 1
        w[j >> 2] |= u32(((const u8 *)work.data)[at]) << (8 * (j & 3));
#elif BYTES == 2
        w[j >> 1] |= u32(((const u16 *)work.data)[at]) << (16 * (j & 1));
#elif BYTES == 4
        w[j] = ((const u32 *)work.data)[at];
#else
        w[2 * j] = ((const u32 *)work.data)[2 * at];
        w[2 * j + 1] = ((const u32 *)work.data)[2 * at + 1];
#endif
    }
    return count;
}

__device__ __forceinline__ u32 sign_bits(u32 row, u32 group) {
    u32 seed = SIGN_SEED;
    if (row >> 25) seed ^= mix(row >> 25);  // the high word of a group's number past 2^32
    return mix((row * SLOTS + group) ^ seed);
}

// Words times weights, summed; the row's hash is still to be multiplied in.
__device__ __forceinline__ u64 weigh(const u32 *w, const u32 *weights, u32 group) {
    const u32 *a = weights + (WORDS * group) % 256;
    u64 sum = 0;
#if BYTES == 1
    uint2 v = *(const uint2 *)a;
    sum = u64(w[0]) * v.x + u64(w[1]) * v.y;
#else
#pragma unroll
    for (int k = 0; k < WORDS; k += 4) {
        uint4 v = *(const uint4 *)(a + k);
        sum += u64(w[k]) * v.x;
        sum += u64(w[k + 1]) * v.y;
        sum += u64(w[k + 2]) * v.z;
        sum += u64(w[k + 3]) * v.w;
    }
#endif
    return sum;
}

struct Sums {
    float sketch[8];
    double about, sum, squares, l1, low, high;
    u64 digest;
    u32 nan, posinf, neginf, zeros;
};

__device__ __forceinline__ void clear(Sums &s) {
#pragma unroll
    for (int j = 0; j < 8; ++j) s.sketch[j] = 0;
    s.sum = s.squares = s.l1 = 0;
    s.low = INF, s.high = -INF;
    s.digest = 0;
    s.nan = s.posinf = s.neginf = s.zeros = 0;
}

// From sums about 0 to sums about `about`.
__device__ __forceinline__ void move(Sums &s, double count) {
    s.squares += count * s.about * s.about - 2 * s.about * s.sum;
    s.sum -= count * s.about;
}

// The sure way: rows from `row` to `end`, the last of which may be cut off.
__device__ __noinline__ void go_slowly(const Work &work, const u32 *weights, u32 slot, u32 row, u32 end, Sums &s) {
    u32 w[WORDS];
    double sketch[8];
    for (int j = 0; j < 8; ++j) sketch[j] = s.sketch[j];
    for (; row < end; ++row) {
        u32 group = slot ^ (mix(row ^ ROW_SEED) & (SLOTS - 1));
        int count = 8;
        if ((u64(row) + 1) * ROW <= work.elements) load(work, row, group, w);
        else count = load_cut(work, row, group, w);
        if (!count) continue;
        s.digest += weigh(w, weights, group) * row_hash(u64(row) * BYTES + (WORDS * group) / 256);
        u32 signs = sign_bits(row, group);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            if (j >= count) continue;
            double x = value(w, j);
            if (x != x) { ++s.nan; continue; }
            if (x == INF) { ++s.posinf; continue; }
            if (x == -INF) { ++s.neginf; continue; }
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
    for (int j = 0; j < 8; ++j) s.sketch[j] = float(sketch[j]);
}

#if FAST
// What all of a warp's threads need of a row: the row's hash for the digest, `turn`, which permutes its groups, and the part
// of the sign's hash that does not depend on the thread.
struct RowFacts {
    u64 hash;
    u32 turn, seed;
};

__device__ __forceinline__ void prepare(RowFacts *facts, u32 row, u32 slot) {
    row += threadIdx.x & 31;
    u32 turn = mix(row ^ ROW_SEED) & (SLOTS - 1);
    u32 seed = (row * SLOTS) ^ SIGN_SEED ^ turn;
    if (row >> 25) seed ^= mix(row >> 25);  // the high word of a group's number past 2^32
    RowFacts mine;
    mine.hash = row_hash(u64(row) * BYTES + WORDS * (slot ^ turn) / 256);  // the same for a warp: WORDS is at most 8
    mine.turn = turn;
    mine.seed = seed ^ (seed >> 16);
    __syncwarp();
    facts[threadIdx.x & 31] = mine;
    __syncwarp();
}

// As `sign_bits`, from where the thread comes in.
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
        q.digest += weigh(w[k], weights, slot ^ fact.turn) * fact.hash;
        add_group(w[k], signs_of(fact.seed, slot), q);
    }
    q.sums += double(q.sum), q.many_squares += double(q.squares), q.many_l1 += double(q.l1);
    q.sum = q.squares = q.l1 = 0;
}

// Whole rows from `row` to `end`. False if what it met is not for float32.
__device__ FAST_CALL bool go_fast(const Work &work, const u32 *weights, RowFacts *facts, u32 slot, u32 row, u32 end, Sums &s) {
    Quick q;
#pragma unroll
    for (int j = 0; j < 8; ++j) q.sketch[j] = 0;
    q.sum = q.squares = q.l1 = q.zeros = 0;
    q.sums = q.many_squares = q.many_l1 = 0;
    q.digest = 0;
    q.low = __uint_as_float(0x7F800000u), q.high = __uint_as_float(0xFF800000u);
    u32 w[WORDS];
    load(work, row, slot, w);
    float sum = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += fast_value(w, j);
    q.about = fabsf(sum) < 1e30f ? sum * 0.125f : 0.0f;
    u32 count = 8 * (end - row);
    while (row < end) {
        prepare(facts, row, slot);
        u32 some = end - row < STAGE ? end - row : STAGE, at = 0;
        for (; at + 4 <= some; at += 4) add_rows<4>(work, weights, slot, row + at, facts + at, q);
        for (; at < some; ++at) add_rows<1>(work, weights, slot, row + at, facts + at, q);
        row += some;
    }
    bool lost = !(q.many_squares < 1e300) || (q.many_squares < 1e-26 && q.low != q.high);
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

#if PACKED
#if ELEMENT == BF16
#define PAIRS "bf16x2"
#define NUMBERS "bf16"
#define ONE 0x3F80u
#define LARGEST 0x7F7F7F7Fu
#else
#define PAIRS "f16x2"
#define NUMBERS "f16"
#define ONE 0x3C00u
#define LARGEST 0x7BFF7BFFu
#endif

__device__ __forceinline__ u32 pair_min(u32 a, u32 b) {
    asm("min." PAIRS " %0, %1, %2;" : "=r"(a) : "r"(a), "r"(b));
    return a;
}

__device__ __forceinline__ u32 pair_max(u32 a, u32 b) {
    asm("max." PAIRS " %0, %1, %2;" : "=r"(a) : "r"(a), "r"(b));
    return a;
}

// 1 where an element is zero, else 0, both as elements.
__device__ __forceinline__ u32 pair_zero(u32 a) {
    asm("set.eq." PAIRS "." PAIRS " %0, %1, %2;" : "=r"(a) : "r"(a), "r"(0));
    return a;
}

__device__ __forceinline__ u32 pair_add(u32 a, u32 b) {
    asm("add." PAIRS " %0, %1, %2;" : "=r"(a) : "r"(a), "r"(b));
    return a;
}

// c += A B. Of the words of all threads, words 0 and 2 of threads 4 i to 4 i + 3 are row i of A, 16 x 16, words 1 and 3 row
// i + 8. B is 16 x 8; a thread's two words are rows 2 (lane % 4) and the next, and those + 8, of column lane / 4. c is 16 x 8;
// a thread has columns 2 (lane % 4) and the next, of rows lane / 4 and lane / 4 + 8.
__device__ __forceinline__ void multiply(float *c, const u32 *a, u32 b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." NUMBERS "." NUMBERS ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %8}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b));
}

// The same with half of A. Times the identity, each thread gets its own elements back.
__device__ __forceinline__ void multiply_half(float *c, u32 a0, u32 a1, u32 b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32." NUMBERS "." NUMBERS ".f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(b));
}

struct Packed {
    u32 identity, first, second;  // this thread's words of the matrices: the latter have a column of ones
    float tile[8], sum[4];        // of a few rows, as the tensor cores add them up
    float squares;
    u32 zero, low, high;          // pairs
    float sketch[8], zeros;
    double sums, many_squares, many_l1;
    u64 digest;
};

__device__ __forceinline__ void add_pairs(const u32 *w, u32 signs, Packed &p) {
    u32 y[4], magnitudes[4];
    signs &= 255;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        // Bits 2 k and 2 k + 1 of the signs, moved to the two sign bits; eight bits twice do not overlap.
        u32 moved = signs * ((1u << (15 - 2 * k)) + (1u << (30 - 2 * k)));
        y[k] = w[k] ^ (moved & 0x80008000u);
        magnitudes[k] = w[k] & 0x7FFF7FFFu;
        p.zero = pair_add(p.zero, pair_zero(w[k]));
        p.low = pair_min(p.low, w[k]);
        p.high = pair_max(p.high, w[k]);
    }
    multiply_half(p.tile, y[0], y[1], p.identity);
    multiply_half(p.tile + 4, y[2], y[3], p.identity);
    multiply(p.sum, w, p.first);
    multiply(p.sum, magnitudes, p.second);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        float x = fast_value(w, j);
        p.squares = fmaf(x, x, p.squares);
    }
}

// The tensor cores cut off where others round: they add up a few rows only, then it goes on in better hands.
__device__ __forceinline__ void carry(Packed &p) {
#pragma unroll
    for (int j = 0; j < 8; ++j) p.sketch[j] += p.tile[j], p.tile[j] = 0;
    p.sums += double(p.sum[0] + p.sum[2]), p.many_l1 += double(p.sum[1] + p.sum[3]);
    p.many_squares += double(p.squares);
    p.squares = 0;
    p.zeros += fast_value(&p.zero, 0) + fast_value(&p.zero, 1);
    p.sum[0] = p.sum[1] = p.sum[2] = p.sum[3] = 0;
    p.zero = 0;
}

template <int N>
__device__ __forceinline__ void add_packed(const Work &work, const u32 *weights, u32 slot, u32 row, const RowFacts *facts, Packed &p) {
    u32 w[N][WORDS];
#pragma unroll
    for (int k = 0; k < N; ++k) load(work, row + k, slot ^ facts[k].turn, w[k]);
#pragma unroll
    for (int k = 0; k < N; ++k) {
        RowFacts fact = facts[k];
        p.digest += weigh(w[k], weights, slot ^ fact.turn) * fact.hash;
        add_pairs(w[k], signs_of(fact.seed, slot), p);
    }
    carry(p);
}

// Whole rows from `row` to `end`. False if what it met needs more care.
__device__ __forceinline__ bool go_packed(const Work &work, const u32 *weights, RowFacts *facts, u32 slot, u32 row, u32 end, Sums &s) {
    u32 lane = threadIdx.x & 31;
    Packed p;
    p.identity = lane / 4 == 2 * (lane % 4) ? ONE : lane / 4 == 2 * (lane % 4) + 1 ? ONE << 16 : 0;
    p.first = lane / 4 == 0 ? ONE | ONE << 16 : 0, p.second = lane / 4 == 1 ? ONE | ONE << 16 : 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) p.sketch[j] = p.tile[j] = 0;
    p.sum[0] = p.sum[1] = p.sum[2] = p.sum[3] = p.zeros = 0;
    p.squares = 0;
    p.sums = p.many_squares = p.many_l1 = 0;
    p.digest = 0;
    p.zero = 0, p.low = LARGEST, p.high = LARGEST | 0x80008000u;
    double count = 256.0 * (end - row);
    while (row < end) {
        prepare(facts, row, slot);
        u32 some = end - row < STAGE ? end - row : STAGE, at = 0;
        for (; at + BATCH <= some; at += BATCH) add_packed<BATCH>(work, weights, slot, row + at, facts + at, p);
        for (; at + 3 <= some; at += 3) add_packed<3>(work, weights, slot, row + at, facts + at, p);
        for (; at < some; ++at) add_packed<1>(work, weights, slot, row + at, facts + at, p);
        row += some;
    }
    float low = fminf(fast_value(&p.low, 0), fast_value(&p.low, 1)), high = fmaxf(fast_value(&p.high, 0), fast_value(&p.high, 1));
    // These sums are the warp's, and lie in every fourth thread.
    double sum = lane % 4 == 0 ? p.sums : 0.0, all = sum, squares = p.many_squares;
#pragma unroll
    for (int d = 16; d; d >>= 1) {
        all += __shfl_xor_sync(~0u, all, d);
        squares += __shfl_xor_sync(~0u, squares, d);
    }
    double spread = squares - all * all / count;
    bool lost = !(squares < 1e300) || (squares < 1e-24 && low != high) || spread * 16 < squares;
    if (__any_sync(~0u, lost)) return false;
#pragma unroll
    for (int j = 0; j < 8; ++j) s.sketch[j] = p.sketch[j];
    s.sum = sum, s.squares = p.many_squares, s.l1 = lane % 4 == 0 ? p.many_l1 : 0.0;
    s.low = low, s.high = high;
    s.digest = p.digest;
    s.zeros = u32(p.zeros);
    return true;
}
#endif

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
    __shared__ float buckets[THREADS][9];  // 9: no two threads of a warp in one bank
    __shared__ u32 same;
#if FAST
    __shared__ __align__(16) RowFacts facts[WARPS][STAGE];
#endif
    u32 thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, slot = thread & (SLOTS - 1);
    Partial *partial = work.partials + blockIdx.x;
    u32 rows = u32((work.elements + ROW - 1) / ROW), whole = u32(work.elements / ROW);
    u64 begin = (u64(blockIdx.x) * 2 + thread / SLOTS) * work.rows_each;
    u32 row = begin < rows ? u32(begin) : rows;
    u32 end = begin + work.rows_each < rows ? u32(begin + work.rows_each) : rows;
#if FAST
    u32 full = end < whole ? end : whole;
#endif
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
    u32 first_words[WORDS] = {};
    if (whole) load(work, 0, 0, first_words);
    else if (work.elements) load_cut(work, 0, 0, first_words);
    weights[thread] = work.weights[thread];
    __syncthreads();
    Sums s;
    clear(s);
#if FAST
    bool done = false;
#endif
#if PACKED
    if (row < full) done = go_packed(work, weights, facts[warp], slot, row, full, s);
#endif
    double about = value(first_words, 0);
    s.about = fabs(about) < 1e300 ? about : 0;
#if PACKED
    if (done) move(s, 8 * (full - row));
#endif
#if FAST
    if (row < full && !done) done = go_fast(work, weights, facts[warp], slot, row, full, s);
    if (done) row = full;
#endif
    if (row < end) go_slowly(work, weights, slot, row, end, s);

#pragma unroll
    for (int j = 0; j < 8; ++j) buckets[thread][j] = s.sketch[j];
    Share share;
    share.sum = sum_of_warp(s.sum), share.squares = sum_of_warp(s.squares), share.l1 = sum_of_warp(s.l1);
    share.low = min_of_warp(s.low), share.high = -min_of_warp(-s.high);
    share.digest = sum_of_warp(s.digest);
    share.zeros = sum_of_warp(s.zeros);
    share.nan = share.posinf = share.neginf = 0;
    if (__any_sync(~0u, s.nan | s.posinf | s.neginf))
        share.nan = sum_of_warp(s.nan), share.posinf = sum_of_warp(s.posinf), share.neginf = sum_of_warp(s.neginf);
    if (lane == 0) partial->shares[warp] = share;
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
