"""What the emitters must know of a GPU architecture.  Everything else is behind the primitives of its device headers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from ...errors import TargetError

DEVICE = Path(__file__).resolve().parent.parent / "device"


@dataclass(frozen=True)
class Arch:
    """warp: lanes that run together.  fragment: (rows, columns, inner elements) of one matrix instruction; row_slots and
    column_slots: rows and columns of its result that one lane holds, column_run of them adjacent.
    shared: bytes of shared memory that one block may have; shared_sm: that all blocks of a multiprocessor share.
    registers: 32-bit registers of a multiprocessor.  headers: device headers, in the order in which they are inlined.
    stages: how many tiles of a loop may be under way (1 where copies to shared memory are not asynchronous).
    row_fragments: fragments of rows that one warp takes where there are rows enough.
    peels: do a loop's tiles that no mask touches get code of their own (which takes registers)?
    overlap: may a kernel start while the one before it ends (programmatic dependent launch)?
    holds: where registers are spent on a left operand that a loop reads again and again: "always" (if it takes few), "few rows"
    (where so few that warps share a loop's tiles) or "never".
    most_registers: of a thread, as estimated, for a kernel without matrix products: beyond, an element a thread is better.
    spreads: is there a way to load what lies in shared memory as operands do into the layout of results?
    joined: headers of kernels whose blocks form clusters (none: there are no clusters).
    warpgroups: headers of kernels whose warpgroups multiply tiles in shared memory together (none: it cannot).
    multiprocessors: how many blocks a kernel launches that takes one tile after the other.
    clusters: (blocks of a cluster, how many such run at the same time): each within one group of 16 or 18 multiprocessors."""

    name: str
    warp: int
    fragment: tuple[int, int, int]
    row_slots: int
    column_slots: int
    column_run: int
    shared: int
    shared_sm: int
    registers: int
    headers: tuple[str, ...]
    stages: int = 4
    row_fragments: int = 2
    peels: bool = True
    overlap: bool = False
    holds: str = "few rows"
    most_registers: int = 480
    spreads: bool = True
    joined: tuple[str, ...] = ()
    warpgroups: tuple[str, ...] = ()
    multiprocessors: int = 132
    clusters: tuple[tuple[int, int], ...] = ((2, 66), (4, 32))

    def clusters_of(self, blocks: int) -> int:
        """How many clusters of so many blocks run at the same time, a multiprocessor to a block; 0: there are none."""
        return self.multiprocessors if blocks == 1 else dict(self.clusters).get(blocks, 0)

    @property
    def grain(self) -> int:
        """Rows and columns of operands in shared memory come in multiples of it, whichever side of a product they are on."""
        return max(16, *self.fragment)

    @property
    def most_warps(self) -> int:
        return 1024 // self.warp

    @property
    def prelude(self) -> str:
        """The device headers, as the head of a self-contained translation unit."""
        return "\n".join(map(_header, self.headers))

    def warpgroup_prelude(self, wrappers: Iterable[str]) -> str:
        """What kernels of warpgroups need besides; wrappers: of the matrix instructions that they use."""
        first, *rest = self.warpgroups
        emulated = first.endswith(".h")  # it has them all
        return "\n".join([self.cluster_prelude, _header(first), *([] if emulated else wrappers), *map(_header, rest)])

    @property
    def cluster_prelude(self) -> str:
        """What kernels need besides whose blocks form clusters."""
        return "\n".join(map(_header, self.joined))

    @property
    def vocabulary(self) -> str:
        """Text that has every name of the device headers."""
        return self.prelude + "\n".join(map(_header, (*self.joined, *self.warpgroups)))


def _header(name: str) -> str:
    return (DEVICE / name).read_text(encoding="utf-8")


_NVIDIA = ("sm80.cuh", "mma16816.cuh", "tiles.cuh")
_SHARED = {
    80: (163, 164),
    86: (99, 100),
    87: (163, 164),
    89: (99, 100),
    90: (227, 228),
    100: (227, 228),
    103: (227, 228),
    120: (99, 100),
}


@cache
def cuda_arch(name: str) -> Arch:
    """The architecture of a target like "sm_90a"."""
    digits = name.removeprefix("sm_").rstrip("af")
    if not digits.isdigit() or int(digits) < 80:
        raise TargetError(f"no CUDA code for {name}", "tensor cores as used here begin with sm_80")
    known = max((n for n in _SHARED if n <= int(digits)), default=80)
    block, sm = _SHARED[known]
    joined, warpgroups = (("clusters.cuh",), ("sm90.cuh", "panels.cuh")) if name == "sm_90a" else ((), ())
    shape = (name, 32, (16, 8, 16), 2, 2, 2, block * 1024, sm * 1024, 65536, _NVIDIA)
    return Arch(*shape, overlap=known >= 90, joined=joined, warpgroups=warpgroups)


def emulator_arch(shared: int = 227) -> Arch:
    """sm_80 on the CPU (see device/emulator.h); `shared` in KiB."""
    return Arch("emulator", 32, (16, 8, 16), 2, 2, 2, shared * 1024, 228 * 1024, 65536, ("emulator.h", *_NVIDIA[1:]))


def hopper_emulator_arch() -> Arch:
    """sm_90a on the CPU (see device/emulator_sm90.h)."""
    headers = ("emulator.h", *_NVIDIA[1:])
    warpgroups = ("emulator_sm90.h", "panels.cuh")
    few = replace(cuda_arch("sm_90a"), multiprocessors=2, clusters=((2, 1), (4, 1)))  # a block takes several tiles
    return replace(few, name="sm_90a emulated", headers=headers, joined=("emulator_clusters.h",), warpgroups=warpgroups)
