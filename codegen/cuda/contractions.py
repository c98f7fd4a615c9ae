"""Contractions: where their operands come from, and the call."""

from __future__ import annotations

from collections.abc import Mapping

from ..tile import Contract, Loop, walk
from .layout import Group
from .reductions import Reductions
from .schedule import ContractPlan, Operand, Schedule, staged_shape
from .text import C_TYPES, Names


class Contractions(Reductions):
    def __init__(self, schedule: Schedule, names: Names, macros: Mapping[str, str]):
        super().__init__(schedule, names, macros)
        self.held: dict[int, str] = {}  # left operands that stay in registers

    def contract(self, s: Contract) -> None:
        plan, home = self.s.contracts[s.out.id], self.s.home[s.out.id]
        assert home.row is not None and home.column is not None
        computed = {}
        for x in (plan.left, plan.right):
            if x.where != "tile":
                assert x.layout is not None
                computed[id(x)] = self.mask_missing(x.value, x.layout, set(s.axes), 0.0, self.get(x.value, x.layout))
        for x in (plan.left, plan.right):
            if x.where == "staged":
                self.stage(x, plan, computed[id(x)])
            elif x.where == "tile" and not (x.held and x.value.id in self.held):
                self.arrive(x.value.id)
        self.comment(s)
        name = self.accumulator(s, home)
        left = self.operand(plan.left, plan, home.row, True, computed.get(id(plan.left)))
        right = self.operand(plan.right, plan, home.column, False)
        call = "contract" if plan.kind == "tensor" else "contract_plain"
        self.t(f"{call}<{plan.steps}>({name}, {left}, {right});")
        self.env[s.out.id, home] = name

    def operand(self, x: Operand, plan: ContractPlan, group: Group, left: bool, name: str | None = None) -> str:
        if x.where == "register":
            return f"rounded<{C_TYPES[plan.dtype]}>({name})"
        if x.held and x.value.id in self.held:
            return self.held[x.value.id]
        if x.where == "tile":
            t = self.s.tiles[x.value.id]
            tile, own_first = self.current_tile(x.value.id), set(t.outer) == set(group.axes)
        else:
            assert x.layout is not None and x.layout.row is not None
            tile, own_first = self.staged_tile(x, plan), set(x.layout.row.axes) == set(group.axes)
        mine = "Rows" if left else "Columns"
        kind = f"{mine}ByInner" if own_first else f"InnerBy{mine}"
        return f"{kind}({tile}, {self.warp_offset(group)})"

    def staged_tile(self, x: Operand, plan: ContractPlan) -> str:
        assert x.layout is not None and x.layout.row is not None and x.layout.column is not None
        rows, columns = staged_shape(x.layout, self.arch)
        place = str(x.offset)
        if self.in_split():
            place = f"(u32)({x.offset} + warp * {-(-x.bytes // 128) * 128})"
        return f"Tile<{C_TYPES[plan.dtype]}, {rows}, {columns}>{{{place}}}"

    def stage(self, x: Operand, plan: ContractPlan, name: str) -> None:
        """A computed operand goes to shared memory."""
        assert x.layout is not None
        tile = self.staged_tile(x, plan)
        self.t(f"// {x.value} as an operand in shared memory")
        self.t(self.sync())
        with self.over(x.layout) as f:
            assert x.layout.row is not None and x.layout.column is not None
            guard = self.replica_guard(x.layout)
            value = f"as<{C_TYPES[plan.dtype]}>({name}{self.at(x.layout)})"
            store = f"{tile}.set({f.flat(x.layout.row)}, {f.flat(x.layout.column)}, {value});"
            self.t(f"if ({guard}) {store}" if guard else store)
        self.t(self.sync())

    def hold(self, s: Loop) -> list[str]:
        """Left operands that stay in registers for the whole loop."""
        out = []
        for x in walk(s.body):
            if not isinstance(x, Contract):
                continue
            plan, home = self.s.contracts[x.out.id], self.s.home[x.out.id]
            v = plan.left.value
            if plan.left.held and v.id not in self.held and self.s.tiles[v.id].loop is None:
                assert home.row is not None
                name = self.names.new(f"{self.pointer[self.s.tiles[v.id].load.buffer]}_held")
                out.append(
                    f"const Held<{C_TYPES[plan.dtype]}, {home.row.slots // self.arch.row_slots}, {plan.steps}> "
                    f"{name}({self.operand(plan.left, plan, home.row, True)});"
                )
                self.held[v.id] = name
        return out
