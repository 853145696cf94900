// A tensor in memory: its rows and groups, and its division into pieces.

// A tensor to be read.
struct Work {
    const void *data;
    Partial *partials;
    u32 *probe;           // where this tensor's probe is stored
    const u32 *expected;  // the earlier probe, or null; if both are equal, nothing is read
    u64 elements;
    u32 pieces;           // number of pieces
    u32 each, left;       // batches of rows of half a piece, and number of halves with one more
    u32 first;            // number of its first piece among all pieces of the launch
#if PLACED
    u32 base, unused;     // the row of the whole that its first row is, a multiple of 4
#endif
#if LAYOUT == 3
    u32 dims, rows_each;      // `elements` counts those of rows: so many for each run
    u32 sizes[MOST_DIMS];     // of runs, innermost first
    i64 strides[MOST_DIMS];   // in elements: from one run to the next in memory,
    u64 steps[MOST_DIMS];     // and in the whole
    u64 offset, position;     // of the first run, in memory and in the whole
    u64 length;               // of each run
    u64 count;                // elements in memory, from `data` on
#elif LAYOUT
    u32 dims, spare;
    u32 sizes[MOST_DIMS];     // innermost first; of groups (LAYOUT 1) or elements (LAYOUT 2)
    i64 strides[MOST_DIMS];   // in elements
#endif
};

struct Works {
    const u32 *weights;
    u32 count, pieces;    // number of tensors, and of the pieces of all of them
    u32 *taken;           // number of pieces taken beyond those that the blocks begin with
    u32 *next;            // the same for the next launch
    Work list[MOST];
};

#if LAYOUT == 1 || LAYOUT == 2
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

#if LAYOUT == 3
// A row of the whole, and the positions in it that a run has: `begin` to `end`.
struct Window {
    u32 row, begin, end;
    i64 at;  // where the first position of the row would be in memory, in elements
};

__device__ __forceinline__ Window window_of(const Work &work, u32 number) {
    u32 run = number / work.rows_each, within = number - run * work.rows_each;
    u64 at = work.offset, position = work.position;
    for (u32 d = 0; d < work.dims; ++d) {
        u32 next = d + 1 < work.dims ? run / work.sizes[d] : 0, index = run - next * work.sizes[d];
        at += index * work.strides[d];
        position += index * work.steps[d];
        run = next;
    }
    Window window;
    window.row = u32(position / ROW) + within;
    u64 first = u64(window.row) * ROW, end = position + work.length;
    window.begin = position > first ? u32(position - first) : 0;
    window.end = end >= first + ROW ? ROW : end > first ? u32(end - first) : 0;
    window.at = i64(at) + i64(first) - i64(position);
    return window;
}

// The words of the elements of a group that a run has, padded with zeros. Returns a bit for each of them.
__device__ __forceinline__ u32 load_part(const Work &work, const Window &window, u32 group, u32 *w) {
    u32 first = 8 * group, present = 0;
    if (first >= window.end || first + 8 <= window.begin) return 0;
    const u8 *at = (const u8 *)work.data + (window.at + first) * BYTES;
    if (window.begin <= first && first + 8 <= window.end && u64(at) % (BYTES == 1 ? 8 : 16) == 0) {
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
        return 0xFF;
    }
#pragma unroll
    for (int k = 0; k < WORDS; ++k) w[k] = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        if (first + j < window.begin || first + j >= window.end) continue;
        present |= 1u << j;
#if BYTES == 1
        w[j >> 2] |= u32(at[j]) << (8 * (j & 3));
#elif BYTES == 2
        w[j >> 1] |= u32(((const u16 *)at)[j]) << (16 * (j & 1));
#elif BYTES == 4
        w[j] = ((const u32 *)at)[j];
#else
        w[2 * j] = ((const u32 *)at)[2 * j];
        w[2 * j + 1] = ((const u32 *)at)[2 * j + 1];
#endif
    }
    return present;
}
#else
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

// The words of a group that the end of the tensor truncates, padded with zeros. Returns its number of elements.
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

#endif

// The words of the first element, padded with zeros.
__device__ __forceinline__ void load_first(const Work &work, u32 *w) {
#pragma unroll
    for (int k = 0; k < WORDS; ++k) w[k] = 0;
    if (!work.elements) return;
#if BYTES == 1
    w[0] = read_here((const u8 *)work.data);
#elif BYTES == 2
    w[0] = read_here((const u16 *)work.data);
#else
#pragma unroll
    for (int k = 0; k < BYTES / 4; ++k) w[k] = read_here((const u32 *)work.data + k);
#endif
}

__device__ __forceinline__ u32 sign_bits(u32 row, u32 slot) {
    u32 seed = SIGN_SEED;
    if (row >> 27) seed ^= mix(row >> 27);  // the high word of the hashed number
    return mix((row / 4 * SLOTS + slot) ^ seed) >> 8 * (row % 4);
}

// Sum of words times weights, not yet multiplied by the line's hash.
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

// The rows of a piece that half a block reads: batches of eight rows, far apart and from the end of the tensor backwards,
// since the bytes written last are likely still in the cache. One half also takes the rows that do not fill a batch.
struct Rows {
    u32 last, step;     // the first batch to read, and the distance to the next one, which precedes it
    u32 batches;
    u32 rest, first;    // whole rows that do not fill a batch, and the first of them
    bool cut;           // whether a truncated row follows
#if PLACED
    u32 base;           // as in `Work`
#endif
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
#if PLACED
    rows.base = work.base;
#endif
    return rows;
}

// The first row of a batch; rows that do not fill a batch follow the batches.
__device__ __forceinline__ u32 first_row(const Rows &rows, u32 batch) {
    return batch < rows.batches ? (rows.last - batch * rows.step) * BATCH : rows.first;
}

__device__ __forceinline__ u32 whole_rows(const Rows &rows) { return rows.batches * BATCH + rows.rest; }

// The pieces that a block reads. It begins with two of its own and takes a further one each time it begins the last but one.
// Processors with faster access to memory thus read more than others, and all finish at about the same time. The result of a
// piece does not depend on the block that reads it.
struct Turns {
    u32 pieces[4];  // of the previous turn, this one and the next two

    __device__ __forceinline__ void begin() { pieces[0] = blockIdx.x, pieces[1] = blockIdx.x + gridDim.x; }
    __device__ __forceinline__ u32 piece(u32 turn) const { return pieces[turn % 4]; }
    __device__ __forceinline__ u32 take(const Works &works, u32 turn) const {
        return piece(turn + 1) < works.pieces ? 2 * gridDim.x + atomicAdd(works.taken, 1) : ~0u;
    }
};

// The tensor that a piece belongs to; all threads of a warp must call it.
__device__ __forceinline__ u32 tensor_of(const Work *list, u32 count, u32 piece) {
    if (MOST == 1) return 0;
    u32 begun = 0;
#pragma unroll
    for (u32 k = threadIdx.x & 31; k < (MOST + 31) / 32 * 32; k += 32) {
        begun += __popc(__ballot_sync(~0u, k < count && list[k].first <= piece));
    }
    return begun - 1;
}
