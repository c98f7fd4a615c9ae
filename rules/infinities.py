"""Does an equation hold where something is infinite?

Laws of merges are laws of real numbers.  Terms also take −∞ (masks) and what comes of it: a pivot that is not a part's own, such as
min(max s, r), may be −∞ where the fold's maximum is finite, and then exp(s − P) is NaN at a masked key, which a fold leaves out.
What may happen follows from the facts of the classes that a term reads, and how −∞ travels through sums, exponentials, maxima and
conditions is a matter of few values.  So both sides are evaluated, as `reference` says, on many draws of a few elements: reals, and
−∞ or +∞ wherever a fact does not exclude them.  NaN and infinities must agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np

from ..graph import Graph
from ..reference import Env, Value, evaluate_term
from ..terms import REDUCTIONS, Affine, Term, depends, make, postorder

_DRAWS = 256  # sets of values at once, along an axis of their own
_ELEMENTS = 3  # of the reduced axis: enough for a masked, a finite and another element
_BESIDE = 2  # of other axes
_DRAW = "\0draw"
_SPREAD = 1.5  # reals lie within it: nothing overflows
_LARGE = 1e6  # a number above it may be infinite but for rounding
_INNER = frozenset({"add", "mul", "un", "bi", "where"})


def hold(
    g: Graph, classes: Mapping[Term, int], k: str, left: Term, right: Term, dropping: Iterable[tuple[str, Term]] = ()
) -> bool:
    """Are two terms with reductions over k NaN, or infinite, in the same places, for all values that the facts of g allow?

    classes: class of each term (see `Graph.term`).  dropping: (max or min, its body) of each pivot of a fold on the right: an
    element where a body is the identity counts nothing there.  What no fact says to be a mask may be infinite too, but not along k
    beside such an element: its 0·∞ may show in one term and not in the other (a key that is masked may be skipped)."""
    dropping = list(dropping)
    roots = [left, right, *(t for _, t in dropping)]
    leaves, axes = _leaves(roots, k)
    if all(_real(g, classes.get(t)) for t in leaves) and not _infinite([left, right]):
        return True
    extents = {a: min(_ELEMENTS if a == k else _BESIDE, g.extents[a]) for a in axes} | {_DRAW: _DRAWS}
    rng = np.random.default_rng(0)
    masked: dict[str, np.ndarray] = {}
    loose: dict[str, np.ndarray] = {}
    inputs: dict[Term, Term] = {}
    along: set[str] = set()  # names of leaves that vary along k
    for i, t in enumerate(leaves):
        own = (_DRAW, *(a for a in axes if depends(t.free, a)))
        name = f"leaf{i}"
        along.update([name] if k in own else [])
        inputs[t] = make("input", (name, tuple(Affine(0, ((a, 1),)) for a in own)), [])
        masked[name], loose[name] = _values(g, classes.get(t), t, [extents[a] for a in own], rng)
    terms = [_over(t, inputs) for t in roots]
    everywhere = (_DRAW, *axes)

    def values(t: Term, env: Env, memo: dict[Term, Value] | None = None) -> np.ndarray:
        with np.errstate(all="ignore"):
            return np.broadcast_to(env.expand(evaluate_term(t, env, memo), everywhere), [extents[a] for a in everywhere])

    env = Env(extents, masked)
    dropped = np.zeros(_DRAWS, bool)
    for (kind, _), t in zip(dropping, terms[2:]):
        dropped |= (values(t, env) == REDUCTIONS[kind]).reshape(_DRAWS, -1).any(axis=1)
    for name, x in masked.items():
        if name in along:
            loose[name] = np.where(dropped.reshape(-1, *[1] * (x.ndim - 1)), x, loose[name])
    env = Env(extents, loose)
    memo: dict[Term, Value] = {}
    return not _apart(values(terms[0], env, memo), values(terms[1], env, memo)).any()


def _apart(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Where one is NaN and the other is not, or one infinite and the other not that infinity (nor so large that it might be)."""
    wild = (np.isinf(a) & (np.abs(b) < _LARGE)) | (np.isinf(b) & (np.abs(a) < _LARGE)) | (np.isinf(a) & np.isinf(b) & (a != b))
    return (np.isnan(a) != np.isnan(b)) | wild


def _leaves(terms: Iterable[Term], k: str) -> tuple[list[Term], list[str]]:
    """What the terms compute pointwise, or by reductions over k or by extrema, from; and the axes of these, k first."""
    out: dict[Term, None] = {}
    axes = {k: None}
    seen: set[Term] = set()
    todo = list(terms)
    while todo:
        t = todo.pop()
        if t in seen or t.op == "num":
            continue
        seen.add(t)
        if t.op in _INNER or _reduces(t, k):
            todo += t.args
            if t.op in ("red", "fold"):
                axes[t.attr[-1]] = None  # type: ignore[index]
        else:
            out[t] = None
    return list(out), list(axes)


def _reduces(t: Term, k: str) -> bool:
    """Over k; or over another axis an extremum (a pivot of many rows is no less than each row's own) or a sum of exponentials or of
    what is reduced over k: no sum of products of finite values is any of these."""
    if t.op not in ("red", "fold"):
        return False
    axis: str = t.attr[-1]  # type: ignore[index]
    if axis == k:
        return True
    if "." in axis:
        return False
    if t.op == "fold" or t.attr[0] in ("max", "min"):  # type: ignore[index]
        return True
    return any(
        (x.op == "un" and x.attr in ("exp", "exp2")) or (x.op in ("red", "fold") and x.attr[-1] == k) for x in postorder(t.args)
    )  # type: ignore[index]


def _over(root: Term, inputs: Mapping[Term, Term]) -> Term:
    """The term with its leaves replaced."""
    done: dict[Term, Term] = dict(inputs)
    todo = [root]
    while todo:
        t = todo[-1]
        if t in done:
            todo.pop()
        elif missing := [a for a in t.args if a not in done]:
            todo += missing
        else:
            done[t] = make(t.op, t.attr, [done[a] for a in t.args])
            todo.pop()
    return done[root]


def _real(g: Graph, c: int | None) -> bool:
    return c is not None and g.has(c, "finite")


def _infinite(terms: Iterable[Term]) -> bool:
    return any(t.op == "num" and not math.isfinite(t.attr) for t in postorder(terms))  # type: ignore[arg-type]


def _values(g: Graph, c: int | None, t: Term, shape: list[int], rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Values of a leaf: with masks alone, and with infinities of any kind."""
    if t.op == "iota":
        x = rng.integers(0, _ELEMENTS + 1, shape).astype(float)
        return x, x
    lo, hi = g.interval(c) if c is not None else (-math.inf, math.inf)
    low = lo if lo > _SPREAD else max(lo, -_SPREAD)
    high = hi if hi < -_SPREAD else min(hi, _SPREAD)
    x = rng.uniform(min(low, high), max(low, high), shape)
    if _real(g, c):
        return x, x
    hidden = (rng.random(shape) < 0.3) | (rng.random(shape[:1]) < 0.3).reshape(-1, *[1] * (len(shape) - 1))
    if c is not None and g.has(c, "masked"):
        x = np.where(hidden, -math.inf, x)
        return x, x
    if c is not None and g.has(c, "noinf"):
        return x, x
    either = np.where((rng.random(shape) < 0.5) & (hi == math.inf), math.inf, -math.inf if lo < 0 else x)
    return x, np.where(hidden, either, x)
