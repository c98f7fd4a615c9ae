"""Derived merges: the laws hold, for random values, of whatever is derived; what has no merge is refused."""

from __future__ import annotations

import time

import numpy as np
import pytest
from eqsat_neptune.rules import repair

from eqsat_neptune.egraph import saturate
from eqsat_neptune.program import TensorSpec
from eqsat_neptune.programs import CASES
from eqsat_neptune.reference import evaluate_scalar, merge
from eqsat_neptune.terms import Monoid, Term, add, div, fold, is_num, mul, num, postorder, sub, un, var
from eqsat_neptune.testing import check_graph
from eqsat_neptune.trace import trace

C = [var(f"c{i}") for i in range(4)]
R = [var(f"R{i}") for i in range(3)]


def exp(x: Term) -> Term:
    return un("exp", x)


# skeleton → (pivots, components that it needs)
DERIVABLE = {
    "exponential": (exp(sub(C[0], R[0])), 1, 1),
    "scaled": (exp(sub(C[0], mul(0.125, R[0]))), 1, 1),
    "weighted exponential": (mul(exp(sub(C[0], R[0])), C[1], C[2]), 1, 1),
    "three terms": (exp(add(C[0], mul(-1.0, C[1]), mul(-1.0, R[0]))), 1, 1),
    "two maxima": (exp(sub(sub(C[0], R[0]), R[1])), 2, 1),
    "variance": (mul(sub(C[0], R[0]), sub(C[0], R[0])), 1, 3),
    "weighted variance": (mul(C[1], sub(C[0], R[0]), sub(C[0], R[0])), 1, 3),
    "variance about a quotient": (mul(C[1], sub(C[0], div(R[0], R[1])), sub(C[0], div(R[0], R[1]))), 2, 3),
    "covariance": (mul(sub(C[0], R[0]), sub(C[1], R[1])), 2, 4),
    "third moment": (mul(*[sub(C[0], R[0])] * 3), 1, 4),
    "centred product": (mul(sub(C[0], R[0]), C[1]), 1, 2),
    "exponential times centred": (mul(exp(sub(C[0], R[0])), sub(C[1], R[1]), C[2]), 2, 2),
    "quotient": (div(C[0], R[0]), 1, 2),
}
REFUSED = {
    "exponential of a quotient": (exp(div(sub(C[0], R[0]), R[1])), 2),
    "temperature": (mul(C[1], exp(div(C[0], R[0]))), 1),
    "hyperbolic tangent": (un("tanh", sub(C[0], R[0])), 1),
    "square root": (un("sqrt", sub(C[0], R[0])), 1),
    "reciprocal of a difference": (un("recip", sub(C[0], R[0])), 1),
}


def values(rng: np.random.Generator, n: int, pivots: int) -> tuple[dict, dict, dict]:
    """c (positive, n of each), old and new pivots (away from 0)."""
    c = {f"c{i}": rng.uniform(0.5, 2.0, n) for i in range(4)}
    old = {f"r{p}": rng.uniform(0.5, 2.0) for p in range(pivots)}
    return c, old, {f"R{p}": rng.uniform(0.5, 2.0) for p in range(pivots)}


@pytest.mark.parametrize("name", DERIVABLE)
def test_change_of_reference(name: str) -> None:
    """Σ bᵢ(c, R) = Σⱼ coefᵢⱼ(r, R) Σ bⱼ(c, r), coefficients compose, and at r = R they change nothing."""
    g, pivots, size = DERIVABLE[name]
    d = repair.derive(g, pivots)
    assert d is not None and len(d.basis) == size
    rng = np.random.default_rng(0)
    for _ in range(5):
        c, old, new = values(rng, 7, pivots)
        third = {k.replace("R", "r"): v for k, v in new.items()}

        def total(i: int, at: dict, c: dict = c) -> float:
            return float(np.sum(np.broadcast_to(evaluate_scalar(d.basis[i], c | at), 7)))

        for i, row in enumerate(d.coef):
            moved = sum(evaluate_scalar(e, old | new) * total(j, old) for j, e in row)
            assert moved == pytest.approx(total(i, third), rel=1e-9)
            for j, e in row:
                same = evaluate_scalar(e, third | new)
                assert i not in [k for k, _ in row] or same == pytest.approx(1.0 if i == j else 0.0, abs=1e-9)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    g, pivots = REFUSED[name]
    assert repair.derive(g, pivots) is None


def test_basis_is_centred() -> None:
    """The variance never falls back on Σc² and Σc."""
    d = repair.derive(*DERIVABLE["variance"][:2])
    for b in d.basis:
        for t in postorder([b]):
            if t.op == "mul":
                assert C[0] not in t.args
    assert C[0] not in d.basis


def test_division_by_a_pivot_is_an_obligation() -> None:
    d = repair.derive(*DERIVABLE["quotient"][:2])
    assert list(repair.obligations(d)) == [("nonzero", 0)]
    assert list(repair.obligations(repair.derive(*DERIVABLE["exponential"][:2]))) == []


def test_remembered() -> None:
    g, pivots = REFUSED["exponential of a quotient"]
    repair.derive(g, pivots)
    repair.derive(*DERIVABLE["variance"][:2])
    start = time.process_time()
    for _ in range(100):
        assert repair.derive(g, pivots) is None and repair.derive(*DERIVABLE["variance"][:2]) is not None
    assert time.process_time() - start < 0.05


@pytest.mark.parametrize(
    ("t", "want"),
    [
        (add(C[0], mul(-1.0, C[0])), num(0.0)),
        (add(mul(2.0, C[0], C[1]), mul(C[1], C[0], -2.0)), num(0.0)),
        (add(mul(-0.5, add(C[0], C[1])), mul(0.5, C[0])), mul(C[1], -0.5)),
        (mul(C[0], un("recip", C[0]), C[1]), C[1]),
        (exp(add(C[0], mul(-1.0, C[0]))), num(1.0)),
        (mul(num(0.0), C[0]), num(0.0)),
    ],
)
def test_simplified(t: Term, want: Term) -> None:
    assert repair.simplified(t) is want


# ------------------------------------------------------------------ in programs


def folds(name: str, size: str = "small") -> list:
    case = CASES[name]
    s = saturate(trace(case.function(size), *case.specs(size)))
    return [n for _, n in s.graph.items() if n.op == "fold"]


def kinds(h: Monoid) -> list[str]:
    return [p if isinstance(p, str) else p[0] for p in h.pivots]


@pytest.mark.parametrize(
    ("name", "pivots", "components"),
    [
        ("prefill_global", ["max"], 1),
        ("prefill_causal", ["max"], 1),
        ("logsumexp", ["max"], 1),
        ("variance", ["mean"], 3),
        ("layernorm", ["mean"], 3),
        ("layernorm_linear", ["mean"], 2),
        ("attention_dq", ["max", "fn"], 4),
        ("performer", ["max"], 1),
        ("sink_attention", ["max"], 1),
        ("differential_attention", ["max"], 1),
        ("kernel_regression", ["max"], 1),
        ("softmax_backward", ["max"], 1),
    ],
)
def test_found(name: str, pivots: list[str], components: int) -> None:
    assert any(kinds(n.attr[0]) == pivots and len(n.attr[0].coef) >= components for n in folds(name))


def test_pivots_are_extrema_over_one_axis() -> None:
    """Of an extremum over keys and features a sum over the keys takes that over the keys alone, if it has features; else it cannot."""

    def f(x, v):  # type: ignore[no-untyped-def]
        xp = x.__array_namespace__()
        top = xp.max(x, axis=(-2, -1), keepdims=True)
        return xp.exp(x - top).mT @ v, xp.sum(xp.exp(xp.max(x, axis=-1, keepdims=True) - top) * v, axis=-2)

    p = trace(f, TensorSpec((6, 4), "float32"), TensorSpec((6, 3), "float32"))
    found = saturate(p)
    g = found.graph
    assert check_graph(found, p)

    def pivots(c: int) -> set[frozenset[str]]:
        """Axes of the pivots of the folds that a class is a multiple of."""
        made = [m for n in g.nodes[c] if n.op == "mul" for a in n.args for m in g.nodes[a]]
        return {g.free[n.args[0]] for n in (*g.nodes[c], *made) if n.op == "fold"}

    k, m = (a for a, n in p.axes.items() if n in (6, 4))
    assert pivots(g.outputs[0]) == {frozenset({k, m})}
    assert pivots(g.outputs[1]) == {frozenset({k})}


def test_numerator_and_denominator_agree() -> None:
    """Both are folds with the same pivot and the same merge, so that one state serves both."""
    case = CASES["prefill_causal"]
    p = trace(case.function("small"), *case.specs("small"))
    g = saturate(p).graph
    (c,) = g.outputs
    quotients = []
    for n in g.nodes[c]:
        if n.op == "mul" and len(n.args) == 2:
            parts = [next((m for m in g.nodes[a] if m.op == "fold"), None) for a in n.args]
            inverse = [m.args[0] for a in n.args for m in g.nodes[a] if m.op == "un" and m.attr == "recip"]
            below = [m for a in inverse for m in g.nodes[a] if m.op == "fold"]
            quotients += [(t, b) for t in parts if t for b in below]
    assert any(t.attr[0] == b.attr[0] and t.args[0] == b.args[0] for t, b in quotients)


def test_singletons_are_simple() -> None:
    """One element at its own pivot: e⁰ is 1 and x − x is 0, not something to compute."""
    for name, want in (("prefill_causal", {"where", "input", "num"}), ("variance", {"input", "num"})):
        case = CASES[name]
        g = saturate(trace(case.function("small"), *case.specs("small"))).graph
        singles = [g.nodes[a][0].op for _, n in g.items() if n.op == "fold" for a in n.args]
        assert singles and set(singles) <= want


@pytest.mark.parametrize("name", ["prefill_causal", "variance", "attention_dq", "covariance"])
def test_merge_is_associative(name: str) -> None:
    """Any bracketing of single elements gives the same state, with empty ones among them."""
    if name == "covariance":
        d = repair.derive(*DERIVABLE["covariance"][:2])
        count = next(i for i, b in enumerate(d.basis) if is_num(b, 1.0))
        monoids = [Monoid((("mean", count), ("mean", count)), d.coef)]
    else:
        monoids = list(dict.fromkeys(n.attr[0] for n in folds(name)))
    rng = np.random.default_rng(0)
    for h in monoids:
        states = []
        for i in range(7):
            exists = np.array(float(i != 3))
            pivots = [np.array(rng.standard_normal()) for _ in h.pivots]
            xs = [np.array(rng.uniform(0.5, 2.0)) for _ in h.coef]
            for p, kind in enumerate(h.pivots):
                if isinstance(kind, tuple) and kind[0] == "mean":
                    xs[kind[1]] = np.array(1.0)
                elif isinstance(kind, tuple):
                    pivots[p] = np.array(evaluate_scalar(kind[1], {f"y{j}": x for j, x in enumerate(xs)}))
                elif i == 5:
                    pivots[p] = np.array(-np.inf if kind == "max" else np.inf)
            states.append((exists, pivots, xs))
        left = states[0]
        for s in states[1:]:
            left = merge(h, left, s)
        right = states[-1]
        for s in reversed(states[:-1]):
            right = merge(h, s, right)
        for a, b in zip((*left[1], *left[2]), (*right[1], *right[2])):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def test_singletons_of_zero_are_refused() -> None:
    """A merge that divides by its pivot needs every element known not to be 0, not just the total."""
    from eqsat_neptune import xp

    def f(x, w):  # Σ w·exp(x/Σw …) has no merge; Σ x / max w has one only where w ≠ 0
        return xp.sum(x / xp.max(w, axis=-1, keepdims=True), axis=-1)

    for bounds in (None, (0.5, 2.0)):
        p = trace(f, TensorSpec((3, 5), "float64"), TensorSpec((3, 5), "float64", range=bounds))
        s = saturate(p)
        verdict = check_graph(s, p)
        assert verdict, verdict.counterexample


def test_limits_of_time() -> None:
    """A derivation is a few dozen milliseconds, a refusal too (generous: machines are shared)."""
    repair.derive(exp(sub(C[0], R[0])), 1)
    repair.forget()
    start = time.process_time()
    for g, pivots, _ in DERIVABLE.values():
        repair.derive(g, pivots)
    for g, pivots in REFUSED.values():
        repair.derive(g, pivots)
    assert time.process_time() - start < 0.25 * (len(DERIVABLE) + len(REFUSED))


def test_fold_terms_have_needed_parts() -> None:
    for n in folds("attention_dq"):
        h, j, k = n.attr
        assert len(n.args) == h.size and 0 <= j < h.size
        assert fold(h, j, k, [num(1.0)] * h.size).op == "fold"
