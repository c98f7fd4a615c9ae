"""Roofline of a GPU: a block's work on each unit of a multiprocessor, waves of blocks, memory, feasibility of registers and shared
memory; the schedule choices (warps, stages) are taken with the tiles."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ..codegen.tile import Carry, Contract, Gather, Iota, Load, Loop, Map, Mask, Reduce, Store, TileProgram, Value, walk
from ..program import DTYPES
from . import walk as W
from .base import Array, Scores, Sizes, Work
from .machines import Gpu

WARPS = (4, 8)
STAGES = (2, 3, 4)
HALF = ("bfloat16", "float16")
SMALL_FLOATS = (*HALF, "float8_e4m3fn", "float8_e5m2")

# (operations, special results) of one result; functions not listed: (1, 0)
FUNCTIONS: dict[str, tuple[float, float]] = {
    "exp": (1, 1), "exp2": (0, 1), "expm1": (8, 1), "log": (1, 1), "log2": (0, 1), "log10": (1, 1), "log1p": (6, 1),
    "recip": (0.5, 1), "sqrt": (0.5, 1), "rsqrt": (0.5, 1), "tanh": (0, 1), "erf": (12, 1), "sinh": (4, 2), "cosh": (4, 2),
    "sin": (3, 1), "cos": (3, 1), "tan": (6, 3), "asin": (12, 1), "acos": (12, 1), "atan": (12, 1), "asinh": (8, 2), "acosh": (8, 2),
    "atanh": (8, 2), "pow": (4, 2), "mod": (6, 1), "floordiv": (4, 1), "atan2": (16, 1), "hypot": (4, 1), "neg": (0, 0), "abs": (0.5, 0),
}  # fmt: skip


def _whole(program: TileProgram, extents: Mapping[str, int], axes: tuple[str, ...], besides: str) -> int:
    """Elements along the other axes of these that lie whole in a block."""
    return math.prod(extents[a] for a in axes if a != besides and program.axes[a].role == "whole")


@dataclass
class _Block:
    """What one block does, summed over its statements (arrays over points)."""

    tensor: Array = field(default_factory=lambda: np.zeros(1))
    ops: Array = field(default_factory=lambda: np.zeros(1))
    special: Array = field(default_factory=lambda: np.zeros(1))
    l2: Array = field(default_factory=lambda: np.zeros(1))
    shared: Array = field(default_factory=lambda: np.zeros(1))  # bytes through shared memory that do not depend on warps
    per_row_warp: Array = field(default_factory=lambda: np.zeros(1))  # … that every group of warps along the rows reads again
    per_col_warp: Array = field(default_factory=lambda: np.zeros(1))
    staged: Array = field(default_factory=lambda: np.zeros(1))  # bytes of one stage of the tiles that loops load
    resident: Array = field(default_factory=lambda: np.zeros(1))  # bytes that stay in shared memory
    rows: Array = field(default_factory=lambda: np.zeros(1))  # largest row count of a matrix product (0: there is none)
    cols: Array = field(default_factory=lambda: np.zeros(1))


class Roofline:
    """The analytic model of one GPU.  Deterministic, and blind to names."""

    def __init__(self, machine: Gpu):
        self.machine = machine

    @property
    def name(self) -> str:
        return self.machine.name

    @property
    def workers(self) -> int:
        return self.machine.sms

    @property
    def tensor_dtypes(self) -> frozenset[str]:
        return frozenset(HALF) if self.machine.tensor else frozenset()

    # ---- bounds and choices
    def floor(self, work: Work) -> float:
        m = self.machine
        t = max(work.tensor / m.tensor if m.tensor else work.tensor / 2 / m.ops, work.ops / m.ops, work.special / m.special)
        return m.launch + max(t, work.bytes / m.dram)

    def roles(self, extent: int, contracted: bool) -> tuple[str, ...]:
        if contracted:
            return ("whole",) if extent <= 128 else ("whole", "loop") if extent <= 256 else ("loop",)
        return ("whole",) if extent <= 256 else ("loop", "whole") if extent <= 32768 else ("loop",)

    def splits(self, extent: int) -> tuple[int, ...]:
        return tuple(s for s in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256) if extent // s >= 64)

    def tiles(self, program: TileProgram, extents: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        products = [W.Product.of(s) for s in walk(program.body) if isinstance(s, Contract)]
        products = [p for p in products if p.rows and p.cols]
        kept = {a for p in products for a in (*p.rows, *p.cols)}
        summed = {a for p in products for a in p.inner}
        fast = {s.index[-1].axes[-1] for s in walk(program.body) if isinstance(s, Load | Store) and s.index and s.index[-1].axes}
        out: dict[str, tuple[int, ...]] = {}
        for a, x in program.axes.items():
            n = extents[a]
            if x.role == "whole" or n <= 1:
                out[a] = (max(n, 1),)
                continue
            if a in kept and x.role == "grid":
                sizes: tuple[int, ...] = (1, 16, 32, 64, 128, 256) if n > 16 else (1, 2, 4, 8, 16)
            elif a in summed or (products and x.role == "loop"):
                beside = min((_whole(program, extents, p.inner, a) for p in products if a in p.inner), default=1)
                sizes = tuple(t for t in (1, 2, 4, 8, 16, 32, 64, 128, 256) if 16 <= t * beside <= 256)
            elif products and x.role == "grid":
                sizes = (1,)
            elif x.role == "loop":
                sizes = (64, 128, 256, 512, 1024, 2048, 4096)
            elif a in fast:
                sizes = (1, 8, 32, 64, 128, 256, 512, 1024)
            else:
                sizes = (1, 2, 4, 8, 16, 32, 64)
            fits = [t for t in sizes if t < n]
            # the whole extent as one tile where that is of the same order
            out[a] = tuple(fits) + ((n,) if not fits or n <= 2 * sizes[-1] else ())
        return out

    # ---- the price
    def cost(self, program: TileProgram, sizes: Sizes, detail: bool = False) -> Scores:
        m = self.machine
        steps, loops = W.steps(program, sizes)
        blocks = W.blocks(program, sizes)
        b, accumulators = self._block(program, sizes, steps)
        pressure = self._pressure(program, sizes, accumulators)
        iterations = sum((it.runs for it in loops), np.zeros(1))
        alive = min((it.alive for it in loops), key=lambda x: float(x.mean()), default=np.ones(1))
        dram = self._dram(program, sizes, steps, blocks)
        per_sm = np.where(alive < 1, np.maximum(blocks / m.sms + 0.5, 1.0), np.ceil(blocks / m.sms))
        heavy, streams = bool(np.any(b.tensor > 0)), bool(np.any(b.staged > 0))
        tiles = np.ceil(b.rows / m.fragment[0]) * np.ceil(b.cols / m.fragment[1])
        active = np.minimum(blocks, m.sms)
        fixed = [
            x * m.sms for x in (b.tensor / max(m.tensor, 1.0), b.ops / self._ops(program), b.special / m.special, b.l2 / m.l2)
        ]
        rows: list[tuple[int, int, Array, dict[str, Array]]] = []
        for warps in WARPS:
            threads = warps * m.warp
            row_warps = np.clip(np.ceil(b.rows / m.fragment[0]), 1.0, warps)
            shared = (b.shared + b.per_row_warp * row_warps + b.per_col_warp * warps / row_warps) * (m.sms / m.shared)
            registers = np.ceil((pressure / 4.0 / threads + (48 if heavy else 28)) / 8.0) * 8.0
            fits = registers <= m.registers_thread
            if heavy:
                fits = fits & (tiles >= warps)
            time = [*fixed, shared]
            most = np.maximum.reduce(np.broadcast_arrays(*time))
            total = sum(time)
            for stages in sorted({min(n, m.stages) for n in STAGES}) if streams else (1,):
                used = b.resident + b.staged * stages
                resident = np.minimum(np.floor(m.registers / (registers * threads)), np.floor(m.shared_sm / (used + 1024)))
                resident = np.clip(np.minimum(resident, m.threads_sm // threads), 0, 16)
                ok = fits & (used <= m.shared_block) & (resident >= 1)
                together = np.clip(np.minimum(resident, np.ceil(blocks / m.sms)), 1, None)
                few, many = m.overlap
                share = few + (many - few) * np.clip((together * warps - 4.0) / 8.0, 0.0, 1.0)
                compute = per_sm * (most + share * (total - most))
                latency = np.ceil(blocks / (m.sms * np.maximum(resident, 1.0))) * (iterations * m.step + m.block)
                flight = together * (b.staged * max(stages - 1, 1) if streams else b.l2)
                pull = np.minimum(m.pull, np.maximum(flight, 2048.0) / m.latency)
                memory = dram / np.minimum(m.dram, active * pull) + m.block
                seconds = np.where(ok, m.launch + np.maximum(compute + latency, memory), np.inf)
                parts = {}
                if detail:
                    names = ("tensor", "ops", "special", "l2", "shared")
                    parts = {n: per_sm * x for n, x in zip(names, time)} | {
                        "dram": memory,
                        "latency": latency,
                        "launch": np.full(1, m.launch),
                    }
                    parts |= {"registers": registers, "shared bytes": used, "resident": resident, "blocks": blocks}
                rows.append((warps, stages, np.broadcast_to(seconds, (sizes.points,)), parts))
        table = np.stack([r[2] for r in rows])
        best = (table * (1 + 1e-3 * np.arange(len(rows)))[:, None]).argmin(0)  # near-ties go to fewer warps and stages
        picked = np.arange(sizes.points)
        choices = {"warps": np.array([float(r[0]) for r in rows])[best], "stages": np.array([float(r[1]) for r in rows])[best]}
        parts, more = {}, {}
        if detail:
            every = {k: np.stack([np.broadcast_to(r[3][k], (sizes.points,)) for r in rows])[best, picked] for k in rows[0][3]}
            more = {k: every.pop(k) for k in ("registers", "shared bytes", "resident", "blocks")}
            parts = every
        return Scores(table[best, picked], choices, parts, more)

    def _ops(self, program: TileProgram) -> float:
        return self.machine.ops64 if program.compute_dtype == "float64" else self.machine.ops

    def _block(self, program: TileProgram, sizes: Sizes, steps: list[W.Step]) -> tuple[_Block, dict[int, Array]]:
        """Work of a block, and the padding factor of every value that lies in the layout of a matrix product."""
        b = _Block()
        dtype = {x.name: x.dtype for x in (*program.reads, *program.writes)}
        loaded: dict[int, str] = {}
        computed_half = any(x.dtype in HALF for x in program.reads) or any(x.dtype in HALF for x in program.writes)
        pad: dict[int, Array] = {}
        feeds = W.feeds(program)
        masks = W.masks(program)
        carries: list[Carry] = [c for s in walk(program.body) if isinstance(s, Loop) for c in s.carries]
        phis = {c.phi.id for c in carries}

        def half(v: Value) -> bool:
            if v.id in loaded:
                return loaded[v.id] in SMALL_FLOATS
            return computed_half and v.id not in phis

        for step in steps:
            if isinstance(step.stmt, Load | Gather):
                loaded[step.stmt.out.id] = dtype[step.stmt.buffer]
        units = {
            id(s): W.Product.of(s) for s in walk(program.body) if isinstance(s, Contract) and self._fits_units(program, s, half)
        }
        for step in steps:
            if id(step.stmt) in units and isinstance(step.stmt, Contract):
                p = units[id(step.stmt)]
                m, n = (sizes.elements(tuple(sorted(x))) for x in (p.rows, p.cols))
                pad[step.stmt.out.id] = self._whole(m, 0) * self._whole(n, 1) / np.maximum(m * n, 1.0)
        for c in carries:
            if c.next.id in pad:
                pad[c.phi.id] = pad[c.out.id] = pad[c.next.id]
        for step in steps:
            s, runs = step.stmt, step.runs
            match s:
                case Load():
                    width = DTYPES[dtype[s.buffer]]
                    n = sizes.elements(s.out.axes)
                    moved = n * width
                    if s.index and s.index[-1].axes:
                        run = sizes.tile.get(s.index[-1].axes[-1], np.ones(1)) * width
                        # sectors of 32 bytes, and a little more for what does not fill a line of 128
                        moved = moved * (
                            np.maximum(1.0, 32.0 / np.maximum(run, 1.0)) + 0.1 * np.clip(np.log2(128.0 / run), 0.0, 2.0)
                        )
                    b.l2 = b.l2 + moved * runs
                    if any(isinstance(f, Contract) for f in feeds.get(s.out.id, ())) and len(s.out.axes) > 1:
                        b.shared = b.shared + n * width * runs
                        if step.depth:
                            b.staged = b.staged + n * width
                        else:
                            b.resident = b.resident + n * width
                case Gather():
                    b.l2 = b.l2 + sizes.elements(s.out.axes) * 32.0 * runs
                case Contract():
                    self._product(sizes, b, s, runs, units.get(id(s)), pad, loaded)
                case Map() if not (s.fn == "where" and s.args[0].id in masks):
                    ops, special = FUNCTIONS.get(s.fn, (1.0, 0.0))
                    n = sizes.elements(s.out.axes)
                    factor = self._padding(pad, s)
                    if s.fn in ("add", "mul"):
                        ops = len(s.args) - 1.0
                    b.ops = b.ops + n * factor * runs * ops
                    if special:
                        b.special = b.special + n * factor * runs * special
                case Map() | Mask():
                    factor = self._padding(pad, s) if isinstance(s, Map) else np.ones(1)
                    b.ops = b.ops + sizes.elements(s.out.axes) * factor * runs * step.mixed * (1.0 if isinstance(s, Map) else 2.0)
                case Iota():
                    b.ops = b.ops + sizes.elements(s.out.axes) * runs
                case Reduce():
                    b.ops = b.ops + sizes.elements(s.arg.axes) * pad.get(s.arg.id, np.ones(1)) * runs
                case Store():
                    axes = tuple(sorted({a for ix in s.index for a in ix.axes if a in sizes.tile}))
                    b.l2 = b.l2 + sizes.elements(axes) * DTYPES[dtype[s.buffer]] * runs
        return b, pad

    def _padding(self, pad: dict[int, Array], s: Map) -> Array:
        """Elementwise work on the tile of a matrix product runs on its padding too."""
        out = np.ones(1)
        for v in s.args:
            if v.id in pad and len(v.axes) == len(s.out.axes):
                out = np.maximum(out, pad[v.id])
                pad[s.out.id] = out
        return out

    def _fits_units(self, program: TileProgram, s: Contract, half: Callable[[Value], bool]) -> bool:
        p = W.Product.of(s)
        return bool(self.machine.tensor and p.rows and p.cols and half(s.a) and half(s.b) and program.compute_dtype != "float64")

    def _whole(self, extent: Array, side: int) -> Array:
        """Rows, columns or inner elements (0, 1, 2) of whole matrix instructions."""
        step = self.machine.fragment[side]
        return np.ceil(extent / step) * step

    def _product(
        self,
        sizes: Sizes,
        b: _Block,
        s: Contract,
        runs: Array,
        unit: W.Product | None,
        pad: dict[int, Array],
        loaded: dict[int, str],
    ) -> None:
        p = W.Product.of(s)
        m, n, k, batch = (sizes.elements(tuple(sorted(x))) for x in (p.rows, p.cols, p.inner, p.batch))
        one = np.ones(1)
        if unit is not None:
            mm, nn, kk = (self._whole(x, side) for side, x in enumerate((m, n, k)))
            b.tensor = b.tensor + 2.0 * mm * nn * kk * batch * runs
            b.rows, b.cols = np.maximum(b.rows, m), np.maximum(b.cols, n)
            if s.a.id not in pad:  # not yet in registers
                b.per_col_warp = b.per_col_warp + 2.0 * mm * kk * batch * runs
                if s.a.id not in loaded:
                    b.shared = b.shared + 2.0 * mm * kk * batch * runs
                    b.resident = b.resident + 2.0 * mm * kk * batch
            else:
                b.ops = b.ops + 0.5 * mm * kk * batch * runs  # rounding
            b.per_row_warp = b.per_row_warp + 2.0 * nn * kk * batch * runs
            if s.b.id not in loaded:
                b.shared = b.shared + 2.0 * nn * kk * batch * runs
                b.resident = b.resident + 2.0 * nn * kk * batch
            return
        a_el, b_el = sizes.elements(s.a.axes), sizes.elements(s.b.axes)
        axes = tuple(sorted({*s.a.axes, *s.b.axes}))
        b.ops = b.ops + sizes.elements(axes) * np.maximum(pad.get(s.a.id, one), pad.get(s.b.id, one)) * runs
        if (
            p.rows and p.cols
        ):  # register tiles of up to 8×8: an operand is read from shared memory once per 8 elements of the other
            b.shared = b.shared + 4.0 * (a_el * np.maximum(n / 8, 1.0) + b_el * np.maximum(m / 8, 1.0)) * runs

    def _pressure(self, program: TileProgram, sizes: Sizes, pad: dict[int, Array]) -> Array:
        """Bytes of registers that the tiles of a block take at the worst moment."""
        feeds = W.feeds(program)
        elsewhere = {
            s.out.id
            for s in walk(program.body)
            if isinstance(s, Load)
            and feeds.get(s.out.id)
            and all(isinstance(f, Contract) for f in feeds[s.out.id])
            and len(s.out.axes) > 1
        }
        # what one elementwise operation reads is loaded right there, piece by piece
        elsewhere |= {
            s.out.id
            for s in walk(program.body)
            if isinstance(s, Load) and len(feeds.get(s.out.id, ())) == 1 and isinstance(feeds[s.out.id][0], Map)
        }
        small = {s.out.id for s in walk(program.body) if isinstance(s, Mask | Iota)}
        width = 8.0 if program.compute_dtype == "float64" else 4.0
        worst = np.zeros(1)
        for point in W.peaks(program, lambda v: bool(v.axes) and v.id not in elsewhere and v.id not in small, True):
            n = np.zeros(1)
            for v in point:
                n = n + sizes.elements(v.axes) * pad.get(v.id, 1.0)
            worst = np.maximum(worst, n * width)
        return worst

    def _dram(self, program: TileProgram, sizes: Sizes, steps: list[W.Step], blocks: Array) -> Array:
        """Bytes between memory and the chip: each buffer once, and again what the second-level cache cannot hold."""
        m = self.machine
        width = {x.name: DTYPES[x.dtype] for x in (*program.reads, *program.writes)}
        total = sum((n * width[x] for x, n in W.unique_elements(program, sizes).items()), np.zeros(1))
        far = np.where(total > m.l2_bytes, 0.04, 0.0)
        again = np.zeros(1)
        mine: dict[str, Array] = {}
        read: dict[str, Array] = {}
        for step in steps:
            s = step.stmt
            if isinstance(s, Load):
                n = sizes.elements(s.out.axes) * width[s.buffer]
                own = np.ones(1)
                for a in s.out.axes:
                    own = own * (sizes.tile[a] if program.axes[a].role == "grid" else sizes.extent[a])
                mine[s.buffer] = np.maximum(mine.get(s.buffer, 0.0), own * width[s.buffer])
                read[s.buffer] = read.get(s.buffer, 0.0) + n * step.runs
            elif isinstance(s, Gather):
                total = total + sizes.elements(s.out.axes) * step.runs * blocks * width[s.buffer]
        for x, n in read.items():
            # re-reads within a block hit the cache if what all resident blocks hold fits it
            fits = mine[x] * np.minimum(blocks, m.sms) <= m.l2_bytes
            again = again + np.where(fits, 0.0, np.maximum(n - mine[x], 0.0)) * blocks
        traffic = sum((n * blocks for n in read.values()), np.zeros(1))
        total = total + again + np.maximum(traffic - again - total, 0.0) * far
        for b in program.writes:
            n = np.ones(1)
            for s in walk(program.body):
                if isinstance(s, Store) and s.buffer == b.name:
                    for a in sorted({a for ix in s.index for a in ix.axes if a in sizes.extent}):
                        n = n * sizes.extent[a]
                    break
            total = (
                total + np.minimum(n, np.maximum(b.size, 1)) * width[b.name] if b.kind != "temp" else total + n * width[b.name]
            )
        return total
