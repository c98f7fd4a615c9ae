"""The outside of an emitted kernel: parameters, the block's place in the grid, offsets, bounds, ranges of loops."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...extraction.plan import Buffer
from ...runtime.module import TensorMap
from ...terms import Affine
from ..tile import Carry, Const, Gather, Iota, Load, Loop, Mask, Stmt, Store, TileProgram, Value, lines, operands, walk
from .arch import Arch
from .schedule import Precision
from .text import C_TYPES, INTEGERS, Names, Text, affine, at_least_zero


@dataclass(frozen=True)
class Parameter:
    """A kernel parameter: `value` is what the launch passes (a buffer, "buffer.stride2", or how a buffer is seen by tensor map), type and
    name as in the text."""

    value: str | TensorMap
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
    cluster: int = 1  # blocks that are launched together
    together: int = 1  # blocks that are to share a multiprocessor's registers


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a row-major array without gaps, in elements."""
    return tuple(math.prod(shape[n + 1 :]) for n in range(len(shape)))


class Place:
    """Text of positions, somewhere in a kernel."""

    def __init__(self, kernel: KernelText):
        self.kernel = kernel

    def position(self, a: str) -> str:
        return self.kernel.start.get(a, "0")

    def affine(self, ix: Affine) -> str:
        return affine(ix, {a: self.position(a) for a in ix.axes}, self.kernel.wide(ix))

    def holds(self, ix: Affine) -> str:
        """The condition ix ≥ 0."""
        return at_least_zero(ix, {a: self.position(a) for a in ix.axes}, self.kernel.wide(ix))


def readers_of(body: Iterable[Stmt], carries: Iterable[Carry]) -> dict[int, list[int]]:
    """Value → what reads it: id() of statements, −phi of carries."""
    out: dict[int, list[int]] = {}
    for s in body:
        for v in operands(s):
            out.setdefault(v.id, []).append(id(s))
    for c in carries:
        out.setdefault(c.next.id, []).append(-c.phi.id)
    return out


class KernelText:
    """What all lowerings print alike.  `tile`: elements of each axis that a block (or a warp that shares a loop) holds."""

    def __init__(
        self, p: TileProgram, tile: dict[str, int], arch: Arch, precision: Precision, names: Names, macros: Mapping[str, str]
    ):
        self.p, self.tile, self.arch, self.names, self.macros = p, tile, arch, names, macros
        self.followed = False  # by another kernel of the plan
        self.compute = "double" if precision.compute == "float64" else "float"
        self.width_bytes = 8 if self.compute == "double" else 4
        self.fast = not precision.accurate and self.compute == "float"
        self.t = Text()
        self.start: dict[str, str] = {}  # axis → text of the first position of its tile ("0", or a variable)
        self.open: list[str] = []  # axes of the loops around this place
        self.consts: dict[int, float] = {}
        self.together = 1  # blocks of a cluster, which have the same tile
        self.inline: dict[int, Stmt] = {}
        self.defs: dict[int, Stmt] = {}
        for s in walk(p.body):
            if isinstance(s, Const):
                self.consts[s.out.id] = s.value
            if isinstance(s, Iota | Mask):
                self.inline[s.out.id] = s
            if not isinstance(s, Loop | Store):
                self.defs[s.out.id] = s
        carries = [c for s in walk(p.body) if isinstance(s, Loop) for c in s.carries]
        self.readers = readers_of(walk(p.body), carries)

    def function_text(self, body: Text, threads: int, min_blocks: int, shared: int) -> Function:
        """The kernel around its body."""
        head = Text()
        for line in str(self.p).splitlines():
            head(f"// {line}".rstrip())
        printed = str(body)
        strides = "".join(f"    {line}\n" for name, line in self.stride_lines.items() if re.search(rf"\b{name}\b", printed))
        params = ", ".join(f"{x.type} {x.name}" for x in self.parameters)
        text = f"{head}KERNEL({threads}, {min_blocks})\n{self.function}({params}) {{\n{strides}{printed}}}\n"
        blocks = math.prod(self.p.axes[a].trips for a in self.p.grid)
        return Function(self.function, text, tuple(self.parameters), blocks, threads, shared, dict(self.packed))

    def wide(self, ix: Affine) -> bool:
        return max(map(abs, ix.bounds(self.p.extents))) > 2**30

    def pointer_to(self, b: Buffer, written: bool) -> str:
        """The C type.  What a kernel ahead writes may still be written while this one starts: were the pointer const and __restrict__,
        the compiler could read ahead of previous_kernel_wait()."""
        ctype = C_TYPES[b.dtype]
        if written:
            return f"{ctype}* __restrict__"
        return f"const {ctype}*" if self.arch.overlap or b.kind != "input" else f"const {ctype}* __restrict__"

    def symbols(self) -> None:
        """Names of buffers, strides and axes."""
        p, new = self.p, self.names.new
        self.function = self.names.outer_name(p.name)
        self.parameters: list[Parameter] = []
        self.pointer: dict[str, str] = {}
        self.strides: dict[str, tuple[str | int, ...]] = {}
        self.stride_lines: dict[str, str] = {}  # name → its declaration, printed if the name is used
        self.packed: dict[str, str] = {}
        for b in dict.fromkeys((*p.reads, *p.writes)):
            if b.name in self.pointer:
                continue
            name = self.pointer[b.name] = new(b.name)
            self.parameters.append(Parameter(b.name, self.pointer_to(b, b in p.writes), name))
            if b.kind == "input":
                strides: list[str | int] = []
                for n, extent in enumerate(b.shape):
                    if extent == 1:
                        strides.append(0)
                        continue
                    given, stride = new(f"given_{name}_stride{n}"), new(f"{name}_stride{n}")
                    strides.append(stride)
                    self.parameters.append(Parameter(f"{b.name}.stride{n}", "i64", given))
                    contiguous = contiguous_strides(b.shape)[n]
                    self.stride_lines[stride] = f"const i64 {stride} = {self.macros[b.name]} == 2 ? {contiguous} : {given};"
                self.strides[b.name] = tuple(strides)
                self.packed[b.name] = self.macros[b.name]
            else:
                self.strides[b.name] = contiguous_strides(b.shape)
        self.axis_name: dict[str, str] = {a: new(a) for a in p.axes}
        self.width: dict[str, str] = {a: "i64" if p.extents.get(a, x.extent) > 2**30 else "int" for a, x in p.axes.items()}
        for a, x in p.axes.items():
            if x.role == "whole":
                self.start[a] = "0"

    def order_kernels(self) -> None:
        """Nothing is read or written before the kernel ahead of this one has ended, whoever launched it.  Another one of the plan may
        then come to the device at once.  Any other comes as blocks end: earlier was measured to gain in some programs, and to lose up to
        a tenth in others (docs/performance.md)."""
        if self.arch.overlap:
            self.t("previous_kernel_wait();")
            if self.followed:
                self.t("next_kernel_may_start();")

    def preamble(self) -> None:
        t = self.t
        self.order_kernels()
        every = self.grid_order()
        for a, _ in every:
            self.start[a] = "0"
        grid = [(a, reverse) for a, reverse in every if self.p.axes[a].trips > 1]
        if grid:
            t("// the block's tile of each grid axis; the last one varies fastest")
            t(f"int block = block_index(){f' / {self.together}' if self.together > 1 else ''};")
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
                t(
                    f"const {self.width[a]} {self.start[a]} = {self.widened(a, part)} * {x.tile};"
                    + ("  // the longest first" if reverse else "")
                )
            if n < len(grid) - 1:
                t(f"block /= {trips};")
        for a, x in self.p.axes.items():
            if x.role == "whole" and self.tile.get(a) == 1:
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

    def widened(self, axis: str, text: str) -> str:
        """A number of a tile in the type of the axis' positions."""
        return f"(i64){text}" if self.width[axis] == "i64" else text

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

    def comment(self, s: Stmt) -> None:
        for line in lines((s,), 0):
            self.t(f"// {line}")

    def bounds(self, place: Place, s: Load | Gather, axes: Iterable[str]) -> list[str]:
        """Conditions for an index to be inside the buffer, beyond those for its axes to exist."""
        skip = s.dim if isinstance(s, Gather) else None
        return [place.holds(x) for x in self.inside(s.buffer, s.index, axes, skip)]

    def inside(self, buffer: str, index: tuple[Affine, ...], axes: Iterable[str], skip: int | None = None) -> list[Affine]:
        """These conditions as expressions that are ≥ 0 where they hold."""
        out = []
        known = {self.p.limits[a] for a in axes if a in self.p.limits}
        for n, (ix, size) in enumerate(zip(index, self.p.buffer(buffer).shape)):
            if n == skip:
                continue
            lo, hi = ix.bounds(self.p.extents)
            if lo < 0:
                out.append(ix)
            rest = Affine(size - 1).plus(ix, -1)
            if hi >= size and not any(implied(rest, k) for k in known):
                out.append(rest)
        return out

    def offset(self, place: Place, buffer: str, index: tuple[Affine, ...], skip: int | None = None) -> str:
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
            position = place.position(a)
            if position == "0" or not parts:
                continue
            factor = parts[0] if len(parts) == 1 else "(" + " + ".join(parts) + ")"
            terms.append(f"(i64){position}" if factor == "1" else f"(i64){position} * {factor}")
        terms += const
        if const_n or not terms:
            terms.append(str(const_n))
        return " + ".join(terms)

    def stride_of(self, s: Load, axis: str) -> str:
        parts = []
        for ix, stride in zip(s.index, self.strides[s.buffer]):
            c = dict(ix.terms).get(axis)
            if c and stride != 0:
                parts.append(str(c * stride) if isinstance(stride, int) else stride if c == 1 else f"{c} * {stride}")
        return " + ".join(parts) or "0"

    def gather_text(self, s: Gather, place: Place, position: str, exists: list[str]) -> str:
        """The element of a gather at an integer position; NaN where that is out of range."""
        guard = " && ".join(dict.fromkeys(exists + self.bounds(place, s, s.out.axes)))
        rest, base = self.offset(place, s.buffer, s.index, skip=s.dim), s.index[s.dim]
        at = f"(i64){position}" + (f" + {place.affine(base)}" if base.terms or base.const else "")
        extent, stride = self.p.buffer(s.buffer).shape[s.dim], self.strides[s.buffer][s.dim]
        read = f"gather<{self.compute}>({self.pointer[s.buffer]} + ({rest}), {at}, {extent}, {stride})"
        return f"({guard} ? {read} : 0)" if guard else read

    def scalar_exists(self, axes: Iterable[str]) -> list[str]:
        """Conditions for the block's one position of each axis to exist."""
        here = Place(self)
        return [here.holds(self.p.limits[a]) for a in sorted(axes) if a in self.p.limits and self.tile.get(a, 1) == 1]

    def loop_range(self, s: Loop, tile: int, first: str, end: str) -> tuple[bool, tuple[str, str]]:
        """Declare the tiles [first, end) of a loop that can contribute, and those in between where no mask or end is met: (whether
        the two differ, names of the latter)."""
        a, p = s.axis, self.p
        name, trips = self.axis_name[a], -(-p.axes[a].extent // tile)
        constraints = [*s.constraints, *self.loop_limits(a, tile)]
        live_first, live_end, full_first, full_end = [], [], [], []
        for c in constraints:
            ca = dict(c.terms).get(a, 0)
            low, high = self.range_text(c.plus(Affine(0, ((a, ca),)), -1))
            if ca < 0:
                live_end.append(f"floor_div({high}, {-ca * tile}) + 1")
                full_end.append(f"floor_div({low} - {-ca * (tile - 1)}, {-ca * tile}) + 1")
            elif ca > 0:
                live_first.append(f"ceil_div(-({high}) - {ca * (tile - 1)}, {ca * tile})")
                full_first.append(f"ceil_div(-({low}), {ca * tile})")
            else:
                live_end.append(f"(({high}) >= 0 ? {trips} : 0)")
                full_end.append(f"(({low}) >= 0 ? {trips} : 0)")
        begins, ends = nest("at_least", live_first, "0"), nest("at_most", live_end, str(trips))
        if s.constraints:  # one iteration at least
            begins = f"at_most({begins}, {trips - 1})" if live_first else begins
            ends = f"at_least({ends}, {first} + 1)"
        self.t(f"const int {first} = {begins}, {end} = {ends};")
        if not constraints:
            return False, ("", "")
        full = self.names.new(f"{name}_full_first"), self.names.new(f"{name}_full_end")
        self.t(f"const int {full[0]} = {nest('at_least', full_first, '0')}, {full[1]} = {nest('at_most', full_end, str(trips))};")
        return True, full

    def known(self, a: str) -> bool:
        """Is the axis' tile fixed here?"""
        return a in self.p.axes and (self.p.axes[a].role != "loop" or a in self.open)

    def loop_limits(self, a: str, tile: int) -> list[Affine]:
        """Which ends of axes a loop over `a` may run into: its own, and those of parts of one axis around it."""
        out = []
        for of, limit in self.p.limits.items():
            ragged = limit.axes != (a,) or self.p.axes[a].extent % tile
            if a in limit.axes and ragged and (of == a or self.known(of)):
                out.append(limit)
        return out

    def range_text(self, ix: Affine) -> tuple[str, str]:
        """Smallest and largest value of an affine expression over the block's tile (elements past a ragged end included), and over
        all of an axis whose loop is not open."""
        low, high = ix, ix
        for a, c in ix.terms:
            spread = c * ((self.tile.get(a, 1) if self.known(a) else self.p.extents[a]) - 1)
            low, high = low.plus(Affine(min(spread, 0))), high.plus(Affine(max(spread, 0)))
        position = {a: self.start.get(a, "0") if self.known(a) else "0" for a in ix.axes}
        return affine(low, position, True), affine(high, position, True)


def nest(fn: str, items: list[str], start: str) -> str:
    for x in items:
        start = f"{fn}({x}, {start})"
    return start


def implied(wanted: Affine, known: Affine) -> bool:
    """Does known ≥ 0 imply wanted ≥ 0, because they differ by a constant?"""
    d = wanted.plus(known, -1)
    return not d.terms and d.const >= 0
