"""Sums that add values as a product beside them takes them: rounded.

Where a product takes a computed operand rounded to 16 bits and the same values are also summed, a quotient of the two (a weighted
mean) is better if both saw the same weights: then a mean of one value is that value.  But a sum that is compared with other
sums of the same weights, which are not rounded, must not be: differences that cancel would not.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..tile import Const, Contract, Gather, Iota, Load, Loop, Map, Mask, Reduce, Stmt, Store, TileProgram, Value, operands, walk


def adds_rounded(p: TileProgram, total: Reduce, products: frozenset[int]) -> bool:
    """Does nothing speak against rounding what `total` adds?  products: results of the products that take it rounded."""
    return _Uses(p, total, products).agree()


class _Uses:
    def __init__(self, p: TileProgram, total: Reduce, products: frozenset[int]):
        self.p, self.total, self.products = p, total, products
        self.defs: dict[int, Stmt] = {s.out.id: s for s in walk(p.body) if not isinstance(s, Loop | Store)}
        mine = self.made_of(total.arg)
        others = {s.out.id for s in self.sums() if any(not mine.isdisjoint(self.made_of(v)) for v in operands(s)[:2])}
        self.marked = {total.out.id, *products, *(others - products)}

    def sums(self) -> Iterator[Reduce | Contract]:
        """Of other values, over the same axes."""
        for s in self.defs.values():
            if isinstance(s, Reduce | Contract) and set(s.axes) & set(self.total.axes) and getattr(s, "op", "+") == "+":
                if not (isinstance(s, Reduce) and s.arg == self.total.arg):
                    yield s

    def made_of(self, v: Value) -> set[int]:
        """The value and what it is computed from, element by element, as far as that varies along the sum's axes."""
        out: set[int] = set()
        todo = [v]
        while todo:
            u = todo.pop()
            s = self.defs.get(u.id)
            if u.id in out or s is None or isinstance(s, Load | Const | Iota | Mask) or not set(u.axes) & set(self.total.axes):
                continue
            out.add(u.id)
            if isinstance(s, Map | Gather):
                todo.extend(operands(s))
        return out

    def agree(self) -> bool:
        """Follow the sum to where it meets a product's result (well), another sum (not), or is stored."""
        seen: dict[int, frozenset[int]] = {}  # value → the marked sums that it comes from

        def of(v: Value) -> frozenset[int]:
            return seen.get(v.id, frozenset())

        def alone(marks: frozenset[int]) -> bool:
            return self.total.out.id in marks and not marks & self.products

        def other(marks: frozenset[int]) -> bool:
            return bool(marks) and self.total.out.id not in marks and not marks & self.products

        def follow(body: tuple[Stmt, ...]) -> bool:
            for s in body:
                if isinstance(s, Loop):
                    for _ in range(2):  # state comes round
                        for c in s.carries:
                            seen[c.phi.id] = of(c.init) | of(c.next)
                        if not follow(s.body):
                            return False
                    for c in s.carries:
                        seen[c.out.id] = of(c.init) | of(c.next)
                elif isinstance(s, Reduce | Contract):
                    seen[s.out.id] = frozenset({s.out.id} & self.marked)
                elif not isinstance(s, Store):
                    marks = [of(v) for v in operands(s)]
                    if any(map(alone, marks)) and any(map(other, marks)):
                        return False
                    seen[s.out.id] = frozenset().union(*marks)
            return True

        if not follow(self.p.body):
            return False
        stored = [of(s.arg) for s in walk(self.p.body) if isinstance(s, Store)]
        return not (any(map(alone, stored)) and any(map(other, stored)))
