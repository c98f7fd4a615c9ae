"""The namespace of traced tensors: the Python array API 2024.12 without what depends on values for its shape, and extras.

Every function takes tensors or numbers and expands into the primitive terms of `terms.py`; "→" in its description says into
which.  Shapes broadcast as in the standard, an `axis` is an int, a tuple or None (all) and may be negative.  The extras (softmax,
layer_norm, einsum, …) are sugar: nothing later in the compiler knows them.
"""
# ruff: noqa: F403
from __future__ import annotations

import math as _math
from typing import Any as _Any

from .frontend import casts as _casts
from .frontend import creation as _creation
from .frontend import elementwise as _elementwise
from .frontend import extras as _extras
from .frontend import indexing as _indexing
from .frontend import products as _products
from .frontend import reductions as _reductions
from .frontend import shapes as _shapes
from .frontend.casts import *
from .frontend.creation import *
from .frontend.elementwise import *
from .frontend.extras import *
from .frontend.indexing import *
from .frontend.products import *
from .frontend.reductions import *
from .frontend.shapes import *
from .frontend.tensor import Absent as _Absent

__array_api_version__ = "2024.12"
e, pi, inf, nan, newaxis = _math.e, _math.pi, _math.inf, _math.nan, None
float64, float32, float16, bfloat16 = "float64", "float32", "float16", "bfloat16"
float8_e4m3fn, float8_e5m2 = "float8_e4m3fn", "float8_e5m2"
int64, int32, int16, int8 = "int64", "int32", "int16", "int8"
uint64, uint32, uint16, uint8 = "uint64", "uint32", "uint16", "uint8"
bool = "bool"

__all__ = [
    "bfloat16",
    "bool",
    "e",
    "float8_e4m3fn",
    "float8_e5m2",
    "float16",
    "float32",
    "float64",
    "inf",
    "int8",
    "int16",
    "int32",
    "int64",
    "nan",
    "newaxis",
    "pi",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
]
for _module in (_casts, _creation, _elementwise, _extras, _indexing, _products, _reductions, _shapes):
    __all__ += _module.__all__

# NumPy's names for functions that the standard calls otherwise
NUMPY_NAMES = {
    "absolute": "abs", "amax": "max", "amin": "min", "arccos": "acos", "arccosh": "acosh", "arcsin": "asin",
    "arcsinh": "asinh", "arctan": "atan", "arctan2": "atan2", "arctanh": "atanh", "around": "round", "array": "asarray",
    "bitwise_not": "bitwise_invert", "cat": "concat", "concatenate": "concat", "cumprod": "cumulative_prod",
    "cumsum": "cumulative_sum", "dot": "matmul", "flatten": "reshape", "float_power": "pow", "fmax": "maximum",
    "fmin": "minimum", "hstack": "concat", "invert": "bitwise_invert", "left_shift": "bitwise_left_shift",
    "masked_fill": "where", "mod": "remainder", "outer": "linalg.outer", "permute": "permute_dims", "power": "pow",
    "product": "prod", "ravel": "reshape", "right_shift": "bitwise_right_shift", "rint": "round", "swapaxes": "permute_dims",
    "to": "astype", "transpose": "permute_dims", "true_divide": "divide", "unsqueeze": "expand_dims", "view": "reshape",
    "vstack": "concat",
}
_VALUE_DEPENDENT = ("nonzero", "argwhere", "unique", "unique_all", "unique_counts", "unique_inverse", "unique_values")


def __getattr__(name: str) -> _Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name in NUMPY_NAMES:
        raise _Absent(f"xp.{name} is not a name of the array API", f"use xp.{NUMPY_NAMES[name]}")
    if name in _VALUE_DEPENDENT:
        raise _Absent(f"xp.{name} gives a shape that depends on values", "use xp.where and reductions")
    if name in ("sort", "argsort"):
        raise _Absent(f"xp.{name} is not supported", "xp.top_k(x, k) gives the k largest")
    raise _Absent(f"xp.{name} is not supported", "it has the array API without what depends on values, and softmax, einsum, …")
