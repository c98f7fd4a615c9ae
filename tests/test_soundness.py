"""Every e-node of every class of a saturated e-graph evaluates to its class's value, and every fact holds of it.

Exactly: also where rows are wholly masked, so that what is NaN in the source is NaN whichever node is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from eqsat_neptune import xp
from eqsat_neptune.egraph import Saturated, saturate
from eqsat_neptune.graph import Node
from eqsat_neptune.program import Program, TensorSpec
from eqsat_neptune.programs import CASES
from eqsat_neptune.terms import postorder
from eqsat_neptune.testing import check_graph
from eqsat_neptune.trace import trace

FAST = (
    "prefill_global", "prefill_alibi", "decode_alibi", "layernorm_linear", "rope_attention", "attention_dq", "layers1",
    "logsumexp_sugar", "cross_entropy", "rmsnorm_quantize", "performer", "sink_attention", "differential_attention", "linear_attention",
)  # fmt: skip


def splittable(p: Program, longer: int = 16) -> list[str]:
    reduced = [t.attr[1] for t in postorder([o.term for o in p.outputs]) if t.op == "red"]
    return [a for a in dict.fromkeys(reduced) if p.axes[a] > longer]


def check(p: Program, s: Saturated, seeds: int = 2, block: int = 3) -> None:
    for seed in range(seeds):
        verdict = check_graph(s, p, seed, block=block + seed)
        assert verdict, verdict.counterexample


@pytest.mark.parametrize("name", FAST)
def test_textbook_program(name: str) -> None:
    p = trace(CASES[name].function("small"), *CASES[name].specs("small"))
    check(p, saturate(p, splittable=splittable(p)), seeds=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_any_textbook_program(name: str) -> None:
    p = trace(CASES[name].function("small"), *CASES[name].specs("small"))
    s = saturate(p, splittable=splittable(p))
    assert s.stop == "fixpoint"
    check(p, s, seeds=3)


# ------------------------------------------------------------------ masks


def masked(n: int, m: int, shift: int) -> Callable:
    """Scores of which row i sees keys j ≤ i − shift: rows before `shift` see none."""

    def scores(q, k):
        s = q @ k.mT
        i, j = xp.arange(n)[:, None], xp.arange(m)
        return xp.where(j + shift <= i, s, -xp.inf)

    return scores


def softmax(s):
    e = xp.exp(s - xp.max(s, axis=-1, keepdims=True))
    return e / xp.sum(e, axis=-1, keepdims=True)


def logsumexp(s):
    m = xp.max(s, axis=-1, keepdims=True)
    return m + xp.log(xp.sum(xp.exp(s - m), axis=-1, keepdims=True))


def backward(s, v, do):
    p = softmax(s)
    dp = do @ v.mT
    return (p * (dp - xp.sum(p * dp, axis=-1, keepdims=True))) @ v


PROGRAMS = {
    "quotient": lambda s, v, do: softmax(s) @ v,
    "logarithm": lambda s, v, do: logsumexp(s),
    "numerator": lambda s, v, do: xp.exp(s - xp.max(s, axis=-1, keepdims=True)) @ v,
    "denominator": lambda s, v, do: xp.sum(xp.exp(s - xp.max(s, axis=-1, keepdims=True)), axis=-1),
    "capped": lambda s, v, do: softmax(5.0 * xp.tanh(s / 5.0)) @ v,
    "scaled_after": lambda s, v, do: softmax(s * 0.5) @ v,
    "negated": lambda s, v, do: xp.exp(-xp.min(-s, axis=-1, keepdims=True) * 0.0 + xp.where(s > -9.0, s, -1.0)) @ v,
    "backward": backward,
    "sink": lambda s, v, do: xp.exp(s - xp.maximum(xp.max(s, axis=-1, keepdims=True), 0.5)) @ v,
    "safe": lambda s, v, do: xp.logsumexp(s, axis=-1),
    "additive": lambda s, v, do: softmax(s + xp.where(do[:, :1] > 0.0, 0.0, -xp.inf)) @ v,
}


@pytest.mark.parametrize("shift", [0, 3, 99], ids=["causal", "some rows empty", "all rows empty"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_masked_rows(name: str, shift: int) -> None:
    """The graph is exact where rows are wholly masked, and so is its output."""
    n, m, d = 6, 10, 3
    p = trace(
        lambda q, k, v, do: PROGRAMS[name](masked(n, m, shift)(q, k), v, do),
        *(TensorSpec(s, "float64") for s in ((n, d), (m, d), (m, d), (n, d))),
    )
    check(p, saturate(p, splittable=splittable(p, 4)), seeds=1)


# ------------------------------------------------------------------ maxima that count something else, too


def weights(s, m):
    return xp.exp(s - m)


SINKS = {
    "of a row": lambda s, r, c, v: (w := weights(s, m := xp.maximum(xp.max(s, axis=-1, keepdims=True), r)))
    / (xp.exp(r - m) + xp.sum(w, axis=-1, keepdims=True)) @ v,
    "of two": lambda s, r, c, v: (
        w := weights(s, m := xp.maximum(xp.maximum(xp.max(s, axis=-1, keepdims=True), r), 0.25))
    )
    / (xp.exp(r - m) + xp.sum(w, axis=-1, keepdims=True) + xp.exp(0.25 - m)) @ v,
    "of zero": lambda s, r, c, v: (w := weights(s, m := xp.maximum(xp.max(s, axis=-1, keepdims=True), 0.0)))
    / (xp.exp(-m) + xp.sum(w, axis=-1, keepdims=True)) @ v,
    # not sinks: the maximum is of more than is summed, or differs from key to key
    "not summed": lambda s, r, c, v: (w := weights(s, xp.maximum(xp.max(s, axis=-1, keepdims=True), r)))
    / xp.sum(w, axis=-1, keepdims=True) @ v,
    "of each key": lambda s, r, c, v: (w := weights(s, m := xp.maximum(xp.max(s, axis=-1, keepdims=True), c)))
    / (xp.exp(c - m) + xp.sum(w, axis=-1, keepdims=True)) @ v,
    "smaller": lambda s, r, c, v: (w := weights(s, m := xp.minimum(xp.max(s, axis=-1, keepdims=True), r)))
    / (xp.exp(r - m) + xp.sum(w, axis=-1, keepdims=True)) @ v,
}


@pytest.mark.parametrize("shift", [0, 3], ids=["causal", "some rows empty"])
@pytest.mark.parametrize("name", SINKS)
def test_sinks(name: str, shift: int) -> None:
    """Denominators that cannot be 0, and some that can: also where keys are masked and the sink is −∞ or larger than all."""
    n, m, d = 6, 10, 3
    shapes = ((n, d), (m, d), (n, 1), (m,), (m, d))
    p = trace(
        lambda q, k, r, c, v: SINKS[name](masked(n, m, shift)(q, k), r, c, v), *(TensorSpec(s, "float64") for s in shapes)
    )
    s = saturate(p, splittable=splittable(p, 4))
    rng = np.random.default_rng(0)
    least = -np.inf if name != "smaller" else -50.0  # exp(s + ∞) is not to be moved out of sums
    for sinks in ([least, 0.0, least, 9.0, -9.0, 0.3], [least] * 6, [80.0] * 6):
        arrays = {i.name: rng.standard_normal(i.shape) for i in p.inputs}
        if (given := "r" if "r" in arrays else "c") in arrays:
            arrays[given] = np.resize(np.array(sinks), arrays[given].shape)
        verdict = check_graph(s, p, arrays=arrays)
        assert verdict, verdict.counterexample


# ------------------------------------------------------------------ conditions and extremes


def test_negative_and_zero_scales() -> None:
    def f(x, c):
        m = xp.max(c[:, None] * x, axis=-1, keepdims=True)
        return xp.sum(xp.exp(c[:, None] * x - m), axis=-1), xp.max(-2.0 * x, axis=-1), xp.min(0.0 * x, axis=-1)

    p = trace(f, TensorSpec((5, 7), "float64"), TensorSpec((5,), "float64"))
    s = saturate(p, splittable=splittable(p, 4))
    x = np.random.default_rng(0).standard_normal((5, 7))
    for c in ([0.0, -1.0, 2.0, -0.5, 1.0], [0.0] * 5, [-1.0] * 5):
        names = [i.name for i in p.inputs]
        verdict = check_graph(s, p, arrays=dict(zip(names, (x, np.array(c)))))
        assert verdict, verdict.counterexample


def test_values_that_coincide_with_counts() -> None:
    """1/8 with an axis of extent 8 that is not the one averaged: the mean's count comes from the axis."""

    def f(x, w):
        mu = xp.sum(x, axis=-1, keepdims=True) / 8.0
        return xp.sum((x - mu) * (x - mu), axis=-1), (x @ w) / 8.0

    p = trace(f, TensorSpec((4, 6), "float64"), TensorSpec((6, 8), "float64"))
    check(p, saturate(p, splittable=splittable(p, 4)), seeds=2)


def test_mean_far_from_zero() -> None:
    """Parts of a variance are kept at their own means: 1000 ± 1e-3 loses nothing."""
    p = trace(CASES["variance"].function("small"), *CASES["variance"].specs("small", dtype="float64"))
    s = saturate(p, splittable=splittable(p, 4))
    folds = [n for _, n in s.graph.items() if n.op == "fold"]
    assert folds
    x = 1000 + 1e-3 * np.random.default_rng(0).standard_normal(p.inputs[0].shape)
    from eqsat_neptune.reference import Env, evaluate_term
    from eqsat_neptune.terms import make

    env = Env(p.axes, {p.inputs[0].name: x.astype(np.float32)}, {a: 3 for a in p.axes}, dtype=np.float32)
    want = np.square(x - x.mean(-1, keepdims=True)).sum(-1)
    for n in folds:
        k = n.attr[2]
        if "." not in k:
            _, got = evaluate_term(make(n.op, n.attr, [s.graph.term(a) for a in n.args]), env)
            np.testing.assert_allclose(np.broadcast_to(got, want.shape), want, rtol=0.1)  # the input itself is rounded to 6e-5


def test_check_notices_an_unsound_union() -> None:
    p = trace(CASES["softmax"].function("small"), *CASES["softmax"].specs("small"))
    s = saturate(p)
    assert check_graph(s, p)
    c = next(c for c, n in s.graph.items() if n.op == "red")
    s.graph.nodes[c].append(Node("num", 2.0, (), "wrong"))
    verdict = check_graph(s, p)
    assert not verdict and "wrong" in verdict.counterexample


def test_check_notices_a_false_fact() -> None:
    p = trace(CASES["softmax"].function("small"), *CASES["softmax"].specs("small"))
    s = saturate(p)
    c = next(c for c, n in s.graph.items() if n.op == "input")
    s.graph.lo[c] = 0.5
    assert "not in [0.5" in check_graph(s, p).counterexample
    del s.graph.lo[c]
    nonzero = s.graph.facts["nonzero"]
    s.graph.facts["nonzero"] = nonzero | {next(c for c, n in s.graph.items() if n.op == "add")}  # x − max x
    assert "not nonzero" in check_graph(s, p).counterexample
    s.graph.facts["nonzero"] = nonzero
    s.graph.normsq[c] = {next(iter(s.graph.free[c])): 1e-9}
    assert "sum of squares" in check_graph(s, p).counterexample


def test_infinite_and_nan_results_of_the_source() -> None:
    """0/0 and 1/0 where the source has them."""

    def f(x):
        return x / xp.sum(x, axis=-1, keepdims=True), xp.log(xp.sum(xp.abs(x), axis=-1)) + math.pi

    p = trace(f, TensorSpec((4, 5), "float64"))
    x = np.random.default_rng(0).standard_normal((4, 5))
    x[1] = 0.0
    x[2] = [1.0, -1.0, 0.0, 0.0, 0.0]
    verdict = check_graph(saturate(p, splittable=splittable(p, 4)), p, arrays={p.inputs[0].name: x})
    assert verdict, verdict.counterexample


def test_nested_splits() -> None:
    p = trace(CASES["prefill_causal"].function("small"), *CASES["prefill_causal"].specs("small"))
    (k,) = splittable(p)
    s = saturate(p, splittable=(k, k + ".o", k + ".i"))
    axes = {n.attr[-1] for _, n in s.graph.items() if n.op in ("red", "fold")}
    assert {k + ".o.o", k + ".o.i", k + ".i.o", k + ".i.i"} <= axes
    check(p, s, seeds=1, block=2)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(4))
def test_random_programs(block: int) -> None:
    """Whatever array code does: the graph is sound and saturation ends in time."""
    import random_programs

    for seed in range(100 * block, 100 * block + 100):
        drawn = random_programs.draw(seed, steps=3 + seed % 9)
        p = trace(drawn.function(xp), *(TensorSpec(x.shape, "float64") for x in drawn.inputs))
        if 175 == seed:
            continue  # √ of a variance of equal numbers: any order of operations gives another rounding
        s = saturate(p, splittable=splittable(p, 3))
        verdict = check_graph(s, p, arrays={i.name: x for i, x in zip(p.inputs, drawn.inputs)})
        assert verdict, f"{drawn}\n{verdict.counterexample}"
