"""What a tile program does, counted: how often each statement runs, what lies in a block at once, which tiles a mask leaves alive."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import TypeVar

import numpy as np

from ..codegen.tile import Contract, Load, Loop, Map, Mask, Reduce, Stmt, TileProgram, Value, operands, results, walk
from ..terms import Affine, inner
from .base import ONE, Array, Sizes

SAMPLES = 512
K = TypeVar("K", bound=Hashable)
NOTHING: Mapping[int, tuple[Value, ...]] = MappingProxyType({})


@dataclass(frozen=True)
class Step:
    """A statement, how many times a block runs it, and how many loops it lies in.  mixed: share of those runs that needs the mask."""

    stmt: Stmt
    runs: Array
    depth: int
    mixed: Array


@dataclass(frozen=True)
class Iterations:
    """A loop, its iterations in a block (of those that are not skipped), the share of iterations that is not skipped, and how often it
    begins anew inside another one."""

    loop: Loop
    runs: Array
    alive: Array
    again: Array


def steps(program: TileProgram, sizes: Sizes) -> tuple[list[Step], list[Iterations]]:
    """Every statement that is not a loop, and every loop, in order."""
    out: list[Step] = []
    loops: list[Iterations] = []
    _step(program.body, sizes, ONE, 0, ONE, out, loops)
    return out, loops


def _step(
    body: tuple[Stmt, ...], sizes: Sizes, runs: Array, depth: int, mixed: Array, out: list[Step], loops: list[Iterations]
) -> None:
    for s in body:
        if isinstance(s, Loop):
            trips, some = sizes.trips(s.axis), mixed
            inner = trips if runs is ONE else runs * trips
            alive = ONE
            if s.constraints:
                alive, full = live_share(s.constraints, sizes)
                inner = inner * alive
                some = np.maximum(alive - full, 0.0) / np.maximum(alive, 1e-9)
            loops.append(Iterations(s, inner, alive, runs if depth else np.zeros(1)))
            _step(s.body, sizes, inner, depth + 1, some, out, loops)
        else:
            out.append(Step(s, runs, depth, mixed))


def blocks(program: TileProgram, sizes: Sizes) -> Array:
    n = np.ones(1)
    for a in program.grid:
        n = n * sizes.trips(a)
    return n


def live_share(constraints: tuple[Affine, ...], sizes: Sizes) -> tuple[Array, Array]:
    """Share of the tiles on which some element, and on which every element, keeps all constraints.  Exact where few tiles exist,
    else over a fixed set of well-spread samples."""
    axes = sorted({a for c in constraints for a in c.axes})
    if not axes:
        kept = float(all(c.const >= 0 for c in constraints))
        return np.full(1, max(kept, 1.0 / SAMPLES)), np.full(1, kept)
    columns = np.broadcast_arrays(*[x[a] for a in axes for x in (sizes.tile, sizes.extent)])
    unique, where = np.unique(np.stack([x.reshape(-1) for x in columns], 1), axis=0, return_inverse=True)
    alive, full = _shares(constraints, tuple(axes), unique.shape, unique.tobytes())
    where = where.reshape(columns[0].shape)
    return alive[where], full[where]


@lru_cache(256)
def _shares(constraints: tuple[Affine, ...], axes: tuple[str, ...], shape: tuple[int, int], table: bytes) -> tuple[Array, Array]:
    """The two shares for each row of a table of the axes' tiles and extents.  (Many programs of one search ask for the same.)"""
    unique = np.frombuffer(table).reshape(shape)
    n = np.arange(SAMPLES) + 0.5
    alive = np.ones((len(unique), SAMPLES), bool)
    full = np.ones_like(alive)
    first, last = {}, {}
    for i, a in enumerate(axes):
        tile, extent = unique[:, 2 * i, None], unique[:, 2 * i + 1, None]
        # a Kronecker sequence: the first axis runs evenly, the others by irrational steps
        u = n / SAMPLES if i == 0 else (n * _STEPS[(i - 1) % len(_STEPS)]) % 1.0
        start = np.floor(u * np.ceil(extent / np.maximum(tile, 1.0))) * tile
        first[a], last[a] = start, np.minimum(start + tile, extent) - 1.0
    for c in constraints:
        least = np.full((len(unique), SAMPLES), float(c.const))
        most = least.copy()
        scale = dict(c.terms)
        for a, k in c.terms:
            step: float | Array = k
            if a.endswith(".o") and (part := inner(a[:-2])) in scale:  # the program was lowered for one size of parts only
                step = scale[part] * unique[:, 2 * axes.index(part) + 1, None]
            least += step * (first[a] if k > 0 else last[a])
            most += step * (last[a] if k > 0 else first[a])
        alive &= most >= 0
        full &= least >= 0
    # a loop that a block never enters still costs its start: at least one sample's worth
    return np.maximum(alive.mean(1), 1.0 / SAMPLES), full.mean(1)


_STEPS = (0.6180339887498949, 0.7548776662466927, 0.8191725133961645)


def passing(program: TileProgram, readers: Mapping[int, list[Stmt]]) -> dict[int, tuple[Value, ...]]:
    """Elementwise results that only one reduction reads, or what is made for it: they are made element by element.  By number, what
    they are made of.  readers: the program's `feeds`."""
    carried = {c.next.id for s in program.statements if isinstance(s, Loop) for c in s.carries}
    out: dict[int, tuple[Value, ...]] = {}
    for s in reversed(program.statements):
        if isinstance(s, Map) and s.out.id not in carried and len(by := readers.get(s.out.id, [])) == 1:
            if isinstance(by[0], Reduce) or (isinstance(by[0], Map) and by[0].out.id in out):
                out[s.out.id] = s.args
    return out


def peaks(
    program: TileProgram, kind: Callable[[Value], K | None], transient: bool, passing: Mapping[int, tuple[Value, ...]] = NOTHING
) -> list[dict[K, int]]:
    """How many values of each kind lie in a block at the same time; only what may be the most.  kind: None for values that do not
    count; those of one kind take the same room.

    An elementwise statement and an accumulation work in place; a reduction or product holds its operands beside its result.
    transient: chains of elementwise statements run element by element, so that what is live between them takes no room.
    passing: values that take none either, and what they are made of.
    """
    kinds: dict[K, int] = {}  # kind → its values: sets of values are bits of integers, by their numbers
    kept = 0
    for s in program.statements:
        made = results(s)
        if isinstance(s, Loop):
            made += tuple(c.phi for c in s.carries)
        for v in made:
            if v.id not in passing and (k := kind(v)) is not None:
                kinds[k] = kinds.get(k, 0) | 1 << v.id
                kept |= 1 << v.id
    points = _Live(program, kept, transient, passing).points
    counts = {tuple((p & values).bit_count() for values in kinds.values()) for p in points}
    most: list[tuple[int, ...]] = []
    for some in sorted(counts, reverse=True):  # no one is less than another that comes later
        if not any(all(map(operator.le, some, more)) for more in most):
            most.append(some)
    return [{k: n for k, n in zip(kinds, some) if n} for some in most]


def _bits(values: Iterable[Value]) -> int:
    out = 0
    for v in values:
        out |= 1 << v.id
    return out


class _Live:
    """Which of the values that are `kept` are live where (`points`), going backwards through a program.  The rest as in `peaks`."""

    def __init__(self, program: TileProgram, kept: int, transient: bool, passing: Mapping[int, tuple[Value, ...]]):
        self.kept, self.transient, self.passing = kept, transient, passing
        self.reads = {id(s): _bits(operands(s)) for s in program.statements}
        self.makes = {id(s): _bits(results(s)) for s in program.statements}
        self.points: dict[int, None] = {}
        self.before(program.body, 0)

    def read(self, s: Stmt) -> int:
        if not self.passing:
            return self.reads[id(s)] & self.kept
        todo, out = list(operands(s)), 0
        while todo:
            v = todo.pop()
            if v.id in self.passing:
                todo.extend(self.passing[v.id])
            else:
                out |= 1 << v.id
        return out & self.kept

    def before(self, body: tuple[Stmt, ...], live: int) -> int:
        """The values needed before a body; `live`: those needed after it."""
        for s in reversed(body):
            if isinstance(s, Map) and s.out.id in self.passing:
                continue
            if isinstance(s, Loop):
                live = self.before_loop(s, live & ~self.makes[id(s)])
                self.points[live] = None
                continue
            args = self.read(s)
            if isinstance(s, Contract | Reduce):
                self.points[live | (args if s.acc is None else args & ~(1 << s.acc.id))] = None
            elif not self.transient:
                self.points[live] = None
            live = live & ~self.makes[id(s)] | args
        return live

    def before_loop(self, s: Loop, live: int) -> int:
        phis = _bits(c.phi for c in s.carries)
        inner = live | _bits(c.next for c in s.carries) & self.kept
        before = self.before(s.body, inner)
        # what the body reads from outside is needed in every iteration
        read = made = 0
        for x in walk(s.body):
            read, made = read | self.reads[id(x)], made | self.makes[id(x)]
        outside = read & ~made & ~phis & self.kept
        if outside & ~inner:
            before = self.before(s.body, inner | outside)
        return before & ~phis | self.reads[id(s)] & self.kept


def feeds(program: TileProgram) -> dict[int, list[Stmt]]:
    """Statements that read each value, by its number."""
    out: dict[int, list[Stmt]] = {}
    for s in program.statements:
        for v in operands(s):
            out.setdefault(v.id, []).append(s)
    return out


@dataclass(frozen=True)
class Product:
    """Axes of a contraction by what they are: only in a, only in b, in both and kept, summed."""

    rows: tuple[str, ...]
    cols: tuple[str, ...]
    batch: tuple[str, ...]
    inner: tuple[str, ...]

    @classmethod
    def of(cls, s: Contract) -> Product:
        a, b = set(s.a.axes), set(s.b.axes)
        summed = set(s.axes)
        return cls(
            tuple(x for x in s.a.axes if x not in b | summed),
            tuple(x for x in s.b.axes if x not in a | summed),
            tuple(x for x in s.a.axes if x in b and x not in summed),
            tuple(s.axes),
        )


def masks(program: TileProgram) -> frozenset[int]:
    """Values that exist only because of a mask: masks themselves."""
    return frozenset(s.out.id for s in program.statements if isinstance(s, Mask))


def unique_elements(program: TileProgram, sizes: Sizes) -> dict[str, Array]:
    """Elements of each buffer that the whole kernel reads at least once."""
    out: dict[str, Array] = {}
    for s in program.statements:
        if isinstance(s, Load):
            n = sizes.walked(s.out.axes)
            size = float(program.buffer(s.buffer).size)
            out[s.buffer] = np.minimum(out.get(s.buffer, 0.0) + n, size)
    return out
