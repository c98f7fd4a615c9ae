"""Merges where something is infinite: sums that move from one pivot to another one are equal to the source at −∞ and +∞ too, or are
no folds.

The pivot that the source has (P) is computed from the fold's own (M, a maximum, minimum, mean or sum) and from what does not vary
along the axis; both may be infinite, each where the other is not.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from eqsat_neptune.rules.infinities import hold

from eqsat_neptune import xp
from eqsat_neptune.egraph import Saturated, saturate
from eqsat_neptune.graph import Graph, Node
from eqsat_neptune.program import Program, TensorSpec
from eqsat_neptune.scores import may_be_masked
from eqsat_neptune.terms import Affine, Term, add, fold, make, mul, num, red, un, var
from eqsat_neptune.terms import Monoid as M_
from eqsat_neptune.testing import check_graph
from eqsat_neptune.trace import trace

ROWS, KEYS = 6, 4
OWN: dict[str, Callable] = {f: lambda s, f=f: getattr(xp, f)(s, axis=-1, keepdims=True) for f in ("max", "min", "mean", "sum")}
PIVOTS: dict[str, Callable] = {  # of the fold's pivot, a value of each row and a condition on each row
    "itself": lambda m, r, c: m,
    "twice": lambda m, r, c: 2.0 * m,
    "min": lambda m, r, c: xp.minimum(m, r),
    "max": lambda m, r, c: xp.maximum(m, r),
    "sum": lambda m, r, c: m + r,
    "sum of min": lambda m, r, c: xp.minimum(m, r) + r,
    "sum of max": lambda m, r, c: xp.maximum(m, r) + r,
    "max of sum": lambda m, r, c: xp.maximum(m + r, r),
    "max of half": lambda m, r, c: xp.maximum(0.5 * m, r),
    "max of negative": lambda m, r, c: xp.maximum(-m, r),
    "min with 0": lambda m, r, c: xp.minimum(m, 0.0),
    "max with 0": lambda m, r, c: xp.maximum(m, 0.0),
    "min of max": lambda m, r, c: xp.minimum(xp.maximum(m, r), 0.0),
    "max of min": lambda m, r, c: xp.maximum(xp.minimum(m, r), 0.0),
    "chosen": lambda m, r, c: xp.where(c, m, r),
    "or -inf": lambda m, r, c: xp.where(c, m, -xp.inf),
    "or inf": lambda m, r, c: xp.where(c, m, xp.inf),
    "unless empty": lambda m, r, c: xp.where(m == -xp.inf, 0.0, m),
    "unless infinite": lambda m, r, c: xp.where(xp.isinf(m), r, m),
    "the greater": lambda m, r, c: xp.where(m > r, m, r),
    "the smaller": lambda m, r, c: xp.where(m < r, m, r),
    "magnitude": lambda m, r, c: xp.abs(m),
}
BODIES: dict[str, Callable] = {
    "exp": lambda s, p, v, r: xp.exp(s - p),
    "weighted": lambda s, p, v, r: xp.exp(s - p) * v,
    "doubled": lambda s, p, v, r: xp.exp(2.0 * s - 2.0 * p),
    "with a term": lambda s, p, v, r: xp.exp(s - p + r),
    "with a factor": lambda s, p, v, r: xp.exp(s - p) * xp.exp(r),
    "backwards": lambda s, p, v, r: xp.exp(p - s),
    "negative": lambda s, p, v, r: xp.exp(-s - p),
    "square": lambda s, p, v, r: (s - p) * (s - p),
    "centred": lambda s, p, v, r: (s - p) * v,
    "entropy": lambda s, p, v, r: xp.exp(s - p) * (s - p),
    "another's": lambda s, p, v, r: xp.exp(v - p),
    "sum of two": lambda s, p, v, r: xp.exp(s + v - p),
    "times the pivot": lambda s, p, v, r: xp.exp(s - p) * p,
    "where": lambda s, p, v, r: xp.where(v > 0.0, xp.exp(s - p), 0.0),
    "masked": lambda s, p, v, r: xp.exp(xp.where(v > 0.0, s, -xp.inf) - p),
}
SCORES: dict[str, Callable] = {
    "as given": lambda s, w: s,
    "or -inf": lambda s, w: xp.where(w > 0.0, s, -xp.inf),
    "or inf": lambda s, w: xp.where(w > 0.0, s, xp.inf),
}
BESIDE: dict[str, Callable] = {
    "as given": lambda r, c: r,
    "or -inf": lambda r, c: xp.where(c, r, -xp.inf),
    "or inf": lambda r, c: xp.where(c, r, xp.inf),
}


def program(own: str, pivot: str, body: str, scores: str, beside: str) -> Program:
    def f(s: Any, v: Any, r: Any, c: Any, w: Any) -> Any:
        s, r = SCORES[scores](s, w), BESIDE[beside](r, c > 0.0)
        return xp.sum(BODIES[body](s, PIVOTS[pivot](OWN[own](s), r, c > 0.0), v, r), axis=-1)

    shapes = ((ROWS, KEYS), (ROWS, KEYS), (ROWS, 1), (ROWS, 1), (ROWS, KEYS))
    return trace(f, *(TensorSpec(x, "float64") for x in shapes))


def values(p: Program) -> dict[str, np.ndarray]:
    """Every row has another mixture of what is masked; inputs that may hold −∞ do."""
    rng = np.random.default_rng(0)
    s, v, w = (rng.standard_normal((ROWS, KEYS)) for _ in range(3))
    r, c = 3 * rng.standard_normal((ROWS, 1)), np.array([[-1.0], [1], [1], [-1], [-1], [1]])
    w[[0, 5]], w[[1, 4]], w[2:4, :2] = 1.0, -1.0, [-1.0, 1.0]
    scores = may_be_masked(p, [o.term for o in p.outputs])
    if "s" in scores:
        s[[1, 4]], s[2, 0], s[3, 1] = -np.inf, -np.inf, -np.inf
    if "r" in scores:
        r[[0, 3, 4]] = -np.inf
    if "v" in scores:
        v[1], v[2, 1], v[3, 0] = -np.inf, -np.inf, -np.inf
    return {"s": s, "v": v, "r": r, "c": c, "w": w}


def saturated(*names: str) -> Saturated:
    p = program(*names)
    s = saturate(p)
    verdict = check_graph(s, p, arrays=values(p), block=2)
    assert verdict, verdict.counterexample
    return s


def folds(s: Saturated) -> int:
    return sum(n.op == "fold" for _, n in s.graph.items())


@pytest.mark.parametrize(
    "names",
    [
        ("max", "min", "exp", "as given", "as given"),  # exp(s − P) is NaN where both are −∞, and a fold leaves out such an s
        ("max", "or -inf", "weighted", "as given", "as given"),
        ("max", "chosen", "weighted", "or -inf", "or -inf"),
        ("max", "the smaller", "exp", "or -inf", "or -inf"),
        ("max", "itself", "negative", "or inf", "as given"),  # 0, where exp(M − M) is NaN
        ("max", "itself", "another's", "as given", "as given"),  # a fold leaves out what its own pivot masks, not this one
        ("min", "max", "backwards", "as given", "as given"),
        ("max", "sum", "entropy", "as given", "or -inf"),
        ("max", "sum", "exp", "as given", "or -inf"),
        ("mean", "min", "square", "as given", "or -inf"),
    ],
    ids=" ".join,
)
def test_infinite_pivots(names: tuple[str, ...]) -> None:
    saturated(*names)


@pytest.mark.parametrize("pivot", ["chosen", "min with 0", "max of half", "unless infinite"])
@pytest.mark.parametrize("own", ["mean", "sum"])
@pytest.mark.parametrize("body", ["exp", "square"])
def test_values_beside_a_mean(own: str, pivot: str, body: str) -> None:
    """A class that is n·mean is n times the fold's pivot; what is computed from it is not."""
    assert folds(saturated(own, pivot, body, "as given", "as given"))


@pytest.mark.parametrize("pivot", ["itself", "max", "max with 0", "min with 0", "unless empty", "the greater", "sum of max"])
@pytest.mark.parametrize("body", ["exp", "weighted", "doubled"])
def test_what_is_equal_stays_a_fold(pivot: str, body: str) -> None:
    """Sinks, guards against empty rows, scores that are masked by conditions or as given."""
    if pivot != "sum of max":  # there −∞ + r may be −∞ where no maximum is
        assert folds(saturated("max", pivot, body, "as given", "as given"))
    assert folds(saturated("max", pivot, body, "or -inf", "as given")) or pivot == "sum of max"


@pytest.mark.slow
@pytest.mark.parametrize("own", OWN)
def test_pivots_and_bodies(own: str) -> None:
    every = list(itertools.product([own], PIVOTS, BODIES, SCORES, BESIDE))
    for names in random.Random(0).sample(every, 250):
        saturated(*names)


# ------------------------------------------------------------------ the question itself


def graph(facts: dict[str, str]) -> tuple[Graph, dict[Term, int], dict[str, Term]]:
    """A graph of inputs: name → "facts", along k if the name is a capital."""
    g, by_term, terms = Graph(extents={"k": 4}), {}, {}
    for c, (name, fs) in enumerate(facts.items()):
        axes = ("k",) if name.isupper() else ()
        terms[name] = make("input", (name, tuple(Affine(0, ((a, 1),)) for a in axes)), [])
        g.nodes[c] = [Node("input", terms[name].attr)]
        by_term[terms[name]] = c
        for f in fs.split():
            g.facts[f] = g.facts.get(f, frozenset()) | {c}
    return g, by_term, terms


H = M_(("max",), (((0, un("exp", add(var("r0"), mul(-1.0, var("R0"))))),),))


@pytest.mark.parametrize(
    ("s", "p", "want"),
    [
        ("finite masked", "finite masked", True),
        ("masked", "finite masked", True),
        ("masked", "masked", False),
        ("masked", "", False),
    ],
)
def test_hold(s: str, p: str, want: bool) -> None:
    """Σ exp(S − p) = exp(max S − p)·fold: only where p is finite, unless S is."""
    g, by_term, t = graph({"S": s, "p": p})
    top = red("max", "k", t["S"])
    left = red("+", "k", un("exp", add(t["S"], mul(-1.0, t["p"]))))
    right = mul(un("exp", add(top, mul(-1.0, t["p"]))), fold(H, 1, "k", [t["S"], num(1.0)]))
    assert hold(g, by_term, "k", left, right, [("max", t["S"])]) is want


@pytest.mark.parametrize("v", ["finite masked", "noinf", ""])
def test_weights_of_masked_keys_do_not_count(v: str) -> None:
    """Where S is −∞ an element of a fold is left out, whatever its weight is."""
    g, by_term, t = graph({"S": "masked", "V": v})
    top = red("max", "k", t["S"])
    left = red("+", "k", mul(un("exp", add(t["S"], mul(-1.0, top))), t["V"]))
    right = mul(un("exp", add(top, mul(-1.0, top))), fold(H, 1, "k", [t["S"], t["V"]]))
    assert hold(g, by_term, "k", left, right, [("max", t["S"])])
    assert not hold(g, by_term, "k", left, fold(H, 1, "k", [t["S"], t["V"]]), [("max", t["S"])])  # NaN if all is masked


def test_constants_that_are_infinite() -> None:
    g, by_term, t = graph({"S": "finite masked"})
    assert hold(g, by_term, "k", red("+", "k", t["S"]), red("max", "k", t["S"]))  # of finite values: nothing to see
    assert not hold(g, by_term, "k", add(red("+", "k", t["S"]), num(-math.inf)), red("max", "k", t["S"]))


# ------------------------------------------------------------------ zeros have no sign


@pytest.mark.parametrize(
    "f",
    [
        lambda x, y: xp.reciprocal(xp.sum(x * y * -0.2, axis=0)),
        lambda x, y: xp.sum(x / (y * -3.0), axis=0) - xp.sum(x / (y * 3.0), axis=0),
        lambda x, y: xp.exp(xp.reciprocal(xp.log(xp.exp(x - x)) * -1.0) - xp.reciprocal(x - x)),
        lambda x, y: y / (x * y) * -1.0 + 1.0 / (-1.0 * x),
    ],
)
@pytest.mark.parametrize("zeros", ["x", "y", "both"])
def test_poles(f: Callable, zeros: str) -> None:
    """−1·0 is 0, so 1/0 is no multiple of 1/(−1·0): the one is ∞, the other −∞, and a class has one value."""
    p = trace(f, *(TensorSpec((4,), "float64") for _ in "xy"))
    arrays = {i.name: np.zeros(4) if zeros in (i.name, "both") else np.array([1.0, -1.0, 2.0, 0.0]) for i in p.inputs}
    verdict = check_graph(saturate(p), p, arrays=arrays)
    assert verdict, verdict.counterexample
