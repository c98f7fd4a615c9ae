"""Evaluation with running error bounds, so that two values can be compared to the last digit that both have.

Every value carries a bound of what rounding did to it.  A bound of inf means that float64 cannot tell: a sum overflowed, a
difference that is rounding alone was divided by, a comparison could go either way.  −inf, inf and NaN that are meant (a mask,
1/0, 0/0) have bound 0.  An extremum of zeros of both signs may have either sign, and in programs (`Env.sure_zeros`) so may 0·(−1), which
a plan may take for 0: their bound is not 0.  A fixed tolerance would be too lax for well-conditioned terms and too strict where terms
cancel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..reference import BI, UN, Env, Value, apply

_U = 2.3e-16  # twice the unit roundoff
_TINY = 1e-323  # what is lost where a result underflows
_SLACK = 8.0
_STEPS = ("floor", "ceil", "round", "trunc", "sign", "not")
_OVERFLOWING = ("exp", "exp2", "expm1", "sinh", "cosh")
_LOGIC = ("and", "or", "xor")


@dataclass(frozen=True, slots=True)
class Approx:
    """A value and a bound of its error, both over the same axes."""

    axes: tuple[str, ...]
    x: np.ndarray
    error: np.ndarray

    @property
    def value(self) -> Value:
        return self.axes, self.x

    @property
    def bound(self) -> Value:
        return self.axes, self.error


def step(op: str, attr: Any, args: Sequence[Approx], env: Env) -> Approx:
    """One operator, as `reference.apply`, with the error bound of its result."""
    axes, x = apply(op, attr, [a.value for a in args], env)
    x = np.asarray(x)
    if not env.signed_zeros and op != "un":
        x = x + 0.0  # −0 + 0 is 0
    with np.errstate(all="ignore"):
        error = _error(op, attr, args, axes, x, env)
    return Approx(axes, x, np.broadcast_to(np.where(np.isnan(error), np.inf, error), x.shape))


def _error(op: str, attr: Any, args: Sequence[Approx], axes: tuple[str, ...], x: np.ndarray, env: Env) -> Any:
    match op:
        case "num":  # a constant that a rule computed is rounded
            short = not np.isfinite(x) or float(x * 2.0**20).is_integer()
            return 0.0 if short else 2e-14 * np.abs(x)
        case "input" | "iota":
            return 0.0
        case "view" | "gather":
            found = apply(op, attr, [args[0].bound, *(a.value for a in args[1:])], env)
            _, (error, *elsewhere) = env.align([found, *((a.axes, a.error >= 0.5) for a in args[1:])])
            return np.where(elsewhere[0], np.inf, error) if elsewhere else error
        case "red":
            return _reduced(attr[0], attr[1], args[0], axes, x, env)
        case "fold":
            known = [np.abs(np.where(np.isfinite(v), v, 0.0)).max(initial=0.0) for v in (x, *(a.x for a in args))]
            total = sum(float(a.error.max(initial=0.0)) for a in args)
            overflow = ~np.isfinite(x) & all(np.isfinite(a.x).all() for a in args)  # as parts moved from one pivot to another
            return np.where(overflow, np.inf, np.where(np.isfinite(x) | np.isinf(total), 1e-12 * max(known) + total, 0.0))
    _, xs = env.align([a.value for a in args])
    _, es = env.align([a.bound for a in args])
    match op:
        case "add":
            return _added(xs, es)[1]
        case "mul":
            z, e = xs[0], es[0]
            for y, f in zip(xs[1:], es[1:]):
                z, e = _times(z, e, y, f, env.sure_zeros)
            return e
        case "un":
            return _unary(attr, xs[0], es[0])
        case "bi":
            return _binary(attr, xs, es)
        case "where":
            return np.where(_unsure(xs[0], es[0]), np.inf, np.where(xs[0] != 0, es[1], es[2]))
    raise ValueError(f"operator {op!r} has no error bound")


def _unsure(x: Any, e: Any) -> Any:
    """May x be 0 and also something else?"""
    return (e > 0) & (np.abs(x) <= e)


def _added(xs: Sequence[Any], es: Sequence[Any]) -> tuple[Any, Any]:
    total, error, finite = xs[0], es[0], np.isfinite(xs[0])
    for x, e in zip(xs[1:], es[1:]):
        s = total + x
        back = s - total
        lost = np.abs((total - (s - back)) + (x - back))  # exactly what rounding took
        error = error + e + np.where(np.isfinite(lost), lost, 0.0)
        finite = finite & np.isfinite(x)
        total = s
    return total, _settled(total, error, finite)


def _settled(x: Any, error: Any, finite: Any) -> Any:
    """The bound of a result, where NaN and inf may be meant: they are if an argument (`finite`: none) has them already."""
    return np.where(np.isinf(error), np.inf, np.where(np.isfinite(x), error, np.where(finite, np.inf, 0.0)))


def _times(x: Any, e: Any, y: Any, f: Any, sure_zeros: bool) -> tuple[Any, Any]:
    z = x * y
    exact = _power_of_two(x) | _power_of_two(y)
    error = np.abs(x) * f + np.abs(y) * e + e * f + np.where(exact, 0.0, _U * np.abs(z)) + _TINY
    zero = ((x == 0) & (e == 0) & np.isfinite(y)) | ((y == 0) & (f == 0) & np.isfinite(x))
    error = np.where(zero, 0.0 if sure_zeros else np.where(np.signbit(z), _TINY, 0.0), np.where(exact & (e == 0) & (f == 0) & (np.abs(z) > 1e-300), 0.0, error))
    finite = np.isfinite(x) & np.isfinite(y)
    error = _settled(z, np.where(finite, error, np.maximum(np.where(np.isinf(e), e, 0.0), np.where(np.isinf(f), f, 0.0))), finite)
    loose = (np.isinf(x) & _unsure(y, f)) | (np.isinf(y) & _unsure(x, e))  # inf·(0 or not)
    return z, np.where(loose & ~(np.isnan(x) | np.isnan(y)), np.inf, error)


def _power_of_two(x: Any) -> Any:
    return np.abs(np.frexp(x)[0]) == 0.5


def _unary(f: str, x: Any, e: Any) -> Any:
    fn = UN[f]
    y = np.asarray(fn(x), float)
    if f in ("neg", "abs"):
        return e
    if f in ("isnan", "isinf", "isfinite"):
        return np.where(np.isinf(e), np.inf, 0.0)
    below, above = np.asarray(fn(x - e), float), np.asarray(fn(x + e), float)
    if f in _STEPS:
        return np.where(np.isinf(e) | ((e > 0) & ((below != above) | ((f in ("sign", "not")) & _unsure(x, e)))), np.inf, 0.0)
    if f in ("sin", "cos"):
        error = e + 4 * _U
    elif f == "cosh":
        error = np.sinh(np.abs(x) + e) * e + 4 * _U * np.abs(y)
    else:
        error = np.maximum(np.abs(above - y), np.abs(y - below)) + 4 * _U * np.abs(y)
    error = np.where(np.isinf(x) & (e == 0) & np.isfinite(y), 0.0, error + _TINY)
    between = np.asarray(fn(np.clip(0.0, x - e, x + e)), float)  # where functions are not defined that are defined at neither end
    same = (e == 0) | ((below == y) & (above == y)) | (np.isnan(below) & np.isnan(above) & np.isnan(between) & np.isnan(y))
    overflow = np.isfinite(x) & np.isinf(y) & ((f in _OVERFLOWING) | ((f in ("recip", "rsqrt")) & (x != 0)))
    error = np.where(np.isfinite(y), error, np.where(same & ~overflow, 0.0, np.inf))
    pole = (f == "recip") & _unsure(x, e) | ((f == "tan") & (e > 1e-6))
    return np.where(np.isinf(e) | pole, np.inf, error)


def _binary(f: str, xs: Sequence[Any], es: Sequence[Any]) -> Any:
    (x, y), (e, d) = xs, es
    lost = np.isinf(e) | np.isinf(d)
    if f in ("max", "min"):
        either = (x == 0) & (y == 0) & (np.signbit(x) != np.signbit(y))
        error = np.maximum(np.maximum(e, d), np.where(either, _TINY, 0.0))
        return np.where(lost, np.inf, np.where(np.isfinite(BI[f](x, y)), error, 0.0))
    if f in ("lt", "le", "eq", "ne"):
        near = np.isfinite(x) & np.isfinite(y) & (np.abs(x - y) <= e + d) & (e + d > 0)
        return np.where(lost | near, np.inf, 0.0)
    if f in _LOGIC:
        return np.where(lost | _unsure(x, e) | _unsure(y, d), np.inf, 0.0)
    z = np.asarray(BI[f](x, y), float)
    return np.where((e > 0) | (d > 0), np.inf, _settled(z, 4 * _U * np.abs(z) + _TINY, np.isfinite(x) & np.isfinite(y)))


def _reduced(f: str, axis: str, a: Approx, axes: tuple[str, ...], x: np.ndarray, env: Env) -> Any:
    pad = {"+": 0.0, "*": 1.0, "max": -np.inf, "min": np.inf}[f]
    order, parts = env.explicit(axis, a.value, pad)
    _, errors = env.explicit(axis, a.bound, 0.0)
    if f in ("max", "min"):
        zero, minus = parts == 0, np.signbit(parts)
        either = (np.max(parts, axis=0, initial=-np.inf) if f == "max" else np.min(parts, axis=0, initial=np.inf)) == 0
        either &= (zero & minus).any(axis=0) & (zero & ~minus).any(axis=0)
        error = np.maximum(errors.max(axis=0, initial=0.0), np.where(either, _TINY, 0.0))
        error = np.where(np.isinf(error), np.inf, np.where(np.isfinite(parts).any(axis=0), error, 0.0))
    elif f == "+":
        total = np.abs(np.where(np.isfinite(parts), parts, 0.0)).sum(axis=0)
        error = errors.sum(axis=0) + len(parts) * _U * total
        got = np.add.reduce(parts, axis=0)
        error = _settled(got, error, np.isfinite(parts).all(axis=0))
    else:
        z, error = np.ones(parts.shape[1:]), np.zeros(parts.shape[1:])
        for y, d in zip(parts, errors):
            z, error = _times(z, error, y, d, env.sure_zeros)
    _, (error,) = env.align([(tuple(order[1:]), np.asarray(error))])
    return np.broadcast_to(error, x.shape) if error.ndim == x.ndim else error


def disagree(a: Approx, b: Approx, env: Env, floor: float = 0.0) -> np.ndarray:
    """Where two values differ by more than rounding explains (and more than `floor`), over their joint axes."""
    _, (x, y) = env.align([a.value, b.value])
    _, (e, d) = env.align([a.bound, b.bound])
    with np.errstate(all="ignore"):
        alike = (x == y) | (np.isnan(x) & np.isnan(y))
        near = np.isfinite(x) & np.isfinite(y) & (np.abs(x - y) <= _SLACK * (e + d) + floor)
    return ~(alike | near | np.isinf(e) | np.isinf(d))
