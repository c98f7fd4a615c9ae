"""The checks themselves: they find what is wrong, and say no more than they know."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from eqsat_neptune.rules import RULES, Rule, repair

from eqsat_neptune.egraph import saturate
from eqsat_neptune.program import TensorSpec
from eqsat_neptune.programs import CASES
from eqsat_neptune.reference import Env
from eqsat_neptune.terms import Monoid, add, axis_index, bi, inp, make, mul, num, postorder, red, sub, un, var
from eqsat_neptune.testing import check_rule, field_test, prove_merge, prove_rule, rational_test
from eqsat_neptune.testing.conditioning import disagree, step
from eqsat_neptune.testing.evidence import bound
from eqsat_neptune.testing.fields import Exact, Fields, Outside, Rationals, Residue, degree
from eqsat_neptune.testing.instances import SHAPES, Hint, hints
from eqsat_neptune.testing.merges import REFUSED, SKELETONS, monoids, prove_skeleton
from eqsat_neptune.testing.mutation import merge_mutants, mutants, uncaught_merges
from eqsat_neptune.testing.symbolic import LEMMAS, Lemma, Unproved, combine, lemmas, rational
from eqsat_neptune.testing.values import KINDS
from eqsat_neptune.trace import trace

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
X = inp("x", (axis_index("k"),))
Y = inp("y", (axis_index("k"),))

WRONG = {
    "hoist anything": Rule("w", "", "(sum k (mul x rest*))", "(mul x (sum k (mul rest*)))", guard="(some rest*)"),
    "sum of product": Rule("w", "", "(sum k (mul x y))", "(mul (sum k x) (sum k y))"),
    "exp is linear": Rule("w", "", "(exp (add x y))", "(add (exp x) (exp y))"),
    "reciprocal of sum": Rule("w", "", "(recip (add x y))", "(add (recip x) (recip y))"),
    "half": Rule("w", "", "(add x x)", "x"),
}
ORDER = {
    "max is linear": Rule("w", "", "(max k (add x y))", "(add (max k x) (max k y))"),
    "scale any max": Rule("w", "", "(max k (mul c x))", "(mul c (max k x))", when="(indep k c)"),
    "max is min": Rule("w", "", "(max k x)", "(min k x)"),
    "abs": Rule("w", "", "(abs (add x y))", "(add (abs x) (abs y))"),
}


# ------------------------------------------------------------------ error bounds


def values(t, **inputs):
    n = len(next(iter(inputs.values())))
    env = Env({"k": n}, inputs)
    memo = {}
    for x in postorder([t]):
        memo[x] = step(x.op, x.attr, [memo[a] for a in x.args], env)
    return memo[t], env


def test_what_cancels_is_not_trusted() -> None:
    """(x + y) − x is y up to the rounding of x + y, and no closer."""
    t = sub(add(X, Y), X)
    got, env = values(t, x=[1e16, 1.0], y=[1.0, 1.0])
    want, _ = values(Y, x=[1e16, 1.0], y=[1.0, 1.0])
    assert got.x[0] != 1.0 and got.error[0] > 0.5 and got.error[1] < 1e-15
    assert not disagree(got, want, env).any()
    off, _ = values(add(Y, num(1e-9)), x=[1e16, 1.0], y=[1.0, 1.0])
    assert disagree(got, off, env).tolist() == [False, True]


def test_what_overflows_is_unknown_and_what_is_infinite_is_known() -> None:
    square = mul(X, X, X, X, X, X, X, X, X, X, X)
    got, env = values(add(square, mul(-1.0, square)), x=[1e30, -math.inf])
    assert np.isinf(got.error[0]) and got.error[1] == 0.0 and np.isnan(got.x[1])
    zero, _ = values(num(0.0), x=[1e30, -math.inf])
    assert disagree(got, zero, env).tolist() == [False, True]


def test_a_choice_by_rounding_is_unknown() -> None:
    test = bi("lt", add(X, num(0.1), num(0.2)), add(X, num(0.3)))
    got, _ = values(test, x=[0.7, 5.0])
    assert np.isinf(got.error).all()
    got, _ = values(bi("lt", X, num(0.5)), x=[0.7, 0.5])
    assert (got.error == 0.0).all()


def test_an_extremum_of_both_zeros_has_either_sign() -> None:
    for x, known in (([0.0, -0.0], False), ([-0.0, -0.0], True), ([-1.0, 1.0], True)):
        for extremum in (red("max", "k", X), red("min", "k", X)):
            got, _ = values(un("recip", extremum), x=x)
            assert bool(np.isfinite(got.error).all()) is known, (x, str(extremum))
    got, _ = values(un("recip", bi("max", X, mul(-1.0, X))), x=[0.0, 1.0])
    assert np.isinf(got.error[0]) and np.isfinite(got.error[1])


@pytest.mark.parametrize("f", ["exp", "log", "tanh", "recip", "sqrt", "rsqrt", "erf", "log1p", "cosh", "sin"])
def test_bounds_hold(f: str) -> None:
    """Against more digits: the error of f(x + y − y) is within its bound."""
    import mpmath

    rng = np.random.default_rng(0)
    x, y = rng.uniform(0.5, 2.0, 40), rng.uniform(-1e6, 1e6, 40)
    got, _ = values(un(f, sub(add(X, Y), Y)), x=x, y=y)
    exact = {"recip": lambda v: 1 / v, "rsqrt": lambda v: 1 / mpmath.sqrt(v)}.get(f) or getattr(mpmath, f)
    with mpmath.workdps(40):
        want = [exact(mpmath.mpf(float(v))) for v in x]
        assert all(abs(mpmath.mpf(float(a)) - w) <= 1.01 * e for a, w, e in zip(got.x, want, got.error))


# ------------------------------------------------------------------ exact fields


@pytest.mark.parametrize("name", WRONG)
def test_fields_find_a_false_law(name: str) -> None:
    found = field_test(WRONG[name])
    assert found.counterexample and "differ exactly" in found.counterexample


@pytest.mark.parametrize("name", ORDER)
def test_rationals_find_a_false_law(name: str) -> None:
    assert rational_test(ORDER[name]).counterexample


def test_a_second_exp_is_outside_the_fragment() -> None:
    found = field_test(Rule("nested", "", "(exp (exp (add x y)))", "(exp (mul (exp x) (exp y)))"))
    assert found.instances == 0 and "second exp" in found.reason
    env = Env({"k": 2}, dtype=object)
    with pytest.raises(Outside, match="second exp"):
        Fields(env, np.random.default_rng(0)).unary("exp", Residue(1, None))


def test_laws_of_order_are_outside_the_fragment() -> None:
    rule = next(r for r in RULES if r.name == "max-shift-out")
    assert "order" in field_test(rule).reason and rational_test(rule).instances


def test_a_maximum_is_any_function_of_its_row() -> None:
    """What cancels may stand for anything; one that is used as a maximum may not."""
    assert field_test(Rule("m", "", "(sum k (mul x (exp (max k x))))", "(mul (exp (max k x)) (sum k x))")).instances
    assert not field_test(Rule("m", "", "(max k (exp x))", "(exp (max k x))")).instances


def test_degrees_bound_the_error() -> None:
    extents = {"k": 5}
    assert degree(mul(X, X, Y), extents) == (3, 0)
    assert degree(red("+", "k", un("recip", X)), extents) == (4, 5)
    assert degree(un("exp", add(X, mul(-2.0, Y))), extents) == (1, 2)
    assert degree(un("exp", mul(0.5, X)), extents) == (1, 0)
    with pytest.raises(Outside, match="not linear"):
        degree(un("exp", mul(X, Y)), extents)
    tested = field_test(next(r for r in RULES if r.name == "flatten-product"))
    assert 0 < tested.bound < 1e-30 and "probability < 1e-3" in bound(tested.bound)


def test_rationals_are_exact_and_know_infinities() -> None:
    env = Env({"k": 3}, dtype=object)
    domain: Exact = Rationals(env)
    t = make("add", None, [num(1e16), num(1.0), num(-1e16)])
    assert domain(t)[1][()] == 1
    assert domain(bi("max", num(-math.inf), num(2.0)))[1][()] == 2
    assert math.isnan(domain(make("add", None, [num(math.inf), num(-math.inf)]))[1][()])


# ------------------------------------------------------------------ proofs


def test_lemmas_are_proved_and_false_ones_are_not() -> None:
    assert all(lemmas().values())
    false = [
        Lemma("Σ (c + x) = c + Σ x", "+", lambda c, x: c + x, (("+", lambda c, x: x),), lambda c, a: c + a),
        Lemma("Π c·x = c·Π x", "*", lambda c, x: c * x, (("*", lambda c, x: x),), lambda c, a: c * a),
        Lemma(
            "max c·x = c·max x", "max", lambda c, x: c * x, (("max", lambda c, x: x),), lambda c, a: c * a, 1, {"negative": True}
        ),
        Lemma("max x = min x", "max", lambda c, x: x, (("min", lambda c, x: x),), lambda c, a: a),
    ]
    for lemma in false:
        assert not _proved(lemma), lemma.law
    with pytest.raises(Unproved):  # a sign that is not known gives no order
        Lemma("", "max", lambda c, x: c * x, (("max", lambda c, x: x),), lambda c, a: c * a).proved()
    assert len(LEMMAS) == 9


def _proved(lemma: Lemma) -> bool:
    try:
        return lemma.proved()
    except Unproved:
        return False


@pytest.mark.parametrize("name", [*WRONG, *ORDER])
def test_a_false_law_is_not_proved(name: str) -> None:
    assert not prove_rule((WRONG | ORDER)[name])


def test_no_corrupted_rule_is_proved() -> None:
    """Of hundreds of corrupted rules only those are proved that are true all the same."""
    everything = [m.rule for r in RULES for m in mutants(r) if m.kind != "condition"]
    true = {("(add x)", "x"), ("(mul x)", "x"), ("(exp2 0.0)", "1.0"), ("(exp2 -inf)", "0.0"), ("(log2 1.0)", "0.0")}
    true |= {(p, "(mul -1.0 0.0)") for p in ("(mul 0.0 rest*)", "(exp -inf)", "(log 1.0)")}
    unread = [
        ("r x", "r y", "q x", "r y"),
        ("q x", "s y", "q x", "r y"),
        ("q x", "r x", "q x", "r y"),
    ]  # of a choice: one side only
    unread += [("q x", "r y", "r x", "r y"), ("q x", "r y", "q y", "r y"), ("q x", "r y", "q x", "s y")]
    choice = '(where (bi "lt" (iota c) (num n)) (view {}) (view {}))'
    true |= {("x y", f"(view p {choice}) (view s {choice})".format(*views)) for views in unread}
    assert len(everything) > 400
    assert {(r.pattern, r.result) for r in everything if prove_rule(r)} <= true


def test_a_rule_over_many_is_proved_for_one_and_two() -> None:
    assert not prove_rule(Rule("w", "", "(recip (add ms*))", "(add (map (recip _) ms*))"))
    assert prove_rule(next(r for r in RULES if r.name == "reciprocal-of-product"))


def test_constants_within_rounding_of_a_fraction_are_it() -> None:
    assert 7 * rational(1 / 7) == 1 and rational(0.125).q == 8 and rational(-math.inf) < 0
    assert combine("max", rational(2.0), rational(3.0)) == 3


@pytest.mark.parametrize("name", SKELETONS)
def test_derived_merge_is_proved(name: str) -> None:
    proof = prove_skeleton(name)
    assert proof and {"distribution", "composition", "identity", "change of reference"} == set(proof.steps)
    assert not uncaught_merges(repair.derive(*SKELETONS[name]))


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_merge_has_none(name: str) -> None:
    assert repair.derive(*REFUSED[name]) is None


def test_merge_mutants_are_many() -> None:
    assert sum(len(list(merge_mutants(repair.derive(*s)))) for s in SKELETONS.values()) > 60


def test_merge_with_a_wrong_coefficient_is_not_proved() -> None:
    r, big = var("r0"), var("R0")
    good = Monoid(("max",), (((0, un("exp", sub(r, big))),),))
    assert prove_merge(good)
    assert not prove_merge(Monoid(("max",), (((0, un("exp", sub(big, mul(2.0, r)))),),)))
    assert not prove_merge(Monoid(("max",), (((0, sub(r, big)),),)))


FAST = ("prefill_global", "layernorm", "attention_dq", "variance")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in CASES])
def test_merges_of_programs_are_proved(name: str) -> None:
    p = trace(CASES[name].function("small"), *CASES[name].specs("small"))
    for h in monoids(saturate(p).graph):
        proof = prove_merge(h)
        assert proof, f"{h}: {proof.reason}"


# ------------------------------------------------------------------ instances, verdicts, the plug-in


def test_instances_have_axes_of_all_kinds() -> None:
    extents = [s.extents for s in SHAPES]
    assert any(len(set(e)) == 1 for e in extents) and any(len(set(e[:3])) == 3 for e in extents)
    assert any(1 in e[:3] for e in extents) and any(s.extents[0] % s.block for s in SHAPES) and any(7 in e for e in extents)
    assert {"rows masked", "all masked", "huge", "tiny", "ties", "offset"} <= set(KINDS)


def test_conditions_say_what_variables_should_be() -> None:
    rule = Rule("r", "", "(max k (mul c rest*))", "(mul c (min k (mul rest*)))", when="(indep k c) (noinf c) (hz c h) (< h 0.0)")
    assert hints(rule)["c"] == Hint(negative=True, finite=True, without=frozenset("k"))


def test_rules_are_not_applied_to_reductions_over_nothing() -> None:
    from eqsat_neptune import xp

    p = trace(lambda x: xp.sum(2.0 * x + 1.0, axis=-1), TensorSpec((3, 0)))
    assert all(n.why in ("source", "congruence") for _, n in saturate(p).graph.items())


def test_verdict_in_a_notebook() -> None:
    verdict = check_rule(Rule("recip-max", "mine", "(max k (recip x))", "(recip (min k x))", when="(lz x l) (> l 0.0)"))
    assert verdict and verdict.ok and "proved (monotone functions leave)" in verdict.evidence and verdict.counterexample is None
    wrong = check_rule(WRONG["half"])
    assert not wrong and wrong.counterexample.left is not None and "=" in wrong.counterexample


def test_a_rule_that_would_not_end_is_refused() -> None:
    """It puts a term below itself, so that bounds grow for ever; and one that takes away all that there is."""
    for rule in (
        Rule("w", "", "(add (as y (add in*)) rest*)", "(add in*)", guard="(some rest*)", phase="sums"),
        Rule("w", "", "(abs x)", "(abs x)", phase="norm", retire=True),
    ):
        assert not check_rule(rule)
    growing = Rule("w", "", "(tanh x)", "(mul 1.0 (tanh (add x 0.0)))", phase="norm")
    assert "come to rest" in check_rule(growing).counterexample
    assert check_rule(replace(growing, phase="algebra"))


def test_plug_in(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["eqsat_neptune.testing.pytest_plugin"]\n')
    (tmp_path / "test_mine.py").write_text(
        "from eqsat_neptune.rules import Rule\n"
        "from eqsat_neptune.testing import check_rule\n"
        'eqsat_rules = [Rule("right", "", "(add x x)", "(mul 2.0 x)"), Rule("wrong", "", "(add x x)", "x")]\n'
        "def test_rule(eqsat_rule):\n"
        "    verdict = check_rule(eqsat_rule)\n"
        "    assert verdict, verdict.counterexample\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert "1 failed, 1 passed" in run.stdout and "test_rule[wrong]" in run.stdout, run.stdout


@pytest.mark.parametrize(
    ("lhs", "rhs", "when"),
    [
        ("(recip (add 1.0 (exp x)))", "0.0", "(lz x l) (> l 4.0)"),
        ("(trunc x)", "(floor x)", "(lz x l) (> l -1.0)"),
        ("(tanh x)", "1.0", "(lz x l) (> l 3.0)"),
        ("(log (add 1.0 x))", "x", "(lz x l) (> l -0.001) (hz x h) (< h 0.001)"),
        ("(exp x)", "0.0", "(hz x h) (< h -5.0)"),
    ],
)
def test_laws_that_are_wrong_just_beside_a_limit(lhs: str, rhs: str, when: str) -> None:
    """… and as good as right a little further."""
    verdict = check_rule(Rule("beside-a-limit", "factoring", lhs, rhs, when=when, law="wrong"))
    assert not verdict and "class has a node of another value" in str(verdict.counterexample)


@pytest.mark.parametrize(
    ("lhs", "rhs"),
    [("(isnan x)", "0.0"), ('(bi "eq" x x)', "1.0"), ('(bi "le" x x)', "1.0"), ('(not (bi "le" x y))', '(bi "lt" y x)')],
)
def test_laws_that_are_wrong_of_nan_alone(lhs: str, rhs: str) -> None:
    """Inputs are finite, but what is computed of them need not be a number."""
    verdict = check_rule(Rule("of-numbers", "factoring", lhs, rhs, law="wrong"))
    assert not verdict and "log(" in str(verdict.counterexample)


def test_a_law_that_a_limit_makes_right() -> None:
    assert check_rule(Rule("beside-a-limit", "factoring", "(trunc x)", "(floor x)", when="(lz x l) (> l 3.0)", law="right"))
