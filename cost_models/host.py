"""Cost of tile programs on a CPU: every statement is an array operation on a tile, every block runs on one core."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ..codegen.cpu.contract import LONGEST, UNPACKED
from ..codegen.cpu.frozen import freeze
from ..codegen.tile import Contract, Gather, Iota, Load, Map, Mask, Reduce, Store, TileProgram
from ..extraction.plan import Buffer
from ..program import DTYPES
from . import walk as W
from .base import ONE, Array, Refusal, Scores, Sizes, Work
from .machines import Cpu
from .tally import Tally

# seconds per float32 element beyond plain arithmetic, in units of `Cpu.element`
FUNCTIONS = {
    "exp": 1.6, "exp2": 1.0, "expm1": 12, "log": 1.6, "log1p": 12, "log2": 6, "log10": 8, "tanh": 1.5, "erf": 20, "sin": 3, "cos": 3, "tan": 12,
    "sinh": 12, "cosh": 12, "asin": 12, "acos": 12, "atan": 12, "asinh": 15, "acosh": 15, "atanh": 15, "pow": 8, "mod": 10, "floordiv": 10,
    "atan2": 20, "hypot": 6, "where": 3, "recip": 0.8, "sqrt": 0.8, "rsqrt": 1.6,
}  # fmt: skip
# seconds per element to and from the compute dtype
CONVERT = {"bfloat16": 0.6e-9, "float16": 3e-9, "float8_e4m3fn": 1e-9, "float8_e5m2": 1e-9}
PACK = 0.6e-9  # seconds per element that a matrix product arranges anew before it begins
VECTOR = 0.15e-9  # seconds per element of a matrix times a vector
FRESH = 0.2e-9  # seconds per byte of an intermediate: its pages are touched for the first time
UNLOCKED = 500  # elements from which an operation gives up the interpreter lock, and must get it back
SERIAL = 0.4  # share of a call's fixed cost that holds the interpreter lock


def reuses(s: Contract, sizes: Sizes) -> Array:
    """1 where it reads its operands many times, else 0."""
    p = W.Product.of(s)
    rows, cols = (sizes.elements(tuple(sorted(x))) for x in (p.rows, p.cols))
    return np.where(np.minimum(rows, cols) >= 8, 1.0, 0.0)


class HostModel:
    """The analytic model of a CPU."""

    def __init__(self, machine: Cpu):
        self.machine = machine

    @property
    def name(self) -> str:
        return self.machine.name

    @property
    def workers(self) -> int:
        return self.machine.cores

    @property
    def intermediate(self) -> float:
        return self.machine.memory / 8

    @property
    def tensor_dtypes(self) -> frozenset[str]:
        return frozenset()

    def floor(self, work: Work) -> float:
        m = self.machine
        busy = (work.tensor + work.mixed) / m.flops + (work.ops + 1.6 * work.special) * m.element / 2
        return m.launch + max(busy / m.cores, work.bytes / m.dram / 4)

    def roles(self, extent: int, contracted: bool) -> tuple[str, ...]:
        if contracted:
            return ("whole",) if extent <= 512 else ("loop", "whole") if extent <= 8192 else ("loop",)
        return ("whole",) if extent <= 512 else ("loop", "whole") if extent <= 1 << 20 else ("loop",)

    def splits(self, extent: int) -> tuple[int, ...]:
        most = max(2, 4 * self.machine.cores)
        return tuple(s for s in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128) if s <= most and extent // s >= 256)

    def tiles(self, program: TileProgram, extents: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        few = sum(1 for x in program.axes.values() if x.role != "whole") > 4
        out: dict[str, tuple[int, ...]] = {}
        for a, x in program.axes.items():
            n = max(extents[a], 1)
            if x.role == "whole":
                out[a] = (n,)
                continue
            sizes: tuple[int, ...] = (1, 16, 64, 256) if few else (1, 8, 32, 64, 128, 256, 512, 1024)
            if x.role == "loop":
                sizes = (64, 256, 1024) if few else (32, 64, 128, 256, 512, 1024, 2048, 4096)
            out[a] = tuple(t for t in sizes if t < n) + ((n,) if n <= 4096 else ())
        return out

    def refusal(self, program: TileProgram, buffers: Mapping[str, Buffer]) -> Refusal | None:
        return None  # every tile program is a sequence of array operations

    def instead(self, choices: Mapping[str, object]) -> None:
        return None

    def cost(self, program: TileProgram, sizes: Sizes, detail: bool = False) -> Scores:
        m = self.machine
        if (frozen := freeze(program)) is not None:  # most arguments allow it
            program = replace(frozen.program, axes=program.axes)
        steps, loops = W.steps(program, sizes)
        blocks = W.blocks(program, sizes)
        width = 2.0 if program.compute_dtype == "float64" else 1.0
        dtype = {b.name: b.dtype for b in (*program.reads, *program.writes)}
        held = self._memory(program, sizes, width)
        near, slower = 1 / m.near, (1 / m.far - 1 / m.near) * np.clip(self._working_set(program, sizes, held) / m.cache - 1, 0, 1)
        byte = near + slower  # seconds a byte of elementwise statements
        masks = W.masks(program)
        views = {s.out.id for s in program.statements if isinstance(s, Load)}
        tally = Tally()
        calls: dict[int, Array] = {}  # calls that an operation counts for, by its number of elements (an array's identity)
        passes: dict[float, Array] = {}  # seconds an element of elementwise operations, by what they take beside plain arithmetic

        def fixed(n: Array) -> Array:
            if id(n) not in calls:
                calls[id(n)] = np.where(n < UNLOCKED, 0.3, 1.0)
            return calls[id(n)]

        def each(factor: float) -> Array:
            if factor not in passes:
                passes[factor] = np.maximum(m.element * factor * width, 8 * width * byte)
            return passes[factor]

        reduced = np.maximum(m.element, 4 * width * byte)
        for step in steps:
            s, runs = step.stmt, step.runs
            if isinstance(s, Load | Gather):
                n = sizes.elements(s.out.axes)
                tally.add("calls", 1.0, fixed(n), runs)
                if converted := CONVERT.get(dtype[s.buffer], 0.0) + (3e-9 if isinstance(s, Gather) else 0.0):
                    tally.add("moved", converted, n, runs)
            elif isinstance(s, Store):
                n = sizes.elements(tuple(sorted({a for ix in s.index for a in ix.axes if a in sizes.tile})))
                tally.add("calls", 1.0, fixed(n), runs)
                fresh = FRESH if program.buffer(s.buffer).kind == "temp" else 0.0
                tally.add("moved", CONVERT.get(dtype[s.buffer], 0.0) + DTYPES[dtype[s.buffer]] * (1.0 / m.far + fresh), n, runs)
            elif isinstance(s, Contract):
                t, c = self._product(sizes, s, width)
                tally.add("product", 1.0, t, runs)
                for v in (s.a, s.b, s.out):
                    if v.id not in views:
                        tally.add("product", 4 * width, sizes.elements(v.axes), slower, runs)
                tally.add("calls", c + (s.acc is not None), runs)
                if s.acc is not None:
                    tally.add("elements", m.element, sizes.elements(s.out.axes), runs)
            elif isinstance(s, Reduce):
                n, rows = sizes.elements(s.arg.axes), sizes.elements(s.out.axes)
                tally.add("calls", 2.0, fixed(n), runs)
                tally.add("elements", 1.0, n, reduced, runs)
                lines = np.minimum(rows, n / np.maximum(rows, 1))  # the axis inside is the one that makes them few
                tally.add("elements", 25e-9, lines, runs)
            elif isinstance(s, Map | Mask | Iota):
                if not s.out.axes:
                    continue
                n = sizes.elements(s.out.axes)
                masked = isinstance(s, Mask) or (isinstance(s, Map) and s.fn == "where" and s.args[0].id in masks)
                share = step.mixed if masked else ONE
                arity = max(len(s.args) - 1, 1) if isinstance(s, Map) and s.fn in ("add", "mul") else 1
                factor = FUNCTIONS.get(s.fn, 1.0) if isinstance(s, Map) else 2.0
                tally.add("calls", arity, fixed(n), share, runs)
                tally.add("special" if factor > 1.5 else "elements", arity, n, each(factor), share, runs)
        product, elements, special, moved = (tally[x] for x in ("product", "elements", "special", "moved"))
        iterations = sum((it.runs for it in loops), np.zeros(1))
        overhead = m.block + (iterations + tally["calls"]) * m.call
        one = overhead + product + elements + special + moved
        waves = np.where(blocks >= 4 * m.cores, blocks / m.cores, np.ceil(blocks / m.cores))
        traffic = self._traffic(program, sizes) / m.dram
        serial = blocks * overhead * SERIAL
        # a block stays small, and all of them together below what the kernel reads and writes (or a few megabytes)
        together = held * np.minimum(blocks, m.cores)
        ok = (held <= m.memory_block) & (together <= np.maximum(self._traffic(program, sizes), 16e6))
        seconds = np.where(ok, m.launch + np.maximum(np.maximum(waves * one, serial), traffic), np.inf)
        full = (sizes.points,)
        seconds = np.broadcast_to(sizes.flat(seconds), full)
        if not detail:
            return Scores(seconds, {})
        parts = {"product": waves * product, "elements": waves * elements, "special": waves * special, "moved": waves * moved}
        parts |= {"calls": waves * overhead, "dram": traffic, "launch": np.full(full, m.launch)}
        more = {"blocks": blocks, "bytes": held}
        return Scores(
            seconds,
            {},
            {k: np.broadcast_to(sizes.flat(v), full) for k, v in parts.items()},
            {k: np.broadcast_to(sizes.flat(v), full) for k, v in more.items()},
        )

    def _product(self, sizes: Sizes, s: Contract, width: float) -> tuple[Array, float]:
        """Seconds of one product, and its array operations."""
        m = self.machine
        p = W.Product.of(s)
        rows, cols, inner, batch = (sizes.elements(tuple(sorted(x))) for x in (p.rows, p.cols, p.inner, p.batch))
        if not p.rows or not p.cols:
            n = sizes.elements(tuple(sorted({*s.a.axes, *s.b.axes})))
            return n * 0.5 * m.element * width + batch * 0.1e-6, 2.0
        small = np.minimum(1 + 32 / np.maximum(rows, 1) + 32 / np.maximum(cols, 1) + 24 / np.maximum(inner, 1), 8.0)
        # by slabs (codegen/cpu/contract.py) if inner is short and a result's row long enough
        few = np.minimum(rows, cols)
        slabs = (width == 1.0) & (inner >= 32) & (inner <= LONGEST) & (few >= 32) & (48 * few * inner <= UNPACKED)
        small = small * np.where(slabs, 0.8, 1.0)
        seconds = np.maximum(2 * rows * cols * inner / m.flops * small, (rows + cols) * inner * PACK)  # it copies its operands
        seconds = np.where(few <= 1, rows * cols * inner * VECTOR, seconds)
        return batch * (seconds * width + 0.3e-6), 1.0

    def _working_set(self, program: TileProgram, sizes: Sizes, held: Array) -> Array:
        """Bytes that a block comes back to: what it holds, and what products read in place."""
        loads = {s.out.id: s for s in program.statements if isinstance(s, Load)}
        for s in program.statements:
            if isinstance(s, Contract):
                for x in (loads.pop(v.id, None) for v in (s.a, s.b)):
                    if x is not None:
                        held = held + reuses(s, sizes) * sizes.elements(x.out.axes) * DTYPES[program.buffer(x.buffer).dtype]
        return held

    def _memory(self, program: TileProgram, sizes: Sizes, width: float) -> Array:
        """Bytes that a block holds at the worst moment."""
        converted = {b.name for b in program.reads if b.dtype in CONVERT}
        views = {s.out.id for s in program.statements if isinstance(s, Load) and s.buffer not in converted}
        worst = np.zeros(1)
        for point in W.peaks(program, lambda v: v.axes if v.axes and v.id not in views else None, False):
            elements = sum((n * sizes.elements(axes) for axes, n in point.items()), np.zeros(1))
            worst = np.maximum(worst, elements * 4 * width)
        return worst

    def _traffic(self, program: TileProgram, sizes: Sizes) -> Array:
        """Bytes from and to memory, each once: the shared cache is large."""
        by = {b.name: DTYPES[b.dtype] for b in (*program.reads, *program.writes)}
        total = sum((n * by[x] for x, n in W.unique_elements(program, sizes).items()), np.zeros(1))
        seen = set()
        for s in program.statements:
            if isinstance(s, Store) and s.buffer not in seen:
                seen.add(s.buffer)
                n = np.ones(1)
                for a in {a for ix in s.index for a in ix.axes if a in sizes.extent}:
                    n = n * sizes.extent[a]
                total = total + n * by[s.buffer]
        return total
