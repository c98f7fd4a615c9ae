"""Machine descriptions: figures that the roofline models read.  Rates are what well-written kernels sustain, not peaks."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from ..errors import TargetError


@dataclass(frozen=True)
class Gpu:
    """sms: multiprocessors (compute units); rates in units a second of the whole device, sizes in bytes, times in seconds.

    tensor       flops of 16-bit products with float32 sums, by the instructions that the general lowering uses (0: no matrix unit)
    ops, ops64   float32 and float64 operations (a multiply-add counts one)
    special      special-function results
    shared       bytes through shared memory
    l2, dram     bytes
    memory       bytes of the device
    l1           bytes of a multiprocessor's first-level cache, beside some shared memory where they are one
    pull         bytes a second that one multiprocessor can pull from memory
    latency      of a load from memory, which bytes in flight must cover
    step         barrier and pipeline bubble of one iteration of a loop
    block        start and end of a block
    fragment     rows, columns and inner elements of one matrix instruction: products are made of whole ones
    stages       tiles that a loop may keep in shared memory (1 where copies to it are not asynchronous)
    clusters     numbers of blocks that may share a loop's tiles and reach each other's shared memory
    remote       bytes a second that a multiprocessor reads from another one's shared memory
    meet         seconds in which the blocks of a cluster start and end together
    wgmma        flops of 16-bit products by warpgroups, from shared memory (0: it has no such instructions)
    beside       share of the non-dominant resources that does not hide where warpgroups work beside each other
    overlap      share of the non-dominant resources that does not hide behind the dominant one, by resident warps (few, many)
    """

    name: str
    sms: int
    memory: float
    tensor: float
    ops: float
    ops64: float
    special: float
    shared: float
    l2: float
    dram: float
    l2_bytes: int
    shared_block: int
    shared_sm: int
    registers: int = 65536
    registers_thread: int = 255
    threads_sm: int = 2048
    warp: int = 32
    l1: int = 128 * 1024
    pull: float = 62e9
    latency: float = 0.8e-6
    launch: float = 3.0e-6
    step: float = 0.10e-6
    block: float = 1.0e-6
    fragment: tuple[int, int, int] = (16, 8, 16)
    stages: int = 4
    overlap: tuple[float, float] = (0.60, 0.15)
    clusters: tuple[int, ...] = ()
    remote: float = 50e9
    meet: float = 1.0e-6
    wgmma: float = 0.0
    beside: float = 0.12


@dataclass(frozen=True)
class Cpu:
    """A host that runs tile statements as NumPy calls, one block to a core at a time.  Rates are of one core, in float32.

    flops        of a large matrix product
    call         fixed cost of one array operation
    element      seconds per element of plain arithmetic on data in cache
    cache        bytes that a block may come back to before its operations slow down, down to `far` at twice as much
    near, far    bytes a second of elementwise operations on data within that, and beyond
    dram         bytes a second of all cores together
    memory_block bytes that a block may hold at most
    memory       bytes of the host, assumed
    """

    name: str
    cores: int
    flops: float = 170e9
    call: float = 2.5e-6
    element: float = 0.28e-9
    near: float = 40e9
    far: float = 16e9
    cache: float = 1.0e6
    dram: float = 25e9
    launch: float = 30e-6
    block: float = 10e-6
    memory_block: float = 8e6
    memory: float = 8e9


# No clusters by default, though the chip has them (the general lowering takes `clusters=(2, 4)`).  Measured on two weights of 4096 × 4096
# with 16 rows: 64 columns 23.9 µs, in clusters of two 28.1 to 28.7, of four 80.5; with one row they gain at most a tenth on 32 columns alone.
H200 = Gpu(
    "H200", 132, memory=141e9, tensor=560e12, ops=27e12, ops64=13e12, special=3.4e12, shared=27e12, l2=7.0e12, dram=4.7e12,
    l2_bytes=50_000_000, shared_block=227 * 1024, shared_sm=228 * 1024, wgmma=900e12,
)  # fmt: skip
B200 = Gpu(
    "B200", 148, memory=180e9, tensor=560e12, ops=36e12, ops64=18e12, special=4.5e12, shared=35e12, l2=10e12, dram=7.0e12,
    l2_bytes=110_000_000, shared_block=227 * 1024, shared_sm=228 * 1024,
)  # fmt: skip
A100 = Gpu(
    "A100", 108, memory=80e9, tensor=270e12, ops=9.5e12, ops64=4.8e12, special=2.4e12, shared=19e12, l2=4.0e12, dram=1.75e12,
    l2_bytes=36_000_000, shared_block=163 * 1024, shared_sm=164 * 1024, pull=32e9,
)  # fmt: skip
RTX3090 = Gpu(
    "RTX 3090", 82, memory=24e9, tensor=66e12, ops=16e12, ops64=0.28e12, special=2.2e12, shared=17e12, l2=2.5e12, dram=0.85e12,
    l2_bytes=6_000_000, shared_block=99 * 1024, shared_sm=100 * 1024, threads_sm=1536, l1=64 * 1024, pull=25e9,
)  # fmt: skip
RTX4090 = Gpu(
    "RTX 4090", 128, memory=24e9, tensor=155e12, ops=38e12, ops64=0.64e12, special=5.0e12, shared=40e12, l2=4.5e12, dram=0.93e12,
    l2_bytes=66_000_000, shared_block=99 * 1024, shared_sm=100 * 1024, threads_sm=1536, l1=64 * 1024, pull=25e9,
)  # fmt: skip
RTX5090 = Gpu(
    "RTX 5090", 170, memory=32e9, tensor=205e12, ops=50e12, ops64=0.8e12, special=6.5e12, shared=52e12, l2=6.0e12, dram=1.6e12,
    l2_bytes=90_000_000, shared_block=99 * 1024, shared_sm=100 * 1024, threads_sm=1536, l1=64 * 1024, pull=30e9,
)  # fmt: skip
MI300X = Gpu(
    "MI300X", 304, memory=192e9, tensor=550e12, ops=40e12, ops64=20e12, special=10e12, shared=80e12, l2=10e12, dram=4.3e12,
    l2_bytes=200_000_000, shared_block=64 * 1024, shared_sm=64 * 1024, registers=131072, registers_thread=256, warp=64,
    fragment=(16, 32, 32), stages=1, l1=32 * 1024, pull=40e9, latency=1.2e-6, launch=5e-6,
)  # fmt: skip
MI210 = Gpu(
    "MI210", 104, memory=64e9, tensor=130e12, ops=11e12, ops64=11e12, special=2.8e12, shared=22e12, l2=3.5e12, dram=1.3e12,
    l2_bytes=7_000_000, shared_block=64 * 1024, shared_sm=64 * 1024, registers=131072, registers_thread=256, warp=64,
    fragment=(16, 32, 32), stages=1, l1=16 * 1024, pull=30e9, latency=1.2e-6, launch=6e-6,
)  # fmt: skip
RX7900 = Gpu(  # 48 work-group processors
    "RX 7900 XTX", 48, memory=24e9, tensor=80e12, ops=25e12, ops64=0.9e12, special=3.5e12, shared=28e12, l2=3.5e12, dram=0.85e12,
    l2_bytes=90_000_000, shared_block=64 * 1024, shared_sm=128 * 1024, registers=196608, registers_thread=256, threads_sm=2048,
    fragment=(16, 32, 32), stages=1, l1=32 * 1024, pull=40e9, latency=1.0e-6, launch=6e-6,
)  # fmt: skip

DEVICES: dict[str, Gpu] = {
    "cuda:sm_80": A100,
    "cuda:sm_86": RTX3090,
    "cuda:sm_89": RTX4090,
    "cuda:sm_90": replace(H200, wgmma=0.0),  # without the features of just that architecture
    "cuda:sm_90a": H200,
    "cuda:sm_100a": B200,
    "cuda:sm_120": RTX5090,
    "cuda:sm_120a": RTX5090,
    "hip:gfx90a": MI210,
    "hip:gfx942": MI300X,
    "hip:gfx1100": RX7900,
}


def host(cores: int | None = None) -> Cpu:
    """The machine this runs on, as far as the search is concerned: the number of cores is all that it depends on."""
    n = cores or os.cpu_count() or 1
    return Cpu(f"cpu, {n} cores", n)


def machine_for(target: str) -> Gpu | Cpu:
    """The machine that a target string stands for."""
    if target == "cpu":
        return host()
    if target not in DEVICES:
        raise TargetError(f"no machine description for target {target!r}", f"known: cpu, {', '.join(DEVICES)}")
    return DEVICES[target]
