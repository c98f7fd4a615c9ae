"""The same program, or the same plan, at other extents: small instances to check a compilation on.

Everything that ties extents together is kept: axes that one view reads under two names stay equal, an axis that an index uses with
an offset or with an unusual stride keeps its extent, a row-major index of several axes stays one.  Where a sum is divided by how much was added
(a mean), it is divided by the new number."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from .extraction.plan import Axis, Buffer, Kernel, Plan, Store
from .program import Input, Output, Program
from .terms import Affine, Index, Term, make, postorder, rewrite


def resized(program: Program, want: Callable[[tuple[str, ...]], int]) -> Program:
    """The program with no extent above what it was.  want: the extent wanted for axes that must have the same one (never called for
    those that must keep theirs)."""
    root, fixed = _ties(program)
    groups: dict[str, list[str]] = {}
    for a in program.axes:
        groups.setdefault(root(a), []).append(a)
    size = {r: program.axes[r] if r in fixed else min(program.axes[r], want(tuple(g))) for r, g in groups.items()}
    axes = {a: size[root(a)] for a in program.axes}
    shapes = {i.name: i.shape for i in program.inputs}
    new = rewrite([o.term for o in program.outputs], _renewed(shapes, program.axes, axes, _numbers(program, axes)))
    shape = dict(shapes)
    for t in postorder(o.term for o in program.outputs):
        if t.op == "input":
            name, index = t.attr  # type: ignore[misc]
            shape[name] = tuple(
                math.prod(axes[a] for a in ix.axes) if clean(ix, program.axes, n) else n for ix, n in zip(index, shapes[name])
            )
    ins = tuple(Input(i.name, shape[i.name], i.dtype, i.range) for i in program.inputs)
    outs = tuple(
        Output(t, o.dims, tuple(math.prod(axes[a] for a in d) for d in o.dims), o.dtype) for t, o in zip(new, program.outputs)
    )
    return replace(program, inputs=ins, outputs=outs, axes=axes)


def resized_plan(
    plan: Plan, old: Program, new: Program, block: Mapping[str, int], tile: Callable[[Kernel, str, int], int]
) -> Plan:
    """The plan of `old` for `new`, which is the same program at other extents.

    block: of axes that are split, the new length of their blocks.  tile: the new tile of a kernel's axis, from its new extent
    (whole axes have all of it)."""

    def extent(a: str) -> int:
        if a in new.axes:
            return new.axes[a]
        parent, _, part = a.rpartition(".")
        if parent not in block:
            raise ValueError(f"axis {a} of the plan has no extent in the program")
        return block[parent] if part == "i" else -(-extent(parent) // block[parent])

    shapes = {i.name: i.shape for i in new.inputs} | {f"out{n}": o.shape for n, o in enumerate(new.outputs)}
    buffers: dict[str, Buffer] = {}
    for b in plan.buffers.values():
        shape = tuple(map(extent, b.axes)) if b.kind == "temp" else shapes[b.name]
        # what is known of results may rest on extents: that a mask leaves something of every row, say
        buffers[b.name] = replace(b, shape=shape, known=b.known if b.kind == "input" else ())
    was = {b.name: b.shape for b in plan.buffers.values()}
    numbers = _numbers(old, new.axes)
    kernels = []
    for k in plan.kernels:
        before = {a: n for a, n in k.extents.items()}
        extents = {a: extent(a) for a in k.extents}
        terms = rewrite([s.term for s in k.stores], _renewed(was, before, extents, numbers))
        stores = tuple(Store(s.buffer, t, _moved(s.index, was[s.buffer], before, extents)) for s, t in zip(k.stores, terms))
        axes = {}
        for a, x in k.axes.items():
            n = extents[a]
            axes[a] = Axis(n, n if x.role == "whole" else max(1, min(n, tile(k, a, n))), x.role)
        kernels.append(Kernel(k.name, stores, axes, extents, dict(k.choices), wide=k.wide))
    return Plan(tuple(kernels), buffers, plan.compute_dtype)


def blocks_of(plan: Plan) -> dict[str, int]:
    """Axes that the plan splits, and the length of their blocks."""
    return {a[:-2]: n for k in plan.kernels for a, n in k.extents.items() if a.endswith(".i")}


def _ties(program: Program) -> tuple[Callable[[str], str], set[str]]:
    """(axis → one axis for all that have its extent, those of them that must keep it)"""
    shapes = {i.name: i.shape for i in program.inputs}
    fixed: set[str] = set()
    same: dict[str, str] = {}

    def root(a: str) -> str:
        while a in same:
            a = same[a]
        return a

    for t in postorder(o.term for o in program.outputs):
        if t.op == "input":
            name, index = t.attr  # type: ignore[misc]
            for ix, n in zip(index, shapes[name]):
                if not clean(ix, program.axes, n):
                    fixed.update(ix.axes)
        elif t.op == "view":
            for a, ix in t.attr:  # type: ignore[attr-defined]
                if ix.terms != ((ix.axes[0], 1),) if ix.axes else True:
                    fixed.update((a, *ix.axes))
                elif ix.const or program.axes[a] != program.axes[ix.axes[0]]:
                    fixed.update((a, *ix.axes))
                elif root(a) != root(ix.axes[0]):
                    same[root(a)] = root(ix.axes[0])
        elif t.op == "gather":
            fixed.add(t.attr)  # type: ignore[arg-type]
    counted: dict[int, str] = {}  # a number → an axis that it counts: all that it counts stay equal
    for axes in _counted(program):
        for a in axes if len(axes) == 1 else ():
            first = root(counted.setdefault(program.axes[a], a))
            if root(a) != first:
                same[root(a)] = first
    return root, {root(a) for a in fixed}


def _renewed(
    shapes: Mapping[str, tuple[int, ...]], old: Mapping[str, int], new: Mapping[str, int], numbers: Mapping[float, float]
) -> Callable[[Term, tuple[Term, ...]], Term | None]:
    def f(t: Term, args: tuple[Term, ...]) -> Term | None:
        if t.op == "num":
            return make("num", numbers[t.attr]) if t.attr in numbers else None  # type: ignore[index]
        if t.op != "input":
            return None
        name, index = t.attr  # type: ignore[misc]
        return make("input", (name, _moved(index, shapes[name], old, new)))

    return f


def _numbers(program: Program, new: Mapping[str, int]) -> dict[float, float]:
    """Old number → new one, of counts that sums are divided by, and of what rules make of them."""
    out: dict[float, float] = {}
    for axes in _counted(program):
        was, now = (math.prod(sizes[a] for a in axes) for sizes in (program.axes, new))
        if was != now and now > 0:
            for sign in (1.0, -1.0):
                out |= {sign * was: sign * now, sign / was: sign / now}
    return out


def _counted(program: Program) -> list[tuple[str, ...]]:
    """Axes of sums that are divided by the number of elements along them."""
    out = []
    for t in postorder(o.term for o in program.outputs):
        numbers = {a.attr for a in t.args if a.op == "num"} if t.op == "mul" else set()
        for x in t.args if numbers else ():
            axes: tuple[str, ...] = ()
            while x.op == "red" and x.attr[0] == "+":  # type: ignore[index]
                axes, x = (*axes, x.attr[1]), x.args[0]  # type: ignore[index]
                if 1.0 / math.prod(program.axes[a] for a in axes) in numbers:
                    out.append(axes)
    return list(dict.fromkeys(out))


def _moved(index: Index, shape: tuple[int, ...], old: Mapping[str, int], new: Mapping[str, int]) -> Index:
    return tuple(row_major(ix.axes, new) if clean(ix, old, n) else ix for ix, n in zip(index, shape))


def row_major(order: tuple[str, ...], axes: Mapping[str, int]) -> Affine:
    step, terms = 1, []
    for a in reversed(order):
        terms.append((a, step))
        step *= axes[a]
    return Affine(0, tuple(reversed(terms)))


def clean(ix: Affine, axes: Mapping[str, int], n: int) -> bool:
    """Is the index the row-major one of its axes, covering the dimension?"""
    return ix == row_major(ix.axes, axes) and math.prod(axes[a] for a in ix.axes) == n
