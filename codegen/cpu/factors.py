"""Constant factors move to where they cost least.  Both rewrites reassociate.

distribute_factors   (a − b)·c  →  a·c − b·c  with b smaller than a, where a·c is free: c goes on into the making of a, and a
                     maximum of a becomes the maximum of a·c, divided by c
fold_scales          (Σ a·b)·c  →  Σ (a·c)·b  where a is a smaller tensor, or seen fewer times

Factors lie between 2⁻²⁰ and 1: a larger one could overflow where it goes and not where it was, a tiny one underflow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from ..tile import Const, Contract, Loop, Map, Reduce, Stmt, Store, TileProgram, Value, live, walk
from .rewrite import Fresh, expand, uses, work

LEAST = 2.0**-20


def prepare_factors(p: TileProgram) -> TileProgram:
    """The cheapest program that the rewrites of this module make."""
    return min((fold_scales(p), fold_scales(distribute_factors(p))), key=passes)


def passes(p: TileProgram) -> float:
    """Elements that the elementwise operations and reductions of a block read."""
    size = work(p)
    total = 0.0
    for s in walk(p.body):
        if isinstance(s, Map):
            total += size[s.out.id] * max(1, len(s.args) - 1)
        elif isinstance(s, Reduce):
            total += size[s.out.id] * math.prod(p.axes[a].tile for a in s.axes)
    return total


def factor_of(s: Stmt, consts: dict[int, float]) -> tuple[Value, float] | None:
    """(x, c) if the statement computes x·c."""
    if not isinstance(s, Map) or s.fn != "mul":
        return None
    rest = [a for a in s.args if a.id not in consts]
    return (rest[0], math.prod(consts[a.id] for a in s.args if a.id in consts)) if len(rest) == 1 < len(s.args) else None


def distribute_factors(p: TileProgram) -> TileProgram:
    made: dict[int, Stmt] = {s.out.id: s for s in walk(p.body) if not isinstance(s, Loop | Store)}
    consts = {v: s.value for v, s in made.items() if isinstance(s, Const)}
    fresh, count = Fresh(p), uses(p)
    after: dict[int, list[Stmt]] = {}  # value → statements to insert behind its own
    scaled: dict[tuple[int, float], Value] = {}

    def constant(value: float, beside: Value) -> Value:
        v = fresh(())
        after.setdefault(beside.id, []).append(Const(v, value))
        return v

    def rounded(x: Value) -> bool:
        """Is x inexact already, and made so that a factor costs nothing?  (Sums are not: their terms may cancel.)"""
        s = made.get(x.id)
        if isinstance(s, Map) and s.fn == "where":
            return all(a.id in consts or rounded(a) for a in s.args[1:])
        if isinstance(s, Map) and (f := factor_of(s, consts)) is not None:
            return math.frexp(f[1])[0] not in (0.5, -0.5) or rounded(f[0])
        return isinstance(s, Contract)

    def scale(x: Value, c: float) -> Value:
        """x·c, computed like x."""
        if (x.id, c) not in scaled:
            s = made[x.id]
            if isinstance(s, Map) and s.fn == "where":
                args = [constant(consts[a.id] * c, x) if a.id in consts else scale(a, c) for a in s.args[1:]]
                new = replace(s, out=fresh(x.axes), args=(s.args[0], *args))
            else:
                y, f = factor_of(s, consts) or (x, 1.0)
                new = Map(fresh(x.axes), "mul", (y, constant(f * c, x)))
            after.setdefault(x.id, []).append(new)
            scaled[x.id, c] = new.out
        return scaled[x.id, c]

    swap: dict[int, list[Stmt]] = {}  # value → what computes it now
    for s in walk(p.body):
        f = factor_of(s, consts)
        d = made.get(f[0].id) if f is not None else None
        if (
            f is None
            or not isinstance(s, Map)
            or not isinstance(d, Map)
            or d.fn != "sub"
            or count[d.out.id] != 1
            or not LEAST <= f[1] <= 1.0
        ):
            continue
        a, b = d.args
        if not set(b.axes) < set(a.axes) or b.id in consts or not rounded(a):
            continue
        factor, product = fresh(()), fresh(b.axes)
        swap[s.out.id] = [
            Const(factor, f[1]),
            Map(product, "mul", (b, factor)),
            Map(s.out, "sub", (scale(a, f[1]), product), s.role),
        ]
    if not swap:
        return p
    for s in walk(p.body):
        if not isinstance(s, Reduce) or s.op not in ("max", "min"):
            continue
        c = next((c for v, c in scaled if v == s.arg.id), None)
        if c is not None:
            part, factor, top = fresh(set(s.arg.axes) - set(s.axes)), fresh(()), fresh(set(s.arg.axes) - set(s.axes))
            new: list[Stmt] = [Reduce(part, s.op, s.axes, scaled[s.arg.id, c], None, s.role), Const(factor, 1.0 / c)]
            out = s.out if s.acc is None else top
            new.append(Map(out, "mul", (part, factor)))
            swap[s.out.id] = new if s.acc is None else [*new, Map(s.out, s.op, (s.acc, top), s.role)]

    def rewritten(s: Stmt) -> Iterable[Stmt]:
        if isinstance(s, Loop | Store):
            return [s]
        return [*swap.get(s.out.id, [s]), *after.get(s.out.id, ())]

    return replace(p, body=live(expand(p.body, rewritten), set()))


def fold_scales(p: TileProgram) -> TileProgram:
    """A factor moves from a contraction's result to its cheaper operand."""
    consts = {s.out.id: s.value for s in walk(p.body) if isinstance(s, Const)}
    fresh, count, size = Fresh(p), uses(p), work(p)
    after: dict[int, list[Stmt]] = {}  # value → statements to insert behind its own
    scaled: dict[tuple[int, float], Value] = {}
    swap: dict[int, Contract] = {}  # contraction → its scaled form, which computes what the product did
    gone: set[int] = set()

    def visit(body: tuple[Stmt, ...]) -> None:
        made = {s.out.id: s for s in body if isinstance(s, Contract) and s.acc is None}
        for s in body:
            if isinstance(s, Loop):
                visit(s.body)
                continue
            product = factor_of(s, consts)
            if product is None or not isinstance(s, Map) or count[product[0].id] != 1 or not LEAST <= abs(product[1]) <= 1.0:
                continue
            c, factor = made.get(product[0].id), product[1]
            x = min((v for v in (c.a, c.b) if v.id in size), key=lambda v: size[v.id], default=None) if c is not None else None
            if c is None or x is None or size[x.id] * 2 > size[c.out.id]:
                continue
            if (x.id, factor) not in scaled:
                unit, scaled[x.id, factor] = fresh(()), fresh(x.axes)
                after.setdefault(x.id, []).extend([Const(unit, factor), Map(scaled[x.id, factor], "mul", (x, unit))])
            y = scaled[x.id, factor]
            swap[c.out.id] = replace(c, out=s.out, a=y if c.a == x else c.a, b=c.b if c.a == x else y)
            gone.add(s.out.id)

    visit(p.body)
    if not swap:
        return p

    def rewritten(s: Stmt) -> Iterable[Stmt]:
        if isinstance(s, Loop | Store):
            return [s]
        new = [] if s.out.id in gone else [swap[s.out.id]] if s.out.id in swap else [s]
        return [*new, *after.get(s.out.id, ())]

    return replace(p, body=expand(p.body, rewritten))
