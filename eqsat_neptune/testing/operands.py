"""Inputs of random programs: their dtypes, what values they hold, and how their arrays lie in memory."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from ..program import DTYPES, FLOATS, TensorSpec, range_of

# of values; "below N" is one more: integers from 0 to N − 1, declared as such, that may serve as positions
KINDS = ("normal", "positive", "ties", "constant", "large", "offset", "masked", "padding", "spikes", "nans")
LAYOUTS = ("packed", "strided", "reversed", "reversed rows", "turned", "repeated rows", "repeated columns", "offset", "padded")
INTEGERS = tuple(d for d in DTYPES if "int" in d)
_LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}  # finite numbers
_RANGES = {"positive": (0.5, 2.0)}
_BELOW = re.compile(r"below ([1-9][0-9]{0,4})")


@dataclass(frozen=True)
class Operand:
    """An input.  kind: one of `KINDS`, or "below N"; layout: one of `LAYOUTS`."""

    shape: tuple[int, ...]
    dtype: str = "float64"
    kind: str = "normal"
    layout: str = "packed"

    @property
    def known(self) -> bool:
        """Is this an input that can be drawn?"""
        drawn = self.kind in KINDS or (self.dtype in INTEGERS and below(self.kind) is not None)
        return self.dtype in DTYPES and drawn and self.layout in LAYOUTS

    @property
    def range(self) -> tuple[float, float] | None:
        """What is declared of its values."""
        n = below(self.kind)
        return _RANGES.get(self.kind) if n is None else (0.0, n - 1.0)

    @property
    def spec(self) -> TensorSpec:
        return TensorSpec(self.shape, self.dtype, range=self.range)


def below(kind: str) -> int | None:
    """N of the kind "below N"."""
    found = _BELOW.fullmatch(kind)
    return int(found[1]) if found else None


def drawn(o: Operand, seed: int, place: int, score: bool) -> np.ndarray:
    """Its array, which `seed` and the operand's place in the program decide.  −∞ is given only to scores, which may hold it."""
    import ml_dtypes  # noqa: F401

    rng = np.random.default_rng([seed, place])
    if o.dtype not in FLOATS:
        x = _whole(rng, o)
    else:
        x = _floats(rng, o, score and o.dtype != "float8_e4m3fn")  # which has no infinity
        most = _LARGEST.get(o.dtype, np.inf)
        x = np.where(np.isfinite(x), np.clip(x, -most, most), x)
    return laid_out(np.asarray(x).astype(np.dtype(o.dtype)), o.layout)


def _floats(rng: np.random.Generator, o: Operand, score: bool) -> np.ndarray:
    x = rng.standard_normal(o.shape)
    match o.kind:
        case "positive":
            return np.asarray(rng.uniform(*_RANGES["positive"], o.shape))
        case "ties":
            return np.asarray(rng.integers(-2, 3, o.shape).astype(np.float64))
        case "constant":
            return np.full(o.shape, rng.choice([0.0, 1.0, -1.5]))
        case "large":
            return 1e4 * x
        case "offset":
            return 1000.0 + 1e-3 * x
        case "spikes":
            return np.where(rng.random(o.shape) < 0.2, rng.choice([-1e4, 1e4], o.shape), x)
        case "nans":
            return np.where(rng.random(o.shape) < 0.1, np.nan, x)
        case "padding":
            return np.where(_kept(rng, o.shape), 0.0, -np.inf if score else -1e4)
        case "masked" if score:
            x = np.where(rng.random(o.shape) < 0.3, -np.inf, x)
            if x.ndim:
                x[0] = -np.inf
    return x


def _whole(rng: np.random.Generator, o: Operand) -> np.ndarray:
    """The same for integers and truth values: within the dtype, and far from where sums and products of a few would leave it."""
    n = below(o.kind)
    if n is not None:
        return rng.integers(0, n, o.shape)
    most = min(range_of(o.dtype)[1], 1e6)
    match o.kind:
        case "positive":
            x = rng.integers(1, 3, o.shape)
        case "constant":
            x = np.full(o.shape, rng.choice([0, 1, 2]))
        case "large" | "spikes":
            x = rng.integers(-int(most) // 2, int(most) // 2 + 1, o.shape)
        case "offset":
            x = int(min(most - 1, 1000)) + rng.integers(-1, 2, o.shape)
        case "padding" | "masked":
            x = _kept(rng, o.shape).astype(np.int64)
        case _:
            x = rng.integers(-3, 4, o.shape)
    if o.dtype == "bool":
        return x > 0
    return np.abs(x) if range_of(o.dtype)[0] == 0 else x


def _kept(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """What a padding mask keeps: of each row the first elements, of some rows all, of some none."""
    if not shape:
        return rng.random(()) < 0.5
    n = shape[-1]
    lengths = rng.choice([0, n, *range(n + 1)], shape[:-1])
    return np.arange(n) < lengths[..., None]


def laid_out(x: np.ndarray, layout: str) -> np.ndarray:
    """An array of the same values that lies in memory otherwise.  Where a layout repeats elements, those of the first row (or column)
    stand for all; what lies between elements is NaN, or the largest integer."""
    if x.ndim == 0 or x.size == 0:
        return x
    match layout:
        case "strided":
            return _amid(x, 2 * x.shape[-1], slice(None, None, 2))
        case "padded":
            return _amid(x, x.shape[-1] + 3, slice(0, x.shape[-1]))
        case "reversed":
            return np.array(x[..., ::-1], order="C")[..., ::-1]
        case "reversed rows":
            return np.array(x[::-1], order="C")[::-1]
        case "turned":
            return np.array(x.T, order="C").T
        case "repeated rows":
            return np.broadcast_to(x[:1].copy(), x.shape)
        case "repeated columns":
            return np.broadcast_to(x[..., :1].copy(), x.shape)
        case "offset":  # not aligned to more than an element
            flat = np.empty(x.size + 1, x.dtype)
            flat[1:] = x.ravel()
            return flat[1:].reshape(x.shape)
    return np.array(x, order="C")


def _amid(x: np.ndarray, pitch: int, place: slice) -> np.ndarray:
    """x at `place` of rows of `pitch` elements."""
    nothing = np.iinfo(x.dtype).max if x.dtype.kind in "iu" else x.dtype.kind == "b" or np.nan
    wide = np.full((*x.shape[:-1], pitch), nothing).astype(x.dtype)
    wide[..., place] = x
    return wide[..., place]
