"""Promotion of dtypes, as in the array API; numbers (Python's and NumPy's scalars) are weak and take the tensor's dtype.

Where the standard leaves it open: integer with floating gives the floating dtype; two floats of which neither holds the other
(bfloat16 and float16) give the smallest that holds both, as in PyTorch and ml_dtypes; an integer divided by an integer, or
with a floating number, gives float32.
"""
from __future__ import annotations

from ..errors import DtypeError
from ..program import DTYPES, FLOATS

DEFAULT_FLOAT, DEFAULT_INT = "float32", "int64"
# smallest and largest exponent, bits of mantissa: what decides whether one float holds another
_RANGE = {"float64": (-1074, 1023, 52), "float32": (-149, 127, 23), "bfloat16": (-133, 127, 7), "float16": (-24, 15, 10),
          "float8_e4m3fn": (-9, 8, 3), "float8_e5m2": (-16, 15, 2)}
_BY_SIZE = ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64")
_SIGNED, _UNSIGNED = ("int8", "int16", "int32", "int64"), ("uint8", "uint16", "uint32", "uint64")


def kind(dtype: str) -> str:
    """ "bool", "int" or "float"."""
    return "float" if dtype in FLOATS else "bool" if dtype == "bool" else "int"


def is_unsigned(dtype: str) -> bool:
    return dtype.startswith("uint")


def _holds(a: str, b: str) -> bool:
    (lo, hi, m), (l, h, k) = _RANGE[a], _RANGE[b]
    return lo <= l and hi >= h and m >= k


def promote(a: str, b: str) -> str:
    """The dtype of an operation on tensors of these two."""
    ka, kb = kind(a), kind(b)
    if a == b or kb == "bool":
        return a
    if ka == "bool":
        return b
    if ka != kb:
        return a if ka == "float" else b
    if ka == "float":
        return next(f for f in _BY_SIZE if _holds(f, a) and _holds(f, b))
    if is_unsigned(a) == is_unsigned(b):
        return max(a, b, key=DTYPES.__getitem__)
    u, s = (a, b) if is_unsigned(a) else (b, a)
    if u == "uint64":
        raise DtypeError(f"no integer dtype holds both {a} and {b}", "cast one with astype first")
    return max(s, _SIGNED[_UNSIGNED.index(u) + 1], key=DTYPES.__getitem__)


def promote_number(dtype: str, number: bool | int | float) -> str:
    """The dtype of an operation on a tensor of `dtype` and a number."""
    if isinstance(number, bool) or kind(dtype) == "float":
        return dtype
    if isinstance(number, float):
        return DEFAULT_FLOAT
    return DEFAULT_INT if dtype == "bool" else dtype


def of_number(number: bool | int | float) -> str:
    return "bool" if isinstance(number, bool) else DEFAULT_INT if isinstance(number, int) else DEFAULT_FLOAT


def floating(dtype: str) -> str:
    """The dtype of a floating-point function (exp, mean, a division) of `dtype`."""
    return dtype if kind(dtype) == "float" else DEFAULT_FLOAT


def accumulated(dtype: str) -> str:
    """The dtype of a sum or product of `dtype`: integers widen to 64 bits."""
    return dtype if kind(dtype) == "float" else "uint64" if is_unsigned(dtype) else "int64"
