"""What a planner knows of a tile program's values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from ..tile import (
    Const,
    Contract,
    Gather,
    Iota,
    Load,
    Loop,
    Map,
    Mask,
    Stmt,
    Store,
    TileProgram,
    Value,
    operands,
    walk,
)
from .arch import Arch
from .schedule import EIGHTS, HALVES, Precision


class Facts:
    def __init__(self, p: TileProgram, arch: Arch, precision: Precision):
        self.p, self.arch, self.precision = p, arch, precision
        self.tile = {a: x.tile for a, x in p.axes.items()}
        self.forced: set[str] = set()
        self.index()

    def index(self) -> None:
        self.defs: dict[int, Stmt] = {}
        self.free_values: set[int] = set()
        for s in walk(self.p.body):
            if isinstance(s, Loop):
                continue
            elif not isinstance(s, Store):
                self.defs[s.out.id] = s
                if isinstance(s, Load | Const | Iota | Mask | Map | Gather) and all(map(self.free, operands(s))):
                    self.free_values.add(s.out.id)

    def live(self, axes: Iterable[str]) -> tuple[str, ...]:
        return tuple(a for a in axes if self.tile[a] > 1 or a in self.forced)

    def axes(self, v: Value) -> tuple[str, ...]:
        return self.live(v.axes)

    def free(self, v: Value) -> bool:
        """Can the value be made afresh in any layout: does it depend on no reduction, contraction or carried state?"""
        return v.id in self.free_values

    def dtype(self, v: Value) -> str | None:
        """Of memory, if the value is merely loaded."""
        s = self.defs.get(v.id)
        return self.p.buffer(s.buffer).dtype if isinstance(s, Load) else None

    def size(self, axes: Iterable[str]) -> int:
        return math.prod(self.tile[a] for a in axes)

    def matrix(self, s: Contract) -> tuple[tuple[str, ...], ...] | None:
        """(axes of a alone, axes of b alone, summed axes) if the contraction is a matrix product."""
        a, b, k = set(self.axes(s.a)), set(self.axes(s.b)), set(self.live(s.axes))
        if not k or not k <= a or not k <= b or (a & b) - k:
            return None
        return tuple(tuple(x for x in self.tile if x in g) for g in (a - b, b - a, k))

    def tensor_dtype(self, s: Contract) -> str | None:
        """The dtype in which tensor cores may take both operands."""
        if self.precision.compute != "float32":
            return None
        loaded = [self.dtype(v) for v in (s.a, s.b)]
        if any(d is not None and d not in HALVES + EIGHTS for d in loaded):
            return None
        halves = {d for d in loaded if d in HALVES}
        if len(halves) > 1:
            return None
        if None in loaded and self.precision.accurate:
            return None
        return halves.pop() if halves else self.precision.half or ("float16" if "float8_e4m3fn" in loaded else "bfloat16")

    def chained(self, s: Contract) -> Value | None:
        """The operand of a matrix product that is computed from reductions or products: it stays in registers, on the left."""
        for v in (s.a, s.b):
            if not self.free(v):
                return v
        return None

    def node(self, v: Value, a: str) -> object:
        return ("value", v.id, a)

    def columns_wanted(self) -> set[str]:
        """Axes that are contiguous in what is written."""
        out: set[str] = set()
        for s in walk(self.p.body):
            if isinstance(s, Store) and s.index:
                out.update(a for a, c in s.index[-1].terms if c == 1)
        return out

    def loads_below(self, v: Value, by_element: bool = False) -> Iterator[Load]:
        """Loads that a value is made of; by_element: as far as maps go."""
        todo, seen = [v], set()
        while todo:
            u = todo.pop()
            s = self.defs.get(u.id)
            if u.id in seen or s is None:
                continue
            seen.add(u.id)
            if isinstance(s, Load):
                yield s
            if not by_element or isinstance(s, Map):
                todo.extend(operands(s))

    def contiguous(self, v: Value) -> set[str]:
        """Axes along which what the value is made of lies contiguously, if all of it agrees."""
        found = [
            {a for a, c in s.index[-1].terms if c == 1 and self.tile[a] > 1}
            for s in self.loads_below(v, by_element=True)
            if len(self.axes(s.out)) > 1 and s.index
        ]
        return set.intersection(*found) if found else set()

    def memory_order(self) -> dict[str, int]:
        """Axes as the kernel has them, but those that are contiguous in memory last."""
        contiguous: dict[str, int] = {}
        for s in walk(self.p.body):
            if isinstance(s, Load | Store) and s.index:
                for a, c in s.index[-1].terms:
                    if c == 1 and self.tile[a] > 1:
                        contiguous[a] = contiguous.get(a, 0) + 1
        names = list(self.tile)
        return {a: n + (len(names) if a in contiguous else 0) for n, a in enumerate(names)}
