"""Functions of each element: arithmetic, comparisons, logic, rounding."""
from __future__ import annotations

import builtins
import math
from typing import Any

from .. import terms
from ..errors import DtypeError
from ..program import DTYPES
from ..terms import Term
from . import arguments, dtypes, primitives
from .dtypes import kind
from .tensor import Tensor

__all__ = [
    "abs",
    "acos",
    "acosh",
    "add",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "bitwise_and",
    "bitwise_invert",
    "bitwise_left_shift",
    "bitwise_or",
    "bitwise_right_shift",
    "bitwise_xor",
    "ceil",
    "clip",
    "conj",
    "copysign",
    "cos",
    "cosh",
    "divide",
    "equal",
    "erf",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "floor_divide",
    "greater",
    "greater_equal",
    "hypot",
    "isfinite",
    "isinf",
    "isnan",
    "less",
    "less_equal",
    "log",
    "log1p",
    "log2",
    "log10",
    "logaddexp",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "maximum",
    "minimum",
    "multiply",
    "negative",
    "not_equal",
    "positive",
    "pow",
    "real",
    "reciprocal",
    "remainder",
    "round",
    "rsqrt",
    "sign",
    "signbit",
    "sin",
    "sinh",
    "sqrt",
    "square",
    "subtract",
    "tan",
    "tanh",
    "trunc",
    "where",
]


def _numeric(x: Any, name: str) -> Tensor | builtins.bool | int | float:
    x = arguments.argument(x)
    if (x.dtype if isinstance(x, Tensor) else dtypes.of_number(x)) == "bool":
        raise DtypeError(f"{name} of a bool", "use astype first, or & | ^ ~")
    return x


def _floating(f: str) -> Any:
    def function(x: Any, /) -> Tensor:
        x = arguments.lift(x)
        return primitives.elementwise(lambda t: primitives.unary(f, t), [x], dtypes.floating(x.dtype))
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
        x = arguments.lift(x)
        return x if kind(x.dtype) != "float" else primitives.elementwise(lambda t: primitives.unary(f, t), [x], x.dtype)
    function.__name__, function.__qualname__, function.__doc__ = name, name, doc
    return function


floor = _whole("floor", "floor", "The largest integer ≤ x, in x's dtype.  → floor.")
ceil = _whole("ceil", "ceil", "The smallest integer ≥ x, in x's dtype.  → ceil.")
trunc = _whole("trunc", "trunc", "x without its fraction, in x's dtype.  → trunc.")
round = _whole("round", "round", "The nearest integer, ties to even, in x's dtype.  → round.")


def abs(x: Any, /) -> Tensor:
    """|x|.  → abs."""
    x = arguments.lift(x)
    if kind(x.dtype) == "bool" or dtypes.is_unsigned(x.dtype):
        return x
    return primitives.elementwise(lambda t: primitives.unary("abs", t), [x], x.dtype)


def sign(x: Any, /) -> Tensor:
    """−1, 0 or 1 (NaN of NaN).  → sign."""
    x = arguments.lift(_numeric(x, "sign"))
    return primitives.elementwise(lambda t: primitives.unary("sign", t), [x], x.dtype)


def negative(x: Any, /) -> Tensor:
    """−x.  → mul by −1."""
    x = arguments.lift(_numeric(x, "negative"))
    return primitives.elementwise(terms.neg, [x], x.dtype)


def positive(x: Any, /) -> Tensor:
    """x."""
    return arguments.lift(x)


def square(x: Any, /) -> Tensor:
    """x·x.  → mul."""
    return multiply(x, x)


def real(x: Any, /) -> Tensor:
    """x: all tensors are real."""
    return arguments.lift(x)


conj = real


def _test(f: str, doc: str) -> Any:
    def function(x: Any, /) -> Tensor:
        x = arguments.lift(x)
        if kind(x.dtype) != "float":
            return primitives.elementwise(lambda t: terms.num(f == "isfinite"), [x], "bool")
        return primitives.elementwise(lambda t: primitives.unary(f, t), [x], "bool")
    function.__name__, function.__qualname__, function.__doc__ = f, f, doc
    return function


isnan = _test("isnan", "Is x NaN?  → isnan.")
isinf = _test("isinf", "Is x inf or −inf?  → isinf.")
isfinite = _test("isfinite", "Is x neither infinite nor NaN?  → isfinite.")


def signbit(x: Any, /) -> Tensor:
    """Is the sign negative (of −0.0 too)?  → copysign(1, x) < 0."""
    return less(copysign(1.0, x), 0.0)


def logical_not(x: Any, /) -> Tensor:
    """Is x zero?  → not."""
    return primitives.elementwise(lambda t: primitives.unary("not", t), [x], "bool")


def bitwise_invert(x: Any, /) -> Tensor:
    """~x: `not` of a bool, −x − 1 of an integer."""
    x = arguments.lift(x)
    if x.dtype == "bool":
        return logical_not(x)
    need_kind(x, "int", "bitwise_invert")
    all_ones = 2.0 ** (8 * DTYPES[x.dtype]) - 1 if dtypes.is_unsigned(x.dtype) else -1.0
    return primitives.elementwise(lambda t: terms.add(terms.neg(t), all_ones), [x], x.dtype)


def add(x1: Any, x2: Any, /) -> Tensor:
    """x1 + x2 (`or` of two bools).  → add."""
    dtype = arguments.result_dtype(arguments.argument(x1), arguments.argument(x2))
    if dtype == "bool":
        return logical_or(x1, x2)
    return primitives.elementwise(terms.add, [x1, x2], dtype)


def subtract(x1: Any, x2: Any, /) -> Tensor:
    """x1 − x2.  → add of −1·x2."""
    dtype = arguments.result_dtype(arguments.argument(x1), arguments.argument(x2))
    if dtype == "bool":
        raise DtypeError("two bools cannot be subtracted", "use x ^ y (exclusive or), or astype first")
    return primitives.elementwise(terms.sub, [x1, x2], dtype)


def multiply(x1: Any, x2: Any, /) -> Tensor:
    """x1·x2 (`and` of two bools).  → mul."""
    dtype = arguments.result_dtype(arguments.argument(x1), arguments.argument(x2))
    if dtype == "bool":
        return logical_and(x1, x2)
    return primitives.elementwise(terms.mul, [x1, x2], dtype)


def divide(x1: Any, x2: Any, /) -> Tensor:
    """x1 / x2, floating.  → mul by recip(x2)."""
    dtype = arguments.result_dtype(arguments.argument(x1), arguments.argument(x2))
    return primitives.elementwise(terms.div, [x1, x2], dtypes.floating(dtype))


def floor_divide(x1: Any, x2: Any, /) -> Tensor:
    """⌊x1 / x2⌋.  → floordiv."""
    dtype = arguments.result_dtype(_numeric(x1, "floor_divide"), _numeric(x2, "floor_divide"))
    return primitives.elementwise(lambda a, b: primitives.binary("floordiv", a, b), [x1, x2], dtype)


def remainder(x1: Any, x2: Any, /) -> Tensor:
    """x1 − x2·⌊x1 / x2⌋: the sign of x2, as Python's %.  → mod."""
    dtype = arguments.result_dtype(_numeric(x1, "remainder"), _numeric(x2, "remainder"))
    return primitives.elementwise(lambda a, b: primitives.binary("mod", a, b), [x1, x2], dtype)


def pow(x1: Any, x2: Any, /) -> Tensor:
    """x1 to the power x2.  → products for exponents 1 to 4, sqrt, rsqrt, recip for 0.5, −0.5, −1, else pow."""
    dtype = arguments.result_dtype(_numeric(x1, "pow"), _numeric(x2, "pow"))

    def build(a: Term, b: Term) -> Term:
        if a.op != "num" and b.op == "num":
            match b.attr:
                case 1 | 2 | 3 | 4:
                    return terms.mul(*[a] * int(b.attr))
                case 0.5:
                    return primitives.unary("sqrt", a)
                case -0.5:
                    return primitives.unary("rsqrt", a)
                case -1 if kind(dtype) == "float":
                    return primitives.unary("recip", a)
        return primitives.binary("pow", a, b)

    return primitives.elementwise(build, [x1, x2], dtype)


def _pairwise(f: str, name: str, doc: str, floating: builtins.bool = False) -> Any:
    def function(x1: Any, x2: Any, /) -> Tensor:
        dtype = arguments.result_dtype(arguments.argument(x1), arguments.argument(x2))
        return primitives.elementwise(lambda a, b: primitives.binary(f, a, b), [x1, x2], dtypes.floating(dtype) if floating else dtype)
    function.__name__, function.__qualname__, function.__doc__ = name, name, doc
    return function


maximum = _pairwise("max", "maximum", "The larger of the two; NaN if one is NaN.  → max.")
minimum = _pairwise("min", "minimum", "The smaller of the two; NaN if one is NaN.  → min.")
atan2 = _pairwise("atan2", "atan2", "The angle of the point (x2, x1).  → atan2.", True)
hypot = _pairwise("hypot", "hypot", "sqrt(x1² + x2²).  → hypot.", True)
copysign = _pairwise("copysign", "copysign", "|x1| with the sign of x2.  → copysign.", True)


def logaddexp(x1: Any, x2: Any, /) -> Tensor:
    """log(exp x1 + exp x2).  → max + log1p(exp(−|x1 − x2|)), the same infinity where both are it."""
    dtype = dtypes.floating(arguments.result_dtype(arguments.argument(x1), arguments.argument(x2)))

    def build(a: Term, b: Term) -> Term:
        below = terms.neg(primitives.unary("abs", terms.sub(a, b)))
        apart = terms.add(primitives.binary("max", a, b), primitives.unary("log1p", primitives.unary("exp", below)))
        return terms.where(primitives.binary("eq", a, b), terms.add(a, math.log(2.0)), apart)

    return primitives.elementwise(build, [x1, x2], dtype)


def _comparison(f: str, name: str, doc: str, swap: builtins.bool = False) -> Any:
    def function(x1: Any, x2: Any, /) -> Tensor:
        arguments.result_dtype(arguments.argument(x1), arguments.argument(x2))
        return primitives.elementwise(lambda a, b: primitives.binary(f, b, a) if swap else primitives.binary(f, a, b), [x1, x2], "bool")
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


def need_kind(x: Tensor, what: str, name: str) -> None:
    if kind(x.dtype) != what:
        raise DtypeError(f"{name} of {x.dtype}", f"its dtype must be {what}; astype converts")


def _bitwise(name: str, on_bools: Any) -> Any:
    def function(x1: Any, x2: Any, /) -> Tensor:
        for x in (arguments.lift(x1), arguments.lift(x2)):
            if x.dtype != "bool":
                raise DtypeError(f"{name} of {x.dtype}: only bools can be combined bit by bit",
                                 "compare first, as in (x > 0) & (y > 0); Python's & binds tighter than comparisons")
        return on_bools(x1, x2)
    function.__name__, function.__qualname__, function.__doc__ = name, name, f"{on_bools.__name__} of two bools."
    return function


bitwise_and, bitwise_or = _bitwise("bitwise_and", logical_and), _bitwise("bitwise_or", logical_or)
bitwise_xor = _bitwise("bitwise_xor", logical_xor)


def _shift(name: str, x1: Any, x2: Any) -> str:
    """The dtype of a shift."""
    for x in (arguments.lift(x1), arguments.lift(x2)):
        need_kind(x, "int", name)
    by = arguments.argument(x2)
    if isinstance(by, int) and not 0 <= by < 64:
        raise DtypeError(f"{name} by {by}", "shift by 0 … 63 bits")
    return arguments.result_dtype(arguments.argument(x1), by)


def bitwise_left_shift(x1: Any, x2: Any, /) -> Tensor:
    """x1·2^x2 of integers.  → mul by pow(2, x2)."""
    dtype = _shift("bitwise_left_shift", x1, x2)
    return primitives.elementwise(lambda a, b: terms.mul(a, primitives.binary("pow", terms.num(2.0), b)), [x1, x2], dtype)


def bitwise_right_shift(x1: Any, x2: Any, /) -> Tensor:
    """⌊x1 / 2^x2⌋ of integers.  → floordiv by pow(2, x2)."""
    dtype = _shift("bitwise_right_shift", x1, x2)
    return primitives.elementwise(lambda a, b: primitives.binary("floordiv", a, primitives.binary("pow", terms.num(2.0), b)), [x1, x2], dtype)


def clip(x: Any, /, min: Any = None, max: Any = None) -> Tensor:
    """x kept within [min, max]; either may be absent.  → min(max(x, lo), hi)."""
    x = arguments.lift(x)
    if min is not None:
        x = maximum(x, min)
    return x if max is None else minimum(x, max)


def where(condition: Any, x1: Any, x2: Any, /) -> Tensor:
    """x1 where the condition holds, else x2; what is not chosen does not count, not even NaN.  → where."""
    dtype = arguments.result_dtype(arguments.argument(x1), arguments.argument(x2))
    return primitives.elementwise(terms.where, [condition, x1, x2], dtype)
