"""Elementwise statements: collected, grouped by layout, printed as unrolled loops."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType

from ..tile import Gather, Load, Map, Mask, Stmt, operands
from .layout import Layout
from .registers import Frame, Registers
from .text import constant

NOTHING: Mapping[int, str] = MappingProxyType({})


class Elementwise(Registers):
    def flush_for(self, s: Stmt) -> None:
        """Print at least the elementwise statements that this one waits for."""
        self.flush()

    def flush(self) -> None:
        """Print the pending elementwise statements, those of equal layouts together where order allows."""
        pending, self.pending = self.pending, []
        if not pending:
            return
        groups: list[tuple[Layout, list[Map | Gather]]] = []
        where: dict[tuple[int, Layout], int] = {}
        for layout, s in pending:
            earliest = 0
            patch = self.patched(s, layout)
            for a in operands(s):
                part = layout.restricted(self.live(a.axes))
                if (a.id, part) in where:
                    g = where[a.id, part]
                    earliest = max(earliest, g if groups[g][0] == layout and not patch else g + 1)
            for n in range(earliest, len(groups)):
                if groups[n][0] == layout and not patch and not self.patched(groups[n][1][0], layout):
                    groups[n][1].append(s)
                    where[s.out.id, layout] = n
                    break
            else:
                groups.append((layout, [s]))
                where[s.out.id, layout] = len(groups) - 1
        for layout, members in groups:
            loads = self.beside(layout, members)
            if self.patched(members[0], layout):
                self.patch(members[0], layout)  # type: ignore[arg-type]
            elif self.skippable(members[0], layout) and len(members) == 1:
                self.rescale(members[0], layout)  # type: ignore[arg-type]
            else:
                self.elementwise(layout, members, loads)

    def patched(self, s: Map | Gather, layout: Layout) -> bool:
        """Is it a selection that changes nothing except on tiles at the edge of a loop's range?"""
        if not isinstance(s, Map) or s.fn != "where" or not self.loops or layout.row is None or layout.column is None:
            return False
        m, kept = self.defs.get(s.args[0].id), s.args[1]
        loop = self.loops[-1]
        return (
            isinstance(m, Mask)
            and set(m.constraints) <= set(loop.loop.constraints)
            and loop.edges
            and kept.id not in self.consts
            and not kept.predicate
            and layout.restricted(self.live(kept.axes)) == layout
        )

    def patch(self, s: Map, layout: Layout) -> None:
        source = self.get(s.args[1], layout)
        self.comment(s)
        name = self.env[s.out.id, layout] = self.own(s.args[1], source, layout)
        with self.t.block("if (edge)"):
            with self.over(layout) as f:
                condition = f.expression(s.args[0])
                self.t(f"if (!{condition}) {name}{self.at(layout)} = {f.operand(s.args[2])};")

    def skippable(self, s: Map | Gather, layout: Layout) -> bool:
        """The product of carried state with a factor for each row, which mostly is 1."""
        return (
            isinstance(s, Map)
            and s.role == "rescale"
            and s.fn == "mul"
            and len(s.args) == 2
            and layout.row is not None
            and layout.column is not None
            and {layout.restricted(self.live(a.axes)) for a in s.args} == {layout, Layout(layout.row, None)}
            and not any(a.id in self.consts for a in s.args)
        )

    def rescale(self, s: Map, layout: Layout) -> None:
        wide = next(a for a in s.args if layout.restricted(self.live(a.axes)) == layout)
        factor = next(a for a in s.args if a is not wide)
        source = self.get(wide, layout)
        self.comment(s)
        name = self.env[s.out.id, layout] = self.own(wide, source, layout)
        x = self.get(factor, Layout(layout.row, None))
        assert layout.row is not None
        changed = self.names.new("changed")
        self.t(f"bool {changed} = false;")
        self.t("#pragma unroll")
        self.t(f"for (int i = 0; i < {layout.row.slots}; ++i) {changed} |= {x}[i] != {constant(1.0, self.compute)};")
        with self.t.block(f"if (warp_any({changed}))"):
            with self.over(layout):
                self.t(f"{name}{self.at(layout)} *= {x}[i];")

    @abstractmethod
    def load_registers(self, s: Load, layout: Layout, first: str | None = None) -> str: ...

    def beside(self, layout: Layout, members: list[Map | Gather]) -> list[tuple[Layout, Load]]:
        """Loads that are printed with these statements, run by run; others that they need are printed here."""
        read = {v.id for s in members for v in operands(s)}
        found = [(at, s) for v, (at, s) in self.postponed.items() if v in read]
        whole = all(at == layout.restricted(self.live(s.out.axes)) for at, s in found) and not any(
            self.patched(s, layout) or self.skippable(s, layout) for s in members
        )
        for at, s in found:
            del self.postponed[s.out.id]
            if not whole:
                self.load_registers(s, at)
        return found if whole else []

    def load_postponed(self) -> None:
        """Print the loads that are still to come."""
        for at, s in self.postponed.values():
            self.load_registers(s, at)
        self.postponed.clear()

    def elementwise(self, layout: Layout, members: list[Map | Gather], loads: list[tuple[Layout, Load]]) -> None:
        local = {
            s.out.id
            for s in members
            if all(r in {id(m) for m in members} for r in self.readers.get(s.out.id, ()))
            and len(self.s.instances.get(s.out.id, ())) == 1
        }
        for s in members:
            self.comment(s)
        for s in members:
            if s.out.id not in local:
                v = s.out
                name = self.variable(v)
                declared = name in self.env.values()  # overwritten in place
                self.env[v.id, layout] = name
                if layout != Layout(None, None) and not declared:
                    self.t(f"{self.ctype(v)} {name}{self.shape(layout)};")
        if layout == Layout(None, None):
            f = Frame(self, layout)
            for s in members:
                v = s.out
                name = self.env.get((v.id, layout)) or self.names.new(f"t{v.id}")
                self.env[v.id, layout] = name
                self.t(f"const {self.ctype(v)} {name} = {f.compute(s)};")
            return
        if not loads:
            self.lines(layout, members, local)
            return
        g, first = layout.column, self.names.new("run")
        assert g is not None
        self.t("#pragma unroll")
        with self.t.block(f"for (int {first} = 0; {first} < {g.slots}; {first} += {g.run})"):
            names = {s.out.id: (self.load_registers(s, at, first), at) for at, s in loads}
            here = {v: name + ("[i]" if at.row else "") + f"[j - {first}]" for v, (name, at) in names.items()}
            self.lines(layout, members, local, first, here)

    def lines(
        self, layout: Layout, members: list[Map | Gather], local: set[int], first: str | None = None, loaded: Mapping[int, str] = NOTHING
    ) -> None:
        """The statements, slot by slot.  local: results that are only read by other ones of them.  first: only the run that starts
        there; loaded: text of what was loaded for it."""
        with self.over(layout, first=first) as f:
            f.locals.update(loaded)
            for s in members:
                v = s.out
                text = f.compute(s)
                if v.id in local:
                    name = self.names.new(f"t{v.id}")
                    f.locals[v.id] = name
                    self.t(f"const {self.ctype(v)} {name} = {text};")
                else:
                    name = self.env[v.id, layout]
                    self.t(f"{name}{self.at(layout)} = {text};")
