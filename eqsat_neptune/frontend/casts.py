"""Dtypes: casts, promotion and what is known of them."""
from __future__ import annotations

from typing import Any

from .. import terms
from ..errors import DtypeError
from ..program import DTYPES, dtype_name
from . import arguments, dtypes, primitives, tracing
from .dtypes import DEFAULT_FLOAT, DEFAULT_INT
from .tensor import Tensor

__all__ = [
    "__array_namespace_info__", "astype", "can_cast", "finfo", "iinfo", "isdtype", "result_type",
]


def astype(x: Any, dtype: Any, /, *, copy: bool = True, device: Any = None) -> Tensor:
    """x in another dtype.  → nothing between floats (terms are real numbers; but see wide.py for products of what was cast to
    float32), trunc from float to integer, ne 0 to bool."""
    x, to = arguments.lift(x), dtype_name(dtype)
    if dtypes.kind(to) == "bool" and dtypes.kind(x.dtype) != "bool":
        return primitives.elementwise(lambda t: primitives.binary("ne", t, terms.num(0.0)), [x], to)
    if dtypes.kind(to) == "int" and dtypes.kind(x.dtype) == "float":
        return primitives.elementwise(lambda t: primitives.unary("trunc", t), [x], to)
    return x.trace.tensor(x.term, x.dims, to)


def result_type(*arrays_and_dtypes: Any) -> str:
    """The dtype that these promote to."""
    xs = [tracing.current().constant(0, dtype_name(a)) if isinstance(a, str) else arguments.argument(a) for a in arrays_and_dtypes]
    if not xs:
        raise DtypeError("result_type needs an argument")
    return arguments.result_dtype(*xs)


def can_cast(from_: Any, to: Any, /) -> bool:
    """Does promotion of the two give `to`?"""
    a = from_.dtype if isinstance(from_, Tensor) else dtype_name(from_)
    try:
        return dtypes.promote(a, dtype_name(to)) == dtype_name(to)
    except DtypeError:
        return False


def isdtype(dtype: Any, kind: Any) -> bool:
    """Is the dtype of this kind ("bool", "signed integer", "unsigned integer", "integral", "real floating", "complex floating",
    "numeric", a dtype, or a tuple of them)?"""
    if isinstance(kind, tuple):
        return any(isdtype(dtype, k) for k in kind)
    name = dtype_name(dtype)
    own = dtypes.kind(name)
    kinds = {"bool": own == "bool", "integral": own == "int", "real floating": own == "float", "numeric": own != "bool",
             "signed integer": own == "int" and not dtypes.is_unsigned(name), "unsigned integer": dtypes.is_unsigned(name),
             "complex floating": False}
    return kinds[kind] if kind in kinds else name == dtype_name(kind)


def finfo(type: Any, /) -> Any:
    """Machine limits of a floating dtype (an `ml_dtypes.finfo`, with bits, eps, max, min, smallest_normal)."""
    import ml_dtypes

    name = type.dtype if isinstance(type, Tensor) else dtype_name(type)
    if dtypes.kind(name) != "float":
        raise DtypeError(f"finfo is for floating dtypes, not {name}", "use xp.iinfo")
    return ml_dtypes.finfo(name)


def iinfo(type: Any, /) -> Any:
    """Limits of an integer dtype (a `numpy.iinfo`, with bits, max, min)."""
    import numpy

    name = type.dtype if isinstance(type, Tensor) else dtype_name(type)
    if dtypes.kind(name) != "int":
        raise DtypeError(f"iinfo is for integer dtypes, not {name}", "use xp.finfo")
    return numpy.iinfo(name)


class _Info:
    """What __array_namespace_info__ returns."""

    def capabilities(self) -> dict[str, Any]:
        return {"boolean indexing": False, "data-dependent shapes": False, "max dimensions": None}

    def default_device(self) -> str:
        return "traced"

    def devices(self) -> list[str]:
        return ["traced"]

    def default_dtypes(self, *, device: Any = None) -> dict[str, str]:
        return {"real floating": DEFAULT_FLOAT, "integral": DEFAULT_INT, "indexing": DEFAULT_INT}

    def dtypes(self, *, device: Any = None, kind: Any = None) -> dict[str, str]:
        return {d: d for d in DTYPES if kind is None or isdtype(d, kind)}


def __array_namespace_info__() -> _Info:
    """Inspection, as the standard has it."""
    return _Info()
