// Instructions that CUDA C++ does not expose. The tests have a file with the same names for a CPU.

__device__ __forceinline__ float half_to_float(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// Loads that bypass the processor's cache: it does not read these bytes again.
__device__ __forceinline__ uint4 read(const uint4 *at) {
    uint4 v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}

// Loads that the compiler must not move: their values are needed much later.
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

// An instruction on two pairs that applies to both of their elements.
#define ON_PAIRS(name, instruction)                                                                      \
    __device__ __forceinline__ u32 name(u32 a, u32 b) {                                                  \
        asm(instruction "." PAIRS " %0, %1, %2;" : "=r"(a) : "r"(a), "r"(b));                            \
        return a;                                                                                        \
    }

ON_PAIRS(pair_min, "min")
ON_PAIRS(pair_max, "max")
ON_PAIRS(pair_least, "min.xorsign.abs")  // the lesser magnitudes; their signs do not matter
ON_PAIRS(pair_times, "mul")              // without underflow, zero only if one of the two is

// Dynamic shared memory, of the size that the launch requests.
#define SHARED_RING extern __shared__ __align__(128) u8 ring[]

#if LAYOUT == 0
__device__ __forceinline__ u32 shared_address(const void *at) { return u32(__cvta_generic_to_shared(at)); }

// A barrier in shared memory whose parity changes when all expected bytes have arrived.
__device__ __forceinline__ void init_barrier(u64 *barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(shared_address(barrier)) : "memory");
}

// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void wait_for_barrier(const u64 *barrier, u32 parity) {
    asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}"
                 :: "r"(shared_address(barrier)), "r"(parity) : "memory");
}

// Asynchronous copy from global to shared memory.
__device__ __forceinline__ void copy_async(const u8 *to, const u8 *from, u32 nbytes, u64 *barrier) {
    u32 at = shared_address(barrier);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(at), "r"(nbytes) : "memory");
#if MOST == 1
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(shared_address(to)), "l"(from), "r"(nbytes), "r"(at) : "memory");
#else
    // A tensor that is read alone was just computed and is likely to be used next. In a batch this holds for the last one
    // only: the others need not stay in the cache, where they would evict data of the model.
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                 :: "r"(shared_address(to)), "l"(from), "r"(nbytes), "r"(at), "l"(policy) : "memory");
#endif
}

// Atomic increment in shared memory, with release and acquire order. Returns the new count.
__device__ __forceinline__ u32 count_one_more(u32 *at) {
    u32 before;
    asm volatile("atom.add.acq_rel.cta.shared::cta.u32 %0, [%1], 1;" : "=r"(before) : "r"(shared_address(at)) : "memory");
    return before + 1;
}
#endif
#endif
