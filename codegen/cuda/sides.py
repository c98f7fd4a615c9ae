"""Which axes of each value are rows and which are columns; groups of axes that are laid out together."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from ...program import DTYPES
from ..tile import (
    Contract,
    Gather,
    Load,
    Loop,
    Map,
    Reduce,
    Store,
    Value,
    results,
    walk,
)
from .layout import COLUMN, ROW, Entangled, Group, Layout, Sides, Torn, fragment_group, vector_group
from .rewrite import index_axes
from .schedule import EIGHTS, slots_of
from .warps import UNIT, Warps


class SideChoice(Warps):
    one_side = False  # an axis that nothing ties lies on the side where it was first

    def choose_left(self) -> None:
        self.left: dict[int, str] = {}
        self.sides = Sides()

    def choose_sides(self) -> None:
        """Label (value, axis) places: hard ties first, then what contractions demand, then memory order."""
        sides, body = self.sides, list(walk(self.p.body))

        def tie_all(x: Value, y: Value) -> None:
            if self.free(x) or self.free(y):
                return
            for a in self.axes(x):
                if a in self.axes(y) and not sides.tie(self.node(x, a), self.node(y, a)):
                    raise Entangled(f"{x} and {y} want {a} on different sides")

        for s in body:
            match s:
                case Map():
                    for v in s.args:
                        tie_all(v, s.out)
                case Gather():
                    tie_all(s.position, s.out)
                case Reduce() | Contract():
                    if s.acc:
                        tie_all(s.acc, s.out)
                case Loop():
                    for c in s.carries:
                        for v in (c.next, c.out, c.init):
                            tie_all(v, c.phi)
        # computed operands stay in registers, on the left: summed axes are columns, the others rows
        self.staged: set[tuple[int, int]] = set()
        for s in self.matrices.values():
            m = self.matrix(s)
            assert m is not None
            for v, own, _out_axes in ((s.a, m[0], m[0]), (s.b, m[1], m[1])):
                if self.free(v) or s.out.id in self.left:
                    continue
                wanted = [(self.node(v, x), COLUMN) for x in m[2]] + [(self.node(v, x), ROW) for x in own]
                wanted += [(self.node(s.out, x), ROW) for x in own]
                if all(sides.get(n) in (None, side) for n, side in wanted):
                    for n, side in wanted:
                        sides.put(n, side)
                    self.left[s.out.id] = "a" if v is s.a else "b"
        for s in body:
            if isinstance(s, Reduce) and not self.free(s.arg):
                for a in self.axes(s.out):
                    sides.tie(self.node(s.arg, a), self.node(s.out, a))  # where it fails, the result changes sides
        wanted_columns = self.columns_wanted()
        for s in self.matrices.values():
            m = self.matrix(s)
            assert m is not None
            if s.out.id not in self.left:
                of_a = {sides.get(self.node(s.out, x)) for x in m[0]} - {None}
                of_b = {sides.get(self.node(s.out, x)) for x in m[1]} - {None}
                if of_a == {ROW} or of_b == {COLUMN}:
                    self.left[s.out.id] = "a"
                elif of_a == {COLUMN} or of_b == {ROW}:
                    self.left[s.out.id] = "b"
                else:
                    column_a = bool(set(m[0]) & wanted_columns) and not set(m[1]) & wanted_columns
                    few_b = not set(m[1]) & wanted_columns and self.size(m[1]) <= 16 < self.size(m[0])
                    self.left[s.out.id] = "b" if column_a or few_b or UNIT in m[1] else "a"
            left, right = (m[0], m[1]) if self.left[s.out.id] == "a" else (m[1], m[0])
            for x, side in [(x, ROW) for x in left] + [(x, COLUMN) for x in right]:
                if not sides.put(self.node(s.out, x), side):
                    raise Entangled(f"the result of a product has {x} on both sides")
        # where nothing else decides: reduced and contiguous axes are columns; frames of many axes decide first
        frames: list[tuple[tuple, tuple[str, ...], Value, set[str]]] = []
        for s in body:
            if isinstance(s, Reduce):
                along = self.contiguous(s.arg) - set(s.axes)
                frames.append((("reduce", s.out.id), self.axes(s.arg), s.arg, along or set(s.axes)))
            elif isinstance(s, Store):
                axes = self.live(dict.fromkeys((*index_axes(s), *s.arg.axes)))
                frames.append((("store", id(s)), axes, s.arg, {a for a, c in (s.index[-1].terms if s.index else ()) if c == 1}))
        self.seen_side: dict[str, str] = {}
        for f in sorted(frames, key=lambda f: -len(f[1])):
            self.default(*f)
            if f[0][0] == "reduce" and self.free(f[2]):
                out = self.defs[f[0][1]].out  # type: ignore[union-attr]
                for a in self.axes(out):
                    sides.tie((*f[0], a), self.node(out, a))
        for s in body:
            for v in results(s):
                for a in self.axes(v):
                    if not self.free(v):
                        sides.put(self.node(v, a), ROW)

    def default(self, key: tuple, axes: tuple[str, ...], v: Value, columns: set[str]) -> None:
        """Sides of the frame of a reduction or store."""
        sides = self.sides
        nodes = {a: (*key, a) for a in axes}
        for a, n in nodes.items():
            if not self.free(v) and a in self.axes(v):
                sides.tie(n, self.node(v, a))
        known = {sides.get(n) for n in nodes.values()} - {None}
        for a, n in nodes.items():
            if sides.get(n) is None:
                if len(axes) == 1 or (self.one_side and a in self.seen_side):
                    side = self.seen_side.get(a) or (COLUMN if a in columns else ROW)
                elif known == {COLUMN} and not any(sides.get(m) == ROW for m in nodes.values()):
                    side = ROW
                elif known == {ROW} and not any(sides.get(m) == COLUMN for m in nodes.values()):
                    side = COLUMN
                else:
                    side = COLUMN if a in columns else ROW
                sides.put(n, side)
            self.seen_side.setdefault(a, sides.get(n) or ROW)

    def make_groups(self) -> None:
        """Axes that meet on one side of a frame form a group."""
        parent: dict[tuple[str, str], tuple[str, str]] = {}

        def find(x: tuple[str, str]) -> tuple[str, str]:
            parent.setdefault(x, x)
            while parent[x] != x:
                x = parent[x]
            return x

        def meet(places: Iterable[tuple[str, str]]) -> None:
            first: dict[str, tuple[str, str]] = {}
            for a, side in places:
                r = find((a, side))
                if side in first:
                    parent[r] = find(first[side])
                first.setdefault(side, r)

        self.order = self.memory_order()
        frames: list[tuple[tuple, tuple[str, ...]]] = []
        for s in walk(self.p.body):
            for v in results(s) if not isinstance(s, Loop) else [x for c in s.carries for x in (c.phi, c.next, c.out)]:
                if not self.free(v):
                    frames.append((("value", v.id), self.axes(v)))
            if isinstance(s, Reduce):
                frames.append((("reduce", s.out.id), self.axes(s.arg)))
            elif isinstance(s, Store):
                frames.append((("store", id(s)), self.live(dict.fromkeys((*index_axes(s), *s.arg.axes)))))
        for key, axes in frames:
            meet([(a, self.sides.get((*key, a)) or ROW) for a in axes])
        self.late_products = {a for s in self.p.body if isinstance(s, Contract) for a in s.out.axes}  # columns of products after loops
        self.inner_columns: set[str] = set()  # summed axes of left operands in registers
        self.inner_computed: set[str] = set()  # summed axes of operands that are not merely loaded
        for s in self.matrices.values():
            m = self.matrix(s)
            assert m is not None
            left, right = (m[0], m[1]) if self.left[s.out.id] == "a" else (m[1], m[0])
            meet([(a, ROW) for a in left] + [(a, COLUMN) for a in right])
            lv = s.a if self.left[s.out.id] == "a" else s.b
            if any(self.dtype(v) is None or self.dtype(v) in EIGHTS for v in (s.a, s.b)):
                self.inner_computed.update(m[2])
            if self.dtype(lv) is None or self.dtype(lv) in EIGHTS:
                self.inner_columns.update(m[2])
                meet([(a, COLUMN) for a in m[2]])
        members: dict[tuple[str, str], list[str]] = {}
        for x in list(parent):
            members.setdefault(find(x), []).append(x[0])
        self.group_axes: dict[tuple[str, str], tuple[str, ...]] = {}
        for r, found in members.items():
            ordered = tuple(sorted(set(found), key=self.order.__getitem__))
            for a in found:
                self.group_axes[a, r[1]] = ordered
        self.groups: dict[tuple, Group] = {}
        if self.kind == "vector":
            self.settle_vector_warps()

    def settle_vector_warps(self) -> None:
        """Warps along columns: few enough elements a thread, but not more warps than there is work."""
        columns = max((self.size(g) for (a, side), g in self.group_axes.items() if side == COLUMN), default=1)
        rows = max((self.size(g) for (a, side), g in self.group_axes.items() if side == ROW), default=1)
        self.adjacent = self.vector_run()
        while self.adjacent > 1 and self.adjacent * self.arch.warp > columns:  # lanes beyond a short row's end would hold nothing
            self.adjacent //= 2
        want = self.p.choices.get("warps")
        lanes = self.arch.warp * self.adjacent
        wc = 1
        while wc < self.arch.most_warps and columns > wc * max(lanes, 32 * self.arch.warp):
            wc *= 2
        if isinstance(want, int):  # at most four times as many elements a thread
            wc = max(-(-wc // 4), min(wc, 1 << max(want, 1).bit_length() - 1))
        total = 4
        while total < 16 and columns * rows > total * 32 * self.arch.warp:
            total *= 2
        total = max(wc, want if isinstance(want, int) else min(total, wc * rows))
        self.wc, self.wr = wc, max(1, min(total // wc, rows))

    def vector_run(self) -> int:
        """Adjacent elements that a thread takes at once: 16 bytes, if every tile and extent allows."""
        run = 16
        columns = {g for (a, side), g in self.group_axes.items() if side == COLUMN}
        for s in walk(self.p.body):
            if isinstance(s, Load | Store):
                b = self.p.buffer(s.buffer)
                run = min(run, max(1, 16 // DTYPES[b.dtype]))
        for g in columns:
            last = g[-1]
            n = self.tile[last]
            if self.tile[last] != self.p.axes[last].extent:
                n = math.gcd(n, self.p.axes[last].extent)
            run = math.gcd(run, n)
        return max(1, run)

    def group(self, a: str, side: str, after: bool = False) -> Group:
        axes = self.group_axes.get((a, side))
        if axes is None:
            axes = self.group_axes[a, side] = (a,)
        key = (axes, side, after)
        if key not in self.groups:
            extents = tuple(self.tile[x] for x in axes)
            warps = self.wr if side == ROW else 1 if set(axes) & self.inner_columns else self.wc
            if self.kind == "vector":
                self.groups[key] = vector_group(axes, extents, side, self.wr if side == ROW else self.wc, self.adjacent, self.arch)
            else:
                if side == COLUMN:
                    warps = self.column_warps(axes, math.prod(extents), warps, after)
                g = fragment_group(axes, extents, side, warps, self.arch)
                if set(axes) & self.inner_computed:
                    up = -(-g.padded // self.arch.fragment[2]) * self.arch.fragment[2]
                    while g.slots * up % (g.padded * slots_of(side, self.arch)):
                        up += self.arch.fragment[2]
                    g = replace(g, padded=up, slots=g.slots * up // g.padded)
                self.groups[key] = g
        return self.groups[key]

    def column_warps(self, axes: tuple[str, ...], size: int, warps: int, after: bool) -> int:
        """How many warps can have a part of the columns each."""
        if after and not set(axes) & self.inner_columns:
            warps = self.ws
        whole = size // warps
        if after and not set(axes) & self.late_products:
            return warps if size % (warps * self.arch.fragment[1]) == 0 else 1
        # a warp's part is a power of two of whole operands: then its first chunk and its steps from there share no bits
        return warps if size % (warps * self.arch.grain) == 0 and whole & (whole - 1) == 0 else 1

    def layout(self, key: tuple, axes: tuple[str, ...], after: bool) -> Layout:
        row = column = None
        for a in axes:
            side = self.sides.get((*key, a)) or ROW
            g = self.group(a, side, after)
            if side == ROW:
                row = g
            else:
                column = g
        if row and column and set(row.axes) & set(column.axes):
            raise Torn(f"merged axes {row.axes} are rows and {column.axes} columns")
        return Layout(row, column)
