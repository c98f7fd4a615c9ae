"""Questions about a fold's monoid and about the shapes of its coefficients, answered from the terms alone."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from .. import terms as T
from ..reference import evaluate_scalar
from ..terms import Monoid, Term


def is_fn(pivot: object) -> bool:
    return isinstance(pivot, tuple) and pivot[0] == "fn"


def is_payload(pivot: object) -> bool:
    return isinstance(pivot, tuple) and pivot[0] == "at"


def fold_needs(h: Monoid, comp: int, args: tuple[Term, ...]) -> tuple[list[int], list[int]]:
    n = len(h.pivots)
    return h.needed(comp, lambda j: T.is_num(args[n + j], 0.0))


@lru_cache(1 << 10)
def infinite_when_empty(e: Term) -> bool:
    """Is a pivot that is this function of components infinite where these are 0?  (NaN is seen to: any number serves there.)"""
    with np.errstate(all="ignore"):
        return bool(np.isinf(evaluate_scalar(e, dict.fromkeys(T.variables(e), np.float64(0.0)))))


@lru_cache(1 << 10)  # every lowering of a search asks for the same
def vanishes_at_identity(e: Term, pivots: tuple[tuple[int, str], ...]) -> bool:
    """Is the coefficient 0 whenever one of these max/min pivots r is at its identity and every R is finite?  Judged on structure:
    a factor exp(a·r + …) whose argument then goes to −inf, with r nowhere else in the product."""
    return bool(pivots) and all(_drops(e, f"r{p}", 1.0 if op == "max" else -1.0) for p, op in pivots)


def _drops(t: Term, name: str, down: float) -> bool:
    if t.op == "mul":
        hit = [a for a in t.args if name in T.variables(a)]
        return len(hit) == 1 and _drops(hit[0], name, down)
    return t.op == "un" and t.attr in ("exp", "exp2") and (slope(t.args[0], name) or 0.0) * down > 0


def slope(t: Term, name: str) -> float | None:
    """a if t is a·name + (terms without it), a constant; None otherwise."""
    if t.op == "var":
        return 1.0 if t.attr == name else None
    if t.op not in ("add", "mul"):
        return None
    hit = [a for a in t.args if name in T.variables(a)]
    a = slope(hit[0], name) if len(hit) == 1 else None
    if a is None or t.op == "add":
        return a
    rest = [x for x in t.args if x is not hit[0]]
    return a * math.prod(float(x.attr) for x in rest) if all(x.op == "num" for x in rest) else None


def negated(t: Term) -> Term | None:
    """b if the term is (−1)·b."""
    if t.op == "mul" and len(t.args) == 2:
        for x, y in (t.args, t.args[::-1]):
            if T.is_num(x, -1.0) and y.op != "num":
                return y
    return None


def difference(t: Term) -> tuple[Term, Term] | None:
    """(a, b) if the term is a + (−1)·b."""
    if len(t.args) != 2:
        return None
    for a, b in (t.args, t.args[::-1]):
        if (m := negated(b)) is not None and negated(a) is None:
            return a, m
    return None
