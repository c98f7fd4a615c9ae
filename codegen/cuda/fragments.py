"""A schedule printed as CUDA C++ (or HIP C++: the device headers differ, this text does not).

Values are arrays of registers, in the layouts that the schedule chose.  Elementwise statements are collected and printed as a few
unrolled loops over the slots of a layout; everything else (contractions, reductions, copies, loops, stores) ends such a run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from ...program import DTYPES
from ...terms import REDUCTIONS, Affine
from ..tile import (
    Carry,
    Const,
    Contract,
    Gather,
    Iota,
    Load,
    Loop,
    Map,
    Mask,
    Reduce,
    Stmt,
    Store,
    Value,
    lines,
    operands,
    walk,
)
from .layout import COLUMN, Group, Layout, Unsupported
from .schedule import ContractPlan, Operand, Schedule, TilePlan, merge_steps, staged_shape
from .text import C_TYPES, INTEGERS, Names, Text, affine, apply, at_least_zero, constant

OPS = {"+": "Add", "*": "Mul", "max": "Max", "min": "Min"}


@dataclass(frozen=True)
class Parameter:
    """A kernel parameter: `value` is what the launch passes (a buffer, or "buffer.stride2"), type and name as in the text."""

    value: str
    type: str
    name: str


@dataclass(frozen=True)
class Function:
    """One emitted kernel."""

    name: str
    text: str
    parameters: tuple[Parameter, ...]
    blocks: int
    threads: int
    shared: int
    packed: dict[str, str]  # input → macro that says whether its rows are contiguous and aligned


class Fragments:
    """Prints one kernel."""

    def __init__(self, schedule: Schedule, names: Names, macros: Mapping[str, str]):
        self.s, self.p, self.names, self.macros = schedule, schedule.program, names, macros
        self.arch = schedule.arch
        self.compute = "double" if schedule.precision.compute == "float64" else "float"
        self.fast = not schedule.precision.accurate and self.compute == "float"
        self.t = Text()
        self.env: dict[tuple[int, Layout], str] = {}
        self.consts: dict[int, float] = {}
        self.inline: dict[int, Stmt] = {}
        self.defs: dict[int, Stmt] = {}
        self.pending: list[tuple[Layout, Stmt]] = []
        self.start: dict[str, str] = {}  # axis → text of the first position of its tile ("0", or a variable)
        self.single: set[str] = set()  # axes whose tile is one position
        self.loops: list[LoopState] = []
        self.landed: set[int] = set()  # tiles outside loops that have arrived
        self.issued: list[int] = []
        self.held: dict[int, str] = {}
        self.bases: dict[Group, str] = {}
        self.after = False
        self.declared: list[str] = []
        self.masked: dict[str, tuple[float, set[str]]] = {}  # variable → what its missing elements along some axes are
        for s in walk(self.p.body):
            if isinstance(s, Const):
                self.consts[s.out.id] = s.value
            if isinstance(s, Iota | Mask):
                self.inline[s.out.id] = s
            if not isinstance(s, Loop | Store):
                self.defs[s.out.id] = s
        self.readers: dict[int, list[int]] = {}
        for s in walk(self.p.body):
            for v in operands(s):
                self.readers.setdefault(v.id, []).append(id(s))
            if isinstance(s, Loop):
                for c in s.carries:
                    self.readers.setdefault(c.next.id, []).append(-c.phi.id)

    # ------------------------------------------------------------------ the kernel
    def run(self) -> Function:
        p, s = self.p, self.s
        self.symbols()
        body = Text()
        self.t, head = body, Text()
        body.depth = 1
        self.preamble()
        top = len(body.out)
        for vid, plan in s.tiles.items():  # what no loop brings is asked for at once
            self.tile_names(vid, plan)
            if plan.loop is None:
                self.comment(plan.load)
                self.fill(plan, self.tile_of(vid, None))
                self.issued.append(vid)
        self.statements(p.body, True)
        self.flush()
        body.out[top:top] = self.declared
        for line in str(p).splitlines():
            head(f"// {line}".rstrip())
        params = ", ".join(f"{x.type} {x.name}" for x in self.parameters)
        text = f"{head}KERNEL({s.threads}, {s.min_blocks})\n{self.function}({params}) {{\n{body}}}\n"
        return Function(
            self.function, text, tuple(self.parameters), math.prod(p.axes[a].trips for a in p.grid), s.threads, s.shared, dict(self.packed)
        )

    def symbols(self) -> None:
        """Names of buffers, strides and axes."""
        p, new = self.p, self.names.new
        self.function = self.names.outer_name(p.name)
        self.parameters: list[Parameter] = []
        self.pointer: dict[str, str] = {}
        self.strides: dict[str, tuple[str | int, ...]] = {}
        self.packed: dict[str, str] = {}
        for b in dict.fromkeys((*p.reads, *p.writes)):
            if b.name in self.pointer:
                continue
            name = self.pointer[b.name] = new(b.name)
            written = b in p.writes
            ctype = C_TYPES[b.dtype]
            self.parameters.append(
                Parameter(b.name, f"{ctype}* __restrict__" if written else f"const {ctype}* __restrict__", name)
            )
            if b.kind == "input":
                strides: list[str | int] = []
                for n, extent in enumerate(b.shape):
                    if extent == 1:
                        strides.append(0)
                        continue
                    strides.append(new(f"{name}_stride{n}"))
                    self.parameters.append(Parameter(f"{b.name}.stride{n}", "i64", str(strides[-1])))
                self.strides[b.name] = tuple(strides)
                self.packed[b.name] = self.macros[b.name]
            else:
                step, out = 1, []
                for extent in reversed(b.shape):
                    out.append(step)
                    step *= extent
                self.strides[b.name] = tuple(reversed(out))
        self.axis_name: dict[str, str] = {a: new(a) for a in p.axes}
        self.width: dict[str, str] = {a: "i64" if p.extents.get(a, x.extent) > 2**30 else "int" for a, x in p.axes.items()}
        for a, x in p.axes.items():
            tile = self.s.tile.get(a, x.tile)
            if tile == 1:
                self.single.add(a)
            if x.role == "whole":
                self.start[a] = "0"

    def preamble(self) -> None:
        t, s = self.t, self.s
        t("const int thread = thread_index(), lane = lane_index(), warp = warp_index();")
        self.warp_row = self.warp_column = "0"
        if s.warps_row > 1:
            self.warp_row = "warp"
            if s.warps_column > 1:
                t(f"const int warp_row = warp / {s.warps_column}, warp_column = warp % {s.warps_column};")
                self.warp_row, self.warp_column = "warp_row", "warp_column"
        elif s.warps_column > 1:
            self.warp_column = "warp"
        grid = self.grid_order()
        if grid:
            t("// the block's tile of each grid axis; the last one varies fastest")
            t("i64 block = block_index();")
        for n, (a, reverse) in enumerate(reversed(grid)):
            x, name = self.p.axes[a], self.axis_name[a]
            trips = x.trips
            part = "block" if n == len(grid) - 1 else f"block % {trips}"
            part = f"{trips - 1} - {part}" if reverse else part
            part = part if part == "block" else f"({part})"
            if x.tile == 1:
                t(f"const {self.width[a]} {name} = {part};" + ("  // the longest first" if reverse else ""))
                self.start[a] = name
            else:
                self.start[a] = self.first_of(name)
                t(f"const {self.width[a]} {self.start[a]} = {part} * {x.tile};" + ("  // the longest first" if reverse else ""))
            if n < len(grid) - 1:
                t(f"block /= {trips};")
        for a, x in self.p.axes.items():
            if x.role == "whole" and self.s.tile.get(a) == 1:
                self.start[a] = "0"

    def grid_order(self) -> list[tuple[str, bool]]:
        """Grid axes from slow to fast, and whether they run backwards: what bounds a loop comes first, its longest runs ahead;
        then axes that many of the loops' loads depend on, so that neighbours share what they read."""
        weight: dict[str, int] = {a: 0 for a in self.p.grid}
        bounds: dict[str, bool] = {}
        for loop in (s for s in walk(self.p.body) if isinstance(s, Loop)):
            for s in walk(loop.body):
                if isinstance(s, Load) and loop.axis in s.out.axes:
                    for a in s.out.axes:
                        if a in weight:
                            weight[a] += 1
            for c in loop.constraints:
                terms = dict(c.terms)
                for a in self.p.grid:
                    if a in terms and loop.axis in terms and self.p.axes[a].trips > 1:
                        bounds.setdefault(a, terms[a] * terms[loop.axis] < 0 and terms[loop.axis] < 0)
        names = list(self.p.grid)
        order = sorted(names, key=lambda a: (a not in bounds, -weight[a], names.index(a)))
        return [(a, bounds.get(a, False)) for a in order]

    # ------------------------------------------------------------------ names and places
    def first_of(self, axis: str) -> str:
        """A variable for the first position of an axis' tile."""
        wish = f"{axis}0"
        return self.names.new(f"first_{axis}" if axis[-1].isdigit() or wish in self.names.taken else wish)

    def ctype(self, v: Value) -> str:
        if v.predicate:
            return "bool"
        s = self.defs.get(v.id)
        if isinstance(s, Load) and self.p.buffer(s.buffer).dtype in INTEGERS:
            readers = self.readers.get(v.id, [])
            gathers = {id(x) for x in walk(self.p.body) if isinstance(x, Gather)}
            if readers and all(r in gathers for r in readers):
                return "i64"
        return self.compute

    def live(self, axes: Iterable[str]) -> tuple[str, ...]:
        return tuple(a for a in axes if self.s.tile.get(a, 1) > 1 or a in self.s.forced)

    def variable(self, v: Value) -> str:
        s = self.defs.get(v.id)
        stem = self.pointer[s.buffer] + str(v.id) if isinstance(s, Load) else f"t{v.id}"
        return self.names.new("_".join([stem, *(self.axis_name.get(a, a) for a in v.axes if self.s.tile.get(a, 1) > 1)]))

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

    # ------------------------------------------------------------------ loops over the slots of a layout
    @contextmanager
    def over(self, layout: Layout, step: int = 1) -> Iterator[Frame]:
        """Unrolled loops over a layout's slots.  The lines printed inside may ask the frame for positions."""
        t = self.t
        frame = Frame(self, layout)
        begin, depth = len(t.out), t.depth
        groups = [g for g in layout if g] or [None]
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
                if g.slots > by:
                    t("#pragma unroll")
                    t(f"for (int {var} = 0; {var} < {g.slots}; {'++' + var if by == 1 else f'{var} += {by}'}) {{")
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

    # ------------------------------------------------------------------ statements
    def statements(self, body: tuple[Stmt, ...], outermost: bool = False) -> None:
        for s in body:
            self.statement(s)
            if outermost and isinstance(s, Loop) and s is self.s.split:
                self.after = True

    def comment(self, s: Stmt) -> None:
        for line in lines((s,), 0):
            self.t(f"// {line}")

    def statement(self, s: Stmt) -> None:
        match s:
            case Const() | Iota() | Mask():
                return
            case Load():
                self.load(s)
            case Map() | Gather():
                for layout in self.s.instances.get(s.out.id, ()):
                    self.pending.append((layout, s))
                home = self.s.home.get(s.out.id)
                if home is not None and len(self.s.instances.get(s.out.id, ())) > 1:
                    self.pending = [x for x in self.pending if x[1] is not s or x[0] == home]
                    self.flush()
                    self.convert(s.out)
            case Reduce():
                self.flush()
                self.reduce(s)
                self.convert(s.out)
            case Contract():
                self.flush()
                self.contract(s)
                self.convert(s.out)
            case Store():
                self.flush()
                self.store(s)
            case Loop():
                self.flush()
                self.loop(s)

    def get(self, v: Value, layout: Layout) -> str:
        """The variable that holds a value in a layout."""
        if v.id in self.consts:
            return constant(self.consts[v.id], self.compute)
        return self.env[v.id, layout]

    # ---- elementwise
    def flush(self) -> None:
        """Print the pending elementwise statements, those of equal layouts together where order allows."""
        pending, self.pending = self.pending, []
        if not pending:
            return
        groups: list[tuple[Layout, list[Stmt]]] = []
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
            if self.patched(members[0], layout):
                self.patch(members[0], layout)  # type: ignore[arg-type]
            elif self.skippable(members[0], layout) and len(members) == 1:
                self.rescale(members[0], layout)  # type: ignore[arg-type]
            else:
                self.elementwise(layout, members, {id(s) for _, s in pending})

    def patched(self, s: Stmt, layout: Layout) -> bool:
        """Is it a selection that changes nothing except on tiles at the edge of a loop's range?"""
        if not isinstance(s, Map) or s.fn != "where" or not self.loops or layout.row is None or layout.column is None:
            return False
        m = self.defs.get(s.args[0].id)
        loop = self.loops[-1]
        return isinstance(m, Mask) and set(m.constraints) <= set(loop.loop.constraints) and loop.edges and s.args[1].id not in self.consts

    def patch(self, s: Map, layout: Layout) -> None:
        source = self.get(s.args[1], layout)
        self.masked.pop(source, None)
        self.comment(s)
        if len(self.readers.get(s.args[1].id, ())) > 1:
            name = self.variable(s.out)
            self.t(f"{self.ctype(s.out)} {name}{self.shape(layout)};")
            self.t(f"assign({name}, {source});")
        else:
            name = source
        self.env[s.out.id, layout] = name
        with self.t.block("if (edge)"):
            with self.over(layout) as f:
                condition = f.expression(s.args[0])
                self.t(f"if (!{condition}) {name}{self.at(layout)} = {f.operand(s.args[2])};")

    def skippable(self, s: Stmt, layout: Layout) -> bool:
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
        self.masked.pop(source, None)
        self.comment(s)
        if len(self.readers.get(wide.id, ())) > 1:
            name = self.variable(s.out)
            self.t(f"{self.ctype(s.out)} {name}{self.shape(layout)};")
            self.t(f"assign({name}, {source});")
        else:
            name = source
        self.env[s.out.id, layout] = name
        x = self.get(factor, Layout(layout.row, None))
        assert layout.row is not None
        changed = self.names.new("changed")
        self.t(f"bool {changed} = false;")
        self.t("#pragma unroll")
        self.t(f"for (int i = 0; i < {layout.row.slots}; ++i) {changed} |= {x}[i] != {constant(1.0, self.compute)};")
        with self.t.block(f"if (warp_any({changed}))"):
            with self.over(layout):
                self.t(f"{name}{self.at(layout)} *= {x}[i];")

    def elementwise(self, layout: Layout, members: list[Stmt], batch: set[int]) -> None:
        local = {
            s.out.id  # type: ignore[union-attr]
            for s in members
            if all(r in {id(m) for m in members} for r in self.readers.get(s.out.id, ()))  # type: ignore[union-attr]
            and len(self.s.instances.get(s.out.id, ())) == 1  # type: ignore[union-attr]
        }
        for s in members:
            self.comment(s)
        for s in members:
            if s.out.id not in local:  # type: ignore[union-attr]
                v = s.out  # type: ignore[union-attr]
                name = self.env[v.id, layout] = self.variable(v)
                if layout != Layout(None, None):
                    self.t(f"{self.ctype(v)} {name}{self.shape(layout)};")
        if layout == Layout(None, None):
            f = Frame(self, layout)
            for s in members:
                v = s.out  # type: ignore[union-attr]
                name = self.env.get((v.id, layout)) or self.names.new(f"t{v.id}")
                self.env[v.id, layout] = name
                self.t(f"const {self.ctype(v)} {name} = {f.compute(s)};")
            return
        with self.over(layout) as f:
            for s in members:
                v = s.out  # type: ignore[union-attr]
                text = f.compute(s)
                if v.id in local:
                    name = self.names.new(f"t{v.id}")
                    f.locals[v.id] = name
                    self.t(f"const {self.ctype(v)} {name} = {text};")
                else:
                    name = self.env[v.id, layout]
                    self.t(f"{name}{self.at(layout)} = {text};")

    # ---- loads
    def load(self, s: Load) -> None:
        plan = self.s.tiles.get(s.out.id)
        for layout in self.s.instances.get(s.out.id, ()):
            self.flush_needed(s)
            if plan is not None:
                self.arrive(s.out.id)
                self.load_from_tile(s, plan, layout)
            else:
                self.load_registers(s, layout)

    def flush_needed(self, s: Stmt) -> None:
        """Loads depend on nothing that is pending; they may go ahead."""

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

    def bounds(self, frame: Frame, s: Load | Gather, axes: Iterable[str]) -> list[str]:
        """Conditions for an index to be inside the buffer, beyond those for its axes to exist."""
        out = []
        known = {self.p.limits[a] for a in axes if a in self.p.limits}
        shape = self.p.buffer(s.buffer).shape
        for n, ix in enumerate(s.index):
            if isinstance(s, Gather) and n == s.dim:
                continue
            lo, hi = ix.bounds(self.p.extents)
            if lo < 0:
                out.append(frame.holds(ix))
            rest = Affine(shape[n] - 1).plus(ix, -1)
            if hi >= shape[n] and rest not in known and not any(implied(rest, k) for k in known):
                out.append(frame.holds(rest))
        return out

    def offset(self, frame: Frame, buffer: str, index: tuple[Affine, ...], skip: int | None = None) -> str:
        """The element's offset in the buffer, as text."""
        coefs: dict[str, list[str]] = {}
        fixed: dict[str, int] = {}
        const: list[str] = []
        const_n = 0
        for n, (ix, stride) in enumerate(zip(index, self.strides[buffer])):
            if n == skip or stride == 0:
                continue
            if isinstance(stride, int):
                const_n += ix.const * stride
            elif ix.const:
                const.append(f"{ix.const} * {stride}")
            for a, c in ix.terms:
                if isinstance(stride, int):
                    fixed[a] = fixed.get(a, 0) + c * stride
                else:
                    coefs.setdefault(a, []).append(stride if c == 1 else f"{c} * {stride}")
        terms = []
        for a in dict.fromkeys((*coefs, *fixed)):
            parts = list(coefs.get(a, ()))
            if fixed.get(a):
                parts.append(str(fixed[a]))
            position = frame.position(a)
            if position == "0" or not parts:
                continue
            factor = parts[0] if len(parts) == 1 else "(" + " + ".join(parts) + ")"
            terms.append(f"(i64){position}" if factor == "1" else f"(i64){position} * {factor}")
        terms += const
        if const_n or not terms:
            terms.append(str(const_n))
        return " + ".join(terms)

    def run_length(self, buffer: str, index: tuple[Affine, ...], layout: Layout, axes: Iterable[str]) -> tuple[int, str, str]:
        """(elements that go together, their distance as text, whether they are contiguous and aligned, as a C++ constant)."""
        g = layout.column
        if g is None or g.run == 1:
            return 1, "0", "false"
        last, run = g.axes[-1], g.run
        x = self.p.axes[last]
        n = self.s.tile[last]
        if n % run or g.size % run or (last in self.p.limits and (self.p.limits[last].axes != (last,) or x.extent % run)):
            return 1, "0", "false"
        for k, ix in enumerate(index):  # nothing in the run may leave the buffer alone
            lo, hi = ix.bounds(self.p.extents)
            if last in ix.axes and (lo < 0 or hi >= self.p.buffer(buffer).shape[k]) and last not in self.p.limits:
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
            packed = self.packed[buffer] if contiguous and fits else "false"
        return run, step, packed

    def load_registers(self, s: Load, layout: Layout) -> None:
        v = s.out
        name = self.env[v.id, layout] = self.variable(v)
        ctype, memory = self.ctype(v), self.pointer[s.buffer]
        self.comment(s)
        axes = self.live(v.axes)
        if layout == Layout(None, None):
            f = Frame(self, layout)
            guard = " && ".join(self.bounds(f, s, v.axes) + self.scalar_exists(v.axes))
            read = f"({ctype})value({memory}[{self.offset(f, s.buffer, s.index)}])"
            self.t(f"const {ctype} {name} = {f'{guard} ? {read} : ({ctype})0' if guard else read};")
            return
        run, step, packed = self.run_length(s.buffer, s.index, layout, axes)
        self.t(f"{ctype} {name}{self.shape(layout)};")
        with self.over(layout, run) as f:
            guard = " && ".join(dict.fromkeys(self.exists(f, v.axes, layout) + self.bounds(f, s, v.axes)))
            place = self.offset(f, s.buffer, s.index)
            target = f"{name}{self.at(layout)}"
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

    def scalar_exists(self, axes: Iterable[str]) -> list[str]:
        f = Frame(self, Layout(None, None))
        return [f.holds(self.p.limits[a]) for a in sorted(axes) if a in self.p.limits and a in self.single]

    def load_from_tile(self, s: Load, plan: TilePlan, layout: Layout) -> None:
        v = s.out
        name = self.env[v.id, layout] = self.variable(v)
        self.comment(s)
        self.t(f"{self.ctype(v)} {name}{self.shape(layout)};")
        tile = self.current_tile(v.id)
        with self.over(layout) as f:
            row, column = (f.flat_of(g) for g in (plan.outer, plan.inner))
            inside = [
                f"{x} < {n}" for x, n, g in ((row, plan.rows, plan.outer), (column, plan.columns, plan.inner)) if self.overhangs(layout, g, n)
            ]
            read = f"({self.ctype(v)})value({tile}.get({row}, {column}))"
            self.t(f"{name}{self.at(layout)} = {' && '.join(inside) + f' ? {read} : ({self.ctype(v)})0' if inside else read};")

    def overhangs(self, layout: Layout, axes: tuple[str, ...], n: int) -> bool:
        return any(g and g.axes == axes and g.padded > n for g in layout)

    # ---- tiles in shared memory
    def tile_names(self, vid: int, plan: TilePlan) -> None:
        ctype = C_TYPES[self.p.buffer(plan.load.buffer).dtype]
        if not hasattr(self, "tile_types"):
            self.tile_types: dict[int, str] = {}
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

    def sync(self) -> str:
        return "warp_sync();" if self.in_split() else "block_sync();"

    def in_split(self) -> bool:
        return self.s.split is not None and any(x.loop is self.s.split for x in self.loops)

    def fill(self, plan: TilePlan, tile: str) -> None:
        s = plan.load
        who, count = self.team(plan)
        buffer = self.p.buffer(s.buffer)
        memory = self.pointer[s.buffer]
        chunk = 16 // DTYPES[buffer.dtype]
        packed = "false"
        if plan.packed:
            packed = self.packed[s.buffer] if buffer.kind == "input" else self.static_packed(s.buffer, chunk)
        chunks = -(-plan.columns // chunk)
        simple = (
            packed != "false"
            and len(self.live_or_all(plan.outer)) <= 1
            and len(self.live_or_all(plan.inner)) == 1
            and count % chunks == 0
            and plan.rows * chunks % count == 0
            and not self.bounds(TileFrame(self, plan), s, s.out.axes)
        )
        f = TileFrame(self, plan)
        if simple:
            f.row = f.column = "0"
            origin = self.offset(f, s.buffer, s.index)
            outer = plan.outer[0] if plan.outer else None
            step = self.stride_of(s, outer) if outer else "0"
            rows, columns = self.rest(outer, f), self.rest(plan.inner[0], f)
            if not plan.outer or plan.outer == ("one",):
                rows = "1"
            call = f"fill_rows<{count}>({tile}, {who}, {memory} + ({origin}), {step}, {rows}, {columns});"
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

    def live_or_all(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        return axes

    def static_packed(self, buffer: str, chunk: int) -> str:
        b = self.p.buffer(buffer)
        strides = [st for st, n in zip(self.strides[buffer], b.shape) if n > 1]
        return "true" if strides and strides[-1] == 1 and all(isinstance(x, int) and x % chunk == 0 for x in strides[:-1]) else "false"

    def stride_of(self, s: Load, axis: str) -> str:
        parts = []
        for ix, stride in zip(s.index, self.strides[s.buffer]):
            c = dict(ix.terms).get(axis)
            if c and stride != 0:
                parts.append(str(c * stride) if isinstance(stride, int) else stride if c == 1 else f"{c} * {stride}")
        return " + ".join(parts) or "0"

    def rest(self, axis: str | None, f: TileFrame, most: int | None = None) -> str:
        """How many elements exist from the position on, along an axis of a tile."""
        if axis is None:
            return "1"
        x, tile = self.p.axes[axis], self.s.tile.get(axis, 1)
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
        return math.prod(self.s.tile.get(a, 1) for a in axes)

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

    # ---- reductions
    def reduce(self, s: Reduce) -> None:
        frame, home = self.s.frames[s.out.id], self.s.home[s.out.id]
        source = self.get(s.arg, frame)
        reduced = set(self.live(s.axes))
        op, identity = OPS[s.op], constant(REDUCTIONS[s.op], self.compute)
        self.comment(s)
        self.mask_missing(s.arg, frame, reduced, REDUCTIONS[s.op], source)
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
            for g, var in ((inner.row, "i"), (inner.column, "j")):
                if g:
                    self.t("#pragma unroll")
                    self.t(f"for (int {var} = 0; {var} < {g.slots}; ++{var})")
                    self.t.depth += 1
            self.t(f"x = {op}::of(x, {cast}{source}{self.at(frame)});")
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
        for g, done in ((frame.column, columns), (frame.row, rows)):
            if not done or g is None or g.warps == 1:
                continue
            other = result.row or result.column
            width = 8 if self.compute == "double" else 4
            count = other.padded if other else 1
            warp = "warp" if g.warps == self.s.warps_split > 1 else self.warp_column if g.side == COLUMN else self.warp_row
            self.t(f"// over the {g.warps} warps that share it")
            self.t(self.sync())
            with self.over(Layout(*result)) as f:
                flat = f.flat(other) if other else "0"
                guard = self.one_lane(result)
                store = f"store_shared<{self.compute}>({self.s.scratch} + ({warp} * {count} + {flat}) * {width}, {name}{self.at(result)});"
                self.t(f"if ({guard}) {store}" if guard else store)
            self.t(self.sync())
            with self.over(Layout(*result)) as f:
                flat = f.flat(other) if other else "0"
                at = f"{name}{self.at(result)}"
                self.t(f"{at} = load_shared<{self.compute}>({self.s.scratch} + {flat} * {width});")
                self.t("#pragma unroll")
                self.t(f"for (int w = 1; w < {g.warps}; ++w)")
                self.t(f"    {at} = {op}::of({at}, load_shared<{self.compute}>({self.s.scratch} + (w * {count} + {flat}) * {width}));")

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

    def mask_missing(self, v: Value, layout: Layout, axes: set[str], identity: float, name: str) -> None:
        """Elements that do not exist along these axes get a value that does not count."""
        always, at_edge = [], []
        for g in layout:
            if g is None or not set(g.axes) & axes:
                continue
            if g.padded > g.size:
                always.append(("flat", g))
            for a in g.axes:
                if a in self.p.limits and a in axes:
                    loop = next((x for x in self.loops if x.loop.axis == a and x.edges), None)
                    (at_edge if loop is self.loops[-1] and loop is not None else always).append((a, g))
        if not always and not at_edge:
            return
        have, along = self.masked.get(name, (identity, set()))
        if have == identity and axes <= along:
            return
        self.masked[name] = identity, axes | (along if have == identity else set())
        value = constant(identity, self.compute) if not v.predicate else ("true" if identity == 1 else "false")

        def print_patch(which: list) -> None:
            with self.over(layout) as f:
                conditions = [
                    f"{f.flat(g)} < {g.size}" if kind == "flat" else f.holds(self.p.limits[kind]) for kind, g in which
                ]
                self.t(f"if (!({' && '.join(conditions)})) {name}{self.at(layout)} = {value};")

        if always:
            print_patch(always)
        if at_edge:
            with self.t.block("if (edge)"):
                print_patch(at_edge)

    def deferred_phi(self, s: Reduce) -> bool:
        return any(c.next == s.out and c.phi.id in self.s.deferred for x in self.loops for c in x.loop.carries)

    # ---- conversions between layouts
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
        width, name = 8 if self.compute == "double" else 4, self.variable(v)
        self.t(f"// {v} changes from rows to columns" if home.row else f"// {v} changes from columns to rows")
        self.t(f"{self.compute} {name}{self.shape(layout)};")
        self.t(self.sync())
        with self.over(home) as f:
            guard = " && ".join(filter(None, [self.one_lane(home), f"{f.flat(a)} < {a.size}" if a.padded > a.size else ""]))
            store = f"store_shared<{self.compute}>({self.s.scratch} + {f.flat(a)} * {width}, {source}{self.at(home)});"
            self.t(f"if ({guard}) {store}" if guard else store)
        self.t(self.sync())
        with self.over(layout) as f:
            read = f"load_shared<{self.compute}>({self.s.scratch} + {f.flat(b)} * {width})"
            self.t(f"{name}{self.at(layout)} = {f'{f.flat(b)} < {b.size} ? {read} : 0' if b.padded > b.size else read};")
        return name

    # ---- contractions
    def contract(self, s: Contract) -> None:
        plan, home = self.s.contracts[s.out.id], self.s.home[s.out.id]
        assert home.row is not None and home.column is not None
        for x, axes in ((plan.left, plan.inner), (plan.right, plan.inner)):
            if x.where != "tile":
                assert x.layout is not None
                self.mask_missing(x.value, x.layout, set(axes), 0.0, self.get(x.value, x.layout))
        for x, own in ((plan.left, plan.left_axes), (plan.right, plan.right_axes)):
            if x.where == "staged":
                self.stage(x, plan)
            elif x.where == "tile" and not (x.held and x.value.id in self.held):
                self.arrive(x.value.id)
        self.comment(s)
        acc = s.acc
        if acc is not None and acc.id not in self.consts:
            name = self.get(acc, home)
            self.masked.pop(name, None)
            if len(self.readers.get(acc.id, ())) > 1:
                fresh = self.variable(s.out)
                self.t(f"{self.compute} {fresh}{self.shape(home)};")
                self.t(f"assign({fresh}, {name});")
                name = fresh
        else:
            name = self.variable(s.out)
            self.t(f"{self.compute} {name}{self.shape(home)};")
            self.t(f"set_all({name}, {self.get(acc, home) if acc else constant(0.0, self.compute)});")
        left = self.operand(plan.left, plan, home.row, True)
        right = self.operand(plan.right, plan, home.column, False)
        call = "contract" if plan.kind == "tensor" else "contract_plain"
        self.t(f"{call}<{plan.steps}>({name}, {left}, {right});")
        self.env[s.out.id, home] = name

    def warp_offset(self, g: Group) -> str:
        if g.warps == 1:
            return "0"
        warp = "warp" if g.warps == self.s.warps_split > 1 else self.warp_column if g.side == COLUMN else self.warp_row
        return f"{warp} * {g.padded // g.warps}"

    def operand(self, x: Operand, plan: ContractPlan, group: Group, left: bool) -> str:
        if x.where == "register":
            assert x.layout is not None
            return f"rounded<{C_TYPES[plan.dtype]}>({self.get(x.value, x.layout)})"
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

    def stage(self, x: Operand, plan: ContractPlan) -> None:
        """A computed operand goes to shared memory."""
        assert x.layout is not None
        name = self.get(x.value, x.layout)
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

    # ---- stores
    def store(self, s: Store) -> None:
        frame = self.s.store_frames[id(s)]
        v, b = s.arg, self.p.buffer(s.buffer)
        part = frame.restricted(self.live(v.axes))
        memory, ctype = self.pointer[s.buffer], C_TYPES[b.dtype]
        self.comment(s)
        guards = list(filter(None, [self.one_lane(frame), self.replica_guard(frame)]))
        axes = {a for ix in s.index for a in ix.axes} | set(v.axes)
        cast = f"({self.compute})" if v.predicate else ""
        if frame == Layout(None, None):
            f = Frame(self, frame)
            value = f.operand(v)
            guard = " && ".join(guards + self.scalar_exists(axes))
            self.t(f"if ({guard or 'true'}) {memory}[{self.offset(f, s.buffer, s.index)}] = as<{ctype}>({cast}{value});")
            return
        run, step, packed = self.run_length(s.buffer, s.index, frame, axes)
        if part != frame or v.predicate or v.id in self.consts or v.id in self.inline:
            run = 1
        with self.over(frame, run) as f:
            conditions = list(dict.fromkeys(guards + self.exists(f, axes, frame)))
            place = self.offset(f, s.buffer, s.index)
            value = f.operand(v)
            if run > 1:
                write = f"store_run<{run}, {packed}>({memory} + ({place}), &{value}, {step});"
            else:
                write = f"{memory}[{place}] = as<{ctype}>({cast}{value});"
            self.t(f"if ({' && '.join(conditions)}) {write}" if conditions else write)

    # ---- loops
    def loop(self, s: Loop) -> None:
        state = LoopState(s)
        p, a = self.p, s.axis
        name, tile = self.axis_name[a], self.s.tile[a]
        split = s is self.s.split
        trips = -(-p.axes[a].extent // tile)
        new = self.names.new
        t = self.t
        t(f"// ---- over {name}, {tile} at a time" + (f", shared by {self.s.warps_split} warps" if split else ""))
        first, end = new(f"{name}_first"), new(f"{name}_end")
        constraints = list(s.constraints)
        if a in p.limits and (p.axes[a].extent % tile or p.limits[a].axes != (a,)):
            constraints.append(p.limits[a])
        live_first, live_end, full_first, full_end = [], [], [], []
        outside = Frame(self, Layout(None, None))
        for c in constraints:
            ca = dict(c.terms).get(a, 0)
            rest = c.plus(Affine(0, ((a, ca),)), -1)
            low, high = self.range_text(rest, outside)
            if ca < 0:
                live_end.append(f"floor_div({high}, {-ca * tile}) + 1")
                full_end.append(f"floor_div({low} - {-ca * (tile - 1)}, {-ca * tile}) + 1")
            elif ca > 0:
                live_first.append(f"ceil_div(-({high}) - {ca * (tile - 1)}, {ca * tile})")
                full_first.append(f"ceil_div(-({low}), {ca * tile})")
            else:
                live_end.append(f"(({high}) >= 0 ? {trips} : 0)")
                full_end.append(f"(({low}) >= 0 ? {trips} : 0)")
        t(f"const int {first} = {nest('at_least', live_first, '0')}, {end} = {nest('at_most', live_end, str(trips))};")
        state.edges = bool(constraints)
        if state.edges:
            state.full = new(f"{name}_full_first"), new(f"{name}_full_end")
            t(f"const int {state.full[0]} = {nest('at_least', full_first, '0')}, {state.full[1]} = {nest('at_most', full_end, str(trips))};")
        # carried state
        for c in s.carries:
            home = self.s.home[c.phi.id]
            var = self.variable(c.phi)
            kind = "partial " if c.phi.id in self.s.deferred else ""
            t(f"{self.compute} {var}{self.shape(home)};  // {kind}{c.kind} {c.op}")
            t(f"{'set_all' if c.init.id in self.consts or home == Layout(None, None) else 'assign'}({var}, {self.initial(c, home)});")
            self.env[c.phi.id, home] = var
        ring = [vid for vid, plan in self.s.tiles.items() if plan.loop == a and any(isinstance(x, Load) and x.out.id == vid for x in s.body)]
        stages = self.s.tiles[ring[0]].stages if ring else 1
        tile_var = new(f"{name}_tile")
        step = str(self.s.warps_split) if split else "1"
        begin = f"{first} + warp" if split else first
        self.start[a] = self.axis_name[a] if tile == 1 else self.first_of(name)
        position = f"const {self.width[a]} {self.start[a]} = {tile_var} * {tile};"
        if ring:
            self.fetch = new(f"fetch_{name}")
            fetch = self.fetch
            with t.block(f"auto {fetch} = [&](int {tile_var}, int into) INLINE_LAMBDA", "};"):
                t(position)
                for vid in ring:
                    self.comment(self.s.tiles[vid].load)
                    self.fill(self.s.tiles[vid], self.tile_of(vid, "into"))
            if self.issued or self.loops:
                if self.loops:
                    t(self.sync())
                if self.issued:
                    t("copy_commit();")
            if stages > 1:
                t("#pragma unroll")
                with t.block(f"for (int n = 0; n < {stages - 1}; ++n)"):
                    ahead = f"{begin} + n * {step}" if step != "1" else f"{begin} + n"
                    t(f"if ({ahead} < {end}) {fetch}({ahead}, n);")
                    t("copy_commit();")
        held = self.hold(s)
        if held or (self.issued and (split or not ring)):
            if self.issued:
                t(f"copy_wait<{stages - 1 if ring else 0}>();" if ring else "copy_commit();")
                if not ring:
                    t("copy_wait<0>();")
                t("block_sync();")
                self.landed.update(self.issued)
                self.issued = []
            for line in held:
                t(line)
        before = set(self.landed)
        if self.issued:  # they arrive with the first of the loop's own tiles
            self.landed.update(self.issued)
        slot = new("slot")
        if ring and stages > 1:
            t(f"int {slot} = 0;")
        self.loops.append(state)
        env = dict(self.env)
        advance = f"{tile_var} += {step}" if step != "1" else f"++{tile_var}"
        t("#pragma unroll 1")
        with t.block(f"for (int {tile_var} = {begin}; {tile_var} < {end}; {advance})"):
            t(position)
            if state.edges:
                t(f"const bool edge = {tile_var} < {state.full[0]} || {tile_var} >= {state.full[1]};")
            if ring and stages > 1:
                t(f"copy_wait<{stages - 2}>();")
                t(self.sync())
                ahead = new(f"{name}_ahead")
                t(f"const int {ahead} = {tile_var} + {(stages - 1) * int(step)};")
                into = f"{slot} ^ 1" if stages == 2 else f"{slot} == 0 ? {stages - 1} : {slot} - 1"
                t(f"if ({ahead} < {end}) {fetch}({ahead}, {into});")
                t("copy_commit();")
            elif ring:
                t(self.sync())
                t(f"{fetch}({tile_var}, 0);")
                t("copy_commit();")
                t("copy_wait<0>();")
                t(self.sync())
            elif self.loops[:-1] or not self.needs_no_barrier(s):
                t(self.sync())
            for vid in ring:
                var = new(f"{self.pointer[self.s.tiles[vid].load.buffer]}_tile")
                t(f"const {self.tile_types[vid]} {var} = {self.tile_of(vid, 'slot' if stages > 1 else None)};")
                state.tiles[vid] = var
            self.statements(s.body)
            self.flush()
            moves = []
            for c in s.carries:
                home = self.s.home[c.phi.id]
                source, var = self.get(c.next, home), self.env[c.phi.id, home]
                if source != var:
                    moves.append((var, source, home, c))
            self.move(moves)
            if ring and stages > 1:
                t(f"{slot} ^= 1;" if stages == 2 else f"{slot} = {slot} == {stages - 1} ? 0 : {slot} + 1;")
        self.loops.pop()
        self.env = {k: v for k, v in self.env.items() if k in env}
        self.landed = before
        if split:
            self.merge(s)
        else:
            self.finish(s)

    def needs_no_barrier(self, s: Loop) -> bool:
        return not any(isinstance(x, Contract) for x in walk(s.body))

    def initial(self, c: Carry, home: Layout) -> str:
        return self.get(c.init, home)

    def move(self, moves: list) -> None:
        """All phis take their new values at once."""
        targets = {m[0] for m in moves}
        late = []
        for var, source, home, c in moves:
            if source in targets:
                copy = self.names.new(var + "_next")
                self.t(f"{self.compute} {copy}{self.shape(home)};")
                self.t(f"assign({copy}, {source});")
                late.append((var, copy))
            elif c.next.id in self.consts:
                self.t(f"set_all({var}, {source});")
            else:
                self.t(f"assign({var}, {source});")
        for var, copy in late:
            self.t(f"assign({var}, {copy});")

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

    def range_text(self, ix: Affine, f: Frame) -> tuple[str, str]:
        """Smallest and largest value of an affine expression over the block's tile (elements past a ragged end included)."""
        low, high = ix, ix
        for a, c in ix.terms:
            spread = c * (self.s.tile.get(a, 1) - 1)
            low, high = low.plus(Affine(min(spread, 0))), high.plus(Affine(max(spread, 0)))
        position = {a: self.start.get(a, "0") for a in ix.axes}
        return affine(low, position, True), affine(high, position, True)

    def finish(self, s: Loop) -> None:
        """After a loop: lanes join their partial results."""
        for c in s.carries:
            home, out = self.s.home[c.phi.id], self.s.home[c.out.id]
            var = self.env[c.phi.id, home]
            if c.phi.id in self.s.deferred:
                self.join_lanes(s, c, var, home)
            self.env[c.out.id, out] = var
            self.convert(c.out)

    def join_lanes(self, s: Loop, c: Carry, var: str, home: Layout) -> None:
        d = next(x for x in s.body if isinstance(x, Reduce) and x.out == c.next)
        frame = self.s.frames[d.out.id]
        reduced = set(self.live(d.axes))
        rows = frame.row is not None and bool(set(frame.row.axes) & reduced)
        columns = frame.column is not None and bool(set(frame.column.axes) & reduced)
        op = OPS[d.op]
        self.t("// lanes join their partial results")
        with self.over(home):
            at = f"{var}{self.at(home)}"
            self.t(f"{at} = {self.across_lanes(at, op, rows, columns, frame)};")
        if not self.in_split():
            self.across_warps(var, op, home, frame, rows, columns)

    def merge(self, s: Loop) -> None:
        """The warps' states of a shared loop become one: pivots first, then every state moves to the joined pivots and is added."""
        t, warps = self.t, self.s.warps_split
        width = 8 if self.compute == "double" else 4
        t(f"// ---- the {warps} warps join their states")
        t("copy_wait<0>();")
        for c in s.carries:
            if c.phi.id in self.s.deferred:
                self.loops.append(LoopState(s))  # a warp joins its own lanes only
                self.join_lanes(s, c, self.env[c.phi.id, self.s.home[c.phi.id]], self.s.home[c.phi.id])
                self.loops.pop()
        t("block_sync();")
        place = 0
        joined: dict[int, str] = {}
        steps = {c.phi.id: merge_steps(s, c) for c in s.carries}

        def publish(c: Carry, var: str) -> int:
            nonlocal place
            home = self.s.home[c.phi.id]
            rows = home.row.size if home.row else 1
            pitch = home.column.padded + 4 if home.column else 1
            at = place
            place += warps * rows * pitch * width
            with self.over(home) as f:
                row = f.flat(home.row) if home.row else "0"
                column = f.flat(home.column) if home.column else "0"
                conditions = list(filter(None, [self.one_lane(home), f"{row} < {rows}" if home.row and home.row.padded > rows else ""]))
                where = f"{at} + ((warp * {rows} + {row}) * {pitch} + {column}) * {width}"
                store = f"store_shared<{self.compute}>({where}, {var}{self.at(home)});"
                t(f"if ({' && '.join(conditions)}) {store}" if conditions else store)
            return at

        def collect(c: Carry, at: int, op: str, layout: Layout, name: str) -> None:
            home = self.s.home[c.phi.id]
            rows = home.row.size if home.row else 1
            pitch = home.column.padded + 4 if home.column else 1
            t(f"{self.compute} {name}{self.shape(layout)};")
            with self.over(layout) as f:
                row = f.flat(layout.row) if layout.row else "0"
                column = f.flat(layout.column) if layout.column else "0"
                inside = f"{row} < {rows}" if layout.row and layout.row.padded > rows else ""
                t(f"{self.compute} x = {constant(REDUCTIONS[op], self.compute)};")
                t("#pragma unroll")
                t(f"for (int w = 0; w < {warps}; ++w)")
                where = f"{at} + ((w * {rows} + {row}) * {pitch} + {column}) * {width}"
                guard = f"if ({inside}) " if inside else ""
                t(f"    {guard}x = {OPS[op]}::of(x, load_shared<{self.compute}>({where}));")
                t(f"{name}{self.at(layout)} = x;")

        pivots = [c for c in s.carries if steps[c.phi.id] and steps[c.phi.id][0] != "+"]  # type: ignore[index]
        sums = [c for c in s.carries if c not in pivots]
        places = {c.phi.id: publish(c, self.env[c.phi.id, self.s.home[c.phi.id]]) for c in pivots}
        if pivots:
            t("block_sync();")
        env = dict(self.env)
        for c in pivots:
            home = self.s.home[c.phi.id]
            name = joined[c.phi.id] = self.variable(c.out)
            collect(c, places[c.phi.id], steps[c.phi.id][0], home, name)  # type: ignore[index]
            self.env[c.next.id, home] = name
        values: dict[int, str] = {}
        seen: set[int] = set()
        for c in sums:
            _, statements, v = steps[c.phi.id]  # type: ignore[misc]
            for x in statements:
                if x.out.id not in seen:  # type: ignore[union-attr]
                    seen.add(x.out.id)  # type: ignore[union-attr]
                    self.pending.append((self.s.home.get(x.out.id) or self.free_layout(x.out), x))  # type: ignore[union-attr]
        self.flush()
        for c in sums:
            v = steps[c.phi.id][2]  # type: ignore[index]
            values[c.phi.id] = self.get(v, self.s.home[c.phi.id])
        for c in sums:
            places[c.phi.id] = publish(c, values[c.phi.id])
        if sums:
            t("block_sync();")
        self.env = env
        for c in s.carries:
            out = self.s.home[c.out.id]
            if c in pivots:
                self.env[c.out.id, out] = joined[c.phi.id]
                continue
            name = self.variable(c.out)
            collect(c, places[c.phi.id], "+", out, name)
            self.env[c.out.id, out] = name
        for c in s.carries:
            self.convert(c.out)

    def free_layout(self, v: Value) -> Layout:
        have = self.s.instances.get(v.id, [])
        if len(have) != 1:
            raise Unsupported(f"{v} is used in a shared loop's merge in {len(have)} layouts")
        return have[0]


def nest(fn: str, items: list[str], start: str) -> str:
    for x in items:
        start = f"{fn}({x}, {start})"
    return start


def implied(wanted: Affine, known: Affine) -> bool:
    """Does known ≥ 0 imply wanted ≥ 0, because they differ by a constant?"""
    d = wanted.plus(known, -1)
    return not d.terms and d.const >= 0


class LoopState:
    def __init__(self, loop: Loop):
        self.loop = loop
        self.edges = False
        self.full: tuple[str, str] = ("", "")
        self.tiles: dict[int, str] = {}


class Frame:
    """Where one unrolled pass over the slots of a layout stands: text of positions and operands."""

    def __init__(self, e: Fragments, layout: Layout):
        self.e, self.layout = e, layout
        self.needed: dict[Group, dict[str, None]] = {}
        self.flats: dict[Group, None] = {}
        self.locals: dict[int, str] = {}

    def group_of(self, a: str) -> Group | None:
        return next((g for g in self.layout if g and a in g.axes), None)

    def position(self, a: str) -> str:
        g = self.group_of(a)
        if g is None or self.e.s.tile.get(a) == 1:
            return self.e.start.get(a, "0")
        if len(g.axes) > 1:
            self.flats[g] = None
        self.needed.setdefault(g, {})[a] = None
        self.e.base(g)
        return self.e.axis_name[a]

    def affine(self, ix: Affine) -> str:
        wide = max(map(abs, ix.bounds(self.e.p.extents))) > 2**30
        return affine(ix, {a: self.position(a) for a in ix.axes}, wide)

    def holds(self, ix: Affine) -> str:
        """The condition ix ≥ 0."""
        wide = max(map(abs, ix.bounds(self.e.p.extents))) > 2**30
        return at_least_zero(ix, {a: self.position(a) for a in ix.axes}, wide)

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
            out = here if not out else f"({out}) * {self.e.s.tile[a]} + {here}"
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
            tile = self.e.s.tile[a]
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
            return f"({self.e.compute})({self.affine(s.index)})"
        if isinstance(s, Mask):
            return "(" + (" && ".join(map(self.holds, s.constraints)) or "true") + ")"
        return self.operand(v)

    def compute(self, s: Stmt) -> str:
        e = self.e
        if isinstance(s, Map):
            return apply(s.fn, [self.operand(a) for a in s.args], [a.predicate for a in s.args], e.compute, e.fast)
        assert isinstance(s, Gather)
        position = self.operand(s.position)
        extent = e.p.buffer(s.buffer).shape[s.dim]
        guards = e.bounds(self, s, s.out.axes) + e.exists(self, s.out.axes, self.layout)
        place = e.offset(self, s.buffer, s.index, skip=s.dim)
        base = s.index[s.dim]
        at = f"(i64){position}" + (f" + {self.affine(base)}" if base.terms or base.const else "")
        stride = e.strides[s.buffer][s.dim]
        guard = " && ".join(dict.fromkeys(guards))
        read = f"gather<{e.compute}>({e.pointer[s.buffer]} + ({place}), {at}, {extent}, {stride})"
        return f"({guard} ? {read} : 0)" if guard else read


class TileFrame(Frame):
    """Positions while a tile is filled: `row` and `column` are places in it."""

    def __init__(self, e: Fragments, plan: TilePlan):
        super().__init__(e, Layout(None, None))
        self.plan = plan
        self.row, self.column = "row", "column"
        self.used: dict[str, None] = {}

    def position(self, a: str) -> str:
        for axes, var in ((self.plan.outer, self.row), (self.plan.inner, self.column)):
            if a in axes:
                if var == "0" or self.e.s.tile.get(a) == 1:
                    return self.e.start.get(a, "0")
                self.used[a] = None
                return self.e.axis_name[a]
        return self.e.start.get(a, "0")

    def definitions(self, g: Group | None = None) -> list[str]:
        out = []
        for axes, var in ((self.plan.outer, "row"), (self.plan.inner, "column")):
            step = 1
            for n, a in reversed(list(enumerate(axes))):
                tile = self.e.s.tile[a]
                if a in self.used:
                    here = f"{var} / {step}" if step > 1 else var
                    here = f"{here} % {tile}" if n > 0 else here
                    start = self.e.start.get(a, "0")
                    out.append(f"const {self.e.width[a]} {self.e.axis_name[a]} = {here if start == '0' else f'{start} + {here}'};")
                step *= tile
        return out
