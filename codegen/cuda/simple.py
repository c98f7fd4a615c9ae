"""The lowering that takes everything: one element a thread.

For tile programs that fit no fragment layout (products over batches inside a block, reductions of three-dimensional tiles, …).
Results of reductions and contractions, carried state, and elementwise values that would be worked out many times lie in shared
memory, or in a workspace where they do not fit; everything else is worked out where it is used.  Correct first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...terms import REDUCTIONS
from ..tile import Contract, Gather, Iota, Load, Loop, Map, Mask, Reduce, Stmt, Store, TileProgram, Value, live, operands, walk
from .arch import Arch
from .kernel import Function, KernelText, Parameter, Place
from .layout import Unsupported
from .schedule import Precision, missing_limits
from .text import C_TYPES, Names, Text, apply, constant

OPS = {"+": "Add", "*": "Mul", "max": "Max", "min": "Min"}
HEAVY = frozenset(
    "exp exp2 expm1 log log2 log10 log1p tanh sinh cosh sin cos tan asin acos atan asinh acosh atanh erf pow mod".split()
)
MOST_WORKSPACE = 1 << 30
THREADS = 256
ROOM = 96 * 1024  # bytes of shared memory that values may take


@dataclass
class Simple:
    """What this lowering decides: where values lie, in bytes from the start of shared memory or of the block's workspace."""

    program: TileProgram
    arch: Arch
    precision: Precision
    places: dict[int, tuple[str, int]]  # value → ("shared" or "workspace", offset)
    shared: int
    workspace: int  # bytes of one block
    threads: int = THREADS
    registers: int = 64


def plan_simple(p: TileProgram, arch: Arch, precision: Precision) -> Simple:
    return _Planner(p, arch, precision).run()


class _Planner:
    def __init__(self, p: TileProgram, arch: Arch, precision: Precision):
        self.p, self.arch, self.precision = p, arch, precision
        self.width = 8 if precision.compute == "float64" else 4

    def size(self, axes: Iterable[str]) -> int:
        return math.prod(self.p.axes[a].tile for a in axes)

    def run(self) -> Simple:
        kept: dict[int, Value] = {}
        for s in walk(self.p.body):
            if isinstance(s, Loop):
                for c in s.carries:
                    kept[c.phi.id], kept[c.next.id] = c.phi, c.next
            elif isinstance(s, Reduce | Contract):
                kept[s.out.id] = s.out
        # elementwise values that would be worked out again and again
        work: dict[int, int] = {}
        for s in walk(self.p.body):
            if isinstance(s, Map):
                work[s.out.id] = (8 if s.fn in HEAVY else 1) + sum(work.get(a.id, 0) for a in s.args if a.id not in kept)
                times = 0
                for r in walk(self.p.body):
                    if isinstance(r, Loop):
                        times += sum(c.next == s.out or c.init == s.out for c in r.carries)
                    elif s.out in operands(r):
                        space = (
                            set(r.out.axes)
                            if not isinstance(r, Store)
                            else {a for ix in r.index for a in ix.axes} | set(r.arg.axes)
                        )
                        if isinstance(r, Reduce):
                            space |= set(r.arg.axes)
                        elif isinstance(r, Contract):
                            space |= set(r.a.axes) | set(r.b.axes)
                        times += max(1, self.size(space) // max(1, self.size(s.out.axes)))
                if not s.out.predicate and work[s.out.id] * (times - 1) > 4:
                    kept[s.out.id] = s.out
                    work[s.out.id] = 0
        shared = workspace = 0
        places: dict[int, tuple[str, int]] = {}
        room = min(self.arch.shared, ROOM)
        for v in sorted(kept.values(), key=lambda v: self.size(v.axes)):
            n = -(-self.size(v.axes) * self.width // 16) * 16
            if shared + n <= room:
                places[v.id] = "shared", shared
                shared += n
            else:
                places[v.id] = "workspace", workspace
                workspace += n
        for s in walk(self.p.body):  # what a loop leaves is its state
            if isinstance(s, Loop):
                for c in s.carries:
                    places[c.out.id] = places[c.phi.id]
                    if c.next.id in {x.phi.id for x in s.carries}:
                        raise Unsupported(f"{c.next} is the state of two parts of a loop")
        blocks = math.prod(self.p.axes[a].trips for a in self.p.grid)
        if workspace * blocks > MOST_WORKSPACE:
            raise Unsupported(f"{workspace * blocks} bytes of workspace for values that fit no layout")
        return Simple(self.p, self.arch, self.precision, places, shared, workspace)


class SimpleText(KernelText):
    """Prints one kernel."""

    def __init__(self, s: Simple, names: Names, macros: Mapping[str, str]):
        super().__init__(s.program, {a: x.tile for a, x in s.program.axes.items()}, s.arch, s.precision, names, macros)
        self.s = s

    def run(self) -> Function:
        s = self.s
        self.symbols()
        body = self.t = Text()
        body.depth = 1
        if s.workspace:
            name = self.names.new("workspace")
            self.parameters.append(Parameter(f"{self.function}.workspace", "u8* __restrict__", name))
        body("const int thread = thread_index(), lane = lane_index(), warp = warp_index();")
        if s.workspace:
            body(f"{name} += block_index() * {s.workspace};")
            self.workspace = name
        self.preamble()
        self.statements(live(self.p.body, set()))
        return self.function_text(body, s.threads, 1, s.shared)

    # ---- places of values
    def live(self, axes: Iterable[str]) -> tuple[str, ...]:
        return tuple(a for a in axes if self.tile[a] > 1)

    def place(self, v: Value, at: Spot) -> str:
        """Byte offset of an element."""
        flat = ""
        for a in self.live(v.axes):
            here = at.local(a)
            flat = here if not flat else f"({flat}) * {self.tile[a]} + {here}"
        _, offset = self.s.places[v.id]
        return f"{offset} + ({flat or 0}) * {self.width_bytes}"

    def read(self, v: Value, at: Spot) -> str:
        where, _ = self.s.places[v.id]
        place = self.place(v, at)
        return (
            f"load_shared<{self.compute}>({place})" if where == "shared" else f"*({self.compute}*)({self.workspace} + ({place}))"
        )

    def write(self, v: Value, at: Spot, text: str) -> None:
        where, _ = self.s.places[v.id]
        place = self.place(v, at)
        if where == "shared":
            self.t(f"store_shared<{self.compute}>({place}, {text});")
        else:
            self.t(f"*({self.compute}*)({self.workspace} + ({place})) = {text};")

    # ---- statements
    def statements(self, body: tuple[Stmt, ...]) -> None:
        for s in body:
            match s:
                case Loop():
                    self.loop(s)
                case Store():
                    self.comment(s)
                    self.store(s)
                case Reduce() | Contract():
                    self.comment(s)
                    self.reduce(s)
                    self.t("block_sync();")
                case Map() | Gather() | Load() | Iota() | Mask() if s.out.id in self.s.places:
                    self.comment(s)
                    with self.each(self.live(s.out.axes)) as at:
                        self.write(s.out, at, at.compute(s))
                    self.t("block_sync();")

    def each(self, axes: tuple[str, ...], by_warp: bool = False) -> Spot:
        return Spot(self, axes, by_warp)

    def reduce(self, s: Reduce | Contract) -> None:
        args = (s.arg,) if isinstance(s, Reduce) else (s.a, s.b)
        op = s.op if isinstance(s, Reduce) else "+"
        axes = self.live(s.out.axes)
        inner = self.live(s.axes)
        outputs, terms = self.size(axes), self.size(inner)
        by_warp = outputs < self.s.threads and terms >= 2 * self.arch.warp
        with self.each(axes, by_warp) as at:
            self.t(f"{self.compute} x = {constant(REDUCTIONS[op], self.compute)};")
            start, step = ("lane", self.arch.warp) if by_warp else ("0", 1)
            advance = f"n += {step}" if step > 1 else "++n"
            known, index = dict(at.known), dict(at.index)
            with self.t.block(f"for (int n = {start}; n < {terms}; {advance})"):
                at.split("n", inner)
                conditions = [at.holds(x) for x in missing_limits(self.p, s.axes, (a for v in args for a in v.axes))]
                if conditions:
                    self.t(f"if (!({' && '.join(conditions)})) continue;")
                values = [at.value(v) for v in args]
                cast = [f"({self.compute}){x}" if v.predicate else x for v, x in zip(args, values)]
                self.t(f"x = {OPS[op]}::of(x, {self.compute}({' * '.join(cast)}));")
            at.known, at.index = known, index
            if by_warp:
                self.t(f"x = combine_lanes<{OPS[op]}>(x);")
            if s.acc:
                self.t(f"x = {OPS[op]}::of({at.value(s.acc)}, x);")
            if by_warp:
                self.t("if (lane == 0)")
            self.write(s.out, at, "x")

    def size(self, axes: Iterable[str]) -> int:
        return math.prod(self.tile[a] for a in axes)

    def store(self, s: Store) -> None:
        axes = tuple(dict.fromkeys((*s.arg.axes, *(a for ix in s.index for a in ix.axes))))
        with self.each(self.live(axes)) as at:
            conditions = [at.holds(self.p.limits[a]) for a in axes if a in self.p.limits]
            if conditions:
                self.t(f"if (!({' && '.join(conditions)})) continue;")
            value = at.value(s.arg)
            cast = f"({self.compute})" if s.arg.predicate else ""
            ctype = C_TYPES[self.p.buffer(s.buffer).dtype]
            self.t(f"{self.pointer[s.buffer]}[{self.offset(at, s.buffer, s.index)}] = as<{ctype}>({cast}{value});")

    def loop(self, s: Loop) -> None:
        a, t = s.axis, self.t
        name, tile, new = self.axis_name[a], self.tile[s.axis], self.names.new
        t(f"// ---- over {name}, {tile} at a time")
        first, end = new(f"{name}_first"), new(f"{name}_end")
        self.loop_range(s, tile, first, end)
        for c in s.carries:
            with self.each(self.live(c.phi.axes)) as at:
                self.write(c.phi, at, at.value(c.init))
        t("block_sync();")
        tile_var = new(f"{name}_tile")
        self.start[a] = name if tile == 1 else self.first_of(name)
        with t.block(f"for (int {tile_var} = {first}; {tile_var} < {end}; ++{tile_var})"):
            t(f"const {self.width[a]} {self.start[a]} = {self.widened(a, tile_var)} * {tile};")
            self.open.append(a)
            self.statements(s.body)
            self.open.pop()
            # all new state has been worked out: it takes the old one's place
            for c in s.carries:
                with self.each(self.live(c.phi.axes)) as at:
                    self.write(c.phi, at, self.read(c.next, at))
            t("block_sync();")


class Spot(Place):
    """One element's place: a loop of the block's threads (or warps) over the elements of some axes, and what is known there."""

    def __init__(self, kernel: SimpleText, axes: tuple[str, ...], by_warp: bool):
        super().__init__(kernel)
        self.k, self.axes, self.by_warp = kernel, axes, by_warp
        self.index: dict[str, str] = {}
        self.known: dict[int, str] = {}

    def __enter__(self) -> Spot:
        k = self.k
        n = k.size(self.axes)
        who, count = ("warp", k.s.threads // k.arch.warp) if self.by_warp else ("thread", k.s.threads)
        k.t(f"for (int p = {who}; p < {n}; p += {count}) {{")
        k.t.depth += 1
        self.split("p", self.axes)
        return self

    def __exit__(self, *exc: object) -> None:
        self.k.t.depth -= 1
        self.k.t("}")

    def split(self, flat: str, axes: tuple[str, ...]) -> None:
        """Declare the positions along axes from a row-major place."""
        k, step = self.k, 1
        lines = []
        for n, a in reversed(list(enumerate(axes))):
            here = f"{flat} / {step}" if step > 1 else flat
            here = f"{here} % {k.tile[a]}" if n > 0 else here
            name = self.index[a] = k.names.new(f"{k.axis_name[a]}_here")
            start = k.start.get(a, "0")
            lines.append(f"const {k.width[a]} {name} = {here if start == '0' else f'{start} + {here}'};")
            step *= k.tile[a]
        for line in reversed(lines):
            k.t(line)

    def position(self, a: str) -> str:
        return self.index.get(a) or self.k.start.get(a, "0")

    def local(self, a: str) -> str:
        start = self.k.start.get(a, "0")
        return self.position(a) if start == "0" else f"({self.position(a)} - {start})"

    def value(self, v: Value) -> str:
        """The element's value; what it is made of is printed first."""
        k = self.k
        if v.id in k.consts:
            return constant(k.consts[v.id], k.compute)
        stack = [v]
        while stack:  # arguments first; no recursion, for chains may be thousands long
            u = stack[-1]
            if u.id in self.known or u.id in k.consts:
                stack.pop()
                continue
            missing = (
                []
                if u.id in k.s.places
                else [a for a in operands(k.defs[u.id]) if a.id not in self.known and a.id not in k.consts]
            )
            if missing:
                stack.extend(reversed(missing))
                continue
            text = k.read(u, self) if u.id in k.s.places else self.compute(k.defs[u.id])
            name = self.known[u.id] = k.names.new(f"t{u.id}")
            k.t(f"const {k.ctype(u)} {name} = {text};")
            stack.pop()
        return self.known[v.id]

    def compute(self, s: Stmt) -> str:
        k = self.k
        match s:
            case Iota():
                return f"({k.compute})({self.affine(s.index)})"
            case Mask():
                return "(" + (" && ".join(map(self.holds, s.constraints)) or "true") + ")"
            case Map():
                args = [self.value(a) for a in s.args]
                return apply(s.fn, args, [a.predicate for a in s.args], k.compute, k.fast)
            case Load():
                exists = [self.holds(k.p.limits[a]) for a in s.out.axes if a in k.p.limits]
                guard = " && ".join(dict.fromkeys(exists + k.bounds(self, s, s.out.axes)))
                read = f"({k.ctype(s.out)})value({k.pointer[s.buffer]}[{k.offset(self, s.buffer, s.index)}])"
                return f"({guard} ? {read} : ({k.ctype(s.out)})0)" if guard else read
        assert isinstance(s, Gather)
        return k.gather_text(s, self, self.value(s.position), [self.holds(k.p.limits[a]) for a in s.out.axes if a in k.p.limits])
