"""What float16's range forbids, where that costs: forms with far fewer operations, which bfloat16 would allow."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .. import terms as T
from ..graph import Graph, Node
from .classes import least_terms
from .legality import legal_nodes

WORTH = 1.5  # times as many operations: below that, forms differ in elementwise work, which hardly shows
FREE = frozenset({"num", "input", "iota", "view"})

Nodes = dict[int, list[Node]]


@dataclass(frozen=True)
class Forbidden:
    """times: operations of the least form that is allowed, for one of the least form that bfloat16 would allow.  form: a product in
    that one whose operands may be beyond float16's range, in mathematical notation; rule: what makes it."""

    times: float
    form: str
    rule: str


def forbidden(graph: Graph, nodes: Nodes, compute_dtype: str, numerics: str) -> Forbidden | None:
    """nodes: those of a graph that are legal with products whose operands are rounded to float16.  None if their bounds cost little."""
    other = legal_nodes(graph, compute_dtype, "bfloat16", numerics)
    allowed, best = (least_terms(some, lambda c, n: _operations(graph, c, n)) for some in (nodes, other))
    ours, theirs = (sum(found[c][0] for c in graph.outputs) for found in (allowed, best))
    if not ours >= WORTH * theirs or not math.isfinite(ours):
        return None
    todo, seen = list(reversed(graph.outputs)), set(graph.outputs)
    while todo:
        c = todo.pop()
        n = best[c][1]
        if n.op == "mul" and n not in nodes.get(c, ()) and n.why != "source":
            return Forbidden(ours / theirs, T.show(T.make(n.op, n.attr, [graph.term(a) for a in n.args]), 6), n.why)
        todo.extend(a for a in reversed(n.args) if a not in seen)
        seen.update(n.args)
    return None


def _operations(graph: Graph, c: int, n: Node) -> float:
    """Elements that a node works on."""
    if n.op in FREE:
        return 0.0
    axes = set(graph.free[c])
    if n.op in ("red", "fold"):
        axes |= {n.attr[-1], *(a for x in n.args for a in graph.free[x])}
    return float(math.prod(graph.extents[a] for a in {T.base(a) for a in axes}))
