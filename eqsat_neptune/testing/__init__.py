"""Soundness by evaluation and by proof: of a whole e-graph (`check_graph`), of one rule (`check_rule`)."""

from ..verification import Verdict
from .graphs import check_graph, check_rule

__all__ = ["Verdict", "check_graph", "check_rule"]
