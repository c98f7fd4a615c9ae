"""Tile programs rebuilt: statements replaced, an axis of extent 1 added to a chain of values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..tile import (
    Carry,
    Contract,
    Gather,
    Load,
    Loop,
    Map,
    Reduce,
    Stmt,
    Store,
    TileProgram,
    Value,
    operands,
    results,
    walk,
)


def highest_id(p: TileProgram) -> int:
    n = 0
    for s in walk(p.body):
        n = max([n, *(v.id for v in (*operands(s), *results(s)))])
        if isinstance(s, Loop):
            n = max([n, *(v.id for c in s.carries for v in (c.phi, c.next))])
    return n


def rebuild(body: tuple[Stmt, ...], f) -> tuple[Stmt, ...]:  # type: ignore[no-untyped-def]
    """Every statement replaced by those that f gives; loops after their bodies."""
    out: list[Stmt] = []
    for s in body:
        if isinstance(s, Loop):
            s = replace(s, body=rebuild(s.body, f))
        out.extend(f(s))
    return tuple(out)


def with_axis(p: TileProgram, start: set[int], axis: str, ends: bool = False) -> TileProgram:
    """The program with an axis of extent 1 added to some values and to all that depend on them; if it `ends`, not to those that
    values with other axes meet in: there it is summed over first."""
    has: set[int] = set(start)
    cut: set[int] = set()  # results of such maps

    def value(v: Value) -> Value:
        return replace(v, axes=tuple(sorted((*v.axes, axis)))) if v.id in has and axis not in v.axes else v

    def spread(body: tuple[Stmt, ...]) -> bool:
        changed = False
        for s in body:
            if isinstance(s, Loop):
                for c in s.carries:
                    group = {c.phi.id, c.next.id, c.out.id}
                    if (has & (group | {c.init.id})) and not group <= has:
                        has.update(group)
                        changed = True
                changed |= spread(s.body)
            elif isinstance(s, Store) or s.out.id in has or s.out.id in cut:
                continue
            elif any(v.id in has for v in operands(s)):
                has.add(s.out.id)
                changed = True
        return changed

    def meets(s: Stmt) -> bool:
        mine = [set(v.axes) for v in operands(s) if v.id in has]
        others = [set(v.axes) for v in operands(s) if v.id not in has]
        return isinstance(s, Map) and bool(mine) and any(x - y for x in others for y in mine)

    while spread(p.body):
        pass
    while ends and (found := {s.out.id for s in walk(p.body) if isinstance(s, Map) and meets(s)} - cut):
        cut |= found
        has = set(start)
        while spread(p.body):
            pass
    fresh = highest_id(p)

    def f(s: Stmt) -> list[Stmt]:
        nonlocal fresh
        if not isinstance(s, Map) or s.out.id not in cut:
            return [with_values(s, value)]
        sums: list[Stmt] = []
        args = []
        for v in s.args:
            if v.id in has:
                fresh += 1
                total = Reduce(Value(fresh, v.axes), "+", (axis,), value(v))
                sums.append(total)
                v = total.out
            args.append(v)
        return [*sums, replace(s, args=tuple(args))]

    from ...extraction.plan import Axis

    body = rebuild(p.body, f)
    return replace(p, axes={**p.axes, axis: Axis(1, 1, "whole")}, extents={**p.extents, axis: 1}, body=body)


def with_values(s: Stmt, value: Callable[[Value], Value]) -> Stmt:
    """The statement with other values; of a loop, its carries."""
    match s:
        case Map():
            return replace(s, out=value(s.out), args=tuple(map(value, s.args)))
        case Reduce():
            return replace(s, out=value(s.out), arg=value(s.arg), acc=s.acc and value(s.acc))
        case Contract():
            return replace(s, out=value(s.out), a=value(s.a), b=value(s.b), acc=s.acc and value(s.acc))
        case Gather():
            return replace(s, out=value(s.out), position=value(s.position))
        case Store():
            return replace(s, arg=value(s.arg))
        case Loop():
            carries = (Carry(value(c.init), value(c.phi), value(c.next), value(c.out), c.kind, c.op) for c in s.carries)
            return replace(s, carries=tuple(carries))
    return replace(s, out=value(s.out))


def shared(p: TileProgram) -> TileProgram:
    """The program with each elementwise value computed once."""
    same: dict[int, Value] = {}

    def value(v: Value) -> Value:
        return same.get(v.id, v)

    def go(body: tuple[Stmt, ...], known: dict[tuple, Value]) -> tuple[Stmt, ...]:
        out: list[Stmt] = []
        for s in body:
            s = with_values(s, value)
            if isinstance(s, Loop):
                inside = go(s.body, dict(known))
                s = with_values(replace(s, body=inside), value)  # what is carried on may be a value that went
            elif isinstance(s, Map):
                args = sorted(a.id for a in s.args) if s.fn in ("add", "mul", "max", "min") else [a.id for a in s.args]
                first = known.setdefault((s.fn, *args), s.out)
                if first != s.out:
                    same[s.out.id] = first
                    continue
            out.append(s)
        return tuple(out)

    return replace(p, body=go(p.body, {}))


def index_axes(s: Stmt) -> tuple[str, ...]:
    return tuple(dict.fromkeys(a for ix in s.index for a in ix.axes)) if isinstance(s, Load | Store | Gather) else ()
