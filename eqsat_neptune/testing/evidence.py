"""What is known of each rule: proved, tested in exact fields with an error bound, or sampled."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from ..errors import EqsatError
from ..rules.declared import BREAK
from ..rules.rule import Rule
from .fields import Tested, field_test, rational_test
from .merges import SKELETONS, programs, prove_skeleton
from .symbolic import Proof, lemmas, prove_merge, prove_rule

KINDS = {
    "proved": "for all real values and, where something is reduced, for every length",
    "field-tested": "over exact finite fields at random points; the bound is on the probability that a false law passes",
    "rational": "in exact rationals, at sampled points",
    "sampled": "in float64 alone",
}


@dataclass(frozen=True)
class Evidence:
    """Of one rule.  Special values (masks, infinities, NaN) are sampled for every rule, whatever else is known: check.py."""

    rule: str
    proof: Proof
    field: Tested
    rational: Tested

    @property
    def kind(self) -> str:
        """The strongest there is."""
        if self.proof:
            return "proved"
        if self.field.instances:
            return "field-tested"
        return "rational" if self.rational.instances else "sampled"

    @property
    def counterexample(self) -> str | None:
        return self.field.counterexample or self.rational.counterexample

    def __str__(self) -> str:
        out = []
        if self.proof:
            out.append("proved" + (f" ({', '.join(self.proof.steps)})" if self.proof.steps else ""))
        if self.field.instances:
            out.append(f"{self.field.instances} equations over exact fields, {bound(self.field.bound)}")
        if self.rational.instances:
            out.append(f"{self.rational.instances} equations in exact rationals")
        return "; ".join(out)


def bound(p: float) -> str:
    """A probability as text, rounded up to a power of ten."""
    return f"a false law passes with probability < 1e{math.floor(math.log10(p)) + 1}" if p else "of constants"


@cache
def assess(rule: Rule, seed: int = 0) -> Evidence:
    """Prove a rule, and test it in exact fields, or in rationals where those do not apply.  Without sympy nothing is proved."""
    try:
        proof = _driver(rule) if rule.phase == "driver" else prove_rule(rule)
    except EqsatError as e:
        proof = Proof(False, reason=str(e))
    nothing = Tested(0, reason="made by code")
    if rule.phase == "driver":
        return Evidence(rule.name, proof, nothing, nothing)
    field = field_test(rule, seed)
    rational = nothing if field.instances or field.counterexample else rational_test(rule, seed)
    return Evidence(rule.name, proof, field, rational)


def _driver(rule: Rule) -> Proof:
    """What code makes: the merges of the folds that it made, and for the rule that derives merges those of all skeletons.  Where
    it says that a part of a fold is an ordinary reduction, that is the splitting of reductions."""
    proofs: list[Proof] = []
    for _, saturated in programs():
        made = [n for _, n in saturated.graph.items() if n.why == rule.name]
        proofs += [prove_merge(h) for h in dict.fromkeys(n.attr[0] for n in made if n.op == "fold")]
        if any(n.op == "red" for n in made):
            proofs.append(Proof(lemmas()["reductions split"], ("reductions split",)))
    if rule.name == BREAK.name:
        proofs += [prove_skeleton(name) for name in SKELETONS]
    steps = list(dict.fromkeys(s for p in proofs for s in p.steps))
    bad = next((p.reason for p in proofs if not p), "" if proofs else "it made nothing")
    return Proof(not bad, tuple(steps), bad)
