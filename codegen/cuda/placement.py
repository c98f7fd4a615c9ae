"""The layout of every value, the operands of every product, and in which layouts each value is needed."""

from __future__ import annotations

from ..tile import (
    Carry,
    Const,
    Contract,
    Gather,
    Load,
    Loop,
    Map,
    Reduce,
    Stmt,
    Store,
    Value,
    operands,
    walk,
)
from .layout import COLUMN, ROW, Entangled, Group, Layout, Unsupported
from .rewrite import index_axes
from .schedule import ContractPlan, Operand, RoundedSum, Schedule, TilePlan
from .sides import SideChoice
from .sums import adds_rounded


class Placement(SideChoice):
    def place(self) -> None:
        p = self.p
        self.out = Schedule(
            p, self.arch, self.precision, self.kind, self.wr, self.wc, self.ws, None, dict(self.tile), frozenset(self.forced)
        )
        o = self.out
        after = False
        loops = [s for s in p.body if isinstance(s, Loop)]
        for s in p.body:
            self.place_statement(s, after)
            if self.ws > 1 and isinstance(s, Loop) and s is loops[0]:
                after = True
                o.split = s
                for c in s.carries:
                    o.home[c.out.id] = self.layout(("value", c.out.id), self.axes(c.out), True)
        self.match_sums()

    def place_statement(self, s: Stmt, after: bool) -> None:
        o = self.out
        if isinstance(s, Loop):
            for c in s.carries:
                for v in (c.phi, c.out):
                    o.home[v.id] = self.layout(("value", v.id), self.axes(v), after)
            for x in s.body:
                self.place_statement(x, after)
            return
        if isinstance(s, Store):
            axes = self.live(dict.fromkeys((*index_axes(s), *s.arg.axes)))
            o.store_frames[id(s)] = self.layout(("store", id(s)), axes, after)
            return
        if not self.free(s.out):
            o.home[s.out.id] = self.layout(("value", s.out.id), self.axes(s.out), after)
        if isinstance(s, Reduce):
            key = ("reduce", s.out.id) if self.free(s.arg) else ("value", s.arg.id)
            frame = self.layout(key, self.axes(s.arg), after)
            o.frames[s.out.id] = frame
            reduced = set(self.live(s.axes))
            for g in frame:
                if g and set(g.axes) & reduced and not set(g.axes) & set(self.axes(s.arg)) <= reduced:
                    raise Entangled(f"a reduction over {sorted(reduced)}, part of the merged axes {g.axes}")
                if g and set(g.axes) & reduced and not set(g.axes) <= set(self.axes(s.arg)):
                    raise Entangled(f"a reduction over axes merged with others: {g.axes}")
            result = self.reduced(frame, reduced)
            if result != o.home[s.out.id]:
                self.check_conversion(s.out, result, o.home[s.out.id])
        elif isinstance(s, Contract):
            self.place_contract(s, after)

    @staticmethod
    def reduced(frame: Layout, axes: set[str]) -> Layout:
        """What is left of a frame after a reduction."""
        return Layout(*(None if g and set(g.axes) & axes else g for g in frame))

    def place_contract(self, s: Contract, after: bool) -> None:
        m = self.matrix(s)
        assert m is not None
        flip = self.left[s.out.id] == "b"
        left_axes, right_axes, inner = (m[1], m[0], m[2]) if flip else m
        lv, rv = (s.b, s.a) if flip else (s.a, s.b)
        home = self.out.home[s.out.id]
        if (
            home.row is None
            or home.column is None
            or set(home.row.axes) != set(left_axes)
            or set(home.column.axes) != set(right_axes)
        ):
            raise Entangled(f"rows {left_axes} or columns {right_axes} of a product are merged with other axes")
        dtype = self.tensor_dtype(s)
        kind = "tensor" if dtype else "plain"
        inner = tuple(sorted(inner, key=self.order.__getitem__))
        if kind == "plain":
            dtype = self.precision.compute
        step = self.arch.fragment[2]
        steps = -(-self.size(inner) // step) if kind == "tensor" else self.size(inner)
        inner_size = steps * step if kind == "tensor" else steps
        assert dtype is not None

        def operand(v: Value, own: tuple[str, ...], group: Group, left: bool) -> Operand:
            loaded = self.dtype(v)
            if loaded is not None and (kind == "plain" or loaded == dtype):
                grain = 1 if kind == "plain" else self.arch.fragment[0] if left else self.arch.grain
                own_size = -(-group.padded // grain) * grain
                self.want_tile(v, group.axes, own_size, inner, inner_size)
                return Operand("tile", v)
            if left and kind == "tensor" and (self.free(v) or self.is_left_layout(v, own, inner)):
                return Operand("register", v, self.operand_layout(own, inner, after))
            if self.free(v):
                return Operand("staged", v, Layout(self.group(own[0], ROW, after), self.group(inner[0], COLUMN, after)))
            return Operand("staged", v, self.out.home[v.id])

        left = operand(lv, left_axes, home.row, True)
        right = operand(rv, right_axes, home.column, False)
        for x in (left, right):
            if x.layout and x.where != "tile":
                g = [x.layout.row.axes if x.layout.row else (), x.layout.column.axes if x.layout.column else ()]
                if set(g[0]) & set(g[1]) or {*g[0], *g[1]} != set(self.axes(x.value)):
                    raise Unsupported(f"operand {x.value} of a product does not lie in rows and columns of its own axes")
                summed = [part for part in g if set(part) & set(inner)]
                if len(summed) != 1 or tuple(summed[0]) != inner:
                    raise Entangled(f"the summed axes {inner} of {x.value} are merged with others")
        if left.where == "tile" and kind == "tensor" and self.ws > 1 and self.out.split is None and self.arch.holds != "never":
            left.held = True
        self.out.contracts[s.out.id] = ContractPlan(kind, dtype, left, right, left_axes, right_axes, inner, steps)

    def match_sums(self) -> None:
        """Which sums add values that a product over the same axes takes rounded."""
        o = self.out
        rounded: dict[tuple[int, frozenset[str]], dict[int, Operand]] = {}  # (value, summed axes) → where, by product
        for n, plan in o.contracts.items():
            for x in (plan.left, plan.right) if plan.kind == "tensor" else ():
                if self.dtype(x.value) is None and not x.value.predicate:
                    rounded.setdefault((x.value.id, frozenset(plan.inner)), {})[n] = x
        for s in walk(self.p.body):
            if not isinstance(s, Reduce) or s.op != "+":
                continue
            takers = rounded.get((s.arg.id, frozenset(self.live(s.axes))), {})
            if not takers or not adds_rounded(self.p, s, frozenset(takers)):
                continue
            frame = o.frames[s.out.id]
            here = [n for n, x in takers.items() if x is o.contracts[n].left and x.where == "register" and x.layout == frame]
            plan = o.contracts[(here or list(takers))[0]]
            by_matrix = bool(here) and o.home[s.out.id] == Layout(frame.row, None)
            o.sums[s.out.id] = RoundedSum(plan.dtype, plan.steps, by_matrix)

    def operand_layout(self, own: tuple[str, ...], inner: tuple[str, ...], after: bool) -> Layout:
        return Layout(self.group(own[0], ROW, after), self.group(inner[0], COLUMN, after))

    def is_left_layout(self, v: Value, own: tuple[str, ...], inner: tuple[str, ...]) -> bool:
        return all(self.sides.get(self.node(v, a)) == ROW for a in own) and all(
            self.sides.get(self.node(v, a)) == COLUMN for a in inner
        )

    def want_tile(self, v: Value, own: tuple[str, ...], own_size: int, inner: tuple[str, ...], inner_size: int) -> None:
        s = self.defs[v.id]
        assert isinstance(s, Load)
        contiguous = {a for a, c in (s.index[-1].terms if s.index else ()) if c == 1}
        sizes = {own: own_size, inner: inner_size}
        if v.id in self.out.tiles:
            t = self.out.tiles[v.id]
            if {t.outer, t.inner} != {own, inner}:
                raise Unsupported(f"{v} is wanted in shared memory in two shapes")
        else:
            outer, last = (inner, own) if set(own) & contiguous and not set(inner) & contiguous else (own, inner)
            t = self.out.tiles[v.id] = TilePlan(s, outer, last)
        t.rows, t.columns = max(t.rows, sizes[t.outer]), max(t.columns, sizes[t.inner])

    def demand(self) -> None:
        o = self.out
        wanted = o.instances

        def need(v: Value, layout: Layout) -> None:
            todo = [(v, layout)]
            while todo:
                v, layout = todo.pop()
                if isinstance(self.defs.get(v.id), Const):
                    continue
                if not self.free(v) and layout != o.home[v.id]:
                    self.check_conversion(v, o.home[v.id], layout)
                have = wanted.setdefault(v.id, [])
                if layout in have:
                    continue
                have.append(layout)
                s = self.defs.get(v.id)
                if self.free(v) and isinstance(s, Map | Gather):
                    todo.extend((a, layout.restricted(self.axes(a))) for a in operands(s))

        def visit(body: tuple[Stmt, ...]) -> None:
            for s in reversed(body):
                match s:
                    case Store():
                        need(s.arg, o.store_frames[id(s)].restricted(self.axes(s.arg)))
                    case Loop():
                        for c in s.carries:
                            need(c.next, o.home[c.phi.id])
                            need(c.init, o.home[c.phi.id])
                        visit(s.body)
                    case Map() | Gather() if not self.free(s.out):
                        for a in operands(s):
                            need(a, o.home[s.out.id].restricted(self.axes(a)))
                    case Reduce():
                        need(s.arg, o.frames[s.out.id])
                        if s.acc:
                            need(s.acc, o.home[s.out.id])
                    case Contract():
                        product = o.contracts[s.out.id]
                        for x in (product.left, product.right):
                            if x.layout is not None:
                                need(x.value, x.layout)
                        if s.acc:
                            need(s.acc, o.home[s.out.id])

        for s in walk(self.p.body):
            if not isinstance(s, Loop | Store) and not self.free(s.out):
                wanted.setdefault(s.out.id, []).append(o.home[s.out.id])
            elif isinstance(s, Loop):
                for c in s.carries:
                    for v in (c.phi, c.out):
                        wanted.setdefault(v.id, []).append(o.home[v.id])
        visit(self.p.body)
        o.deferred = frozenset(
            c.phi.id for s in walk(self.p.body) if isinstance(s, Loop) for c in s.carries if self.deferrable(s, c)
        )
        if self.ws > 1 and o.split is not None:
            for c in o.split.carries:
                if not self.free(c.next) and o.home[c.phi.id].row != o.home[c.out.id].row:
                    raise Unsupported("rows of a shared loop's state change places")

    def check_conversion(self, v: Value, home: Layout, layout: Layout) -> None:
        if {home.row is None, home.column is None} == {True, False} and {layout.row is None, layout.column is None} == {
            True,
            False,
        }:
            a, b = home.row or home.column, layout.row or layout.column
            assert a is not None and b is not None
            if a.axes == b.axes:
                return
        raise Unsupported(f"{v} is needed in two layouts")

    def deferrable(self, loop: Loop, c: Carry) -> bool:
        """Is the state only ever added to (and rescaled by whole rows) until the loop ends?  Then lanes keep partial results."""
        d = next((s for s in loop.body if not isinstance(s, Store | Loop) and s.out == c.next), None)
        if not isinstance(d, Reduce) or d.acc is None or d.op != c.op:
            return False
        if self.reduced(self.out.frames[d.out.id], set(self.live(d.axes))) != self.out.home[d.out.id]:
            return False
        if d.out.id in self.out.sums and self.out.sums[d.out.id].by_matrix:
            return False
        chain, v = {d.out.id}, d.acc
        while v != c.phi:
            s = self.defs.get(v.id)
            if not isinstance(s, Map) or s.fn != "mul" or d.op != "+":
                return False
            inside = [a for a in s.args if self.reaches(a, c.phi)]
            if len(inside) != 1:
                return False
            chain.add(v.id)
            v = inside[0]
        chain.add(c.phi.id)
        for s in walk(loop.body):  # nothing else reads the unfinished values
            for x in operands(s):
                if x.id in chain and not (not isinstance(s, Store | Loop) and s.out.id in chain):
                    return False
        return all(x.next != d.out or x is c for x in loop.carries)

    def reaches(self, v: Value, target: Value) -> bool:
        s = self.defs.get(v.id)
        return v == target or (isinstance(s, Map) and any(self.reaches(a, target) for a in s.args))
