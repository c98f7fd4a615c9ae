// ---- clusters: blocks that run at the same time and reach each other's shared memory, where each place means the same
DEV int cluster_rank() {
    u32 r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return (int)r;
}
// Of all threads of the cluster: once before the first of what follows, and once after the last, while all blocks are still there.
DEV void cluster_sync() { asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory"); }
// What is at the place in the shared memory of block `rank`, written before a cluster_sync.
template <typename T> DEV T load_shared_of(int rank, u32 at) {
    u64 there;
    asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"((u64)(shared_memory + at)), "r"(rank));
    return *(const T*)there;
}
