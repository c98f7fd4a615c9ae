// Every way of giving operands to a contraction, in the emulator, against plain sums: compiled after the device headers of an
// architecture, of which it asks nothing but what emitted code asks.  Prints the largest error of each combination.
#include <initializer_list>

constexpr int ROWS = 64, INNER = 64, WARPS = 2;
constexpr int RS = ROWS / WARPS / FRAGMENT_ROWS * ROW_SLOTS, KS = INNER / FRAGMENT_COLUMNS * COLUMN_SLOTS;

static float draw() {
    static u32 state = 1;
    state = state * 1664525u + 1013904223u;
    return (float)((int)(state >> 8) % 2001 - 1000) / 500.0f;
}

template <int COLUMNS> struct Results { float tensor[ROWS][COLUMNS], plain[ROWS][COLUMNS], registers[ROWS][COLUMNS], held[ROWS][COLUMNS], row_sum[ROWS], column_max[WARPS][COLUMNS]; };

// a lies as [inner][rows] if AT, b as [inner][columns] if BT
template <class T, bool AT, bool BT, int COLUMNS> static void body(void** arguments) {
    constexpr int CS = COLUMNS / FRAGMENT_COLUMNS * COLUMN_SLOTS;
    const T *a = (const T*)arguments[0], *b = (const T*)arguments[1];
    auto& out = *(Results<COLUMNS>*)arguments[2];
    typedef Tile<T, AT ? INNER : ROWS, AT ? ROWS : INNER> A;
    typedef Tile<T, BT ? INNER : COLUMNS, BT ? COLUMNS : INNER> B;
    const A ta{0};
    const B tb{(u32)A::BYTES};
    constexpr int WA = AT ? ROWS : INNER, WB = BT ? COLUMNS : INNER;
    fill<true, WARPS * WARP>(ta, thread_index(), [&](int r, int c) { return Run<T>{a + r * WA + c, WA - c, 1}; });
    fill<true, WARPS * WARP>(tb, thread_index(), [&](int r, int c) { return Run<T>{b + r * WB + c, WB - c, 1}; });
    copy_commit();
    copy_wait<0>();
    block_sync();
    const int row0 = warp_index() * (ROWS / WARPS);
    auto left = [&] { if constexpr (AT) return InnerByRows<A>(ta, row0); else return RowsByInner<A>(ta, row0); }();
    auto right = [&] { if constexpr (BT) return InnerByColumns<B>(tb, 0); else return ColumnsByInner<B>(tb, 0); }();
    float tensor[RS][CS], plain[RS][CS], registers[RS][CS], held[RS][CS], part[RS][KS];
    set_all(tensor, 0.0f);
    set_all(plain, 0.0f);
    set_all(registers, 0.0f);
    set_all(held, 0.0f);
    contract<INNER / FRAGMENT_INNER>(tensor, left, right);
    contract_plain<INNER>(plain, left, right);
    for (int i = 0; i < RS; ++i)
        for (int j = 0; j < KS; ++j) {
            const int r = row0 + lane_row() + slot_row(i), k = lane_column() + slot_column(j);
            part[i][j] = value(AT ? a[k * ROWS + r] : a[r * INNER + k]);
        }
    contract<INNER / FRAGMENT_INNER>(registers, rounded<T>(part), right);
    const Held<T, RS / ROW_SLOTS, INNER / FRAGMENT_INNER> h(left);
    contract<INNER / FRAGMENT_INNER>(held, h, right);
    for (int i = 0; i < RS; ++i) {
        const int r = row0 + lane_row() + slot_row(i);
        float sum = 0;
        for (int j = 0; j < CS; ++j) {
            const int c = lane_column() + slot_column(j);
            out.tensor[r][c] = tensor[i][j];
            out.plain[r][c] = plain[i][j];
            out.registers[r][c] = registers[i][j];
            out.held[r][c] = held[i][j];
            sum += plain[i][j];
        }
        sum = combine_row<Add>(sum);
        if (first_of_row()) out.row_sum[r] = sum;
    }
    for (int j = 0; j < CS; ++j) {
        float most = -INFINITE;
        for (int i = 0; i < RS; ++i) most = Max::of(most, plain[i][j]);
        most = combine_column<Max>(most);
        if (first_of_column()) out.column_max[warp_index()][lane_column() + slot_column(j)] = most;
    }
}

template <class T, bool AT, bool BT, int COLUMNS> static bool test(const char* name) {
    alignas(16) static T a[ROWS * INNER], b[COLUMNS * INNER];
    static Results<COLUMNS> out;
    for (T& x : a) x = as<T>(draw());
    for (T& x : b) x = as<T>(draw());
    memset(&out, 0xff, sizeof out);
    void* arguments[] = {a, b, &out};
    emulator::launch(body<T, AT, BT, COLUMNS>, arguments, 1, WARPS * WARP, 65536, 3);
    double worst = 0, most[WARPS][COLUMNS];
    for (auto& row : most) for (double& x : row) x = -1e30;
    auto see = [&](double got, double want) { const double d = fabs(got - want); if (!(d <= worst)) worst = d; };
    for (int r = 0; r < ROWS; ++r) {
        double sum = 0;
        for (int c = 0; c < COLUMNS; ++c) {
            double s = 0;
            for (int k = 0; k < INNER; ++k) s += (double)value(AT ? a[k * ROWS + r] : a[r * INNER + k]) * value(BT ? b[k * COLUMNS + c] : b[c * INNER + k]);
            for (float got : {out.tensor[r][c], out.plain[r][c], out.registers[r][c], out.held[r][c]}) see(got, s);
            sum += s;
            double& m = most[r / (ROWS / WARPS)][c];
            m = s > m ? s : m;
        }
        see(out.row_sum[r], sum);
    }
    for (int w = 0; w < WARPS; ++w) for (int c = 0; c < COLUMNS; ++c) see(out.column_max[w][c], most[w][c]);
    printf("%s %d%d %d: %g\n", name, AT, BT, COLUMNS, worst);
    return worst < 1e-3;
}

int main() {
    bool fine = test<bf16, false, false, 96>("bf16");          // rows of a tile are padded where 96 wide, permuted where 64 or 128
    fine &= test<bf16, false, true, 96>("bf16");
    fine &= test<bf16, false, true, 128>("bf16");
    fine &= test<f16, true, false, 128>("f16");
    fine &= test<f16, true, true, 96>("f16");
    return fine ? 0 : 1;
}
