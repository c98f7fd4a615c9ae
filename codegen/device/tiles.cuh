// Tiles in shared memory, reductions, conversions: portable code over the primitives.

struct Add { template <typename T> MEMBER static T of(T a, T b) { return a + b; } };
struct Mul { template <typename T> MEMBER static T of(T a, T b) { return a * b; } };
struct Max {
    MEMBER static float of(float a, float b) { return max_nan(a, b); }
    MEMBER static double of(double a, double b) { return a > b || a != a ? a : b; }
};
struct Min {
    MEMBER static float of(float a, float b) { return min_nan(a, b); }
    MEMBER static double of(double a, double b) { return a < b || a != a ? a : b; }
};

#define INFINITE bits_float(0x7f800000u)
#define NOT_A_NUMBER bits_float(0x7fffffffu)
constexpr float LOG2_E = 1.44269504088896341f;

// ---- conversions: value(x) computes with an element, as<T>(v) stores it
DEV float value(bf16 x) { return bits_float((u32)x.bits << 16); }
DEV float value(f16 x) { return half_to_float(x.bits); }
DEV float value(f8e5m2 x) { return half_to_float((u16)(x.bits << 8)); }
DEV float value(f8e4m3 x) {                                    // sign, 4 exponent bits (bias 7), 3 mantissa bits; no infinity
    const u32 magnitude = x.bits & 0x7f;
    const float y = magnitude == 0x7f ? NOT_A_NUMBER : bits_float(magnitude << 20) * bits_float(0x7b800000u);   // · 2¹²⁰
    return x.bits & 0x80 ? -y : y;
}
DEV float value(float x) { return x; }
DEV double value(double x) { return x; }
DEV i64 value(i64 x) { return x; }
DEV u64 value(u64 x) { return x; }
DEV i32 value(i32 x) { return x; }
DEV u32 value(u32 x) { return x; }
DEV i32 value(i16 x) { return x; }
DEV i32 value(u16 x) { return x; }
DEV i32 value(i8 x) { return x; }
DEV i32 value(u8 x) { return x; }

template <typename T> struct As { template <typename V> MEMBER static T of(V x) { return (T)x; } };
// Integers wrap around: a conversion alone is undefined beyond the range of the type, and saturates.
template <typename V> DEV i64 whole(V x) {                      // without its fraction, modulo 2⁶⁴
    constexpr V half = (V)9223372036854775808.0, period = 2 * half;
    if (x >= half || x < -half) x -= period * (V)floor(x / period);
    return x >= half ? (i64)(u64)x : (i64)x;
}
template <typename T> struct Integer {
    template <typename V> MEMBER static T of(V x) { return (T)x; }
    MEMBER static T of(float x) { return sizeof(T) < 4 ? (T)(i32)x : (T)whole(x); }    // integers are small in float32 programs
    MEMBER static T of(double x) { return (T)whole(x); }
};
template <> struct As<i64> : Integer<i64> {};
template <> struct As<u64> : Integer<u64> {};
template <> struct As<i32> : Integer<i32> {};
template <> struct As<u32> : Integer<u32> {};
template <> struct As<i16> : Integer<i16> {};
template <> struct As<u16> : Integer<u16> {};
template <> struct As<i8> : Integer<i8> {};
template <> struct As<u8> : Integer<u8> {};
template <> struct As<bf16> { MEMBER static bf16 of(float x) { return {float_to_bfloat(x)}; } };
template <> struct As<f16> { MEMBER static f16 of(float x) { return {float_to_half(x)}; } };
// Round to nearest even; what does not fit becomes NaN (e4m3) or infinite (e5m2).
template <> struct As<f8e4m3> {
    MEMBER static f8e4m3 of(float x) {
        const u32 u = float_bits(x), sign = u >> 24 & 0x80, magnitude = u & 0x7fffffff;
        if (magnitude > 0x43e80000u) return {(u8)(sign | 0x7f)};                        // above 464, or NaN
        if (magnitude < 0x3c800000u) {                                                 // below 2⁻⁶: steps of 2⁻⁹
            return {(u8)(sign | (float_bits(bits_float(magnitude) + 16384.0f) & 0xf))};
        }
        const u32 rounded = magnitude + 0x7ffff + (magnitude >> 20 & 1) - (120u << 23);
        return {(u8)(sign | rounded >> 20)};
    }
};
template <> struct As<f8e5m2> {
    MEMBER static f8e5m2 of(float x) {
        const u32 u = float_bits(x), sign = u >> 24 & 0x80, magnitude = u & 0x7fffffff;
        if (magnitude > 0x7f800000u) return {(u8)(sign | 0x7f)};
        if (magnitude >= 0x47700000u) return {(u8)(sign | 0x7c)};                       // 61440 and above
        if (magnitude < 0x38800000u) {                                                 // below 2⁻¹⁴: steps of 2⁻¹⁶
            return {(u8)(sign | (float_bits(bits_float(magnitude) + 128.0f) & 0x7))};
        }
        const u32 rounded = magnitude + 0xfffff + (magnitude >> 21 & 1) - (112u << 23);
        return {(u8)(sign | rounded >> 21)};
    }
};
template <typename T, typename V> DEV T as(V x) { return As<T>::of(x); }
// value(as<T>(x)) of a 16-bit T; the upper half of a pair of bf16 with 0 is its float.
template <typename T> struct Nearest { MEMBER static float of(float x) { return value(as<T>(x)); } };
template <> struct Nearest<bf16> { MEMBER static float of(float x) { return bits_float(pack(bf16{}, 0.0f, x)); } };
template <typename T> DEV float nearest(float x) { return Nearest<T>::of(x); }

// ---- tiles: ROWS × COLUMNS elements; 16-byte chunks are permuted (or rows padded) so that eight rows' chunks at one place
// lie in different banks.  turn(row), of three bits, is what the numbers of a row's chunks are xored with; turn(a ^ b) = turn(a) ^ turn(b).
template <typename T, int ROWS, int COLUMNS> struct Tile {
    typedef T Element;
    static constexpr int CHUNK = 16 / sizeof(T), CHUNKS = (COLUMNS + CHUNK - 1) / CHUNK;
    static constexpr bool PERMUTED = CHUNKS % 8 == 0;
    static constexpr int PITCH = (PERMUTED ? CHUNKS : CHUNKS | 1) * 16, BYTES = ROWS * PITCH;
    u32 base;
    MEMBER u32 chunk(int row, int c) const { return base + row * PITCH + (PERMUTED ? c ^ turn(row) : c) * 16; }
    // The chunk n after the one at `at`, in the same row; n and the bits of the first one's number must not overlap.
    MEMBER static u32 step(u32 at, int n) { return PERMUTED ? (at ^ (n & 7) * 16) + (n & ~7) * 16 : at + n * 16; }
    // The place n rows below `at`, where n and the row of `at`, modulo 16, have no bits in common.
    MEMBER static u32 below(u32 at, int n) { return (PERMUTED ? at ^ turn(n) * 16 : at) + n * PITCH; }
    MEMBER u32 place(int row, int column) const { return chunk(row, column / CHUNK) + column % CHUNK * (int)sizeof(T); }
    MEMBER T get(int row, int column) const { return load_shared<T>(place(row, column)); }
    MEMBER void set(int row, int column, T x) const { store_shared<T>(place(row, column), x); }
};

// What a tile is filled from: `count` elements exist from p on, `step` apart.
template <typename T> struct Run { const T* p; int count; i64 step; };

// Fill a tile.  from(row, column) gives the run at that place.  PACKED: runs are contiguous and aligned to 16 bytes.  Asynchronous
// if PACKED: the caller commits and waits; either way a barrier must follow.
template <bool PACKED, int THREADS, typename T, int ROWS, int COLUMNS, class From>
DEV void fill(Tile<T, ROWS, COLUMNS> tile, int thread, From from) {
    typedef Tile<T, ROWS, COLUMNS> To;
    constexpr int TOTAL = ROWS * To::CHUNKS;
    if constexpr (PACKED) {
#pragma unroll
        for (int first = 0; first < TOTAL; first += THREADS) {
            const int c = first + thread;
            if (TOTAL % THREADS == 0 || c < TOTAL) {
                const int row = c / To::CHUNKS, chunk = c % To::CHUNKS;
                const Run<T> run = from(row, chunk * To::CHUNK);
                const int n = run.count < 0 ? 0 : run.count < To::CHUNK ? run.count : To::CHUNK;
                copy_async(tile.chunk(row, chunk), run.p, n * (int)sizeof(T));
            }
        }
    } else {
#pragma unroll 1
        for (int e = thread; e < ROWS * To::CHUNKS * To::CHUNK; e += THREADS) {
            const int row = e / (To::CHUNKS * To::CHUNK), column = e % (To::CHUNKS * To::CHUNK);
            const Run<T> run = from(row, column);
            T x{};
            if (run.count > 0) x = *run.p;
            tile.set(row, column, x);
        }
    }
}
// Steps of so many chunks after which a thread comes back to the same chunk of a row.
DEV constexpr int period(int threads, int chunks) {
    int turns = 1;
    while (turns * threads % chunks) ++turns;
    return turns;
}
// The same where row r starts at p + r · step, and `rows` rows of `columns` elements exist.  WHOLE: all of the tile
// exists, and so the length of every copy is a constant (else it takes ten instructions).
template <int THREADS, bool WHOLE, typename T, int ROWS, int COLUMNS>
DEV void fill_rows(Tile<T, ROWS, COLUMNS> tile, int thread, const T* p, i64 step, int rows, int columns) {
    typedef Tile<T, ROWS, COLUMNS> To;
    constexpr int TURNS = period(THREADS, To::CHUNKS), DOWN = TURNS * THREADS / To::CHUNKS;
    static_assert(ROWS % DOWN == 0, "every thread copies the same chunks of some rows");
    static_assert(!WHOLE || COLUMNS % To::CHUNK == 0, "chunks that exist as a whole");
#pragma unroll
    for (int n = 0; n < TURNS; ++n) {
        const int c = n * THREADS + thread, row = c / To::CHUNKS, chunk = c % To::CHUNKS, left = columns - chunk * To::CHUNK;
        const int bytes = (left < 0 ? 0 : left < To::CHUNK ? left : To::CHUNK) * (int)sizeof(T);
        const T* q = p + row * step + chunk * To::CHUNK;
#pragma unroll
        for (int r = 0; r < ROWS; r += DOWN) copy_async(tile.chunk(row + r, chunk), q + r * step, WHOLE ? 16 : row + r < rows ? bytes : 0);
    }
}

// ---- contraction without tensor cores; the operands give single elements
template <int K, typename C, int RS, int CS, class A, class B> DEV void contract_plain(C (&acc)[RS][CS], const A& a, const B& b) {
#pragma unroll 4
    for (int k = 0; k < K; ++k) {
        C x[RS], y[CS];
#pragma unroll
        for (int i = 0; i < RS; ++i) x[i] = (C)value(a.element(i, k));
#pragma unroll
        for (int j = 0; j < CS; ++j) y[j] = (C)value(b.element(j, k));
#pragma unroll
        for (int i = 0; i < RS; ++i)
#pragma unroll
            for (int j = 0; j < CS; ++j) acc[i][j] += x[i] * y[j];
    }
}

// ---- runs of N elements between global memory and registers.  PACKED: contiguous, aligned to the run
template <int N, bool PACKED, typename C, typename T> DEV void load_run(C* x, const T* p, i64 step) {
    if constexpr (PACKED && N * sizeof(T) >= 4) {
        constexpr int WORDS = N * sizeof(T) / 4, AT_ONCE = WORDS < 4 ? WORDS : 4;
        union { Words<AT_ONCE> words[WORDS / AT_ONCE]; T elements[N]; } u;
#pragma unroll
        for (int w = 0; w < WORDS / AT_ONCE; ++w) u.words[w] = load_words<AT_ONCE>((const u8*)p + w * AT_ONCE * 4);
#pragma unroll
        for (int e = 0; e < N; ++e) x[e] = (C)value(u.elements[e]);
    } else {
#pragma unroll
        for (int e = 0; e < N; ++e) x[e] = (C)value(p[e * step]);
    }
}
template <int N, bool PACKED, typename C, typename T> DEV void store_run(T* p, const C* x, i64 step) {
    if constexpr (PACKED && N * sizeof(T) >= 4) {
        constexpr int WORDS = N * sizeof(T) / 4, AT_ONCE = WORDS < 4 ? WORDS : 4;
        union { Words<AT_ONCE> words[WORDS / AT_ONCE]; T elements[N]; } u;
#pragma unroll
        for (int e = 0; e < N; ++e) u.elements[e] = as<T>(x[e]);
#pragma unroll
        for (int w = 0; w < WORDS / AT_ONCE; ++w) store_words<AT_ONCE>((u8*)p + w * AT_ONCE * 4, u.words[w]);
    } else {
#pragma unroll
        for (int e = 0; e < N; ++e) p[e * step] = as<T>(x[e]);
    }
}

// ---- arithmetic that C++ lacks
template <typename C> DEV C sign_of(C x) { return x > 0 ? (C)1 : x < 0 ? (C)-1 : x; }                  // NaN and ±0 stay
DEV float modulo(float x, float y) { const float r = fmodf(x, y); return r != 0 && (r < 0) != (y < 0) ? r + y : r; }
DEV double modulo(double x, double y) { const double r = fmod(x, y); return r != 0 && (r < 0) != (y < 0) ? r + y : r; }

// ---- loop bounds: the largest n with n·d ≤ x, the smallest with n·d ≥ x, for d > 0
DEV i64 floor_div(i64 x, i64 d) { return x >= 0 ? x / d : -((-x + d - 1) / d); }
DEV i64 ceil_div(i64 x, i64 d) { return -floor_div(-x, d); }
DEV int at_least(i64 x, int low) { return x > low ? (int)x : low; }
DEV int at_most(i64 x, int high) { return x < high ? (int)x : high; }

// ---- fragments and vectors of registers
template <typename C, int N> DEV void set_all(C (&x)[N], C v) {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = v;
}
template <typename C, int N, int M> DEV void set_all(C (&x)[N][M], C v) {
#pragma unroll
    for (int i = 0; i < N; ++i) set_all(x[i], v);
}
template <typename C> DEV void set_all(C& x, C v) { x = v; }
template <typename C, int N> DEV void assign(C (&x)[N], const C (&y)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = y[i];
}
template <typename C, int N, int M> DEV void assign(C (&x)[N][M], const C (&y)[N][M]) {
#pragma unroll
    for (int i = 0; i < N; ++i) assign(x[i], y[i]);
}
DEV void assign(float& x, float y) { x = y; }
DEV void assign(double& x, double y) { x = y; }

// Vectors: columns in runs side by side over `lanes` lanes.
template <int RUN, int LANES> DEV constexpr int vector_slot(int j) { return j / RUN * (RUN * LANES) + j % RUN; }
template <class Op, typename T> DEV T combine_lanes(T x) {
#pragma unroll
    for (int m = WARP / 2; m; m /= 2) x = Op::of(x, shuffle_xor(x, m));
    return x;
}

// Element `at` along a dimension of `extent`; outside of it NaN, and no read.
template <typename C, typename T> DEV C gather(const T* p, i64 at, i64 extent, i64 stride) {
    return at >= 0 && at < extent ? (C)value(p[at * stride]) : (C)NOT_A_NUMBER;
}
