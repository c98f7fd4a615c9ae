"""Which products stand side by side: XA and XB, sums over the same axes that share an operand, become parts of one tensor [XA XB].

A kernel computes several results where they have the same axes.  Columns of A and of B are different axes, so XA and XB would be two
kernels that both load X; side by side they have one axis, first the columns of A, then those of B.  The rule that says so is
"concatenate" in declared.py; here is decided for which tensors, and how each is read from the other.  It is a trade: a launch and a
pass over X less, but every tile of the new axis works on both products, of which it needs one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ..program import Program
from ..terms import Affine, Term, ViewMap, axis_index, bi, depends, iota, num, postorder, view, where

MOST = 8  # products in one tensor


@dataclass(frozen=True)
class Size:
    """What a kernel that stores a tensor must do at least: flops of its products, elements that it reads and writes."""

    flops: float
    elements: float


Pays = Callable[[Size, Size, Size], bool]  # two tensors apart, and both in one: is that better?


@dataclass(frozen=True)
class Join:
    """Two tensors side by side along a new axis: `first` at its first `places` positions.

    read_first, read_second: the views that read each at a position of the new axis (0 outside of it); place_first, place_second: those
    that read the whole where each lies."""

    first: Term
    second: Term
    axis: str
    extent: int
    places: int
    read_first: ViewMap
    read_second: ViewMap
    place_first: ViewMap
    place_second: ViewMap

    @property
    def whole(self) -> Term:
        """Both tensors as one, as the rule makes it."""
        second = view(self.second, self.read_second) if self.read_second else self.second
        return where(bi("lt", iota(self.axis), num(self.places)), view(self.first, self.read_first), second)


@dataclass(frozen=True)
class _Part:
    """A product of the source, or several that are joined.  operand: the elements of the one that is shared; others: what else is
    read and written."""

    term: Term
    flops: float
    operand: float
    others: float

    @property
    def size(self) -> Size:
        return Size(self.flops, self.operand + self.others)


def find(program: Program, pays: Pays | None = None) -> list[Join]:
    """Joins of products in the program that share an operand, where it pays (None: all that there are, of outputs too)."""
    groups: dict[tuple[frozenset[str], Term], list[_Part]] = {}
    outputs = {o.term for o in program.outputs} if pays is not None else set()  # outputs are stored by themselves
    for t in _sums(program):
        if t not in outputs:
            axes, factors = _product(t)
            for x in dict.fromkeys(factors):
                if any(depends(x.free, k) for k in axes) and len(factors) > 1:
                    groups.setdefault((axes, x), []).append(_part(t, x, factors, axes, program))
    out: list[Join] = []
    done: set[Term] = set()
    extents = dict(program.axes)
    for parts in groups.values():
        left = [p for p in parts if p.term not in done]
        while left:
            one, count = left.pop(0), 1
            while count < MOST:
                made = next(((p, j) for p in left if (j := _joined(one, p, extents, pays)) is not None), None)
                if made is None:
                    break
                other, (join, one) = made
                out.append(join)
                extents[join.axis] = join.extent
                done |= {join.first, join.second}
                left.remove(other)
                count += 1
    return out


def _sums(program: Program) -> Iterator[Term]:
    """Sums that are not the body of another sum."""
    terms = list(postorder(o.term for o in program.outputs))
    inside = {t.args[0] for t in terms if _is_sum(t)}
    return (t for t in terms if _is_sum(t) and t not in inside)


def _is_sum(t: Term) -> bool:
    return t.op == "red" and t.attr[0] == "+"


def _product(t: Term) -> tuple[frozenset[str], tuple[Term, ...]]:
    """The axes of a nest of sums, and the factors of what it sums."""
    axes = set()
    while _is_sum(t):
        axes.add(t.attr[1])
        t = t.args[0]
    return frozenset(axes), t.args if t.op == "mul" else (t,)


def _part(t: Term, shared: Term, factors: tuple[Term, ...], axes: frozenset[str], program: Program) -> _Part:
    def elements(free: frozenset[str]) -> float:
        return float(math.prod(program.axes[a] for a in free))

    others = sum(elements(x.free) for x in dict.fromkeys(factors) if x is not shared)
    return _Part(
        t, 2.0 * elements(frozenset().union(*(x.free for x in factors), axes)), elements(shared.free), others + elements(t.free)
    )


def _joined(a: _Part, b: _Part, extents: dict[str, int], pays: Pays | None) -> tuple[Join, _Part] | None:
    """Both side by side, if their axes allow it: but for one axis of each (or of one of them), those that only one has are of equal
    extents, and are renamed."""
    order = list(extents)
    mine, yours = (sorted(x.term.free - y.term.free, key=order.index) for x, y in ((a, b), (b, a)))
    if len(mine) < len(yours):
        a, b, mine, yours = b, a, yours, mine
    renamed: list[tuple[str, str]] = []  # axes of b, and those of a that stand for them
    for e in list(yours) if len(mine) > 1 else ():
        same = next((d for d in mine if extents[d] == extents[e]), None)
        if same is not None and len(mine) > 1:
            mine.remove(same)
            yours.remove(e)
            renamed.append((e, same))
    if len(mine) != 1 or len(yours) > 1:
        return None
    own, other = mine[0], yours[0] if yours else None
    n = extents[own]
    extent = n + (extents[other] if other else 1)
    axis = next(c for i in range(len(extents) + 1) if (c := f"c{i}") not in extents)
    at = axis_index(axis)
    join = Join(
        a.term,
        b.term,
        axis,
        extent,
        n,
        ((own, at),),
        (*([(other, Affine(-n, at.terms))] if other else []), *((e, axis_index(d)) for e, d in renamed)),
        ((axis, axis_index(own)),),
        ((axis, Affine(n, axis_index(other).terms if other else ())), *((d, axis_index(e)) for e, d in renamed)),
    )
    flops = extent * (a.flops / n + b.flops / (extent - n))
    both = _Part(join.whole, flops, a.operand, a.others + b.others)
    if pays is not None and not pays(a.size, b.size, both.size):
        return None
    return join, replace(both, operand=max(a.operand, b.operand))
