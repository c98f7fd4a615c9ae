"""Tile program → tile program: what makes the CPU's work simpler or cheaper.  Each rewrite keeps the program's meaning.

reduce_one_sided   a contraction over an axis that one operand lacks: sum the other operand first
mask_loose_limits  limits that clipping a tile cannot express become masks in front of reductions
and those of factors.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from ...terms import REDUCTIONS
from ..tile import (
    Const,
    Contract,
    Gather,
    Load,
    Loop,
    Map,
    Mask,
    Reduce,
    Stmt,
    Store,
    TileProgram,
    Value,
    operands,
    results,
    walk,
)

# ------------------------------------------------------------------ tools


def rename(s: Stmt, m: dict[int, Value]) -> Stmt:
    """The statement (not the body of a loop) with operands replaced."""

    def get(v: Value) -> Value:
        return m.get(v.id, v)

    match s:
        case Map():
            return replace(s, args=tuple(map(get, s.args)))
        case Reduce():
            return replace(s, arg=get(s.arg), acc=s.acc and get(s.acc))
        case Contract():
            return replace(s, a=get(s.a), b=get(s.b), acc=s.acc and get(s.acc))
        case Gather():
            return replace(s, position=get(s.position))
        case Store():
            return replace(s, arg=get(s.arg))
        case Loop():
            return replace(s, carries=tuple(replace(c, init=get(c.init), next=get(c.next)) for c in s.carries))
    return s


def expand(body: Iterable[Stmt], f: Callable[[Stmt], Iterable[Stmt]]) -> tuple[Stmt, ...]:
    """Each statement replaced by f's, bodies of loops first."""
    out: list[Stmt] = []
    for s in body:
        out.extend(f(replace(s, body=expand(s.body, f)) if isinstance(s, Loop) else s))
    return tuple(out)


class Fresh:
    """Numbers for new values."""

    def __init__(self, p: TileProgram):
        ids = [v.id for s in walk(p.body) for v in results(s)]
        ids += [c.phi.id for s in walk(p.body) if isinstance(s, Loop) for c in s.carries]
        self.last = max(ids, default=0)

    def __call__(self, axes: Iterable[str], predicate: bool = False) -> Value:
        self.last += 1
        return Value(self.last, tuple(sorted(axes)), predicate)


def work(p: TileProgram) -> dict[int, float]:
    """Elements that a block computes of each value: of a tile, times the trips of the loops around it."""
    out: dict[int, float] = {}

    def visit(body: tuple[Stmt, ...], passes: float) -> None:
        for s in body:
            if isinstance(s, Loop):
                visit(s.body, passes * max(1, p.axes[s.axis].trips))
            elif not isinstance(s, Store):
                out[s.out.id] = passes * math.prod(p.axes[a].tile for a in s.out.axes)

    visit(p.body, 1.0)
    return out


def uses(p: TileProgram) -> dict[int, int]:
    """How often each value is read."""
    out: dict[int, int] = {}
    for s in walk(p.body):
        for v in (*operands(s), *((c.next for c in s.carries) if isinstance(s, Loop) else ())):
            out[v.id] = out.get(v.id, 0) + 1
    return out


def point(p: TileProgram, axis: str) -> bool:
    """Is a tile of this axis always a single element that exists, so that arrays need no dimension for it?"""
    x = p.axes[axis]
    return x.tile == 1 and (axis not in p.limits or x.role == "loop")


# ------------------------------------------------------------------ contractions


POLES = frozenset({"recip", "div", "rsqrt", "log", "log2", "log10", "log1p", "tan", "atanh", "pow"})


def may_be_infinite(p: TileProgram) -> frozenset[int]:
    """Values that a pole may have made infinite, here or in another kernel (whose results are no inputs of the program)."""
    out: set[int] = set()
    changed = True
    while changed:
        before = len(out)
        for s in walk(p.body):
            if isinstance(s, Loop):
                for c in s.carries:
                    if c.init.id in out or c.next.id in out:
                        out.update((c.phi.id, c.out.id))
            elif isinstance(s, Load | Gather):
                out.update([s.out.id] if p.buffer(s.buffer).kind != "input" else [])
            elif (isinstance(s, Map) and s.fn in POLES) or any(v.id in out for v in operands(s)):
                out.update(v.id for v in results(s) if not v.predicate)
        changed = len(out) != before
    return frozenset(out)


def reduce_one_sided(p: TileProgram) -> TileProgram:
    """Not where the other operand may be infinite: Σ x·∞ is NaN where some x are negative and some are not."""
    fresh = Fresh(p)
    wild = may_be_infinite(p)

    def f(s: Stmt) -> Iterable[Stmt]:
        if not isinstance(s, Contract):
            return [s]
        out: list[Stmt] = []
        ops = []
        if any(y.id in wild and set(s.axes) & set(x.axes) - set(y.axes) for x, y in ((s.a, s.b), (s.b, s.a))):
            product = fresh({*s.a.axes, *s.b.axes})
            return [Map(product, "mul", (s.a, s.b)), Reduce(s.out, "+", s.axes, product, s.acc)]
        for x, y in ((s.a, s.b), (s.b, s.a)):
            alone = tuple(a for a in s.axes if a in x.axes and a not in y.axes)
            if alone:
                out.append(Reduce(fresh(a for a in x.axes if a not in alone), "+", alone, x))
                x = out[-1].out  # type: ignore[union-attr]
            ops.append(x)
        both = tuple(a for a in s.axes if a in s.a.axes and a in s.b.axes)
        if both:
            return [*out, replace(s, axes=both, a=ops[0], b=ops[1])]
        if s.acc is None:
            return [*out, Map(s.out, "mul", tuple(ops))]
        product = fresh(set(ops[0].axes) | set(ops[1].axes))
        return [*out, Map(product, "mul", tuple(ops)), Map(s.out, "add", (s.acc, product))]

    return replace(p, body=expand(p.body, f))


# ------------------------------------------------------------------ ragged ends that are no boxes


def loose_limits(p: TileProgram) -> list[str]:
    """Axes whose limit depends on another axis that is not a single point where the tile of the first is chosen."""
    outside: dict[str, set[str]] = {}  # loop axis → axes that are fixed around all its loops

    def visit(body: tuple[Stmt, ...], around: frozenset[str]) -> None:
        for s in body:
            if isinstance(s, Loop):
                outside[s.axis] = outside.get(s.axis, set(around)) & around
                visit(s.body, around | {s.axis})

    block = frozenset(a for a, x in p.axes.items() if x.role != "loop")
    visit(p.body, block)
    return [
        a
        for a, ix in p.limits.items()
        if not all(b == a or (point(p, b) and b in outside.get(a, block)) for b in ix.axes if p.extents[b] > 1 or b == a)
    ]


def mask_loose_limits(p: TileProgram) -> TileProgram:
    loose = [p.limits[a] for a in loose_limits(p)]
    if not loose:
        return p
    fresh = Fresh(p)

    def f(s: Stmt) -> Iterable[Stmt]:
        out: list[Stmt] = []

        def masked(x: Value, ix: object, identity: float) -> Value:
            axes = ix.axes  # type: ignore[attr-defined]
            hit, unit, res = fresh(axes, True), fresh(()), fresh({*x.axes, *axes})
            out.extend([Mask(hit, (ix,)), Const(unit, identity), Map(res, "where", (hit, x, unit))])  # type: ignore[arg-type]
            return res

        for ix in loose:
            axes = set(ix.axes)
            if isinstance(s, Reduce) and axes <= set(s.arg.axes) and axes & set(s.axes):
                s = replace(s, arg=masked(s.arg, ix, REDUCTIONS[s.op]))
            elif isinstance(s, Contract) and axes <= {*s.a.axes, *s.b.axes} and axes & set(s.axes):
                a, b = (masked(x, ix, 0.0) if axes <= set(x.axes) else x for x in (s.a, s.b))
                s = replace(s, a=masked(a, ix, 0.0) if (a, b) == (s.a, s.b) else a, b=b)
        return [*out, s]

    return replace(p, body=expand(p.body, f))
