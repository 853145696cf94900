// Instructions that CUDA C++ has no name for. The tests have a file of these names for a CPU.

__device__ __forceinline__ float half_to_float(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// What is read here is not read again by the same processor: it need not stay in its cache.
__device__ __forceinline__ uint4 read(const uint4 *at) {
    uint4 v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}

// Loads that stay where they are written: what they bring is needed much later.
__device__ __forceinline__ u32 read_here(const u8 *at) {
    u32 v;
    asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(v) : "l"(at));
    return v;
}

__device__ __forceinline__ u32 read_here(const u16 *at) {
    u32 v;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=r"(v) : "l"(at));
    return v;
}

__device__ __forceinline__ u32 read_here(const u32 *at) {
    u32 v;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(at));
    return v;
}

#if PACKED
#if ELEMENT == BF16
#define PAIRS "bf16x2"
#else
#define PAIRS "f16x2"
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

// As much memory as the launch asks for.
#define SHARED_RING extern __shared__ __align__(128) u8 ring[]

#if LAYOUT == 0
__device__ __forceinline__ u32 shared_address(const void *at) { return u32(__cvta_generic_to_shared(at)); }

// A bell in shared memory rings when all has come that is to be brought: its parity changes.
__device__ __forceinline__ void hang(u64 *bell) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(shared_address(bell)) : "memory");
}

// To those who bring.
__device__ __forceinline__ void show_bells() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void await(const u64 *bell, u32 parity) {
    asm volatile("{\n.reg .pred rung;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 rung, [%0], %1;\n@!rung bra again;\n}"
                 :: "r"(shared_address(bell)), "r"(parity) : "memory");
}

// From global to shared memory, meanwhile.
__device__ __forceinline__ void bring(const u8 *to, const u8 *from, u32 nbytes, u64 *bell) {
    u32 at = shared_address(bell);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(at), "r"(nbytes) : "memory");
#if MOST == 1
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(shared_address(to)), "l"(from), "r"(nbytes), "r"(at) : "memory");
#else
    // A tensor that is read alone was just made and is likely to be used next. Of many only the last is: they need not stay
    // in the cache, where together they would push out what the model needs.
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                 :: "r"(shared_address(to)), "l"(from), "r"(nbytes), "r"(at), "l"(policy) : "memory");
#endif
}

// In shared memory; what was read or written before is done with. Returns how many there are now.
__device__ __forceinline__ u32 count_one_more(u32 *at) {
    u32 before;
    asm volatile("atom.add.acq_rel.cta.shared::cta.u32 %0, [%1], 1;" : "=r"(before) : "r"(shared_address(at)) : "memory");
    return before + 1;
}
#endif
#endif
