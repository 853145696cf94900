// What the kernels share: put in front of each of them before it is compiled.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// What one warp knows of its rows; sums are of x - about.
struct Share {
    double sum, squares, l1, low, high;
    u64 digest;
    u32 nan, posinf, neginf, zeros;
};

#define WARPS 8

// What one block knows of its rows.
struct Partial {
    float sketch[256];
    Share shares[WARPS];
    double about;
    u32 unchanged, spare;
};

// What is known of a tensor; `probe` is a few of its elements, by which a change can be told.
struct Result {
    float sketch[256];
    double about, sum, squares, l1, low, high;
    u64 digest, nan, posinf, neginf, zeros;
    u32 probe, unchanged;
};

#define INF __longlong_as_double(0x7FF0000000000000ll)

template <typename T>
__device__ __forceinline__ T sum_of_warp(T x) {
#pragma unroll
    for (int d = 16; d; d >>= 1) x += __shfl_down_sync(~0u, x, d);
    return x;
}

__device__ __forceinline__ double min_of_warp(double x) {
#pragma unroll
    for (int d = 16; d; d >>= 1) x = fmin(x, __shfl_down_sync(~0u, x, d));
    return x;
}
