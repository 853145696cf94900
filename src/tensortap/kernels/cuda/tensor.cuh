// A tensor's elements, rows and groups: how they are found in memory, and what is hashed of them.
//
// Compiled at run time with ELEMENT (a code below), LAYOUT (0 rows as they lie in memory, 1 whole groups at strides, 2 single
// elements at strides), BLOCKS_EACH (at a time on one processor), MOST (tensors in one launch, more than one only as they
// lie), and PART and RING (see `packed.cuh`).

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
#define BATCH 8                // rows that are taken together
#define STAGE 32               // rows whose hashes a warp works out at a time, one a lane
#define MOST_DIMS 6

#define SIGN_SEED 0x27D4EB2Fu
#define ROW_SEED 0x85EBCA6Bu
#define GOLDEN 0x9E3779B97F4A7C15ull

#if PACKED
#define FAST_CALL __noinline__
#else
#define FAST_CALL __forceinline__
#endif

// A tensor to be read.
struct Work {
    const void *data;
    Partial *partials;
    u32 *probe;           // where this tensor's goes
    const u32 *expected;  // with what it was once, nothing is read; or null
    u64 elements;
    u32 pieces;           // into which it is divided
    u32 each, left;       // batches of rows for half a piece, and how many halves have one more
    u32 first;            // the number of its first piece, of all that the launch has
#if LAYOUT
    u32 dims, spare;
    u32 sizes[MOST_DIMS];     // innermost first; of groups (LAYOUT 1) or elements (LAYOUT 2)
    i64 strides[MOST_DIMS];   // in elements
#endif
};

struct Works {
    const u32 *weights;
    u32 count, pieces;    // tensors, and pieces of all of them
    u32 *taken;           // how many pieces were taken beyond those that the blocks begin with
    u32 *next;            // the same for the next launch
    Work list[MOST];
};

__device__ __forceinline__ u32 mix(u32 x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

__device__ __forceinline__ u32 line_hash(u64 line) {
    u64 z = line + GOLDEN;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return u32(z ^ (z >> 31)) | 1u;
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

#if LAYOUT
__device__ __forceinline__ i64 place(const Work &work, u64 index) {
    i64 offset = 0;
    for (u32 d = 0; d + 1 < work.dims; ++d) {
        u64 next = index / work.sizes[d];
        offset += i64(index - next * work.sizes[d]) * work.strides[d];
        index = next;
    }
    return work.dims ? offset + i64(index) * work.strides[work.dims - 1] : 0;
}
#endif

#if LAYOUT < 2
__device__ __forceinline__ const u8 *address(const Work &work, u32 row, u32 group) {
    u64 g = u64(row) * SLOTS + group;
#if LAYOUT == 1
    return (const u8 *)work.data + place(work, g) * BYTES;
#else
    return (const u8 *)work.data + g * (8 * BYTES);
#endif
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

// The words of the first element, zeros behind it. Volatile, so that the load stays where it is written.
__device__ __forceinline__ void load_first(const Work &work, u32 *w) {
#pragma unroll
    for (int k = 0; k < WORDS; ++k) w[k] = 0;
    if (!work.elements) return;
#if BYTES == 1
    asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(w[0]) : "l"(work.data));
#elif BYTES == 2
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=r"(w[0]) : "l"(work.data));
#else
#pragma unroll
    for (int k = 0; k < BYTES / 4; ++k) asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(w[k]) : "l"((const u32 *)work.data + k));
#endif
}

__device__ __forceinline__ u32 sign_bits(u32 row, u32 slot) {
    u32 seed = SIGN_SEED;
    if (row >> 27) seed ^= mix(row >> 27);  // the high word of what is hashed
    return mix((row / 4 * SLOTS + slot) ^ seed) >> 8 * (row % 4);
}

// Words times weights, summed; the line's hash is still to be multiplied in.
__device__ __forceinline__ u64 weigh(const u32 *w, const u32 *weights, u32 slot) {
    const u32 *a = weights + (WORDS * slot) % 256;
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

// What half a block reads of a piece: batches of eight rows, far apart and from the tensor's end on, since what was written
// last is likely to lie in the cache still. One half takes the rows that make no batch, too.
struct Rows {
    u32 last, step;     // the first batch to be read, and how many batches before it the next one is
    u32 batches;
    u32 rest, first;    // whole rows that make no batch, and the first of them
    bool cut;           // whether a row follows that the tensor's end cuts off
};

__device__ __forceinline__ Rows rows_of_half(const Work &work, u32 piece) {
    u32 half = 2 * piece + threadIdx.x / SLOTS;
    u32 whole = u32(work.elements / ROW), full = whole / BATCH;
    Rows rows;
    rows.last = full - 1 - half, rows.step = 2 * work.pieces;
    rows.batches = work.each + (half < work.left);
    bool last = half == work.left;
    rows.first = full * BATCH;
    rows.rest = last ? whole - rows.first : 0;
    rows.cut = last && work.elements % ROW;
    return rows;
}

// The first row of a batch; behind the batches come the rows that make none.
__device__ __forceinline__ u32 first_row(const Rows &rows, u32 batch) {
    return batch < rows.batches ? (rows.last - batch * rows.step) * BATCH : rows.first;
}

__device__ __forceinline__ u32 whole_rows(const Rows &rows) { return rows.batches * BATCH + rows.rest; }

// Which pieces a block reads. It begins with two that are its own; each further one it takes when it begins with the last
// but one before it. So processors that are nearer to the memory, or have more of it to themselves, read more than others,
// and all end at about the same time. What is found in a piece does not depend on who reads it.
struct Turns {
    u32 pieces[4];  // of the turn before, this one and the next two

    __device__ __forceinline__ void begin() { pieces[0] = blockIdx.x, pieces[1] = blockIdx.x + gridDim.x; }
    __device__ __forceinline__ u32 piece(u32 turn) const { return pieces[turn % 4]; }
    __device__ __forceinline__ u32 take(const Works &works, u32 turn) const {
        return piece(turn + 1) < works.pieces ? 2 * gridDim.x + atomicAdd(works.taken, 1) : ~0u;
    }
};

// The tensor that a piece belongs to; asked by all threads of a warp.
__device__ __forceinline__ u32 tensor_of(const Work *list, u32 count, u32 piece) {
    u32 lane = threadIdx.x & 31;
    return MOST == 1 ? 0 : __popc(__ballot_sync(~0u, lane < count && list[lane].first <= piece)) - 1;
}
