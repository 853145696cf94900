// Shared by all kernels: prepended to each of them before compilation.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Statistics of one warp's rows; sums are of x - about.
struct __align__(16) Share {
    double sum, squares, l1;
    u64 digest;
    double low, high;
    u32 nan, posinf, neginf, zeros, edge, spare[3];
};

#define WARPS 8
#define BUCKETS 256

// Statistics of one block's rows.
struct Partial {
    float sketch[BUCKETS];
    Share shares[WARPS];
    double about;
    u32 unchanged, spare;
};

// The result for a tensor; `probe` is a hash of a few elements, which detects changes.
struct Result {
    float sketch[BUCKETS];
    double about, sum, squares, l1, low, high;
    u64 digest, nan, posinf, neginf, zeros, edge;
    u32 probe, unchanged;
};

#define INF __longlong_as_double(0x7FF0000000000000ll)

template <typename T>
__device__ __forceinline__ T sum_of_warp(T x) {
#pragma unroll
    for (int d = 16; d; d >>= 1) x += __shfl_down_sync(~0u, x, d);
    return x;
}

__device__ __forceinline__ u32 count_of_warp(u32 x) {
#if __CUDA_ARCH__ >= 800
    return __reduce_add_sync(~0u, x);
#else
    return sum_of_warp(x);
#endif
}

__device__ __forceinline__ double min_of_warp(double x) {
#pragma unroll
    for (int d = 16; d; d >>= 1) x = fmin(x, __shfl_down_sync(~0u, x, d));
    return x;
}

__device__ __forceinline__ float min_of_warp(float x) {
#if __CUDA_ARCH__ >= 800
    int bits = __float_as_int(x);  // maps floats to integers of the same order
    bits = __reduce_min_sync(~0u, bits ^ (bits >> 31 & 0x7FFFFFFF));
    return __int_as_float(bits ^ (bits >> 31 & 0x7FFFFFFF));
#else
    return float(min_of_warp(double(x)));
#endif
}

__device__ __forceinline__ u64 add_doubles(u64 a, u64 b) {
    return u64(__double_as_longlong(__longlong_as_double(i64(a)) + __longlong_as_double(i64(b))));
}

// Three sums of doubles and one of integers at once. The lanes divide the sums, which takes few shuffles: in the end lanes 0,
// 8, 16 and 24 have one each.
__device__ __forceinline__ u64 sums_of_warp(double a, double b, double c, u64 d) {
    u64 x[4] = {u64(__double_as_longlong(a)), u64(__double_as_longlong(b)), u64(__double_as_longlong(c)), d};
    bool upper = threadIdx.x & 16, odd = threadIdx.x & 8, integer = upper && odd;
    u64 first = add_doubles(upper ? x[2] : x[0], __shfl_xor_sync(~0u, upper ? x[0] : x[2], 16));
    u64 kept = upper ? x[3] : x[1], sent = __shfl_xor_sync(~0u, upper ? x[1] : x[3], 16);
    u64 second = upper ? kept + sent : add_doubles(kept, sent);
    kept = odd ? second : first, sent = __shfl_xor_sync(~0u, odd ? first : second, 8);
#pragma unroll
    for (int d = 4; d; d >>= 1) {
        kept = integer ? kept + sent : add_doubles(kept, sent);
        sent = __shfl_xor_sync(~0u, kept, d);
    }
    return integer ? kept + sent : add_doubles(kept, sent);
}
