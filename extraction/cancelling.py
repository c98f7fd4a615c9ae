"""Sums that a rule has made for a product, and that may cancel there: rounded to 16 bits they would spoil it.

(A·B)·C rounds A·B, entry by entry: no error is larger than |A·B|·|C|/2⁹, for bfloat16.  A·(B·C) rounds B·C, and then errors are only
bounded by |A|·|B·C|/2⁹.  Where A takes differences of rows of B·C that are alike, little is left but these errors, however exact the
source is.  Nothing of the kind happens where A and B have no negative elements, as features and weights: then |A|·|B·C| ≤ |A·B|·|C|.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .. import terms as T
from ..graph import Graph, Node

POSITIVE = frozenset({"exp", "exp2", "abs"})

Nodes = Mapping[int, Sequence[Node]]


def may_cancel(graph: Graph, nodes: Nodes) -> tuple[frozenset[int], frozenset[int]]:
    """(sums of products that no source has and that are a factor of what is summed, not safe to round there, and choices from them;
    the products that sums add up, directly or through choices, views and other factors)."""
    found: set[int] = set()
    products: set[int] = set()
    todo = list(dict.fromkeys(_summed(graph, nodes)))
    seen = set(todo)
    scaled = _scaled(graph, nodes)
    while todo:
        c, what = todo.pop()
        for n in nodes.get(c, ()):
            below: list[tuple[int, _Beside]] = []
            if n.op == "mul":
                products.add(c)
                below = [(a, what.and_by(graph, [*n.args[:i], *n.args[i + 1 :]])) for i, a in enumerate(n.args)]
            else:
                below = [(a, what) for a in _chosen([n])]
            for a, beside in below:
                if graph.has(a, "source"):
                    continue  # it is rounded there, too
                if (
                    a not in scaled
                    and beside.axes - _axes(graph, a)
                    and any(not beside.safe(graph, fs) for fs in _products_of(graph, nodes, a))
                ):
                    found.add(a)
                if (a, beside) not in seen:
                    seen.add((a, beside))
                    todo.append((a, beside))
    factors = [a for a, _ in seen if not graph.has(a, "source")]
    while more := {a for a in factors if a not in found and any(map(found.__contains__, _chosen(nodes[a])))}:
        found |= more
    return frozenset(found), frozenset(products)


@dataclass(frozen=True)
class _Beside:
    """What a value is multiplied by before it is summed.  positive: has that no negative elements?"""

    summed: str
    axes: frozenset[str]
    positive: bool

    def and_by(self, graph: Graph, others: Sequence[int]) -> _Beside:
        axes = self.axes.union(*(_axes(graph, a) for a in others))
        return _Beside(self.summed, axes, self.positive and all(_nonnegative(graph, a) for a in others))

    def safe(self, graph: Graph, factors: Sequence[int]) -> bool:
        """Has a value that is a sum of products of these, each as large as the source's product with what is beside it, no error that
        the source has not?"""
        return self.positive and all(_nonnegative(graph, a) for a in factors if T.base(self.summed) in _axes(graph, a))


def _summed(graph: Graph, nodes: Nodes) -> Iterator[tuple[int, _Beside]]:
    """What sums add up; a fold multiplies it by a weight that depends on its pivots."""
    for ns in nodes.values():
        for n in ns:
            if n.op == "red" and n.attr[0] == "+":
                yield n.args[0], _Beside(n.attr[1], frozenset(), True)
            elif n.op == "fold":
                h, _, axis = n.attr
                of_pivots = frozenset[str]().union(*(_axes(graph, a) for a in n.args[: len(h.pivots)]))
                for row in h.coef:
                    for j, e in row:
                        axes = of_pivots if e.op != "num" else frozenset()
                        yield n.args[len(h.pivots) + j], _Beside(axis, axes, _positive(e))


def _positive(weight: T.Term) -> bool:
    """Has the coefficient of a fold no negative values, whatever its pivots are?"""
    match weight.op:
        case "num":
            return bool(weight.attr >= 0)
        case "un":
            return weight.attr in POSITIVE
        case "mul":
            return all(map(_positive, weight.args))
    return False


def _products_of(graph: Graph, nodes: Nodes, c: int) -> Iterator[tuple[int, ...]]:
    """Factors of each product of matrices that a class is a sum of."""
    free = graph.free
    for n in nodes.get(c, ()):
        if n.op == "red" and n.attr[0] == "+":
            for m in nodes.get(n.args[0], ()):
                if m.op == "mul" and any(free[a] - free[b] and free[b] - free[a] for a in m.args for b in m.args):
                    yield m.args


def _chosen(nodes: Sequence[Node]) -> Iterator[int]:
    """What a class chooses its values from, if it does."""
    for n in nodes:
        if n.op in ("where", "view"):
            yield from n.args[n.op == "where" :]


def _scaled(graph: Graph, nodes: Nodes) -> frozenset[int]:
    """Classes of which the source has a multiple, element by element: the same rounding."""
    out: set[int] = set()
    for c, ns in nodes.items():
        for n in ns if graph.has(c, "source") else ():
            if n.op == "mul":
                out.update(
                    a
                    for i, a in enumerate(n.args)
                    if all(_axes(graph, b) <= _axes(graph, a) for b in n.args[:i] + n.args[i + 1 :])
                )
    return frozenset(out)


def _axes(graph: Graph, c: int) -> frozenset[str]:
    return frozenset(map(T.base, graph.free[c]))


def _nonnegative(graph: Graph, c: int) -> bool:
    return graph.interval(c)[0] >= 0
