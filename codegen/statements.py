"""Statements of a tile program, each made once for the block that it stands in; products and sums of tiles among them.

Values come in and go out; whoever asks says in which block."""

from __future__ import annotations

from collections.abc import Iterable

from .. import terms as T
from ..extraction.plan import Kernel
from .placing import Path, Placing
from .tile import Const, Contract, Iota, Map, Reduce, Stmt, Value, results


class Statements(Placing):
    def __init__(self, kernel: Kernel):
        super().__init__(kernel)
        self.blocks: dict[Path, list[Stmt]] = {(): []}
        self.values: dict[tuple[object, Path], Value] = {}
        self.count = 0

    def new(self, axes: Iterable[str], predicate: bool = False) -> Value:
        self.count += 1
        return Value(self.count, tuple(sorted(axes)), predicate)

    def emit(self, p: Path, stmt: Stmt) -> Value:
        self.blocks[p].append(stmt)
        return results(stmt)[0]

    def const(self, v: float) -> Value:
        """At the very beginning, whoever asks."""
        key = (("const", v.hex()), ())
        if key not in self.values:
            self.values[key] = self.new(())
            self.blocks[()].insert(0, Const(self.values[key], v))
        return self.values[key]

    def map(self, p: Path, fn: str, args: Iterable[Value], role: str = "") -> Value:
        args = tuple(args)
        key = (("map", fn, args), p)
        if key not in self.values:
            axes = frozenset().union(*[a.axes for a in args])
            self.values[key] = self.emit(p, Map(self.new(axes, fn in T.PREDICATES), fn, args, role))
        return self.values[key]

    def reduce(self, op: str, axes: list[str], x: Value, here: Path, acc: Value | None, role: str = "") -> Value:
        for a in axes:
            x = self.along(x, a, here)
        out = frozenset(x.axes) - set(axes)
        if acc is None or frozenset(acc.axes) <= out:
            return self.emit(here, Reduce(self.new(out), op, tuple(axes), x, acc, role))
        part = self.emit(here, Reduce(self.new(out), op, tuple(axes), x, None, role))
        return self.map(here, {"+": "add", "*": "mul"}.get(op, op), (acc, part))

    def contraction(self, axes: list[str], args: list[Value], here: Path, acc: Value | None, role: str = "") -> Value:
        """acc + Σ over axes of a product: factors gather around the widest one, the rest is the other operand."""
        missing = [a for a in axes if not any(a in v.axes for v in args)]
        for a in missing:
            args = [self.along(args[0], a, here), *args[1:]]
        wide = max(args, key=lambda v: len(v.axes))
        left = [v for v in args if set(v.axes) <= set(wide.axes)]
        right = [v for v in args if v not in left]
        if not right:  # all lie on one tile: still a contraction of two operands
            rest = list(args)
            rest.remove(wide)
            left, right = [wide], rest
        x, y = (vs[0] if len(vs) == 1 else self.map(here, "mul", vs) for vs in (left, right))
        out = ({*x.axes} | {*y.axes}) - set(axes)
        if acc is None or set(acc.axes) <= out:
            return self.emit(here, Contract(self.new(out), tuple(axes), x, y, acc, role))
        return self.map(here, "add", (acc, self.emit(here, Contract(self.new(out), tuple(axes), x, y, None, role))))

    def along(self, x: Value, axis: str, here: Path) -> Value:
        """The value with `axis`, along which it may be constant: then a reduction over it counts the elements that exist."""
        if axis in x.axes:
            return x
        position = self.limits.get(axis, T.axis_index(axis))  # whether an element exists may depend on other axes
        key = (("along", position), here)
        if key not in self.values:
            ramp = self.emit(here, Iota(self.new(position.axes), position))
            self.values[key] = self.map(here, "mul", (self.const(0.0), ramp))
        return self.map(here, "add", (x, self.values[key]))
