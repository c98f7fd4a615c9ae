"""What a well-formed tile program is.  `problems` lists how one is not; a compiler bug, never the user's fault.

The laws are data: for each kind of statement the axes that its result must have, and what must hold of its parts.
(A store need not depend on every grid axis: then several blocks write the same value to the same place.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..terms import BINARY, PREDICATES, REDUCTIONS, UNARY, Affine
from .tile import Const, Contract, Gather, Iota, Load, Loop, Map, Mask, Reduce, Stmt, Store, TileProgram, Value, operands

ARITY = (
    {"add": (2, 99), "mul": (2, 99), "sub": (2, 2), "div": (2, 2), "where": (3, 3)}
    | {f: (1, 1) for f in UNARY}
    | {f: (2, 2) for f in BINARY}
)
KINDS = ("pivot", "linear", "sum")


class IllFormed(Exception):
    """A tile program breaks the laws of this module."""


def check(p: TileProgram) -> TileProgram:
    """The program itself, if it is well-formed."""
    if found := list(problems(p)):
        raise IllFormed(f"{p.name}: " + "; ".join(found) + f"\n{p}")
    return p


def in_index(index: Iterable[Affine]) -> set[str]:
    return {a for ix in index for a in ix.axes}


def union(*values: Value) -> set[str]:
    return {a for v in values for a in v.axes}


# statement → axes of its result
AXES: dict[type, Callable[[Any], set[str]]] = {
    Load: lambda s: in_index(s.index),
    Gather: lambda s: in_index(s.index) | union(s.position),
    Const: lambda s: set(),
    Iota: lambda s: in_index([s.index]),
    Mask: lambda s: in_index(s.constraints) | set(s.out.axes),
    Map: lambda s: union(*s.args),
    Reduce: lambda s: union(s.arg) - set(s.axes),
    Contract: lambda s: union(s.a, s.b) - set(s.axes),
}

# statement → (what must hold, does it?)
LAWS: dict[type, list[tuple[str, Callable[[Any, TileProgram], bool]]]] = {
    Load: [
        ("reads a buffer that the kernel reads", lambda s, p: s.buffer in [b.name for b in p.reads]),
        ("an index for each dimension", lambda s, p: len(s.index) == len(p.buffer(s.buffer).shape)),
    ],
    Gather: [
        ("reads a buffer that the kernel reads", lambda s, p: s.buffer in [b.name for b in p.reads]),
        ("an index for each dimension", lambda s, p: len(s.index) == len(p.buffer(s.buffer).shape)),
        ("gathers along a dimension", lambda s, p: 0 <= s.dim < len(s.index)),
    ],
    Mask: [("is a predicate", lambda s, p: s.out.predicate), ("has constraints", lambda s, p: bool(s.constraints))],
    Map: [
        ("a known function", lambda s, p: s.fn in ARITY),
        ("as many arguments as it takes", lambda s, p: s.fn not in ARITY or ARITY[s.fn][0] <= len(s.args) <= ARITY[s.fn][1]),
        ("a predicate if its function is", lambda s, p: s.out.predicate == (s.fn in PREDICATES)),
    ],
    Reduce: [
        ("a known operator", lambda s, p: s.op in REDUCTIONS),
        ("reduces axes of its argument", lambda s, p: bool(s.axes) and set(s.axes) <= set(s.arg.axes)),
        ("reduces no grid axis", lambda s, p: not any(p.axes[a].role == "grid" for a in s.axes)),
        ("an accumulator within its axes", lambda s, p: s.acc is None or set(s.acc.axes) <= set(s.out.axes)),
    ],
    Contract: [
        ("sums axes of its operands", lambda s, p: bool(s.axes) and set(s.axes) <= union(s.a, s.b)),
        ("sums no grid axis", lambda s, p: not any(p.axes[a].role == "grid" for a in s.axes)),
        ("an accumulator within its axes", lambda s, p: s.acc is None or set(s.acc.axes) <= set(s.out.axes)),
    ],
    Store: [
        ("writes a buffer that the kernel writes", lambda s, p: s.buffer in [b.name for b in p.writes]),
        ("an index for each dimension", lambda s, p: len(s.index) == len(p.buffer(s.buffer).shape)),
        ("a place for each element", lambda s, p: set(s.arg.axes) <= in_index(s.index)),
        ("no two elements in one place", lambda s, p: all(injective(ix, p) for ix in s.index)),
    ],
    Loop: [
        ("walks a loop axis", lambda s, p: s.axis in p.axes and p.axes[s.axis].role == "loop"),
        ("carries do not vary along it", lambda s, p: not any(s.axis in c.phi.axes for c in s.carries)),
        (
            "a carry keeps its axes",
            lambda s, p: all(c.phi.axes == c.out.axes and {*c.init.axes, *c.next.axes} <= {*c.phi.axes} for c in s.carries),
        ),
        ("known carries", lambda s, p: all(c.kind in KINDS and c.op in REDUCTIONS for c in s.carries)),
    ],
}


def injective(ix: Affine, p: TileProgram) -> bool:
    """Do different positions have different values?  (Mixed radix: each step is longer than all smaller ones together.)"""
    reach = 0
    for a, c in sorted(ix.terms, key=lambda t: abs(t[1])):
        if abs(c) <= reach:
            return False
        reach += abs(c) * (p.axes[a].extent - 1)
    return True


def problems(p: TileProgram) -> Iterator[str]:
    if not set(p.limits) <= set(p.axes):
        yield "limits of axes that it does not walk"
    if p.compute_dtype not in ("float32", "float64"):
        yield f"computes in {p.compute_dtype}"
    for a, x in p.axes.items():
        if (
            x.role not in ("grid", "loop", "whole")
            or (x.role == "whole" and x.tile != x.extent)
            or not 0 <= x.tile <= max(1, x.extent)
        ):
            yield f"axis {a} is {x}"
    written: dict[str, int] = {}
    defined: set[int] = set()
    yield from _body(p, p.body, {}, (), written, defined)
    for b in p.writes:
        if written.get(b.name, 0) < b.size:
            yield f"stores cover {written.get(b.name, 0)} of {b.size} elements of {b.name}"


def _body(
    p: TileProgram,
    body: tuple[Stmt, ...],
    outer: dict[int, Value],
    loops: tuple[str, ...],
    written: dict[str, int],
    defined: set[int],
) -> Iterator[str]:
    known = dict(outer)

    def define(v: Value, inside: tuple[str, ...]) -> Iterator[str]:
        if v.id in defined:
            yield f"{v} is defined twice"
        defined.add(v.id)
        known[v.id] = v
        if list(v.axes) != sorted(set(v.axes)) or not set(v.axes) <= set(p.axes):
            yield f"the axes of {v}"
        elif any(p.axes[a].role == "loop" and a not in inside for a in v.axes):
            yield f"{v} outside of its loops"

    def read(v: Value) -> Iterator[str]:
        if known.get(v.id) != v:
            yield f"{v} is read before it is known"

    for s in body:
        what = type(s).__name__.lower()
        for v in operands(s):
            yield from read(v)
        yield from (f"{what} {getattr(s, 'out', '')}: {law}, not so" for law, holds in LAWS.get(type(s), []) if not holds(s, p))
        if isinstance(s, Store):
            axes = in_index(s.index)
            count = math.prod(p.axes[a].extent for a in axes)
            for a in axes:  # the elements of a ragged split that do not exist
                if a.endswith(".i") and a[:-2] in p.extents and a[:-1] + "o" in axes:
                    count = count // (p.extents[a] * p.extents[a[:-1] + "o"]) * p.extents[a[:-2]]
            written[s.buffer] = written.get(s.buffer, 0) + count
            if extra := [a for a in loops if p.axes[a].trips > 1 and a not in axes]:
                yield f"store {s.buffer}: written again in each trip of {extra}"
        elif isinstance(s, Loop):
            if s.axis in loops:
                yield f"a loop over {s.axis} inside another one"
            inner = dict(known)
            for c in s.carries:
                yield from define(c.phi, loops)
                inner[c.phi.id] = known.pop(c.phi.id)
            ends: dict[int, Value] = {}
            yield from _body(p, s.body, inner, (*loops, s.axis), written, defined)
            ends = inner | {r.out.id: r.out for r in s.body if not isinstance(r, (Store, Loop))}
            ends |= {c.out.id: c.out for r in s.body if isinstance(r, Loop) for c in r.carries}
            for c in s.carries:
                if ends.get(c.next.id) != c.next:
                    yield f"{c.next} is carried on before it is known"
                yield from define(c.out, loops)
        else:
            yield from define(s.out, loops)
            if set(s.out.axes) != AXES[type(s)](s):
                yield f"{what} {s.out} should have axes {sorted(AXES[type(s)](s))}"
