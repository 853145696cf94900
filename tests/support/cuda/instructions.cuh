// What `kernels/cuda/instructions.cuh` has, for a CPU.

static float half_to_float(u16 bits) {
    u32 sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
    float value = exponent == 31 ? __uint_as_float(0x7F800000u | fraction << 13)
                  : exponent     ? __uint_as_float((exponent + 112) << 23 | fraction << 13)
                                 : fraction * 0x1p-24f;
    return __uint_as_float(__float_as_uint(value) | sign);
}

static uint4 read(const uint4 *at) { return *at; }
static u32 read_here(const u8 *at) { return *at; }
static u32 read_here(const u16 *at) { return *at; }
static u32 read_here(const u32 *at) { return *at; }

#if PACKED
static float float_of(u32 bits) {
#if ELEMENT == BF16
    return __uint_as_float(bits << 16);
#else
    return half_to_float(u16(bits));
#endif
}

template <typename Do>
static u32 on_pairs(u32 a, u32 b, Do each) { return (each(a >> 16, b >> 16) & 0xFFFFu) << 16 | (each(a & 0xFFFFu, b & 0xFFFFu) & 0xFFFFu); }

// What is not a number gives way to what is one.
static u32 pair_min(u32 a, u32 b) {
    return on_pairs(a, b, [](u32 x, u32 y) { return float_of(x) < float_of(y) || std::isnan(float_of(y)) ? x : y; });
}

static u32 pair_max(u32 a, u32 b) {
    return on_pairs(a, b, [](u32 x, u32 y) { return float_of(x) > float_of(y) || std::isnan(float_of(y)) ? x : y; });
}

static u32 pair_least(u32 a, u32 b) {
    return on_pairs(a, b, [](u32 x, u32 y) {
        u32 sign = (x ^ y) & 0x8000u;
        x &= 0x7FFFu, y &= 0x7FFFu;
        return sign | (float_of(x) < float_of(y) || std::isnan(float_of(y)) ? x : y);
    });
}

// Only whether a product is zero is of interest: others are 1.
static u32 pair_times(u32 a, u32 b) {
    return on_pairs(a, b, [](u32 x, u32 y) {
        float product = fabsf(float_of(x)) * fabsf(float_of(y)), one = ELEMENT == BF16 ? 0x3F80 : 0x3C00;
        float least = ELEMENT == BF16 ? 0x1p-134f : 0x1p-25f;  // half of the least number is rounded to zero
        return std::isnan(product) ? 0x7FFFu : product > least ? u32(one) : 0u;
    });
}

#define SHARED_RING static u8 ring[RING] __attribute__((aligned(128)))

#if LAYOUT == 0
static void init_barrier(u64 *barrier) { *barrier = 0; }
static void publish_barriers() {}
static void wait_for_barrier(u64 *barrier, u32 parity) {
    auto done = [=] { return *barrier += deliver(barrier), (*barrier & 1) != parity; };
    wait_for(done, "a thread waits for a barrier that never completes");
}

static void copy_async(const u8 *to, const u8 *from, u32 nbytes, u64 *barrier) { enqueue_copy({(u8 *)to, from, nbytes, barrier}); }

static u32 count_one_more(u32 *at) { return ++*at; }
#endif
#endif
