"""NumPy implementations of the elementwise functions: f(*args, out=…) writes into `out`, which may be one of the arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...terms import BINARY, PREDICATES, UNARY

Array = Any  # np.ndarray, or a NumPy scalar where an argument is a constant


def rsqrt(x: Array, *, out: np.ndarray, **kw: Any) -> None:
    np.sqrt(x, out=out, **kw)
    np.reciprocal(out, out=out)


def _horner(x: np.ndarray, coefficients: tuple[float, ...]) -> np.ndarray:
    """Polynomial with the coefficient of the highest power first."""
    y = np.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        np.multiply(y, x, out=y)
        np.add(y, x.dtype.type(c), out=y)
    return y


# x·P(x²)/Q(x²) on [−4, 4]: relative error below 5e-7 in float32
_P32 = (
    -2.72614225801306e-10,
    2.77068142495902e-08,
    -2.10102402082508e-06,
    -5.69250639462346e-05,
    -7.34990630326855e-04,
    -2.95459980854025e-03,
    -1.60960333262415e-02,
)
_Q32 = (-1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03, -1.42647390514189e-02)

# W. J. Cody, Math. Comp. 23 (1969): erf = x·A(x²)/B(x²) up to 0.46875, erfc = exp(−x²)·C(x)/D(x) beyond
_A = (1.85777706184603153e-1, 3.16112374387056560e0, 1.13864154151050156e2, 3.77485237685302021e2, 3.20937758913846947e3)
_B = (1.0, 2.36012909523441209e1, 2.44024637934444173e2, 1.28261652607737228e3, 2.84423683343917062e3)
_C = (
    2.15311535474403846e-8,
    5.64188496988670089e-1,
    8.88314979438837594e0,
    6.61191906371416295e1,
    2.98635138197400131e2,
    8.81952221241769090e2,
    1.71204761263407058e3,
    2.05107837782607147e3,
    1.23033935479799725e3,
)
_D = (
    1.0,
    1.57449261107098347e1,
    1.17693950891312499e2,
    5.37181101862009858e2,
    1.62138957456669019e3,
    3.29079923573345963e3,
    4.36261909014324716e3,
    3.43936767414372164e3,
    1.23033935480374942e3,
)


def erf(x: Array, *, out: np.ndarray, **kw: Any) -> None:
    x = np.asarray(x, out.dtype)
    if out.ndim == 0:  # NumPy turns arithmetic on these into scalars, which cannot be written to
        x, out = x.reshape(1), out.reshape(1)
    if out.dtype == np.float32:
        y = np.clip(x, np.float32(-4), np.float32(4))
        z = y * y
        np.multiply(y, _horner(z, _P32), out=y)
        np.divide(y, _horner(z, _Q32), out=out)
        return
    a = np.abs(x)
    z = np.minimum(a, 0.46875)
    np.multiply(z, z, out=z)
    near = x * _horner(z, _A) / _horner(z, _B)
    np.minimum(a, 6.0, out=a)
    far = np.copysign(1.0 - np.exp(-a * a) * _horner(a, _C) / _horner(a, _D), x)
    np.copyto(out, np.where(a <= 0.46875, near, far))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "mul": np.multiply,
    "sub": np.subtract,
    "div": np.divide,
    "neg": np.negative,
    "recip": np.reciprocal,
    "rsqrt": rsqrt,
    "abs": np.absolute,
    "round": np.rint,
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "erf": erf,
    "not": np.logical_not,
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
    "max": np.maximum,
    "min": np.minimum,
    "lt": np.less,
    "le": np.less_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "pow": np.power,
    "floordiv": np.floor_divide,
    "mod": np.remainder,
    "atan2": np.arctan2,
}
FUNCTIONS |= {f: getattr(np, f) for f in (*UNARY, *BINARY) if f not in FUNCTIONS}


def vectorised(name: str) -> bool:
    """Does NumPy have vector code for the float32 function on this processor?"""
    try:
        info = np.lib.introspect.opt_func_info(func_name=f"^{name}$", signature="float32")
    except AttributeError:  # NumPy before 2.1
        return False
    return any("baseline" not in x["current"] for kinds in info.values() for x in kinds.values())


FAST_EXP2 = vectorised("exp2")  # quicker than exp then, as long as no result is 0, infinite or subnormal

REDUCERS: dict[str, np.ufunc] = {"+": np.add, "*": np.multiply, "max": np.maximum, "min": np.minimum}
LOGICAL = frozenset({"and", "or", "xor", "not"})
COMPARISONS = PREDICATES - LOGICAL
# functions whose value is an integer whenever their arguments are
INTEGRAL = frozenset(
    {"add", "mul", "sub", "neg", "abs", "sign", "floor", "ceil", "round", "trunc", "max", "min", "floordiv", "mod", "where"}
)
