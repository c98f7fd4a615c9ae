"""Reductions, and values that change between rows and columns."""

from __future__ import annotations

from ...terms import REDUCTIONS, Affine
from ..tile import Contract, Reduce, Value
from .copies import Copies
from .layout import COLUMN, Group, Layout
from .schedule import RoundedSum, missing_limits
from .text import C_TYPES, constant

OPS = {"+": "Add", "*": "Mul", "max": "Max", "min": "Min"}


class Reductions(Copies):
    def reduce(self, s: Reduce) -> None:
        frame, home = self.s.frames[s.out.id], self.s.home[s.out.id]
        rounded = self.s.sums.get(s.out.id)
        if rounded and rounded.by_matrix:
            self.sum_rows(s, rounded)
            return
        source = self.get(s.arg, frame)
        reduced = set(self.live(s.axes))
        op, identity = OPS[s.op], constant(REDUCTIONS[s.op], self.compute)
        self.comment(s)
        source = self.mask_missing(s.arg, frame, set(s.axes), REDUCTIONS[s.op], source)
        rows = frame.row is not None and bool(set(frame.row.axes) & reduced)
        columns = frame.column is not None and bool(set(frame.column.axes) & reduced)
        name = self.variable(s.out)
        result = Layout(None if rows else frame.row, None if columns else frame.column)
        deferred = self.deferred_phi(s)
        self.t(f"{self.compute} {name}{self.shape(result)};")
        cast = f"({self.compute})" if s.arg.predicate else ""
        partial = self.get(s.acc, home) if s.acc and deferred else None
        with self.over(Layout(*result)):
            begin = f"{partial}{self.at(result)}" if partial else identity
            self.t(f"{self.compute} x = {begin};")
            inner = Layout(frame.row if rows else None, frame.column if columns else None)
            by = 4 if inner.column and inner.column.slots % 4 == 0 else 1  # in pairs of pairs: short chains of dependent operations
            for g, var in ((inner.row, "i"), (inner.column, "j")):
                if g:
                    self.t("#pragma unroll")
                    step = f"{var} += {by}" if g is inner.column and by > 1 else f"++{var}"
                    self.t(f"for (int {var} = 0; {var} < {g.slots}; {step})")
                    self.t.depth += 1

            def term(n: int) -> str:
                x = f"{cast}{source}{self.at(frame)}"
                x = x.replace("[j]", f"[j + {n}]") if n else x
                return self.rounded(x, rounded) if rounded else x

            pairs = [f"{op}::of({term(n)}, {term(n + 1)})" for n in (0, 2)] if by == 4 else []
            joined = f"{op}::of({', '.join(pairs)})" if pairs else term(0)
            self.t(f"x = {op}::of(x, {joined});")
            self.t.depth -= sum(g is not None for g in inner)
            if not deferred:
                self.t(f"x = {self.across_lanes('x', op, rows, columns, frame)};")
            self.t(f"{name}{self.at(result)} = x;")
        if not deferred:
            self.across_warps(name, op, result, frame, rows, columns)
            if result != home:
                name = self.change_side(s.out, name, result, home)
            if s.acc:
                acc = self.get(s.acc, home)
                with self.over(home):
                    at = self.at(home)
                    acc_at = acc if s.acc.id in self.consts else acc + at
                    self.t(f"{name}{at} = {op}::of({acc_at}, {name}{at});")
        self.env[s.out.id, home] = name

    def rounded(self, x: str, how: RoundedSum) -> str:
        return f"nearest<{C_TYPES[how.dtype]}>({x})"

    def accumulator(self, s: Reduce | Contract, home: Layout) -> str:
        """The variable that a sum starts with and ends up in."""
        if s.acc is not None and s.acc.id not in self.consts:
            return self.own(s.acc, self.get(s.acc, home), home)
        name = self.variable(s.out)
        self.t(f"{self.compute} {name}{self.shape(home)};")
        self.t(f"set_all({name}, {self.get(s.acc, home) if s.acc else constant(0.0, self.compute)});")
        return name

    def sum_rows(self, s: Reduce, rounded: RoundedSum) -> None:
        """On the tensor cores: fewer instructions than to round the values and add them."""
        frame, home = self.s.frames[s.out.id], self.s.home[s.out.id]
        source = self.mask_missing(s.arg, frame, set(s.axes), 0.0, self.get(s.arg, frame))
        self.comment(s)
        name = self.accumulator(s, home)
        self.t(f"sum_rows<{rounded.steps}>({name}, rounded<{C_TYPES[rounded.dtype]}>({source}));")
        self.env[s.out.id, home] = name

    def across_lanes(self, x: str, op: str, rows: bool, columns: bool, frame: Layout) -> str:
        for g, done in ((frame.column, columns), (frame.row, rows)):
            if not done or g is None:
                continue
            if g.kind == "fragment":
                x = f"combine_{'row' if g.side == COLUMN else 'column'}<{op}>({x})"
            elif g.side == COLUMN:
                x = f"combine_lanes<{op}>({x})"
        return x

    def across_warps(self, name: str, op: str, result: Layout, frame: Layout, rows: bool, columns: bool) -> None:
        """Combine what the warps that share a row (a column) have found; every one of them gets the result."""
        reduced = [g for g, done in ((frame.column, columns), (frame.row, rows)) if done and g is not None and g.warps > 1]
        for n, g in enumerate(reduced):
            other = result.row or result.column
            width = self.width_bytes
            count = other.padded if other else 1
            warp = self.warp_of(g)
            # those along the other side have sums of their own until it is their turn
            apart = f"{self.warp_of(reduced[1])} * {g.warps} + " if n == 0 and len(reduced) > 1 else ""
            self.t(f"// over the {g.warps} warps that share it")
            self.t(self.sync())
            with self.over(Layout(*result)) as f:
                flat = f.flat(other) if other else "0"
                guard = self.one_lane(result)
                place = f"{self.s.scratch} + (({apart}{warp}) * {count} + {flat}) * {width}"
                store = f"store_shared<{self.compute}>({place}, {name}{self.at(result)});"
                self.t(f"if ({guard}) {store}" if guard else store)
            self.t(self.sync())
            with self.over(Layout(*result)) as f:
                flat = f.flat(other) if other else "0"
                at = f"{name}{self.at(result)}"
                first, each = (f"{self.s.scratch} + (({apart}{w}) * {count} + {flat}) * {width}" for w in ("0", "w"))
                self.t(f"{at} = load_shared<{self.compute}>({first});")
                self.t("#pragma unroll")
                self.t(f"for (int w = 1; w < {g.warps}; ++w)")
                self.t(f"    {at} = {op}::of({at}, load_shared<{self.compute}>({each}));")

    def warp_of(self, g: Group) -> str:
        """Which of the warps along a group's side."""
        return "warp" if g.warps == self.s.warps_split > 1 else self.warp_column if g.side == COLUMN else self.warp_row

    def mask_missing(self, v: Value, layout: Layout, axes: set[str], identity: float, name: str) -> str:
        """The variable with the elements that do not exist along these axes set to a value that does not count (in place where that
        is harmless: nothing else may look at such elements)."""
        padded = [g for g in layout if g and set(g.axes) & axes and g.padded > g.size]
        always: list[Affine] = []
        at_edge: list[Affine] = []
        for limit in missing_limits(self.p, axes, v.axes):
            edge = bool(self.loops) and self.loops[-1].edges and limit in self.loops[-1].limits
            (at_edge if edge else always).append(limit)
        if not padded and not always and not at_edge:
            return name
        have, along = self.masked.get(name, (identity, set()))
        if have == identity and axes <= along:
            return name
        moving = {a for limit in (*always, *at_edge) for a in limit.axes if a in self.open}
        if moving and any(name in x.outside or name in x.state for x in self.loops if x.loop.axis in moving):
            source, name = name, self.variable(v)  # other iterations need elements that do not exist in this one
            self.t(f"{self.ctype(v)} {name}{self.shape(layout)};")
            self.t(f"assign({name}, {source});")
        else:
            self.masked[name] = identity, axes | (along if have == identity else set())
        value = constant(identity, self.compute) if not v.predicate else ("true" if identity > 0 else "false")

        def patch(groups: list[Group], limits: list[Affine]) -> None:
            with self.over(layout) as f:
                conditions = [f"{f.flat(g)} < {g.size}" for g in groups] + [f.holds(limit) for limit in limits]
                self.t(f"if (!({' && '.join(conditions)})) {name}{self.at(layout)} = {value};")

        if padded or always:
            patch(padded, always)
        if at_edge:
            with self.t.block("if (edge)"):
                patch([], at_edge)
        return name

    def deferred_phi(self, s: Reduce) -> bool:
        return any(c.next == s.out and c.phi.id in self.s.deferred for x in self.loops for c in x.loop.carries)

    def convert(self, v: Value) -> None:
        home = self.s.home.get(v.id)
        if home is None:
            return
        for layout in self.s.instances.get(v.id, ()):
            if layout == home or (v.id, layout) in self.env:
                continue
            self.env[v.id, layout] = self.change_side(v, self.env[v.id, home], home, layout)

    def change_side(self, v: Value, source: str, home: Layout, layout: Layout) -> str:
        """A value for each row becomes one for each column, or the other way round."""
        a, b = home.row or home.column, layout.row or layout.column
        assert a is not None and b is not None
        # warps that go through a loop on their own do not wait for each other: each has a place of its own
        scratch = f"{self.s.scratch} + warp * {self.s.scratch_bytes}" if self.in_split() else f"{self.s.scratch}"
        width, name = 8 if self.compute == "double" else 4, self.variable(v)
        self.t(f"// {v} changes from rows to columns" if home.row else f"// {v} changes from columns to rows")
        self.t(f"{self.compute} {name}{self.shape(layout)};")
        self.t(self.sync())
        with self.over(home) as f:
            guard = " && ".join(filter(None, [self.one_lane(home), f"{f.flat(a)} < {a.size}" if a.padded > a.size else ""]))
            store = f"store_shared<{self.compute}>({scratch} + {f.flat(a)} * {width}, {source}{self.at(home)});"
            self.t(f"if ({guard}) {store}" if guard else store)
        self.t(self.sync())
        with self.over(layout) as f:
            read = f"load_shared<{self.compute}>({scratch} + {f.flat(b)} * {width})"
            self.t(f"{name}{self.at(layout)} = {f'{f.flat(b)} < {b.size} ? {read} : 0' if b.padded > b.size else read};")
        return name
