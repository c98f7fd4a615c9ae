"""The namespace of traced tensors: the Python array API 2024.12 without what depends on values for its shape, and extras.

Every function takes tensors or numbers and expands into the primitive terms of `terms.py`; "→" in its description says into
which.  Shapes broadcast as in the standard, an `axis` is an int, a tuple or None (all) and may be negative.  The extras (softmax,
layer_norm, einsum, …) are sugar: nothing later in the compiler knows them.
"""
from __future__ import annotations

import builtins
import math
from collections.abc import Sequence
from typing import Any

from . import dtypes
from .dtypes import DEFAULT_FLOAT, DEFAULT_INT, kind
from .errors import DtypeError, EqsatError, ShapeError, TraceError
from .program import DTYPES, dtype_name
from .tensor import (
    Tensor,
    argument,
    binary,
    broadcast_shape,
    current,
    dimension,
    dimensions,
    elementwise,
    expand,
    extent,
    lift,
    reduce,
    reduce_axis,
    result_dtype,
    shape_of,
    shifted,
    take_along,
    unary,
)
from .tensor import broadcast_to as _broadcast_to
from .tensor import permute as _permute
from .tensor import read as _read
from .tensor import reshape as _reshape
from .tensor import take as _take
from .terms import Affine, Term, num
from .terms import add as _sum_of
from .terms import div as _div
from .terms import mul as _product_of
from .terms import neg as _neg
from .terms import sub as _sub
from .terms import where as _where

__array_api_version__ = "2024.12"
e, pi, inf, nan, newaxis = math.e, math.pi, math.inf, math.nan, None
float64, float32, float16, bfloat16 = "float64", "float32", "float16", "bfloat16"
float8_e4m3fn, float8_e5m2 = "float8_e4m3fn", "float8_e5m2"
int64, int32, int16, int8 = "int64", "int32", "int16", "int8"
uint64, uint32, uint16, uint8 = "uint64", "uint32", "uint16", "uint8"
bool = "bool"


# ------------------------------------------------------------------ dtypes

def astype(x: Any, dtype: Any, /, *, copy: builtins.bool = True, device: Any = None) -> Tensor:
    """x in another dtype.  → nothing between floats (terms are real numbers), trunc from float to integer, ne 0 to bool."""
    x, to = lift(x), dtype_name(dtype)
    if kind(to) == "bool" and kind(x.dtype) != "bool":
        return elementwise(lambda t: binary("ne", t, num(0.0)), [x], to)
    if kind(to) == "int" and kind(x.dtype) == "float":
        return elementwise(lambda t: unary("trunc", t), [x], to)
    return x.trace.tensor(x.term, x.dims, to)


def result_type(*arrays_and_dtypes: Any) -> str:
    """The dtype that these promote to."""
    xs = [current().constant(0, dtype_name(a)) if isinstance(a, str) else argument(a) for a in arrays_and_dtypes]
    if not xs:
        raise DtypeError("result_type needs an argument")
    return result_dtype(*xs)


def can_cast(from_: Any, to: Any, /) -> builtins.bool:
    """Does promotion of the two give `to`?"""
    a = from_.dtype if isinstance(from_, Tensor) else dtype_name(from_)
    try:
        return dtypes.promote(a, dtype_name(to)) == dtype_name(to)
    except DtypeError:
        return False


def isdtype(dtype: Any, kind: Any) -> builtins.bool:
    """Is the dtype of this kind ("bool", "signed integer", "unsigned integer", "integral", "real floating", "complex floating",
    "numeric", a dtype, or a tuple of them)?"""
    if isinstance(kind, tuple):
        return builtins.any(isdtype(dtype, k) for k in kind)
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


# ------------------------------------------------------------------ creation

def asarray(obj: Any, /, *, dtype: Any = None, device: Any = None, copy: builtins.bool | None = None) -> Tensor:
    """A tensor as it is, or a number as a tensor without dimensions.  Arrays are no constants: pass them as inputs."""
    if isinstance(obj, (list, tuple)):
        raise TraceError("a list cannot become a tensor", "pass it as an input, or build it with xp.arange, xp.where or xp.stack")
    x = lift(obj)
    return x if dtype is None else astype(x, dtype)


def full(shape: Any, fill_value: Any, *, dtype: Any = None, device: Any = None) -> Tensor:
    """The same value everywhere.  → a number (or a tensor without dimensions), broadcast."""
    x = lift(fill_value) if dtype is None else astype(lift(fill_value), dtype)
    if x.shape:
        raise ShapeError(f"the value of full must be a number, not of shape {x.shape}", "use xp.broadcast_to")
    return _broadcast_to(x, shape_of(shape))


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
    x = lift(x)
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
    numbers = [argument(v) for v in (start, stop, step)]
    if builtins.any(isinstance(v, Tensor) for v in numbers):
        raise TraceError("arange needs Python numbers", "its length must not depend on a tensor's values")
    first, last, by = numbers
    if by == 0:
        raise ShapeError("the step of arange must not be 0")
    name = dtype_name(dtype) if dtype is not None else result_dtype(*numbers)
    count = builtins.max(0, math.ceil((last - first) / by))                     # type: ignore[operator]
    trace = current()
    own = trace.axes.fresh(count)
    if count == 0:
        return trace.empty((0,), name)
    return trace.tensor(_sum_of(_product_of(trace.positions(own), by), first), [own], name)     # type: ignore[arg-type]


def linspace(start: Any, stop: Any, /, num: int, *, dtype: Any = None, device: Any = None, endpoint: builtins.bool = True) -> Tensor:
    """`num` numbers evenly spaced from start to stop.  → start + iota·step."""
    count = extent(num)
    steps = count - 1 if endpoint else count
    position = arange(count, dtype=dtype_name(dtype) if dtype is not None else DEFAULT_FLOAT)
    return start + position * ((stop - start) / steps if steps > 0 else 0.0)


def eye(n_rows: int, n_cols: int | None = None, /, *, k: int = 0, dtype: Any = None, device: Any = None) -> Tensor:
    """1 where column = row + k, else 0.  → eq of positions."""
    i, j = arange(n_rows), arange(n_rows if n_cols is None else n_cols)
    return astype(equal(expand(i, 1) + k, j), dtype or DEFAULT_FLOAT)


def tril(x: Tensor, /, *, k: int = 0) -> Tensor:
    """x where column ≤ row + k, else 0.  → where over positions."""
    return _triangle(x, k, "tril")


def triu(x: Tensor, /, *, k: int = 0) -> Tensor:
    """x where column ≥ row + k, else 0.  → where over positions."""
    return _triangle(x, k, "triu")


def _triangle(x: Tensor, k: int, name: str) -> Tensor:
    x = lift(x)
    if x.ndim < 2:
        raise ShapeError(f"{name} needs two or more dimensions, got shape {x.shape}")
    i, j = expand(arange(x.shape[-2]), 1) + extent(k), arange(x.shape[-1])
    return where(less_equal(j, i) if name == "tril" else greater_equal(j, i), x, 0)


def meshgrid(*arrays: Tensor, indexing: str = "xy") -> list[Tensor]:
    """Coordinates of a grid, from a vector for each of its dimensions.  → broadcasts."""
    xs = [lift(a) for a in arrays]
    if builtins.any(x.ndim > 1 for x in xs):
        raise ShapeError("meshgrid takes vectors")
    if indexing not in ("xy", "ij"):
        raise ShapeError(f'indexing is "xy" or "ij", not {indexing!r}')
    place = list(range(len(xs)))
    if indexing == "xy" and len(xs) > 1:
        place[:2] = [1, 0]
    spread = [_reshape(x, [x.size if p == i else 1 for i in range(len(xs))]) for p, x in zip(place, xs)]
    return broadcast_arrays(*spread)


# ------------------------------------------------------------------ elementwise functions

def _numeric(x: Any, name: str) -> Tensor | builtins.bool | int | float:
    x = argument(x)
    if (x.dtype if isinstance(x, Tensor) else dtypes.of_number(x)) == "bool":
        raise DtypeError(f"{name} of a bool", "use astype first, or & | ^ ~")
    return x


def _floating(f: str) -> Any:
    def function(x: Any, /) -> Tensor:
        x = lift(x)
        return elementwise(lambda t: unary(f, t), [x], dtypes.floating(x.dtype))
    function.__name__ = function.__qualname__ = f
    return function


def _documented(f: str, name: str | None = None, doc: str | None = None) -> Any:
    function = _floating(f)
    function.__name__ = function.__qualname__ = name or f
    function.__doc__ = doc or f"{name or f} of each element, floating.  → {f}."
    return function


exp, exp2, expm1 = _documented("exp"), _documented("exp2"), _documented("expm1", doc="exp(x) − 1, accurate near 0.  → expm1.")
log, log2, log10 = _documented("log"), _documented("log2"), _documented("log10")
log1p = _documented("log1p", doc="log(1 + x), accurate near 0.  → log1p.")
sqrt, rsqrt = _documented("sqrt"), _documented("rsqrt", doc="1 / sqrt(x).  → rsqrt.")
sin, cos, tan, asin, acos, atan = map(_documented, ("sin", "cos", "tan", "asin", "acos", "atan"))
sinh, cosh, tanh, asinh, acosh, atanh = map(_documented, ("sinh", "cosh", "tanh", "asinh", "acosh", "atanh"))
erf = _documented("erf", doc="The error function.  → erf.")
reciprocal = _documented("recip", "reciprocal", "1 / x.  → recip.")


def _whole(f: str, name: str, doc: str) -> Any:
    def function(x: Any, /) -> Tensor:
        x = lift(x)
        return x if kind(x.dtype) != "float" else elementwise(lambda t: unary(f, t), [x], x.dtype)
    function.__name__, function.__qualname__, function.__doc__ = name, name, doc
    return function


floor = _whole("floor", "floor", "The largest integer ≤ x, in x's dtype.  → floor.")
ceil = _whole("ceil", "ceil", "The smallest integer ≥ x, in x's dtype.  → ceil.")
trunc = _whole("trunc", "trunc", "x without its fraction, in x's dtype.  → trunc.")
round = _whole("round", "round", "The nearest integer, ties to even, in x's dtype.  → round.")


def abs(x: Any, /) -> Tensor:
    """|x|.  → abs."""
    x = lift(x)
    return x if kind(x.dtype) == "bool" or dtypes.is_unsigned(x.dtype) else elementwise(lambda t: unary("abs", t), [x], x.dtype)


def sign(x: Any, /) -> Tensor:
    """−1, 0 or 1 (NaN of NaN).  → sign."""
    x = lift(_numeric(x, "sign"))
    return elementwise(lambda t: unary("sign", t), [x], x.dtype)


def negative(x: Any, /) -> Tensor:
    """−x.  → mul by −1."""
    x = lift(_numeric(x, "negative"))
    return elementwise(_neg, [x], x.dtype)


def positive(x: Any, /) -> Tensor:
    """x."""
    return lift(x)


def square(x: Any, /) -> Tensor:
    """x·x.  → mul."""
    return multiply(x, x)


def real(x: Any, /) -> Tensor:
    """x: all tensors are real."""
    return lift(x)


conj = real


def _test(f: str, doc: str) -> Any:
    def function(x: Any, /) -> Tensor:
        x = lift(x)
        if kind(x.dtype) != "float":
            return elementwise(lambda t: num(f == "isfinite"), [x], "bool")
        return elementwise(lambda t: unary(f, t), [x], "bool")
    function.__name__, function.__qualname__, function.__doc__ = f, f, doc
    return function


isnan = _test("isnan", "Is x NaN?  → isnan.")
isinf = _test("isinf", "Is x inf or −inf?  → isinf.")
isfinite = _test("isfinite", "Is x neither infinite nor NaN?  → isfinite.")


def signbit(x: Any, /) -> Tensor:
    """Is the sign negative (of −0.0 too)?  → copysign(1, x) < 0."""
    return elementwise(lambda t: binary("lt", binary("copysign", num(1.0), t), num(0.0)), [x], "bool")


def logical_not(x: Any, /) -> Tensor:
    """Is x zero?  → not."""
    return elementwise(lambda t: unary("not", t), [x], "bool")


def bitwise_invert(x: Any, /) -> Tensor:
    """~x: `not` of a bool, −x − 1 of an integer."""
    x = lift(x)
    if x.dtype == "bool":
        return logical_not(x)
    _need(x, "int", "bitwise_invert")
    return elementwise(lambda t: _sum_of(_neg(t), -1.0 if not dtypes.is_unsigned(x.dtype) else 2.0 ** (8 * DTYPES[x.dtype]) - 1), [x], x.dtype)


def add(x1: Any, x2: Any, /) -> Tensor:
    """x1 + x2 (`or` of two bools).  → add."""
    dtype = result_dtype(argument(x1), argument(x2))
    if dtype == "bool":
        return logical_or(x1, x2)
    return elementwise(lambda a, b: _sum_of(a, b), [x1, x2], dtype)


def subtract(x1: Any, x2: Any, /) -> Tensor:
    """x1 − x2.  → add of −1·x2."""
    dtype = result_dtype(argument(x1), argument(x2))
    if dtype == "bool":
        raise DtypeError("two bools cannot be subtracted", "use x ^ y (exclusive or), or astype first")
    return elementwise(lambda a, b: _sub(a, b), [x1, x2], dtype)


def multiply(x1: Any, x2: Any, /) -> Tensor:
    """x1·x2 (`and` of two bools).  → mul."""
    dtype = result_dtype(argument(x1), argument(x2))
    if dtype == "bool":
        return logical_and(x1, x2)
    return elementwise(lambda a, b: _product_of(a, b), [x1, x2], dtype)


def divide(x1: Any, x2: Any, /) -> Tensor:
    """x1 / x2, floating.  → mul by recip(x2)."""
    return elementwise(lambda a, b: _div(a, b), [x1, x2], dtypes.floating(result_dtype(argument(x1), argument(x2))))


def floor_divide(x1: Any, x2: Any, /) -> Tensor:
    """⌊x1 / x2⌋.  → floordiv."""
    return elementwise(lambda a, b: binary("floordiv", a, b), [x1, x2], result_dtype(_numeric(x1, "floor_divide"), _numeric(x2, "floor_divide")))


def remainder(x1: Any, x2: Any, /) -> Tensor:
    """x1 − x2·⌊x1 / x2⌋: the sign of x2, as Python's %.  → mod."""
    return elementwise(lambda a, b: binary("mod", a, b), [x1, x2], result_dtype(_numeric(x1, "remainder"), _numeric(x2, "remainder")))


def pow(x1: Any, x2: Any, /) -> Tensor:
    """x1 to the power x2.  → products for exponents 1 to 4, sqrt, rsqrt, recip for 0.5, −0.5, −1, else pow."""
    dtype = result_dtype(_numeric(x1, "pow"), _numeric(x2, "pow"))

    def build(a: Term, b: Term) -> Term:
        if a.op != "num" and b.op == "num":
            match b.attr:
                case 1 | 2 | 3 | 4:
                    return _product_of(*[a] * int(b.attr))
                case 0.5:
                    return unary("sqrt", a)
                case -0.5:
                    return unary("rsqrt", a)
                case -1 if kind(dtype) == "float":
                    return unary("recip", a)
        return binary("pow", a, b)

    return elementwise(build, [x1, x2], dtype)


def _pairwise(f: str, name: str, doc: str, floating: builtins.bool = False) -> Any:
    def function(x1: Any, x2: Any, /) -> Tensor:
        dtype = result_dtype(argument(x1), argument(x2))
        return elementwise(lambda a, b: binary(f, a, b), [x1, x2], dtypes.floating(dtype) if floating else dtype)
    function.__name__, function.__qualname__, function.__doc__ = name, name, doc
    return function


maximum = _pairwise("max", "maximum", "The larger of the two; NaN if one is NaN.  → max.")
minimum = _pairwise("min", "minimum", "The smaller of the two; NaN if one is NaN.  → min.")
atan2 = _pairwise("atan2", "atan2", "The angle of the point (x2, x1).  → atan2.", True)
hypot = _pairwise("hypot", "hypot", "sqrt(x1² + x2²).  → hypot.", True)
copysign = _pairwise("copysign", "copysign", "|x1| with the sign of x2.  → copysign.", True)


def logaddexp(x1: Any, x2: Any, /) -> Tensor:
    """log(exp x1 + exp x2).  → max + log1p(exp(−|x1 − x2|)), the same infinity where both are it."""
    dtype = dtypes.floating(result_dtype(argument(x1), argument(x2)))

    def build(a: Term, b: Term) -> Term:
        apart = _sum_of(binary("max", a, b), unary("log1p", unary("exp", _neg(unary("abs", _sub(a, b))))))
        return _where(binary("eq", a, b), _sum_of(a, math.log(2.0)), apart)

    return elementwise(build, [x1, x2], dtype)


def _comparison(f: str, name: str, doc: str, swap: builtins.bool = False) -> Any:
    def function(x1: Any, x2: Any, /) -> Tensor:
        result_dtype(argument(x1), argument(x2))
        return elementwise(lambda a, b: binary(f, b, a) if swap else binary(f, a, b), [x1, x2], "bool")
    function.__name__, function.__qualname__, function.__doc__ = name, name, doc
    return function


less = _comparison("lt", "less", "x1 < x2.  → lt.")
less_equal = _comparison("le", "less_equal", "x1 ≤ x2.  → le.")
greater = _comparison("lt", "greater", "x1 > x2.  → lt, swapped.", True)
greater_equal = _comparison("le", "greater_equal", "x1 ≥ x2.  → le, swapped.", True)
equal = _comparison("eq", "equal", "x1 = x2.  → eq.")
not_equal = _comparison("ne", "not_equal", "x1 ≠ x2.  → ne.")
logical_and = _comparison("and", "logical_and", "Are both non-zero?  → and.")
logical_or = _comparison("or", "logical_or", "Is one non-zero?  → or.")
logical_xor = _comparison("xor", "logical_xor", "Is exactly one non-zero?  → xor.")


def _need(x: Tensor, what: str, name: str) -> None:
    if kind(x.dtype) != what:
        raise DtypeError(f"{name} of {x.dtype}", "use logical_… for conditions on numbers" if what == "bool" else f"{what} is needed")


def _bitwise(name: str, on_bools: Any) -> Any:
    def function(x1: Any, x2: Any, /) -> Tensor:
        for x in (lift(x1), lift(x2)):
            if x.dtype != "bool":
                raise DtypeError(f"{name} of {x.dtype}: only bools can be combined bit by bit",
                                 "compare first, as in (x > 0) & (y > 0); Python's & binds tighter than comparisons")
        return on_bools(x1, x2)
    function.__name__, function.__qualname__, function.__doc__ = name, name, f"{on_bools.__name__} of two bools."
    return function


bitwise_and, bitwise_or = _bitwise("bitwise_and", logical_and), _bitwise("bitwise_or", logical_or)
bitwise_xor = _bitwise("bitwise_xor", logical_xor)


def bitwise_left_shift(x1: Any, x2: Any, /) -> Tensor:
    """x1·2^x2 of integers.  → mul by pow(2, x2)."""
    for x in (lift(x1), lift(x2)):
        _need(x, "int", "bitwise_left_shift")
    return elementwise(lambda a, b: _product_of(a, binary("pow", num(2.0), b)), [x1, x2], result_dtype(argument(x1), argument(x2)))


def bitwise_right_shift(x1: Any, x2: Any, /) -> Tensor:
    """⌊x1 / 2^x2⌋ of integers.  → floordiv by pow(2, x2)."""
    for x in (lift(x1), lift(x2)):
        _need(x, "int", "bitwise_right_shift")
    return elementwise(lambda a, b: binary("floordiv", a, binary("pow", num(2.0), b)), [x1, x2], result_dtype(argument(x1), argument(x2)))


def clip(x: Any, /, min: Any = None, max: Any = None) -> Tensor:
    """x kept within [min, max]; either may be absent.  → min(max(x, lo), hi)."""
    x = lift(x)
    if min is not None:
        x = maximum(x, min)
    return x if max is None else minimum(x, max)


def where(condition: Any, x1: Any, x2: Any, /) -> Tensor:
    """x1 where the condition holds, else x2; what is not chosen does not count, not even NaN.  → where."""
    dtype = result_dtype(argument(x1), argument(x2))
    return elementwise(lambda c, a, b: _where(c, a, b), [condition, x1, x2], dtype)


# ------------------------------------------------------------------ reductions

def _reduced(op: str, x: Tensor, axis: Any, keepdims: builtins.bool, dtype: str) -> Tensor:
    return reduce(op, x, dimensions(axis, x.ndim), keepdims, dtype)


def sum(x: Any, /, *, axis: Any = None, dtype: Any = None, keepdims: builtins.bool = False) -> Tensor:
    """Σ over axis, 0 of nothing; integers and bools give 64 bits.  → red +."""
    x = lift(x)
    return _reduced("+", x, axis, keepdims, dtype_name(dtype) if dtype is not None else dtypes.accumulated(x.dtype))


def prod(x: Any, /, *, axis: Any = None, dtype: Any = None, keepdims: builtins.bool = False) -> Tensor:
    """Π over axis, 1 of nothing; integers and bools give 64 bits.  → red *."""
    x = lift(x)
    return _reduced("*", x, axis, keepdims, dtype_name(dtype) if dtype is not None else dtypes.accumulated(x.dtype))


def max(x: Any, /, *, axis: Any = None, keepdims: builtins.bool = False) -> Tensor:
    """The largest element over axis, NaN if there is one; an error over an empty axis.  → red max."""
    x = lift(x)
    return _reduced("max", x, axis, keepdims, x.dtype)


def min(x: Any, /, *, axis: Any = None, keepdims: builtins.bool = False) -> Tensor:
    """The smallest element over axis, NaN if there is one; an error over an empty axis.  → red min."""
    x = lift(x)
    return _reduced("min", x, axis, keepdims, x.dtype)


def all(x: Any, /, *, axis: Any = None, keepdims: builtins.bool = False) -> Tensor:
    """Is every element non-zero?  → red min of ne 0; True of nothing."""
    return logical_not(any(logical_not(x), axis=axis, keepdims=keepdims)) if 0 in lift(x).shape else _reduced(
        "min", _condition(x), axis, keepdims, "bool")


def any(x: Any, /, *, axis: Any = None, keepdims: builtins.bool = False) -> Tensor:
    """Is some element non-zero?  → red max of ne 0; False of nothing."""
    x = _condition(x)
    over = dimensions(axis, x.ndim)
    if builtins.any(x.shape[i] == 0 for i in over):
        return astype(reduce("+", x, over, keepdims, "bool"), "bool")
    return reduce("max", x, over, keepdims, "bool")


def _condition(x: Any) -> Tensor:
    return astype(lift(x), "bool")


def count_nonzero(x: Any, /, *, axis: Any = None, keepdims: builtins.bool = False) -> Tensor:
    """How many elements are not zero.  → red + of ne 0."""
    return sum(_condition(x), axis=axis, keepdims=keepdims)


def _count(x: Tensor, axis: Any) -> int:
    return math.prod(x.shape[i] for i in dimensions(axis, x.ndim))


def mean(x: Any, /, *, axis: Any = None, keepdims: builtins.bool = False) -> Tensor:
    """Σ x / count; NaN of nothing.  → red +, mul by 1/count."""
    x = lift(x)
    n = _count(x, axis)
    return divide(_reduced("+", x, axis, keepdims, dtypes.floating(x.dtype)), float(n)) if n else _undefined(x, axis, keepdims)


def _undefined(x: Tensor, axis: Any, keepdims: builtins.bool) -> Tensor:
    """NaN in the shape of a reduction over nothing."""
    return add(_reduced("+", x, axis, keepdims, dtypes.floating(x.dtype)), math.nan)


def var(x: Any, /, *, axis: Any = None, correction: int | float = 0.0, keepdims: builtins.bool = False) -> Tensor:
    """Σ (x − mean)² / (count − correction), in two passes as the textbook has it; NaN of nothing.  → red +, mul."""
    x = lift(x)
    n = _count(x, axis) - correction
    if not _count(x, axis):
        return _undefined(x, axis, keepdims)
    c = subtract(x, mean(x, axis=axis, keepdims=True))
    total = _reduced("+", multiply(c, c), axis, keepdims, dtypes.floating(x.dtype))
    return divide(total, float(n)) if n > 0 else divide(total, 0.0)


def std(x: Any, /, *, axis: Any = None, correction: int | float = 0.0, keepdims: builtins.bool = False) -> Tensor:
    """sqrt(var)."""
    return sqrt(var(x, axis=axis, correction=correction, keepdims=keepdims))


def argmax(x: Any, /, *, axis: int | None = None, keepdims: builtins.bool = False) -> Tensor:
    """First position of the largest element (of the first NaN, if there is one) as int64; axis None: in the flattened tensor.
    → red max, then red min of the positions where it is attained."""
    return _first_extreme(lift(x), "max", axis, keepdims)


def argmin(x: Any, /, *, axis: int | None = None, keepdims: builtins.bool = False) -> Tensor:
    """First position of the smallest element (of the first NaN, if there is one) as int64; see `argmax`."""
    return _first_extreme(lift(x), "min", axis, keepdims)


def _first_extreme(x: Tensor, op: str, axis: int | None, keepdims: builtins.bool) -> Tensor:
    over = dimensions(axis, x.ndim)
    if axis is not None and len(over) != 1:
        raise ShapeError(f"arg{op} takes one axis or None, not {axis!r}")
    return _first_where(_attains(x, reduce(op, x, over, True, x.dtype)), over, keepdims)


def _attains(x: Tensor, extreme: Tensor) -> Tensor:
    at = equal(x, extreme)
    return logical_or(at, isnan(x)) if kind(x.dtype) == "float" else at


def _first_where(condition: Tensor, over: Sequence[int], keepdims: builtins.bool) -> Tensor:
    """First position, row-major over some dimensions, where a condition holds; inf where it never does."""
    trace = condition.trace
    if 0 in condition.shape:
        return reduce("+", condition, over, keepdims, DEFAULT_INT)
    position = trace.positions([a for i in over for a in condition.dims[i]])
    found = trace.tensor(_where(condition.term, position, math.inf), condition.dims, DEFAULT_INT)
    return reduce("min", found, over, keepdims, DEFAULT_INT)


def cumulative_sum(x: Any, /, *, axis: int | None = None, dtype: Any = None, include_initial: builtins.bool = False) -> Tensor:
    """Sums of the elements up to each position (with a 0 in front if include_initial).  → red + of where(j ≤ i, x[j], 0)."""
    x = lift(x)
    return _scan("+", x, axis, dtype_name(dtype) if dtype is not None else dtypes.accumulated(x.dtype), include_initial)


def cumulative_prod(x: Any, /, *, axis: int | None = None, dtype: Any = None, include_initial: builtins.bool = False) -> Tensor:
    """Products of the elements up to each position (with a 1 in front if include_initial).  → red * of where(j ≤ i, x[j], 1)."""
    x = lift(x)
    return _scan("*", x, axis, dtype_name(dtype) if dtype is not None else dtypes.accumulated(x.dtype), include_initial)


def _scan(op: str, x: Tensor, axis: int | None, dtype: str, initial: builtins.bool) -> Tensor:
    if axis is None and x.ndim != 1:
        raise ShapeError(f"a cumulative {'sum' if op == '+' else 'product'} of shape {x.shape} needs an axis")
    d = dimension(axis if axis is not None else 0, x.ndim)
    trace, ax = x.trace, x.trace.axes
    n = x.shape[d]
    shape = tuple(n + initial if i == d else m for i, m in enumerate(x.shape))
    unit = 0.0 if op == "+" else 1.0
    if 0 in shape:
        return trace.empty(shape, dtype)
    if n == 0 or (n == 1 and not initial):
        return _broadcast_to(trace.constant(unit, dtype), shape) if n == 0 else trace.tensor(x.term, x.dims, dtype)
    # the result stands on x's own axis (it will be used beside x); the sum runs over x read along another one
    here = ax.fresh(n + 1) if initial else ax.resolve(x._dims[d])
    there = ax.fresh(n)
    moved = shifted(x, d, there, ax.linear(there))
    others = [a for i, m in enumerate(moved.dims) if i != d for a in m]
    here, there = ax.resolve(here), ax.resolve(there)
    ax.apart([*others, *here, *there])
    before = binary("lt" if initial else "le", trace.positions(there), trace.positions(here))
    term = _where(before, moved.term, unit)
    for a in reversed(there):
        term = reduce_axis(trace, op, a, term)
    return trace.tensor(term, [here if i == d else m for i, m in enumerate(moved.dims)], dtype)


def diff(x: Any, /, *, axis: int = -1, n: int = 1, prepend: Any = None, append: Any = None) -> Tensor:
    """x[i+1] − x[i] along axis, n times over.  → slices and add."""
    x = lift(x)
    d = dimension(axis, x.ndim)
    x = concat([lift(v) for v in (prepend, x, append) if v is not None], axis=d)
    for _ in range(n):
        m = builtins.max(x.shape[d] - 1, 0)
        x = subtract(_part(x, d, x.shape[d] - m, m), _part(x, d, 0, m))
    return x


def _part(x: Tensor, d: int, start: int, count: int, step: int = 1) -> Tensor:
    return _read(x, [(start, step, count) if i == d else None for i in range(x.ndim)])


# ------------------------------------------------------------------ products

def matmul(x1: Any, x2: Any, /) -> Tensor:
    """Matrix product of the last two dimensions; those before broadcast; vectors as in the standard.  → red + of mul."""
    a, b = lift(x1), lift(x2)
    if a.ndim == 0 or b.ndim == 0:
        raise ShapeError(f"matmul needs dimensions: {a.shape} @ {b.shape}", "multiply by a number with *")
    rows, columns = a.ndim > 1, b.ndim > 1
    if a.shape[-1] != b.shape[-2 if columns else -1]:
        raise ShapeError(f"matmul of {a.shape} and {b.shape}: {a.shape[-1]} columns against {b.shape[-2 if columns else -1]} rows",
                         "the last dimension of the first must equal the last but one of the second; x.mT transposes")
    a = expand(a if rows else expand(a, 0), a.ndim + (not rows))                # (…, n, k, 1)
    b = b if columns else expand(b, 1)
    b = expand(b, b.ndim - 2)                                                   # (…, 1, k, m)
    out = sum(multiply(a, b), axis=-2, dtype=result_dtype(lift(x1), lift(x2)))
    drop = [i for i, keep in ((out.ndim - 2, rows), (out.ndim - 1, columns)) if not keep]
    return squeeze(out, tuple(drop)) if drop else out


def matrix_transpose(x: Any, /) -> Tensor:
    """The last two dimensions swapped.  → nothing."""
    return lift(x).mT


def vecdot(x1: Any, x2: Any, /, *, axis: int = -1) -> Tensor:
    """Σ x1·x2 over one axis.  → red + of mul."""
    return sum(multiply(x1, x2), axis=axis, dtype=result_dtype(argument(x1), argument(x2)))


def tensordot(x1: Any, x2: Any, /, *, axes: Any = 2) -> Tensor:
    """Contract the last `axes` dimensions of x1 with the first of x2, or the pairs that two sequences give.  → red + of mul."""
    a, b = lift(x1), lift(x2)
    if isinstance(axes, (tuple, list)):
        da, db = ([dimension(i, t.ndim) for i in (s if isinstance(s, (tuple, list)) else (s,))] for s, t in zip(axes, (a, b)))
    else:
        n = extent(axes)
        if not 0 <= n <= builtins.min(a.ndim, b.ndim):
            raise ShapeError(f"tensordot over {n} axes of {a.shape} and {b.shape}")
        da, db = list(range(a.ndim - n, a.ndim)), list(range(n))
    if [a.shape[i] for i in da] != [b.shape[i] for i in db]:
        raise ShapeError(f"tensordot of {a.shape} over {tuple(da)} and {b.shape} over {tuple(db)}: extents differ")
    letters = iter("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    la = [next(letters) for _ in a.shape]
    lb = [la[da[db.index(i)]] if i in db else next(letters) for i in range(b.ndim)]
    out = [c for i, c in enumerate(la) if i not in da] + [c for i, c in enumerate(lb) if i not in db]
    return einsum(f"{''.join(la)},{''.join(lb)}->{''.join(out)}", a, b)


def einsum(subscripts: str, /, *operands: Any) -> Tensor:
    """Einstein summation, with "...", repeated letters (diagonals) and an implicit output.  Three operands or more are contracted
    from left to right.  → red + of mul."""
    xs = [lift(x) for x in operands]
    text = subscripts.replace(" ", "")
    left, arrow, right = text.partition("->")
    inputs = left.split(",")
    if len(inputs) != len(xs):
        raise ShapeError(f"einsum {subscripts!r} names {len(inputs)} operands, {len(xs)} were given")
    batch = 0
    labels: list[list[Any]] = []
    for s, x in zip(inputs, xs):
        letters, dots = s.replace("...", ""), "..." in s
        if not (letters.isalpha() or not letters) or s.count("...") > 1:
            raise ShapeError(f"einsum {subscripts!r}: {s!r} is not made of letters and at most one ...")
        if len(letters) > x.ndim or (not dots and len(letters) != x.ndim):
            raise ShapeError(f"einsum {subscripts!r}: {s!r} does not fit an operand of shape {x.shape}")
        own = x.ndim - len(letters)
        batch = builtins.max(batch, own)
        i = s.find("...") if dots else len(s)
        labels.append([*s[:i], *range(-own, 0), *s[i + 3:]])
    if arrow:
        i = right.find("...")
        if not right.replace("...", "").isalpha() and right.replace("...", ""):
            raise ShapeError(f"einsum {subscripts!r}: the output {right!r} is not made of letters")
        out: list[Any] = [*right] if i < 0 else [*right[:i], *range(-batch, 0), *right[i + 3:]]
    else:
        letters = left.replace(",", "").replace("...", "")
        out = [*range(-batch, 0), *sorted(c for c in set(letters) if letters.count(c) == 1)]
    known = {c for ls in labels for c in ls}
    if len(set(out)) < len(out) or not set(out) <= known:
        raise ShapeError(f"einsum {subscripts!r}: the output repeats a letter or has one that no operand has")
    sizes: dict[Any, int] = {}
    for ls, x in zip(labels, xs):
        for c, n in zip(ls, x.shape):
            if sizes.setdefault(c, n) != n and 1 in (sizes[c], n):
                sizes[c] = builtins.max(sizes[c], n) if isinstance(c, int) else sizes[c]
            if sizes[c] != n and not (isinstance(c, int) and n == 1):
                raise ShapeError(f"einsum {subscripts!r}: {c!r} has extents {sizes[c]} and {n}")
    total, have = None, []
    for k, (ls, x) in enumerate(zip(labels, xs)):
        ls, x = _diagonals(ls, x)
        later = set(out).union(*labels[k + 1:])
        if total is None:
            total, have = x, ls
        else:
            both = [*have, *(c for c in ls if c not in have)]
            total, have = multiply(_laid_out(total, have, both), _laid_out(x, ls, both)), both
        drop = tuple(i for i, c in enumerate(have) if c not in later)
        if drop:
            total = sum(total, axis=drop, dtype=total.dtype)
            have = [c for c in have if c in later]
    assert total is not None
    return _permute(total, [have.index(c) for c in out])


def _laid_out(x: Tensor, labels: list[Any], want: list[Any]) -> Tensor:
    x = _permute(x, [labels.index(c) for c in want if c in labels])
    for i, c in enumerate(want):
        if c not in labels:
            x = expand(x, i)
    return x


def _diagonals(labels: list[Any], x: Tensor) -> tuple[list[Any], Tensor]:
    """Repeated labels of one operand become one dimension, read along the diagonal."""
    while len(set(labels)) < len(labels):
        j = next(i for i, c in enumerate(labels) if c in labels[:i])
        x = _diagonal(x, labels.index(labels[j]), j)
        labels = labels[:j] + labels[j + 1:]
    return labels, x


def _diagonal(x: Tensor, i: int, j: int) -> Tensor:
    """Dimensions i and j, of one extent, read at equal positions; dimension j goes."""
    trace, ax = x.trace, x.trace.axes
    if 0 in x.shape:
        return trace.empty([n for p, n in enumerate(x.shape) if p != j], x.dtype)
    own = ax.fresh(x.shape[i])
    x = shifted(x, i, own, ax.linear(own))
    x = shifted(x, j, (), Affine()) if not own else _at_same(x, j, own)
    return trace.tensor(x.term, [d for p, d in enumerate(x.dims) if p != j], x.dtype)


def _at_same(x: Tensor, j: int, own: tuple[str, ...]) -> Tensor:
    trace, ax = x.trace, x.trace.axes
    m: dict[str, Affine] = {}
    term = trace.read_linear(x.term, ax.resolve(x._dims[j]), ax.linear(ax.resolve(own)), m)
    term = trace.reindex(term, {a: ax.resolved(e) for a, e in m.items()})
    return Tensor(trace, term, tuple(() if p == j else d for p, d in enumerate(x.dims)), x.dtype)


class _Linalg:
    """The part of the standard's linalg extension that needs no decompositions."""

    matmul, matrix_transpose, vecdot, tensordot = map(staticmethod, (matmul, matrix_transpose, vecdot, tensordot))

    @staticmethod
    def outer(x1: Any, x2: Any, /) -> Tensor:
        """x1[i]·x2[j]."""
        return multiply(expand(lift(x1), 1), x2)

    @staticmethod
    def diagonal(x: Any, /, *, offset: int = 0) -> Tensor:
        """x[…, i, i + offset]."""
        x, k = lift(x), extent(offset)
        if x.ndim < 2:
            raise ShapeError(f"diagonal needs two or more dimensions, got shape {x.shape}")
        rows, columns = builtins.max(-k, 0), builtins.max(k, 0)
        n = builtins.max(0, builtins.min(x.shape[-2] - rows, x.shape[-1] - columns))
        x = _part(_part(x, x.ndim - 2, rows, n), x.ndim - 1, columns, n)
        return _diagonal(x, x.ndim - 2, x.ndim - 1)

    @staticmethod
    def trace(x: Any, /, *, offset: int = 0, dtype: Any = None) -> Tensor:
        """Σ of the diagonal."""
        return sum(_Linalg.diagonal(x, offset=offset), axis=-1, dtype=dtype)

    @staticmethod
    def vector_norm(x: Any, /, *, axis: Any = None, keepdims: builtins.bool = False, ord: int | float = 2) -> Tensor:
        """(Σ |x|^ord)^(1/ord) over axis; ord inf, −inf, 0, 1, 2 or another number."""
        x = lift(x)
        if ord == math.inf:
            return max(abs(x), axis=axis, keepdims=keepdims)
        if ord == -math.inf:
            return min(abs(x), axis=axis, keepdims=keepdims)
        if ord == 0:
            return astype(count_nonzero(x, axis=axis, keepdims=keepdims), dtypes.floating(x.dtype))
        if ord == 1:
            return sum(abs(x), axis=axis, keepdims=keepdims)
        powers = multiply(x, x) if ord == 2 else pow(abs(x), ord)
        return pow(sum(powers, axis=axis, keepdims=keepdims), 1.0 / ord)

    def __getattr__(self, name: str) -> Any:
        raise _Absent(f"xp.linalg.{name} is not supported", "of linalg there are matmul, outer, diagonal, trace, vector_norm, vecdot, tensordot")


# ------------------------------------------------------------------ shapes

def reshape(x: Any, /, shape: Any, *, copy: builtins.bool | None = None) -> Tensor:
    """Row-major; one extent may be −1.  → nothing: axes split and merge (a gather where 6·4 becomes 8·3)."""
    x = lift(x)
    new = list(shape_of(shape))
    if new.count(-1) == 1:
        rest = -math.prod(new)
        if rest == 0 or x.size % rest:
            raise ShapeError(f"cannot reshape {x.shape} ({x.size} elements) to {tuple(new)}", f"−1 stands for a multiple of {rest}")
        new[new.index(-1)] = x.size // rest
    if builtins.any(n < 0 for n in new):
        raise ShapeError(f"cannot reshape to {tuple(new)}", "an extent is ≥ 0; one may be −1")
    return _reshape(x, new)


def permute_dims(x: Any, /, axes: Any) -> Tensor:
    """Dimensions in another order.  → nothing."""
    x = lift(x)
    order = [dimension(a, x.ndim) for a in axes]
    if sorted(order) != list(range(x.ndim)):
        raise ShapeError(f"{tuple(axes)} is no order of the {x.ndim} dimensions of {x.shape}", "name each dimension once")
    return _permute(x, order)


def moveaxis(x: Any, source: Any, destination: Any, /) -> Tensor:
    """Dimensions `source` at `destination`, the others in their order.  → nothing."""
    x = lift(x)
    a, b = ([dimension(i, x.ndim) for i in (s if isinstance(s, (tuple, list)) else (s,))] for s in (source, destination))
    if len(a) != len(b) or len(set(a)) < len(a) or len(set(b)) < len(b):
        raise ShapeError(f"moveaxis from {source} to {destination}", "name as many different dimensions in both")
    order = [i for i in range(x.ndim) if i not in a]
    for to, frm in sorted(zip(b, a)):
        order.insert(to, frm)
    return _permute(x, order)


def expand_dims(x: Any, /, *, axis: int = 0) -> Tensor:
    """A dimension of extent 1 inserted at `axis`.  → nothing."""
    x = lift(x)
    return expand(x, dimension(axis, x.ndim, 1))


def squeeze(x: Any, /, axis: Any) -> Tensor:
    """Dimensions of extent 1 removed.  → nothing."""
    x = lift(x)
    drop = dimensions(axis, x.ndim)
    for i in drop:
        if x.shape[i] != 1:
            raise ShapeError(f"cannot squeeze dimension {i} of {x.shape}: its extent is {x.shape[i]}, not 1")
    return x.trace.tensor(x.term, [d for i, d in enumerate(x.dims) if i not in drop], x.dtype)


def broadcast_to(x: Any, /, shape: Any) -> Tensor:
    """x repeated along new dimensions and those of extent 1.  → nothing."""
    return _broadcast_to(lift(x), shape_of(shape))


def broadcast_arrays(*arrays: Any) -> list[Tensor]:
    """All broadcast to their common shape.  → nothing."""
    xs = [lift(a) for a in arrays]
    shape = broadcast_shape([x.shape for x in xs]) if xs else ()
    return [_broadcast_to(x, shape) for x in xs]


def flip(x: Any, /, *, axis: Any = None) -> Tensor:
    """Order reversed along axis.  → an affine index (a view if x is computed)."""
    x = lift(x)
    over = dimensions(axis, x.ndim)
    return _read(x, [(n - 1, -1, n) if i in over and n > 1 else None for i, n in enumerate(x.shape)])


def roll(x: Any, /, shift: Any, *, axis: Any = None) -> Tensor:
    """Elements moved by `shift` along axis, around the end; axis None: in the flattened tensor.  → where of two affine reads."""
    x = lift(x)
    if axis is None:
        return _reshape(roll(_reshape(x, [x.size]), shift, axis=0), x.shape)
    axes = axis if isinstance(axis, (tuple, list)) else (axis,)
    shifts = shift if isinstance(shift, (tuple, list)) else (shift,) * len(axes)
    if len(shifts) != len(axes):
        raise ShapeError(f"roll by {shift} over axis {axis}: give a shift for each axis")
    for s, a in zip(shifts, axes):
        d = dimension(a, x.ndim)
        n = x.shape[d]
        s = extent(s) % n if n else 0
        if s and 0 not in x.shape:
            x = concat([_part(x, d, n - s, s), _part(x, d, 0, n - s)], axis=d)
    return x


def tile(x: Any, repetitions: Any, /) -> Tensor:
    """x repeated as a whole along each dimension.  → nothing: a new axis that x does not depend on."""
    x = lift(x)
    reps = shape_of(repetitions)
    for _ in range(len(reps) - x.ndim):
        x = expand(x, 0)
    reps = (1,) * (x.ndim - len(reps)) + reps
    if 0 in reps or 0 in x.shape:
        return x.trace.empty([n * r for n, r in zip(x.shape, reps)], x.dtype)
    return x.trace.tensor(x.term, [(*x.trace.axes.fresh(r), *d) for r, d in zip(reps, x.dims)], x.dtype)


def repeat(x: Any, repeats: Any, /, *, axis: int | None = None) -> Tensor:
    """Each element repeated `repeats` times (an int) along axis.  → nothing: a new axis that x does not depend on."""
    x = lift(x)
    if isinstance(argument(repeats), Tensor):
        raise TraceError("repeat by a tensor gives a shape that depends on values", "give an int")
    r = extent(repeats)
    if axis is None:
        x, axis = _reshape(x, [x.size]), 0
    d = dimension(axis, x.ndim)
    if r <= 0 or 0 in x.shape:
        return x.trace.empty([n * builtins.max(r, 0) if i == d else n for i, n in enumerate(x.shape)], x.dtype)
    own = x.trace.axes.fresh(r)
    return x.trace.tensor(x.term, [(*m, *own) if i == d else m for i, m in enumerate(x.dims)], x.dtype)


def concat(arrays: Sequence[Any], /, *, axis: int | None = 0) -> Tensor:
    """Tensors one after the other along axis; axis None: flattened.  → where over the position, each read at its own offset."""
    xs = [lift(x) for x in _several(arrays, "concat")]
    if axis is None:
        xs, axis = [_reshape(x, [x.size]) for x in xs], 0
    ndim = xs[0].ndim
    d = dimension(axis, ndim)
    if builtins.any(x.ndim != ndim or x.shape[:d] + x.shape[d + 1:] != xs[0].shape[:d] + xs[0].shape[d + 1:] for x in xs):
        raise ShapeError(f"concat of shapes {', '.join(str(x.shape) for x in xs)} along axis {d}", "all other extents must agree")
    dtype = result_dtype(*xs)
    trace = xs[0].trace
    total = builtins.sum(x.shape[d] for x in xs)
    shape = [total if i == d else n for i, n in enumerate(xs[0].shape)]
    if 0 in shape:
        return trace.empty(shape, dtype)
    xs = [x for x in xs if x.shape[d]]
    if len(xs) == 1:
        return astype(xs[0], dtype)
    own = trace.axes.fresh(total)
    moved, start, ends = [], 0, []
    for x in xs:
        index = trace.axes.resolved(trace.axes.linear(own))
        moved.append(shifted(x, d, trace.axes.resolve(own), Affine(index.const - start, index.terms)))
        start += x.shape[d]
        ends.append(start)
    position = trace.tensor(trace.positions(trace.axes.resolve(own)), [own if i == d else () for i in range(ndim)], DEFAULT_INT)
    out = moved[-1]
    for x, end in reversed(list(zip(moved[:-1], ends))):
        out = where(less(position, end), x, out)
    return astype(out, dtype)


def _several(arrays: Any, name: str) -> Sequence[Any]:
    if isinstance(arrays, Tensor) or not isinstance(arrays, (list, tuple)) or not arrays:
        raise ShapeError(f"{name} takes a list or tuple of one tensor or more")
    return arrays


def stack(arrays: Sequence[Any], /, *, axis: int = 0) -> Tensor:
    """Tensors of one shape along a new dimension.  → where over the position."""
    xs = [lift(x) for x in _several(arrays, "stack")]
    if builtins.any(x.shape != xs[0].shape for x in xs):
        raise ShapeError(f"stack of shapes {', '.join(str(x.shape) for x in xs)}", "all must agree; xp.concat joins along a dimension")
    d = dimension(axis, xs[0].ndim, 1)
    dtype = result_dtype(*xs)
    if 0 in xs[0].shape:
        return xs[0].trace.empty([*xs[0].shape[:d], len(xs), *xs[0].shape[d:]], dtype)
    if len(xs) == 1:
        return expand(xs[0], d)
    position = arange(len(xs))
    for _ in range(xs[0].ndim - d):
        position = expand(position, position.ndim)
    out = expand(xs[-1], d)
    for i, x in reversed(list(enumerate(xs[:-1]))):
        out = where(equal(position, i), expand(x, d), out)
    return astype(out, dtype)


def unstack(x: Any, /, *, axis: int = 0) -> tuple[Tensor, ...]:
    """The slices along one dimension.  → reads at constant indices."""
    x = lift(x)
    d = dimension(axis, x.ndim)
    return tuple(_read(x, [k if i == d else None for i in range(x.ndim)]) for k in range(x.shape[d]))


def pad(x: Any, pad_width: Any, /, *, constant_values: Any = 0) -> Tensor:
    """A border of constants: (before, after) for all dimensions, or one pair for each.  → where over the position."""
    x = lift(x)
    if isinstance(pad_width, int):
        pad_width = (pad_width, pad_width)
    pairs = [tuple(p) for p in pad_width] if isinstance(pad_width[0], (tuple, list)) else [tuple(pad_width)] * x.ndim
    if len(pairs) != x.ndim or builtins.any(len(p) != 2 or builtins.min(map(extent, p)) < 0 for p in pairs):
        raise ShapeError(f"pad of shape {x.shape} by {pad_width}", "give (before, after), or such a pair for each dimension")
    for d, (before, after) in enumerate(pairs):
        parts = [x]
        for n, at in ((before, 0), (after, len(parts))):
            if n:
                shape = [n if i == d else m for i, m in enumerate(x.shape)]
                parts.insert(0 if at == 0 else len(parts), full(shape, constant_values, dtype=x.dtype))
        x = concat(parts, axis=d)
    return x


# ------------------------------------------------------------------ reading by index

def take(x: Any, indices: Any, /, *, axis: int | None = None) -> Tensor:
    """x read at `indices` (integers; negative ones count from the end) along axis; their dimensions replace it.  → gather."""
    x, i = lift(x), lift(indices)
    if axis is None:
        if x.ndim != 1:
            raise ShapeError(f"take from shape {x.shape} needs an axis")
        axis = 0
    return _take(x, i, dimension(axis, x.ndim))


def take_along_axis(x: Any, indices: Any, /, *, axis: int = -1) -> Tensor:
    """out[…, j, …] = x[…, indices[…, j, …], …] along axis; other dimensions broadcast.  → gather."""
    x = lift(x)
    return take_along(x, lift(indices), dimension(axis, x.ndim))


def one_hot(x: Any, num_classes: int, /, *, dtype: Any = None) -> Tensor:
    """1 where the position along a new last dimension equals x, else 0.  → eq of positions."""
    x = lift(x)
    _need(x, "int", "one_hot")
    return astype(equal(expand(x, x.ndim), arange(extent(num_classes))), dtype or DEFAULT_FLOAT)


def searchsorted(x1: Any, x2: Any, /, *, side: str = "left", sorter: Any = None) -> Tensor:
    """Where each x2 would be inserted into the sorted vector x1.  → how many of x1 are below it: red + of lt (or le)."""
    a, b = lift(x1), lift(x2)
    if a.ndim != 1 or side not in ("left", "right"):
        raise ShapeError(f"searchsorted takes a vector and side left or right, not shape {a.shape} and {side!r}")
    if sorter is not None:
        a = take(a, sorter)
    b = expand(b, b.ndim)
    return sum(less(a, b) if side == "left" else less_equal(a, b), axis=-1)


def top_k(x: Any, k: int, /, *, axis: int = -1) -> tuple[Tensor, Tensor]:
    """The k largest elements along axis in descending order, and their positions (int64); ties go to the first position, NaN is
    larger than all.  → k times argmax and max, each without the positions found before."""
    x, k = lift(x), extent(k)
    d = dimension(axis, x.ndim)
    n = x.shape[d]
    if not 0 <= k <= n:
        raise ShapeError(f"top_k of {k} elements of an axis of extent {n}")
    if k == 0 or 0 in x.shape:
        shape = [k if i == d else m for i, m in enumerate(x.shape)]
        return x.trace.empty(shape, x.dtype), x.trace.empty(shape, DEFAULT_INT)
    position = arange(n)
    for _ in range(x.ndim - d - 1):
        position = expand(position, position.ndim)
    lowest = -math.inf if kind(x.dtype) == "float" else int(iinfo(x.dtype).min) if kind(x.dtype) == "int" else False
    values, indices, left, candidates = [], [], None, x
    for _ in range(k):
        best = reduce("max", candidates, (d,), True, x.dtype)
        attained = _attains(candidates, best)
        first = _first_where(attained if left is None else logical_and(attained, left), (d,), True)
        values.append(best)
        indices.append(first)
        remaining = not_equal(position, first)
        left = remaining if left is None else logical_and(left, remaining)
        candidates = where(left, x, lowest)
    joined = [squeeze(v, d) for v in values], [squeeze(i, d) for i in indices]
    return stack(joined[0], axis=d), stack(joined[1], axis=d)


# ------------------------------------------------------------------ extras

def softmax(x: Any, /, *, axis: int = -1) -> Tensor:
    """exp(x − max) / Σ exp(x − max) over axis.  → exp, red max, red +, recip."""
    x = lift(x)
    p = exp(x - max(x, axis=axis, keepdims=True))
    return p / sum(p, axis=axis, keepdims=True)


def log_softmax(x: Any, /, *, axis: int = -1) -> Tensor:
    """x − max − log Σ exp(x − max) over axis.  → exp, log, red max, red +."""
    x = lift(x)
    c = x - max(x, axis=axis, keepdims=True)
    return c - log(sum(exp(c), axis=axis, keepdims=True))


def logsumexp(x: Any, /, *, axis: Any = None, keepdims: builtins.bool = False) -> Tensor:
    """max + log Σ exp(x − max) over axis; where the max is infinite, that (the plain formula has NaN).  → exp, log, reds, where."""
    x = lift(x)
    over = dimensions(axis, x.ndim)
    m = max(x, axis=over, keepdims=True)
    total = log(sum(exp(x - m), axis=over, keepdims=True))
    out = where(isinf(m), m, m + total)
    return out if keepdims else squeeze(out, over)


def rms_norm(x: Any, /, weight: Any = None, *, eps: float = 1e-6, axis: Any = -1) -> Tensor:
    """x / sqrt(mean(x²) + eps) over axis, times weight.  → red +, sqrt, recip."""
    x = lift(x)
    y = x / sqrt(mean(x * x, axis=axis, keepdims=True) + eps)
    return y if weight is None else y * weight


def layer_norm(x: Any, /, weight: Any = None, bias: Any = None, *, eps: float = 1e-5, axis: Any = -1) -> Tensor:
    """(x − mean) / sqrt(mean((x − mean)²) + eps) over axis, times weight, plus bias.  → red +, sqrt, recip."""
    x = lift(x)
    c = x - mean(x, axis=axis, keepdims=True)
    y = c / sqrt(mean(c * c, axis=axis, keepdims=True) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def sigmoid(x: Any, /) -> Tensor:
    """1 / (1 + exp(−x)).  → exp, recip."""
    return 1.0 / (1.0 + exp(-lift(x)))


def silu(x: Any, /) -> Tensor:
    """x / (1 + exp(−x)).  → exp, recip."""
    x = lift(x)
    return x / (1.0 + exp(-x))


def relu(x: Any, /) -> Tensor:
    """max(x, 0).  → max."""
    return maximum(x, 0)


def leaky_relu(x: Any, /, negative_slope: float = 0.01) -> Tensor:
    """x where positive, else negative_slope·x.  → where."""
    x = lift(x)
    return where(x > 0, x, negative_slope * x)


def elu(x: Any, /, alpha: float = 1.0) -> Tensor:
    """x where positive, else alpha·(exp(x) − 1).  → where, expm1."""
    x = lift(x)
    return where(x > 0, x, alpha * expm1(minimum(x, 0.0)))


def softplus(x: Any, /) -> Tensor:
    """log(1 + exp(x)), without overflow.  → max(x, 0) + log1p(exp(−|x|))."""
    x = lift(x)
    return maximum(x, 0.0) + log1p(exp(-abs(x)))


def gelu(x: Any, /, approximate: str = "none") -> Tensor:
    """x·Φ(x): "none" with erf, "tanh" with the usual approximation.  → erf or tanh."""
    x = lift(x)
    if approximate == "none":
        return 0.5 * x * (1.0 + erf(x * (1.0 / math.sqrt(2.0))))
    if approximate == "tanh":
        return 0.5 * x * (1.0 + tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * (x * x * x))))
    raise EqsatError(f'approximate is "none" or "tanh", not {approximate!r}')


linalg = _Linalg()

# ------------------------------------------------------------------ names that are not here

# NumPy's names for functions that the standard calls otherwise
NUMPY_NAMES = {
    "absolute": "abs", "amax": "max", "amin": "min", "arccos": "acos", "arccosh": "acosh", "arcsin": "asin", "arcsinh": "asinh",
    "arctan": "atan", "arctan2": "atan2", "arctanh": "atanh", "array": "asarray", "bitwise_not": "bitwise_invert", "cumsum": "cumulative_sum",
    "cumprod": "cumulative_prod", "concatenate": "concat", "cat": "concat", "float_power": "pow", "fmax": "maximum", "fmin": "minimum",
    "hstack": "concat", "vstack": "concat", "invert": "bitwise_invert", "left_shift": "bitwise_left_shift", "mod": "remainder",
    "power": "pow", "product": "prod", "right_shift": "bitwise_right_shift", "rint": "round", "around": "round", "swapaxes": "permute_dims",
    "transpose": "permute_dims", "true_divide": "divide", "dot": "matmul", "outer": "linalg.outer", "ravel": "reshape", "view": "reshape",
    "flatten": "reshape", "unsqueeze": "expand_dims", "permute": "permute_dims", "to": "astype", "masked_fill": "where",
}
_VALUE_DEPENDENT = ("nonzero", "argwhere", "unique", "unique_all", "unique_counts", "unique_inverse", "unique_values")


class _Absent(TraceError, AttributeError):
    """So that hasattr(xp, name) works."""


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name in NUMPY_NAMES:
        raise _Absent(f"xp.{name} is not a name of the array API", f"use xp.{NUMPY_NAMES[name]}")
    if name in _VALUE_DEPENDENT:
        raise _Absent(f"xp.{name} gives a shape that depends on values", "use xp.where and reductions")
    if name in ("sort", "argsort"):
        raise _Absent(f"xp.{name} is not supported", "xp.top_k(x, k) gives the k largest")
    raise _Absent(f"xp.{name} is not supported", "xp has the array API 2024.12 without what depends on values, and softmax, einsum, top_k, …")


__all__ = sorted(
    name for name, value in globals().items()
    if not name.startswith("_") and name not in {
        "annotations", "builtins", "math", "dtypes", "kind", "Any", "Sequence", "Affine", "Term", "Tensor", "DtypeError", "EqsatError",
        "ShapeError", "TraceError", "DEFAULT_FLOAT", "DEFAULT_INT", "DTYPES", "dtype_name", "align", "argument", "axis_index", "binary", "current",
        "dimension", "dimensions", "elementwise", "expand", "extent", "iota", "lift", "num", "reduce", "reduce_axis", "result_dtype",
        "shape_of", "shifted", "take_along", "unary", "broadcast_shape", "NUMPY_NAMES",
    }
)
