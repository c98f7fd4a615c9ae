// The primitives of hip_primitives.h, one by one, against what they are said to do; after amd_builtins.h and the device headers.
static bool fine = true;
static void check(bool holds, const char* what) { if (!holds) { fine = false; printf("wrong: %s\n", what); } }
static float real(u32 bits) { float x; memcpy(&x, &bits, 4); return x; }
static u32 bits(float x) { u32 u; memcpy(&u, &x, 4); return u; }

static void lanes(void**) {
    const int l = lane_index();
    for (int mask = 1; mask < WARP; mask *= 2) {
        check(shuffle_xor(l * 3 + 1, mask) == (l ^ mask) * 3 + 1, "shuffle of a word");
        check(shuffle_xor(l + 0.25, mask) == (l ^ mask) + 0.25, "shuffle of two words");
        check(shuffle_xor((i16)l, mask) == (l ^ mask), "shuffle of half a word");
    }
    check(warp_index() == thread_index() / WARP, "warp");
    check(warp_any(l == 5) && !warp_any(l < 0), "any lane");
}

static void copies(void** a) {
    alignas(16) static const u8 from[32] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18};
    const int t = thread_index();
    if (t <= 16) copy_async(t * 16, t ? from : nullptr, t);      // nothing is read where there is nothing
    block_sync();
    for (int b = 0; t <= 16 && b < 16; ++b) check(load_shared<u8>(t * 16 + b) == (b < t ? from[b] : 0), "a copy in part");
    store_shared<u32>(512 + 4 * t, t);
    check(load_shared<u32>(512 + 4 * t) == (u32)t, "a word in shared memory");
    u32 r[4];
    load_chunk(r, 16 * 16);
    check(!memcmp(r, from, 16), "a chunk");
}

static void numbers() {
    for (u32 high = 0; high < 0x10000; high += 7)
        for (u32 low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
            const float x = real(high << 16 | low);
            const u16 b = float_to_bfloat(x), h = float_to_half(x), want = host::float_to_bfloat(x), half = host::float_to_half(x);
            check(x != x ? (b & 0x7fff) > 0x7f80 : b == want, "rounding to bfloat16");
            check(x != x ? (h & 0x7fff) > 0x7c00 : h == half, "rounding to float16");
            check(pack(bf16{}, x, 1.0f) == (b | 0x3f80u << 16) && pack(f16{}, 1.0f, x) == (0x3c00u | (u32)h << 16), "two halves");
        }
    for (u32 h = 0; h < 0x10000; ++h) {
        const float x = half_to_float((u16)h), want = host::half_to_float((u16)h);
        check(x == want || (x != x && want != want), "float16 to float32");
    }
    for (float x = -20; x < 20; x += 0.0137f) check(fabs(tanh_fast(x) - tanh((double)x)) <= fabs(tanh((double)x)) / 131072, "tanh");
    for (float x = 1e-30f; x < 1; x *= 3) check(fabs(tanh_fast(x) - tanh((double)x)) <= x / 131072, "tanh near 0");
    const float inf = real(0x7f800000), nan = real(0x7fc00000), all[] = {-inf, -2, -0.0f, 0, 1, inf, nan};
    check(tanh_fast(inf) == 1 && tanh_fast(-inf) == -1 && tanh_fast(nan) != tanh_fast(nan), "tanh of what is not finite");
    for (float a : all)
        for (float b : all) {
            const bool none = a != a || b != b;
            const float most = max_nan(a, b), least = min_nan(a, b);
            check(none ? most != most : most == (a > b ? a : b), "max");
            check(none ? least != least : least == (a < b ? a : b), "min");
        }
}

int main() {
    emulator::launch(lanes, nullptr, 1, 2 * WARP, 1024, 1);
    emulator::launch(copies, nullptr, 1, WARP, 1024, 1);
    numbers();
    return fine ? 0 : 1;
}
