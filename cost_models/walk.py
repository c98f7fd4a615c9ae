"""What a tile program does, counted: how often each statement runs, what lies in a block at once, which tiles a mask leaves alive."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import numpy as np

from ..codegen.tile import Contract, Load, Loop, Map, Mask, Reduce, Stmt, TileProgram, Value, operands, results, walk
from ..terms import Affine, inner
from .base import Array, Sizes

SAMPLES = 512
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
    one = np.ones(1)

    def go(body: tuple[Stmt, ...], runs: Array, depth: int, mixed: Array) -> None:
        for s in body:
            if isinstance(s, Loop):
                inner, some = runs * sizes.trips(s.axis), mixed
                alive = one
                if s.constraints:
                    alive, full = live_share(s.constraints, sizes)
                    inner = inner * alive
                    some = np.maximum(alive - full, 0.0) / np.maximum(alive, 1e-9)
                loops.append(Iterations(s, inner, alive, runs if depth else 0.0 * one))
                go(s.body, inner, depth + 1, some)
            else:
                out.append(Step(s, runs, depth, mixed))

    go(program.body, one, 0, one)
    return out, loops


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
    program: TileProgram, keep: Callable[[Value], bool], transient: bool, passing: Mapping[int, tuple[Value, ...]] = NOTHING
) -> list[tuple[Value, ...]]:
    """Sets of values that lie in a block at the same time; only those that may be the largest.  keep: which values count.

    An elementwise statement and an accumulation work in place; a reduction or product holds its operands beside its result.
    transient: chains of elementwise statements run element by element, so that what is live between them takes no room.
    passing: values that take none either, and what they are made of.
    """
    points: dict[frozenset[int], None] = {}
    values: dict[int, Value] = {}

    for s in program.statements:
        for v in (*results(s), *operands(s)):
            if v.id not in values and v.id not in passing and keep(v):
                values[v.id] = v

    def read(s: Stmt) -> set[int]:
        if not passing:
            return {v.id for v in operands(s) if v.id in values}
        todo, out = list(operands(s)), set()
        while todo:
            v = todo.pop()
            if v.id in passing:
                todo.extend(passing[v.id])
            elif v.id in values:
                out.add(v.id)
        return out

    def note(live: set[int]) -> None:
        points[frozenset(live)] = None

    def go(body: tuple[Stmt, ...], live: set[int]) -> set[int]:
        """Backwards through a body: `live` are the values needed after it; returns those needed before it."""
        live = set(live)
        for s in reversed(body):
            if isinstance(s, Map) and s.out.id in passing:
                continue
            if isinstance(s, Loop):
                carried = {id_: v for c in s.carries for v in (c.phi, c.next) for id_ in (v.id,)}
                for id_, v in carried.items():
                    if keep(v):
                        values[id_] = v
                live = live - {v.id for v in results(s)}
                inner = live | ({c.next.id for c in s.carries} & values.keys())
                before = go(s.body, inner)
                # what the body reads from outside is needed in every iteration
                used = {v.id for x in walk(s.body) for v in operands(x)} - {v.id for x in walk(s.body) for v in results(x)}
                outside = (used - {c.phi.id for c in s.carries}) & values.keys()
                if outside - inner:
                    before = go(s.body, inner | outside)
                live = (before - {c.phi.id for c in s.carries}) | ({v.id for v in operands(s)} & values.keys())
                note(live)
                continue
            args = read(s)
            if isinstance(s, Contract | Reduce):
                note(live | args if s.acc is None else live | (args - {s.acc.id}))
            elif not transient:
                note(live)
            live.difference_update([v.id for v in results(s)])
            live |= args
        return live

    go(program.body, set())
    sets = sorted(points, key=len, reverse=True)
    most = [s for i, s in enumerate(sets) if not any(s < t for t in sets[:i])]
    return [tuple(values[i] for i in sorted(s)) for s in most]


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
            n = np.ones(1)
            for a in s.out.axes:
                n = n * sizes.extent[a]
            size = float(program.buffer(s.buffer).size)
            out[s.buffer] = np.minimum(out.get(s.buffer, 0.0) + n, size)
    return out
