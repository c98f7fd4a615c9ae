"""What functions of `xp` are given: tensors, numbers, extents, dimensions."""
from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import DtypeError, ShapeError, TraceError
from ..program import LARGEST
from . import dtypes
from .tensor import Tensor
from .tracing import _CURRENT, Number, current


def argument(x: Any) -> Tensor | Number:
    """A tensor of this trace, or a Python number."""
    if isinstance(x, Tensor):
        if x.trace is not _CURRENT.get():
            raise TraceError("a tensor of one trace was used in another, or after tracing ended", "pass it as an input")
        return x
    if isinstance(x, (bool, int, float)):
        current()
        return _of_float(x)
    if isinstance(x, np.generic) or (isinstance(x, np.ndarray) and x.ndim == 0):
        value = x.item()
        if isinstance(value, (bool, int, float)):
            return value
        try:
            return float(x)                                 # scalars of ml_dtypes
        except (TypeError, ValueError):
            raise DtypeError(f"{x!r} is no real number") from None
    if isinstance(x, np.ndarray) or hasattr(x, "__array__") or hasattr(x, "__dlpack__"):
        raise TraceError(f"an array of shape {tuple(x.shape)} was used as a constant",
                         "pass it as an input of the function, with its own TensorSpec")
    if isinstance(x, complex):
        raise DtypeError("complex numbers are not supported")
    raise TraceError(f"expected a tensor or a number, not {type(x).__name__}", "pass arrays as inputs of the function")


def _of_float(x: Number) -> Number:
    """The number, if a float can hold its magnitude."""
    try:
        float(x)
    except OverflowError:
        raise DtypeError(f"an integer of {int(x).bit_length()} bits is beyond every dtype", "for no bound use math.inf") from None
    return x


def lift(x: Any, dtype: str | None = None) -> Tensor:
    x = argument(x)
    return x if isinstance(x, Tensor) else current().constant(x, dtype or dtypes.of_number(x))


def result_dtype(*xs: Tensor | Number) -> str:
    out: str | None = None
    for x in xs:
        if isinstance(x, Tensor):
            out = x.dtype if out is None else dtypes.promote(out, x.dtype)
    for x in xs:
        if not isinstance(x, Tensor):
            out = dtypes.of_number(x) if out is None else dtypes.promote_number(out, x)
    assert out is not None
    return out


def extent(n: Any) -> int:
    """An int that a shape or an axis is made of."""
    if isinstance(n, Tensor):
        raise TraceError("a shape or an axis depends on a tensor's values", "only Python ints can be used there")
    try:
        return operator.index(n)
    except TypeError:
        raise ShapeError(f"an int is needed, not {n!r}") from None


def count(n: Any, what: str) -> int:
    """How many of something there are: an int ≥ 0 that an extent can be."""
    if not 0 <= (r := extent(n)) < LARGEST:
        raise ShapeError(f"{what} must be at least 0, not {r}" if r < 0 else f"{what} is beyond 2^63")
    return r


def shape_of(shape: Any) -> tuple[int, ...]:
    """The extents of a shape."""
    return tuple(count(n, "an extent") for n in (shape if isinstance(shape, (tuple, list)) else (shape,)))


def dimension(axis: Any, ndim: int, extra: int = 0) -> int:
    """A dimension's number, counted from 0; negative ones count from the end."""
    i, n = extent(axis), ndim + extra
    if not -n <= i < n:
        raise ShapeError(f"axis {i} does not exist in {ndim} dimension{'s' if ndim != 1 else ''}",
                         f"use {-n} … {n - 1}" if n else "the tensor has no dimensions")
    return i % n


def dimensions(axis: Any, ndim: int) -> tuple[int, ...]:
    """The dimensions that `axis` (None, an int or a tuple) names, in order of the tensor."""
    if axis is None:
        return tuple(range(ndim))
    out = [dimension(a, ndim) for a in (axis if isinstance(axis, (tuple, list)) else (axis,))]
    if len(set(out)) < len(out):
        raise ShapeError(f"axis {axis} names a dimension twice")
    return tuple(sorted(out))


def broadcast_shape(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    rank = max(map(len, shapes))
    out = [1] * rank
    for s in shapes:
        for i, n in enumerate(s, rank - len(s)):
            if n != 1 and out[i] != 1 and n != out[i]:
                all_shapes = " and ".join(map(str, shapes))
                raise ShapeError(f"shapes {all_shapes} do not fit together: {out[i]} against {n} in dimension {i - rank}",
                                 "dimensions must be equal or 1, counted from the last")
            if n != 1:
                out[i] = n
    return tuple(out)
