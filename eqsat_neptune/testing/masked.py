"""Programs whose scores are masked, by positions or by an input, and masks that break compilers.  For tests; queries, keys and values
(…, nq, d), (…, nk, d), (…, nk, e), masks (nq, nk)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .. import xp
from ..programs import scores, softmax


def positions(s: Any) -> Any:
    """Key's place minus query's, the last query beside the last key."""
    return xp.arange(s.shape[-1]) - xp.arange(s.shape[-2])[:, None] - (s.shape[-1] - s.shape[-2])


def bottom_right_causal(q: Any, k: Any, v: Any) -> Any:
    s = scores(q, k)
    return softmax(xp.where(positions(s) <= 0, s, -xp.inf)) @ v


def bottom_right_window(q: Any, k: Any, v: Any) -> Any:
    s = scores(q, k)
    return softmax(xp.where((positions(s) <= 0) & (positions(s) > -4), s, -xp.inf)) @ v


def late_keys_only(q: Any, k: Any, v: Any) -> Any:
    s = scores(q, k)
    return softmax(xp.where(xp.arange(s.shape[-1]) >= 9, s, -xp.inf)) @ v


def gradient_by_position(q: Any, k: Any, v: Any) -> Any:
    """Of more queries than keys, the first have none."""
    s = scores(q, k)
    return softmax(xp.where(positions(s) <= 0, s, -xp.inf)).mT @ q


def no_key(q: Any, k: Any, v: Any) -> Any:
    s = scores(q, k)
    return softmax(xp.where(xp.arange(s.shape[-1]) < 0, s, -xp.inf)) @ v


def single_key(q: Any, k: Any, v: Any) -> Any:
    s = scores(q, k)
    return softmax(xp.where(xp.arange(s.shape[-1]) == s.shape[-1] - 2, s, -xp.inf)) @ v


BY_POSITION = [bottom_right_causal, bottom_right_window, late_keys_only, no_key, single_key, gradient_by_position]


def added(q: Any, k: Any, v: Any, m: Any) -> Any:
    return softmax(scores(q, k) + m) @ v


def with_logsumexp(q: Any, k: Any, v: Any, m: Any) -> Any:
    s = scores(q, k) + m
    return softmax(s) @ v, xp.logsumexp(s, axis=-1)


def logsumexp_written_out(q: Any, k: Any, v: Any, m: Any) -> Any:
    """NaN for a row without keys, as in NumPy; `xp.logsumexp` gives −inf."""
    s = scores(q, k) + m
    top = xp.max(s, axis=-1, keepdims=True)
    return xp.squeeze(top, -1) + xp.log(xp.sum(xp.exp(s - top), axis=-1))


def zero_without_keys(q: Any, k: Any, v: Any, m: Any) -> Any:
    s = scores(q, k) + m
    top = xp.max(s, axis=-1, keepdims=True)
    e = xp.exp(s - xp.where(xp.isfinite(top), top, 0.0))
    total = xp.sum(e, axis=-1, keepdims=True)
    return e @ v / xp.where(total == 0, 1.0, total)


def off_by_one(q: Any, k: Any, v: Any, m: Any) -> Any:
    s = scores(q, k) + m
    top = xp.maximum(xp.max(s, axis=-1, keepdims=True), 0.0)
    e = xp.exp(s - top)
    return e @ v / (xp.sum(e, axis=-1, keepdims=True) + xp.exp(-top))


def sigmoid(q: Any, k: Any, v: Any, m: Any) -> Any:
    return (1 / (1 + xp.exp(-(scores(q, k) + m)))) @ v


def chosen(q: Any, k: Any, v: Any, m: Any) -> Any:
    return softmax(xp.where(m > -1e30, scores(q, k), -xp.inf)) @ v


def large_but_finite(q: Any, k: Any, v: Any, m: Any) -> Any:
    return softmax(xp.where(m > -1e30, scores(q, k), -1e30)) @ v


def capped(q: Any, k: Any, v: Any, m: Any) -> Any:
    return softmax(50 * xp.tanh(scores(q, k) / 50) + m) @ v


def gradient(q: Any, k: Any, v: Any, m: Any) -> Any:
    p = softmax(scores(q, k) + m)
    dp = q @ v.mT
    return (p * (dp - xp.sum(p * dp, axis=-1, keepdims=True))) @ k


def causal_too(q: Any, k: Any, v: Any, m: Any) -> Any:
    s = scores(q, k) + m
    return softmax(xp.where(positions(s) <= 0, s, -xp.inf)) @ v


def gradient_of_values(q: Any, k: Any, v: Any, m: Any) -> Any:
    """A sum over the queries (of which q stands for the output's gradient, too): a row without keys has weights that are NaN, for
    all keys."""
    s = scores(q, k) + m
    return softmax(xp.where(positions(s) <= 0, s, -xp.inf)).mT @ q


def importance(q: Any, k: Any, v: Any, m: Any) -> Any:
    """How much each key counts over all queries."""
    s = scores(q, k) + m
    return xp.sum(softmax(xp.where(positions(s) <= 0, s, -xp.inf)), axis=-2)


BY_INPUT = [
    added, with_logsumexp, logsumexp_written_out, zero_without_keys, off_by_one, sigmoid, chosen, large_but_finite, capped, gradient,
    causal_too, gradient_of_values, importance,
]  # fmt: skip


def masks(nq: int, nk: int) -> Iterator[tuple[str, np.ndarray]]:
    rng = np.random.default_rng(5)
    hole = -np.inf

    def change(place: Any, value: float, of: float = 0.0) -> np.ndarray:
        m = np.full((nq, nk), of, np.float32)
        m[place] = value
        return m

    rows, keys = np.arange(nq), rng.integers(0, nk, nq)
    yield "nothing masked", change((), 0.0)
    yield "all masked", change((), hole)
    yield "first tile masked", change((slice(None), slice(0, 9)), hole)
    yield "only the first tile", change((slice(None), slice(9, None)), hole)
    yield "whole rows", change([0, nq // 2], hole)
    yield "one key a row", change((rows, keys), 0.0, hole)
    yield "at random", np.where((rng.random((nq, nk)) < 0.6) | (rows == 1)[:, None], hole, 0).astype(np.float32)
    yield "±1e4", np.where(rng.random((nq, nk)) < 0.6, -1e4, 1e4).astype(np.float32)
    key = min(5, nk - 1)
    yield "NaN for a key", change((slice(None), key), np.nan)
    yield "inf", change((2, key), np.inf)
    yield "nothing but a NaN", change((2, key), np.nan, hole)
