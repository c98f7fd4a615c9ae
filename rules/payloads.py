"""Payloads: reductions over the places where an extremum is attained (argmax, argmin and their like) are carried along with it.

min over K of where(x = max over K of x, p, ∞) reads x twice, once for the maximum and once to find it again; a plan that computes x in
two places may round it in two ways and find nothing.  As a payload, p moves with the pivot: a part's payload counts only if the
part's maximum is the whole's, and both sides of that comparison are one value.  Of several axes the inner one is folded first: the
places of the whole's maximum in a row are those of the row's, if the row has it at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..graph import Graph
from ..terms import REDUCTIONS, Monoid, Term, bi, fold, num, red, where


@dataclass
class Payload:
    """Unions to make: class = value, a fold over the outermost axis, and extreme = pivot, the component of that fold that it is.
    folds: all folds in these."""

    cls: int
    value: Term
    extreme: int
    pivot: Term
    folds: list[Term]


def find(g: Graph) -> list[Payload]:
    """All payloads of a graph that are no folds yet."""
    out = []
    for c, n in g.items():
        if n.op == "red" and n.attr[0] in ("max", "min") and not any(is_payload(m.attr) for m in g.nodes[c] if m.op == "fold"):
            found = _carried(g, c)
            if found is not None:
                out.append(found)
    return list({p.cls: p for p in out}.values())


def is_payload(attr: tuple) -> bool:
    """Is this component of a fold a payload?"""
    h, i, _ = attr
    return i < len(h.pivots) and isinstance(h.pivots[i], tuple) and h.pivots[i][0] == "at"


def _carried(g: Graph, c: int) -> Payload | None:
    for op, axes, body in _nests(g, c):
        for n in g.nodes[body]:
            if n.op != "where" or not _is_number(g, n.args[2], REDUCTIONS[op]):
                continue
            conditions = list(_conjuncts(g, n.args[0]))
            for i, k in enumerate(conditions):
                for x, extreme, nans in _attained(g, k):
                    for pivot in _pivots(g, extreme, x, frozenset(axes)):
                        rest = [g.term(d) for j, d in enumerate(conditions) if j != i]
                        p = g.term(n.args[1])
                        if rest:
                            p = where(_all(rest), p, num(REDUCTIONS[op]))
                        h = Monoid((pivot, ("at", 0, op, nans)), ())
                        return _folded(c, extreme, h, axes, g.term(x), p)
    return None


def _folded(c: int, extreme: int, h: Monoid, axes: list[str], x: Term, p: Term) -> Payload:
    folds = []
    for a in reversed(axes):
        singles = x, p
        x, p = red(str(h.pivots[0]), a, x), fold(h, 1, a, singles)
        folds.append(p)
    top = fold(h, 0, axes[0], singles)
    return Payload(c, p, extreme, top, [*folds, top])


def _nests(g: Graph, c: int) -> Iterator[tuple[str, list[str], int]]:
    """(operator, axes from the outside in, body) of reductions right inside each other with one operator, the shortest nest first."""
    todo: list[tuple[str, list[str], int]] = [(op, [], c) for op in ("max", "min")]
    while todo:
        op, axes, x = todo.pop(0)
        if axes:
            yield op, axes, x
        for n in g.nodes[x]:
            if n.op == "red" and n.attr[0] == op and n.attr[1] not in axes:
                todo.append((op, [*axes, n.attr[1]], n.args[0]))


def _pivots(g: Graph, c: int, x: int, axes: frozenset[str]) -> Iterator[str]:
    """Operators by which class c is the extremum of x over exactly these axes."""
    todo = [(op, axes, c) for op in ("max", "min")]
    while todo:
        op, left, y = todo.pop()
        if not left and y == x:
            yield op
        todo += [
            (op, left - {n.attr[1]}, n.args[0]) for n in g.nodes[y] if n.op == "red" and n.attr[0] == op and n.attr[1] in left
        ]


def _conjuncts(g: Graph, c: int) -> Iterator[int]:
    both = next((n for n in g.nodes[c] if n.op == "bi" and n.attr == "and"), None)
    if both is None:
        yield c
    else:
        for a in both.args:
            yield from _conjuncts(g, a)


def _attained(g: Graph, c: int) -> Iterator[tuple[int, int, bool]]:
    """(x, M, nans) for conditions x = M, or (with nans) x = M or x is NaN."""
    for n in g.nodes[c]:
        if n.op != "bi":
            continue
        if n.attr == "eq":
            a, b = n.args
            yield from ((a, b, False), (b, a, False))
        elif n.attr == "or":
            for a, b in (n.args, n.args[::-1]):
                nan = {m.args[0] for m in g.nodes[b] if m.op == "un" and m.attr == "isnan"}
                yield from ((x, m, True) for x, m, nans in _attained(g, a) if not nans and x in nan)


def _is_number(g: Graph, c: int, v: float) -> bool:
    return any(n.op == "num" and n.attr == v for n in g.nodes[c])


def _all(conditions: list[Term]) -> Term:
    out = conditions[0]
    for x in conditions[1:]:
        out = bi("and", out, x)
    return out
