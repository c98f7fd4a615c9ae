// Primitives of NVIDIA GPUs from sm_80 on: what the tile code below is written in.  Everything that is spelled in PTX is here.
// Compiles under NVRTC and nvcc, without any include.
#pragma nv_diag_suppress 177                                   // not every kernel uses every primitive
#define DEV __device__ __forceinline__
#define MEMBER __device__ __forceinline__
#define KERNEL(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)
#define INLINE_LAMBDA __attribute__((always_inline))

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;
typedef short i16;
typedef int i32;
typedef long long i64;

constexpr int WARP = 32;

// ---- threads
DEV int thread_index() { return threadIdx.x; }
DEV i64 block_index() { return blockIdx.x; }
DEV int lane_index() { return threadIdx.x % WARP; }
// The same in every lane, so that the compiler keeps it in a uniform register.
DEV int warp_index() { return __shfl_sync(~0u, (int)threadIdx.x / WARP, 0); }
DEV void block_sync() { __syncthreads(); }
DEV void warp_sync() { __syncwarp(); }
// Programmatic dependent launch: a kernel that was launched ahead of the end of the one before it waits here for its results.
DEV void previous_kernel_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEV void next_kernel_may_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
template <typename T> DEV T shuffle_xor(T x, int mask) { return __shfl_xor_sync(~0u, x, mask); }
DEV bool warp_any(bool x) { return __any_sync(~0u, x); }

// ---- shared memory: places are byte offsets into the block's dynamic shared memory
extern __shared__ __align__(1024) unsigned char shared_memory[];
template <typename T> DEV T load_shared(u32 at) { return *(const T*)(shared_memory + at); }
template <typename T> DEV void store_shared(u32 at, T x) { *(T*)(shared_memory + at) = x; }
DEV u32 shared_address(u32 at) { return (u32)__cvta_generic_to_shared(shared_memory) + at; }

// 16 bytes from global to shared memory, asynchronously; the last 16 - `bytes` of them become zero, and are not read.
DEV void copy_async(u32 to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes) : "memory");
}
DEV void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Wait until at most N of this thread's newest groups are under way.
template <int N> DEV void copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

// ---- matrices of 8 × 8 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8
DEV void load_matrix_x4(u32 (&r)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}
DEV void load_matrix_x4_trans(u32 (&r)[4], u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(row)) : "memory");
}

struct bf16 { u16 bits; };
struct f16 { u16 bits; };
struct f8e4m3 { u8 bits; };
struct f8e5m2 { u8 bits; };

// c (16 × 8) += a (16 × 16) · b (16 × 8)
DEV void mma_16x8x16(bf16, float& c0, float& c1, float& c2, float& c3, const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEV void mma_16x8x16(f16, float& c0, float& c1, float& c2, float& c3, const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- conversions
DEV float bits_float(u32 x) { return __uint_as_float(x); }
DEV u32 float_bits(float x) { return __float_as_uint(x); }
DEV float half_to_float(u16 x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x)); return y; }
DEV u16 float_to_half(float x) { u16 y; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x)); return y; }
// Two at once, `lo` in the low half.
DEV u32 pack(bf16, float lo, float hi) { u32 y; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo)); return y; }
DEV u32 pack(f16, float lo, float hi) { u32 y; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo)); return y; }
// As half of a pair: of one alone the assembler may make an instruction of the unit of exponentials, at a fraction of the rate.
DEV u16 float_to_bfloat(float x) { return (u16)pack(bf16{}, x, 0.0f); }

// ---- arithmetic: `_fast` is good to 2⁻²², tanh to 2⁻¹¹
DEV float exp2_fast(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEV float log2_fast(float x) { float y; asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEV float tanh_fast(float x) { float y; asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEV float rcp_fast(float x) { float y; asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEV float rsqrt_fast(float x) { float y; asm("rsqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
// A NaN operand gives NaN.
DEV float max_nan(float a, float b) { float y; asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b)); return y; }
DEV float min_nan(float a, float b) { float y; asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b)); return y; }

// ---- global memory, N × 4 bytes at once, aligned to as much
template <int N> struct alignas(4 * N) Words { u32 w[N]; };
template <int N> DEV Words<N> load_words(const void* p) { return *(const Words<N>*)p; }
template <int N> DEV void store_words(void* p, const Words<N>& x) { *(Words<N>*)p = x; }
