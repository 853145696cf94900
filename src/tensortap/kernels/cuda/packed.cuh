// The way for 16-bit floats, two to a word: what can be is done on both at once.

#if PACKED
#if ELEMENT == BF16
#define PAIRS "bf16x2"
#define LARGEST 0x7F7F7F7Fu
#define FARTHEST 16.0f  // the mean of squares over the variance, up to which sums about 0 are good enough
#else
#define PAIRS "f16x2"
#define LARGEST 0x7BFF7BFFu
#define FARTHEST 4.0f  // squares have 22 bits, so that adding them up rounds
#endif

// An instruction that takes two pairs and does the same with both of their elements.
#define ON_PAIRS(name, instruction)                                                                      \
    __device__ __forceinline__ u32 name(u32 a, u32 b) {                                                  \
        asm(instruction "." PAIRS " %0, %1, %2;" : "=r"(a) : "r"(a), "r"(b));                            \
        return a;                                                                                        \
    }

ON_PAIRS(pair_min, "min")
ON_PAIRS(pair_max, "max")
ON_PAIRS(pair_least, "min.xorsign.abs")  // the lesser magnitudes; what their signs are is no matter
ON_PAIRS(pair_times, "mul")              // as long as nothing underflows, zero only where one of the two is

// What is added up of a few rows, before it is carried on in float64.
struct Few {
    float squares, l1;
};

struct Packed {
    u32 low, high;  // pairs
    float plus[8], minus[8];  // of some rows the elements whose signs the sketch keeps, and those whose signs it turns
    float sketch[8];
    u32 zeros;
    double sum, squares, l1;
    u64 words[WORDS];  // times their lines' hashes; the weights of their columns are still to be multiplied in
};

// One row of a thread's; `least` has a zero if the row has one.
__device__ __forceinline__ void add_packed(const u32 *w, u32 hash, u32 signs, u32 &least, Few &few, Packed &p) {
    least = pair_least(least, pair_times(w[0], w[1]));
    least = pair_least(least, pair_times(w[2], w[3]));
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        p.words[k] += u64(w[k]) * hash;
        p.low = pair_min(p.low, w[k]);
        p.high = pair_max(p.high, w[k]);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            float x = fast_value(w + k, j);
            few.squares = fmaf(x, x, few.squares);
            few.l1 += fabsf(x);
            if (signs >> (2 * k + j) & 1) p.minus[2 * k + j] += x;  // all eight bits become predicates at once
            else p.plus[2 * k + j] += x;
        }
    }
}

__device__ __forceinline__ void carry(const Few &few, Packed &p) {
    p.squares += double(few.squares);
    p.l1 += double(few.l1);
}

__device__ __forceinline__ void begin_stage(Packed &p) {
#pragma unroll
    for (int j = 0; j < 8; ++j) p.plus[j] = p.minus[j] = 0;
}

// What both kinds of elements say: added up the sum, subtracted the sketch.
__device__ __forceinline__ void end_stage(Packed &p) {
    float sums[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        sums[j] = p.plus[j] + p.minus[j];
        p.sketch[j] += p.plus[j] - p.minus[j];
    }
    p.sum += double(((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7])));
}

__device__ __forceinline__ bool has_zero(u32 least) { return !(least & 0x7FFFu) || !(least & 0x7FFF0000u); }

__device__ __forceinline__ u32 count_zeros(const u32 *w) {
    u32 count = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) count += !(w[k] & 0x7FFFu) + !(w[k] & 0x7FFF0000u);
    return count;
}

// Where rows come from, PART at a time.
#define PARTS_EACH (BATCH / PART)

__device__ __forceinline__ u32 parts_of(const Rows &rows) { return rows.batches * PARTS_EACH + (rows.rest + PART - 1) / PART; }

#if LAYOUT == 0
#define PART_BYTES (PART * ROW * BYTES)
#define KEPT (RING / 2 / PART_BYTES)

struct Bells {
    u64 full[KEPT];
    u32 left[KEPT];  // warps that have done with a part
};

__device__ __forceinline__ u32 shared_address(const void *at) { return u32(__cvta_generic_to_shared(at)); }

__device__ __forceinline__ void await(const u64 *bell, u32 parity) {
    asm volatile("{\n.reg .pred rung;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 rung, [%0], %1;\n@!rung bra again;\n}"
                 :: "r"(shared_address(bell)), "r"(parity) : "memory");
}

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
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(shared_address(&bells->full[k])) : "memory");
            bells->left[k] = 0;
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
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
        u32 nbytes = whole * ROW * BYTES, bell = shared_address(&bells->full[slot]);
        const u8 *from = (const u8 *)list[tensor].data + u64(first_row(rows, batch) + within) * (ROW * BYTES);
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(bell), "r"(nbytes) : "memory");
        u32 to = shared_address(ring + slot * PART_BYTES);
#if MOST == 1
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                     :: "r"(to), "l"(from), "r"(nbytes), "r"(bell) : "memory");
#else
        // A tensor that is read alone was just made and is likely to be used next. Of many only the last is: they need not
        // stay in the cache, where together they would push out what the model needs.
        u64 policy;
        asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                     :: "r"(to), "l"(from), "r"(nbytes), "r"(bell), "l"(policy) : "memory");
#endif
    }

    __device__ __forceinline__ void arrive() { await(&bells->full[taken % KEPT], taken / KEPT & 1); }

    __device__ __forceinline__ void take(u32 row, u32 turn, u32 slot, u32 *w) {
        u32 offset = (taken % KEPT * PART_BYTES + row * (ROW * BYTES)) ^ 16 * slot ^ turn;  // the three do not overlap
        uint4 v = *(const uint4 *)(ring + offset);
        w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
    }

    __device__ __forceinline__ void leave(u32 now) {
        u32 *left = &bells->left[taken % KEPT], before;
        if (part < parts && asked == taken + KEPT) {
            __syncwarp();
            if (threadIdx.x % 32 == 0) {
                asm volatile("atom.add.acq_rel.cta.shared::cta.u32 %0, [%1], 1;" : "=r"(before) : "r"(shared_address(left)) : "memory");
                if (before == WARPS / 2 - 1) {
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

// All whole rows. False if what it met needs more care.
__device__ __forceinline__ bool go_packed(Source &source, u32 turn, const u32 *weights, RowFacts *facts, u32 slot, const Rows &rows, Sums &s) {
    Packed p;
#pragma unroll
    for (int j = 0; j < 8; ++j) p.sketch[j] = 0;
    begin_stage(p);
#pragma unroll
    for (int k = 0; k < WORDS; ++k) p.words[k] = 0;
    p.sum = p.squares = p.l1 = 0;
    p.zeros = 0;
    p.low = LARGEST, p.high = LARGEST | 0x80008000u;
    u32 signs = 0;  // of four rows, eight bits each
    for (u32 batch = 0; batch < rows.batches; ++batch) {
        if (batch % (STAGE / BATCH) == 0) {
            if (batch) end_stage(p);
            begin_stage(p);
            prepare(facts, rows, batch, slot, 16);
        }
        const RowFacts *now = facts + BATCH * batch % STAGE;
        Few few = {};
#pragma unroll
        for (int half = 0; half < PARTS_EACH; ++half) {
            source.arrive();
            u32 least = LARGEST;
#pragma unroll
            for (int k = 0; k < PART; ++k) {
                u32 w[WORDS];
                RowFacts fact = now[half * PART + k];
                source.take(k, fact.turn, slot, w);
                if (k % 4 == 0) signs = signs_of(fact.seed, slot);
                add_packed(w, fact.hash, signs >> 8 * (k % 4), least, few, p);
            }
            // Most tensors have no zeros: they are counted, in what is still there, only where there are some.
            if (__any_sync(~0u, has_zero(least))) {
#pragma unroll 1
                for (u32 k = 0; k < PART; ++k) {
                    u32 w[WORDS];
                    source.take(k, now[half * PART + k].turn, slot, w);
                    p.zeros += count_zeros(w);
                }
            }
            source.leave(turn);
        }
        carry(few, p);
    }
    end_stage(p);
    if (rows.rest) {
        begin_stage(p);
        prepare(facts, rows, rows.batches, slot, 16);
        Few few = {};
        u32 least = LARGEST;
        for (u32 k = 0; k < rows.rest; ++k) {
            u32 w[WORDS];
            if (k % PART == 0) source.arrive();
            RowFacts fact = facts[k];
            source.take(k % PART, fact.turn, slot, w);
            if (k % 4 == 0) signs = signs_of(fact.seed, slot);
            add_packed(w, fact.hash, signs >> 8 * (k % 4), least, few, p);
            p.zeros += count_zeros(w);
            if (k % PART == PART - 1 || k == rows.rest - 1) source.leave(turn);
        }
        carry(few, p);
        end_stage(p);
    }
    float low = fminf(fast_value(&p.low, 0), fast_value(&p.low, 1)), high = fmaxf(fast_value(&p.high, 0), fast_value(&p.high, 1));
    // Whether float32 was enough, of the whole warp.
    float all = float(p.sum), squares = float(p.squares);
#pragma unroll
    for (int d = 16; d; d >>= 1) all += __shfl_xor_sync(~0u, all, d), squares += __shfl_xor_sync(~0u, squares, d);
    float spread = fmaf(-all, all / (256.0f * float(whole_rows(rows))), squares);  // rounded alike in all kernels
    bool lost = !(squares < 1e37f) || (squares < 1e-24f && (low != 0 || high != 0)) || !(spread * FARTHEST >= squares);
    if (__any_sync(~0u, lost)) return false;
#pragma unroll
    for (int j = 0; j < 8; ++j) s.sketch[j] = p.sketch[j];
    s.sum = p.sum, s.squares = p.squares, s.l1 = p.l1;
    s.low = low, s.high = high;
#pragma unroll
    for (int k = 0; k < WORDS; ++k) s.digest += p.words[k] * weights[(WORDS * slot + k) % 256];
    s.zeros = p.zeros;
    return true;
}
#endif
