"""What one block of a kernel does on a GPU, summed over its statements: work for each unit, room that it takes, bytes that it moves."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

import numpy as np

from ..codegen.tile import Contract, Gather, Iota, Load, Loop, Map, Mask, Reduce, Stmt, Store, TileProgram, Value
from ..program import DTYPES
from . import walk as W
from .base import ONE, Array, Sizes, clip
from .machines import Gpu
from .tally import Tally

HALF = ("bfloat16", "float16")
SMALL_FLOATS = (*HALF, "float8_e4m3fn", "float8_e5m2")
LINE = 128  # bytes
PARTIAL = 0.4  # of the time of a whole line, for each time that the number of lines doubles because blocks share them

# (operations, special results) of one result; functions not listed: (1, 0)
FUNCTIONS: dict[str, tuple[float, float]] = {
    "exp": (1, 1), "exp2": (0, 1), "expm1": (8, 1), "log": (1, 1), "log2": (0, 1), "log10": (1, 1), "log1p": (6, 1),
    "recip": (0.5, 1), "sqrt": (0.5, 1), "rsqrt": (0.5, 1), "tanh": (0, 1), "erf": (12, 1), "sinh": (4, 2), "cosh": (4, 2),
    "sin": (3, 1), "cos": (3, 1), "tan": (6, 3), "asin": (12, 1), "acos": (12, 1), "atan": (12, 1), "asinh": (8, 2), "acosh": (8, 2),
    "atanh": (8, 2), "pow": (4, 2), "mod": (6, 1), "floordiv": (4, 1), "atan2": (16, 1), "hypot": (4, 1), "neg": (0, 0), "abs": (0.5, 0),
}  # fmt: skip


# what a block has of each point
FIGURES = (
    "tensor", "ops", "special", "l2", "shared", "per_row_warp", "per_col_warp", "staged", "resident", "rows", "cols", "results", "streamed",
    "fed_rows", "fed_cols", "registers", "dram", "partial", "common", "chain",
)  # fmt: skip


class Block:
    """A block's work at every point.

    tensor, ops, special        flops of matrix units, plain operations, special results
    l2                          bytes between the block and the second-level cache
    shared                      bytes through shared memory, whatever the number of warps
    per_row_warp, per_col_warp  … that every group of warps along the rows (columns) of a product reads again
    staged, resident            bytes of shared memory: one stage of the tiles that loops load, and what stays
    rows, cols                  of the largest matrix product (0: there is none)
    results                     elements of all matrix products' results, with their padding
    streamed                    … of those that have a loop's axis: a result of each iteration, not of the loop
    fed                         does a matrix product work on what another one, or a reduction, has made?
    fed_rows, fed_cols          the most rows of such operands, and the most columns that they are multiplied with (0: there are none)
    registers                   bytes of the tiles that lie in registers at the worst moment
    pieces                      (elements in 16 bytes, elements of the tile) of each tile that is loaded piece by piece where it is used
    dram                        bytes that the whole kernel moves between memory and the chip
    partial                     what is to be added to them where loads, not copies of whole boxes, share lines with other blocks' loads
    common                      … of `l2`: what is read element by element and is the same for all blocks (0 where loops stream tiles)
    heavy, streams              does it anything on matrix units; does it load tiles in loops, at any point
    chain                       elements summed by the products of matrices outside loops that are not on matrix units
    waits                       number of other products and of reductions outside loops; turns: of all of them
    read                        by buffer: elements that the whole kernel reads at least once
    """

    def __init__(self, program: TileProgram, sizes: Sizes, steps: list[W.Step], blocks: Array, machine: Gpu):
        self.p, self.sizes, self.steps, self.m = program, sizes, steps, machine
        self.statements = program.statements
        self.feeds = W.feeds(program)
        self.masks = W.masks(program)
        self.dtype = {x.name: x.dtype for x in (*program.reads, *program.writes)}
        self.loaded = {s.out.id: self.dtype[s.buffer] for s in self.statements if isinstance(s, Load | Gather)}
        self.carries = [c for s in self.statements if isinstance(s, Loop) for c in s.carries]
        self.states = {c.phi.id for c in self.carries}
        self.rounds = not program.wide and any(x.dtype in HALF for x in (*program.reads, *program.writes))
        self.rows = self.cols = self.results = self.streamed = self.fed_rows = self.fed_cols = np.zeros(1)
        self.fed = False
        self.waits = self.turns = 0
        self.tally = Tally()
        self.pad: dict[int, Array] = {}  # by value: elements of a product's tile with its padding, relative to those without
        self.units = {id(s): W.Product.of(s) for s in self.statements if isinstance(s, Contract) and self._on_units(s)}
        self._whole: dict[tuple, Array] = {}
        self._paddings()
        for step in steps:
            self._count(step)
        if not self.units:
            self.results = self._single()
        t = self.tally
        self.of: Callable[[Array], Array] | None = None  # if it is at some points alone: takes their entries of an array
        self.tensor, self.ops, self.special, self.l2 = t["tensor"], t["ops"], t["special"], t["l2"]
        self.shared, self.per_row_warp, self.per_col_warp = t["shared"], t["row warp"], t["column warp"]
        self.staged, self.resident = t["staged"], t["resident"]
        self.chain = t["chain"]
        self.heavy = bool(np.any(self.tensor > 0))
        self.streams = bool(np.any(self.staged > 0))
        self.read = W.unique_elements(program, sizes)
        self.registers = self._registers()
        self.dram = self._dram(blocks)
        self.partial = self._partial()
        self.common = np.zeros(1) if self.streams else self._common()

    def at(self, of: Callable[[Array], Array]) -> Block:
        """The block at some points alone; of: takes their entries of an array (`Sizes.picker`)."""
        out = copy(self)
        out.sizes, out.of = self.sizes.at(of), of
        for name in FIGURES:
            setattr(out, name, of(getattr(self, name)))
        out.pieces = [(run, of(n)) for run, n in self.pieces]
        return out

    def runs(self, s: Stmt) -> Array:
        """How often a block runs a statement."""
        found = next(x.runs for x in self.steps if x.stmt is s)
        return found if self.of is None else self.of(found)

    # ---- matrix units
    def _on_units(self, s: Contract) -> bool:
        """Does this product run on matrix units: two tiles of 16-bit numbers, loaded or rounded to them?"""
        p = W.Product.of(s)
        plain = self.p.compute_dtype != "float64"
        return bool(self.m.tensor and plain and p.rows and p.cols and self._half(s.a) and self._half(s.b))

    def _single(self) -> Array:
        """Elements of the results of products of one vector with loaded tiles: kernels give them rows, of which one exists."""
        products = [s for s in self.statements if isinstance(s, Contract)]
        kept = [x for s in products for x in [W.Product.of(s)] if bool(x.rows) != bool(x.cols) and not x.batch]
        loaded = all(self.loaded.get(v.id) in HALF for s in products for v in (s.a, s.b))
        if not self.m.tensor or len(kept) != len(products) or not loaded:
            return np.zeros(1)
        return sum((self.whole(((), 0), (x.rows or x.cols, 1)) for x in kept), np.zeros(1))

    def _half(self, v: Value) -> bool:
        if v.id in self.loaded:
            return self.loaded[v.id] in SMALL_FLOATS
        return self.rounds and v.id not in self.states

    def whole(self, *groups: tuple[tuple[str, ...], int]) -> Array:
        """Elements of a tile in whole matrix instructions; groups: axes, and which side of the instruction they are (−1: none)."""
        if groups not in self._whole:
            out = ONE
            for axes, side in groups:
                n = self.sizes.elements(tuple(sorted(axes)))
                out = out * (n if side < 0 else np.ceil(n / self.m.fragment[side]) * self.m.fragment[side])
            self._whole[groups] = out
        return self._whole[groups]

    def _paddings(self) -> None:
        made = self.states | {c.out.id for c in self.carries}  # values that depend on products and reductions
        for s in self.statements:
            if isinstance(s, Reduce | Contract) or (isinstance(s, Map) and any(v.id in made for v in s.args)):
                made.add(s.out.id)
            if isinstance(s, Contract) and id(s) in self.units:
                p = self.units[id(s)]
                tile = self.sizes.elements(tuple(sorted((*p.rows, *p.cols))))
                key = (("pad", p.rows, p.cols),)
                if key not in self._whole:
                    self._whole[key] = self.whole((p.rows, 0), (p.cols, 1)) / np.maximum(tile, 1.0)
                self.pad[s.out.id] = self._whole[key]
                self.results = self.results + tile * self._whole[key]
                rows, cols = (self.sizes.elements(tuple(sorted(x))) for x in (p.rows, p.cols))
                self.rows, self.cols = np.maximum(self.rows, rows), np.maximum(self.cols, cols)
                if any(self.p.axes[a].role == "loop" for a in (*p.rows, *p.cols)):
                    self.streamed = self.streamed + tile * self._whole[key]
                if s.a.id in made or s.b.id in made:
                    self.fed = True
                    left, right = (rows, cols) if s.a.id in made else (cols, rows)
                    self.fed_rows, self.fed_cols = np.maximum(self.fed_rows, left), np.maximum(self.fed_cols, right)
        for c in self.carries:
            if c.next.id in self.pad:
                self.pad[c.phi.id] = self.pad[c.out.id] = self.pad[c.next.id]

    def _padding(self, s: Map) -> Array:
        """Elementwise work on the tile of a matrix product runs on its padding too."""
        found = {id(self.pad[v.id]): self.pad[v.id] for v in s.args if v.id in self.pad and len(v.axes) == len(s.out.axes)}
        if not found:
            return ONE
        out = next(iter(found.values())) if len(found) == 1 else np.maximum.reduce(np.broadcast_arrays(*found.values()))
        self.pad[s.out.id] = out
        return out

    # ---- statements
    def _count(self, step: W.Step) -> None:
        s, runs, tally, elements = step.stmt, step.runs, self.tally, self.sizes.elements
        if isinstance(s, Contract | Reduce) and not step.depth:
            self._in_turn(s)
        match s:
            case Load():
                n, width = elements(s.out.axes), DTYPES[self.dtype[s.buffer]]
                tally.add("l2", width, n, runs, self._sectors(s, width))
                tally.add("read " + s.buffer, width, n, runs)
                if len(s.out.axes) > 1 and any(isinstance(f, Contract) for f in self.feeds.get(s.out.id, ())):
                    tally.add("shared", width, n, runs)
                    tally.add("staged" if step.depth else "resident", width, n)
            case Gather():
                tally.add("l2", 32.0, elements(s.out.axes), runs)
                tally.add("gathered", DTYPES[self.dtype[s.buffer]], elements(s.out.axes), runs)
            case Contract():
                self._product(s, runs)
            case Map() if not (s.fn == "where" and s.args[0].id in self.masks):
                ops, special = FUNCTIONS.get(s.fn, (1.0, 0.0))
                n, padding = elements(s.out.axes), self._padding(s)
                tally.add("ops", len(s.args) - 1.0 if s.fn in ("add", "mul") else ops, n, padding, runs)
                if special:
                    tally.add("special", special, n, padding, runs)
            case Map():
                tally.add("ops", 1.0, elements(s.out.axes), self._padding(s), runs, step.mixed)
            case Mask():
                tally.add("ops", 2.0, elements(s.out.axes), runs, step.mixed)
            case Iota():
                tally.add("ops", 1.0, elements(s.out.axes), runs)
            case Reduce():
                tally.add("ops", 1.0, elements(s.arg.axes), self.pad.get(s.arg.id, ONE), runs)
            case Store():
                axes = tuple(sorted({a for ix in s.index for a in ix.axes if a in self.sizes.tile}))
                tally.add("l2", DTYPES[self.dtype[s.buffer]], elements(axes), runs)

    def _in_turn(self, s: Contract | Reduce) -> None:
        """What comes after it waits for it."""
        self.turns += 1
        p = W.Product.of(s) if isinstance(s, Contract) else None
        if p is None or not (p.rows and p.cols):
            self.waits += 1
        elif id(s) not in self.units:
            self.tally.add("chain", 1.0, self.sizes.elements(p.inner))

    def _sectors(self, s: Load, width: int) -> Array:
        """Bytes moved for one that is wanted: sectors of 32 bytes, and a little more for what does not fill a line of 128."""
        last = s.index[-1].axes[-1] if s.index and s.index[-1].axes else None
        if last not in self.sizes.tile:
            return ONE
        key = (("sectors", last, width),)
        if key not in self._whole:
            run = np.maximum(self.sizes.tile[last] * width, 1.0)  # type: ignore[index]
            self._whole[key] = np.maximum(1.0, 32.0 / run) + 0.1 * clip(np.log2(128.0 / run), 0.0, 2.0)
        return self._whole[key]

    def _lines(self, s: Load, width: int) -> Array:
        """Time that memory takes for a byte of a tile, relative to tiles whose rows are whole lines of 128 bytes: lines are also asked
        for by the blocks beside this one, at other times."""
        last = s.index[-1].axes[-1] if s.index and s.index[-1].axes else None
        if last not in self.sizes.tile or self.p.axes[last].role != "grid":
            return ONE
        key = (("lines", last, width),)
        if key not in self._whole:
            tile = self.sizes.tile[last]  # type: ignore[index]
            run = np.maximum(tile * width, 1.0).astype(np.int64)
            period = np.lcm(run, LINE)  # after so many bytes the starts of a run and a line meet again
            touched = 1.0 + (period / run - 1.0) / (period / LINE)  # lines that a run has a part of, for one that it fills
            self._whole[key] = np.where(self.sizes.extent[last] > tile, 1.0 + PARTIAL * np.log2(touched), 1.0)  # type: ignore[index]
        return self._whole[key]

    def _product(self, s: Contract, runs: Array) -> None:
        tally, elements = self.tally, self.sizes.elements
        if id(s) in self.units:
            p = self.units[id(s)]
            tally.add("tensor", 2.0, self.whole((p.rows, 0), (p.cols, 1), (p.inner, 2), (p.batch, -1)), runs)
            a, b = (self.whole((p.rows, 0), (p.inner, 2), (p.batch, -1)), self.whole((p.cols, 1), (p.inner, 2), (p.batch, -1)))
            if s.a.id in self.pad:
                tally.add("ops", 0.5, a, runs)  # it lies in registers and is rounded
            else:
                tally.add("column warp", 2.0, a, runs)
                self._put(s.a, a, runs)
            tally.add("row warp", 2.0, b, runs)
            self._put(s.b, b, runs)
            return
        p = W.Product.of(s)
        padding = self.pad.get(s.a.id, self.pad.get(s.b.id, ONE))
        tally.add("ops", 1.0, elements(tuple(sorted({*s.a.axes, *s.b.axes}))), padding, runs)
        if p.rows and p.cols:  # in register tiles of up to 8×8: an operand is read once for 8 elements of the other
            for v, others in ((s.a, p.cols), (s.b, p.rows)):
                key = (("eighth", others),)
                if key not in self._whole:
                    self._whole[key] = np.maximum(elements(tuple(sorted(others))) / 8, 1.0)
                tally.add("shared", 4.0, elements(v.axes), self._whole[key], runs)

    def _put(self, v: Value, tile: Array, runs: Array) -> None:
        """A computed operand that is not in registers goes through shared memory."""
        if v.id not in self.loaded:
            self.tally.add("shared", 2.0, tile, runs)
            self.tally.add("resident", 2.0, tile)

    # ---- room and traffic
    def _registers(self) -> Array:
        absent = {s.out.id for s in self.statements if isinstance(s, Mask | Iota)}
        self.pieces: list[tuple[float, Array]] = []
        for s in self.statements:
            uses = self.feeds.get(s.out.id, []) if isinstance(s, Load) else []
            # tiles of products lie in shared memory; what one elementwise operation reads is loaded right there, piece by piece
            if (
                uses
                and isinstance(s, Load)
                and (
                    (len(s.out.axes) > 1 and all(isinstance(f, Contract) for f in uses))
                    or (len(uses) == 1 and isinstance(uses[0], Map))
                )
            ):
                absent.add(s.out.id)
                if isinstance(uses[0], Map) and s.out.axes and not self.units:
                    self.pieces.append((16 / DTYPES[self.dtype[s.buffer]], self.sizes.elements(s.out.axes)))
        width = 8.0 if self.p.compute_dtype == "float64" else 4.0
        worst = np.zeros(1)
        made = W.NOTHING if self.units else W.passing(self.p, self.feeds)  # where products are, what is reduced lies in fragments first
        pads = {id(x): x for x in (ONE, *self.pad.values())}

        def kind(v: Value) -> tuple[tuple[str, ...], int] | None:
            return (v.axes, id(self.pad.get(v.id, ONE))) if v.axes and v.id not in absent else None

        for point in W.peaks(self.p, kind, transient=True, passing=made):
            t = Tally()
            for (axes, pad), n in point.items():
                t.add("", width * n, self.sizes.elements(axes), pads[pad])
            worst = np.maximum(worst, t[""])
        return worst

    def _dram(self, blocks: Array) -> Array:
        """Each buffer once, and again what the second-level cache cannot hold."""
        m, sizes = self.m, self.sizes
        width = {x: DTYPES[d] for x, d in self.dtype.items()}
        total = sum((n * width[x] for x, n in self.read.items()), np.zeros(1))
        if (gathered := self.tally["gathered"]).any():
            total = total + gathered * blocks
        far = np.where(total > m.l2_bytes, 0.04, 0.0)
        mine: dict[str, Array] = {}
        for s in self.statements:
            if isinstance(s, Load):
                grid = tuple(a for a in s.out.axes if self.p.axes[a].role == "grid")
                own = sizes.elements(grid) * sizes.walked(tuple(a for a in s.out.axes if a not in grid))
                mine[s.buffer] = np.maximum(mine.get(s.buffer, 0.0), own * width[s.buffer])
        again, reads = np.zeros(1), np.zeros(1)  # of a block
        # re-reads within a block hit the cache if what all resident blocks hold fits half of it: the rest is what streams through
        room = m.l2_bytes / (2 * np.minimum(blocks, m.sms))
        for x, held in mine.items():
            read = self.tally["read " + x]
            if (over := held > room).any():
                again = again + np.where(over, np.maximum(read - held, 0.0), 0.0)
            reads = reads + read
        if far.any():
            far = np.maximum((reads - again) * blocks - total, 0.0) * far
        total = total + far + (again * blocks if again.any() else 0.0)
        stores: dict[str, Store] = {}
        for s in self.statements:
            if isinstance(s, Store):
                stores.setdefault(s.buffer, s)
        for b in self.p.writes:
            s = stores[b.name]
            n = sizes.walked(tuple(sorted({a for ix in s.index for a in ix.axes if a in sizes.extent})))
            total = total + (n if b.kind == "temp" else np.minimum(n, max(b.size, 1))) * width[b.name]
        return total

    def _partial(self) -> Array:
        slow: dict[str, Array] = {}
        for s in self.statements:
            if isinstance(s, Load) and (lines := self._lines(s, DTYPES[self.dtype[s.buffer]])) is not ONE:
                slow[s.buffer] = np.maximum(slow.get(s.buffer, 1.0), lines)
        return sum((self.read[x] * DTYPES[self.dtype[x]] * (n - 1.0) for x, n in slow.items()), np.zeros(1))

    def _common(self) -> Array:
        total = np.zeros(1)
        for step in self.steps:
            s = step.stmt
            if isinstance(s, Load) and not any(isinstance(f, Contract) for f in self.feeds.get(s.out.id, ())):
                width, same = DTYPES[self.dtype[s.buffer]], np.ones(1)
                for a in {a for ix in s.index for a in ix.axes if a in self.sizes.tile and self.p.axes[a].role == "grid"}:
                    same = same * (self.sizes.trips(a) <= 1)
                total = total + width * self.sizes.elements(s.out.axes) * step.runs * self._sectors(s, width) * same
        return total
