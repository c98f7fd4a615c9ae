"""Functions that reduce or accumulate along axes."""
from __future__ import annotations

import builtins
import math
from collections.abc import Sequence
from typing import Any

from .. import terms
from ..errors import ShapeError
from ..program import dtype_name
from . import arguments, dtypes, primitives
from .casts import astype
from .dtypes import DEFAULT_INT, kind
from .elementwise import add, divide, equal, isnan, logical_not, logical_or, multiply, sqrt, subtract
from .shapes import concat
from .tensor import Tensor

__all__ = [
    "all", "any", "argmax", "argmin", "count_nonzero", "cumulative_prod", "cumulative_sum", "diff", "max", "mean", "min",
    "prod", "std", "sum", "var",
]


def _reduced(op: str, x: Tensor, axis: Any, keepdims: builtins.bool, dtype: str) -> Tensor:
    return primitives.reduce(op, x, arguments.dimensions(axis, x.ndim), keepdims, dtype)


def sum(x: Any, /, axis: Any = None, dtype: Any = None, keepdims: builtins.bool = False) -> Tensor:
    """Σ over axis, 0 of nothing; integers and bools give 64 bits.  → red +."""
    x = arguments.lift(x)
    return _reduced("+", x, axis, keepdims, dtype_name(dtype) if dtype is not None else dtypes.accumulated(x.dtype))


def prod(x: Any, /, axis: Any = None, dtype: Any = None, keepdims: builtins.bool = False) -> Tensor:
    """Π over axis, 1 of nothing; integers and bools give 64 bits.  → red *."""
    x = arguments.lift(x)
    return _reduced("*", x, axis, keepdims, dtype_name(dtype) if dtype is not None else dtypes.accumulated(x.dtype))


def max(x: Any, /, axis: Any = None, keepdims: builtins.bool = False) -> Tensor:
    """The largest element over axis, NaN if there is one; an error over an empty axis.  → red max."""
    x = arguments.lift(x)
    return _reduced("max", x, axis, keepdims, x.dtype)


def min(x: Any, /, axis: Any = None, keepdims: builtins.bool = False) -> Tensor:
    """The smallest element over axis, NaN if there is one; an error over an empty axis.  → red min."""
    x = arguments.lift(x)
    return _reduced("min", x, axis, keepdims, x.dtype)


def all(x: Any, /, axis: Any = None, keepdims: builtins.bool = False) -> Tensor:
    """Is every element non-zero?  → red min of ne 0; True of nothing."""
    return logical_not(any(logical_not(x), axis=axis, keepdims=keepdims)) if 0 in arguments.lift(x).shape else _reduced(
        "min", _condition(x), axis, keepdims, "bool")


def any(x: Any, /, axis: Any = None, keepdims: builtins.bool = False) -> Tensor:
    """Is some element non-zero?  → red max of ne 0; False of nothing."""
    x = _condition(x)
    over = arguments.dimensions(axis, x.ndim)
    if builtins.any(x.shape[i] == 0 for i in over):
        return astype(primitives.reduce("+", x, over, keepdims, "bool"), "bool")
    return primitives.reduce("max", x, over, keepdims, "bool")


def _condition(x: Any) -> Tensor:
    return astype(arguments.lift(x), "bool")


def count_nonzero(x: Any, /, axis: Any = None, keepdims: builtins.bool = False) -> Tensor:
    """How many elements are not zero.  → red + of ne 0."""
    return sum(_condition(x), axis=axis, keepdims=keepdims)


def _count(x: Tensor, axis: Any) -> int:
    return math.prod(x.shape[i] for i in arguments.dimensions(axis, x.ndim))


def mean(x: Any, /, axis: Any = None, keepdims: builtins.bool = False) -> Tensor:
    """Σ x / count; NaN of nothing.  → red +, mul by 1/count."""
    x = arguments.lift(x)
    n = _count(x, axis)
    return divide(_reduced("+", x, axis, keepdims, dtypes.floating(x.dtype)), float(n)) if n else _undefined(x, axis, keepdims)


def _undefined(x: Tensor, axis: Any, keepdims: builtins.bool) -> Tensor:
    """NaN in the shape of a reduction over nothing."""
    return add(_reduced("+", x, axis, keepdims, dtypes.floating(x.dtype)), math.nan)


def var(x: Any, /, axis: Any = None, correction: int | float = 0.0, keepdims: builtins.bool = False) -> Tensor:
    """Σ (x − mean)² / (count − correction), in two passes as the textbook has it; NaN of nothing.  → red +, mul."""
    x = arguments.lift(x)
    n = _count(x, axis) - correction
    if not _count(x, axis):
        return _undefined(x, axis, keepdims)
    c = subtract(x, mean(x, axis=axis, keepdims=True))
    total = _reduced("+", multiply(c, c), axis, keepdims, dtypes.floating(x.dtype))
    return divide(total, float(n)) if n > 0 else divide(total, 0.0)


def std(x: Any, /, axis: Any = None, correction: int | float = 0.0, keepdims: builtins.bool = False) -> Tensor:
    """sqrt(var)."""
    return sqrt(var(x, axis=axis, correction=correction, keepdims=keepdims))


def argmax(x: Any, /, axis: int | None = None, keepdims: builtins.bool = False) -> Tensor:
    """First position of the largest element (of the first NaN, if there is one) as int64; axis None: in the flattened tensor.
    → red max, then red min of the positions where it is attained."""
    return _first_extreme(arguments.lift(x), "max", axis, keepdims)


def argmin(x: Any, /, axis: int | None = None, keepdims: builtins.bool = False) -> Tensor:
    """First position of the smallest element (of the first NaN, if there is one) as int64; see `argmax`."""
    return _first_extreme(arguments.lift(x), "min", axis, keepdims)


def _first_extreme(x: Tensor, op: str, axis: int | None, keepdims: builtins.bool) -> Tensor:
    over = arguments.dimensions(axis, x.ndim)
    if axis is not None and len(over) != 1:
        raise ShapeError(f"arg{op} takes one axis or None, not {axis!r}")
    return first_where(attained(x, primitives.reduce(op, x, over, True, x.dtype)), over, keepdims)


def attained(x: Tensor, extreme: Tensor) -> Tensor:
    at = equal(x, extreme)
    return logical_or(at, isnan(x)) if kind(x.dtype) == "float" else at


def first_where(condition: Tensor, over: Sequence[int], keepdims: builtins.bool) -> Tensor:
    """First position, row-major over some dimensions, where a condition holds; inf where it never does."""
    trace = condition.trace
    if 0 in condition.shape:
        return primitives.reduce("+", condition, over, keepdims, DEFAULT_INT)
    position = trace.positions([a for i in over for a in condition.dims[i]])
    found = trace.tensor(terms.where(condition.term, position, math.inf), condition.dims, DEFAULT_INT)
    return primitives.reduce("min", found, over, keepdims, DEFAULT_INT)


def cumulative_sum(x: Any, /, axis: int | None = None, dtype: Any = None, include_initial: builtins.bool = False) -> Tensor:
    """Sums of the elements up to each position (after a 0 if include_initial).  → red + of where(j ≤ i, x[j], 0)."""
    x = arguments.lift(x)
    return _scan("+", x, axis, dtype_name(dtype) if dtype is not None else dtypes.accumulated(x.dtype), include_initial)


def cumulative_prod(x: Any, /, axis: int | None = None, dtype: Any = None, include_initial: builtins.bool = False) -> Tensor:
    """Products of the elements up to each position (after a 1 if include_initial).  → red * of where(j ≤ i, x[j], 1)."""
    x = arguments.lift(x)
    return _scan("*", x, axis, dtype_name(dtype) if dtype is not None else dtypes.accumulated(x.dtype), include_initial)


def _scan(op: str, x: Tensor, axis: int | None, dtype: str, initial: builtins.bool) -> Tensor:
    if axis is None and x.ndim != 1:
        raise ShapeError(f"a cumulative {'sum' if op == '+' else 'product'} of shape {x.shape} needs an axis")
    d = arguments.dimension(axis if axis is not None else 0, x.ndim)
    trace, ax = x.trace, x.trace.axes
    n = x.shape[d]
    shape = tuple(n + initial if i == d else m for i, m in enumerate(x.shape))
    unit = 0.0 if op == "+" else 1.0
    if 0 in shape:
        return trace.empty(shape, dtype)
    if n == 0 or (n == 1 and not initial):
        return primitives.broadcast_to(trace.constant(unit, dtype), shape) if n == 0 else trace.tensor(x.term, x.dims, dtype)
    # the result stands on x's own axis (it will be used beside x); the sum runs over x read along another one
    here = ax.fresh(n + 1) if initial else ax.resolve(x._dims[d])
    there = ax.fresh(n)
    moved = primitives.shifted(x, d, there, ax.linear(there))
    others = [a for i, m in enumerate(moved.dims) if i != d for a in m]
    here, there = ax.resolve(here), ax.resolve(there)
    ax.apart([*others, *here, *there])
    before = primitives.binary("lt" if initial else "le", trace.positions(there), trace.positions(here))
    term = terms.where(before, moved.term, unit)
    for a in reversed(there):
        term = primitives.reduce_axis(trace, op, a, term)
        trace.summed(op, term, x.dtype)
    return trace.tensor(term, [here if i == d else m for i, m in enumerate(moved.dims)], dtype)


def diff(x: Any, /, axis: int = -1, n: int = 1, prepend: Any = None, append: Any = None) -> Tensor:
    """x[i+1] − x[i] along axis, n times over.  → slices and add."""
    x = arguments.lift(x)
    d = arguments.dimension(axis, x.ndim)
    x = concat([arguments.lift(v) for v in (prepend, x, append) if v is not None], axis=d)
    for _ in range(arguments.count(n, "the number of differences")):
        m = builtins.max(x.shape[d] - 1, 0)
        x = subtract(primitives.part(x, d, x.shape[d] - m, m), primitives.part(x, d, 0, m))
    return x
