"""Tensors from numbers and positions."""
from __future__ import annotations

import builtins
import math
from typing import Any

from .. import terms
from ..errors import ShapeError, TraceError
from ..program import dtype_name
from . import arguments, primitives, tracing
from .casts import astype
from .dtypes import DEFAULT_FLOAT
from .elementwise import equal, greater_equal, less_equal, where
from .tensor import Tensor

__all__ = [
    "arange", "asarray", "empty", "empty_like", "eye", "full", "full_like", "linspace", "ones", "ones_like", "tril", "triu",
    "zeros", "zeros_like",
]


def asarray(obj: Any, /, *, dtype: Any = None, device: Any = None, copy: builtins.bool | None = None) -> Tensor:
    """A tensor as it is, or a number as a tensor without dimensions.  Arrays are no constants: pass them as inputs."""
    if isinstance(obj, (list, tuple)):
        raise TraceError("a list cannot become a tensor", "pass it as an input, or build it with xp.arange, xp.where or xp.stack")
    x = arguments.lift(obj)
    return x if dtype is None else astype(x, dtype)


def full(shape: Any, fill_value: Any, *, dtype: Any = None, device: Any = None) -> Tensor:
    """The same value everywhere.  → a number (or a tensor without dimensions), broadcast."""
    x = arguments.lift(fill_value) if dtype is None else astype(arguments.lift(fill_value), dtype)
    if x.shape:
        raise ShapeError(f"the value of full must be a number, not of shape {x.shape}", "use xp.broadcast_to")
    return primitives.broadcast_to(x, arguments.shape_of(shape))


def zeros(shape: Any, *, dtype: Any = None, device: Any = None) -> Tensor:
    """Zeros, float32 unless said otherwise."""
    return full(shape, 0, dtype=dtype or DEFAULT_FLOAT)


def ones(shape: Any, *, dtype: Any = None, device: Any = None) -> Tensor:
    """Ones, float32 unless said otherwise."""
    return full(shape, 1, dtype=dtype or DEFAULT_FLOAT)


def empty(shape: Any, *, dtype: Any = None, device: Any = None) -> Tensor:
    """The same as `zeros`: a traced program leaves nothing undefined."""
    return zeros(shape, dtype=dtype)


def full_like(x: Tensor, /, fill_value: Any, *, dtype: Any = None, device: Any = None) -> Tensor:
    """`full` with the shape and dtype of x."""
    x = arguments.lift(x)
    return full(x.shape, fill_value, dtype=dtype or x.dtype)


def zeros_like(x: Tensor, /, *, dtype: Any = None, device: Any = None) -> Tensor:
    """Zeros with the shape and dtype of x."""
    return full_like(x, 0, dtype=dtype)


def ones_like(x: Tensor, /, *, dtype: Any = None, device: Any = None) -> Tensor:
    """Ones with the shape and dtype of x."""
    return full_like(x, 1, dtype=dtype)


def empty_like(x: Tensor, /, *, dtype: Any = None, device: Any = None) -> Tensor:
    """The same as `zeros_like`."""
    return zeros_like(x, dtype=dtype)


def arange(start: Any, /, stop: Any = None, step: Any = 1, *, dtype: Any = None, device: Any = None) -> Tensor:
    """start, start + step, … below stop; int64 if all are ints, else float32.  → start + step·iota."""
    start, stop = (0, start) if stop is None else (start, stop)
    numbers = [arguments.argument(v) for v in (start, stop, step)]
    if builtins.any(isinstance(v, Tensor) for v in numbers):
        raise TraceError("arange needs Python numbers", "its length must not depend on a tensor's values")
    first, last, by = numbers
    if by == 0:
        raise ShapeError("the step of arange must not be 0")
    name = dtype_name(dtype) if dtype is not None else arguments.result_dtype(*numbers)
    count = builtins.max(0, math.ceil((last - first) / by))                     # type: ignore[operator]
    trace = tracing.current()
    own = trace.axes.fresh(count)
    if count == 0:
        return trace.empty((0,), name)
    return trace.tensor(terms.add(terms.mul(trace.positions(own), by), first), [own], name)     # type: ignore[arg-type]


def linspace(
    start: Any, stop: Any, /, num: int, *, dtype: Any = None, device: Any = None, endpoint: builtins.bool = True
) -> Tensor:
    """`num` numbers evenly spaced from start to stop.  → start + iota·step."""
    count = arguments.count(num, "the number of elements")
    start, stop = arguments.argument(start), arguments.argument(stop)
    steps = count - 1 if endpoint else count
    position = arange(count, dtype=dtype_name(dtype) if dtype is not None else DEFAULT_FLOAT)
    return start + position * ((stop - start) / steps if steps > 0 else 0.0)


def eye(n_rows: int, n_cols: int | None = None, /, *, k: int = 0, dtype: Any = None, device: Any = None) -> Tensor:
    """1 where column = row + k, else 0.  → eq of positions."""
    rows, columns = (arguments.count(n, "an extent") for n in (n_rows, n_rows if n_cols is None else n_cols))
    i, j = arange(rows), arange(columns)
    return astype(equal(primitives.expand(i, 1) + k, j), dtype or DEFAULT_FLOAT)


def tril(x: Tensor, /, *, k: int = 0) -> Tensor:
    """x where column ≤ row + k, else 0.  → where over positions."""
    return _triangle(x, k, "tril")


def triu(x: Tensor, /, *, k: int = 0) -> Tensor:
    """x where column ≥ row + k, else 0.  → where over positions."""
    return _triangle(x, k, "triu")


def _triangle(x: Tensor, k: int, name: str) -> Tensor:
    x = arguments.lift(x)
    if x.ndim < 2:
        raise ShapeError(f"{name} needs two or more dimensions, got shape {x.shape}")
    i, j = primitives.expand(arange(x.shape[-2]), 1) + arguments.extent(k), arange(x.shape[-1])
    return where(less_equal(j, i) if name == "tril" else greater_equal(j, i), x, 0)
