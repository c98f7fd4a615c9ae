"""Input arrays that rules fail on: one kind after the other, each within the declared ranges."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..program import Input, Program

Generator = Callable[[np.random.Generator, Input], np.ndarray]


def _plain(rng: np.random.Generator, i: Input) -> np.ndarray:
    """Both signs, zeros, and the ends of the range."""
    lo, hi = i.range or (-2.0, 2.0)
    x = rng.uniform(lo, hi, i.shape)
    if lo <= 0.0 <= hi:
        x = np.where(rng.random(i.shape) < 0.2, rng.choice([0.0, 0.0, -0.0], i.shape), x)
    return np.where(rng.random(i.shape) < 0.1, rng.choice([lo, hi], i.shape), x)


def _huge(rng: np.random.Generator, i: Input) -> np.ndarray:
    return np.where(rng.random(i.shape) < 0.3, rng.choice([-1e30, 1e30], i.shape), rng.standard_normal(i.shape))


def _tiny(rng: np.random.Generator, i: Input) -> np.ndarray:
    """Denormals and what is just above them."""
    return rng.choice([5e-324, -5e-324, 1e-310, -1e-310, 1e-30, 1.0], i.shape)


def _ties(rng: np.random.Generator, i: Input) -> np.ndarray:
    """Few distinct values: equal maxima, products that coincide."""
    return rng.choice([-1.0, 0.0, 1.0, 2.0], i.shape)


def _offset(rng: np.random.Generator, i: Input) -> np.ndarray:
    """A mean far above the spread."""
    return 1000.0 + 1e-3 * rng.standard_normal(i.shape)


def _rows(rng: np.random.Generator, i: Input) -> np.ndarray:
    """What decides a mask is alike along whole rows, so that some are wholly masked."""
    if not i.name.startswith("m") or not i.shape:
        return _plain(rng, i)
    along = int(rng.integers(len(i.shape)))
    return np.broadcast_to(rng.choice([-9.0, 9.0], [1 if d == along else n for d, n in enumerate(i.shape)]), i.shape)


def _masked(rng: np.random.Generator, i: Input) -> np.ndarray:
    """Every mask holds, or none."""
    return np.full(i.shape, rng.choice([-9.0, 9.0])) if i.name.startswith("m") else _plain(rng, i)


KINDS: dict[str, Generator] = {
    "plain": _plain,
    "ties": _ties,
    "rows masked": _rows,
    "all masked": _masked,
    "offset": _offset,
    "huge": _huge,
    "tiny": _tiny,
}


def arrays(program: Program, kind: str, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """The program's inputs, float64; masks are decided by inputs whose names begin with m."""
    out = {}
    for i in program.inputs:
        lo, hi = i.range or (-np.inf, np.inf)
        x = np.array(KINDS[kind](rng, i), dtype=np.float64)
        out[i.name] = np.where(x < lo, lo, np.where(x > hi, hi, x))  # np.clip would lose -0.0
    return out
