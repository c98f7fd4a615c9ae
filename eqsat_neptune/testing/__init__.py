"""Soundness, of a rule and of a whole e-graph.  For your own rule, in a notebook or a test:

    from eqsat_neptune.rules import Rule
    from eqsat_neptune.testing import check_rule

    rule = Rule("recip-max", "mine", "(max k (recip x))", "(recip (min k x))", when="(lz x l) (> l 0.0)")
    verdict = check_rule(rule)          # truthy if it is sound
    verdict.evidence                    # how that is known: proved, over exact fields, sampled
    verdict.counterexample              # or where it is not: the smallest that was found, with .extents, .arrays, .left, .right

`prove_rule`, `field_test` and `rational_test` give one kind of evidence alone, `assess` all, `mutants` and `outcome` say what the
checks are worth; `pytest_plugin` runs a test once for each rule of a registry.
"""

from ..verification import Verdict
from .check import check_rule
from .evidence import Evidence, assess
from .fields import field_test, rational_test
from .graphs import check_graph
from .mutation import mutants, outcome, score
from .shrink import Counterexample
from .symbolic import Proof, prove_merge, prove_rule

__all__ = [
    "Counterexample",
    "Evidence",
    "Proof",
    "Verdict",
    "assess",
    "check_graph",
    "check_rule",
    "field_test",
    "mutants",
    "outcome",
    "prove_merge",
    "prove_rule",
    "rational_test",
    "score",
]
