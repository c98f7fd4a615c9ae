"""How large the values of a tile program are, estimated from the arguments when they are known.

An element of a contraction is no larger than the product of its operands' norms (Cauchy, Schwarz and Buniakowsky), so that some
of their vectors tell what to expect of all of its elements.  Parts of a vector that are added up count as orthogonal: rotated
by angles that depend on the position, it is as long as before.  So these are estimates, not bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from ..tile import Const, Contract, Iota, Load, Map, Stmt, TileProgram, Value

SAMPLE = 512  # vectors that are looked at, at least


@dataclass(frozen=True)
class Norm:
    """The largest Euclidean norm among a sample of a buffer's vectors along `dims`."""

    buffer: str
    dims: tuple[int, ...]


@dataclass(frozen=True)
class Estimate:
    """kind: "number" (value), "norm" (of), or the "sum", "product", "hypot" (root of the sum of squares), "max" of `args`."""

    kind: str
    value: float = 0.0
    norm: Norm | None = None
    args: tuple[Estimate, ...] = ()

    def of(self, norms: Mapping[Norm, float]) -> float:
        if self.norm is not None:
            return norms[self.norm]
        parts = [a.of(norms) for a in self.args]
        match self.kind:
            case "sum":
                return sum(parts)
            case "product":
                return math.prod(parts)
            case "hypot":
                return math.sqrt(sum(x * x for x in parts))
            case "max":
                return float(np.max(parts))  # NaN if there is one
        return self.value

    def norms(self) -> Iterator[Norm]:
        if self.norm is not None:
            yield self.norm
        for a in self.args:
            yield from a.norms()


def number(x: float) -> Estimate:
    return Estimate("number", x)


def combined(kind: str, args: list[Estimate | None]) -> Estimate | None:
    known = [a for a in args if a is not None]
    if len(known) < len(args):
        return None
    return known[0] if len(known) == 1 else Estimate(kind, args=tuple(known))


@cache
def sample(shape: tuple[int, ...], dims: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[slice, ...]]:
    """(order of dimensions with `dims` last, slices of these that leave about SAMPLE vectors, evenly spread)."""
    rest = [d for d in range(len(shape)) if d not in dims]
    steps = dict.fromkeys(rest, 1)
    for d in sorted(rest, key=lambda d: -shape[d]):
        left = math.prod(-(-shape[e] // steps[e]) for e in rest)
        steps[d] = min(max(1, left // SAMPLE), shape[d])
    return (*rest, *dims), tuple(slice(None, None, steps[d]) for d in rest)


def norm(x: np.ndarray, dims: tuple[int, ...], dtype: np.dtype) -> float:
    """The largest norm of some vectors along `dims`, computed in dtype (NaN if there is one)."""
    if x.size == 0:
        return 0.0
    order, slices = sample(x.shape, dims)
    x = x.transpose(order)[slices].astype(dtype, copy=False)
    if len(dims) == 1:
        return math.sqrt(np.vecdot(x, x).max())
    axes = list(range(x.ndim))
    return math.sqrt(np.einsum(x, axes, x, axes, axes[: len(slices)]).max())


class Estimates:
    """Of the values of a tile program.  An element masked by −inf does not count as long as −inf stays −inf."""

    def __init__(self, p: TileProgram, made: Mapping[int, Stmt], zero: Callable[[Value], bool]):
        """made: value → its statement; zero: does the value count as 0?"""
        self.made, self.zero = made, zero
        self.extents = p.extents | {a: x.extent for a, x in p.axes.items()}

    def constant(self, v: Value) -> float | None:
        s = self.made.get(v.id)
        return s.value if isinstance(s, Const) else None

    def of(self, v: Value, masked: bool = True) -> Estimate | None:
        """Of the largest magnitude.  masked: may elements be −inf?"""
        if self.zero(v):
            return number(0.0)
        match s := self.made.get(v.id):
            case Const():
                return number(abs(s.value)) if math.isfinite(s.value) else None
            case Iota():
                return number(float(max(map(abs, s.index.bounds(self.extents)))))
            case Load():
                return Estimate("norm", norm=Norm(s.buffer, ()))
            case Contract() if s.acc is None:
                return combined("product", [self.length(s.a, s.axes), self.length(s.b, s.axes)])
            case Map(_, "tanh" | "sin" | "cos" | "erf"):
                return number(1.0)
            case Map(_, "where"):
                return combined("max", [self.of(a, masked) for a in s.args[1:] if not (masked and self.constant(a) == -math.inf)])
            case Map(_, "add" | "sub"):
                return combined("sum", [self.of(a, masked and (n == 0 or s.fn == "add")) for n, a in enumerate(s.args)])
            case Map(_, "mul"):
                consts = [c for a in s.args if (c := self.constant(a)) is not None]
                rises = len(consts) == len(s.args) - 1 and math.prod(consts) > 0
                return combined("product", [self.of(a, masked and rises) for a in s.args])
            case Map(_, "neg" | "abs"):
                return self.of(s.args[0], False)
        return None

    def length(self, v: Value, axes: tuple[str, ...]) -> Estimate | None:
        """Of the Euclidean norm along the axes."""
        match s := self.made.get(v.id):
            case Load():
                dims = []
                for axis in axes:
                    at = [d for d, ix in enumerate(s.index) if axis in ix.axes]
                    if not at or at[0] in dims:  # elements that are counted more than once
                        return None
                    dims.append(at[0])
                return Estimate("norm", norm=Norm(s.buffer, tuple(sorted(dims))))
            case Map(_, "neg"):
                return self.length(s.args[0], axes)
            case Map(_, "add" | "sub"):
                return combined("hypot", [self.length(a, axes) for a in s.args])
            case Map(_, "where"):
                return combined("max", [self.length(a, axes) for a in s.args[1:]])
            case Map(_, "mul"):
                vector, *rest = sorted(s.args, key=lambda a: -len(a.axes))
                return combined("product", [self.length(vector, axes), *(self.of(a, False) for a in rest)])
        return None
