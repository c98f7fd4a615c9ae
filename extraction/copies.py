"""Outputs that are rounded more than an intermediate would be, and that others are computed from: a class of their own.

Such an output is a copy of its class.  The class itself may be stored in full precision beside it, by the same kernel or not at all, and
nothing reads the rounded values back where the rounding could show.
"""

from __future__ import annotations

from dataclasses import replace

from ..graph import Graph, Node
from .classes import Classes


def with_copies(cl: Classes) -> Classes:
    """The same classes with a copy for every output that is not `readable` and that the source uses otherwise."""
    g = cl.graph
    rounded = [c for c in cl.outputs if not cl.readable(c) and cl.consumers.get(c)]
    if not rounded:
        return cl
    first = max(g.nodes) + 1
    copies = {c: first + i for i, c in enumerate(rounded)}
    made = {new: [Node("view", (), (c,))] for c, new in copies.items()}
    graph = Graph(
        {**g.nodes, **made},
        {**g.free, **{new: g.free[c] for c, new in copies.items()}},
        {**g.lo, **{new: g.lo[c] for c, new in copies.items() if c in g.lo}},
        {**g.hi, **{new: g.hi[c] for c, new in copies.items() if c in g.hi}},
        {**g.facts, "source": g.facts.get("source", frozenset()) | frozenset(made)},
        g.normsq,
        tuple(copies.get(c, c) for c in g.outputs),
        g.extents,
    )
    return replace(cl, graph=graph, nodes={**cl.nodes, **made}, outputs={})
