"""Register arrays: how values in a layout are declared, indexed and walked over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from ...terms import Affine
from ..tile import Gather, Iota, Load, Loop, Map, Mask, Stmt, Value
from .kernel import KernelText, Place
from .layout import COLUMN, Group, Layout
from .schedule import Schedule
from .text import Names, affine, apply, constant


class LoopState:
    def __init__(self, loop: Loop):
        self.loop = loop
        self.edges = False
        self.full: tuple[str, str] = ("", "")
        self.tiles: dict[int, str] = {}
        self.limits: list[Affine] = []  # ends of axes that only tiles at the edge run into
        self.outside: set[str] = set()  # variables that were there before the loop
        self.state: set[str] = set()  # variables of carried state


class Registers(KernelText):
    converts_once = False  # positions: fewer conversions, but the numbers in between take registers

    def __init__(self, schedule: Schedule, names: Names, macros: Mapping[str, str]):
        super().__init__(schedule.program, schedule.tile, schedule.arch, schedule.precision, names, macros)
        self.s = schedule
        self.together = schedule.cluster
        self.env: dict[tuple[int, Layout], str] = {}  # (value, layout) → variable
        self.pending: list[tuple[Layout, Map | Gather]] = []  # elementwise statements not printed yet
        self.postponed: dict[int, tuple[Layout, Load]] = {}  # by value: what is loaded where the one statement that reads it is printed
        self.loops: list[LoopState] = []
        self.bases: dict[Group, str] = {}
        self.declared: list[str] = []
        self.masked: dict[str, tuple[float, set[str]]] = {}  # variable → what its missing elements along some axes are

    def own(self, v: Value, name: str, layout: Layout) -> str:
        """The variable of a value, if it may be overwritten: nothing else reads it, here or in other iterations.  Else a copy."""
        if len(self.readers.get(v.id, ())) <= 1 and not (self.loops and name in self.loops[-1].outside):
            self.masked.pop(name, None)
            return name
        copy = self.variable(v)
        self.t(f"{self.ctype(v)} {copy}{self.shape(layout)};")
        self.t(f"assign({copy}, {name});")
        return copy

    def warps_text(self) -> None:
        """Declare the warp's place among rows and columns."""
        s = self.s
        self.t("const int thread = thread_index(), lane = lane_index(), warp = warp_index();")
        if s.cluster > 1:
            self.t("const int rank = cluster_rank();")
        self.warp_row = self.warp_column = "0"
        if s.warps_row > 1:
            self.warp_row = "warp"
            if s.warps_column > 1:
                self.t(f"const int warp_row = warp / {s.warps_column}, warp_column = warp % {s.warps_column};")
                self.warp_row, self.warp_column = "warp_row", "warp_column"
        elif s.warps_column > 1:
            self.warp_column = "warp"

    def live(self, axes: Iterable[str]) -> tuple[str, ...]:
        return tuple(a for a in axes if self.tile.get(a, 1) > 1 or a in self.s.forced)

    def variable(self, v: Value) -> str:
        s = self.defs.get(v.id)
        stem = self.pointer[s.buffer] + str(v.id) if isinstance(s, Load) else f"t{v.id}"
        return self.names.new("_".join([stem, *(self.axis_name.get(a, a) for a in v.axes if self.tile.get(a, 1) > 1)]))

    @staticmethod
    def shape(layout: Layout) -> str:
        return "".join(f"[{g.slots}]" for g in layout if g)

    @staticmethod
    def at(layout: Layout) -> str:
        return ("[i]" if layout.row else "") + ("[j]" if layout.column else "")

    def base(self, g: Group) -> str:
        """This thread's first place in a group (a variable, declared at the top of the kernel)."""
        if g in self.bases:
            return self.bases[g]
        side = "column" if g.side == COLUMN else "row"
        name = self.names.new(f"{side}_" + "_".join(self.axis_name.get(a, a) for a in g.axes))
        per_warp = g.padded // g.warps
        warp = self.warp_row if g.side != COLUMN else self.warp_column
        if g.warps == self.s.warps_split > 1:
            warp = "warp"
        if g.kind == "fragment":
            start = "lane_column()" if g.side == COLUMN else "lane_row()"
            place = f"{warp} * {per_warp} + {start}" if g.warps > 1 else start
        elif g.side == COLUMN:
            lanes = f"{warp} * {self.arch.warp} + lane" if g.warps > 1 else "lane"
            place = f"({lanes}) * {g.run}" if g.run > 1 else lanes
        else:
            place = f"{warp} * {g.slots}" if g.warps > 1 else "0"
        self.bases[g] = name
        self.declare(f"const int {name} = {place};")
        return name

    def declare(self, line: str) -> None:
        """A line at the top level of the kernel, before all statements."""
        self.declared.append("    " + line)

    def slot(self, g: Group) -> str:
        var = "j" if g.side == COLUMN else "i"
        if g.kind == "fragment":
            return f"slot_column({var})" if g.side == COLUMN else f"slot_row({var})"
        return f"vector_slot<{g.run}, {self.arch.warp * g.warps}>({var})" if g.side == COLUMN else var

    @contextmanager
    def over(self, layout: Layout, step: int = 1, first: str | None = None) -> Iterator[Frame]:
        """Unrolled loops over a layout's slots; first: over those of the one run of columns that starts there.  The lines printed
        inside may ask the frame for positions."""
        t = self.t
        frame = Frame(self, layout)
        begin, depth = len(t.out), t.depth
        groups: list[Group | None] = [g for g in layout if g] or [None]
        t.depth += len(groups)
        yield frame
        t.depth = depth
        body = t.out[begin:]
        del t.out[begin:]
        for g in groups:
            if g is None:
                t("{")
            else:
                var, by = ("j", step) if g.side == COLUMN else ("i", 1)
                begin_at, end, slots = "0", str(g.slots), g.slots
                if first and g.side == COLUMN:
                    begin_at, end, slots = first, f"{first} + {g.run}", g.run
                if slots > by:
                    t("#pragma unroll")
                    t(f"for (int {var} = {begin_at}; {var} < {end}; {'++' + var if by == 1 else f'{var} += {by}'}) {{")
                elif first and g.side == COLUMN:
                    t("{")
                    t(f"    const int {var} = {first};")
                else:
                    t("{")
                    t(f"    constexpr int {var} = 0;")
            t.depth += 1
            for line in frame.definitions(g) if g else ():
                t(line)
        t.out.extend(body)
        while t.depth > depth:
            t.depth -= 1
            t("}")

    def get(self, v: Value, layout: Layout) -> str:
        """The variable that holds a value in a layout."""
        if v.id in self.consts:
            return constant(self.consts[v.id], self.compute)
        if v.id in self.inline and (v.id, layout) not in self.env:  # positions and masks are worked out where they are used
            name = self.env[v.id, layout] = self.variable(v)
            self.t(f"{self.ctype(v)} {name}{self.shape(layout)};")
            with self.over(layout) as f:
                self.t(f"{name}{self.at(layout)} = {f.expression(v)};")
        return self.env[v.id, layout]

    def exists(self, frame: Frame, axes: Iterable[str], layout: Layout) -> list[str]:
        """Conditions under which an element of these axes exists."""
        out = []
        axes = set(axes)
        for g in layout:
            if g and g.padded > g.size and set(g.axes) & axes:
                out.append(f"{frame.flat(g)} < {g.size}")
        for a in sorted(axes):
            if a in self.p.limits:
                out.append(frame.holds(self.p.limits[a]))
        return out

    def run_length(self, buffer: str, index: tuple[Affine, ...], layout: Layout, axes: Iterable[str]) -> tuple[int, str, str]:
        """(elements that go together, their distance as text, whether they are contiguous and aligned, as a C++ constant)."""
        g = layout.column
        if g is None or g.run == 1:
            return 1, "0", "false"
        last, run = g.axes[-1], g.run
        limits = [self.p.limits[a] for a in axes if a in self.p.limits]
        whole = all(holds_in_runs(c, last, run) for c in (*limits, *self.inside(buffer, index, axes)))
        if self.tile[last] % run or g.size % run or not whole:
            return 1, "0", "false"
        steps = [(self.strides[buffer][k], dict(ix.terms)[last]) for k, ix in enumerate(index) if last in ix.axes]
        if not steps:
            return 1, "0", "false"
        step = " + ".join(str(st) if c == 1 else f"{c} * {st}" for st, c in steps)
        contiguous = len(steps) == 1 and last in index[-1].axes and dict(index[-1].terms)[last] == 1
        fits = all(c % run == 0 for a, c in index[-1].terms if a != last) and index[-1].const % run == 0
        kind = self.p.buffer(buffer).kind
        if kind != "input":
            fits = fits and all(
                st == 1 or st % run == 0 for st, extent in zip(self.strides[buffer], self.p.buffer(buffer).shape) if extent > 1
            )  # type: ignore[operator]
            packed = "true" if contiguous and fits and self.strides[buffer][-1] == 1 else "false"
        else:
            packed = f"{self.packed[buffer]} != 0" if contiguous and fits else "false"
        return run, step, packed

    def one_lane(self, layout: Layout) -> str:
        """True in one of the lanes of a warp that hold the same element."""
        if self.s.kind == "fragment":
            return {
                (True, True): "",
                (True, False): "first_of_row()",
                (False, True): "first_of_column()",
                (False, False): "lane == 0",
            }[layout.row is not None, layout.column is not None]
        return "" if layout.column is not None else "lane == 0"

    def replica_guard(self, layout: Layout) -> str:
        """True in one of the warps that hold the same element."""
        s = self.s
        out = []
        if s.warps_row > 1 and not (layout.row and layout.row.warps > 1):
            out.append(f"{self.warp_row} == 0")
        if s.warps_column > 1 and not (layout.column and layout.column.warps > 1):
            out.append(f"{self.warp_column} == 0")
        if s.warps_split > 1 and not self.in_split() and not any(g and g.warps == s.warps_split for g in layout):
            out.append("warp == 0")
        return " && ".join(out)

    def in_split(self) -> bool:
        return self.s.split is not None and any(x.loop is self.s.split for x in self.loops)

    def sync(self) -> str:
        return "warp_sync();" if self.in_split() else "block_sync();"

    def warp_offset(self, g: Group) -> str:
        if g.warps == 1:
            return "0"
        warp = "warp" if g.warps == self.s.warps_split > 1 else self.warp_column if g.side == COLUMN else self.warp_row
        return f"{warp} * {g.padded // g.warps}"


class Frame(Place):
    """Where one unrolled pass over the slots of a layout stands: text of positions and operands."""

    def __init__(self, e: Registers, layout: Layout):
        super().__init__(e)
        self.e, self.layout = e, layout
        self.needed: dict[Group, dict[str, None]] = {}
        self.flats: dict[Group, None] = {}
        self.locals: dict[int, str] = {}

    def group_of(self, a: str) -> Group | None:
        return next((g for g in self.layout if g and a in g.axes), None)

    def position(self, a: str) -> str:
        g = self.group_of(a)
        if g is None or self.e.tile.get(a) == 1:
            return self.e.start.get(a, "0")
        if len(g.axes) > 1:
            self.flats[g] = None
        self.needed.setdefault(g, {})[a] = None
        self.e.base(g)
        return self.e.axis_name[a]

    def flat(self, g: Group) -> str:
        """Place within the block's tile of a group."""
        self.e.base(g)
        self.flats[g] = None
        return self.flat_name(g)

    def flat_name(self, g: Group) -> str:
        return ("column" if g.side == COLUMN else "row") + "_of_" + "_".join(self.e.axis_name.get(a, a) for a in g.axes)

    def flat_of(self, axes: tuple[str, ...]) -> str:
        """Row-major place of some axes' local positions."""
        g = next((g for g in self.layout if g and g.axes == axes), None)
        if g is not None:
            return self.flat(g)
        out = ""
        for a in axes:
            here = self.local(a)
            out = here if not out else f"({out}) * {self.e.tile[a]} + {here}"
        return out or "0"

    def local(self, a: str) -> str:
        start, here = self.e.start.get(a, "0"), self.position(a)
        return here if start == "0" else f"({here} - {start})"

    def definitions(self, g: Group) -> list[str]:
        out = []
        if g in self.flats:
            out.append(f"const int {self.flat_name(g)} = {self.e.bases[g]} + {self.e.slot(g)};")
        step = 1
        lines = []
        wanted = self.needed.get(g, {})
        for n, a in reversed(list(enumerate(g.axes))):
            tile = self.e.tile[a]
            if a in wanted:
                start = self.e.start.get(a, "0")
                here = self.flat_name(g) if len(g.axes) > 1 else f"{self.e.bases[g]} + {self.e.slot(g)}"
                if len(g.axes) > 1:
                    here = f"{here} / {step}" if step > 1 else here
                    here = f"{here} % {tile}" if n > 0 else here
                lines.append(f"const {self.e.width[a]} {self.e.axis_name[a]} = {here if start == '0' else f'{start} + {here}'};")
            step *= tile
        return out + list(reversed(lines))

    # ---- values
    def operand(self, v: Value) -> str:
        e = self.e
        if v.id in self.locals:
            return self.locals[v.id]
        if v.id in e.consts:
            return constant(e.consts[v.id], e.compute)
        if v.id in e.inline:
            return self.expression(v)
        part = self.layout.restricted(e.live(v.axes))
        return e.env[v.id, part] + e.at(part)

    def expression(self, v: Value) -> str:
        """A position or a mask, worked out where it is used."""
        s = self.e.inline.get(v.id)
        if isinstance(s, Iota):
            return self.number(s.index)
        if isinstance(s, Mask):
            return "(" + (" && ".join(map(self.holds, s.constraints)) or "true") + ")"
        return self.operand(v)

    def number(self, ix: Affine) -> str:
        """A position as a floating-point number: of a first place, one conversion for all slots, plus the slot's own distance."""
        e = self.e
        sloted = [(a, c, g) for a, c in ix.terms if (g := self.group_of(a)) is not None and e.tile.get(a, 1) > 1]
        if (
            not e.converts_once
            or len(sloted) != 1
            or len(sloted[0][2].axes) != 1
            or max(map(abs, ix.bounds(e.p.extents))) >= 2**23
        ):
            return f"({e.compute})({self.affine(ix)})"
        a, c, g = sloted[0]
        start = e.start.get(a, "0")
        first = e.base(g) if start == "0" else f"({start} + {e.base(g)})"
        place = {b: first if b == a else self.position(b) for b in ix.axes}
        step = e.slot(g) if c == 1 else f"{c} * {e.slot(g)}"
        return f"(({e.compute})({affine(ix, place)}) + ({e.compute})({step}))"

    def compute(self, s: Stmt) -> str:
        e = self.e
        if isinstance(s, Map):
            return apply(s.fn, [self.operand(a) for a in s.args], [a.predicate for a in s.args], e.compute, e.fast)
        assert isinstance(s, Gather)
        return e.gather_text(s, self, self.operand(s.position), e.exists(self, s.out.axes, self.layout))


def holds_in_runs(condition: Affine, axis: str, run: int) -> bool:
    """Does it hold for all of a run of an axis' positions, or for none, wherever a run begins (at a multiple of its length)?"""
    terms = dict(condition.terms)
    c = terms.pop(axis, 0)
    last = condition.const + min(c, 0) * (run - 1)  # the smallest in a run, but for multiples of its length
    return c == 0 or (abs(c) == 1 and last % run == 0 and all(k % run == 0 for k in terms.values()))
