"""Traced tensors: the array API standard's array object, without values.

A dimension of a `Tensor` is a tuple of axes, row-major: none for extent 1, several if a reshape merged it.  All axes of a
tensor differ.
"""
from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ShapeError, TraceError
from ..terms import Term

if TYPE_CHECKING:
    from .tracing import Trace

_ITERATE_LIMIT = 256


class Tensor:
    """A tensor of a traced function: the array API standard's array object.  It has a shape and a dtype, but no values."""

    __slots__ = ("_dims", "dtype", "shape", "term", "trace")
    __hash__ = None                                                             # type: ignore[assignment]

    def __init__(self, trace: Trace, term: Term, dims: tuple[tuple[str, ...], ...], dtype: str):
        self.trace, self.term, self._dims, self.dtype = trace, term, dims, dtype
        self.shape: tuple[int, ...] = tuple(trace.axes.size(d) for d in dims)

    @property
    def dims(self) -> tuple[tuple[str, ...], ...]:
        """The live axes of each dimension."""
        return tuple(self.trace.axes.resolve(d) for d in self._dims)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def device(self) -> str:
        return "traced"

    def to_device(self, device: Any, /, *, stream: Any = None) -> Tensor:
        return self

    @property
    def T(self) -> Tensor:
        if self.ndim != 2:
            raise ShapeError(f".T is for two dimensions, this tensor has shape {self.shape}", "use .mT or xp.permute_dims")
        return _call("permute_dims", self, (1, 0))

    @property
    def mT(self) -> Tensor:
        if self.ndim < 2:
            raise ShapeError(f".mT needs two or more dimensions, this tensor has shape {self.shape}")
        return _call("permute_dims", self, (*range(self.ndim - 2), self.ndim - 1, self.ndim - 2))

    def __array_namespace__(self, /, *, api_version: str | None = None) -> Any:
        from .. import xp
        if api_version not in (None, "2021.12", "2022.12", "2023.12", "2024.12"):
            raise TraceError(f"array API version {api_version!r} is not known", "2024.12 is what xp follows")
        return xp

    def __repr__(self) -> str:
        return f"<traced tensor {self.dtype}{list(self.shape)}>"

    # arithmetic: each operator is the function of xp that the standard names for it

    def __add__(self, other: Any) -> Tensor: return _call("add", self, other)
    def __sub__(self, other: Any) -> Tensor: return _call("subtract", self, other)
    def __mul__(self, other: Any) -> Tensor: return _call("multiply", self, other)
    def __truediv__(self, other: Any) -> Tensor: return _call("divide", self, other)
    def __floordiv__(self, other: Any) -> Tensor: return _call("floor_divide", self, other)
    def __mod__(self, other: Any) -> Tensor: return _call("remainder", self, other)
    def __pow__(self, other: Any) -> Tensor: return _call("pow", self, other)
    def __matmul__(self, other: Any) -> Tensor: return _call("matmul", self, other)
    def __and__(self, other: Any) -> Tensor: return _call("bitwise_and", self, other)
    def __or__(self, other: Any) -> Tensor: return _call("bitwise_or", self, other)
    def __xor__(self, other: Any) -> Tensor: return _call("bitwise_xor", self, other)
    def __lshift__(self, other: Any) -> Tensor: return _call("bitwise_left_shift", self, other)
    def __rshift__(self, other: Any) -> Tensor: return _call("bitwise_right_shift", self, other)
    def __radd__(self, other: Any) -> Tensor: return _call("add", other, self)
    def __rsub__(self, other: Any) -> Tensor: return _call("subtract", other, self)
    def __rmul__(self, other: Any) -> Tensor: return _call("multiply", other, self)
    def __rtruediv__(self, other: Any) -> Tensor: return _call("divide", other, self)
    def __rfloordiv__(self, other: Any) -> Tensor: return _call("floor_divide", other, self)
    def __rmod__(self, other: Any) -> Tensor: return _call("remainder", other, self)
    def __rpow__(self, other: Any) -> Tensor: return _call("pow", other, self)
    def __rmatmul__(self, other: Any) -> Tensor: return _call("matmul", other, self)
    def __rand__(self, other: Any) -> Tensor: return _call("bitwise_and", other, self)
    def __ror__(self, other: Any) -> Tensor: return _call("bitwise_or", other, self)
    def __rxor__(self, other: Any) -> Tensor: return _call("bitwise_xor", other, self)
    def __rlshift__(self, other: Any) -> Tensor: return _call("bitwise_left_shift", other, self)
    def __rrshift__(self, other: Any) -> Tensor: return _call("bitwise_right_shift", other, self)
    def __lt__(self, other: Any) -> Tensor: return _call("less", self, other)
    def __le__(self, other: Any) -> Tensor: return _call("less_equal", self, other)
    def __gt__(self, other: Any) -> Tensor: return _call("greater", self, other)
    def __ge__(self, other: Any) -> Tensor: return _call("greater_equal", self, other)
    def __eq__(self, other: Any) -> Tensor: return _call("equal", self, other)             # type: ignore[override]
    def __ne__(self, other: Any) -> Tensor: return _call("not_equal", self, other)         # type: ignore[override]
    def __neg__(self) -> Tensor: return _call("negative", self)
    def __pos__(self) -> Tensor: return _call("positive", self)
    def __abs__(self) -> Tensor: return _call("abs", self)
    def __invert__(self) -> Tensor: return _call("bitwise_invert", self)

    # the methods that NumPy's arrays have beside the standard's functions and that array code uses most

    def astype(self, dtype: Any, copy: bool = True) -> Tensor: return _call("astype", self, dtype)
    def sum(self, axis: Any = None, dtype: Any = None, keepdims: bool = False) -> Tensor:
        return _call("sum", self, axis=axis, dtype=dtype, keepdims=keepdims)
    def mean(self, axis: Any = None, keepdims: bool = False) -> Tensor: return _call("mean", self, axis=axis, keepdims=keepdims)
    def max(self, axis: Any = None, keepdims: bool = False) -> Tensor: return _call("max", self, axis=axis, keepdims=keepdims)
    def min(self, axis: Any = None, keepdims: bool = False) -> Tensor: return _call("min", self, axis=axis, keepdims=keepdims)
    def reshape(self, *shape: Any) -> Tensor:
        return _call("reshape", self, shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape)

    def __getitem__(self, key: Any) -> Tensor:
        from .subscripts import getitem

        return getitem(self, key)

    def __len__(self) -> int:
        if not self.shape:
            raise TraceError("a tensor without dimensions has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        if not self.shape:
            raise TraceError("a tensor without dimensions cannot be iterated over")
        if self.shape[0] > _ITERATE_LIMIT:
            raise TraceError(f"iterating over {self.shape[0]} rows would write the program out {self.shape[0]} times",
                             "use array operations over the whole tensor, or slices")
        return (self[i] for i in range(self.shape[0]))

    # what a tensor without values cannot do

    def __bool__(self) -> bool:
        raise TraceError("the truth of a traced tensor is not known (if, while, and, or, not, in)",
                         "use xp.where to choose between values, & | ~ to combine conditions; shapes may steer an if")

    def _no_number(self, *_: Any) -> Any:
        raise TraceError("a traced tensor has no value that could become a Python number", "in place of math.f(x) use xp.f(x)")

    __float__ = __int__ = __index__ = __complex__ = __round__ = __floor__ = __ceil__ = __trunc__ = item = tolist = _no_number

    def __setitem__(self, key: Any, value: Any) -> None:
        raise TraceError("tensors cannot be assigned to", "build the result with xp.where(mask, new, old) or xp.concat")

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise TraceError("a traced tensor cannot become a NumPy array",
                         "in place of np.f(x) use xp.f(x); xp = x.__array_namespace__()")

    def __dlpack__(self, **kwargs: Any) -> Any:
        raise TraceError("a traced tensor has no memory that another library could read", "use functions of xp")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        # NumPy's scalars bring us here from an operator, as in np.float32(2) * x
        operator = _UFUNC_OPERATORS.get(ufunc.__name__)
        if operator and method == "__call__" and not kwargs and any(isinstance(x, (np.generic, np.ndarray)) for x in inputs):
            return _call(operator, *inputs)
        raise TraceError(f"np.{ufunc.__name__} was applied to a traced tensor", _instead(ufunc.__name__))

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        raise TraceError(f"np.{func.__name__} was applied to a traced tensor", _instead(func.__name__))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Absent(f"traced tensors have no attribute {name!r}", _instead(name))


class Absent(TraceError, AttributeError):
    """So that hasattr() and getattr() with a default work."""


_UFUNC_OPERATORS = {
    "add": "add", "subtract": "subtract", "multiply": "multiply", "divide": "divide", "true_divide": "divide", "power": "pow",
    "floor_divide": "floor_divide", "remainder": "remainder", "less": "less", "less_equal": "less_equal", "greater": "greater",
    "greater_equal": "greater_equal", "equal": "equal", "not_equal": "not_equal", "bitwise_and": "bitwise_and",
    "bitwise_or": "bitwise_or", "bitwise_xor": "bitwise_xor", "matmul": "matmul",
}


def _instead(name: str) -> str:
    from .. import xp
    name = xp.NUMPY_NAMES.get(name, name)
    return f"use {f'xp.{name}(…)' if name in xp.__all__ else 'functions of xp'}, with xp = x.__array_namespace__()"


def _call(name: str, *args: Any, **kwargs: Any) -> Tensor:
    from .. import xp
    return getattr(xp, name)(*args, **kwargs)
