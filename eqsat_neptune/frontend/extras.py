"""What the field expects beside the standard: sugar over the other functions, unknown to the rest of the compiler."""
from __future__ import annotations

import math
from typing import Any

from ..errors import TraceError
from . import arguments
from .elementwise import abs, erf, exp, expm1, isinf, log, log1p, maximum, minimum, sqrt, tanh, where
from .reductions import max, mean, sum
from .shapes import squeeze
from .tensor import Tensor

__all__ = [
    "elu", "gelu", "layer_norm", "leaky_relu", "log_softmax", "logsumexp", "relu", "rms_norm", "sigmoid", "silu", "softmax",
    "softplus",
]


def softmax(x: Any, /, axis: int = -1) -> Tensor:
    """exp(x − max) / Σ exp(x − max) over axis.  → exp, red max, red +, recip."""
    x = arguments.lift(x)
    p = exp(x - max(x, axis=axis, keepdims=True))
    return p / sum(p, axis=axis, keepdims=True)


def log_softmax(x: Any, /, axis: int = -1) -> Tensor:
    """x − max − log Σ exp(x − max) over axis.  → exp, log, red max, red +."""
    x = arguments.lift(x)
    c = x - max(x, axis=axis, keepdims=True)
    return c - log(sum(exp(c), axis=axis, keepdims=True))


def logsumexp(x: Any, /, axis: Any = None, keepdims: bool = False) -> Tensor:
    """max + log Σ exp(x − max) over axis; where the max is infinite, that (not NaN).  → exp, log, reds, where."""
    x = arguments.lift(x)
    over = arguments.dimensions(axis, x.ndim)
    m = max(x, axis=over, keepdims=True)
    total = log(sum(exp(x - m), axis=over, keepdims=True))
    out = where(isinf(m), m, m + total)
    return out if keepdims else squeeze(out, over)


def rms_norm(x: Any, /, weight: Any = None, eps: float = 1e-6, axis: Any = -1) -> Tensor:
    """x / sqrt(mean(x²) + eps) over axis, times weight.  → red +, sqrt, recip."""
    x = arguments.lift(x)
    y = x / sqrt(mean(x * x, axis=axis, keepdims=True) + eps)
    return y if weight is None else y * weight


def layer_norm(x: Any, /, weight: Any = None, bias: Any = None, eps: float = 1e-5, axis: Any = -1) -> Tensor:
    """(x − mean) / sqrt(mean((x − mean)²) + eps) over axis, times weight, plus bias.  → red +, sqrt, recip."""
    x = arguments.lift(x)
    c = x - mean(x, axis=axis, keepdims=True)
    y = c / sqrt(mean(c * c, axis=axis, keepdims=True) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def sigmoid(x: Any, /) -> Tensor:
    """1 / (1 + exp(−x)).  → exp, recip."""
    return 1.0 / (1.0 + exp(-arguments.lift(x)))


def silu(x: Any, /) -> Tensor:
    """x / (1 + exp(−x)).  → exp, recip."""
    x = arguments.lift(x)
    return x / (1.0 + exp(-x))


def relu(x: Any, /) -> Tensor:
    """max(x, 0).  → max."""
    return maximum(x, 0)


def leaky_relu(x: Any, /, negative_slope: float = 0.01) -> Tensor:
    """x where positive, else negative_slope·x.  → where."""
    x = arguments.lift(x)
    return where(x > 0, x, negative_slope * x)


def elu(x: Any, /, alpha: float = 1.0) -> Tensor:
    """x where positive, else alpha·(exp(x) − 1).  → where, expm1."""
    x = arguments.lift(x)
    return where(x > 0, x, alpha * expm1(minimum(x, 0.0)))


def softplus(x: Any, /) -> Tensor:
    """log(1 + exp(x)), without overflow.  → max(x, 0) + log1p(exp(−|x|))."""
    x = arguments.lift(x)
    return maximum(x, 0.0) + log1p(exp(-abs(x)))


def gelu(x: Any, /, approximate: str = "none") -> Tensor:
    """x·Φ(x): "none" with erf, "tanh" with the usual approximation.  → erf or tanh."""
    x = arguments.lift(x)
    if approximate == "none":
        return 0.5 * x * (1.0 + erf(x * (1.0 / math.sqrt(2.0))))
    if approximate == "tanh":
        return 0.5 * x * (1.0 + tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * (x * x * x))))
    raise TraceError(f'approximate is "none" or "tanh", not {approximate!r}')

