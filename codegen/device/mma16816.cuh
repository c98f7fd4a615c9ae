// Fragments of the 16 × 8 × 16 matrix instruction (32 lanes), and contractions made of it.
//
// A fragment is an array x[RS][CS]: a lane holds RS rows × CS columns of a warp's matrix; row slot i is row lane_row() +
// slot_row(i), column slot j is column lane_column() + slot_column(j).  Elementwise code needs nothing else of the layout.
constexpr int FRAGMENT_ROWS = 16, FRAGMENT_COLUMNS = 8, FRAGMENT_INNER = 16;
DEV int lane_row() { return lane_index() / 4; }
DEV int lane_column() { return lane_index() % 4 * 2; }
DEV constexpr int slot_row(int i) { return i / 2 * 16 + i % 2 * 8; }
DEV constexpr int slot_column(int j) { return j / 2 * 8 + j % 2; }
constexpr int COLUMN_RUN = 2;                                  // slots of adjacent columns
DEV constexpr int turn(int row) { return row & 7; }            // of a tile's chunks: eight rows' chunks in all banks

// Combine over the lanes that hold the same row (the same column); all of them get the result.
template <class Op, typename T> DEV T combine_row(T x) {
    x = Op::of(x, shuffle_xor(x, 1));
    return Op::of(x, shuffle_xor(x, 2));
}
template <class Op, typename T> DEV T combine_column(T x) {
    x = Op::of(x, shuffle_xor(x, 4));
    x = Op::of(x, shuffle_xor(x, 8));
    return Op::of(x, shuffle_xor(x, 16));
}
DEV bool first_of_row() { return lane_index() % 4 == 0; }      // one lane of those that hold the same row
DEV bool first_of_column() { return lane_index() < 4; }

// ---- operands in shared memory, named by their tile: [rows][inner], [inner][rows], …
// load(r, i, k): rows 16 i … (columns 16 i …) and inner elements 16 k …; one address is worked out ahead, the rest are steps.
// element(i, k): row slot (column slot) i, inner element k.
template <class Tile> struct RowsByInner {
    typedef typename Tile::Element T;
    Tile tile;
    int row0;
    u32 at;
    MEMBER RowsByInner(Tile t, int row0) : tile(t), row0(row0), at(t.chunk(row0 + lane_index() % 16, lane_index() / 16)) {}
    MEMBER void load(u32 (&r)[4], int i, int k) const { load_matrix_x4(r, Tile::step(at, 2 * k) + i * 16 * Tile::PITCH); }
    MEMBER T element(int i, int k) const { return tile.get(row0 + lane_row() + slot_row(i), k); }
};
template <class Tile> struct InnerByRows {
    typedef typename Tile::Element T;
    Tile tile;
    int row0;
    u32 at;
    MEMBER InnerByRows(Tile t, int row0)
        : tile(t), row0(row0), at(t.chunk(lane_index() / 16 * 8 + lane_index() % 8, row0 / 8 + lane_index() / 8 % 2)) {}
    MEMBER void load(u32 (&r)[4], int i, int k) const { load_matrix_x4_trans(r, Tile::step(at, 2 * i) + k * 16 * Tile::PITCH); }
    MEMBER T element(int i, int k) const { return tile.get(k, row0 + lane_row() + slot_row(i)); }
};
template <class Tile> struct ColumnsByInner {
    typedef typename Tile::Element T;
    Tile tile;
    int column0;
    u32 at;
    MEMBER ColumnsByInner(Tile t, int column0)
        : tile(t), column0(column0), at(t.chunk(column0 + lane_index() / 16 * 8 + lane_index() % 8, lane_index() / 8 % 2)) {}
    MEMBER void load(u32 (&r)[4], int j, int k) const { load_matrix_x4(r, Tile::step(at, 2 * k) + j * 16 * Tile::PITCH); }
    MEMBER T element(int j, int k) const { return tile.get(column0 + lane_column() + slot_column(j), k); }
};
template <class Tile> struct InnerByColumns {
    typedef typename Tile::Element T;
    Tile tile;
    int column0;
    u32 at;
    MEMBER InnerByColumns(Tile t, int column0)
        : tile(t), column0(column0), at(t.chunk(lane_index() % 16, column0 / 8 + lane_index() / 16)) {}
    MEMBER void load(u32 (&r)[4], int j, int k) const { load_matrix_x4_trans(r, Tile::step(at, 2 * j) + k * 16 * Tile::PITCH); }
    MEMBER T element(int j, int k) const { return tile.get(k, column0 + lane_column() + slot_column(j)); }
};

// ---- left operands in registers
// Fetched once from shared memory, used many times.
template <typename Type, int MT, int KT> struct Held {
    typedef Type T;
    u32 r[MT][KT][4];
    template <class From> MEMBER explicit Held(const From& from) {
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int k = 0; k < KT; ++k) from.load(r[i][k], i, k);
    }
    MEMBER void load(u32 (&x)[4], int i, int k) const {
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e] = r[i][k][e];
    }
};
// A result fragment, rounded to T: it is already in the order that a left operand needs.
template <typename Type, int RS, int CS> struct Rounded {
    typedef Type T;
    const float (&x)[RS][CS];
    MEMBER void load(u32 (&r)[4], int i, int k) const {
        r[0] = pack(T{}, x[2 * i][4 * k], x[2 * i][4 * k + 1]);
        r[1] = pack(T{}, x[2 * i + 1][4 * k], x[2 * i + 1][4 * k + 1]);
        r[2] = pack(T{}, x[2 * i][4 * k + 2], x[2 * i][4 * k + 3]);
        r[3] = pack(T{}, x[2 * i + 1][4 * k + 2], x[2 * i + 1][4 * k + 3]);
    }
};
template <typename T, int RS, int CS> DEV Rounded<T, RS, CS> rounded(const float (&x)[RS][CS]) { return {x}; }

// The elements of a left operand in shared memory, where a result fragment has them.
template <int RS, int CS, class A> DEV void spread(float (&x)[RS][CS], const A& a) {
    typedef typename A::T T;
#pragma unroll
    for (int i = 0; i < RS / 2; ++i)
#pragma unroll
        for (int k = 0; k < CS / 4; ++k) {
            u32 r[4];
            a.load(r, i, k);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                x[2 * i + e % 2][4 * k + e / 2 * 2] = value(T{(u16)r[e]});
                x[2 * i + e % 2][4 * k + e / 2 * 2 + 1] = value(T{(u16)(r[e] >> 16)});
            }
        }
}

// acc += the sum of each row of a over KT steps of 16 inner elements: a product with ones.
template <int KT, int RS, class A> DEV void sum_rows(float (&acc)[RS], const A& a) {
    const u32 ones = pack(typename A::T{}, 1.0f, 1.0f);
#pragma unroll
    for (int i = 0; i < RS / 2; ++i) {
        float same[2] = {0.0f, 0.0f};                          // other columns: the same sums
#pragma unroll
        for (int k = 0; k < KT; ++k) {
            u32 left[4];
            a.load(left, i, k);
            mma_16x8x16(typename A::T{}, acc[2 * i], same[0], acc[2 * i + 1], same[1], left, ones, ones);
        }
    }
}

// acc += a · b over KT steps of 16 inner elements, on the tensor cores.
template <int KT, int RS, int CS, class A, class B> DEV void contract(float (&acc)[RS][CS], const A& a, const B& b) {
    constexpr int MT = RS / 2, NT = CS / 2;
#pragma unroll
    for (int k = 0; k < KT; ++k) {
        u32 left[MT][4];
#pragma unroll
        for (int i = 0; i < MT; ++i) a.load(left[i], i, k);
#pragma unroll
        for (int j = 0; j < NT; j += 2) {
            u32 right[4];
            b.load(right, j / 2, k);
#pragma unroll
            for (int i = 0; i < MT; ++i) {
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    if (j + h < NT)
                        mma_16x8x16(typename B::T{}, acc[2 * i][2 * (j + h)], acc[2 * i][2 * (j + h) + 1], acc[2 * i + 1][2 * (j + h)],
                                    acc[2 * i + 1][2 * (j + h) + 1], left[i], right[2 * h], right[2 * h + 1]);
            }
        }
    }
}
