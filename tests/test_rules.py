"""Every rule is sound on random instances of its own pattern, and every condition of every rule is needed."""

from __future__ import annotations

import warnings

import pytest
from eqsat_neptune.rules import RULES, Rule
from eqsat_neptune.rules.rule import parse

from eqsat_neptune.errors import RuleError
from eqsat_neptune.testing import check_rule

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter meets 1/0 and log 0 on purpose

MUTANTS = [m for r in RULES for m in r.weakened()]
# rules whose mutants are fast to catch and cover each kind of condition; CI runs all of them
QUICK = ("cancel-factor", "cancel-term ", "sum-factor-out ", "min-scale-out without (nonneg", "max-shift-out", "mask-shift-out")


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_rule_is_sound(rule: Rule) -> None:
    verdict = check_rule(rule, count=14, least=2, rounds=1)
    assert verdict, verdict.counterexample


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_rule_is_sound_on_many(rule: Rule) -> None:
    verdict = check_rule(rule, seed=1, count=40, least=40)
    assert verdict, verdict.counterexample


def caught(mutant: Rule) -> bool:
    from egglog.bindings import EggSmolError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            verdict = check_rule(mutant, count=40, least=60)
        except EggSmolError:  # 1/0 inside the engine
            return True
    return not verdict and "no random instance" not in (verdict.counterexample or "")


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.name.startswith(QUICK)], ids=lambda r: r.name)
def test_dropped_condition_is_noticed(mutant: Rule) -> None:
    assert caught(mutant)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [m for m in MUTANTS if not m.name.startswith(QUICK)], ids=lambda r: r.name)
def test_any_dropped_condition_is_noticed(mutant: Rule) -> None:
    assert caught(mutant)


@pytest.mark.parametrize(
    "wrong",
    [
        Rule("hoist-anything", "wrong", "(sum k (mul x rest*))", "(mul x (sum k (mul rest*)))", guard="(some rest*)"),
        Rule(
            "scale-any-max",
            "wrong",
            "(max k (mul c rest*))",
            "(mul c (max k (mul rest*)))",
            when="(indep k c)",
            guard="(some rest*)",
        ),
        Rule("max-is-linear", "wrong", "(max k (add x y))", "(add (max k x) (max k y))"),
        Rule("sum-of-product", "wrong", "(sum k (mul x y))", "(mul (sum k x) (sum k y))"),
        Rule("drop-mask", "wrong", "(where c x -inf)", "x"),
        Rule("exp-is-linear", "wrong", "(exp (add x y))", "(add (exp x) (exp y))"),
    ],
    ids=lambda r: r.name,
)
def test_wrong_rule_is_noticed(wrong: Rule) -> None:
    verdict = check_rule(wrong)
    assert not verdict and wrong.name in verdict.counterexample and "another value" in verdict.counterexample


def test_rule_that_never_applies_is_noticed() -> None:
    never = Rule("never", "wrong", "(add x y)", "(add y x)", when="(> 0.0 1.0)")
    assert "no random instance" in check_rule(never, tries=3).counterexample


def test_names_and_laws() -> None:
    names = [r.name for r in RULES]
    assert len(set(names)) == len(names)
    assert all(r.law and r.family for r in RULES)
    known = ("attention", "softmax", "layernorm", "rmsnorm")
    assert not [r.name for r in RULES if any(w in f"{r.name} {r.pattern} {r.result}".lower() for w in known)]


@pytest.mark.parametrize(
    ("pattern", "result", "message"),
    [
        ("(add x", "x", "missing"),
        ("(add x))", "x", "unbalanced"),
        ("(frobnicate x y)", "x", "cannot read"),
        ('(bi "frobnicate" x y)', "x", "cannot read"),
        ("(add x y)", "(mul z* x)", "not bound"),
        ("(add a* b*)", "x", "cannot read"),
    ],
)
def test_malformed_rule(pattern: str, result: str, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        Rule("bad", "test", pattern, result)


def test_malformed_condition_and_numerics() -> None:
    with pytest.raises(RuleError, match="cannot read"):
        Rule("bad", "test", "(add x y)", "x", when="(frobnicate x)")
    with pytest.raises(RuleError, match="numerics"):
        Rule("bad", "test", "(add x y)", "x", numerics="sloppy")


def test_parse() -> None:
    assert parse('(a (b "c d") -1.5) e') == [["a", ["b", '"c d"'], "-1.5"], "e"]
