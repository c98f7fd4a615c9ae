// The builtins of hip_primitives.h on the emulator's lanes, as AMD's instruction set manuals describe them: so that the primitives
// themselves run, not only what is made of them.  After emulator.h and emulator_hip.h, both in namespace host.
#undef DEV
#undef MEMBER
#undef KERNEL
#undef INLINE_LAMBDA
namespace emulator = host::emulator;
alignas(1024) unsigned char shared_memory[65536];

namespace builtin {
constexpr int LANES = WARP_SIZE;

// Lane l gets the value of lane from(l).
template <class From> static int move(int x, From from) {
    int in = x, out;
    struct In { int x; From from; } arguments{in, from};
    emulator::meet(&arguments, &out, [](const void** i, void** o) {
        for (int l = 0; l < LANES; ++l) *(int*)o[l] = ((const In*)i[((const In*)i[l])->from(l)])->x;
    });
    return out;
}
static int dpp(int x, int control) {
    return move(x, [=](int l) {
        if (control < 0x100) return l & ~3 | control >> l % 4 * 2 & 3;                         // quad_perm
        if (control > 0x120 && control < 0x130) return l & ~15 | (l - (control & 15)) & 15;     // row_ror
        emulator::fail("an unknown data-parallel move");
        return 0;
    });
}
static int swizzle(int x, int pattern) {                       // bit mode, within 32 lanes
    return move(x, [=](int l) { return l & ~31 | ((l & 31 & pattern | pattern >> 5 & 31) ^ pattern >> 10 & 31); });
}
static int permlanex16(int x, unsigned low, unsigned high) {
    return move(x, [=](int l) { return (l & ~15 ^ 16) | (int)((l % 16 < 8 ? low : high) >> l % 8 * 4 & 15); });
}
static int bpermute(int address, int x) { return move(x, [=](int) { return address / 4 % LANES; }); }
static unsigned long long ballot(bool x) {
    unsigned long long all = 0;
    for (int l = 0; l < LANES; ++l) all |= (unsigned long long)(move(x, [=](int) { return l; }) != 0) << l;
    return all;
}
static unsigned perm(unsigned high, unsigned low, unsigned selectors) {
    const unsigned long long bytes = (unsigned long long)high << 32 | low;
    unsigned y = 0;
    for (int b = 0; b < 4; ++b) y |= (unsigned)(bytes >> (selectors >> 8 * b & 7) * 8 & 255) << 8 * b;
    return y;
}
static float median(float a, float b, float c) { return fmaxf(fminf(a, b), fminf(fmaxf(a, b), c)); }
template <class T, int WORDS, int HELD, class V, class D, class Row> static D matrix(V a, V b, D d, Row row) {
    unsigned left[WORDS], right[WORDS];
    float sum[HELD];
    memcpy(left, &a, sizeof left);
    memcpy(right, &b, sizeof right);
    memcpy(sum, &d, sizeof sum);
    emulator::matrix_16x16x16<T, WORDS, HELD>(left, right, sum, row);
    memcpy(&d, sum, sizeof sum);
    return d;
}
template <class T, class V, class D> static D mfma(V a, V b, D d) { return matrix<T, 2, 4>(a, b, d, [](int l, int r) { return l / 16 * 4 + r; }); }
template <class T, class V, class D> static D wmma(V a, V b, D d) { return matrix<T, 8, 8>(a, b, d, [](int l, int r) { return l / 16 + 2 * r; }); }
}  // namespace builtin

#define __builtin_amdgcn_workitem_id_x() emulator::self->index
#define __builtin_amdgcn_workgroup_id_x() emulator::block
#define __builtin_amdgcn_readfirstlane(x) (x)                   // asked of what is the same in all lanes
#define __builtin_amdgcn_fence(order, scope)
#define __builtin_amdgcn_s_barrier() host::block_sync()
#define __builtin_amdgcn_wave_barrier() host::warp_sync()
#define __builtin_amdgcn_sched_barrier(mask)
#define __builtin_amdgcn_ballot_w64(x) builtin::ballot(x)
#define __builtin_amdgcn_ballot_w32(x) builtin::ballot(x)
#define __builtin_amdgcn_mov_dpp(x, control, rows, banks, bound) builtin::dpp(x, control)
#define __builtin_amdgcn_ds_swizzle(x, pattern) builtin::swizzle(x, pattern)
#define __builtin_amdgcn_permlanex16(old, x, low, high, inactive, bound) builtin::permlanex16(x, low, high)
#define __builtin_amdgcn_ds_bpermute(address, x) builtin::bpermute(address, x)
#define __builtin_amdgcn_perm(high, low, selectors) builtin::perm(high, low, selectors)
#define __builtin_amdgcn_fmed3f(a, b, c) builtin::median(a, b, c)
#define __builtin_amdgcn_exp2f(x) exp2f(x)
#define __builtin_amdgcn_logf(x) log2f(x)
#define __builtin_amdgcn_rcpf(x) (1.0f / (x))
#define __builtin_amdgcn_rsqf(x) (1.0f / sqrtf(x))
#define __builtin_amdgcn_mfma_f32_16x16x16f16(a, b, d, x, y, z) builtin::mfma<host::f16>(a, b, d)
#define __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(a, b, d, x, y, z) builtin::mfma<host::bf16>(a, b, d)
#define __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(a, b, d) builtin::wmma<host::f16>(a, b, d)
#define __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(a, b, d) builtin::wmma<host::bf16>(a, b, d)
