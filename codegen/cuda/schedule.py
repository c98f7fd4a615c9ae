"""From a tile program to decisions: warps, layouts, what lies in shared memory, which contractions use tensor cores.

`plan` either returns a `Schedule`, from which fragments.py prints code and which prices shared memory and registers, or
raises `Unsupported`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from ...program import DTYPES
from ...terms import Affine
from ..lower import live as live_statements
from ..tile import (
    Carry,
    Const,
    Contract,
    Gather,
    Iota,
    Load,
    Loop,
    Map,
    Mask,
    Reduce,
    Stmt,
    Store,
    TileProgram,
    Value,
    operands,
    results,
    walk,
)
from .arch import Arch
from .layout import COLUMN, ROW, Group, Layout, Sides, Unsupported, fragment_group, vector_group
from .simplify import fold_exponentials

UNIT = "one"  # a row axis of extent 1, given to contractions that have no rows
HALVES = ("bfloat16", "float16")
EIGHTS = ("float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True)
class Precision:
    """accurate: results are wanted in float32 or float64, so nothing is rounded on the way.  half: the 16-bit dtype that computed
    operands of a tensor-core product are rounded to (None: there is none)."""

    accurate: bool
    half: str | None
    compute: str = "float32"


@dataclass
class TilePlan:
    """A loaded tile in shared memory: outer × inner elements, `inner` contiguous.  stages: how many of it a loop keeps."""

    load: Load
    outer: tuple[str, ...]
    inner: tuple[str, ...]
    rows: int = 0
    columns: int = 0
    packed: bool = True
    loop: str | None = None
    stages: int = 1
    offset: int = 0
    bytes: int = 0


@dataclass
class Operand:
    """where: "tile" (a loaded tile), "register" (in fragments, rounded) or "staged" (computed, then put into shared memory)."""

    where: str
    value: Value
    layout: Layout | None = None
    held: bool = False
    offset: int = 0
    bytes: int = 0


@dataclass
class ContractPlan:
    kind: str  # "tensor" or "plain"
    dtype: str
    left: Operand
    right: Operand
    left_axes: tuple[str, ...]
    right_axes: tuple[str, ...]
    inner: tuple[str, ...]
    steps: int = 0


@dataclass
class Schedule:
    program: TileProgram
    arch: Arch
    precision: Precision
    kind: str  # "fragment" or "vector"
    warps_row: int
    warps_column: int
    warps_split: int  # warps that share a loop's tiles, each with a fold of its own
    split: Loop | None
    tile: dict[str, int]
    forced: frozenset[str]  # axes laid out although a block sees one position of them
    home: dict[int, Layout] = field(default_factory=dict)
    instances: dict[int, list[Layout]] = field(default_factory=dict)
    frames: dict[int, Layout] = field(default_factory=dict)  # by id of a Reduce's result
    store_frames: dict[int, Layout] = field(default_factory=dict)  # by id() of the Store, within one plan
    tiles: dict[int, TilePlan] = field(default_factory=dict)
    contracts: dict[int, ContractPlan] = field(default_factory=dict)
    deferred: frozenset[int] = frozenset()  # phis of carries kept as partial sums of each lane until their loop ends
    scratch: int = 0
    scratch_bytes: int = 0
    shared: int = 0
    registers: int = 0
    min_blocks: int = 1

    @property
    def warps(self) -> int:
        return self.warps_row * self.warps_column * self.warps_split

    @property
    def threads(self) -> int:
        return self.warps * self.arch.warp


# ------------------------------------------------------------------ rewriting before decisions


def _ids(p: TileProgram) -> int:
    n = 0
    for s in walk(p.body):
        n = max([n, *(v.id for v in (*operands(s), *results(s)))])
        if isinstance(s, Loop):
            n = max([n, *(v.id for c in s.carries for v in (c.phi, c.next))])
    return n


def rebuild(body: tuple[Stmt, ...], f) -> tuple[Stmt, ...]:  # type: ignore[no-untyped-def]
    """Every statement replaced by those that f gives; loops after their bodies."""
    out: list[Stmt] = []
    for s in body:
        if isinstance(s, Loop):
            s = replace(s, body=rebuild(s.body, f))
        out.extend(f(s))
    return tuple(out)


def with_axis(p: TileProgram, start: set[int], axis: str) -> TileProgram:
    """The program with an axis of extent 1 added to some values and to all that depend on them."""
    has: set[int] = set(start)

    def value(v: Value) -> Value:
        return replace(v, axes=tuple(sorted((*v.axes, axis)))) if v.id in has and axis not in v.axes else v

    def spread(body: tuple[Stmt, ...]) -> bool:
        changed = False
        for s in body:
            if isinstance(s, Loop):
                for c in s.carries:
                    group = {c.phi.id, c.next.id, c.out.id}
                    if (has & (group | {c.init.id})) and not group <= has:
                        has.update(group)
                        changed = True
                changed |= spread(s.body)
            elif not isinstance(s, Store) and s.out.id not in has and any(v.id in has for v in operands(s)):
                has.add(s.out.id)
                changed = True
        return changed

    while spread(p.body):
        pass

    def f(s: Stmt) -> list[Stmt]:
        match s:
            case Map():
                return [replace(s, out=value(s.out), args=tuple(map(value, s.args)))]
            case Reduce():
                return [replace(s, out=value(s.out), arg=value(s.arg), acc=s.acc and value(s.acc))]
            case Contract():
                return [replace(s, out=value(s.out), a=value(s.a), b=value(s.b), acc=s.acc and value(s.acc))]
            case Gather():
                return [replace(s, out=value(s.out), position=value(s.position))]
            case Store():
                return [replace(s, arg=value(s.arg))]
            case Loop():
                return [
                    replace(
                        s,
                        carries=tuple(
                            Carry(value(c.init), value(c.phi), value(c.next), value(c.out), c.kind, c.op) for c in s.carries
                        ),
                    )
                ]
        return [replace(s, out=value(s.out))]

    from ...extraction.plan import Axis

    return replace(p, axes={**p.axes, axis: Axis(1, 1, "whole")}, extents={**p.extents, axis: 1}, body=rebuild(p.body, f))


def index_axes(s: Stmt) -> tuple[str, ...]:
    return tuple(dict.fromkeys(a for ix in s.index for a in ix.axes)) if isinstance(s, Load | Store | Gather) else ()


# ------------------------------------------------------------------ planning


def plan(p: TileProgram, arch: Arch, precision: Precision) -> Schedule:
    if not precision.accurate and precision.compute == "float32":
        p = fold_exponentials(p)
    return _Planner(p, arch, precision).run()


class _Planner:
    def __init__(self, p: TileProgram, arch: Arch, precision: Precision):
        self.p, self.arch, self.precision = p, arch, precision
        self.tile = {a: x.tile for a, x in p.axes.items()}
        self.forced: set[str] = set()
        self.index()

    def index(self) -> None:
        self.defs: dict[int, Stmt] = {}
        self.free_values: set[int] = set()
        for s in walk(self.p.body):
            if isinstance(s, Loop):
                continue
            elif not isinstance(s, Store):
                self.defs[s.out.id] = s
                if isinstance(s, Load | Const | Iota | Mask | Map | Gather) and all(map(self.free, operands(s))):
                    self.free_values.add(s.out.id)

    # ---- facts about values
    def live(self, axes: Iterable[str]) -> tuple[str, ...]:
        return tuple(a for a in axes if self.tile[a] > 1 or a in self.forced)

    def axes(self, v: Value) -> tuple[str, ...]:
        return self.live(v.axes)

    def free(self, v: Value) -> bool:
        """Can the value be made afresh in any layout: does it depend on no reduction, contraction or carried state?"""
        return v.id in self.free_values

    def dtype(self, v: Value) -> str | None:
        """Of memory, if the value is merely loaded."""
        s = self.defs.get(v.id)
        return self.p.buffer(s.buffer).dtype if isinstance(s, Load) else None

    def matrix(self, s: Contract) -> tuple[tuple[str, ...], ...] | None:
        """(axes of a alone, axes of b alone, summed axes) if the contraction is a matrix product."""
        a, b, k = set(self.axes(s.a)), set(self.axes(s.b)), set(self.live(s.axes))
        if not k or not k <= a or not k <= b or (a & b) - k:
            return None
        return tuple(tuple(x for x in self.tile if x in g) for g in (a - b, b - a, k))

    def tensor_dtype(self, s: Contract) -> str | None:
        """The dtype in which tensor cores may take both operands."""
        if self.precision.compute != "float32":
            return None
        loaded = [self.dtype(v) for v in (s.a, s.b)]
        if any(d is not None and d not in HALVES + EIGHTS for d in loaded):
            return None
        halves = {d for d in loaded if d in HALVES}
        if len(halves) > 1:
            return None
        if None in loaded and self.precision.accurate:
            return None
        return halves.pop() if halves else self.precision.half or ("float16" if "float8_e4m3fn" in loaded else "bfloat16")

    # ---- the stages
    def run(self) -> Schedule:
        self.choose_matrices()
        self.choose_warps()
        self.choose_left()
        self.choose_sides()
        self.make_groups()
        self.place()
        self.demand()
        self.allocate()
        return self.out

    def choose_matrices(self) -> None:
        """Contractions become matrix products where they can; the others a product and a sum."""
        unit: set[int] = set()
        for s in walk(self.p.body):
            if isinstance(s, Contract):
                m = self.matrix(s)
                if m and self.tensor_dtype(s) and (not m[0]) != (not m[1]) and math.prod(self.tile[x] for x in m[2]) >= 16:
                    few = s.a if not m[0] else s.b
                    rows = [x for x in few.axes if x not in (s.b if few is s.a else s.a).axes and x not in s.axes]
                    if self.forced or rows:  # an axis of extent 1 that only this operand has serves as rows
                        self.forced.update(rows[:1])
                    elif not unit and (self.free(few) or not m[0]):
                        unit.add(few.id)
        if unit and not self.forced:
            self.p = with_axis(self.p, unit, UNIT)
            self.tile[UNIT] = 1
            self.forced.add(UNIT)
            self.index()
        fresh = _ids(self.p)

        def f(s: Stmt) -> list[Stmt]:
            nonlocal fresh
            if not isinstance(s, Contract):
                return [s]
            m = self.matrix(s)
            if m and m[0] and m[1]:
                return [s]
            frame = tuple(sorted({*s.a.axes, *s.b.axes}))
            fresh += 1
            product = Value(fresh, frame)
            return [Map(product, "mul", (s.a, s.b)), Reduce(s.out, "+", s.axes, product, s.acc, s.role)]

        self.p = replace(self.p, body=rebuild(self.p.body, f))
        self.index()
        self.matrices = {s.out.id: s for s in walk(self.p.body) if isinstance(s, Contract)}
        if any(isinstance(s, Reduce) and not self.live(s.axes) for s in walk(self.p.body)):
            self.p = replace(self.p, body=rebuild(self.p.body, self.trivial_reduce))
            self.index()

    def trivial_reduce(self, s: Stmt) -> list[Stmt]:
        """A reduction over axes of which the block sees one position."""
        if not isinstance(s, Reduce) or self.live(s.axes):
            return [s]
        zero = self.limited(s.axes)
        if zero:
            raise Unsupported("a ragged axis with tile 1 is reduced")
        fn = {"+": "add", "*": "mul", "max": "max", "min": "min"}[s.op]
        return [Map(s.out, fn, (s.acc, s.arg) if s.acc else (s.arg,), s.role)]

    def limited(self, axes: Iterable[str]) -> bool:
        return any(a in self.p.limits for a in axes)

    def chained(self, s: Contract) -> Value | None:
        """The operand of a matrix product that is computed from reductions or products: it stays in registers, on the left."""
        for v in (s.a, s.b):
            if not self.free(v):
                return v
        return None

    def choose_warps(self) -> None:
        p, arch = self.p, self.arch
        choices = p.choices
        want = choices.get("warps")
        self.kind = "fragment" if self.matrices else "vector"
        self.wr = self.wc = self.ws = 1
        self.split: Loop | None = None
        if self.kind == "vector":
            return self.choose_vector_warps()
        shapes = []
        for s in self.matrices.values():
            m = self.matrix(s)
            assert m is not None
            v = self.chained(s)
            a, b = (m[1], m[0]) if v is s.b else (m[0], m[1])
            shapes.append((math.prod(self.tile[x] for x in a), math.prod(self.tile[x] for x in b), v is not None))
        chain = any(c for _, _, c in shapes)
        if chain:
            rows = max((a for a, _, c in shapes if c))
            per = arch.row_fragments * arch.fragment[0] if rows >= 8 * arch.fragment[0] else arch.fragment[0]
            if isinstance(want, int):
                per = max(arch.fragment[0], -(-rows // want))
            warps = max(1, rows // per)
            if rows <= arch.fragment[0]:
                self.split = self.splittable(want if isinstance(want, int) else 4)
            if self.split is None:
                self.wr = min(warps, 16, arch.most_warps)
        else:
            rows = max(min(a, b) if not any(self.left_fixed(s) for s in self.matrices.values()) else a for a, b, _ in shapes)
            m0, n0 = self.extent_pair()
            total = want if isinstance(want, int) else (8 if m0 * n0 >= 128 * 256 else 4)
            options = [
                (m0 / r + n0 / c, r, c)
                for r in (1, 2, 4, 8, 16)
                for c in (1, 2, 4, 8, 16)
                if r * c == total and (r == 1 or m0 >= r * arch.fragment[0]) and (c == 1 or n0 % (c * arch.grain) == 0)
            ]
            while not options:
                total //= 2
                options = [
                    (m0 / r + n0 / c, r, c)
                    for r in (1, 2, 4, 8, 16)
                    for c in (1, 2, 4, 8, 16)
                    if r * c == total and (r == 1 or m0 >= r * arch.fragment[0]) and (c == 1 or n0 % (c * arch.grain) == 0)
                ]
            _, self.wr, self.wc = min(options)

    def left_fixed(self, s: Contract) -> bool:
        return self.chained(s) is not None

    def columns_wanted(self) -> set[str]:
        """Axes that are contiguous in what is written."""
        out = set()
        for s in walk(self.p.body):
            if isinstance(s, Store) and s.index:
                out.update(a for a, c in s.index[-1].terms if c == 1)
        return out

    def extent_pair(self) -> tuple[int, int]:
        """Rows and columns of the largest product, with the contiguous axis of the result as its columns."""
        wanted = self.columns_wanted()
        best = (0, 0, 0)
        for s in self.matrices.values():
            m = self.matrix(s)
            assert m is not None
            a, b = (math.prod(self.tile[x] for x in g) for g in m[:2])
            if set(m[0]) & wanted and not set(m[1]) & wanted:
                a, b = b, a
            best = max(best, (a * b, a, b))
        return best[1], best[2]

    def splittable(self, warps: int) -> Loop | None:
        """The loop whose tiles the warps can share, each with its own state; its tile shrinks accordingly."""
        loops = [s for s in walk(self.p.body) if isinstance(s, Loop)]
        if len(loops) != 1 or not loops[0].carries or any(isinstance(s, Store) for s in loops[0].body):
            return None
        loop = loops[0]
        t = self.tile[loop.axis]
        while warps > 1 and (t % warps or t // warps < self.arch.fragment[2]):
            warps //= 2
        if warps <= 1 or not mergeable(loop):
            return None
        self.ws = warps
        self.tile[loop.axis] = t // warps
        return loop

    def choose_vector_warps(self) -> None:
        """Columns over the lanes of one or more warps, rows over the rest."""
        self.vector_warps = self.p.choices.get("warps")

    # ---- left operands
    def choose_left(self) -> None:
        self.left: dict[int, str] = {}
        self.sides = Sides()

    def node(self, v: Value, a: str) -> object:
        return ("value", v.id, a)

    def choose_sides(self) -> None:
        """Label (value, axis) places: hard ties first, then what contractions demand, then memory order."""
        sides, body = self.sides, list(walk(self.p.body))

        def tie_all(x: Value, y: Value) -> None:
            if self.free(x) or self.free(y):
                return
            for a in self.axes(x):
                if a in self.axes(y) and not sides.tie(self.node(x, a), self.node(y, a)):
                    raise Unsupported(f"{x} and {y} want {a} on different sides")

        for s in body:
            match s:
                case Map():
                    for v in s.args:
                        tie_all(v, s.out)
                case Gather():
                    tie_all(s.position, s.out)
                case Reduce() | Contract():
                    if s.acc:
                        tie_all(s.acc, s.out)
                case Loop():
                    for c in s.carries:
                        for v in (c.next, c.out, c.init):
                            tie_all(v, c.phi)
        # computed operands stay in registers, on the left: summed axes are columns, the others rows
        self.staged: set[tuple[int, int]] = set()
        for s in self.matrices.values():
            m = self.matrix(s)
            assert m is not None
            for v, own, out_axes in ((s.a, m[0], m[0]), (s.b, m[1], m[1])):
                if self.free(v) or s.out.id in self.left:
                    continue
                wanted = [(self.node(v, x), COLUMN) for x in m[2]] + [(self.node(v, x), ROW) for x in own]
                wanted += [(self.node(s.out, x), ROW) for x in own]
                if all(sides.get(n) in (None, side) for n, side in wanted):
                    for n, side in wanted:
                        sides.put(n, side)
                    self.left[s.out.id] = "a" if v is s.a else "b"
        for s in body:
            if isinstance(s, Reduce) and not self.free(s.arg):
                for a in self.axes(s.out):
                    sides.tie(self.node(s.arg, a), self.node(s.out, a))  # where it fails, the result changes sides
        wanted_columns = self.columns_wanted()
        for s in self.matrices.values():
            m = self.matrix(s)
            assert m is not None
            if s.out.id not in self.left:
                a = {sides.get(self.node(s.out, x)) for x in m[0]} - {None}
                b = {sides.get(self.node(s.out, x)) for x in m[1]} - {None}
                if a == {ROW} or b == {COLUMN}:
                    self.left[s.out.id] = "a"
                elif a == {COLUMN} or b == {ROW}:
                    self.left[s.out.id] = "b"
                else:
                    column_a = bool(set(m[0]) & wanted_columns) and not set(m[1]) & wanted_columns
                    few_b = not set(m[1]) & wanted_columns and self.size(m[1]) <= 16 < self.size(m[0])
                    self.left[s.out.id] = "b" if column_a or few_b or UNIT in m[1] else "a"
            left, right = (m[0], m[1]) if self.left[s.out.id] == "a" else (m[1], m[0])
            for x, side in [(x, ROW) for x in left] + [(x, COLUMN) for x in right]:
                if not sides.put(self.node(s.out, x), side):
                    raise Unsupported(f"the result of a product has {x} on both sides")
        # where nothing else decides: reduced and contiguous axes are columns; frames of many axes decide first
        frames: list[tuple[tuple, tuple[str, ...], Value, set[str]]] = []
        for s in body:
            if isinstance(s, Reduce):
                along = self.contiguous(s.arg) - set(s.axes)
                frames.append((("reduce", s.out.id), self.axes(s.arg), s.arg, along or set(s.axes)))
            elif isinstance(s, Store):
                axes = self.live(dict.fromkeys((*index_axes(s), *s.arg.axes)))
                frames.append((("store", id(s)), axes, s.arg, {a for a, c in (s.index[-1].terms if s.index else ()) if c == 1}))
        self.seen_side: dict[str, str] = {}
        for f in sorted(frames, key=lambda f: -len(f[1])):
            self.default(*f)
            if f[0][0] == "reduce" and self.free(f[2]):
                out = self.defs[f[0][1]].out  # type: ignore[union-attr]
                for a in self.axes(out):
                    sides.tie((*f[0], a), self.node(out, a))
        for s in body:
            for v in results(s):
                for a in self.axes(v):
                    if not self.free(v):
                        sides.put(self.node(v, a), ROW)

    def size(self, axes: Iterable[str]) -> int:
        return math.prod(self.tile[a] for a in axes)

    def contiguous(self, v: Value) -> set[str]:
        """Axes along which what the value is made of lies contiguously, if all of it agrees."""
        found: list[set[str]] = []
        todo, seen = [v], set()
        while todo:
            u = todo.pop()
            s = self.defs.get(u.id)
            if u.id in seen or s is None:
                continue
            seen.add(u.id)
            if isinstance(s, Load) and len(self.axes(u)) > 1 and s.index:
                found.append({a for a, c in s.index[-1].terms if c == 1 and self.tile[a] > 1})
            elif isinstance(s, Map):
                todo.extend(s.args)
        return set.intersection(*found) if found else set()

    def default(self, key: tuple, axes: tuple[str, ...], v: Value, columns: set[str]) -> None:
        """Sides of the frame of a reduction or store."""
        sides = self.sides
        nodes = {a: (*key, a) for a in axes}
        for a, n in nodes.items():
            if not self.free(v) and a in self.axes(v):
                sides.tie(n, self.node(v, a))
        known = {sides.get(n) for n in nodes.values()} - {None}
        for a, n in nodes.items():
            if sides.get(n) is None:
                if len(axes) == 1:
                    side = self.seen_side.get(a) or (COLUMN if a in columns else ROW)
                elif known == {COLUMN} and not any(sides.get(m) == ROW for m in nodes.values()):
                    side = ROW
                elif known == {ROW} and not any(sides.get(m) == COLUMN for m in nodes.values()):
                    side = COLUMN
                else:
                    side = COLUMN if a in columns else ROW
                sides.put(n, side)
            self.seen_side.setdefault(a, sides.get(n) or ROW)

    # ---- groups
    def make_groups(self) -> None:
        """Axes that meet on one side of a frame form a group."""
        parent: dict[tuple[str, str], tuple[str, str]] = {}

        def find(x: tuple[str, str]) -> tuple[str, str]:
            parent.setdefault(x, x)
            while parent[x] != x:
                x = parent[x]
            return x

        def meet(places: Iterable[tuple[str, str]]) -> None:
            first: dict[str, tuple[str, str]] = {}
            for a, side in places:
                r = find((a, side))
                if side in first:
                    parent[r] = find(first[side])
                first.setdefault(side, r)

        self.order = self.memory_order()
        frames: list[tuple[tuple, tuple[str, ...]]] = []
        for s in walk(self.p.body):
            for v in results(s) if not isinstance(s, Loop) else [x for c in s.carries for x in (c.phi, c.next, c.out)]:
                if not self.free(v):
                    frames.append((("value", v.id), self.axes(v)))
            if isinstance(s, Reduce):
                frames.append((("reduce", s.out.id), self.axes(s.arg)))
            elif isinstance(s, Store):
                frames.append((("store", id(s)), self.live(dict.fromkeys((*index_axes(s), *s.arg.axes)))))
        for key, axes in frames:
            meet([(a, self.sides.get((*key, a)) or ROW) for a in axes])
        self.inner_columns: set[str] = set()  # summed axes of left operands in registers
        self.inner_computed: set[str] = set()  # summed axes of operands that are not merely loaded
        for s in self.matrices.values():
            m = self.matrix(s)
            assert m is not None
            left, right = (m[0], m[1]) if self.left[s.out.id] == "a" else (m[1], m[0])
            meet([(a, ROW) for a in left] + [(a, COLUMN) for a in right])
            lv = s.a if self.left[s.out.id] == "a" else s.b
            if any(self.dtype(v) is None or self.dtype(v) in EIGHTS for v in (s.a, s.b)):
                self.inner_computed.update(m[2])
            if self.dtype(lv) is None or self.dtype(lv) in EIGHTS:
                self.inner_columns.update(m[2])
                meet([(a, COLUMN) for a in m[2]])
        members: dict[tuple[str, str], list[str]] = {}
        for x in list(parent):
            members.setdefault(find(x), []).append(x[0])
        self.group_axes: dict[tuple[str, str], tuple[str, ...]] = {}
        for r, axes in members.items():
            ordered = tuple(sorted(set(axes), key=self.order.__getitem__))
            for a in axes:
                self.group_axes[a, r[1]] = ordered
        self.groups: dict[tuple, Group] = {}
        if self.kind == "vector":
            self.settle_vector_warps()

    def memory_order(self) -> dict[str, int]:
        """Axes as the kernel has them, but those that are contiguous in memory last."""
        contiguous: dict[str, int] = {}
        for s in walk(self.p.body):
            if isinstance(s, Load | Store) and s.index:
                for a, c in s.index[-1].terms:
                    if c == 1 and self.tile[a] > 1:
                        contiguous[a] = contiguous.get(a, 0) + 1
        names = list(self.tile)
        return {a: n + (len(names) if a in contiguous else 0) for n, a in enumerate(names)}

    def settle_vector_warps(self) -> None:
        """Warps along columns: few enough elements a thread, but not more warps than there is work."""
        columns = max((self.size(g) for (a, side), g in self.group_axes.items() if side == COLUMN), default=1)
        rows = max((self.size(g) for (a, side), g in self.group_axes.items() if side == ROW), default=1)
        self.run = self.vector_run()
        want = self.p.choices.get("warps")
        lanes = self.arch.warp * self.run
        wc = 1
        while wc < self.arch.most_warps and columns > wc * max(lanes, 32 * self.arch.warp):
            wc *= 2
        total = 4
        while total < 16 and columns * rows > total * 32 * self.arch.warp:
            total *= 2
        total = max(wc, want if isinstance(want, int) else min(total, wc * rows))
        self.wc, self.wr = wc, max(1, min(total // wc, rows))

    def vector_run(self) -> int:
        """Adjacent elements that a thread takes at once: 16 bytes, if every tile and extent allows."""
        run = 16
        columns = {g for (a, side), g in self.group_axes.items() if side == COLUMN}
        for s in walk(self.p.body):
            if isinstance(s, Load | Store):
                b = self.p.buffer(s.buffer)
                run = min(run, max(1, 16 // DTYPES[b.dtype]))
        for g in columns:
            last = g[-1]
            n = self.tile[last]
            if self.tile[last] != self.p.axes[last].extent:
                n = math.gcd(n, self.p.axes[last].extent)
            run = math.gcd(run, n)
        return max(1, run)

    def group(self, a: str, side: str, after: bool = False) -> Group:
        axes = self.group_axes.get((a, side))
        if axes is None:
            axes = self.group_axes[a, side] = (a,)
        key = (axes, side, after)
        if key not in self.groups:
            extents = tuple(self.tile[x] for x in axes)
            warps = self.wr if side == ROW else 1 if set(axes) & self.inner_columns else self.wc
            if self.kind == "vector":
                self.groups[key] = vector_group(axes, extents, side, self.wr if side == ROW else self.wc, self.run, self.arch)
            else:
                if side == COLUMN and after and math.prod(extents) % (self.ws * self.arch.fragment[1]) == 0:
                    warps = self.ws
                if side == COLUMN and warps > 1 and math.prod(extents) % (self.arch.grain * warps) and not after:
                    warps = 1
                g = fragment_group(axes, extents, side, warps, self.arch)
                if set(axes) & self.inner_computed:
                    up = -(-g.padded // self.arch.fragment[2]) * self.arch.fragment[2]
                    while g.slots * up % (g.padded * slots_of(side, self.arch)):
                        up += self.arch.fragment[2]
                    g = replace(g, padded=up, slots=g.slots * up // g.padded)
                self.groups[key] = g
        return self.groups[key]

    def layout(self, key: tuple, axes: tuple[str, ...], after: bool) -> Layout:
        row = column = None
        for a in axes:
            side = self.sides.get((*key, a)) or ROW
            g = self.group(a, side, after)
            if side == ROW:
                row = g
            else:
                column = g
        return Layout(row, column)

    # ---- layouts of everything
    def place(self) -> None:
        p = self.p
        self.out = Schedule(
            p, self.arch, self.precision, self.kind, self.wr, self.wc, self.ws, None, dict(self.tile), frozenset(self.forced)
        )
        o = self.out
        after = False
        loops = [s for s in p.body if isinstance(s, Loop)]
        for s in p.body:
            self.place_statement(s, after)
            if self.ws > 1 and isinstance(s, Loop) and s is loops[0]:
                after = True
                o.split = s
                for c in s.carries:
                    o.home[c.out.id] = self.layout(("value", c.out.id), self.axes(c.out), True)

    def place_statement(self, s: Stmt, after: bool) -> None:
        o = self.out
        if isinstance(s, Loop):
            for c in s.carries:
                for v in (c.phi, c.out):
                    o.home[v.id] = self.layout(("value", v.id), self.axes(v), after)
            for x in s.body:
                self.place_statement(x, after)
            return
        if isinstance(s, Store):
            axes = self.live(dict.fromkeys((*index_axes(s), *s.arg.axes)))
            o.store_frames[id(s)] = self.layout(("store", id(s)), axes, after)
            return
        if not self.free(s.out):
            o.home[s.out.id] = self.layout(("value", s.out.id), self.axes(s.out), after)
        if isinstance(s, Reduce):
            key = ("reduce", s.out.id) if self.free(s.arg) else ("value", s.arg.id)
            frame = self.layout(key, self.axes(s.arg), after)
            o.frames[s.out.id] = frame
            reduced = set(self.live(s.axes))
            for g in frame:
                if g and set(g.axes) & reduced and not set(g.axes) & set(self.axes(s.arg)) <= reduced:
                    raise Unsupported(f"a reduction over {sorted(reduced)}, part of the merged axes {g.axes}")
                if g and set(g.axes) & reduced and not set(g.axes) <= set(self.axes(s.arg)):
                    raise Unsupported(f"a reduction over axes merged with others: {g.axes}")
            result = self.reduced(frame, reduced)
            if result != o.home[s.out.id]:
                self.check_conversion(s.out, result, o.home[s.out.id])
        elif isinstance(s, Contract):
            self.place_contract(s, after)

    @staticmethod
    def reduced(frame: Layout, axes: set[str]) -> Layout:
        """What is left of a frame after a reduction."""
        return Layout(*(None if g and set(g.axes) & axes else g for g in frame))

    def place_contract(self, s: Contract, after: bool) -> None:
        m = self.matrix(s)
        assert m is not None
        flip = self.left[s.out.id] == "b"
        left_axes, right_axes, inner = (m[1], m[0], m[2]) if flip else m
        lv, rv = (s.b, s.a) if flip else (s.a, s.b)
        home = self.out.home[s.out.id]
        if (
            home.row is None
            or home.column is None
            or set(home.row.axes) != set(left_axes)
            or set(home.column.axes) != set(right_axes)
        ):
            raise Unsupported(f"rows {left_axes} or columns {right_axes} of a product are merged with other axes")
        dtype = self.tensor_dtype(s)
        kind = "tensor" if dtype else "plain"
        inner = tuple(sorted(inner, key=self.order.__getitem__))
        if kind == "plain":
            dtype = self.precision.compute
        step = self.arch.fragment[2]
        steps = -(-self.size(inner) // step) if kind == "tensor" else self.size(inner)
        inner_size = steps * step if kind == "tensor" else steps
        assert dtype is not None

        def operand(v: Value, own: tuple[str, ...], group: Group, left: bool) -> Operand:
            loaded = self.dtype(v)
            if loaded is not None and (kind == "plain" or loaded == dtype):
                grain = 1 if kind == "plain" else self.arch.fragment[0] if left else self.arch.grain
                own_size = -(-group.padded // grain) * grain
                self.want_tile(v, group.axes, own_size, inner, inner_size)
                return Operand("tile", v)
            if left and kind == "tensor" and (self.free(v) or self.is_left_layout(v, own, inner)):
                return Operand("register", v, self.operand_layout(own, inner, after))
            if self.free(v):
                return Operand("staged", v, Layout(self.group(own[0], ROW, after), self.group(inner[0], COLUMN, after)))
            return Operand("staged", v, self.out.home[v.id])

        left = operand(lv, left_axes, home.row, True)
        right = operand(rv, right_axes, home.column, False)
        for x in (left, right):
            if x.layout and x.where != "tile":
                g = [x.layout.row.axes if x.layout.row else (), x.layout.column.axes if x.layout.column else ()]
                if set(g[0]) & set(g[1]) or {*g[0], *g[1]} != set(self.axes(x.value)):
                    raise Unsupported(f"operand {x.value} of a product does not lie in rows and columns of its own axes")
                summed = [part for part in g if set(part) & set(inner)]
                if len(summed) != 1 or tuple(summed[0]) != inner:
                    raise Unsupported(f"the summed axes {inner} of {x.value} are merged with others")
        if left.where == "tile" and kind == "tensor" and self.ws > 1 and self.out.split is None and self.arch.holds != "never":
            left.held = True
        self.out.contracts[s.out.id] = ContractPlan(kind, dtype, left, right, left_axes, right_axes, inner, steps)

    def operand_layout(self, own: tuple[str, ...], inner: tuple[str, ...], after: bool) -> Layout:
        return Layout(self.group(own[0], ROW, after), self.group(inner[0], COLUMN, after))

    def is_left_layout(self, v: Value, own: tuple[str, ...], inner: tuple[str, ...]) -> bool:
        return all(self.sides.get(self.node(v, a)) == ROW for a in own) and all(
            self.sides.get(self.node(v, a)) == COLUMN for a in inner
        )

    def want_tile(self, v: Value, own: tuple[str, ...], own_size: int, inner: tuple[str, ...], inner_size: int) -> None:
        s = self.defs[v.id]
        assert isinstance(s, Load)
        contiguous = {a for a, c in (s.index[-1].terms if s.index else ()) if c == 1}
        sizes = {own: own_size, inner: inner_size}
        if v.id in self.out.tiles:
            t = self.out.tiles[v.id]
            if {t.outer, t.inner} != {own, inner}:
                raise Unsupported(f"{v} is wanted in shared memory in two shapes")
        else:
            outer, last = (inner, own) if set(own) & contiguous and not set(inner) & contiguous else (own, inner)
            t = self.out.tiles[v.id] = TilePlan(s, outer, last)
        t.rows, t.columns = max(t.rows, sizes[t.outer]), max(t.columns, sizes[t.inner])

    # ---- which layouts of which values are needed in registers
    def demand(self) -> None:
        o = self.out
        wanted = o.instances

        def need(v: Value, layout: Layout) -> None:
            todo = [(v, layout)]
            while todo:
                v, layout = todo.pop()
                if isinstance(self.defs.get(v.id), Const):
                    continue
                if not self.free(v) and layout != o.home[v.id]:
                    self.check_conversion(v, o.home[v.id], layout)
                have = wanted.setdefault(v.id, [])
                if layout in have:
                    continue
                have.append(layout)
                s = self.defs.get(v.id)
                if self.free(v) and isinstance(s, Map | Gather):
                    todo.extend((a, layout.restricted(self.axes(a))) for a in operands(s))

        def visit(body: tuple[Stmt, ...]) -> None:
            for s in reversed(body):
                match s:
                    case Store():
                        need(s.arg, o.store_frames[id(s)].restricted(self.axes(s.arg)))
                    case Loop():
                        for c in s.carries:
                            need(c.next, o.home[c.phi.id])
                            need(c.init, o.home[c.phi.id])
                        visit(s.body)
                    case Map() | Gather() if not self.free(s.out):
                        for a in operands(s):
                            need(a, o.home[s.out.id].restricted(self.axes(a)))
                    case Reduce():
                        need(s.arg, o.frames[s.out.id])
                        if s.acc:
                            need(s.acc, o.home[s.out.id])
                    case Contract():
                        c = o.contracts[s.out.id]
                        for x in (c.left, c.right):
                            if x.layout is not None:
                                need(x.value, x.layout)
                        if s.acc:
                            need(s.acc, o.home[s.out.id])

        for s in walk(self.p.body):
            if not isinstance(s, Loop | Store) and not self.free(s.out):
                wanted.setdefault(s.out.id, []).append(o.home[s.out.id])
            elif isinstance(s, Loop):
                for c in s.carries:
                    for v in (c.phi, c.out):
                        wanted.setdefault(v.id, []).append(o.home[v.id])
        visit(self.p.body)
        o.deferred = frozenset(
            c.phi.id for s in walk(self.p.body) if isinstance(s, Loop) for c in s.carries if self.deferrable(s, c)
        )
        if self.ws > 1 and o.split is not None:
            for c in o.split.carries:
                if not self.free(c.next) and o.home[c.phi.id].row != o.home[c.out.id].row:
                    raise Unsupported("rows of a shared loop's state change places")

    def check_conversion(self, v: Value, home: Layout, layout: Layout) -> None:
        if {home.row is None, home.column is None} == {True, False} and {layout.row is None, layout.column is None} == {
            True,
            False,
        }:
            a, b = home.row or home.column, layout.row or layout.column
            assert a is not None and b is not None
            if a.axes == b.axes:
                return
        raise Unsupported(f"{v} is needed in two layouts")

    def deferrable(self, loop: Loop, c: Carry) -> bool:
        """Is the state only ever added to (and rescaled by whole rows) until the loop ends?  Then lanes keep partial results."""
        d = next((s for s in loop.body if not isinstance(s, Store | Loop) and s.out == c.next), None)
        if not isinstance(d, Reduce) or d.acc is None or d.op != c.op:
            return False
        if self.reduced(self.out.frames[d.out.id], set(self.live(d.axes))) != self.out.home[d.out.id]:
            return False
        chain, v = {d.out.id}, d.acc
        while v != c.phi:
            s = self.defs.get(v.id)
            if not isinstance(s, Map) or s.fn != "mul" or d.op != "+":
                return False
            inside = [a for a in s.args if self.reaches(a, c.phi)]
            if len(inside) != 1:
                return False
            chain.add(v.id)
            v = inside[0]
        chain.add(c.phi.id)
        for s in walk(loop.body):  # nothing else reads the unfinished values
            for x in operands(s):
                if x.id in chain and not (not isinstance(s, Store | Loop) and s.out.id in chain):
                    return False
        return all(x.next != d.out or x is c for x in loop.carries)

    def reaches(self, v: Value, target: Value) -> bool:
        s = self.defs.get(v.id)
        return v == target or (isinstance(s, Map) and any(self.reaches(a, target) for a in s.args))

    # ---- shared memory and registers
    def allocate(self) -> None:
        o, p, arch = self.out, self.p, self.arch
        loop_of: dict[int, str | None] = {}

        def scopes(body: tuple[Stmt, ...], loop: str | None) -> Iterator[None]:
            for s in body:
                if isinstance(s, Loop):
                    yield from scopes(s.body, s.axis)
                elif isinstance(s, Load):
                    loop_of[s.out.id] = loop
            yield

        for _ in scopes(p.body, None):
            pass
        fixed = ring = 0
        for vid, t in o.tiles.items():
            t.loop = loop_of[vid]
        passing = self.hold()
        for vid, t in o.tiles.items():
            dtype = p.buffer(t.load.buffer).dtype
            t.packed = self.packable(t, dtype)
            t.bytes = tile_bytes(t.rows, t.columns, DTYPES[dtype])
            if vid in passing:
                pass
            elif t.loop is None:
                fixed += t.bytes
            else:
                ring += t.bytes * self.ws
        staged = 0
        for c in o.contracts.values():
            for x, own in ((c.left, c.left_axes), (c.right, c.right_axes)):
                if x.where == "staged":
                    assert x.layout is not None and x.layout.row is not None and x.layout.column is not None
                    width = DTYPES[c.dtype]
                    x.bytes = tile_bytes(*staged_shape(x.layout, arch), width)
                    staged += x.bytes * self.ws
        want = p.choices.get("stages")
        trips = max((p.axes[s.axis].trips for s in walk(p.body) if isinstance(s, Loop)), default=1)
        if isinstance(want, int):
            stages = max(1, want)
        else:
            room = min(arch.shared, arch.shared_sm // 2 - 1024) - fixed - staged - 1024
            most = arch.stages if self.ws > 1 or self.wr * self.arch.fragment[0] <= 32 else 2
            stages = max(2, min(most, room // ring if ring else 2))
        stages = max(1, min(stages, trips, arch.stages))
        while stages > 1 and fixed + staged + ring * stages > arch.shared - 2048:
            stages -= 1
        at = over = 0
        for vid, t in sorted(o.tiles.items(), key=lambda x: x[1].loop is not None):
            t.stages = stages if t.loop is not None else 1
            size = -(-t.bytes // 128) * 128 * t.stages * (self.ws if t.loop is not None else 1)
            if vid in passing:  # where the loop's tiles will lie
                t.offset = over
                over += size
            else:
                t.offset = at
                at += size
        start = sum(-(-t.bytes // 128) * 128 for vid, t in o.tiles.items() if t.loop is None and vid not in passing)
        for vid in passing:
            o.tiles[vid].offset += start
        at = max(at, start + over)
        for c in o.contracts.values():
            for x in (c.left, c.right):
                if x.where == "staged":
                    x.offset = at
                    at += -(-x.bytes // 128) * 128 * self.ws
        o.scratch = at
        o.scratch_bytes = self.scratch_bytes()
        merge = 0
        if o.split is not None:
            merge = self.merge_bytes(o.split)
        o.shared = max(at + o.scratch_bytes, merge)
        if o.shared > arch.shared:
            raise Unsupported(f"{o.shared} bytes of shared memory, {arch.name} has {arch.shared} for a block")
        o.registers = self.count_registers()
        if o.registers > (480 if self.kind == "fragment" else arch.most_registers) or (o.registers + 24) * o.threads > 2 * arch.registers:
            raise Unsupported(f"about {o.registers} registers a thread for {o.threads} threads")
        blocks = min(
            arch.shared_sm // (o.shared + 1024),
            arch.registers // (o.threads * min(255, max(32, o.registers + (72 if self.kind == "fragment" else 32)))),
            2048 // o.threads,
        )
        o.min_blocks = max(1, min(8, blocks))

    def hold(self) -> set[int]:
        """Decides which left operands stay in registers while a loop runs.  The result: tiles that nothing needs any more when the
        loop writes its own."""
        o, p = self.out, self.p
        loops = [s for s in walk(p.body) if isinstance(s, Loop)]
        inside = {x.out.id for s in loops for x in walk(s.body) if isinstance(x, Contract)}
        if self.arch.holds == "always":
            for n, c in o.contracts.items():
                fits = c.kind == "tensor" and c.left.where == "tile" and self.held_registers(n, c) <= 32
                if fits and n in inside and o.tiles[c.left.value.id].loop is None:
                    c.left.held = True
        if self.arch.stages > 1 or self.ws > 1 or len(loops) != 1:
            return set()
        kept = {c.left.value.id for n, c in o.contracts.items() if c.left.held and n in inside}
        read = {x.value.id for c in o.contracts.values() for x in (c.left, c.right) if x.where == "tile" and not x.held}
        return {vid for vid in kept - read if o.tiles[vid].loop is None and not o.instances.get(vid)}

    def held_registers(self, result: int, c: ContractPlan) -> int:
        row = self.out.home[result].row
        assert row is not None
        rows, _, inner = self.arch.fragment
        return c.steps * rows * inner // self.arch.warp // 2 * -(-row.padded // (rows * self.wr))

    def packable(self, t: TilePlan, dtype: str) -> bool:
        """May the tile be copied in chunks of 16 bytes, as far as can be known before the arrays are?"""
        chunk = 16 // DTYPES[dtype]
        index = t.load.index
        if not index:
            return False
        last = t.inner[-1]
        terms = dict(index[-1].terms)
        if terms.get(last) != 1 or any(last in ix.axes for ix in index[:-1]):
            return False
        if len(t.inner) > 1 and self.tile[last] % chunk:
            return False
        x = self.p.axes[last]
        if x.role != "whole" and x.tile % chunk:
            return False
        if last in self.p.limits and self.p.limits[last].axes != (last,) and x.extent % chunk:
            return False
        if any(c % chunk for a, c in index[-1].terms if a != last) or index[-1].const % chunk:
            return False
        shape = self.p.buffer(t.load.buffer).shape
        lo, hi = index[-1].bounds(self.p.extents)
        return lo >= 0 and (hi < shape[-1] or last in self.p.limits)

    def scratch_bytes(self) -> int:
        """For exchanges between warps and between layouts, one at a time."""
        width = 8 if self.precision.compute == "float64" else 4
        most = 0
        for s in walk(self.p.body):
            if isinstance(s, Reduce):
                frame = self.out.frames[s.out.id]
                reduced = set(self.live(s.axes))
                rows, columns = ((g.padded if g and not set(g.axes) & reduced else 1) for g in frame)
                across = max((g.warps for g in frame if g and set(g.axes) & reduced), default=1)
                if across > 1:
                    most = max(most, across * rows * columns * width)
                home = self.out.home[s.out.id]
                if self.reduced(frame, reduced) != home:
                    most = max(most, *(g.size * width for g in home if g))
        for v, have in self.out.instances.items():
            if v in self.out.home and len(have) > 1:
                most = max([most, *(g.size * width for layout in have for g in layout if g)])
        return most

    def merge_bytes(self, loop: Loop) -> int:
        width = 8 if self.precision.compute == "float64" else 4
        total = 0
        for c in loop.carries:
            home = self.out.home[c.phi.id]
            total += self.ws * (home.row.size if home.row else 1) * (home.column.padded + 4 if home.column else 1) * width
        return total

    def count_registers(self) -> int:
        """Registers alive at once at the worst place, in 32-bit words."""
        width = 2 if self.precision.compute == "float64" else 1
        inline = {s.out.id for s in walk(self.p.body) if isinstance(s, Const | Iota | Mask)}

        def slots(v: int) -> int:
            if v in inline:
                return 0
            return width * sum(x.slots for x in self.out.instances.get(v, ()))

        def peak(body: tuple[Stmt, ...], after: set[int]) -> int:
            alive, worst = set(after), 0
            for s in reversed(body):
                if isinstance(s, Loop):
                    inside = (
                        alive | {c.next.id for c in s.carries} | {v for x in walk(s.body) for v in (o.id for o in operands(x))}
                    )
                    made = {v.id for x in walk(s.body) for v in results(x)} | {v.id for c in s.carries for v in (c.phi, c.out)}
                    through = {v for v in inside if v not in made}
                    worst = max(worst, peak(s.body, through | {c.next.id for c in s.carries}))
                    alive = (
                        (alive - {c.out.id for c in s.carries})
                        | (through - {c.next.id for c in s.carries})
                        | {c.init.id for c in s.carries}
                    )
                    continue
                used = {v.id for v in operands(s)}
                if isinstance(s, Map) and s.args and any(a.id not in alive and slots(a.id) == slots(s.out.id) for a in s.args):
                    alive.discard(s.out.id)  # in place
                if isinstance(s, Contract | Reduce) and s.acc and s.acc.id not in alive:
                    alive.discard(s.out.id)
                worst = max(worst, sum(map(slots, alive | used)))
                if not isinstance(s, Store):
                    alive.discard(s.out.id)
                alive |= used
            return worst

        held = sum(self.held_registers(n, c) for n, c in self.out.contracts.items() if c.left.held)
        return peak(live_statements(self.p.body, set()), set()) + held


def slots_of(side: str, arch: Arch) -> int:
    return arch.row_slots if side == ROW else arch.column_slots


def staged_shape(layout: Layout, arch: Arch) -> tuple[int, int]:
    """Rows and columns of a computed operand in shared memory."""
    assert layout.row is not None and layout.column is not None
    return -(-layout.row.padded // arch.grain) * arch.grain, -(-layout.column.padded // arch.grain) * arch.grain


def tile_bytes(rows: int, columns: int, width: int) -> int:
    """Bytes of a Tile of the device header."""
    chunk = 16 // width
    chunks = -(-columns // chunk)
    return rows * (chunks if chunks % 8 == 0 else chunks | 1) * 16


def mergeable(loop: Loop) -> bool:
    """Can states of two parts of the loop be joined from the loop's own statements?"""
    return all(merge_steps(loop, c) is not None for c in loop.carries)


def merge_steps(loop: Loop, c: Carry) -> tuple[str, list[Stmt], Value] | None:
    """How parts of a carried state join: (operator, statements, value).  The statements work out, from the old state (the phis)
    and the joined pivots (which stand for the pivots' nexts), the value that is combined over the parts with the operator."""
    defs = {s.out.id: s for s in loop.body if not isinstance(s, Store | Loop)}
    d = defs.get(c.next.id)
    if isinstance(d, Reduce) and d.op in ("max", "min", "*") and d.acc == c.phi:
        return d.op, [], c.phi
    v = c.next
    while isinstance(x := defs.get(v.id), Reduce | Contract) and x.acc is not None and (isinstance(x, Contract) or x.op == "+"):
        v = x.acc
    if v == c.next:
        return None
    pivots = {
        x.next.id
        for x in loop.carries
        if (y := defs.get(x.next.id)) and isinstance(y, Reduce) and y.op in ("max", "min") and y.acc == x.phi
    }
    phis = {x.phi.id for x in loop.carries}
    steps: dict[int, Stmt] = {}

    def visit(u: Value) -> bool:
        if u.id in phis or u.id in pivots or u.id in steps or u.id not in defs:
            return True
        s = defs[u.id]
        if not isinstance(s, Map) or loop.axis in u.axes or not all(map(visit, s.args)):
            return False
        steps[u.id] = s
        return True

    return ("+", list(steps.values()), v) if visit(v) else None


def affine_parts(ix: Affine) -> dict[str, int]:
    return dict(ix.terms)
