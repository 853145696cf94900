// The elements of a tensor: their values, and the hashes of their positions.

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

__device__ __forceinline__ float e4m3_to_float(u32 bits) {
    u32 sign = (bits & 0x80u) << 24, magnitude = bits & 0x7Fu;
    if (magnitude == 0x7Fu) return __uint_as_float(0x7FC00000u);
    float value = magnitude < 8 ? float(magnitude) * 0.001953125f : __uint_as_float((magnitude << 20) + (120u << 23));
    return __uint_as_float(__float_as_uint(value) | sign);
}

// Whether a number is infinite or at the edge of the elements' range; see `dtypes.edge_of`.
__device__ __forceinline__ bool at_edge(double x) {
#if ELEMENT == F16
    return fabs(x) >= 64512.0;
#elif ELEMENT == BF16 || ELEMENT == F32
    return fabs(x) >= __longlong_as_double(0x47EF800000000000ll);
#elif ELEMENT == F64
    return fabs(x) >= __longlong_as_double(0x7FEF800000000000ll);
#else
    return fabs(x) == INF;
#endif
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
