"""Reading by computed positions."""
from __future__ import annotations

import math
from typing import Any

from ..errors import ShapeError
from . import arguments, primitives
from .casts import astype, iinfo
from .creation import arange
from .dtypes import DEFAULT_FLOAT, DEFAULT_INT, kind
from .elementwise import equal, less, less_equal, logical_and, need_kind, not_equal, where
from .reductions import attained, first_where, sum
from .shapes import squeeze, stack
from .tensor import Tensor

__all__ = [
    "one_hot", "searchsorted", "take", "take_along_axis", "top_k",
]


def take(x: Any, indices: Any, /, axis: int | None = None) -> Tensor:
    """x read at `indices` (integers; negative ones count from the end) along axis; their dimensions replace it.  → gather."""
    x, i = arguments.lift(x), arguments.lift(indices)
    if axis is None:
        if x.ndim != 1:
            raise ShapeError(f"take from shape {x.shape} needs an axis")
        axis = 0
    return primitives.take(x, i, arguments.dimension(axis, x.ndim))


def take_along_axis(x: Any, indices: Any, /, axis: int = -1) -> Tensor:
    """out[…, j, …] = x[…, indices[…, j, …], …] along axis; other dimensions broadcast.  → gather."""
    x = arguments.lift(x)
    return primitives.take_along(x, arguments.lift(indices), arguments.dimension(axis, x.ndim))


def one_hot(x: Any, num_classes: int, /, *, dtype: Any = None) -> Tensor:
    """1 where the position along a new last dimension equals x, else 0.  → eq of positions."""
    x = arguments.lift(x)
    need_kind(x, "int", "one_hot")
    return astype(equal(primitives.expand(x, x.ndim), arange(arguments.count(num_classes, "the number of classes"))), dtype or DEFAULT_FLOAT)


def searchsorted(x1: Any, x2: Any, /, *, side: str = "left", sorter: Any = None) -> Tensor:
    """Where each x2 would be inserted into the sorted vector x1.  → how many of x1 are below it: red + of lt (or le)."""
    a, b = arguments.lift(x1), arguments.lift(x2)
    if a.ndim != 1 or side not in ("left", "right"):
        raise ShapeError(f"searchsorted takes a vector and side left or right, not shape {a.shape} and {side!r}")
    if sorter is not None:
        a = take(a, sorter)
    b = primitives.expand(b, b.ndim)
    return sum(less(a, b) if side == "left" else less_equal(a, b), axis=-1)


def top_k(x: Any, k: int, /, axis: int = -1) -> tuple[Tensor, Tensor]:
    """The k largest elements along axis in descending order, and their positions (int64); ties go to the first position, NaN is
    larger than all.  → k times argmax and max, each without the positions found before."""
    x, k = arguments.lift(x), arguments.extent(k)
    d = arguments.dimension(axis, x.ndim)
    n = x.shape[d]
    if not 0 <= k <= n:
        raise ShapeError(f"top_k of {k} elements of an axis of extent {n}")
    if k == 0 or 0 in x.shape:
        shape = [k if i == d else m for i, m in enumerate(x.shape)]
        return x.trace.empty(shape, x.dtype), x.trace.empty(shape, DEFAULT_INT)
    position = arange(n)
    for _ in range(x.ndim - d - 1):
        position = primitives.expand(position, position.ndim)
    lowest = -math.inf if kind(x.dtype) == "float" else int(iinfo(x.dtype).min) if kind(x.dtype) == "int" else False
    values, indices, left, candidates = [], [], None, x
    for _ in range(k):
        best = primitives.reduce("max", candidates, (d,), True, x.dtype)
        here = attained(candidates, best)
        first = first_where(here if left is None else logical_and(here, left), (d,), True)
        values.append(best)
        indices.append(first)
        remaining = not_equal(position, first)
        left = remaining if left is None else logical_and(left, remaining)
        candidates = where(left, x, lowest)
    joined = [squeeze(v, d) for v in values], [squeeze(i, d) for i in indices]
    return stack(joined[0], axis=d), stack(joined[1], axis=d)
