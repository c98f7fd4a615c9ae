// Primitives of AMD GPUs: what the tile code below is written in.  Every builtin of the compiler is here.
// Compiles under a plain clang with -nogpulib -nogpuinc and under ROCm's hipcc, without any include: attributes are spelled out,
// because clang's own HIP header, which ROCm brings in, defines their usual macros.
#ifndef WARP_SIZE
#define WARP_SIZE 32
#endif
#define DEV static __attribute__((device, always_inline)) inline
#define MEMBER __attribute__((device, always_inline)) inline
// How many blocks share a compute unit is left to the compiler, which weighs it against registers.  Two waves a SIMD leave each 256
// registers; a wave alone would have 512, half of them reached only by copies.
#define KERNEL(threads, blocks)                                                      \
    extern "C" __attribute__((global, amdgpu_flat_work_group_size(threads, threads), \
                              amdgpu_waves_per_eu((threads) > 8 * WARP_SIZE ? ((threads) - 1) / (4 * WARP_SIZE) + 1 : 2))) void
#define INLINE_LAMBDA __attribute__((always_inline))

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;
typedef short i16;
typedef int i32;
typedef long long i64;

constexpr int WARP = WARP_SIZE;
#if defined(__AMDGCN__) && defined(__GFX9__) != (WARP_SIZE == 64)
#error this text was emitted for another architecture
#endif

// ---- threads
DEV int thread_index() { return (int)__builtin_amdgcn_workitem_id_x(); }
DEV i64 block_index() { return (u32)__builtin_amdgcn_workgroup_id_x(); }
DEV int lane_index() { return thread_index() % WARP; }
// The same in every lane, so that the compiler keeps it in a scalar register.
DEV int warp_index() { return __builtin_amdgcn_readfirstlane(thread_index() / WARP); }
DEV void block_sync() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
DEV void warp_sync() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}
DEV bool warp_any(bool x) {
#if WARP_SIZE == 64
    return __builtin_amdgcn_ballot_w64(x) != 0;
#else
    return __builtin_amdgcn_ballot_w32(x) != 0;
#endif
}
// The other lanes' words: within four lanes and by eight through the vector unit's data-parallel moves, else through the LDS crossbar.
DEV int shuffle_xor_word(int x, int mask) {
    switch (mask) {
        case 1: return __builtin_amdgcn_mov_dpp(x, 0xb1, 0xf, 0xf, true);                // quad_perm 1 0 3 2
        case 2: return __builtin_amdgcn_mov_dpp(x, 0x4e, 0xf, 0xf, true);                // quad_perm 2 3 0 1
        case 4: return __builtin_amdgcn_ds_swizzle(x, 0x101f);
        case 8: return __builtin_amdgcn_mov_dpp(x, 0x128, 0xf, 0xf, true);               // row_ror 8
#if WARP_SIZE == 64
        case 16: return __builtin_amdgcn_ds_swizzle(x, 0x401f);
#else
        case 16: return __builtin_amdgcn_permlanex16(x, x, 0x76543210, 0xfedcba98, false, false);
#endif
        default: return __builtin_amdgcn_ds_bpermute((lane_index() ^ mask) * 4, x);
    }
}
template <typename T> DEV T shuffle_xor(T x, int mask) {
    int w[(sizeof(T) + 3) / 4] = {};
    __builtin_memcpy(w, &x, sizeof(T));
#pragma unroll
    for (int i = 0; i < (int)(sizeof(w) / 4); ++i) w[i] = shuffle_xor_word(w[i], mask);
    __builtin_memcpy(&x, w, sizeof(T));
    return x;
}

// ---- global memory, N × 4 bytes at once, aligned to as much
template <int N> struct alignas(4 * N) Words { u32 w[N]; };
#define GLOBAL __attribute__((address_space(1)))
template <int N> DEV Words<N> load_words(const void* p) {
    typedef u32 Vector __attribute__((ext_vector_type(N), may_alias));
    return __builtin_bit_cast(Words<N>, *(const GLOBAL Vector*)p);
}
template <int N> DEV void store_words(void* p, const Words<N>& x) {
    typedef u32 Vector __attribute__((ext_vector_type(N), may_alias));
    *(GLOBAL Vector*)p = __builtin_bit_cast(Vector, x);
}

// ---- shared memory: places are byte offsets into the block's dynamic shared memory
extern __attribute__((shared, aligned(1024))) unsigned char shared_memory[];
// Pointers to it have 32 bits, so that constants in `at` go into instructions.
template <typename T> DEV T* shared_place(u32 at) {
    typedef __attribute__((address_space(3))) u8 Byte;
    return (T*)((Byte*)shared_memory + at);
}
template <typename T> DEV T load_shared(u32 at) {
    T x;
    __builtin_memcpy(&x, shared_place<T>(at), sizeof(T));
    return x;
}
template <typename T> DEV void store_shared(u32 at, T x) { __builtin_memcpy(shared_place<T>(at), &x, sizeof(T)); }
// 16 bytes as four words.
DEV void load_chunk(u32 (&r)[4], u32 at) {
    const Words<4> x = load_shared<Words<4>>(at);
#pragma unroll
    for (int i = 0; i < 4; ++i) r[i] = x.w[i];
}

// 16 bytes from global to shared memory, at once: there are no asynchronous copies.  The last 16 - `bytes` of them become zero.  Where
// there is nothing to read the zeros below are read, so that no branch stands between the loads of a tile; of a 16-byte granule
// that exists in part all is read.
static __attribute__((device)) const Words<4> no_words = {};
DEV void copy_async(u32 to, const void* from, int bytes) {
    Words<4> x = load_words<4>(bytes > 0 ? from : &no_words);
    const int part = bytes & 15;                               // 0, and known to be, but at the end of rows that do not end with a chunk
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int left = part ? part - 4 * i : 4, kept = left < 0 ? 0 : left < 4 ? left : 4;
        x.w[i] &= (u32)(((u64)1 << 8 * kept) - 1);
    }
    store_shared(to, x);
}
DEV void copy_commit() {}
template <int N> DEV void copy_wait() {}

struct bf16 { u16 bits; };
struct f16 { u16 bits; };
struct f8e4m3 { u8 bits; };
struct f8e5m2 { u8 bits; };

// ---- conversions
DEV float bits_float(u32 x) { return __builtin_bit_cast(float, x); }
DEV u32 float_bits(float x) { return __builtin_bit_cast(u32, x); }
DEV float half_to_float(u16 x) { return (float)__builtin_bit_cast(_Float16, x); }
DEV u16 float_to_half(float x) { return __builtin_bit_cast(u16, (_Float16)x); }
DEV u32 rounded_to_bfloat(float x) {                           // the result is the upper half
    const u32 u = float_bits(x);
    return x == x ? u + 0x7fff + (u >> 16 & 1) : 0x7fff0000u;
}
DEV u16 float_to_bfloat(float x) { return (u16)(rounded_to_bfloat(x) >> 16); }
// The low (high) halves of two words, `lo`'s in the low half.
DEV u32 low_halves(u32 lo, u32 hi) { return __builtin_amdgcn_perm(hi, lo, 0x05040100); }
DEV u32 high_halves(u32 lo, u32 hi) { return __builtin_amdgcn_perm(hi, lo, 0x07060302); }
// Two at once, `lo` in the low half.
DEV u32 pack(bf16, float lo, float hi) { return high_halves(rounded_to_bfloat(lo), rounded_to_bfloat(hi)); }
DEV u32 pack(f16, float lo, float hi) { return float_to_half(lo) | (u32)float_to_half(hi) << 16; }

// ---- arithmetic: `_fast` is good to 2⁻²², tanh to 2⁻¹⁷
DEV float exp2_fast(float x) { return __builtin_amdgcn_exp2f(x); }
DEV float log2_fast(float x) { return __builtin_amdgcn_logf(x); }
DEV float rcp_fast(float x) { return __builtin_amdgcn_rcpf(x); }
DEV float rsqrt_fast(float x) { return __builtin_amdgcn_rsqf(x); }
DEV float tanh_fast(float x) {
    const float far = 1.0f - 2.0f * rcp_fast(exp2_fast(x * 2.885390082f) + 1.0f);
    return __builtin_fabsf(x) < 0.03125f ? x - x * x * x * 0.33333334f : far;
}
// A NaN operand gives NaN.  (The median spares quieting the operands, which fmaxf asks for.)
DEV float max_nan(float a, float b) { return __builtin_isunordered(a, b) ? __builtin_nanf("") : __builtin_amdgcn_fmed3f(a, b, __builtin_inff()); }
DEV float min_nan(float a, float b) { return __builtin_isunordered(a, b) ? __builtin_nanf("") : __builtin_amdgcn_fmed3f(a, b, -__builtin_inff()); }

// Loads from shared memory stay on their side of it: a scheduler that gathers them runs out of registers.  Matrix instructions of CDNA
// may pass, so that they overlap with the next loads.
DEV void keep_loads_apart() { __builtin_amdgcn_sched_barrier(WARP_SIZE == 64 ? 8 : 0); }

// ---- matrix instructions, operands as in the instruction: d (i × j) += a (i × k) · b (k × j)
typedef u32 Words2 __attribute__((ext_vector_type(2)));
typedef u32 Words8 __attribute__((ext_vector_type(8)));
typedef float Floats4 __attribute__((ext_vector_type(4)));
typedef float Floats8 __attribute__((ext_vector_type(8)));
typedef _Float16 Halves4 __attribute__((ext_vector_type(4)));
typedef _Float16 Halves16 __attribute__((ext_vector_type(16)));
typedef short Shorts4 __attribute__((ext_vector_type(4)));
typedef short Shorts16 __attribute__((ext_vector_type(16)));
#if WARP_SIZE == 64
// 16 × 16 × 16.  Lane l gives row (column) l % 16, inner elements l / 16 · 4 …, and holds rows l / 16 · 4 … of column l % 16.
DEV Floats4 mfma(f16, Words2 a, Words2 b, Floats4 d) {
    return __builtin_amdgcn_mfma_f32_16x16x16f16(__builtin_bit_cast(Halves4, a), __builtin_bit_cast(Halves4, b), d, 0, 0, 0);
}
DEV Floats4 mfma(bf16, Words2 a, Words2 b, Floats4 d) {
    return __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(__builtin_bit_cast(Shorts4, a), __builtin_bit_cast(Shorts4, b), d, 0, 0, 0);
}
template <typename T> DEV void mfma_16x16x16(T t, float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1, u32 b0, u32 b1) {
    const Floats4 d = mfma(t, Words2{a0, a1}, Words2{b0, b1}, Floats4{d0, d1, d2, d3});
    d0 = d[0]; d1 = d[1]; d2 = d[2]; d3 = d[3];
}
#else
// 16 × 16 × 16.  Lane l gives row (column) l % 16, all inner elements (so lanes 16 … 31 repeat lanes 0 … 15), and holds rows l / 16,
// l / 16 + 2, … of column l % 16.
DEV Floats8 wmma(f16, Words8 a, Words8 b, Floats8 d) {
    return __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(__builtin_bit_cast(Halves16, a), __builtin_bit_cast(Halves16, b), d);
}
DEV Floats8 wmma(bf16, Words8 a, Words8 b, Floats8 d) {
    return __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(__builtin_bit_cast(Shorts16, a), __builtin_bit_cast(Shorts16, b), d);
}
template <typename T> DEV void wmma_16x16x16(T t, float (&d)[8], const u32 (&a0)[4], const u32 (&a1)[4], const u32 (&b0)[4], const u32 (&b1)[4]) {
    const Floats8 y = wmma(t, Words8{a0[0], a0[1], a0[2], a0[3], a1[0], a1[1], a1[2], a1[3]},
                           Words8{b0[0], b0[1], b0[2], b0[3], b1[0], b1[1], b1[2], b1[3]}, Floats8{d[0], d[1], d[2], d[3], d[4], d[5], d[6], d[7]});
#pragma unroll
    for (int i = 0; i < 8; ++i) d[i] = y[i];
}
#endif
