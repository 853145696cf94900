// What CUDA C++ takes for granted, on a CPU: a kernel's blocks run one after the other, and a block's warps take turns. A warp
// runs until it has to wait for others, so that a barrier that is missing shows when the order of warps changes.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <vector>

#define STACK (1 << 16)

struct dim3 { unsigned x; };

static dim3 threadIdx, blockIdx, gridDim;

struct Thread {
    ucontext_t context;
    std::vector<char> stack;
    const char *awaits;
    bool done;
};

static std::vector<Thread> threads;
static ucontext_t scheduler;
static unsigned current, alive;
static unsigned long went_on;  // how often any thread had waited long enough, or was done
static std::function<void()> program;

template <typename Ready>
static void wait_for(Ready ready, const char *what) {
    while (!ready()) {
        threads[current].awaits = what;
        swapcontext(&threads[current].context, &scheduler);
    }
    ++went_on;
}

static void live() {
    program();
    threads[current].done = true;
    --alive, ++went_on;
    swapcontext(&threads[current].context, &scheduler);
}

// Until none of its threads can go on.
static void run_warp(unsigned warp) {
    for (unsigned long before = went_on - 1; before != went_on;) {
        before = went_on;
        for (unsigned thread = 32 * warp; thread < 32 * warp + 32; ++thread) {
            if (threads[thread].done) continue;
            current = threadIdx.x = thread;
            swapcontext(&scheduler, &threads[thread].context);
        }
    }
}

// --- what threads wait for
struct Barrier {
    unsigned came, times;

    // `all`: how many there are, now.
    void wait(const unsigned &all, const char *what) {
        unsigned before = times;
        ++came;
        wait_for([&] { return times != before || came >= all; }, what);
        if (times == before) came = 0, ++times;
    }
};

static Barrier of_block;
static void __syncthreads() { of_block.wait(alive, "a thread waits for its block in vain"); }

struct Warp {
    Barrier barrier;
    uint64_t given[32], seen[32];
};

static std::vector<Warp> warps;

// All lanes of a warp give a number, and see those of all.
static const uint64_t *exchange(uint64_t number) {
    static const unsigned lanes = 32;
    Warp &warp = warps[current / 32];
    warp.given[current % 32] = number;
    warp.barrier.wait(lanes, "a thread waits for its warp in vain");
    warp.seen[current % 32] = warp.given[current % 32];
    warp.barrier.wait(lanes, "a thread waits for its warp in vain");
    return warp.seen;
}

static void __syncwarp() { exchange(0); }

template <typename T>
static T from_lane(T x, unsigned lane) {
    static_assert(sizeof(T) <= 8, "travels in one number");
    uint64_t bits = 0;
    memcpy(&bits, &x, sizeof x);
    bits = exchange(bits)[lane];
    memcpy(&x, &bits, sizeof x);
    return x;
}

template <typename T>
static T __shfl_xor_sync(unsigned, T x, int distance) { return from_lane(x, (current % 32) ^ distance); }

template <typename T>
static T __shfl_down_sync(unsigned, T x, int distance) {
    unsigned lane = current % 32;
    return from_lane(x, lane + distance < 32 ? lane + distance : lane);
}

static unsigned __ballot_sync(unsigned, bool vote) {
    const uint64_t *all = exchange(vote);
    unsigned votes = 0;
    for (int lane = 0; lane < 32; ++lane) votes |= unsigned(all[lane]) << lane;
    return votes;
}

static bool __any_sync(unsigned mask, unsigned vote) { return __ballot_sync(mask, vote != 0) != 0; }

static unsigned __reduce_add_sync(unsigned, unsigned x) {
    const uint64_t *all = exchange(x);
    return unsigned(std::accumulate(all, all + 32, uint64_t(0)));
}

static int __reduce_min_sync(unsigned, int x) {
    const uint64_t *all = exchange(unsigned(x));
    for (int lane = 0; lane < 32; ++lane) x = std::min(x, int(unsigned(all[lane])));
    return x;
}

// --- what is brought into shared memory comes when somebody waits for it; until then something else is there
struct Coming {
    unsigned char *to;
    const unsigned char *from;
    size_t nbytes;
    const void *barrier;
};

static std::vector<Coming> coming;

static void enqueue_copy(const Coming &what) {
    memset(what.to, 0xEE, what.nbytes);
    coming.push_back(what);
}

// How many came.
static unsigned deliver(const void *barrier) {
    auto rest = std::stable_partition(coming.begin(), coming.end(), [=](const Coming &what) { return what.barrier != barrier; });
    unsigned count = unsigned(coming.end() - rest);
    for (auto what = rest; what != coming.end(); ++what) memcpy(what->to, what->from, what->nbytes);
    coming.erase(rest, coming.end());
    return count;
}

// --- types, names and conversions
struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <typename To, typename From>
static To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

static float __uint_as_float(unsigned x) { return same_bits<float>(x); }
static unsigned __float_as_uint(float x) { return same_bits<unsigned>(x); }
static float __int_as_float(int x) { return same_bits<float>(x); }
static int __float_as_int(float x) { return same_bits<int>(x); }
static double __longlong_as_double(long long x) { return same_bits<double>(x); }
static long long __double_as_longlong(double x) { return same_bits<long long>(x); }
static int __popc(unsigned x) { return __builtin_popcount(x); }

template <typename T>
static T __ldg(const T *at) { return *at; }

static unsigned atomicAdd(unsigned *at, unsigned x) {
    unsigned before = *at;
    *at += x;
    return before;
}

// --- a launch
// What went wrong, or null.
static const char *launch(unsigned blocks, unsigned size, unsigned seed, const std::function<void()> &kernel) {
    program = kernel;
    gridDim.x = blocks;
    threads.resize(size);
    for (Thread &thread : threads) thread.stack.resize(STACK);
    std::vector<unsigned> order(size / 32);
    std::iota(order.begin(), order.end(), 0);
    std::mt19937 random(seed);
    for (unsigned block = 0; block < blocks; ++block) {
        blockIdx.x = block;
        alive = size;
        of_block = {};
        warps.assign(size / 32, {});
        coming.clear();
        for (Thread &thread : threads) {
            getcontext(&thread.context);
            thread.context.uc_stack.ss_sp = thread.stack.data();
            thread.context.uc_stack.ss_size = STACK;
            thread.done = false;
            makecontext(&thread.context, live, 0);
        }
        while (alive) {
            unsigned long before = went_on;
            std::shuffle(order.begin(), order.end(), random);
            for (unsigned warp : order) run_warp(warp);
            if (went_on == before) return std::find_if(threads.begin(), threads.end(), [](Thread &t) { return !t.done; })->awaits;
        }
        if (!coming.empty()) return "bytes come for a block that has ended";
    }
    return nullptr;
}

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __shared__ static  // one block at a time
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
#define __grid_constant__
#define __CUDA_ARCH__ 900
