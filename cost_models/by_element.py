"""Price of a kernel whose elements go to one thread each (codegen/cuda/simple.py).

Nothing is shared between threads, and a reduction's terms follow one another: each is looked up (shared memory, or a cache), its place is
worked out, it is added.  A multiprocessor with few blocks waits for that chain; with many, its instructions take longer than the wait."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..codegen.tile import Contract, Loop, Map, Reduce, Store, TileProgram, Value
from ..program import DTYPES
from . import walk as W
from .base import Scores, Sizes
from .block import FUNCTIONS
from .machines import Gpu

THREADS = 256
ROOM = 96 * 1024  # bytes of shared memory that values may take; what does not fit lies in memory
TERM = 90e-9  # seconds from one term to the next, of one thread: 32768 of them took 2,986 µs (H200)
ISSUE = 30e-9  # … where other blocks' instructions come between, for each block
MEET = 50e-9  # of a block's threads behind each statement
REGISTERS = 64


class ByElement:
    """The model of such kernels.  Every one can be printed so."""

    def __init__(self, machine: Gpu):
        self.machine = machine

    def cost(self, program: TileProgram, sizes: Sizes, detail: bool = False) -> Scores:
        return price(program, sizes, self.machine)

    def instead(self, choices: Mapping[str, object]) -> None:
        return None


def price(program: TileProgram, sizes: Sizes, m: Gpu) -> Scores:
    """Seconds at every point, with parts; finite everywhere."""
    one = np.ones(1)
    steps, loops = W.steps(program, sizes)
    blocks = one * W.blocks(program, sizes)
    warps = THREADS // m.warp
    terms, meetings = 0.0 * one, 0.0 * one  # of one thread; of one block
    for step in steps:
        s = step.stmt
        match s:
            case Reduce() | Contract():
                args = (s.arg,) if isinstance(s, Reduce) else (s.a, s.b)
                out, inner = one * sizes.elements(s.out.axes), one * sizes.elements(tuple(s.axes))
                alone = np.ceil(out / THREADS) * inner
                by_warp = np.ceil(out / warps) * np.ceil(inner / m.warp)
                each = np.where((out < THREADS) & (inner >= 2 * m.warp), by_warp, alone)
                terms = terms + each * step.runs * _weight(args)
            case Store():
                axes = tuple(sorted({*s.arg.axes, *(a for ix in s.index for a in ix.axes if a in sizes.tile)}))
                terms = terms + np.ceil(sizes.elements(axes) / THREADS) * step.runs
            case Map() if FUNCTIONS.get(s.fn, (1.0, 0.0))[1] or FUNCTIONS.get(s.fn, (1.0, 0.0))[0] >= 4:
                terms = terms + np.ceil(sizes.elements(s.out.axes) / THREADS) * step.runs
            case _:
                continue
        meetings = meetings + step.runs
    for it in loops:  # new state takes the old one's place
        for c in it.loop.carries:
            terms = terms + np.ceil(sizes.elements(c.phi.axes) / THREADS) * it.runs
        meetings = meetings + it.runs
    width = 8.0 if program.compute_dtype == "float64" else 4.0
    kept = sum((one * sizes.elements(v.axes) * width for v in _kept(program)), 0.0 * one)
    resident = np.minimum(np.floor(m.shared_sm / (np.minimum(kept, ROOM) + 1024)), m.registers // (REGISTERS * THREADS))
    resident = np.clip(np.minimum(resident, m.threads_sm // THREADS), 1, np.maximum(np.ceil(blocks / m.sms), 1))
    waves = np.ceil(blocks / (m.sms * resident))
    chain = waves * (terms * np.maximum(TERM, resident * ISSUE) + meetings * MEET + m.block)
    moved = sum(n * DTYPES[program.buffer(x).dtype] for x, n in W.unique_elements(program, sizes).items())
    for s in program.statements:
        if isinstance(s, Store):
            n = one
            for a in sorted({a for ix in s.index for a in ix.axes if a in sizes.extent}):
                n = n * sizes.extent[a]
            moved = moved + n * DTYPES[program.buffer(s.buffer).dtype]
    memory = one * moved / m.dram + m.block
    parts = {"element": chain, "dram": memory, "launch": m.launch * one}
    full = (sizes.points,)
    parts = {n: np.broadcast_to(sizes.flat(x), full) for n, x in parts.items()}
    return Scores(np.broadcast_to(sizes.flat(m.launch + np.maximum(chain, memory)), full), {}, parts)


def _weight(args: tuple[Value, ...]) -> float:
    """Time of one term: a product looks up two numbers, a sum one."""
    return len(args) / 2


def _kept(program: TileProgram) -> list[Value]:
    """Results and states that lie in shared memory, as far as it has room."""
    out: dict[int, Value] = {}
    for s in program.statements:
        if isinstance(s, Loop):
            for c in s.carries:
                out[c.phi.id], out[c.next.id] = c.phi, c.next
        elif isinstance(s, Reduce | Contract):
            out[s.out.id] = s.out
    return list(out.values())
