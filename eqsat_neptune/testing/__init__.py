"""Soundness by evaluation and by proof: of a whole e-graph (`check_graph`), of one rule (`check_rule`)."""

from ..verification import Verdict
from .check import check_rule
from .graphs import check_graph
from .shrink import Counterexample

__all__ = ["Counterexample", "Verdict", "check_graph", "check_rule"]
