"""The parts of an iteration: which of a loop's statements must come before its products, beside them and behind them.

Products are of two kinds:
    early   of tiles alone, wanted by the same iteration (scores),
    late    added to carried state, wanted only by the next iteration,
so one iteration's elementwise work may run beside the next one's early and its own late products.  A loop that has no such
order raises `Unsupported`."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from ..cuda.layout import Unsupported
from ..tile import Contract, Load, Loop, Stmt, Store, operands


@dataclass
class Parts:
    """The statements of an iteration, in the order in which the pipeline runs them."""

    early: list[Contract] = field(default_factory=list)
    score: list[Stmt] = field(default_factory=list)  # may run beside late products
    weight: list[Stmt] = field(default_factory=list)  # writes what late products read
    state: list[Stmt] = field(default_factory=list)  # touches what late products add to
    late: list[Contract] = field(default_factory=list)


def partition(loop: Loop, body: tuple[Stmt, ...], tiles: Container[int]) -> Parts:
    """body: of the loop, or of one with the same carries.  tiles: loads that come by tensor map, before the iteration."""
    defs = {s.out.id: s for s in body if not isinstance(s, Store | Loop)}
    phis = {c.phi.id: c for c in loop.carries}
    nexts = {c.next.id: c for c in loop.carries}
    late = [s for s in body if isinstance(s, Contract) and s.acc is not None and s.out.id in nexts]
    read = {v.id for s in body for v in operands(s)}
    for product in late:
        if product.out.id in read or sum(c.next == product.out for c in loop.carries) != 1:
            raise Unsupported("a carried product that the same iteration reads")
    sums = {nexts[s.out.id].phi.id for s in late}
    touched: set[int] = set(sums)  # values that depend on what late products add to
    for s in body:
        if any(v.id in touched for v in operands(s)) and s not in late:
            touched.add(s.out.id)  # type: ignore[union-attr]
    if any(p.a.id in touched or p.b.id in touched for p in late):
        raise Unsupported("a product that depends on another one's sum")
    for c in loop.carries:
        if c.phi.id not in sums and c.next.id in touched:
            raise Unsupported("state that depends on a product's sum")
    parts = Parts(late=late)
    for s in body:
        if isinstance(s, Contract) and s not in late:
            if any(v.id in defs and not isinstance(defs[v.id], Load) for v in (s.a, s.b)) or s.out.id in touched:
                raise Unsupported("a product of computed operands that is not carried")
            if s.acc is not None and s.acc.id in phis:
                raise Unsupported("a carried sum that the same iteration reads")
            parts.early.append(s)
    weights = {v.id for p in late for v in (p.a, p.b) if v.id in defs and not isinstance(defs[v.id], Load)}
    for s in body:
        if isinstance(s, Load | Contract):
            if isinstance(s, Load) and s.out.id not in tiles:
                parts.score.append(s)
            continue
        if s.out.id in touched:  # type: ignore[union-attr]
            parts.state.append(s)
        elif s.out.id in weights or any(v.id in weights for v in operands(s)):  # type: ignore[union-attr]
            weights.add(s.out.id)  # type: ignore[union-attr]
            parts.weight.append(s)
        else:
            parts.score.append(s)
    return parts
