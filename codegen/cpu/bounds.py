"""Bounds on the magnitude of a tile's values that hold for all tiles, found from the arguments when they are known.

A contraction is bounded by the norms of its operands (Cauchy, Schwarz and Buniakowsky): that takes one pass over each of
them, where looking at the result would take one over all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ..tile import Const, Contract, Iota, Load, Map, Stmt, TileProgram, Value

CHUNK = 1 << 17  # elements of a piece


@dataclass(frozen=True)
class Norm:
    """The largest Euclidean norm of a buffer's vectors along `dims`."""

    buffer: str
    dims: tuple[int, ...]


@dataclass(frozen=True)
class Bound:
    """Σ over the terms of factor · product of norms."""

    terms: tuple[tuple[float, tuple[Norm, ...]], ...]

    def of(self, norms: Mapping[Norm, float]) -> float:
        return sum(c * math.prod(norms[n] for n in ns) for c, ns in self.terms)


def norm(x: np.ndarray, dims: tuple[int, ...], dtype: np.dtype) -> float:
    """The largest norm of vectors along `dims`, computed in dtype (NaN if there is one)."""
    rest = tuple(d for d in range(x.ndim) if d not in dims)
    todo, top = [x.transpose(*rest, *dims)] if x.size else [], 0.0
    while todo:
        part = todo.pop()
        axis = next((d for d in range(len(rest)) if part.shape[d] > 1), None)
        if part.size > CHUNK and axis is not None and part.dtype != dtype:  # piece by piece: a copy takes memory
            todo += np.array_split(part, min(part.shape[axis], -(-part.size // CHUNK)), axis)
            continue
        part = part.astype(dtype, copy=False)
        axes = list(range(part.ndim))
        squares = np.vecdot(part, part) if len(dims) == 1 else np.einsum(part, axes, part, axes, axes[: len(rest)])
        top = float(np.maximum(top, np.max(squares)))
    return math.sqrt(top)


class Bounds:
    """Bounds on the values of a tile program.  An element masked by −inf does not count as long as −inf stays −inf."""

    def __init__(self, p: TileProgram, made: Mapping[int, Stmt], zero: Callable[[Value], bool]):
        """made: value → its statement; zero: does the value count as 0?"""
        self.made, self.zero = made, zero
        self.extents = p.extents | {a: x.extent for a, x in p.axes.items()}

    def constant(self, v: Value) -> float | None:
        s = self.made.get(v.id)
        return s.value if isinstance(s, Const) else None

    def of(self, v: Value, masked: bool = True) -> Bound | None:
        """masked: may elements be −inf?"""
        if self.zero(v):
            return Bound(())
        match s := self.made.get(v.id):
            case Const():
                return Bound(((abs(s.value), ()),)) if math.isfinite(s.value) else None
            case Iota():
                return Bound(((float(max(map(abs, s.index.bounds(self.extents)))), ()),))
            case Load():
                return Bound(((1.0, (Norm(s.buffer, ()),)),))
            case Contract() if s.acc is None:
                a, b = self.length(s.a, s.axes), self.length(s.b, s.axes)
                return Bound(((a[0] * b[0], (a[1], b[1])),)) if a and b else None
            case Map():
                return self.map(s, masked)
        return None

    def map(self, s: Map, masked: bool) -> Bound | None:
        if s.fn in ("tanh", "sin", "cos", "erf"):
            return Bound(((1.0, ()),))
        args = [a for a in s.args[1:] if not (masked and self.constant(a) == -math.inf)] if s.fn == "where" else list(s.args)
        rises = [s.fn in ("add", "where") or (s.fn == "sub" and n == 0) for n in range(len(args))]  # in which of them?
        if s.fn == "mul":
            consts = [c for a in args if (c := self.constant(a)) is not None]
            rises = [len(consts) == len(args) - 1 and math.prod(consts) > 0] * len(args)
        bounds = [self.of(a, masked and up) for a, up in zip(args, rises)]
        known = [b for b in bounds if b is not None]
        if len(known) < len(bounds):
            return None
        if s.fn in ("add", "sub", "where"):  # the larger branch counts: the sum of both is no less
            return Bound(tuple(t for b in known for t in b.terms))
        if s.fn in ("neg", "abs"):
            return known[0]
        if s.fn == "mul":
            out = Bound(((1.0, ()),))
            for b in known:
                out = Bound(tuple((c * d, (*m, *n)) for c, m in out.terms for d, n in b.terms))
            return out
        return None

    def length(self, v: Value, axes: tuple[str, ...]) -> tuple[float, Norm] | None:
        """(c, norm): c·norm bounds the Euclidean norm along the axes."""
        s, factor = self.made.get(v.id), 1.0
        while isinstance(s, Map) and s.fn == "mul":
            rest = []
            for a in s.args:
                c = self.made.get(a.id)
                if isinstance(c, Const):
                    factor *= abs(c.value)
                else:
                    rest.append(a)
            if len(rest) != 1:
                return None
            s = self.made.get(rest[0].id)
        if not isinstance(s, Load):
            return None
        dims = []
        for axis in axes:
            at = [d for d, ix in enumerate(s.index) if axis in ix.axes]
            if not at or at[0] in dims:  # elements that are counted more than once
                return None
            dims.append(at[0])
        return factor, Norm(s.buffer, tuple(sorted(dims)))
