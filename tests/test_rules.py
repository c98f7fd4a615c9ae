"""Every rule is sound on instances of its own pattern, every condition of every rule is needed, and corrupted rules are caught."""

from __future__ import annotations

import time

import pytest
from eqsat_neptune.rules import RULES, Rule
from eqsat_neptune.rules.rule import parse

from eqsat_neptune.errors import RuleError
from eqsat_neptune.testing import check_rule
from eqsat_neptune.testing.mutation import Mutant, mutants, outcome, score

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter meets 1/0 and log 0 on purpose

# rules whose mutants are fast to catch and cover each kind of condition; CI runs all of them
QUICK = ("cancel-factor", "cancel-term ", "sum-factor-out ", "min-scale-out without (nonneg", "max-shift-out", "mask-shift-out")


def test_rule_is_sound(eqsat_rule: Rule) -> None:
    verdict = check_rule(eqsat_rule, count=14, least=2, rounds=1, exact=False)
    assert verdict, verdict.counterexample


@pytest.mark.slow
def test_rule_is_sound_on_many(eqsat_rule: Rule) -> None:
    verdict = check_rule(eqsat_rule, seed=1, count=24, least=24)
    assert verdict, verdict.counterexample


def test_dropped_condition_is_noticed() -> None:
    quick = [Mutant(w, "condition", r.name) for r in RULES for w in r.weakened() if w.name.startswith(QUICK)]
    assert len(quick) >= 6 and not [m.rule.name for m in quick if outcome(m) != "caught"]


@pytest.mark.slow
def test_any_dropped_condition_is_noticed(eqsat_weakened: Rule) -> None:
    assert outcome(Mutant(eqsat_weakened, "condition", "")) == "caught"


# mutants that are not caught, with the reason; none of them is a dropped condition
SURVIVORS: dict[str, str] = {}


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_corrupted_rules_are_caught(part: int) -> None:
    """At least 95 % of those that say something false; survivors are known by name."""
    found = score(m for r in RULES[part::8] for m in mutants(r) if m.kind != "condition")
    assert found.counts["caught"] > 30 and found.caught >= 0.95
    assert set(found.survivors) <= set(SURVIVORS)


def test_mutants_are_of_every_kind() -> None:
    kinds = {m.kind for r in RULES for m in mutants(r)}
    assert kinds == {"condition", "operator", "axis", "variable", "sign", "operand", "swap"}


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
    start = time.process_time()
    verdict = check_rule(wrong)
    assert not verdict and wrong.name in verdict.counterexample and "another value" in verdict.counterexample
    assert time.process_time() - start < 10
    found = verdict.counterexample  # as small as it gets: no axis is longer than 2, few numbers
    assert all(n <= 2 for n in found.extents.values()) and sum(x.size for x in found.arrays.values()) <= 4
    assert found.left is not found.right


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
