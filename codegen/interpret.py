"""What a tile program means: a plain interpreter in float64, one block after the other, that shares nothing with the backends.

It takes every statement at its word: positions are written out, elements that do not exist are left out by `limits` (not by clipping
alone), loops skip what their constraints let them skip.  For tests and `verify`: small extents, small tiles."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from ..extraction.plan import Buffer
from ..integers import wrapped
from ..reference import BI, COMBINE, UN
from ..terms import REDUCTIONS, Affine, Index
from .tile import Const, Contract, Gather, Iota, Load, Loop, Map, Mask, Reduce, Stmt, Store, TileProgram, Value


def interpret(
    programs: Sequence[TileProgram], buffers: Mapping[str, Buffer], inputs: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """What the programs, run in order, leave in outputs and temporaries, by name: float64, or integers.  What nothing wrote is NaN
    (of integers, −1).  ValueError for a program that says nothing definite (a reduction whose elements' existence depends on an
    axis that its result lacks)."""
    arrays = {n: np.asarray(x).astype(np.float64) for n, x in inputs.items()}
    for b in buffers.values():
        if b.kind != "input":
            arrays[b.name] = np.full(b.shape, -1.0 if _whole(b) else np.nan)
    with np.errstate(all="ignore"):
        for p in programs:
            grid = [range(p.axes[a].trips) for a in p.grid]
            for place in itertools.product(*grid):
                _Block(p, arrays, dict(zip(p.grid, place))).run(p.body)
    return {b.name: arrays[b.name] for b in buffers.values() if b.kind != "input"}


def _whole(b: Buffer) -> bool:
    return b.dtype.startswith(("int", "uint", "bool"))


class _Block:
    """positions: of each axis, those that the block holds at present."""

    def __init__(self, p: TileProgram, arrays: dict[str, np.ndarray], place: Mapping[str, int]):
        self.p, self.arrays = p, arrays
        self.values: dict[int, np.ndarray] = {}
        self.positions = {a: self.tile(a, place.get(a, 0)) for a, x in p.axes.items() if x.role != "loop"}

    def tile(self, axis: str, n: int) -> np.ndarray:
        x = self.p.axes[axis]
        return np.arange(n * x.tile, min((n + 1) * x.tile, x.extent))

    # ---- values over named axes
    def get(self, v: Value, axes: Sequence[str]) -> np.ndarray:
        """With a dimension for each of `axes`, of length 1 where the value does not vary."""
        x = self.values[v.id]
        return x.reshape([len(self.positions[a]) if a in v.axes else 1 for a in axes])

    def put(self, v: Value, x: np.ndarray) -> None:
        self.values[v.id] = np.broadcast_to(x, [len(self.positions[a]) for a in v.axes])

    def affine(self, ix: Affine, axes: Sequence[str]) -> np.ndarray:
        total: np.ndarray = np.full([1] * len(axes), ix.const)
        for a, c in ix.terms:
            along = self.positions[a]
            if a in axes:
                total = total + c * along.reshape([-1 if b == a else 1 for b in axes])
            elif len(along) == 1:
                total = total + c * int(along[0])
            else:
                raise ValueError(f"{self.p.name}: {ix} varies along {a}, its place does not")
        return total

    def exists(self, among: Sequence[str], axes: Sequence[str]) -> np.ndarray:
        """Which elements exist, as far as the limits of the axes `among` say, over `axes`."""
        there = np.ones([1] * len(axes), bool)
        for a in among:
            if a in self.p.limits:
                there = there & (self.affine(self.p.limits[a], axes) >= 0)
        return there

    def at(self, index: Index, axes: Sequence[str], shape: Sequence[int]) -> tuple[list[np.ndarray], np.ndarray]:
        """Places in a buffer, clipped to it, and which were inside and exist."""
        there = np.ones([1] * len(axes), bool)
        out = []
        for ix, n in zip(index, shape):
            i = self.affine(ix, axes)
            there = there & (i >= 0) & (i < n)
            out.append(np.clip(i, 0, max(n - 1, 0)))
        return out, there & self.exists([a for a in axes if set(self._limit(a)) <= {*axes, *self._points()}], axes)

    def _limit(self, axis: str) -> tuple[str, ...]:
        return self.p.limits[axis].axes if axis in self.p.limits else ()

    def _points(self) -> set[str]:
        return {a for a, x in self.positions.items() if len(x) == 1}

    # ---- statements
    def run(self, body: Sequence[Stmt]) -> None:
        for s in body:
            match s:
                case Const():
                    self.put(s.out, np.asarray(s.value, np.float64))
                case Iota():
                    self.put(s.out, self.affine(s.index, s.out.axes).astype(np.float64))
                case Mask():
                    hit = [self.affine(c, s.out.axes) >= 0 for c in s.constraints]
                    self.put(s.out, np.logical_and.reduce(np.broadcast_arrays(*hit)).astype(np.float64))
                case Load() | Gather():
                    self.put(s.out, self.load(s))
                case Map():
                    self.put(s.out, _mapped(s.fn, [self.get(v, s.out.axes) for v in s.args]))
                case Reduce():
                    axes = s.arg.axes
                    x = np.where(self.exists(s.axes, axes), self.get(s.arg, axes), REDUCTIONS[s.op])
                    self.reduced(s, s.op, axes, x)
                case Contract():
                    axes = tuple(sorted({*s.a.axes, *s.b.axes}))
                    x = np.where(self.exists(s.axes, axes), self.get(s.a, axes) * self.get(s.b, axes), 0.0)
                    self.reduced(s, "+", axes, x)
                case Store():
                    self.store(s)
                case Loop():
                    self.loop(s)

    def reduced(self, s: Reduce | Contract, op: str, axes: tuple[str, ...], x: np.ndarray) -> None:
        x = np.broadcast_to(x, [len(self.positions[a]) for a in axes])
        x = COMBINE[op].reduce(x, axis=tuple(n for n, a in enumerate(axes) if a in s.axes))
        rest = [a for a in axes if a not in s.axes]
        x = x.reshape([len(self.positions[a]) if a in rest else 1 for a in s.out.axes])
        self.put(s.out, x if s.acc is None else COMBINE[op](self.get(s.acc, s.out.axes), x))

    def load(self, s: Load | Gather) -> np.ndarray:
        buffer = self.arrays[s.buffer]
        at, there = self.at(s.index, s.out.axes, buffer.shape)
        if isinstance(s, Gather):
            i = self.affine(s.index[s.dim], s.out.axes) + np.nan_to_num(self.get(s.position, s.out.axes)).astype(np.int64)
            there = there & (i >= 0) & (i < buffer.shape[s.dim])
            at[s.dim] = np.clip(i, 0, max(buffer.shape[s.dim] - 1, 0))
        if not buffer.size:
            return np.zeros(())
        return np.where(there, buffer[tuple(at)] if at else buffer, 0.0)

    def store(self, s: Store) -> None:
        b = self.p.buffer(s.buffer)
        axes = tuple(sorted({a for ix in s.index for a in ix.axes} | set(s.arg.axes)))
        at, there = self.at(s.index, axes, b.shape)
        shape = [len(self.positions[a]) for a in axes]
        x, there = np.broadcast_to(self.get(s.arg, axes), shape), np.broadcast_to(there, shape)
        if _whole(b):
            x = wrapped(np.nan_to_num(x), np.dtype(b.dtype)).astype(np.float64)
        self.arrays[s.buffer][tuple(np.broadcast_to(i, shape)[there] for i in at)] = x[there] if at else x

    def loop(self, s: Loop) -> None:
        for c in s.carries:
            self.put(c.phi, self.get(c.init, c.phi.axes))
        ran, trips = False, self.p.axes[s.axis].trips
        for n in range(trips):
            self.positions[s.axis] = self.tile(s.axis, n)
            if any(self._never(c) for c in s.constraints) and (ran or n + 1 < trips):
                continue
            ran = True
            self.run(s.body)
            new = [self.get(c.next, c.phi.axes) for c in s.carries]
            for c, x in zip(s.carries, new):
                self.put(c.phi, x)
        self.positions.pop(s.axis, None)
        for c in s.carries:
            self.put(c.out, self.get(c.phi, c.out.axes))

    def _never(self, constraint: Affine) -> bool:
        axes = [a for a in constraint.axes if a in self.positions]
        return bool((self.affine(constraint, axes) < 0).all())


def _mapped(fn: str, xs: Sequence[np.ndarray]) -> np.ndarray:
    if fn in ("add", "mul", "sub", "div"):
        f = {"add": np.add, "mul": np.multiply, "sub": np.subtract, "div": np.divide}[fn]
        out = xs[0]
        for x in xs[1:]:
            out = f(out, x)
        return out
    if fn == "where":
        return np.where(xs[0] != 0, xs[1], xs[2])
    return UN[fn](xs[0]) if fn in UN else BI[fn](xs[0], xs[1])
