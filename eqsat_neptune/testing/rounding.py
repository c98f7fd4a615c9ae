"""What rounding may do to a program's outputs: float64 evaluation with bounds of what another dtype makes of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import numpy as np

from ..program import FLOATS, Program
from ..reference import Env, _assembled
from ..terms import PREDICATES, Term, postorder
from .conditioning import Approx, step

_EIGHTS = ("float8_e4m3fn", "float8_e5m2")  # of which inputs and outputs may be, but nothing is computed in them
# four units
_ROUNDING = {"float64": 2e-15, "float32": 2.4e-7, "float16": 2e-3, "bfloat16": 1.6e-2} | dict(zip(_EIGHTS, (0.25, 0.5)))
# beyond the largest a result may overflow, below the least it may vanish
_LARGEST = {"float64": 1e300, "float32": 1e37, "float16": 3e4, "bfloat16": 1e37} | dict(zip(_EIGHTS, (400.0, 5e4)))
_LEAST = {"float64": 1e-300, "float32": 1e-37, "float16": 6e-8, "bfloat16": 1e-37} | dict(zip(_EIGHTS, (2e-3, 2e-5)))
_SLACK = 8.0
# relative to the output's largest element
_FLOOR = {"float64": 1e-9, "float32": 4e-5, "float16": 1e-2, "bfloat16": 6e-2} | dict(zip(_EIGHTS, (0.25, 0.5)))
_EXACT = ("input", "iota", "num", "view", "gather", "where")
_CHOOSING = ("max", "min")  # what gives one of its arguments: NaN if one is
# all up to here are exact
_INTEGERS = {"float64": 2.0**53, "float32": 2.0**24, "float16": 2.0**11, "bfloat16": 2.0**8} | dict(zip(_EIGHTS, (16.0, 8.0)))
_KEEPS_INTEGERS = ("neg", "abs", "sign", "floor", "ceil", "round", "trunc", "floordiv", "mod")


def worst(program: Program) -> str:
    """The least exact dtype that a program computes in or gives.  Inputs of eight bits are as exact as others, until they are stored."""
    return max(_used(program), key=_ROUNDING.__getitem__)


def _used(program: Program) -> list[str]:
    inputs = [i.dtype for i in program.inputs if i.dtype not in _EIGHTS]
    return [d for d in (program.compute_dtype, *inputs, *(o.dtype for o in program.outputs)) if d in _ROUNDING]


def reference(
    program: Program, values: Sequence[np.ndarray], dtype: str | None = None, stray: bool = False
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Outputs in float64, and bounds of what rounding in a dtype (None: the program's least exact one) may do to them: inf where it
    cannot be told.  Rules take inputs for finite, so a NaN among them need not show where arithmetic can make it vanish, as in x − x,
    but it must where it is only compared or chosen, and nowhere else.  stray: what is read beyond the end of an axis is NaN, as on a
    GPU, not an InputError."""
    used = [dtype] if dtype else _used(program)
    dtype = dtype or worst(program)
    ends = max(_LEAST[d] for d in used), min(_LARGEST[d] for d in used)  # the least exact dtype need not have the smallest range
    odd = stray or any(np.isnan(x.astype(np.float64)).any() for x in values)
    env = Env(program.axes, {i.name: x.astype(np.float64) for i, x in zip(program.inputs, values)}, sure_zeros=False)
    memo: dict[Term, Approx] = {}
    for t in postorder(o.term for o in program.outputs):
        args = [memo[a] for a in t.args]
        one = _gathered(t, args, env) if stray and t.op == "gather" else step(t.op, t.attr, args, env)
        new = _rounded(t, one, args, env, dtype, *ends)
        memo[t] = replace(new, error=np.where(np.isnan(new.x), np.inf, new.error)) if odd and _computes(t) else new
    wants = [_assembled(o, memo[o.term].value, env) for o in program.outputs]
    for o, w in zip(program.outputs, wants):
        if o.dtype == "float8_e4m3fn":
            w[np.isinf(w)] = np.nan  # it has no infinity
    bounds = []
    for o in program.outputs:
        axes, bound = memo[o.term].bound
        if o.dtype not in FLOATS:  # these have no NaN, and integers no infinity
            x = memo[o.term].x
            bound = np.where(np.isnan(x) | (np.isinf(x) & (o.dtype != "bool")), np.inf, bound)
        bounds.append(_assembled(replace(o, dtype="float64"), (axes, bound), env))
    return wants, bounds


def _gathered(t: Term, args: Sequence[Approx], env: Env) -> Approx:
    """A gather that gives NaN at positions that do not exist; it need not where what is read is computed, and may be so without a read
    (x − x)."""
    x, at = args
    last = env.size(t.attr) - 1  # type: ignore[arg-type]
    exists = (at.x >= 0) & (at.x <= last)
    new = step(t.op, t.attr, [x, replace(at, x=np.clip(np.nan_to_num(at.x), 0, last))], env)
    there = np.broadcast_to(env.expand((at.axes, exists), new.axes), new.x.shape)
    computed = any(map(_computes, postorder(t.args[:1])))
    return Approx(new.axes, np.where(there, new.x, np.nan), np.where(there, new.error, np.inf if computed else 0.0))


def _computes(t: Term) -> bool:
    """Does an operator more than compare and choose?"""
    return t.op not in _EXACT and t.attr not in PREDICATES and (t.attr[0] if t.op == "red" else t.attr) not in _CHOOSING  # type: ignore[index]


def _is_whole(t: Term, x: np.ndarray, most: np.ndarray | float, args: Sequence[Approx], dtype: str) -> bool:
    """Is this integer arithmetic, in numbers that the dtype has?  most: the largest that it may come by on its way."""
    if not (t.op in ("add", "mul", "red") or t.attr in _KEEPS_INTEGERS):
        return False
    exact = all((a.x == np.rint(a.x)).all() and np.isfinite(a.x).all() and not a.error.any() for a in args)
    return exact and bool((x == np.rint(x)).all()) and float(np.max(most, initial=0.0)) <= _INTEGERS[dtype]


def _rounded(t: Term, a: Approx, args: Sequence[Approx], env: Env, dtype: str, least: float, largest: float) -> Approx:
    """With the error of one more rounding, and of sums in any order."""
    if not _computes(t):
        return a
    scale = most = np.abs(a.x)
    lost: np.ndarray | np.bool = np.False_
    if t.op == "red" and t.attr[0] == "+":  # type: ignore[index]
        order, parts = env.explicit(t.attr[1], args[0].value, 0.0)  # type: ignore[index]
        total = np.abs(np.where(np.isfinite(parts), parts, 0.0)).sum(axis=0)
        _, (total,) = env.align([(tuple(order[1:]), np.asarray(total))])
        scale = most = np.maximum(scale, total) if total.ndim == a.x.ndim else scale
    elif t.op == "red" and t.attr[0] == "*":  # type: ignore[index]
        order, parts = env.explicit(t.attr[1], args[0].value, 1.0)  # type: ignore[index]
        size = np.abs(parts)
        high = np.prod(np.maximum(size, 1.0), axis=0)
        low = np.prod(np.minimum(np.where(size == 0, 1.0, size), 1.0), axis=0)
        _, (lost,) = env.align([(tuple(order[1:]), np.asarray((high > largest) | (low < least)))])
        lost = lost if lost.ndim == a.x.ndim else np.any(lost)  # in some order a part of the product leaves the range
        most = high
    elif t.op == "add":
        _, xs = env.align([b.value for b in args])
        scale = most = np.asarray(sum(np.abs(np.where(np.isfinite(x), x, 0.0)) for x in xs))
    elif t.op == "mul":
        _, xs = env.align([b.value for b in args])
        most = np.asarray(math.prod(np.maximum(np.abs(x), 1.0) for x in xs))
        lost = reduce(np.logical_or, (np.isfinite(x) & (np.abs(x) > largest) for x in xs))  # may be inf, and with 0 NaN
    if _is_whole(t, a.x, most, args, dtype):
        return Approx(a.axes, a.x, np.zeros_like(a.x))
    with np.errstate(all="ignore"):
        error = a.error + _ROUNDING[dtype] * np.where(np.isfinite(a.x), scale, 0.0) + np.where(a.x != 0, least, 0.0)
        error = np.where(lost | (np.isfinite(a.x) & (np.abs(a.x) > largest)), np.inf, error)
    return Approx(a.axes, a.x, np.broadcast_to(error, a.x.shape))


def difference(want: np.ndarray, bound: np.ndarray, got: np.ndarray, dtype: str) -> str | None:
    """What differs by more than its bound allows, if anything does.  Integers and truth values are right or wrong: nothing is allowed
    for the size of others."""
    floor = _FLOOR[dtype] if want.dtype.kind == "f" else 0.0
    if want.shape != got.shape:
        return f"shape {got.shape} instead of {want.shape}"
    want = want.astype(np.float64)
    sure = np.isfinite(bound)
    scale = np.abs(want[np.isfinite(want) & sure]).max(initial=0.0)
    alike = (want == got) | (np.isnan(want) & np.isnan(got))
    finite = np.isfinite(want) & np.isfinite(got)
    gap = np.abs(np.where(finite, want, 0.0) - np.where(finite, got, 0.0))
    near = finite & (gap <= _SLACK * np.where(sure, bound, 0.0) + floor * scale + _LEAST[dtype])
    bad = sure & ~(alike | near)
    if not bad.any():
        return None
    at = tuple(int(n) for n in np.argwhere(bad)[0])
    return f"{got[at]:.9g} instead of {want[at]:.9g} ± {bound[at]:.2g} at {at} ({int(bad.sum())} of {bad.size} elements)"
