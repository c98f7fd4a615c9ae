"""Bounds on the magnitude of a tile's values, estimated from the arguments when they are known.

A contraction is bounded by the norms of its operands (Cauchy, Schwarz and Buniakowsky), so that some of their vectors tell
what to expect of all of its elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ..tile import Const, Contract, Iota, Load, Map, Stmt, TileProgram, Value

SAMPLE = 512  # vectors that are looked at, at least


@dataclass(frozen=True)
class Norm:
    """The largest Euclidean norm among a sample of a buffer's vectors along `dims`."""

    buffer: str
    dims: tuple[int, ...]


@dataclass(frozen=True)
class Bound:
    """Σ over the terms of factor · product of norms."""

    terms: tuple[tuple[float, tuple[Norm, ...]], ...]

    def of(self, norms: Mapping[Norm, float]) -> float:
        return sum(c * math.prod(norms[n] for n in ns) for c, ns in self.terms)


def norm(x: np.ndarray, dims: tuple[int, ...], dtype: np.dtype) -> float:
    """The largest norm of some vectors along `dims`, evenly spread, computed in dtype (NaN if there is one)."""
    if x.size == 0:
        return 0.0
    rest = tuple(d for d in range(x.ndim) if d not in dims)
    x = x.transpose(*rest, *dims)
    for d in sorted(range(len(rest)), key=lambda d: -x.shape[d]):
        step = max(1, math.prod(x.shape[: len(rest)]) // SAMPLE)
        x = x[(slice(None),) * d + (slice(None, None, min(step, x.shape[d])),)]
    x = x.astype(dtype, copy=False)
    axes = list(range(x.ndim))
    squares = np.vecdot(x, x) if len(dims) == 1 else np.einsum(x, axes, x, axes, axes[: len(rest)])
    return math.sqrt(np.max(squares))


class Bounds:
    """Bounds on the values of a tile program, if the samples show the largest norms.  An element masked by −inf does not count as long as −inf stays −inf."""

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
