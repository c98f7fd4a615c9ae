// Primitives of sm_90a beyond sm80.cuh: barriers in shared memory, copies by tensor map (TMA), matrix products of a warpgroup (wgmma).
//
// Ordinary loads and stores and the asynchronous engines see shared memory through different proxies.  A tile that TMA has written
// is ready for wgmma once its barrier's phase is complete; one written by ordinary stores needs async_fence() and a barrier first.
struct alignas(64) TensorMap { u8 opaque[128]; };              // filled in by the driver; parameters: const __grid_constant__
#define MAP const __grid_constant__ TensorMap

// ---- threads
// True in exactly one lane of a converged warp.
DEV bool elect_one() {
    u32 p;
    asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(p));
    return p;
}
// A value that all lanes have, as one that the compiler knows to be the same: loops that it bounds stay uniform.
DEV int uniform(int x) { return __shfl_sync(~0u, x, 0); }
// What the first lane has.
DEV int of_first_lane(int x) { return __shfl_sync(~0u, x, 0); }
// The warpgroup's share of the registers; all its warps execute it.
template <int N> DEV void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> DEV void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
// Named barriers: `threads` of the block take part, some of which only arrive.
DEV void named_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
DEV void named_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
DEV u32 fetch_add(u32* counter, u32 n) { return atomicAdd(counter, n); }
DEV u32 fetch_add_shared(u32 at, u32 n) { return atomicAdd((u32*)(shared_memory + at), n); }

// ---- barriers in shared memory, named by their place: a phase is complete when all arrivals and all announced bytes are there
DEV void barrier_init(u32 at, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(at)), "r"(arrivals) : "memory");
}
// After the last barrier_init, and before the block's barrier that comes ahead of the first use.
DEV void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEV void barrier_arrive(u32 at) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(at)) : "memory"); }
// If c: a predicate, not a branch, behind which the compiler no longer counts on a warp's lanes to go the same way.
DEV void barrier_arrive_if(bool c, u32 at) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %1, 0; @p mbarrier.arrive.shared::cta.b64 _, [%0];}" ::"r"(shared_address(at)), "r"((u32)c) : "memory");
}
// Arrive, and announce bytes that asynchronous copies will bring.
DEV void barrier_expect(u32 at, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(at)), "r"(bytes) : "memory");
}
// Is the phase of this parity complete?  Of a fresh barrier the phase before the first, parity 1, is.
DEV bool barrier_test(u32 at, u32 parity) {
    u32 r;
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}" : "=r"(r) : "r"(shared_address(at)), "r"(parity) : "memory");
    return r;
}
DEV void barrier_wait(u32 at, u32 parity) {
    asm volatile("{.reg .pred p;\n"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
                 "@p bra done;\n"
                 "bra again;\n"
                 "done:}" ::"r"(shared_address(at)), "r"(parity) : "memory");
}
DEV void async_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// What ordinary stores wrote to global memory, of a kernel before too, is there for copies by tensor map.
DEV void async_fence_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// ---- tiles by tensor map.  One thread issues.  Coordinates count elements, innermost first; what lies outside the map arrives as 0,
// and counts among the bytes that the barrier expects.
DEV void prefetch_map(const TensorMap& m) { asm volatile("prefetch.tensormap [%0];" ::"l"(&m) : "memory"); }
DEV void copy_box(u32 to, const TensorMap& m, u32 bar, int c0) {
    asm volatile("cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3}], [%2];"
                 ::"r"(shared_address(to)), "l"(&m), "r"(shared_address(bar)), "r"(c0) : "memory");
}
DEV void copy_box(u32 to, const TensorMap& m, u32 bar, int c0, int c1) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4}], [%2];"
                 ::"r"(shared_address(to)), "l"(&m), "r"(shared_address(bar)), "r"(c0), "r"(c1) : "memory");
}
DEV void copy_box(u32 to, const TensorMap& m, u32 bar, int c0, int c1, int c2) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5}], [%2];"
                 ::"r"(shared_address(to)), "l"(&m), "r"(shared_address(bar)), "r"(c0), "r"(c1), "r"(c2) : "memory");
}
DEV void copy_box(u32 to, const TensorMap& m, u32 bar, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5,%6}], [%2];"
                 ::"r"(shared_address(to)), "l"(&m), "r"(shared_address(bar)), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}
DEV void copy_box(u32 to, const TensorMap& m, u32 bar, int c0, int c1, int c2, int c3, int c4) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3,%4,%5,%6,%7}], [%2];"
                 ::"r"(shared_address(to)), "l"(&m), "r"(shared_address(bar)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4) : "memory");
}

// ---- barriers and copies of a cluster's blocks
// If c, arrive at the barrier of block `rank`, predicated as above.  It gives a place back and publishes nothing: spelled .release.cluster it would be a fence of
// the whole memory.
DEV void barrier_arrive_at_if(bool c, u32 at, int rank) {
    asm volatile("{.reg .pred p; .reg .b32 a; setp.ne.u32 p, %2, 0; @p mapa.shared::cluster.u32 a, %0, %1; @p mbarrier.arrive.shared::cluster.b64 _, [a];}"
                 ::"r"(shared_address(at)), "r"(rank), "r"((u32)c) : "memory");
}
// A box to the same place of every block whose bit is set, and its bytes to the barrier there.
DEV void copy_box_to_all(u32 to, const TensorMap& m, u32 bar, u16 blocks, int c0) {
    asm volatile("cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%4}], [%2], %3;"
                 ::"r"(shared_address(to)), "l"(&m), "r"(shared_address(bar)), "h"(blocks), "r"(c0) : "memory");
}
DEV void copy_box_to_all(u32 to, const TensorMap& m, u32 bar, u16 blocks, int c0, int c1) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%4,%5}], [%2], %3;"
                 ::"r"(shared_address(to)), "l"(&m), "r"(shared_address(bar)), "h"(blocks), "r"(c0), "r"(c1) : "memory");
}
DEV void copy_box_to_all(u32 to, const TensorMap& m, u32 bar, u16 blocks, int c0, int c1, int c2) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%4,%5,%6}], [%2], %3;"
                 ::"r"(shared_address(to)), "l"(&m), "r"(shared_address(bar)), "h"(blocks), "r"(c0), "r"(c1), "r"(c2) : "memory");
}
DEV void copy_box_to_all(u32 to, const TensorMap& m, u32 bar, u16 blocks, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%4,%5,%6,%7}], [%2], %3;"
                 ::"r"(shared_address(to)), "l"(&m), "r"(shared_address(bar)), "h"(blocks), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}
DEV void copy_box_to_all(u32 to, const TensorMap& m, u32 bar, u16 blocks, int c0, int c1, int c2, int c3, int c4) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%4,%5,%6,%7,%8}], [%2], %3;"
                 ::"r"(shared_address(to)), "l"(&m), "r"(shared_address(bar)), "h"(blocks), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4) : "memory");
}

// ---- matrix products of a warpgroup: asynchronous, in order, in groups
// Before the first product, and whenever ordinary instructions have written registers that a product reads or adds to.
DEV void products_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Wait until at most N of the newest groups are under way.
template <int N> DEV void products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
// No ordinary instruction that touches these registers moves across: for accumulators and register operands, after a wait and
// before a fence.
template <int N> DEV void pin(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
template <int N> DEV void pin(u32 (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) asm volatile("" : "+r"(x[i])::"memory");
}
template <typename T, int N, int M> DEV void pin(T (&x)[N][M]) {
#pragma unroll
    for (int i = 0; i < N; ++i) pin(x[i]);
}

// ---- from result fragments to memory
// c ? a : b without a branch (around a shuffle the compiler may make one).
DEV u32 choose(bool c, u32 a, u32 b) {
    u32 r;
    asm("{.reg .pred p; setp.ne.u32 p, %3, 0; selp.b32 %0, %1, %2, p;}" : "=r"(r) : "r"(a), "r"(b), "r"((u32)c));
    return r;
}
// 16 bytes to global memory if c: a predicate, not a branch, which would keep the work on other rows from overlapping.
DEV void store_words_if(bool c, void* p, const u32 (&x)[4]) {
    asm volatile("{.reg .pred p; setp.ne.u32 p, %5, 0; @p st.global.v4.b32 [%0], {%1,%2,%3,%4};}" ::"l"(p), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"((u32)c) : "memory");
}
