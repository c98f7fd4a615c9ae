// The primitives of sm90.cuh, and wgmma in every shape, on the CPU; after emulator.h.
//
// Copies by tensor map and matrix products happen some time between their issue and what waits for them: for seeds 0 and 3 (modulo 4)
// when no thread can go on, the oldest or the newest copy first; for 1 and 2 by chance.  Under odd seeds the lanes of a warp drift
// apart.  What is under way is not to be touched: its destination is NaN, and what would be a race on a GPU is a failure here, whoever
// wins it.
#define __grid_constant__
#define MAP const TensorMap

// What emulate.py tells of a launch's tensor map: dims and box in elements of `width` bytes, innermost first; strides of dims 1, 2, …
// in bytes; swizzle 0, 32, 64 or 128.
struct alignas(64) TensorMap {
    u64 address;
    u32 rank, width;
    u64 dims[5], strides[4];
    u32 box[5], swizzle;
};
static_assert(sizeof(TensorMap) == 128, "as on a GPU");

namespace emulator {
// Addresses are not offsets: a GPU keeps some shared memory for itself.
constexpr u32 SHARED_START = 1024, MOST_SHARED = 256 * 1024;

// Of the shared memories of a cluster's blocks as one: a place in that of block `rank`.  (A place in the block's own is what kernels have.)
static u32 place_in(int rank, u32 at) { return (u32)rank * shared_pitch + at; }

// ---- who may touch shared memory, for each 16 bytes of it: is a copy filling them, how many products read them (until their wait), and
// which thread's ordinary stores wrote them (+ 1, from bit 20 on), when it had fenced so many times
static u8 filling[MOST_BLOCKS * MOST_SHARED / 16];
static u16 reading[MOST_BLOCKS * MOST_SHARED / 16];
static u32 writer[MOST_BLOCKS * MOST_SHARED / 16];
static u32 fences[MAX_THREADS];
static void stored(u32 at, u32 bytes) {
    const u32 first = place_in(rank_of(*self), at);
    for (u32 i = first / 16; i <= (first + bytes - 1) / 16; ++i) {
        if (reading[i]) fail("a store to %u, which a product under way reads", at);
        if (filling[i]) fail("a store to %u, which a copy under way fills", at);
        writer[i] = (u32)(self->index + 1) << 20 | (fences[self->index] & 0xfffff);
    }
}

// ---- barriers
struct Barrier {
    int phase, missing[2];          // phases complete; arrivals and bytes that the current one lacks
    int arrivals, owner, since, since_cluster;
    bool known, published;
};
static Barrier barriers[MOST_BLOCKS * MOST_SHARED / 8];
static u32 barrier_places[MOST_BLOCKS * MOST_SHARED / 8];
static int barrier_count;
static u64 barrier_mark(u32 at) { return 0xba441e4000000000ull | at; }      // lies where the barrier does

static Barrier& barrier_at(u32 at, int rank, Line line) {
    if (at % 8 || at >= shared_size || !barriers[place_in(rank, at) / 8].known) fail("line %d: no barrier at %u", line.number, at);
    Barrier& b = barriers[place_in(rank, at) / 8];
    u64 mark;
    memcpy(&mark, shared_memories + place_in(rank, at), 8);
    if (mark != barrier_mark(at)) fail("line %d: something has overwritten the barrier at %u", line.number, at);
    if (rank != rank_of(*self)) {
        if (!b.published || b.since_cluster == cluster_generation)
            fail("line %d: the barrier at %u of another block is used before barrier_init_done and a barrier of the cluster", line.number, at);
        if (!block_left[rank]) fail("line %d: the block with the barrier at %u has ended", line.number, at);
    } else if (b.owner != self->index && (!b.published || b.since == block_generation[rank])) {
        fail("line %d: the barrier at %u is used before barrier_init_done and a barrier of the block", line.number, at);
    }
    return b;
}
static Barrier& barrier_at(u32 at, Line line) { return barrier_at(at, rank_of(*self), line); }
static void complete(Barrier& b) {
    if (b.missing[0] || b.missing[1]) return;
    b.phase++;
    b.missing[0] = b.arrivals;
}
static void expect(Barrier& b, u32 at, int bytes, Line line) {
    if (!b.missing[0]) fail("line %d: more than %d arrivals in one phase of the barrier at %u", line.number, b.arrivals, at);
    b.missing[1] += bytes;
    if (b.missing[1] >= 1 << 20) fail("line %d: the barrier at %u cannot count %d bytes", line.number, at, b.missing[1]);
    b.missing[0]--;
    complete(b);
}

// ---- copies by tensor map
struct Transfer { TensorMap map; u32 to, bytes; i64 at[5]; Barrier* bar; int rank; };        // to: in all shared memories
constexpr int MOST_TRANSFERS = 1024;
static Transfer transfers[MOST_TRANSFERS];
static int transfer_count;

static u32 swizzled(u32 address, u32 swizzle) { return address ^ (address >> 7 & (swizzle == 128 ? 7 : swizzle == 64 ? 3 : swizzle == 32 ? 1 : 0)) << 4; }

static void begin_transfer(u32 to, const TensorMap& m, u32 bar, const i64* at, u32 rank, int block, Line line) {
    u32 bytes = m.width;
    for (u32 d = 0; d < m.rank; ++d) bytes *= m.box[d];
    if (rank != m.rank) fail("line %d: %u coordinates for a tensor map of %u dimensions", line.number, rank, m.rank);
    if (to % 128 || bytes > shared_size || to > shared_size - bytes) fail("line %d: a copy of %u bytes to %u: misaligned, or past the end", line.number, bytes, to);
    if (transfer_count == MOST_TRANSFERS) fail("line %d: too many copies under way", line.number);
    const u32 place = place_in(block, to);
    for (u32 c = place / 16; c < (place + bytes) / 16; ++c) {
        if (filling[c]) fail("line %d: two copies under way to %u", line.number, to);
        if (reading[c]) fail("line %d: a copy to %u overwrites what a product under way reads", line.number, to);
        filling[c] = 1;
    }
    memset(shared_memories + place, 0xff, bytes);                  // NaN until it lands
    Transfer& t = transfers[transfer_count++];
    t.map = m; t.to = place; t.bytes = bytes; t.bar = &barrier_at(bar, block, line); t.rank = block;
    for (u32 d = 0; d < 5; ++d) t.at[d] = d < rank ? at[d] : 0;
}
static void copy(u32 to, const TensorMap& m, u32 bar, const i64* at, u32 rank, Line line) { begin_transfer(to, m, bar, at, rank, rank_of(*self), line); }
static void copy_to_all(u32 to, const TensorMap& m, u32 bar, u32 blocks, const i64* at, u32 rank, Line line) {
    if (!blocks || blocks >> cluster) fail("line %d: a copy to blocks %#x of a cluster of %d", line.number, blocks, cluster);
    for (int b = 0; b < cluster; ++b)
        if (blocks >> b & 1) begin_transfer(to, m, bar, at, rank, b, line);
}
static void land(int n) {
    const Transfer t = transfers[n];
    if (!block_left[t.rank]) return fail("a copy lands in a block that has ended");
    memmove(transfers + n, transfers + n + 1, (--transfer_count - n) * sizeof *transfers);
    const TensorMap& m = t.map;
    const u32 row = m.box[0] * m.width;
    u8 inner[256 * 8];
    u32 step[5] = {};
    for (u32 to = 0; to < t.bytes; to += row) {
        memset(inner, 0, row);
        bool inside = true;
        u64 from = m.address;
        for (u32 d = 1; d < m.rank; ++d) {
            const i64 c = t.at[d] + step[d];
            inside = inside && c >= 0 && c < (i64)m.dims[d];
            from += c * m.strides[d - 1];
        }
        const i64 first = t.at[0] < 0 ? -t.at[0] : 0, left = (i64)m.dims[0] - t.at[0], end = left < m.box[0] ? left : m.box[0];
        if (inside && first < end) memcpy(inner + first * m.width, (const u8*)(from + (t.at[0] + first) * m.width), (end - first) * m.width);
        for (u32 c = 0; c < row; c += 16) memcpy(shared_memories + swizzled(t.to + to + c + SHARED_START, m.swizzle) - SHARED_START, inner + c, 16);
        for (u32 d = 1; d < m.rank && ++step[d] == m.box[d]; ++d) step[d] = 0;
    }
    for (u32 c = t.to / 16; c < (t.to + t.bytes) / 16; ++c) filling[c] = 0, writer[c] = 0;
    t.bar->missing[1] -= t.bytes;
    complete(*t.bar);
}

// ---- matrix products: each warp has a queue of its own, and computes its 16 rows
constexpr u32 UNDER_WAY = 0xffbfffff;                              // a signalling NaN: whatever is computed with it is another one
struct Accumulator {                // of one result: where its lanes keep it, and its value while that is NaN
    float* lanes[WARP];
    int slots, last;                // last: the number of the product that last adds to it
    bool under_way;
    float value[16 * 256];
};
struct Product {
    u64 matrices[2];                // of the left operand, unless it is in registers, and of the right one
    bool turned[2], registers, half, add;
    u16 left[16][16];
    int group;
    Accumulator* acc;
};
constexpr int MOST_PRODUCTS = 256, MOST_ACCUMULATORS = 8;
struct Queue {
    Product products[MOST_PRODUCTS];                               // by their number, modulo the size
    int issued, executed, awaited, group, actions, target, settled, line;       // settled: how often the target was met
    bool fenced;
    Accumulator accumulators[MOST_ACCUMULATORS];
};
static Queue* queues;
static int warp_count;

// The warps of a warpgroup do the same, one after the other: what each does is compared with what the first one did.
constexpr int MOST_ACTIONS = 4096;
static u64 actions[MAX_THREADS / WARP / 4][MOST_ACTIONS];
static int action_count[MAX_THREADS / WARP / 4];
static void same_in_warpgroup(u64 what, Line line) {
    const int warp = self->index / WARP, group = warp / 4;
    int& n = queues[warp].actions;
    if (group * 4 + 4 > warp_count) fail("line %d: not a whole warpgroup", line.number);
    if (n == action_count[group]) {
        for (int w = group * 4; w < group * 4 + 4; ++w)
            if (n - queues[w].actions >= MOST_ACTIONS) fail("line %d: only some warps of a warpgroup come here", line.number);
        actions[group][n % MOST_ACTIONS] = what;
        action_count[group]++;
    } else if (actions[group][n % MOST_ACTIONS] != what) {
        fail("line %d: the warps of a warpgroup issue different products, fences or waits", line.number);
    }
    n++;
}
static u64 mixed(u64 hash, u64 x) { return ((hash ^ x) * 0x9e3779b97f4a7c15ull) ^ hash >> 29; }

// Where an operand's 16-byte chunks lie: f(chunk's offset in shared memory, row or column, inner element), eight elements along
// the inner index, or along rows or columns if `turned`; those from `first` to `end`.
template <class F> static bool each_chunk(u64 matrix, bool turned, int first, int end, F f) {
    const u32 start = (u32)(matrix & 0x3fff) * 16, leading = (u32)(matrix >> 16 & 0x3fff) * 16, stride = (u32)(matrix >> 32 & 0x3fff) * 16;
    if (matrix >> 62 != 1 || matrix >> 49 & 7) { fail("a matrix that is not in the 128-byte swizzle"); return false; }
    if (start >> 7 & 7) { fail("a matrix that does not begin with a group of eight rows"); return false; }
    if (start % (turned ? 128 : 32)) { fail("a matrix at a misaligned address"); return false; }
    const int chunks = turned ? (end - first) / 8 * 16 : (end - first) * 2;
    for (int c = 0; c < chunks; ++c) {
        const int mn = first + (turned ? c / 16 * 8 : c / 2), k = turned ? c % 16 : c % 2 * 8;
        const u32 address = turned ? start + mn / 64 * leading + mn % 64 * 2 + k / 8 * stride + k % 8 * 128 : start + mn / 8 * stride + mn % 8 * 128 + k * 2;
        const u32 at = swizzled(address, 128) - SHARED_START;
        if (at >= shared_size) { fail("a product reads past the end of shared memory"); return false; }
        f(at, mn, k);
    }
    return true;
}
// Both operands of a warp's product: f(chunk's place in all shared memories, is it of the right operand, row or column, inner element).
template <class F> static bool each_chunk(const Product& p, int warp, F f) {
    const int row = warp % 4 * 16, rank = warp * WARP / thread_count;
    if (!p.registers && !each_chunk(p.matrices[0], p.turned[0], row, row + 16, [&](u32 at, int m, int k) { f(place_in(rank, at), false, m - row, k); })) return false;
    return each_chunk(p.matrices[1], p.turned[1], 0, 4 * p.acc->slots, [&](u32 at, int n, int k) { f(place_in(rank, at), true, n, k); });
}
static void count_readers(const Product& p, int warp, int by) {
    each_chunk(p, warp, [&](u32 at, bool, int, int) { reading[at / 16] += by; });
}

typedef float Four __attribute__((vector_size(16), aligned(4), may_alias));
static void execute(int warp) {
    Queue& q = queues[warp];
    const Product& p = q.products[q.executed % MOST_PRODUCTS];
    const int columns = 4 * p.acc->slots;
    auto number = [&](u16 x) { return p.half ? narrow(f16{}, x) : narrow(bf16{}, x); };
    float left[16][16], right[16][256];
    if (p.registers)
        for (int r = 0; r < 16; ++r)
            for (int k = 0; k < 16; ++k) left[r][k] = number(p.left[r][k]);
    each_chunk(p, warp, [&](u32 at, bool is_right, int mn, int k) {
        u16 x[8];
        memcpy(x, shared_memories + at, 16);
        for (int e = 0; e < 8; ++e) {
            const int i = p.turned[is_right] ? mn + e : mn, j = p.turned[is_right] ? k : k + e;
            (is_right ? right[j][i] : left[i][j]) = number(x[e]);
        }
    });
    for (int r = 0; r < 16; ++r)
        for (int c = 0; c < columns; c += 8) {
            float* const to = p.acc->value + r * columns + c;
            Four x{}, y{};
            if (p.add) { x = *(Four*)to; y = *(Four*)(to + 4); }
            for (int k = 0; k < 16; ++k) {
                x += left[r][k] * *(Four*)(right[k] + c);
                y += left[r][k] * *(Four*)(right[k] + c + 4);
            }
            *(Four*)to = x; *(Four*)(to + 4) = y;
        }
    if (++q.executed == q.target) q.settled++;
}

// f(register, value) for each element that the lanes hold, if it returns true for all.
template <class F> static bool each_element(Accumulator& a, F f) {
    for (int l = 0; l < WARP; ++l)
        for (int i = 0; i < 2; ++i)
            for (int j = 0; j < a.slots; ++j)
                if (!f(a.lanes[l][i * a.slots + j], a.value[(l / 4 + i * 8) * 4 * a.slots + l % 4 * 2 + j / 2 * 8 + j % 2])) return false;
    return true;
}
// Nothing but products may touch an accumulator under way.
static void check_untouched(Accumulator& a, Line line) {
    if (!each_element(a, [](float& x, float&) { return float_bits(x) == UNDER_WAY; }))
        fail("line %d: registers of a product under way have been written (or have left their scope)", line.number);
}
static Accumulator& accumulator(Queue& q, float** lanes, int slots, Line line) {
    Accumulator *found = nullptr, *free = nullptr;
    for (Accumulator& a : q.accumulators) {
        if (a.slots && a.lanes[0] == lanes[0] && a.slots == slots) found = &a;
        else if (a.under_way && a.lanes[0] < lanes[0] + 2 * slots && lanes[0] < a.lanes[0] + 2 * a.slots) fail("line %d: two products under way in the same registers", line.number);
        else if (!a.under_way && (!free || free->slots)) free = &a;
    }
    if (found && found->under_way) { check_untouched(*found, line); return *found; }
    if (!q.fenced && !(found && each_element(*found, [](float& x, float& y) { return float_bits(x) == float_bits(y); })))
        fail("after line %d: no products_fence between ordinary instructions that write a product's registers and the product", line.number);
    if (!found && !(found = free)) fail("line %d: too many results of products under way", line.number);
    memcpy(found->lanes, lanes, sizeof found->lanes);
    found->slots = slots;
    found->under_way = true;
    each_element(*found, [](float& x, float& value) { value = x; x = bits_float(UNDER_WAY); return true; });
    return *found;
}

constexpr bool is_half(f16) { return true; }
constexpr bool is_half(bf16) { return false; }
struct Issue {
    u64 matrices[2];
    float* x;
    u32 left[4];
    int slots;
    bool turned[2], registers, half, add;
};
static void issue(const Issue& mine, Line line) {
    struct In { const Issue& issue; Line line; } in{mine, line};
    meet(&in, nullptr, [](const void** i, void**) {
        const Issue& first = ((const In*)i[0])->issue;
        const int warp = self->index / WARP;
        Queue& q = queues[warp];
        const Line line{q.line};                                   // of the fence, commit or wait before: products come from multiply
        float* lanes[WARP];
        u64 hash = mixed(first.slots, first.turned[0] | first.turned[1] << 1 | first.registers << 2 | first.half << 3 | first.add << 4);
        hash = mixed(mixed(hash, first.matrices[0]), first.matrices[1]);
        if (q.issued - q.awaited == MOST_PRODUCTS) fail("line %d: too many products under way", line.number);
        Product& p = q.products[q.issued % MOST_PRODUCTS];
        for (int l = 0; l < WARP; ++l) {
            const Issue& x = ((const In*)i[l])->issue;
            if (x.matrices[0] != first.matrices[0] || x.matrices[1] != first.matrices[1] || x.add != first.add) fail("line %d: the lanes of a warp issue different products", line.number);
            lanes[l] = x.x;
            if (!first.registers) continue;
            for (int r = 0; r < 4; ++r)
                for (int h = 0; h < 2; ++h) p.left[l / 4 + r % 2 * 8][l % 4 * 2 + r / 2 * 8 + h] = (u16)(x.left[r] >> 16 * h);
        }
        same_in_warpgroup(hash, line);
        if (first.registers && !q.fenced) fail("after line %d: no products_fence ahead of a product that reads registers", line.number);
        memcpy(p.matrices, first.matrices, sizeof p.matrices);
        memcpy(p.turned, first.turned, sizeof p.turned);
        p.registers = first.registers; p.half = first.half; p.add = first.add; p.group = q.group;
        p.acc = &accumulator(q, lanes, first.slots, line);
        p.acc->last = q.issued;
        each_chunk(p, warp, [&](u32 at, bool, int, int) {
            if (filling[at / 16]) fail("after line %d a product reads a tile that a copy under way fills", line.number);
            const u32 w = writer[at / 16];
            if (w && (fences[(w >> 20) - 1] & 0xfffff) == (w & 0xfffff)) fail("after line %d a product reads what thread %u has stored without an async_fence since", line.number, (w >> 20) - 1);
        });
        count_readers(p, warp, 1);
        q.issued++;
    }, line);
}

// Products and results up to q.target are the lanes' again.
static void give_back(Queue& q, int warp, Line line) {
    for (; q.awaited < q.target; ++q.awaited) count_readers(q.products[q.awaited % MOST_PRODUCTS], warp, -1);
    for (Accumulator& a : q.accumulators) {
        if (!a.under_way || a.last >= q.target) continue;
        check_untouched(a, line);
        each_element(a, [](float& x, float& value) { x = value; return true; });
        a.under_way = false;
    }
}
static void wait_for_groups(int newest, Line line) {
    struct In { int newest; Line line; } in{newest, line};
    int settled;
    meet(&in, &settled, [](const void** i, void** o) {
        const In& x = *(const In*)i[0];
        const int warp = self->index / WARP;
        Queue& q = queues[warp];
        same_in_warpgroup(mixed(2, x.newest), x.line);
        q.fenced = false;
        q.line = x.line.number;
        q.target = q.awaited;
        while (q.target < q.issued && q.products[q.target % MOST_PRODUCTS].group < q.group - x.newest) ++q.target;
        const bool done = q.executed >= q.target;
        if (done) give_back(q, warp, x.line);
        for (int l = 0; l < WARP; ++l) *(int*)o[l] = done ? -1 : q.settled;
    }, line);
    if (settled < 0) return;
    const Queue& q = queues[self->index / WARP];
    if (q.settled == settled) wait_while(q.settled, settled, "its products", line);
    meet(&in, nullptr, [](const void** i, void**) { give_back(queues[self->index / WARP], self->index / WARP, ((const In*)i[0])->line); }, line);
}

// ---- named barriers, registers
struct NamedBarrier { int threads, generation, missing[2]; };
static NamedBarrier named_barriers[MOST_BLOCKS][16];
static void named(int id, int count, bool wait, Line line) {
    struct In { int id, count; Line line; } in{id, count, line};
    int generation;
    meet(&in, &generation, [](const void** i, void** o) {
        const In& x = *(const In*)i[0];
        for (int l = 0; l < WARP; ++l)
            if (((const In*)i[l])->id != x.id || ((const In*)i[l])->count != x.count) fail("line %d: the lanes of a warp name different barriers", x.line.number);
        if (x.id < 1 || x.id > 15 || x.count % WARP || x.count < WARP || x.count > thread_count) fail("line %d: no barrier %d of %d threads", x.line.number, x.id, x.count);
        NamedBarrier& b = named_barriers[rank_of(*self)][x.id];
        for (int l = 0; l < WARP; ++l) *(int*)o[l] = b.generation;
        if (!b.missing[0]) b.threads = b.missing[0] = x.count;
        if (b.threads != x.count) fail("line %d: barrier %d is of %d threads, not %d", x.line.number, x.id, b.threads, x.count);
        if (b.missing[0] -= WARP) return;
        b.generation++;
        if (x.count == thread_count) block_generation[rank_of(*self)]++;  // all of the block's
    }, line);
    NamedBarrier& b = named_barriers[rank_of(*self)][id];
    if (wait && b.generation == generation) wait_while(b.generation, generation, "the named barrier %u of %u threads: %d to come", line, id, count, b.missing);
}
// Of a thread of each warp; of all warps of a block.
static int registers[MAX_THREADS / WARP], registers_free[MOST_BLOCKS], registers_given[MOST_BLOCKS];
static void take_registers(int n, bool more, Line line) {
    struct In { int n; bool more; Line line; } in{n, more, line};
    meet(&in, nullptr, [](const void** i, void**) {
        const In& x = *(const In*)i[0];
        int& mine = registers[self->index / WARP];
        same_in_warpgroup(mixed(3, x.n), x.line);
        if (x.more ? x.n < mine : x.n > mine) fail("line %d: from %d to %d registers is not %s", x.line.number, mine, x.n, x.more ? "more" : "fewer");
        if (x.more) return;
        registers_free[rank_of(*self)] += mine - x.n;
        registers_given[rank_of(*self)]++;
        mine = x.n;
    }, line);
    int &mine = registers[self->index / WARP], &free = registers_free[rank_of(*self)], &given = registers_given[rank_of(*self)];
    if (!more) return;
    while (mine != n && free < n - mine) wait_while(given, given, "%u registers", line, n);
    if (mine != n) { free -= n - mine; mine = n; }
}

// ---- beside the threads
static u32 haste;                   // of 16 chances, how many the asynchronous engines take while threads can go on
static bool newest;                 // where none can: the newest copy lands first, not the oldest
static u32 elected;                 // the lane of warp 0 that elect_one means, throughout a launch
static void begin_block() {
    if (shared_size > 227 * 1024) return fail("a block has at most 227 KiB of shared memory");
    static const u32 hastes[] = {0, 4, 1, 0};
    haste = hastes[order % 4];
    newest = order % 4 == 3;
    if (!block) elected = order % WARP;
    warp_count = thread_count * cluster / WARP;
    if (!queues) queues = (Queue*)calloc(MAX_THREADS / WARP, sizeof(Queue));
    for (int w = 0; w < warp_count; ++w) {
        Queue& q = queues[w];
        q.issued = q.executed = q.awaited = q.group = q.actions = q.target = q.settled = q.line = 0;
        q.fenced = false;
        for (Accumulator& a : q.accumulators) a.slots = 0, a.under_way = false;
    }
    for (int i = 0; i < barrier_count; ++i) barriers[barrier_places[i]].known = false;
    barrier_count = transfer_count = 0;
    memset(action_count, 0, sizeof action_count);
    memset(named_barriers, 0, sizeof named_barriers);
    const u32 chunks = shared_pitch * cluster / 16;
    memset(filling, 0, chunks * sizeof *filling);
    memset(reading, 0, chunks * sizeof *reading);
    memset(writer, 0, chunks * sizeof *writer);
    const int each = 65536 / (thread_count * together) / 8 * 8;
    for (int w = 0; w < warp_count; ++w) registers[w] = each < 256 ? each : 256;
    memset(registers_free, 0, sizeof registers_free);
}
static bool chance() { return haste && random_bits() % 16 < haste; }
static bool work(bool late) {
    bool done = false;
    if (transfer_count && late) return land(newest ? transfer_count - 1 : 0), true;
    for (int n = transfer_count; n-- > 0;)
        if (chance()) land(n), done = true;
    for (int w = 0; w < warp_count; ++w) {
        const Queue& q = queues[w];
        while (q.executed < q.issued && (late || chance())) {
            execute(w), done = true;
            if (late || failure[0]) return true;
        }
    }
    return done;
}
static void end_block() {
    if (transfer_count) fail("a block ends with copies under way");
    for (int w = 0; w < warp_count; ++w) {
        if (queues[w].awaited < queues[w].issued) fail("warp %d ends with products under way", w);
        if (queues[w].actions != (w / 4 * 4 + 4 > warp_count ? 0 : action_count[w / 4])) fail("warp %d has issued fewer products, fences or waits than others of its warpgroup", w);
    }
}
static const Engines sm90 = {begin_block, end_block, work, stored};
static const bool installed = (engines = &sm90, true);
}  // namespace emulator

// ---- threads
static bool elect_one(emulator::Line line = emulator::Line::here()) {
    using namespace emulator;
    bool mine;
    meet(nullptr, &mine, [](const void**, void** o) {
        for (int l = 0; l < WARP; ++l) *(bool*)o[l] = l == (emulator::elected + self->index / WARP * 7) % WARP;
    }, line);
    return mine;
}
static int uniform(int x, emulator::Line line = emulator::Line::here()) {
    struct In { int x; emulator::Line line; } in{x, line};
    emulator::meet(&in, nullptr, [](const void** i, void**) {
        const In& first = *(const In*)i[0];
        for (int l = 1; l < WARP; ++l)
            if (((const In*)i[l])->x != first.x) emulator::fail("line %d: %d in one lane, %d in another", first.line.number, first.x, ((const In*)i[l])->x);
    }, line);
    return x;
}
static int of_first_lane(int x, emulator::Line line = emulator::Line::here()) {
    struct In { int x; emulator::Line line; } in{x, line};
    int mine;
    emulator::meet(&in, &mine, [](const void** i, void** o) {
        for (int l = 0; l < WARP; ++l) *(int*)o[l] = ((const In*)i[0])->x;
    }, line);
    return mine;
}
template <int N> static void more_registers(emulator::Line line = emulator::Line::here()) {
    static_assert(N % 8 == 0 && N >= 24 && N <= 256, "what the instruction takes");
    emulator::take_registers(N, true, line);
}
template <int N> static void fewer_registers(emulator::Line line = emulator::Line::here()) {
    static_assert(N % 8 == 0 && N >= 24 && N <= 256, "what the instruction takes");
    emulator::take_registers(N, false, line);
}
static void named_sync(int id, int threads, emulator::Line line = emulator::Line::here()) { emulator::named(id, threads, true, line); }
static void named_arrive(int id, int threads, emulator::Line line = emulator::Line::here()) { emulator::named(id, threads, false, line); }
static u32 fetch_add(u32* counter, u32 n) { const u32 x = *counter; *counter += n; return x; }
static u32 fetch_add_shared(u32 at, u32 n) { const u32 x = load_shared<u32>(at); store_shared<u32>(at, x + n); return x; }

// ---- barriers
DEV u32 shared_address(u32 at) { return at + emulator::SHARED_START; }
static void barrier_init(u32 at, u32 arrivals, emulator::Line line = emulator::Line::here()) {
    using namespace emulator;
    if (at % 8 || at >= shared_size || at + 8 > shared_size) fail("line %d: a barrier at %u: misaligned, or past the end", line.number, at);
    const u32 place = place_in(rank_of(*self), at) / 8;
    Barrier& b = barriers[place];
    if (b.known) fail("line %d: the barrier at %u is initialised twice", line.number, at);
    if (!arrivals || arrivals >= 1 << 20) fail("line %d: a barrier of %u arrivals", line.number, arrivals);
    b = {0, {(int)arrivals, 0}, (int)arrivals, self->index, block_generation[rank_of(*self)], cluster_generation, true, false};
    barrier_places[barrier_count++] = place;
    const u64 mark = barrier_mark(at);
    memcpy(shared_memory + at, &mark, 8);
}
static void barrier_init_done() {
    using namespace emulator;
    for (int i = 0; i < barrier_count; ++i) {
        Barrier& b = barriers[barrier_places[i]];
        if (b.owner == self->index) b.published = true, b.since = block_generation[rank_of(*self)], b.since_cluster = cluster_generation;
    }
}
static void barrier_arrive(u32 at, emulator::Line line = emulator::Line::here()) { emulator::expect(emulator::barrier_at(at, line), at, 0, line); }
static void barrier_arrive_if(bool c, u32 at, emulator::Line line = emulator::Line::here()) {
    if (c) barrier_arrive(at, line);
}
static void barrier_expect(u32 at, u32 bytes, emulator::Line line = emulator::Line::here()) { emulator::expect(emulator::barrier_at(at, line), at, (int)bytes, line); }
static bool barrier_test(u32 at, u32 parity, emulator::Line line = emulator::Line::here()) {
    const emulator::Barrier& b = emulator::barrier_at(at, line);
    if (parity > 1) emulator::fail("line %d: a parity of %u", line.number, parity);
    if ((u32)(b.phase & 1) != parity) return true;
    emulator::self->line = line.number;
    emulator::poll();
    return (u32)(b.phase & 1) != parity;
}
static void barrier_wait(u32 at, u32 parity, emulator::Line line = emulator::Line::here()) {
    const emulator::Barrier& b = emulator::barrier_at(at, line);
    if (parity > 1) emulator::fail("line %d: a parity of %u", line.number, parity);
    while ((u32)(b.phase & 1) == parity) emulator::wait_while(b.phase, b.phase, "the barrier at %u, parity %u: %d arrivals and %d bytes to come", line, at, parity, b.missing);
}
static void async_fence() { emulator::fences[emulator::self->index]++; }
static void async_fence_global() {}

// ---- tiles by tensor map
static void prefetch_map(const TensorMap&) {}
static void copy_box(u32 to, const TensorMap& m, u32 bar, int c0, emulator::Line line = emulator::Line::here()) {
    const i64 at[] = {c0};
    emulator::copy(to, m, bar, at, 1, line);
}
static void copy_box(u32 to, const TensorMap& m, u32 bar, int c0, int c1, emulator::Line line = emulator::Line::here()) {
    const i64 at[] = {c0, c1};
    emulator::copy(to, m, bar, at, 2, line);
}
static void copy_box(u32 to, const TensorMap& m, u32 bar, int c0, int c1, int c2, emulator::Line line = emulator::Line::here()) {
    const i64 at[] = {c0, c1, c2};
    emulator::copy(to, m, bar, at, 3, line);
}
static void copy_box(u32 to, const TensorMap& m, u32 bar, int c0, int c1, int c2, int c3, emulator::Line line = emulator::Line::here()) {
    const i64 at[] = {c0, c1, c2, c3};
    emulator::copy(to, m, bar, at, 4, line);
}
static void copy_box(u32 to, const TensorMap& m, u32 bar, int c0, int c1, int c2, int c3, int c4, emulator::Line line = emulator::Line::here()) {
    const i64 at[] = {c0, c1, c2, c3, c4};
    emulator::copy(to, m, bar, at, 5, line);
}

// ---- barriers and copies of a cluster's blocks
static void barrier_arrive_at_if(bool c, u32 at, int rank, emulator::Line line = emulator::Line::here()) {
    if (!c) return;
    if (rank < 0 || rank >= emulator::cluster) emulator::fail("line %d: block %d of a cluster of %d", line.number, rank, emulator::cluster);
    emulator::expect(emulator::barrier_at(at, rank, line), at, 0, line);
}
static void copy_box_to_all(u32 to, const TensorMap& m, u32 bar, u32 blocks, int c0, emulator::Line line = emulator::Line::here()) {
    const i64 at[] = {c0};
    emulator::copy_to_all(to, m, bar, blocks, at, 1, line);
}
static void copy_box_to_all(u32 to, const TensorMap& m, u32 bar, u32 blocks, int c0, int c1, emulator::Line line = emulator::Line::here()) {
    const i64 at[] = {c0, c1};
    emulator::copy_to_all(to, m, bar, blocks, at, 2, line);
}
static void copy_box_to_all(u32 to, const TensorMap& m, u32 bar, u32 blocks, int c0, int c1, int c2, emulator::Line line = emulator::Line::here()) {
    const i64 at[] = {c0, c1, c2};
    emulator::copy_to_all(to, m, bar, blocks, at, 3, line);
}
static void copy_box_to_all(u32 to, const TensorMap& m, u32 bar, u32 blocks, int c0, int c1, int c2, int c3, emulator::Line line = emulator::Line::here()) {
    const i64 at[] = {c0, c1, c2, c3};
    emulator::copy_to_all(to, m, bar, blocks, at, 4, line);
}
static void copy_box_to_all(u32 to, const TensorMap& m, u32 bar, u32 blocks, int c0, int c1, int c2, int c3, int c4, emulator::Line line = emulator::Line::here()) {
    const i64 at[] = {c0, c1, c2, c3, c4};
    emulator::copy_to_all(to, m, bar, blocks, at, 5, line);
}

// ---- matrix products of a warpgroup
static void products_fence(emulator::Line line = emulator::Line::here()) {
    using namespace emulator;
    meet(&line, nullptr, [](const void** i, void**) {
        const Line line = *(const Line*)i[0];
        Queue& q = queues[self->index / WARP];
        same_in_warpgroup(0, line);
        q.fenced = true;
        q.line = line.number;
        for (Accumulator& a : q.accumulators)
            if (!a.under_way) a.slots = 0;
    }, line);
}
static void products_commit(emulator::Line line = emulator::Line::here()) {
    using namespace emulator;
    meet(&line, nullptr, [](const void** i, void**) {
        const Line line = *(const Line*)i[0];
        Queue& q = queues[self->index / WARP];
        same_in_warpgroup(1, line);
        q.group++;
        q.line = line.number;
    }, line);
}
template <int N> static void products_wait(emulator::Line line = emulator::Line::here()) { emulator::wait_for_groups(N, line); }
template <typename T> DEV void pin(T&) {}

template <int TA, int TB, class T, int CS> static void wgmma(T, float (&x)[2][CS], u64 a, u64 b, bool add, emulator::Line line = emulator::Line::here()) {
    static_assert(CS % 2 == 0 && CS >= 2 && CS <= 64, "8, 16 … 256 columns");
    emulator::issue({{a, b}, &x[0][0], {}, CS, {TA, TB}, false, emulator::is_half(T{}), add}, line);
}
template <int TB, class T, int CS> static void wgmma(T, float (&x)[2][CS], u32 a0, u32 a1, u32 a2, u32 a3, u64 b, bool add, emulator::Line line = emulator::Line::here()) {
    static_assert(CS % 2 == 0 && CS >= 2 && CS <= 64, "8, 16 … 256 columns");
    emulator::issue({{0, b}, &x[0][0], {a0, a1, a2, a3}, CS, {false, TB}, true, emulator::is_half(T{}), add}, line);
}

// ---- from result fragments to memory
DEV u32 choose(bool c, u32 a, u32 b) { return c ? a : b; }
static void store_words_if(bool c, void* p, const u32 (&x)[4]) {
    if (c) store_words<4>(p, {{x[0], x[1], x[2], x[3]}});
}
