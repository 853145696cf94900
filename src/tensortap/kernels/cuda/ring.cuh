// Where rows of 16-bit floats come from, PART at a time.

#if PACKED
#define PARTS_EACH (BATCH / PART)

__device__ __forceinline__ u32 parts_of(const Rows &rows) { return rows.batches * PARTS_EACH + (rows.rest + PART - 1) / PART; }

#if LAYOUT == 0
#define PART_BYTES (PART * ROW * BYTES)
#define KEPT (RING / 2 / PART_BYTES)

struct Bells {
    u64 full[KEPT];
    u32 left[KEPT];  // warps that have done with a part
};

// Rows that lie side by side come by themselves into a ring in shared memory, one piece's after another's. The half's four
// warps wait until a part is there; the last one that has done with it asks for what comes in its place.
struct Source {
    const Work *list;
    u32 count, pieces;
    const Turns &turns;
    const u8 *ring;
    Bells *bells;
    u32 taken, asked;         // parts that were read so far, and asked for; every warp keeps count
    u32 turn;                 // that of the part that is asked for next
    u32 tensor, part, parts;  // which part it is, and how many its piece has; the same if nothing more is known
    Rows rows;

    __device__ __forceinline__ Source(const Work *list, const Works &works, const Turns &turns, const u8 *ring, Bells *bells)
        : list(list), count(MOST == 1 ? 1 : works.count), pieces(works.pieces), turns(turns), ring(ring), bells(bells), taken(0),
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

    // Past pieces that have nothing for this half; what comes after the next turn is not known yet.
    __device__ __forceinline__ void find(u32 now) {
        while (part == parts && turn <= now) ++turn, open();
    }

    __device__ __forceinline__ void begin() {
        if (threadIdx.x % SLOTS) return;
#pragma unroll
        for (int k = 0; k < KEPT; ++k) {
            hang(&bells->full[k]);
            bells->left[k] = 0;
        }
        show_bells();
    }

    // A turn begins: ask for all that there is room for. All warps have done with what came before.
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
        bring(ring + slot * PART_BYTES, from, whole * ROW * BYTES, &bells->full[slot]);
    }

    __device__ __forceinline__ void arrive() { await(&bells->full[taken % KEPT], taken / KEPT & 1); }

    __device__ __forceinline__ void take(u32 row, u32 turn, u32 slot, u32 *w) {
        u32 offset = (taken % KEPT * PART_BYTES + row * (ROW * BYTES)) ^ 16 * slot ^ turn;  // the three do not overlap
        uint4 v = *(const uint4 *)(ring + offset);
        w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
    }

    __device__ __forceinline__ void leave(u32 now) {
        u32 *left = &bells->left[taken % KEPT];
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
struct Bells {};

// Groups at strides are loaded one by one; there is one tensor.
struct Source {
    const Work &work;
    const Turns &turns;
    u32 taken;  // of this piece
    Rows rows;

    __device__ __forceinline__ Source(const Work *list, const Works &, const Turns &turns, const u8 *, Bells *)
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
