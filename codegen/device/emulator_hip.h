// What hip_primitives.h has beyond the primitives of sm80.cuh, on the CPU; after emulator.h.
DEV void load_chunk(u32 (&r)[4], u32 at) {
    check_shared(at, 16);
    memcpy(r, shared_memory + at, 16);
}
DEV u32 low_halves(u32 lo, u32 hi) { return (lo & 0xffff) | hi << 16; }
DEV u32 high_halves(u32 lo, u32 hi) { return lo >> 16 | (hi & 0xffff0000u); }
DEV void keep_loads_apart() {}

// Matrix instructions: lane l's word w of an operand holds elements 2w and 2w + 1 of row (column) l % 16 from inner element
// l / 16 · PER (CDNA) or 0 (RDNA: all of it, in both halves) on; register r of the result lies in row ROW(l, r), column l % 16.
namespace emulator {
template <typename T, int WORDS, int HELD, class Row> static void matrix_16x16x16(const u32* a, const u32* b, float* d, Row row) {
    struct In { const u32 *a, *b; const float* d; Row row; } in{a, b, d, row};
    float out[HELD];
    meet(&in, out, [](const void** i, void** o) {
        float A[16][16], B[16][16];
        bool seen[16][16] = {};
        for (int l = 0; l < WARP; ++l) {
            const In& x = *(const In*)i[l];
            for (int e = 0; e < 2 * WORDS; ++e) {
                const int place = l % 16, k = WORDS == 8 ? e : l / 16 * 4 + e;
                const float p = narrow(T{}, (u16)(x.a[e / 2] >> e % 2 * 16)), q = narrow(T{}, (u16)(x.b[e / 2] >> e % 2 * 16));
                if (seen[place][k] && (memcmp(&A[place][k], &p, 4) || memcmp(&B[k][place], &q, 4))) fail("the halves of a warp give different operands");
                seen[place][k] = true;
                A[place][k] = p;
                B[k][place] = q;
            }
        }
        for (int l = 0; l < WARP; ++l) {
            const In& x = *(const In*)i[l];
            for (int r = 0; r < HELD; ++r) {
                float s = x.d[r];
                for (int k = 0; k < 16; ++k) s += A[x.row(l, r)][k] * B[k][l % 16];
                ((float*)o[l])[r] = s;
            }
        }
    });
    memcpy(d, out, sizeof out);
}
}  // namespace emulator
#if WARP_SIZE == 64
template <typename T> static void mfma_16x16x16(T, float& d0, float& d1, float& d2, float& d3, u32 a0, u32 a1, u32 b0, u32 b1) {
    const u32 a[2] = {a0, a1}, b[2] = {b0, b1};
    float d[4] = {d0, d1, d2, d3};
    emulator::matrix_16x16x16<T, 2, 4>(a, b, d, [](int l, int r) { return l / 16 * 4 + r; });
    d0 = d[0]; d1 = d[1]; d2 = d[2]; d3 = d[3];
}
#else
template <typename T> static void wmma_16x16x16(T, float (&d)[8], const u32 (&a0)[4], const u32 (&a1)[4], const u32 (&b0)[4], const u32 (&b1)[4]) {
    u32 a[8], b[8];
    memcpy(a, a0, 16); memcpy(a + 4, a1, 16);
    memcpy(b, b0, 16); memcpy(b + 4, b1, 16);
    emulator::matrix_16x16x16<T, 8, 8>(a, b, d, [](int l, int r) { return l / 16 + 2 * r; });
}
#endif
