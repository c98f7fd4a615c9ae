"""The frozen e-graph: what saturation hands to extraction.  Plain Python, with no tie to an engine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .terms import Term, make


@dataclass(frozen=True, slots=True)
class Node:
    """An e-node.  op, attr as in terms.py (a fold's attr has the `Monoid` itself); args: classes; why: the rule that made it,
    "source" if the program has it.  Arguments of add and mul are sorted."""

    op: str
    attr: Any
    args: tuple[int, ...] = ()
    why: str = "source"

    @property
    def key(self) -> tuple:
        return (self.op, self.attr, self.args)


@dataclass
class Graph:
    """A saturated e-graph.  Classes are small ints; every node of a class has the same value (see `testing.check_graph`).

    nodes    class → its nodes; the first one begins the class's smallest term (`term`)
    free     class → free axes, in coarsest form ("k" rather than "k.o", "k.i")
    lo, hi   class → bounds.  An element lies in [lo, hi], or is masked: −inf (unless "finite") or 0 (unless "nonzero"), or is
             NaN (where the source is NaN).  A missing entry means no bound.
    facts    "finite": never ±inf or NaN; "noinf": never ±inf; "masked": finite or −inf; "nonzero": never 0;
             "source": has a node of the source.  All hold for finite inputs; scores may be −inf besides (see scores.py).
    normsq   class → {axis: bound on the sum of squares along that axis}
    outputs  class of each output of the program
    extents  extents of the whole axes
    retired  class → nodes of the source that rules retired for others, which may not be legal
    """

    nodes: dict[int, list[Node]] = field(default_factory=dict)
    free: dict[int, frozenset[str]] = field(default_factory=dict)
    lo: dict[int, float] = field(default_factory=dict)
    hi: dict[int, float] = field(default_factory=dict)
    facts: dict[str, frozenset[int]] = field(default_factory=dict)
    normsq: dict[int, dict[str, float]] = field(default_factory=dict)
    outputs: tuple[int, ...] = ()
    extents: dict[str, int] = field(default_factory=dict)
    retired: dict[int, list[Node]] = field(default_factory=dict)
    _terms: dict[int, Term] = field(default_factory=dict, repr=False)

    @property
    def size(self) -> int:
        """e-nodes in all."""
        return sum(map(len, self.nodes.values()))

    def items(self) -> Iterator[tuple[int, Node]]:
        for c, ns in self.nodes.items():
            for n in ns:
                yield c, n

    def interval(self, c: int) -> tuple[float, float]:
        return self.lo.get(c, -math.inf), self.hi.get(c, math.inf)

    def has(self, c: int, fact: str) -> bool:
        return c in self.facts.get(fact, ())

    def term(self, c: int) -> Term:
        """The smallest term of a class.  Classes are numbered so that its arguments have smaller numbers."""
        if c not in self._terms:
            todo = [c]
            while todo:
                d = todo[-1]
                n = self.nodes[d][0]
                missing = [a for a in n.args if a not in self._terms]
                if missing:
                    todo += missing
                else:
                    self._terms[d] = make(n.op, n.attr, [self._terms[a] for a in n.args])
                    todo.pop()
        return self._terms[c]
