// The primitives of sm80.cuh on the CPU, to check emitted kernels without a GPU: a fibre for each thread; what a warp does
// together is done by the last lane to arrive; asynchronous copies land as late as they may.
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#define DEV static inline __attribute__((always_inline))
#define MEMBER inline __attribute__((always_inline))
#define KERNEL(threads, blocks) static void
#define INLINE_LAMBDA
#define __restrict__ __restrict
#define __device__

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef unsigned long long u64;
typedef int8_t i8;
typedef int16_t i16;
typedef int32_t i32;
typedef long long i64;

#ifndef WARP_SIZE
#define WARP_SIZE 32
#endif
constexpr int WARP = WARP_SIZE;

namespace emulator {
constexpr int MAX_THREADS = 2048, MAX_COPIES = 4096, STACK = 256 * 1024;
constexpr int MOST_BLOCKS = 4;        // of a cluster: they run at the same time
struct Copy { u32 to; const void* from; int bytes, group; };

// ---- fibres: a dozen instructions on x86-64, ucontext elsewhere
#if defined(__x86_64__)
struct Context { void* sp; };
extern "C" void emulator_switch(void** from, void* to);
asm(".text\nemulator_switch:\n"
    "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
    "mov %rsp,(%rdi)\nmov %rsi,%rsp\n"
    "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n");
static void switch_to(Context& from, Context& to) { emulator_switch(&from.sp, to.sp); }
static void prepare(Context& c, char* stack, size_t size, void (*f)(), Context&) {
    void** top = (void**)(stack + size - 64);
    *--top = nullptr;                                          // keeps the stack aligned at f's entry
    *--top = (void*)f;
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    c.sp = top;
}
#else
struct Context { ucontext_t u; };
static void switch_to(Context& from, Context& to) { swapcontext(&from.u, &to.u); }
static void prepare(Context& c, char* stack, size_t size, void (*f)(), Context& back) {
    getcontext(&c.u);
    c.u.uc_stack.ss_sp = stack;
    c.u.uc_stack.ss_size = size;
    c.u.uc_link = &back.u;
    makecontext(&c.u, f, 0);
}
#endif

// The line of the source text that calls a primitive: the default of its last parameter.
struct Line {
    int number;
    static Line here(int number = __builtin_LINE()) { return {number}; }
};

struct Thread {
    Context context;
    int index, groups;              // among the threads of the cluster
    bool done, polled;
    const int* counter;             // it waits until this is no longer `seen`: for `what` (a format for what follows), at `line`
    int seen, line;
    const char* what;
    u32 place, which;
    const int* missing;
    Copy* copies;                   // MAX_COPIES, elsewhere: a round over all threads should touch few pages
    int copy_count;
};
struct Warp {
    int arrived, generation;
    const void* action;
    const void* in[WARP];
    void* out[WARP];
};
static Thread* threads;
static Warp warps[MAX_THREADS / WARP];
static char* stacks;
static Context scheduler;
static Thread* self;
static int thread_count;            // of a block
static int together = 1;            // blocks that have a multiprocessor's registers
static int cluster;                 // blocks that run at the same time
static int block_arrived[MOST_BLOCKS], block_generation[MOST_BLOCKS], block_left[MOST_BLOCKS];
static int cluster_arrived, cluster_generation;
static i64 block;                   // the first of the cluster
static u8* shared_memories;         // of the blocks, one after the other, shared_pitch bytes apart
static u32 shared_pitch;
static u32 order;                   // seed of the order in which threads run
static void (*body)(void**);
static void** arguments;
static u32 shared_size;

// What works beside the threads, if a header after this one has any of it.
struct Engines {
    void (*begin)();                // a block begins
    void (*end)();                  // a block's threads are through
    bool (*work)(bool late);        // do something, or nothing yet; late: something, for no thread can go on.  Was anything done?
    void (*stored)(u32 at, u32 bytes);          // a thread has written to shared memory
};
static const Engines* engines;

static int rank_of(const Thread& t) { return t.index / thread_count; }

static char failure[1000];          // what went wrong first; no thread goes on then

static void yield() { switch_to(self->context, scheduler); }
__attribute__((format(printf, 1, 2))) static void fail(const char* format, ...) {
    if (!failure[0]) {
        va_list list;
        va_start(list, format);
        int n = vsnprintf(failure, sizeof failure, format, list);
        va_end(list);
        n = n < (int)sizeof failure ? n : (int)sizeof failure - 1;
        if (self) snprintf(failure + n, sizeof failure - n, " (block %lld, thread %d)", block + rank_of(*self), self->index % thread_count);
        else snprintf(failure + n, sizeof failure - n, " (block %lld)", block);
    }
    if (self) for (;;) yield();
}

// Until `counter` is no longer `seen`; the rest says for what, should that never be.
static void wait_while(const int& counter, int seen, const char* what, Line line, u32 place = 0, u32 which = 0, const int* missing = nullptr) {
    Thread& t = *self;
    t.seen = seen; t.what = what; t.line = line.number; t.place = place; t.which = which; t.missing = missing;
    t.counter = &counter;
    while (*(const volatile int*)&counter == seen) yield();
    t.counter = nullptr;
}
// Let all others go on first: for a thread that asks again and again.
static void poll() { self->polled = true; yield(); }

// All lanes of a warp meet; the last to arrive runs `act` on the arguments of all.
template <class Act> static void meet(const void* in, void* out, Act act, Line line = Line::here()) {
    static char action;
    Warp& w = warps[self->index / WARP];
    const int lane = self->index % WARP;
    if (w.arrived && w.action != &action) fail("line %d: the lanes of a warp meet at different operations", line.number);
    w.action = &action;
    w.in[lane] = in; w.out[lane] = out;
    if (++w.arrived == WARP) {
        act(w.in, w.out);
        w.arrived = 0; w.generation++;
    } else {
        wait_while(w.generation, w.generation, "the other lanes of the warp", line);
    }
}
static void start() { body(arguments); self->done = true; for (;;) yield(); }
}  // namespace emulator

static u8* shared_memory;            // of the block whose thread runs
static void check_shared(u32 at, u32 bytes) {
    if (bytes > emulator::shared_size || at > emulator::shared_size - bytes || at % bytes) emulator::fail("shared access out of range or misaligned");
}

DEV int thread_index() { return emulator::self->index % emulator::thread_count; }
DEV i64 block_index() { return emulator::block + emulator::rank_of(*emulator::self); }
DEV int lane_index() { return emulator::self->index % WARP; }
DEV int warp_index() { return thread_index() / WARP; }
static void block_sync(emulator::Line line = emulator::Line::here()) {
    using namespace emulator;
    const int r = rank_of(*self);
    if (++block_arrived[r] == thread_count) { block_arrived[r] = 0; block_generation[r]++; return; }
    wait_while(block_generation[r], block_generation[r], "the block's barrier", line);
}
static void warp_sync(emulator::Line line = emulator::Line::here()) { emulator::meet(nullptr, nullptr, [](const void**, void**) {}, line); }
static void previous_kernel_wait() {}
static void next_kernel_may_start() {}
template <typename T> static T shuffle_xor(T x, int mask) {
    T out;
    struct In { T x; int mask; } in{x, mask};
    emulator::meet(&in, &out, [](const void** i, void** o) {
        for (int l = 0; l < WARP; ++l) *(T*)o[l] = ((const In*)i[l ^ ((const In*)i[l])->mask])->x;
    });
    return out;
}
static bool warp_any(bool x) {
    bool out;
    emulator::meet(&x, &out, [](const void** i, void** o) {
        bool any = false;
        for (int l = 0; l < WARP; ++l) any |= *(const bool*)i[l];
        for (int l = 0; l < WARP; ++l) *(bool*)o[l] = any;
    });
    return out;
}

template <typename T> static T load_shared(u32 at) { check_shared(at, sizeof(T)); T x; memcpy(&x, shared_memory + at, sizeof(T)); return x; }
template <typename T> static void store_shared(u32 at, T x) {
    check_shared(at, sizeof(T));
    memcpy(shared_memory + at, &x, sizeof(T));
    if (emulator::engines) emulator::engines->stored(at, sizeof(T));
}

static void copy_async(u32 to, const void* from, int bytes) {
    check_shared(to, 16);
    if (bytes && (uintptr_t)from % 16) emulator::fail("asynchronous copy from a misaligned address");
    if (bytes < 0 || bytes > 16) emulator::fail("asynchronous copy of a bad size");
    emulator::Thread& t = *emulator::self;
    if (t.copy_count == emulator::MAX_COPIES) emulator::fail("too many copies under way");
    memset(shared_memory + to, 0xff, 16);                      // NaN until it lands
    t.copies[t.copy_count++] = {to, from, bytes, t.groups};
}
static void copy_commit() { emulator::self->groups++; }
template <int N> static void copy_wait() {
    emulator::Thread& t = *emulator::self;
    int kept = 0;
    for (int i = 0; i < t.copy_count; ++i) {
        const emulator::Copy& c = t.copies[i];
        if (c.group < t.groups - N) {
            memset(shared_memory + c.to, 0, 16);
            memcpy(shared_memory + c.to, c.from, c.bytes);
            if (emulator::engines) emulator::engines->stored(c.to, 16);
        } else {
            t.copies[kept++] = c;
        }
    }
    t.copy_count = kept;
}

static void load_matrix(u32 (&r)[4], u32 row, bool trans) {
    struct In { u32 row; bool trans; } in{row, trans};
    emulator::meet(&in, &r, [](const void** i, void** o) {
        for (int m = 0; m < 4; ++m) {
            u16 x[8][8];
            for (int l = 0; l < 8; ++l) {
                const u32 at = ((const In*)i[8 * m + l])->row;
                check_shared(at, 16);
                memcpy(x[l], shared_memory + at, 16);
            }
            for (int l = 0; l < WARP; ++l) {
                const int a = l / 4, b = l % 4 * 2;
                const bool t = ((const In*)i[l])->trans;
                ((u32*)o[l])[m] = t ? x[b][a] | (u32)x[b + 1][a] << 16 : x[a][b] | (u32)x[a][b + 1] << 16;
            }
        }
    });
}
static void load_matrix_x4(u32 (&r)[4], u32 row) { load_matrix(r, row, false); }
static void load_matrix_x4_trans(u32 (&r)[4], u32 row) { load_matrix(r, row, true); }

struct bf16 { u16 bits; };
struct f16 { u16 bits; };
struct f8e4m3 { u8 bits; };
struct f8e5m2 { u8 bits; };

DEV float bits_float(u32 x) { float y; memcpy(&y, &x, 4); return y; }
DEV u32 float_bits(float x) { u32 y; memcpy(&y, &x, 4); return y; }
static float half_to_float(u16 h) {
    const u32 sign = (u32)(h & 0x8000) << 16, magnitude = (u32)(h & 0x7fff) << 13;
    if (magnitude >= 0x0f800000u) return bits_float(sign | 0x7f800000u | magnitude);        // infinite, or NaN
    return bits_float(sign | float_bits(bits_float(magnitude) * 0x1p112f));
}
static u16 float_to_half(float x) {
    const u16 s = float_bits(x) >> 16 & 0x8000;
    const float a = fabsf(x);
    if (a != a) return 0x7fff;
    if (a >= 65520.0f) return s | 0x7c00;
    if (a < 6.103515625e-05f) return s | (u16)rintf(a * 16777216.0f);
    const u32 u = float_bits(a), r = u + 0xfff + (u >> 13 & 1) - (112u << 23);
    return s | (u16)(r >> 13);
}
static u16 float_to_bfloat(float x) {
    if (x != x) return 0x7fff;
    const u32 u = float_bits(x);
    return (u16)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
DEV u32 pack(bf16, float lo, float hi) { return float_to_bfloat(lo) | (u32)float_to_bfloat(hi) << 16; }
DEV u32 pack(f16, float lo, float hi) { return float_to_half(lo) | (u32)float_to_half(hi) << 16; }
DEV float narrow(bf16, u16 x) { return bits_float((u32)x << 16); }
DEV float narrow(f16, u16 x) { return half_to_float(x); }

template <typename T> static void mma_16x8x16(T, float& c0, float& c1, float& c2, float& c3, const u32 (&a)[4], u32 b0, u32 b1) {
    struct In { u32 a[4], b[2]; float c[4]; } in{{a[0], a[1], a[2], a[3]}, {b0, b1}, {c0, c1, c2, c3}};
    float out[4];
    emulator::meet(&in, out, [](const void** i, void** o) {
        float A[16][16], B[16][8];
        for (int l = 0; l < WARP; ++l) {
            const In& x = *(const In*)i[l];
            const int g = l / 4, t = l % 4 * 2;
            for (int h = 0; h < 2; ++h) {
                for (int r = 0; r < 4; ++r) A[g + r % 2 * 8][t + r / 2 * 8 + h] = narrow(T{}, (u16)(x.a[r] >> 16 * h));
                for (int r = 0; r < 2; ++r) B[t + r * 8 + h][g] = narrow(T{}, (u16)(x.b[r] >> 16 * h));
            }
        }
        for (int l = 0; l < WARP; ++l) {
            const In& x = *(const In*)i[l];
            for (int e = 0; e < 4; ++e) {
                const int row = l / 4 + e / 2 * 8, column = l % 4 * 2 + e % 2;
                float s = x.c[e];
                for (int k = 0; k < 16; ++k) s += A[row][k] * B[k][column];
                ((float*)o[l])[e] = s;
            }
        }
    });
    c0 = out[0]; c1 = out[1]; c2 = out[2]; c3 = out[3];
}

DEV float exp2_fast(float x) { return exp2f(x); }
DEV float log2_fast(float x) { return log2f(x); }
DEV float tanh_fast(float x) { return tanhf(x); }
DEV float rcp_fast(float x) { return 1.0f / x; }
DEV float rsqrt_fast(float x) { return 1.0f / sqrtf(x); }
DEV float rsqrtf(float x) { return 1.0f / sqrtf(x); }
DEV double rsqrt(double x) { return 1.0 / sqrt(x); }
DEV float max_nan(float a, float b) { return a != a ? a : b != b ? b : a > b ? a : b; }
DEV float min_nan(float a, float b) { return a != a ? a : b != b ? b : a < b ? a : b; }

template <int N> struct Words { u32 w[N]; };
template <int N> static Words<N> load_words(const void* p) {
    if ((uintptr_t)p % (4 * N)) emulator::fail("misaligned load");
    Words<N> x; memcpy(&x, p, 4 * N); return x;
}
template <int N> static void store_words(void* p, const Words<N>& x) {
    if ((uintptr_t)p % (4 * N)) emulator::fail("misaligned store");
    memcpy(p, &x, 4 * N);
}

namespace emulator {
// For the message: which threads wait where, and for what.
static void fail_waiting(int count) {
    char text[sizeof failure - 100];
    int n = 0;
    text[0] = 0;
    for (int i = 0, first = 0; i < count; ++i) {
        const Thread &t = threads[i], &next = threads[i + 1 < count ? i + 1 : i];
        const bool same = i + 1 < count && t.done == next.done && (t.done || (t.line == next.line && t.what == next.what && t.place == next.place));
        if (same) continue;
        if (!t.done && n < (int)sizeof text - 200) {
            n += snprintf(text + n, sizeof text - n, first == i ? "%sthread %d" : "%sthreads %d to %d", n ? "; " : "", first, i);
            n += snprintf(text + n, sizeof text - n, " at line %d for ", t.line);
            n += snprintf(text + n, sizeof text - n, t.counter ? t.what : "what they ask again and again", t.place, t.which, t.missing ? t.missing[0] : 0, t.missing ? t.missing[1] : 0);
        }
        first = i + 1;
    }
    fail("threads wait for ever: %s", text);
}

static u32 random_bits() { return (order = order * 1664525u + 1013904223u) >> 8; }

static void run_blocks(i64 grid, int count, u32 seed) {
    const bool ragged = engines && seed % 2;                       // lanes drift apart
    for (block = 0; block < grid; block += cluster) {
        memset(shared_memories, 0xff, (size_t)shared_pitch * cluster);     // NaN, whatever is read before it is written
        memset(warps, 0, sizeof warps);
        memset(block_arrived, 0, sizeof block_arrived);
        cluster_arrived = 0;
        for (int r = 0; r < cluster; ++r) block_left[r] = thread_count;
        for (int i = 0; i < count; ++i) {
            Thread& t = threads[i];
            t.index = i; t.done = false; t.groups = t.copy_count = 0; t.counter = nullptr; t.line = 0;
            prepare(t.context, stacks + (size_t)i * STACK, STACK, start, scheduler);
        }
        if (engines) engines->begin();
        if (failure[0]) return;
        bool ran = true;
        for (int left = count, idle = 0; left;) {
            const bool drift = ragged && ran;                      // after a round without progress, one with all
            bool asked = false;
            ran = false;
            const u32 turn = seed ? random_bits() : 0;
            for (int w = 0; w < count / WARP; ++w) {
                const int warp = (int)((w + turn) % (count / WARP));
                for (int l = 0; l < WARP; ++l) threads[warp * WARP + l].polled = false;
                // a warp runs until it can go no further, or, by chance, only until its lanes meet: others may overtake it anywhere
                for (bool again = true; again;) {
                    again = false;
                    for (int l = 0; l < WARP; ++l) {
                        Thread& t = threads[warp * WARP + (seed ? (l * 5 + (int)(turn & 31)) % WARP : l)];
                        if (t.done || t.polled || (t.counter && *t.counter == t.seen)) continue;
                        if (drift && random_bits() % 2) continue;
                        self = &t;
                        shared_memory = shared_memories + (size_t)shared_pitch * rank_of(t);
                        switch_to(scheduler, t.context);
                        self = nullptr;
                        if (failure[0]) return;
                        left -= t.done;
                        block_left[rank_of(t)] -= t.done;
                        if (t.polled) asked = true;
                        else ran = again = true;
                    }
                    if (drift || (seed && random_bits() % 2)) break;
                }
                if (engines && engines->work(false)) ran = true;
                if (failure[0]) return;
            }
            if (ran) idle = 0;
            if (ran || drift) continue;
            if (!left) break;
            if (engines && engines->work(true)) { idle = 0; continue; }
            if (!asked || ++idle > 1000) return fail_waiting(count);
        }
        if (engines) engines->end();
        if (failure[0]) return;
    }
}

// Run every block of a grid, `blocks` at a time.  `seed` varies the order of threads: 0 in turn, warp by warp first.  The result says what went wrong,
// "" if nothing did.
static const char* launch(void (*kernel)(void**), void** args, i64 grid, int count, u32 shared, u32 seed, int blocks = 1) {
    threads = (Thread*)calloc(MAX_THREADS, sizeof(Thread));
    stacks = (char*)malloc((size_t)MAX_THREADS * STACK);
    Copy* copies = (Copy*)malloc(sizeof(Copy) * MAX_THREADS * MAX_COPIES);
    for (int i = 0; i < MAX_THREADS; ++i) threads[i].copies = copies + (size_t)i * MAX_COPIES;
    body = kernel; arguments = args; thread_count = count; cluster = blocks; shared_size = shared; order = seed;
    shared_pitch = (shared + 2047) / 1024 * 1024;
    shared_memories = (u8*)aligned_alloc(1024, (size_t)shared_pitch * blocks);
    failure[0] = 0;
    self = nullptr;
    block = 0;
    if (blocks > 1 && (blocks > MOST_BLOCKS || count * blocks > MAX_THREADS || count % (4 * WARP) || grid % blocks))
        fail("%lld blocks of %d threads cannot run in clusters of %d here", grid, count, blocks);
    else run_blocks(grid, count * blocks, seed);
    free(shared_memories); free(copies); free(stacks); free(threads);  // a process may load thousands of kernels
    return failure;
}
}  // namespace emulator
