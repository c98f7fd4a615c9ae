"""AMD GPUs, as the emitters see them.

Results of the matrix instructions are kept transposed, in pairs (device/hip_mfma.h and hip_wmma.h say why): fragments of
16 rows × 32 columns, of which a lane holds a run of one row.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from ...errors import TargetError
from ..cuda.arch import Arch

_CDNA = Arch(
    name="",
    warp=64,
    fragment=(16, 32, 32),
    row_slots=1,
    column_slots=8,
    column_run=8,
    shared=64 * 1024,
    shared_sm=64 * 1024,
    registers=4 * 512 * 64,
    headers=("wave64.h", "hip_primitives.h", "hip_math.h", "hip_mfma.h", "tiles.cuh"),
    stages=1,
    peels=False,
    spreads=False,
    holds="always",
    most_registers=200,
)
# A work-group processor: four SIMDs, twice the shared memory that one block may have.  Operands take twice the registers: both
# halves of a warp have all of them.
_RDNA3 = replace(
    _CDNA,
    warp=32,
    column_slots=16,
    column_run=16,
    shared_sm=128 * 1024,
    registers=4 * 1536 * 32,
    headers=("hip_primitives.h", "hip_math.h", "hip_wmma.h", "tiles.cuh"),
    row_fragments=1,
    holds="never",
)
_KNOWN = {"gfx90a": _CDNA, "gfx942": _CDNA, "gfx1100": _RDNA3}


@cache
def hip_arch(name: str) -> Arch:
    """The architecture of a target like "gfx942"."""
    if name not in _KNOWN:
        raise TargetError(f"no HIP code for {name}", f"known: {', '.join(_KNOWN)}")
    return replace(_KNOWN[name], name=name)


def hip_emulator(name: str) -> Arch:
    """The same on the CPU (see device/emulator.h): fragments and schedules of the architecture, primitives of the emulator."""
    arch = hip_arch(name)
    primitives = arch.headers.index("hip_primitives.h")
    headers = (*arch.headers[:primitives], "emulator.h", "emulator_hip.h", *arch.headers[primitives + 2 :])
    return replace(arch, name=f"{name} emulated", headers=headers)
