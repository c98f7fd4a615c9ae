struct Yes { static constexpr bool value = true; };
struct No { static constexpr bool value = false; };

// Which of a ring's places comes next, and the parity of the phase there: from a count, which the compiler can keep in a uniform register.
template <int STAGES> struct Ring {
    u32 count = 0;
    MEMBER int slot() const { return (int)(count % STAGES); }
    MEMBER u32 parity() const { return count / STAGES & 1; }
    MEMBER void advance() { ++count; }
    MEMBER void settle() { count = (u32)uniform((int)count); }
};

// Tiles as TMA writes and wgmma reads them: panels of 64 16-bit columns (128 bytes) × ROWS rows, one after the other, 16-byte chunks
// of a row permuted by its number (the 128-byte swizzle).  A tile begins at a multiple of 1024 bytes.
template <typename T, int ROWS, int COLUMNS> struct Panels {
    typedef T Element;
    static_assert(sizeof(T) == 2 && ROWS % 8 == 0, "whole groups of eight rows of 16-bit elements");
    static constexpr int PANELS = (COLUMNS + 63) / 64, PANEL = ROWS * 128, BYTES = PANELS * PANEL, PITCH = 128;
    u32 base;
    MEMBER u32 chunk(int row, int c) const { return base + c / 8 * PANEL + row * PITCH + ((c ^ row) & 7) * 16; }
    // The chunk n after the one at `at`, in the same row; n and the bits of the first one's number must not overlap.
    MEMBER static u32 step(u32 at, int n) { return (at ^ (n & 7) * 16) + n / 8 * PANEL; }
    MEMBER u32 place(int row, int column) const {
        return base + column / 64 * PANEL + row * 128 + ((column / 8 ^ row) & 7) * 16 + column % 8 * 2;
    }
    MEMBER T get(int row, int column) const { return load_shared<T>(place(row, column)); }
    MEMBER void set(int row, int column, T x) const { store_shared<T>(place(row, column), x); }
};

// A matrix in shared memory as wgmma takes it: address / 16 in bits 0-13, distance of panels / 16 in 16-29, of groups of eight rows
// / 16 in 32-45, 1 in 62-63 for the 128-byte swizzle.
DEV u64 matrix_at(u32 at, u32 panel) {
    return (u64)(1u << 30 | 1024 / 16) << 32 | (panel / 16) << 16 | (shared_address(at) & 0x3ffff) / 16;
}

// Operands by how their tile lies: KMajor has the summed index along its rows' 64-column panels, MNMajor down its rows.
// step(k) is inner elements 16 k …; the operand begins `shift` bytes into the tile (a stage of a ring, a warpgroup's rows): added
// to the finished word, so that what depends on the place in a loop is one addition.
template <class Tile> struct KMajor {
    typedef typename Tile::Element T;
    static constexpr int TURNED = 0;
    u64 matrix;
    MEMBER KMajor(Tile t, u32 shift) : matrix(matrix_at(t.base, Tile::PANEL) + shift / 16) {}
    MEMBER u64 step(int k) const { return matrix + (k / 4 * Tile::PANEL + k % 4 * 32) / 16; }
};
template <class Tile> struct MNMajor {
    typedef typename Tile::Element T;
    static constexpr int TURNED = 1;
    u64 matrix;
    MEMBER MNMajor(Tile t, u32 shift) : matrix(matrix_at(t.base, Tile::PANEL) + shift / 16) {}
    MEMBER u64 step(int k) const { return matrix + k * 2048 / 16; }
};

// A result fragment rounded to T, in the order that a left operand needs; it must stay as it is while products read it.
template <typename T, int CS> DEV void round_to(u32 (&p)[CS], const float (&x)[2][CS]) {
#pragma unroll
    for (int j = 0; j < CS / 2; ++j) {
        p[2 * j] = pack(T{}, x[0][2 * j], x[0][2 * j + 1]);
        p[2 * j + 1] = pack(T{}, x[1][2 * j], x[1][2 * j + 1]);
    }
}

// acc = a · b, or acc += a · b, over STEPS × 16 inner elements, for the 64 rows of a warpgroup: issued, not awaited.
template <int STEPS, int CS, class A, class B> DEV void multiply(float (&acc)[2][CS], const A& a, const B& b, bool add) {
#pragma unroll
    for (int k = 0; k < STEPS; ++k) wgmma<A::TURNED, B::TURNED>(typename B::T{}, acc, a.step(k), b.step(k), k > 0 || add);
}
// The steps FROM to TO - 1 of one whose left operand is in registers.
template <int FROM, int TO, int CS, int N, class B> DEV void multiply_part(float (&acc)[2][CS], const u32 (&a)[N], const B& b, bool add) {
#pragma unroll
    for (int k = FROM; k < TO; ++k)
        wgmma<B::TURNED>(typename B::T{}, acc, a[4 * k], a[4 * k + 1], a[4 * k + 2], a[4 * k + 3], b.step(k), k > 0 || add);
}
template <int STEPS, int CS, int N, class B> DEV void multiply(float (&acc)[2][CS], const u32 (&a)[N], const B& b, bool add) {
    multiply_part<0, STEPS>(acc, a, b, add);
}

// ---- frozen pivots: what a tile's state must be like at the end, and a list of the tiles where it is not: their number, then one entry
// for each warp that found so
template <int N> DEV bool all_below(const float (&x)[N], float most) {
    bool good = true;
#pragma unroll
    for (int i = 0; i < N; ++i) good &= fabsf(x[i]) < most;
    return good;
}
template <int N, int M> DEV bool all_below(const float (&x)[N][M], float most) {
    float worst[8] = {};                                       // NaN once anything is infinite or NaN; eight, for one would be a chain
#pragma unroll
    for (int i = 0; i < N; ++i)
#pragma unroll
        for (int j = 0; j < M; ++j) worst[j % 8] = fmaf(x[i][j], 0.0f, worst[j % 8]);
    return (((worst[0] + worst[1]) + (worst[2] + worst[3])) + ((worst[4] + worst[5]) + (worst[6] + worst[7]))) == 0.0f;
}
DEV void note_failed(u32 list, int tile) { store_shared<int>(list + 4 + 4 * fetch_add_shared(list, 1), tile); }
// The entry after number `at` that no earlier one equals (-1 if there is none); `at` moves to it.
DEV int next_failed(u32 entries, int count, int& at) {
    for (++at; at < count; ++at) {
        const int tile = load_shared<int>(entries + 4 * at);
        bool seen = false;
        for (int i = 0; i < at; ++i) seen |= load_shared<int>(entries + 4 * i) == tile;
        if (!seen) return tile;
    }
    return -1;
}

// ---- a result fragment to rows in memory: row(i) is where the first column of row slot i lies, null if the row does not exist.
// 4 × 4 words are transposed within each quad of lanes, so that a lane writes 16 bytes at once.
DEV void transpose_quad(u32 (&x)[4]) {
    const bool low = lane_index() & 1, high = lane_index() & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const u32 y = shuffle_xor(choose(low, x[i], x[i + 1]), 1);
        x[i] = choose(low, y, x[i]);
        x[i + 1] = choose(low, x[i + 1], y);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 y = shuffle_xor(choose(high, x[i], x[i + 2]), 2);
        x[i] = choose(high, y, x[i]);
        x[i + 2] = choose(high, x[i + 2], y);
    }
}
template <typename T, int CS, class Row> DEV void store_rows(const float (&x)[2][CS], Row row) {
    static_assert(CS % 8 == 0, "groups of 32 columns");
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        T* const p = row(i);
#pragma unroll
        for (int g = 0; g < CS / 8; ++g) {
            u32 w[4];
#pragma unroll
            for (int e = 0; e < 4; ++e) w[e] = pack(T{}, x[i][8 * g + 2 * e], x[i][8 * g + 2 * e + 1]);
            transpose_quad(w);
            store_words_if(p != nullptr, p + 32 * g + lane_index() % 4 * 8, w);
        }
    }
}
// The same in two steps: rounded now, so that products can have the registers, and stored later, in PARTS parts.
template <typename T, int CS> struct HeldRows {
    static_assert(CS % 8 == 0, "groups of 32 columns");
    u32 words[2][CS / 2];
    T* rows[2];
    template <class Row> MEMBER void take(const float (&x)[2][CS], Row row) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int j = 0; j < CS / 2; ++j) words[i][j] = pack(T{}, x[i][2 * j], x[i][2 * j + 1]);
            rows[i] = row(i);
        }
        pin(words);
    }
    template <int PART, int PARTS> MEMBER void store() {
        constexpr int GROUPS = CS / 8 / PARTS;
        static_assert(GROUPS * PARTS * 8 == CS, "whole groups");
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int g = PART * GROUPS; g < (PART + 1) * GROUPS; ++g) {
                u32 w[4] = {words[i][4 * g], words[i][4 * g + 1], words[i][4 * g + 2], words[i][4 * g + 3]};
                transpose_quad(w);
                store_words_if(rows[i] != nullptr, rows[i] + 32 * g + lane_index() % 4 * 8, w);
            }
    }
};
