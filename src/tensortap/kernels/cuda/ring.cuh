// Sources of rows of 16-bit floats, PART rows at a time.

#if PACKED
#define PARTS_EACH (BATCH / PART)

__device__ __forceinline__ u32 parts_of(const Rows &rows) { return rows.batches * PARTS_EACH + (rows.rest + PART - 1) / PART; }

#if LAYOUT == 0
#define PART_BYTES (PART * ROW * BYTES)
#define KEPT (RING / 2 / PART_BYTES)

struct Barriers {
    u64 full[KEPT];
    u32 left[KEPT];  // warps that have finished with a part
};

// Contiguous rows are copied asynchronously into a ring in shared memory, one piece after another. The four warps of a half
// wait until a part has arrived; the last one that finishes with it requests the part that replaces it.
struct Source {
    const Work *list;
    u32 count, pieces;
    const Turns &turns;
    const u8 *ring;
    Barriers *barriers;
    u32 taken, asked;         // parts that were read and requested so far; every warp counts them
    u32 turn;                 // the turn of the part that is requested next
    u32 tensor, part, parts;  // its number, and the number of parts in its piece; equal if no further part is known
    Rows rows;

    __device__ __forceinline__ Source(const Work *list, const Works &works, const Turns &turns, const u8 *ring, Barriers *barriers)
        : list(list), count(MOST == 1 ? 1 : works.count), pieces(works.pieces), turns(turns), ring(ring), barriers(barriers), taken(0),
          asked(0), turn(0) {
        open();
    }

    __device__ __forceinline__ void open() {
        u32 piece = turns.piece(turn);
        part = parts = 0;
        if (piece >= pieces) return;
        tensor = tensor_of(list, count, piece);
        rows = rows_of_half(list[tensor], piece - list[tensor].first);
        parts = parts_of(rows);
    }

    // Skips pieces that have nothing for this half; turns after the next one are not known yet.
    __device__ __forceinline__ void find(u32 now) {
        while (part == parts && turn <= now) ++turn, open();
    }

    __device__ __forceinline__ void begin() {
        if (threadIdx.x % SLOTS) return;
#pragma unroll
        for (int k = 0; k < KEPT; ++k) {
            init_barrier(&barriers->full[k]);
            barriers->left[k] = 0;
        }
        publish_barriers();
    }

    // Begins a turn: requests as many parts as fit. All warps have finished with the previous ones.
    __device__ __forceinline__ void ask_ahead(u32 now) {
        find(now);
        while (part < parts && asked < taken + KEPT) {
            if (threadIdx.x % SLOTS == 0) ask(asked % KEPT);
            ++asked, ++part;
            find(now);
        }
    }

    __device__ __forceinline__ void ask(u32 slot) {
        u32 batch = part / PARTS_EACH, within = part % PARTS_EACH * PART;
        u32 whole = batch < rows.batches || rows.rest >= within + PART ? PART : rows.rest - within;
        const u8 *from = (const u8 *)list[tensor].data + u64(first_row(rows, batch) + within) * (ROW * BYTES);
        copy_async(ring + slot * PART_BYTES, from, whole * ROW * BYTES, &barriers->full[slot]);
    }

    __device__ __forceinline__ void arrive() { wait_for_barrier(&barriers->full[taken % KEPT], taken / KEPT & 1); }

    __device__ __forceinline__ void take(u32 row, u32 turn, u32 slot, u32 *w) {
        u32 offset = (taken % KEPT * PART_BYTES + row * (ROW * BYTES)) ^ 16 * slot ^ turn;  // the three do not overlap
        uint4 v = *(const uint4 *)(ring + offset);
        w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
    }

    __device__ __forceinline__ void leave(u32 now) {
        u32 *left = &barriers->left[taken % KEPT];
        if (part < parts && asked == taken + KEPT) {
            __syncwarp();
            if (threadIdx.x % 32 == 0) {
                if (count_one_more(left) == WARPS / 2) {
                    *left = 0;
                    ask(taken % KEPT);
                }
            }
            __syncwarp();
            ++asked, ++part;
            find(now);
        }
        ++taken;
    }
};
#else
struct Barriers {};

// Groups at strides are loaded one by one; the launch has one tensor.
struct Source {
    const Work &work;
    const Turns &turns;
    u32 taken;  // of this piece
    Rows rows;

    __device__ __forceinline__ Source(const Work *list, const Works &, const Turns &turns, const u8 *, Barriers *)
        : work(list[0]), turns(turns) {}
    __device__ __forceinline__ void begin() {}
    __device__ __forceinline__ void ask_ahead(u32 now) { taken = 0, rows = rows_of_half(work, turns.piece(now)); }
    __device__ __forceinline__ void arrive() {}
    __device__ __forceinline__ void take(u32 row, u32 turn, u32 slot, u32 *w) {
        load(work, first_row(rows, taken / PARTS_EACH) + taken % PARTS_EACH * PART + row, slot ^ turn / 16, w);
    }
    __device__ __forceinline__ void leave(u32) { ++taken; }
};
#endif
#endif
