"""Comparisons of a value with a selection from it (x = max x, x ≥ the k-th largest): both sides must see the same rounding.

Maxima, minima, choices, reads and negations select: they hand values on as they are.  Where both sides of a comparison select from
one computed value, that value is stored once, every side reads it from there, and what lies between is made of selections alone
(a rule may have written max(c·x) as c·max x).  Payloads (see rules/payloads.py) need none of this.
"""

from __future__ import annotations

from collections.abc import Iterable

from .. import terms as T
from ..graph import Node
from .classes import Classes

COMPARISONS = ("eq", "ne", "lt", "le")
EXACT = frozenset({"abs", "sign", "floor", "ceil", "round", "trunc", "not", "isnan", "isinf", "isfinite"})


def consistent(cl: Classes) -> tuple[frozenset[int], dict[int, list[Node]]]:
    """Classes that must be stored for a comparison's sake, and the nodes that remain of the others."""
    stored: set[int] = set()
    between: set[int] = set()
    exact = _exact(cl)
    for n in cl.source.values():
        if n.op == "bi" and n.attr in COMPARISONS:
            left, right = (_selected(cl, a) for a in n.args)
            common = (left & right) - exact
            tops = common - {x for c in common for x in _selected(cl, c) if x != c}
            bases = {_base(cl, c, exact) for c in tops}
            stored |= bases
            between |= {c for c in left | right if _selected(cl, c) & bases}
    if not stored:
        return frozenset(), cl.nodes
    nodes = dict(cl.nodes)
    for c in between - stored:
        nodes[c] = [n for n in nodes[c] if _selects(cl, n)] or nodes[c]
    return frozenset(stored), nodes


def _selects(cl: Classes, n: Node) -> bool:
    return bool(_passed(cl, n)) or n.op in ("num", "input", "stored")


def _passed(cl: Classes, n: Node) -> Iterable[int]:
    """Arguments whose values the node hands on."""
    match n.op:
        case "red" if n.attr[0] in ("max", "min"):
            return n.args
        case "fold" if n.attr[1] < len(n.attr[0].pivots) and isinstance(n.attr[0].pivots[n.attr[1]], str):
            return (n.args[n.attr[1]],)
        case "where":
            return n.args[1:]
        case "view" | "gather":
            return n.args[:1]
        case "bi" if n.attr in ("max", "min"):
            return n.args
        case "mul" if len(n.args) == 2 and any(_is_sign(cl, a) for a in n.args):
            return [a for a in n.args if not _is_sign(cl, a)]
    return ()


def _is_sign(cl: Classes, c: int) -> bool:
    return any(n.op == "num" and abs(n.attr) == 1.0 for n in cl.nodes[c])


def _selected(cl: Classes, c: int) -> frozenset[int]:
    """The class and all that the source selects it from."""
    seen: set[int] = set()
    todo = [c]
    while todo:
        x = todo.pop()
        if x not in seen:
            seen.add(x)
            todo.extend(_passed(cl, cl.source[x]))
    return frozenset(seen)


def _base(cl: Classes, c: int, exact: frozenset[int]) -> int:
    """What a class is selected from, as long as that is one thing."""
    while len(below := [a for a in dict.fromkeys(_passed(cl, cl.source[c])) if a not in exact]) == 1:
        c = below[0]
    return c


def _exact(cl: Classes) -> frozenset[int]:
    """Classes without rounding: inputs, positions, conditions, and what is selected from them."""
    out: set[int] = set()
    for c in cl.source_order:
        n = cl.source[c]
        plain = n.op in ("num", "iota", "input") or (n.op in ("un", "bi") and n.attr in T.PREDICATES)
        passed = list(_passed(cl, n)) or (list(n.args) if n.op == "un" and n.attr in EXACT else [])
        if plain or (passed and all(a in out for a in passed)):
            out.add(c)
    return frozenset(out)
