// Fragments of the 16 × 16 × 16 matrix instructions of RDNA 3 (32 lanes), and contractions made of them.
//
// A fragment is an array x[RS][CS]: a lane holds RS rows × CS columns of a warp's matrix; row slot i is row lane_row() +
// slot_row(i), column slot j is column lane_column() + slot_column(j).  Elementwise code needs nothing else of the layout.
//
// The instruction is given the right operand as its rows: it makes the transposed product, of which a lane holds one of our rows, every
// second of sixteen columns.  Instructions go in pairs, and row m of the first (second) is our column m % 2 · 16 + m / 2 · 2 (and 1
// more), so that a lane holds sixteen adjacent columns of 32.  A left operand is wanted whole in both halves of a warp: each half
// holds half of a result's columns as 32 inner elements, and gets the rest from the other.
constexpr int FRAGMENT_ROWS = 16, FRAGMENT_COLUMNS = 32, FRAGMENT_INNER = 32;
DEV int lane_row() { return lane_index() % 16; }
DEV int lane_column() { return lane_index() / 16 * 16; }
DEV constexpr int slot_row(int i) { return i * 16; }
DEV constexpr int slot_column(int j) { return j / 16 * 32 + j % 16; }
constexpr int COLUMN_RUN = 16;                                 // slots of adjacent columns
DEV constexpr int turn(int row) { return (row ^ row >> 1 & 4) & 7; }                       // of a tile's chunks
DEV int given_column() { return lane_index() % 2 * 16 + lane_index() % 16 / 2 * 2; }       // that this lane gives to a product

// Combine over the lanes that hold the same row (the same column); all of them get the result.
template <class Op, typename T> DEV T combine_row(T x) { return Op::of(x, shuffle_xor(x, 16)); }
template <class Op, typename T> DEV T combine_column(T x) {
    x = Op::of(x, shuffle_xor(x, 1));
    x = Op::of(x, shuffle_xor(x, 2));
    x = Op::of(x, shuffle_xor(x, 4));
    return Op::of(x, shuffle_xor(x, 8));
}
DEV bool first_of_row() { return lane_index() < 16; }          // one lane of those that hold the same row
DEV bool first_of_column() { return lane_index() % 16 == 0; }

// ---- operands in shared memory, named by their tile: [rows][inner], [inner][rows], …
// load(r, i, k): rows 16 i … (columns 32 i …) and inner elements 32 k …: of each row (column) that is a lane's, all of them, four chunks of
// eight.  element(i, k): row slot (column slot) i, inner element k.
template <class Tile> struct RowsByInner {
    typedef typename Tile::Element T;
    Tile tile;
    int row0;
    u32 at;
    MEMBER RowsByInner(Tile t, int row0) : tile(t), row0(row0), at(t.chunk(row0 + lane_row(), 0)) {}
    MEMBER void load(u32 (&r)[4][4], int i, int k) const {
#pragma unroll
        for (int c = 0; c < 4; ++c) load_chunk(r[c], Tile::step(at, 4 * k + c) + i * 16 * Tile::PITCH);
    }
    MEMBER T element(int i, int k) const { return tile.get(row0 + lane_row() + slot_row(i), k); }
};
template <class Tile> struct InnerByRows {
    typedef typename Tile::Element T;
    Tile tile;
    int row0;
    MEMBER InnerByRows(Tile t, int row0) : tile(t), row0(row0) {}
    MEMBER void load(u32 (&r)[4][4], int i, int k) const {
#pragma unroll
        for (int c = 0; c < 4; ++c)
#pragma unroll
            for (int e = 0; e < 4; ++e) r[c][e] = bits(i, k * 32 + c * 8 + 2 * e) | bits(i, k * 32 + c * 8 + 2 * e + 1) << 16;
    }
    MEMBER u32 bits(int i, int inner) const { return load_shared<u16>(tile.place(inner, row0 + i * 16 + lane_row())); }
    MEMBER T element(int i, int k) const { return tile.get(k, row0 + lane_row() + slot_row(i)); }
};
template <class Tile> struct ColumnsByInner {
    typedef typename Tile::Element T;
    Tile tile;
    int column0;
    u32 at[2];
    MEMBER ColumnsByInner(Tile t, int column0)
        : tile(t), column0(column0), at{t.chunk(column0 + given_column(), 0), t.chunk(column0 + given_column() + 1, 0)} {}
    MEMBER void load(u32 (&r)[2][4][4], int j, int k) const {
#pragma unroll
        for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int c = 0; c < 4; ++c) load_chunk(r[h][c], Tile::step(at[h], 4 * k + c) + j * 32 * Tile::PITCH);
    }
    MEMBER T element(int j, int k) const { return tile.get(column0 + lane_column() + slot_column(j), k); }
};
template <class Tile> struct InnerByColumns {
    typedef typename Tile::Element T;
    Tile tile;
    int column0;
    u32 at[2];                                                 // of even and odd j
    MEMBER InnerByColumns(Tile t, int column0) : tile(t), column0(column0), at{t.place(0, column0 + given_column()), t.place(0, column0 + 32 + given_column())} {}
    MEMBER void load(u32 (&r)[2][4][4], int j, int k) const {
#pragma unroll
        for (int c = 0; c < 4; ++c)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const u32 even = pair(j, k * 32 + c * 8 + 2 * e), odd = pair(j, k * 32 + c * 8 + 2 * e + 1);
                r[0][c][e] = low_halves(even, odd);
                r[1][c][e] = high_halves(even, odd);
            }
    }
    MEMBER u32 pair(int j, int inner) const { return load_shared<u32>(Tile::below(at[j % 2], inner) + j / 2 * 128); }
    MEMBER T element(int j, int k) const { return tile.get(k, column0 + lane_column() + slot_column(j)); }
};

// ---- left operands in registers
// Fetched once from shared memory, used many times.
template <typename Type, int MT, int KT> struct Held {
    typedef Type T;
    u32 r[MT][KT][4][4];
    template <class From> MEMBER explicit Held(const From& from) {
#pragma unroll
        for (int i = 0; i < MT; ++i)
#pragma unroll
            for (int k = 0; k < KT; ++k) from.load(r[i][k], i, k);
    }
    MEMBER void load(u32 (&x)[4][4], int i, int k) const {
#pragma unroll
        for (int c = 0; c < 4; ++c)
#pragma unroll
            for (int e = 0; e < 4; ++e) x[c][e] = r[i][k][c][e];
    }
};
// A result fragment, rounded to T.
template <typename Type, int RS, int CS> struct Rounded {
    typedef Type T;
    const float (&x)[RS][CS];
    MEMBER void load(u32 (&r)[4][4], int i, int k) const {
        const bool upper = lane_index() >= 16;
#pragma unroll
        for (int c = 0; c < 2; ++c)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const u32 own = pack(T{}, x[i][16 * k + 8 * c + 2 * e], x[i][16 * k + 8 * c + 2 * e + 1]), other = shuffle_xor(own, 16);
                r[c][e] = upper ? other : own;
                r[2 + c][e] = upper ? own : other;
            }
    }
};
template <typename T, int RS, int CS> DEV Rounded<T, RS, CS> rounded(const float (&x)[RS][CS]) { return {x}; }

// acc += the sum of each row of a over KT steps of 32 inner elements: a product with ones.
template <int KT, int RS, class A> DEV void sum_rows(float (&acc)[RS], const A& a) {
    keep_loads_apart();                                        // it takes sixteen registers beside the operand
    const u32 one = pack(typename A::T{}, 1.0f, 1.0f), ones[4] = {one, one, one, one};
#pragma unroll
    for (int i = 0; i < RS; ++i) {
        float d[8] = {acc[i]};                                 // the others are other columns: the same sums
#pragma unroll
        for (int k = 0; k < KT; ++k) {
            u32 left[4][4];
            a.load(left, i, k);
#pragma unroll
            for (int s = 0; s < 4; s += 2) wmma_16x16x16(typename A::T{}, d, ones, ones, left[s], left[s + 1]);
        }
        acc[i] = d[0];
    }
}

// acc += a · b over KT steps of 32 inner elements, on the matrix cores.
template <int KT, int RS, int CS, class A, class B> DEV void contract(float (&acc)[RS][CS], const A& a, const B& b) {
    static_assert(CS % 16 == 0, "columns of whole fragments");
#pragma unroll
    for (int k = 0; k < KT; ++k) {
        keep_loads_apart();
        u32 left[RS][4][4];
#pragma unroll
        for (int i = 0; i < RS; ++i) a.load(left[i], i, k);
#pragma unroll
        for (int j = 0; j < CS / 16; ++j) {
            keep_loads_apart();
            u32 right[2][4][4];
            b.load(right, j, k);
#pragma unroll
            for (int s = 0; s < 4; s += 2)
#pragma unroll
                for (int i = 0; i < RS; ++i)
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        float d[8];
#pragma unroll
                        for (int e = 0; e < 8; ++e) d[e] = acc[i][16 * j + 2 * e + h];
                        wmma_16x16x16(typename B::T{}, d, right[h][s], right[h][s + 1], left[i][s], left[i][s + 1]);
#pragma unroll
                        for (int e = 0; e < 8; ++e) acc[i][16 * j + 2 * e + h] = d[e];
                    }
        }
    }
}
