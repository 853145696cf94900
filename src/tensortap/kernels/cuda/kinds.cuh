// Macros that a kernel is compiled with, at run time: ELEMENT (a code below), LAYOUT (0 contiguous, 1 whole groups at strides,
// 2 single elements at strides, 3 runs of a part of a whole), PLACED (whether a contiguous part begins at another row of a
// whole), THREADS (in a block), BLOCKS_EACH (at a time on one processor), MOST (tensors in one launch; more than one only if
// contiguous), and PART and RING (see `ring.cuh`).

#define BF16 0
#define F16 1
#define F32 2
#define F64 3
#define E4M3 4
#define E5M2 5
#define I8 6
#define I16 7
#define I32 8
#define I64 9
#define U8 10
#define U16 11
#define U32 12
#define U64 13

#if ELEMENT == F64 || ELEMENT == I64 || ELEMENT == U64
#define BYTES 8
#elif ELEMENT == F32 || ELEMENT == I32 || ELEMENT == U32
#define BYTES 4
#elif ELEMENT == BF16 || ELEMENT == F16 || ELEMENT == I16 || ELEMENT == U16
#define BYTES 2
#else
#define BYTES 1
#endif
// Elements that float32 holds exactly can take the fast path, where whole rows are in memory.
#define FAST (BYTES < 4 || ELEMENT == F32)
#define QUICK (FAST && LAYOUT < 3)
#define PACKED ((ELEMENT == BF16 || ELEMENT == F16) && LAYOUT < 2 && __CUDA_ARCH__ >= 900)

#define SLOTS 128
#define ROW 1024
#define WORDS (2 * BYTES)      // 32-bit words in a group of 8 elements
#define BATCH 8                // rows that are read together
#define STAGE 32               // rows whose hashes a warp computes at a time, one for each lane
#define MOST_DIMS 6

#define SIGN_SEED 0x27D4EB2Fu
#define ROW_SEED 0x85EBCA6Bu
#define GOLDEN 0x9E3779B97F4A7C15ull

#if PACKED
#define FAST_CALL __noinline__
#else
#define FAST_CALL __forceinline__
#endif
