"""From global memory to registers and to tiles in shared memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from ...program import DTYPES
from ...terms import Affine
from ..tile import Load
from .elementwise import Elementwise
from .kernel import Place
from .layout import Group, Layout
from .registers import Frame
from .schedule import HALVES, Schedule, TilePlan
from .text import C_TYPES, Names


class Copies(Elementwise):
    def __init__(self, schedule: Schedule, names: Names, macros: Mapping[str, str]):
        super().__init__(schedule, names, macros)
        self.issued: list[int] = []  # tiles outside loops that were asked for
        self.landed: set[int] = set()  # and those that have arrived
        self.tile_types: dict[int, str] = {}

    def load(self, s: Load) -> None:
        plan = self.s.tiles.get(s.out.id)
        for layout in self.s.instances.get(s.out.id, ()):
            if plan is not None:
                self.arrive(s.out.id)
                self.load_from_tile(s, plan, layout)
            elif self.postpones(s, layout):
                self.postponed[s.out.id] = layout, s
            else:
                self.load_registers(s, layout)

    def postpones(self, s: Load, layout: Layout) -> bool:
        """Is it loaded piece by piece where it is used?"""
        if s.out.id not in self.s.pieces or layout.column is None:
            return False
        return self.run_length(s.buffer, s.index, layout, self.live(s.out.axes))[0] == layout.column.run

    def load_registers(self, s: Load, layout: Layout, first: str | None = None) -> str:
        """Declare the variable and load it; first: only the run of columns that starts there, for the lines that follow.  Its name."""
        v = s.out
        name = self.variable(v)
        if first is None:
            self.env[v.id, layout] = name
        ctype, memory = self.ctype(v), self.pointer[s.buffer]
        self.comment(s)
        axes = self.live(v.axes)
        if layout == Layout(None, None):
            f = Place(self)
            guard = " && ".join(self.bounds(f, s, v.axes) + self.scalar_exists(v.axes))
            read = f"({ctype})value({memory}[{self.offset(f, s.buffer, s.index)}])"
            self.t(f"const {ctype} {name} = {f'{guard} ? {read} : ({ctype})0' if guard else read};")
            return name
        run, step, packed = self.run_length(s.buffer, s.index, layout, axes)
        shape, at = self.shape(layout), self.at(layout)
        if first is not None:
            shape, at = (f"[{layout.row.slots}]" if layout.row else "") + f"[{run}]", ("[i]" if layout.row else "") + "[0]"
        self.t(f"{ctype} {name}{shape};")
        with self.over(layout, run, first) as f:
            guard = " && ".join(dict.fromkeys(self.exists(f, v.axes, layout) + self.bounds(f, s, v.axes)))
            place = self.offset(f, s.buffer, s.index)
            target = name + at
            if run > 1:
                read = f"load_run<{run}, {packed}>(&{target}, {memory} + ({place}), {step});"
                if guard:
                    self.t(f"if ({guard}) {read}")
                    self.t(f"else for (int n = 0; n < {run}; ++n) (&{target})[n] = 0;")
                else:
                    self.t(read)
            else:
                read = f"({ctype})value({memory}[{place}])"
                self.t(f"{target} = {f'{guard} ? {read} : ({ctype})0' if guard else read};")
        return name

    def load_from_tile(self, s: Load, plan: TilePlan, layout: Layout) -> None:
        v = s.out
        name = self.env[v.id, layout] = self.variable(v)
        self.comment(s)
        self.t(f"{self.ctype(v)} {name}{self.shape(layout)};")
        tile = self.current_tile(v.id)
        if self.spreadable(s, plan, layout):
            assert layout.row is not None
            self.t(f"spread({name}, RowsByInner({tile}, {self.warp_offset(layout.row)}));")
            return
        with self.over(layout) as f:
            row, column = (f.flat_of(g) for g in (plan.outer, plan.inner))
            inside = [
                f"{x} < {n}"
                for x, n, g in ((row, plan.rows, plan.outer), (column, plan.columns, plan.inner))
                if self.overhangs(layout, g, n)
            ]
            sides = plan.outer, plan.inner  # where a group has axes of both, what overhangs it lies anywhere in the tile, or beyond
            inside += [f"{f.flat(g)} < {g.size}" for g in layout if g and g.padded > g.size and g.axes not in sides]
            read = f"({self.ctype(v)})value({tile}.get({row}, {column}))"
            self.t(f"{name}{self.at(layout)} = {' && '.join(inside) + f' ? {read} : ({self.ctype(v)})0' if inside else read};")

    def spreadable(self, s: Load, plan: TilePlan, layout: Layout) -> bool:
        """Do matrices of an operand hold just these elements?  Loading them takes an eighth of the instructions."""
        row, column = layout
        if row is None or column is None or row.kind != "fragment" or not self.arch.spreads or self.compute != "float":
            return False
        if self.p.buffer(s.buffer).dtype not in HALVES or column.warps > 1 or column.slots % (2 * self.arch.column_slots):
            return False
        same = (plan.outer, plan.inner) == (row.axes, column.axes)
        return same and row.padded <= plan.rows and column.padded <= plan.columns

    def overhangs(self, layout: Layout, axes: tuple[str, ...], n: int) -> bool:
        return any(g and g.axes == axes and g.padded > n for g in layout)

    def tile_names(self, vid: int, plan: TilePlan) -> None:
        ctype = C_TYPES[self.p.buffer(plan.load.buffer).dtype]
        if vid not in self.tile_types:
            self.tile_types[vid] = f"Tile<{ctype}, {plan.rows}, {plan.columns}>"

    def tile_of(self, vid: int, slot: str | None) -> str:
        plan = self.s.tiles[vid]
        size = -(-plan.bytes // 128) * 128
        place = str(plan.offset)
        if self.s.warps_split > 1 and plan.loop is not None:
            place += f" + warp * {size * plan.stages}"
        if slot is not None and plan.stages > 1:
            place += f" + {slot} * {size}"
        return f"{self.tile_types[vid]}{{(u32)({place})}}" if not place.isdigit() else f"{self.tile_types[vid]}{{{place}}}"

    def current_tile(self, vid: int) -> str:
        plan = self.s.tiles[vid]
        if plan.loop is None:
            return self.tile_of(vid, None)
        state = next(x for x in self.loops if x.loop.axis == plan.loop)
        return state.tiles[vid]

    def team(self, plan: TilePlan | None) -> tuple[str, int]:
        """(index, number) of the threads that work on a tile together."""
        if self.s.warps_split > 1 and (plan is None or plan.loop is not None):
            return "lane", self.arch.warp
        return "thread", self.s.threads

    def fill(self, plan: TilePlan, tile: str) -> None:
        s = plan.load
        who, count = self.team(plan)
        buffer = self.p.buffer(s.buffer)
        memory = self.pointer[s.buffer]
        chunk = 16 // DTYPES[buffer.dtype]
        packed = "false"
        if plan.packed:
            packed = f"{self.packed[s.buffer]} != 0" if buffer.kind == "input" else self.static_packed(s.buffer, chunk)
        chunks = -(-plan.columns // chunk)
        simple = (
            packed != "false"
            and len(plan.outer) <= 1
            and len(plan.inner) == 1
            and plan.rows % (math.lcm(count, chunks) // chunks) == 0
            and not self.bounds(TileFrame(self, plan), s, s.out.axes)
        )
        f = TileFrame(self, plan)
        if simple:
            f.row = f.column = "0"
            origin = self.offset(f, s.buffer, s.index)
            outer = plan.outer[0] if plan.outer else None
            step = self.stride_of(s, outer) if outer else "0"
            rows, columns = self.rest(outer, f), self.rest(plan.inner[0], f)
            if self.size(plan.outer) == 1:
                rows = "1"
            whole = (rows, columns) == (str(plan.rows), str(plan.columns)) and plan.columns % chunk == 0
            call = f"fill_rows<{count}, {str(whole).lower()}>({tile}, {who}, {memory} + ({origin}), {step}, {rows}, {columns});"
            if packed == "true":
                self.t(call)
                return
            self.t(f"if constexpr ({packed}) {call}")
            packed, head = "false", "else "
        else:
            head = ""
        f = TileFrame(self, plan)
        ctype = C_TYPES[buffer.dtype]
        with self.t.block(f"{head}fill<{packed}, {count}>({tile}, {who}, [&](int row, int column)", "});"):
            mark = len(self.t.out)
            conditions = self.tile_conditions(plan, f, s)
            place = self.offset(f, s.buffer, s.index)
            last = plan.inner[-1]
            count_text = self.rest(last, f, chunk) if packed != "false" else "1"
            step = self.stride_of(s, last)
            extra = f.definitions()
            self.t.out[mark:mark] = ["    " * self.t.depth + e for e in extra]
            count_text = f"{' && '.join(conditions)} ? {count_text} : 0" if conditions else count_text
            self.t(f"return Run<{ctype}>{{{memory} + ({place}), {count_text}, {step}}};")

    def static_packed(self, buffer: str, chunk: int) -> str:
        b = self.p.buffer(buffer)
        strides = [st for st, n in zip(self.strides[buffer], b.shape) if n > 1]
        return (
            "true"
            if strides and strides[-1] == 1 and all(isinstance(x, int) and x % chunk == 0 for x in strides[:-1])
            else "false"
        )

    def rest(self, axis: str | None, f: TileFrame, most: int | None = None) -> str:
        """How many elements exist from the position on, along an axis of a tile."""
        if axis is None:
            return "1"
        x, tile = self.p.axes[axis], self.tile.get(axis, 1)
        if axis in self.p.limits:
            limit = self.p.limits[axis]
            c = dict(limit.terms)[axis]
            if c == -1:
                left = f.affine(limit.plus(Affine(1)))
                return f"at_most({left}, {tile if most is None else most})"
        if most is not None:
            return str(most) if tile % most == 0 else f"{x.extent} - {f.position(axis)}"
        return str(tile)

    def tile_conditions(self, plan: TilePlan, f: TileFrame, s: Load) -> list[str]:
        out = []
        for n, padded, var in ((self.size(plan.outer), plan.rows, "row"), (self.size(plan.inner), plan.columns, "column")):
            if padded > n:
                out.append(f"{var} < {n}")
        for a in (*plan.outer, *plan.inner):
            if a in self.p.limits:
                out.append(f.holds(self.p.limits[a]))
        return out + self.bounds(f, s, s.out.axes)

    def size(self, axes: Iterable[str]) -> int:
        return math.prod(self.tile.get(a, 1) for a in axes)

    def arrive(self, vid: int) -> None:
        """Make sure that a tile filled outside of loops can be read."""
        plan = self.s.tiles[vid]
        if plan.loop is None and vid not in self.landed:
            self.t("copy_commit();")
            self.t("copy_wait<0>();")
            self.t("block_sync();")
            self.landed.update(self.issued)
            self.landed.add(vid)
            self.issued = []


class TileFrame(Frame):
    """Positions while a tile is filled: `row` and `column` are places in it."""

    def __init__(self, e: Copies, plan: TilePlan):
        super().__init__(e, Layout(None, None))
        self.plan = plan
        self.row, self.column = "row", "column"
        self.used: dict[str, None] = {}

    def position(self, a: str) -> str:
        for axes, var in ((self.plan.outer, self.row), (self.plan.inner, self.column)):
            if a in axes:
                if var == "0" or self.e.tile.get(a) == 1:
                    return self.e.start.get(a, "0")
                self.used[a] = None
                return self.e.axis_name[a]
        return self.e.start.get(a, "0")

    def definitions(self, g: Group | None = None) -> list[str]:
        out = []
        for axes, var in ((self.plan.outer, "row"), (self.plan.inner, "column")):
            step = 1
            for n, a in reversed(list(enumerate(axes))):
                tile = self.e.tile[a]
                if a in self.used:
                    here = f"{var} / {step}" if step > 1 else var
                    here = f"{here} % {tile}" if n > 0 else here
                    start = self.e.start.get(a, "0")
                    out.append(
                        f"const {self.e.width[a]} {self.e.axis_name[a]} = {here if start == '0' else f'{start} + {here}'};"
                    )
                step *= tile
        return out
