"""What a device compiler returns, whichever compiler it was."""
from __future__ import annotations

import re
from dataclasses import dataclass, field


@dataclass(frozen=True)
class KernelInfo:
    """Resources of one kernel, per thread unless said otherwise.

    registers: 32-bit vector registers (AMD: architectural and accumulation registers together).
    spill_bytes: bytes stored to and loaded from memory because registers ran out; 0 is what a good kernel has.
    shared_bytes: static shared memory (LDS) of a block.
    stack: bytes of local memory (scratch), spills included.
    serialised: its matrix instructions wait for one another, for the compiler found no registers to keep them apart (sm_90a).
    """
    registers: int
    spill_bytes: int
    shared_bytes: int
    stack: int
    serialised: bool = False


@dataclass(frozen=True)
class Compiled:
    """Device code of one translation unit.

    cubin: the loadable image (cubin, or AMD code object).  log: everything the compiler said.  kernels: by the name under
    which the image exports them.  assembly: the text of the machine code, where the compiler gives it (HIP).
    """
    cubin: bytes
    log: str
    kernels: dict[str, KernelInfo] = field(default_factory=dict)
    assembly: str = ""


def ptxas_report(log: str) -> dict[str, KernelInfo]:
    """Resources of each entry function, from what `ptxas -v` prints."""
    kernels: dict[str, KernelInfo] = {}
    serialised = {m[1] for m in re.finditer(r"wgmma\S* instructions are serialized .*function '(\w+)'", log)}
    entry = properties_of = ""
    frame = (0, 0)
    for line in log.splitlines():
        if m := re.search(r"Compiling entry function '([^']+)'", line):
            entry, frame = m[1], (0, 0)
        elif m := re.search(r"Function properties for '?([^\s']+)", line):
            properties_of = m[1]                        # device functions that were not inlined are listed too
        elif m := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            if properties_of == entry:
                frame = int(m[1]), int(m[2]) + int(m[3])
        elif (m := re.search(r"Used (\d+) registers", line)) and entry:
            shared = re.search(r"(\d+)(?:\+(\d+))? bytes smem", line)
            kernels[entry] = KernelInfo(int(m[1]), frame[1], sum(int(b or 0) for b in shared.groups()) if shared else 0, frame[0],
                                         entry in serialised)
            entry = ""
    return kernels

