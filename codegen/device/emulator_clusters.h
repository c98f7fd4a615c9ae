// The primitives of clusters.cuh on the CPU; after emulator.h.
DEV int cluster_rank() { return emulator::rank_of(*emulator::self); }
static void cluster_sync(emulator::Line line = emulator::Line::here()) {
    using namespace emulator;
    if (++cluster_arrived < thread_count * cluster) return wait_while(cluster_generation, cluster_generation, "the cluster's barrier", line);
    cluster_arrived = 0;
    cluster_generation++;
    for (int r = 0; r < cluster; ++r) block_generation[r]++;
}
template <typename T> static T load_shared_of(int rank, u32 at, emulator::Line line = emulator::Line::here()) {
    using namespace emulator;
    if (rank < 0 || rank >= cluster) fail("line %d: block %d of a cluster of %d", line.number, rank, cluster);
    check_shared(at, sizeof(T));
    T x;
    memcpy(&x, shared_memories + (size_t)shared_pitch * rank + at, sizeof(T));
    return x;
}
