"""A pipeline of warpgroups printed as CUDA C++: one warp copies tiles, the others multiply and do everything else.

Consumers walk the loop from its end, so that tiles cut by a mask come first; an iteration's early products and the late ones of
the iteration before are issued together, and its elementwise work runs beside them.  Where there are no late products,
elementwise work of one warpgroup runs beside the early products of another."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext

from ...terms import Affine
from ..cuda.fragments import Fragments
from ..cuda.kernel import Function, Parameter
from ..cuda.layout import Layout
from ..cuda.registers import Frame, LoopState
from ..cuda.schedule import HALVES, Operand, RoundedSum, TilePlan
from ..cuda.text import C_TYPES, Names, Text, affine, constant
from ..tile import Carry, Contract, Gather, Load, Loop, Map, Reduce, Stmt, Store, Value, operands
from .maps import tensor_map
from .planner import MOST_FAILED, READY, WORK_SLOTS, Parts, Pipeline

MANY = 40  # registers of a producer: with fewer it has none for several iterations at a time, nor any need of them

# variables that the text below names itself
_LOCALS = set(
    "rank group work works coming next exact again failures fresh alone pending fits moves edge start at_edge at_start".split()
)


def readers_of(body: Iterable[Stmt]) -> dict[int, set[int]]:
    """Value → the values that these statements make of it; −1: it is stored."""
    out: dict[int, set[int]] = {}
    for s in body:
        for v in operands(s):
            out.setdefault(v.id, set()).add(-1 if isinstance(s, Store | Loop) else s.out.id)
    return out


class Warpgroups(Fragments):
    converts_once = True

    def __init__(self, pipe: Pipeline, names: Names, macros: Mapping[str, str]):
        super().__init__(pipe.schedule, names, macros)
        self.pipe = pipe
        self.shapes: set[tuple[str, int, bool]] = set()  # of wgmma: dtype, columns, left operand in registers
        self.packed_operands: dict[int, str] = {}  # register operands of late products, rounded
        self.printed: set[int] = set()  # values made so far in this iteration
        self.reads: dict[int, set[int]] = {}  # value → values that the iteration makes of it
        self.waiting_for: set[int] = set()  # values that are not printed yet, though later ones are
        self.results: set[str] = set()  # sums of a whole tile of work, which its results may overwrite
        self.in_place: dict[int, str] = {}  # value → the variable that it overwrites
        self.waiting: list[tuple[str, int]] = []  # results that wait to be stored: the variable, and in how many parts
        self.before_loop = 0  # line of the text

    # ---- the function
    def run(self) -> Function:
        p, pipe = self.p, self.pipe
        self.names.taken |= _LOCALS
        self.symbols()
        self.map_names: dict[int, str] = {}
        first: list[Parameter] = []
        for vid, box in pipe.boxes.items():
            load = self.s.tiles[vid].load
            name = self.map_names[vid] = self.names.new(f"{self.pointer[load.buffer]}_map")
            first.append(Parameter(tensor_map(p.buffer(load.buffer), box), "MAP", name))
        if pipe.dynamic:
            self.counter = self.names.new("counter")
            first.append(Parameter(f"{p.name}.counter", "u32*", self.counter))
        self.parameters[:0] = first
        body = Text()
        self.t = body
        body.depth = 1
        self.setup()
        with body.block("if (warp_index() < 4)"):
            few, many = pipe.registers
            if pipe.cluster == 1:
                body(f"named_arrive({READY}, {pipe.threads});  // who sets barriers up need not wait: copies start at once")
            if few:
                body(f"fewer_registers<{few}>();")
            with body.block("if (warp_index() == 0 && elect_one())"):
                outer, self.names = self.names, self.names.inner()
                self.produce()
                self.names = outer
        with body.block("else"):
            if pipe.cluster == 1:
                body(f"named_sync({READY}, {pipe.threads});")
            if few:
                body(f"more_registers<{many}>();")
            self.consume()
        if pipe.cluster > 1:
            body("cluster_sync();  // the others may still copy to this block, and arrive here")
        return self.finished(body)

    def finished(self, body: Text) -> Function:
        text = str(body)
        self.parameters = [x for x in self.parameters if x.type == "MAP" or self.used(text, x)]
        f = self.function_text(body, self.pipe.threads, 1, self.pipe.shared)
        return Function(f.name, f.text, f.parameters, self.pipe.blocks, f.threads, f.shared, f.packed, self.pipe.cluster)

    def used(self, text: str, x: Parameter) -> bool:
        text = re.sub(r"//.*", "", text)
        names = [x.name, *(n for n, line in self.stride_lines.items() if x.name in line)]
        return any(re.search(rf"\b{n}\b", text) for n in names)

    def trips(self, a: str) -> int:
        """Positions of a grid axis, as works count them."""
        return self.p.axes[a].trips // (self.pipe.cluster if a == self.pipe.along else 1)

    def setup(self) -> None:
        t, pipe = self.t, self.pipe
        warps = 4 * pipe.consumers
        if pipe.cluster > 1:
            t("const int rank = cluster_rank();")
        with t.block("if (warp_index() == 0 && elect_one())"):
            for name in self.map_names.values():
                t(f"prefetch_map({name});")
            for vid, plan in self.led():
                n, readers = (plan.stages * pipe.consumers, 4) if vid in pipe.parted else (plan.stages, warps)
                readers *= pipe.cluster if pipe.common(vid) else 1
                loop = f"for (int n = 0; n < {n}; ++n) " if n > 1 else ""
                step = " + 8 * n" if n > 1 else ""
                t(f"{loop}{{ barrier_init({pipe.full[vid]}{step}, 1); barrier_init({pipe.empty[vid]}{step}, {readers}); }}")
            t(
                f"for (int n = 0; n < {WORK_SLOTS}; ++n) {{ barrier_init({pipe.work_full} + 8 * n, 1); "
                f"barrier_init({pipe.work_empty} + 8 * n, {warps}); }}"
            )
            if pipe.frozen:
                t(f"barrier_init({pipe.drained}, {warps});")
                t(f"store_shared<u32>({pipe.failed}, 0);")
            t("barrier_init_done();")
        if self.sequence[1]:
            t("next_kernel_may_start();")
        if self.sequence[0]:
            t("previous_kernel_wait();")
            if any(b.kind != "input" for b in self.p.reads):
                t("async_fence_global();")
        if pipe.cluster > 1:  # others may not touch barriers that are not set up
            t("cluster_sync();")

    # ---- the producer
    def produce(self) -> None:
        t, pipe = self.t, self.pipe
        total = pipe.works
        rings = self.rings(self.s.tiles)
        t(f"Ring<{WORK_SLOTS}> works;")
        t(f"int work = (int)block_index(){f' / {pipe.cluster}' if pipe.cluster > 1 else ''};")
        if pipe.frozen:
            t("int again = -1, failures = 0;  // the next of the tiles that failed, of how many")
        with t.block("for (;;)"):
            t(f"barrier_wait({pipe.work_empty} + 8 * works.slot(), works.parity() ^ 1);")
            if pipe.frozen:
                self.produce_again(total)
            with t.block("if (work < 0)" if pipe.frozen else f"if (work >= {total})"):
                self.announce("-1")
                if not pipe.frozen:
                    self.reset_counter()
                t("break;")
            self.positions("work")
            first, end = self.range_names()
            self.tile_range(first, end)
            self.announce("2 * work + exact" if pipe.frozen else "work")
            t("works.advance();")
            following = self.following()
            if pipe.frozen and following != str(total):
                following = f"again >= 0 ? {total} : {following}"
            if pipe.dynamic:
                t(f"int next = {total};")
            fixed = [v for v, x in self.s.tiles.items() if x.loop is None]
            self.copies(fixed, rings)
            early = {x.value.id for s in pipe.parts.early for x in self.tile_operands(s)}
            ring = [v for v, x in self.s.tiles.items() if x.loop is not None]
            ahead = [v for v in ring if v in early] if pipe.overlap else []
            a = pipe.loop.axis
            name = self.axis_name[a]
            tile = self.names.new(f"{name}_tile")
            self.start[a] = self.axis_name[a] if self.tile[a] == 1 else self.first_of(name)

            def copies(which: Iterable[int], at: str) -> None:
                t(f"const {self.width[a]} {self.start[a]} = {at} * {self.tile[a]};")
                self.copies(which, rings)

            if ahead:
                with t.block(""):
                    copies(ahead, f"({end} - 1)")
            for vid in fixed:  # the other warpgroups' parts: the first one can start
                for part in range(1, pipe.consumers) if vid in pipe.parted else ():
                    self.copy_start([vid], rings[vid], part)
                    self.copy(vid, rings[vid], part)
                if vid in pipe.parted:
                    t(f"{rings[vid]}.advance();")
            if pipe.registers[0] < MANY:
                t("#pragma unroll 1")
            with t.block(f"for (int {tile} = {end} - 1; {tile} >= {first}; --{tile})"):
                if ahead:
                    with t.block(f"if ({tile} > {first})"):
                        copies(ahead, f"({tile} - 1)")
                rest = [v for v in ring if v not in ahead]
                if pipe.dynamic:  # late, so that who is done first has the next; the last copies hide the trip to memory
                    t(f"if ({tile} == {first}) next = {following};")
                if rest:
                    copies(rest, tile)
            t(f"work = {'next' if pipe.dynamic else following};")

    def following(self) -> str:
        """The number of the work that this block takes after `work`."""
        n, total = self.pipe.workers, self.pipe.works
        if self.pipe.dynamic:
            return f"(int)(fetch_add({self.counter}, 1) + {n})"
        if n >= total:
            return str(total)
        if self.pipe.order == "folded":  # n · row + place → n · (row + 1) + n - 1 - place
            return f"2 * (work - work % {n}) + {2 * n - 1} - work"
        return f"work + {n}"

    def reset_counter(self) -> None:
        """By the last block that asks no more; beside the consumers' last tile, for it takes as long as a trip to memory."""
        if self.pipe.dynamic:
            with self.t.block(f"if (fetch_add({self.counter} + 1, 1) == {self.pipe.workers - 1})"):
                self.t(f"{self.counter}[0] = {self.counter}[1] = 0;")

    def announce(self, what: str) -> None:
        """Tells the consumers what comes next: a tile, or that there is none."""
        pipe = self.pipe
        self.t(f"store_shared<int>({pipe.work} + 4 * works.slot(), {what});")
        self.t(f"barrier_arrive({pipe.work_full} + 8 * works.slot());")

    def produce_again(self, total: int) -> None:
        """When no tile is left: those whose frozen pivots were too low, with running ones."""
        t, pipe = self.t, self.pipe
        t(f"const bool exact = work >= {total} || load_shared<u32>({pipe.failed}) >= {MOST_FAILED - 16 * pipe.consumers};")
        with t.block(f"if (work >= {total})"):
            with t.block("if (again < 0)"):
                self.announce("-2")
                t("works.advance();")
                self.reset_counter()
                t(f"barrier_wait({pipe.drained}, 0);")
                t(f"failures = (int)load_shared<u32>({pipe.failed});")
                t("if (failures == 0) break;  // as the consumers see, too")
                t(f"barrier_wait({pipe.work_empty} + 8 * works.slot(), works.parity() ^ 1);")
            t(f"work = next_failed({pipe.failed} + 4, failures, again);")

    def led(self) -> list[tuple[int, TilePlan]]:
        """Tiles that have barriers of their own."""
        return [(v, t) for v, t in self.s.tiles.items() if self.pipe.leader[v] == v]

    def rings(self, tiles: Iterable[int], suffix: str = "") -> dict[int, str]:
        """Cursors over the stages of these tiles, declared; tiles that share barriers share one."""
        out: dict[int, str] = {}
        for v in tiles:
            leader = self.pipe.leader[v]
            out[v] = out[leader] if leader in out else self.ring(leader, suffix)
            out.setdefault(leader, out[v])
        return out

    def copies(self, which: Iterable[int], rings: Mapping[int, str]) -> None:
        which = list(which)
        for leader in dict.fromkeys(self.pipe.leader[v] for v in which):
            mine = [v for v in which if self.pipe.leader[v] == leader]
            self.copy_start(mine, rings[leader], 0)
            for v in mine:
                self.copy(v, rings[leader], 0)
            if leader not in self.pipe.parted:
                self.t(f"{rings[leader]}.advance();")

    def copy_start(self, together: Sequence[int], ring: str, part: int) -> None:
        """Wait until tiles that share barriers may be filled, and say how much will come."""
        pipe, leader = self.pipe, self.pipe.leader[together[0]]
        barrier = f"8 * {self.place(leader, ring, str(part))}"
        self.t(f"barrier_wait({pipe.empty[leader]} + {barrier}, {ring}.parity() ^ 1);")
        self.t(f"barrier_expect({pipe.full[leader]} + {barrier}, {sum(map(pipe.arriving, together))});")

    def ring(self, vid: int, suffix: str = "") -> str:
        """Declares a cursor over a tile's stages."""
        plan = self.s.tiles[vid]
        name = self.names.new(f"{self.pointer[plan.load.buffer]}_ring{suffix}")
        self.t(f"Ring<{plan.stages}> {name};")
        return name

    def copy(self, vid: int, ring: str, part: int = 0) -> None:
        """A tile on its way; of one that is parted, the part of one warpgroup."""
        t, pipe, plan, box = self.t, self.pipe, self.s.tiles[vid], self.pipe.boxes[vid]
        self.comment(plan.load)
        parted = pipe.parted.get(vid)
        parts = pipe.consumers if parted else 1
        barrier = f"8 * {self.place(vid, ring, str(part))}"
        full = pipe.full[pipe.leader[vid]]
        position = {a: self.start.get(a, "0") for ix in box.coordinates for a in ix.axes}
        shift = self.tile[parted] // parts * part if parted else 0
        where = [affine(ix.plus(Affine(shift if parted in ix.axes else 0)), position) for ix in box.coordinates]
        size = plan.bytes // parts
        into = str(plan.offset + part * size) + (f" + {ring}.slot() * {self.stage_bytes(plan)}" if plan.stages > 1 else "")
        panels, copy, whom = box.panels, "copy_box", ""
        if (by := pipe.spread.get(vid)) is not None:  # this block's part, for all of the cluster
            copy, whom = "copy_box_to_all", f"{2**pipe.cluster - 1}, "
            if by:
                rows = self.tile[by] // pipe.cluster
                where = [f"{x} + rank * {rows}" if by in ix.axes else x for x, ix in zip(where, box.coordinates)]
                into += f" + rank * {plan.rows // pipe.cluster * 128}"
            else:
                panels //= pipe.cluster
                where[0] += f" + rank * {panels * 64}"
                into += f" + rank * {panels * plan.rows * 128}"
        for n in range(panels):
            first = where[0] if n == 0 else str(64 * n) if where[0] == "0" else f"{where[0]} + {64 * n}"
            place = into if n == 0 else f"{into} + {n * plan.rows // parts * 128}"
            t(f"{copy}({place}, {self.map_names[vid]}, {full} + {barrier}, {whom}{', '.join([first, *where[1:]])});")

    @staticmethod
    def stage_bytes(plan: TilePlan) -> int:
        return -(-plan.bytes // 1024) * 1024

    def positions(self, work: str) -> None:
        """Declares where the tile of work number `work` begins along each grid axis."""
        t, order = self.t, self.pipe.traversal
        for a in self.p.grid:
            self.start[a] = "0"
        for a, x in self.p.axes.items():
            if x.role == "whole":
                self.start[a] = "0"
        slow, fast = (math.prod(self.trips(a) for a, _ in axes) for axes in (order.slow, order.fast))
        together = self.pipe.cluster if any(a == self.pipe.along for a, _ in order.fast) else 1
        group = min(max(1, order.group // together), fast)
        if slow > 1 and fast > 1 and group < fast:
            new = self.names.new
            g, rest, some, at_slow, at_fast = new("group"), new("place"), new("size"), new("slow"), new("fast")
            t(f"// {group * together} places of {', '.join(a for a, _ in order.fast)} at a time")
            t(f"const int {g} = {work} / {group * slow}, {rest} = {work} % {group * slow};")
            if fast % group:
                t(f"const int {some} = {g} == {fast // group} ? {fast % group} : {group};")
            else:
                some = str(group)
            t(f"const int {at_slow} = {rest} / {some}, {at_fast} = {g} * {group} + {rest} % {some};")
            self.decode(order.slow, at_slow)
            self.decode(order.fast, at_fast)
        else:
            self.decode((*order.slow, *order.fast), work)

    def decode(self, axes: Sequence[tuple[str, bool]], at: str) -> None:
        """Declares the first position of each axis from their joint number; the last one varies fastest."""
        step = 1
        for n, (a, reverse) in reversed(list(enumerate(axes))):
            x, name, trips = self.p.axes[a], self.axis_name[a], self.trips(a)
            part = f"{at} / {step}" if step > 1 else at
            part = f"{part} % {trips}" if n else part
            part = f"{trips - 1} - {part if part == at else f'({part})'}" if reverse else part
            part = part if part.isidentifier() else f"({part})"
            if trips < x.trips:
                part = f"({part} * {self.pipe.cluster} + rank)"
            note = "  // the longest first" if reverse else ""
            self.start[a] = name if x.tile == 1 else self.first_of(name)
            self.t(f"const {self.width[a]} {self.start[a]} = {part if x.tile == 1 else f'{part} * {x.tile}'};{note}")
            step *= trips

    def range_names(self) -> tuple[str, str]:
        name = self.axis_name[self.pipe.loop.axis]
        return self.names.new(f"{name}_first"), self.names.new(f"{name}_end")

    # ---- consumers
    def tile_operands(self, s: Contract) -> list[Operand]:
        c = self.s.contracts[s.out.id]
        return [x for x in (c.left, c.right) if x.where == "tile"]

    def consume(self) -> None:
        t, pipe, s = self.t, self.pipe, self.s
        loop, parts = pipe.loop, pipe.parts
        t("const int warp = warp_index() - 4, lane = lane_index();")
        t("const int group = warp / 4;  // of the warpgroups that compute")
        self.warp_row, self.warp_column = "warp", "0"
        mark = len(t.out)
        depth = t.depth
        t(f"Ring<{WORK_SLOTS}> works;")
        late_tiles = {x.value.id for c in parts.late for x in self.tile_operands(c)}
        early_tiles = {x.value.id for c in parts.early for x in self.tile_operands(c)}
        self.early_ring = self.rings(v for v in s.tiles if v in early_tiles)
        self.late_ring = self.rings(v for v in s.tiles if v in late_tiles and v not in early_tiles)
        self.late_ring |= self.rings((v for v in s.tiles if v in late_tiles and v in early_tiles), "_late")
        running = [v for v in s.tiles if v in late_tiles and s.tiles[v].loop is not None]
        self.done_ring = {} if parts.early else self.rings(running, "_done")
        # registers that products write or read: alive across iterations
        self.scores: dict[int, str] = {}
        for product in parts.early:
            home = s.home[product.out.id]
            name = self.scores[product.out.id] = self.variable(product.out)
            t(f"float {name}{self.shape(home)};")
        for product in parts.late:
            plan = s.contracts[product.out.id]
            v = plan.left.value
            if plan.left.where == "register" and v.id not in self.packed_operands:
                assert plan.left.layout is not None and plan.left.layout.column is not None
                name = self.packed_operands[v.id] = self.names.new(f"{self.variable(v)}_operand")
                t(f"u32 {name}[{plan.left.layout.column.slots}];  // rounded")
        states: dict[int, str] = {}
        for c in loop.carries:
            home = s.home[c.phi.id]
            var = states[c.phi.id] = self.variable(c.phi)
            kind = "partial " if c.phi.id in s.deferred else ""
            t(f"{self.compute} {var}{self.shape(home)};  // {kind}{c.kind} {c.op}")
        next_work = self.names.new("next_work")
        with t.block(f"auto {next_work} = [&]() INLINE_LAMBDA", "};"):
            t(f"barrier_wait({pipe.work_full} + 8 * works.slot(), works.parity());")
            # the lane that says that it has been read is the one that reads it
            t(f"const int x = of_first_lane(lane == 0 ? load_shared<int>({pipe.work} + 4 * works.slot()) : 0);")
            t(f"barrier_arrive_if(lane == 0, {pipe.work_empty} + 8 * works.slot());")
            t("works.advance();")
            t("return x;")
        self.issue_early_name = self.names.new("issue_early") if parts.early else ""
        if parts.early:
            with t.block(f"auto {self.issue_early_name} = [&](auto at_start) INLINE_LAMBDA", "};"):
                self.issue_early()
        if pipe.turns:
            t(f"if (group == {pipe.consumers - 1}) named_arrive(2, {128 * 2});  // the first one begins")
        if pipe.frozen:
            with t.block("for (;;)"):
                self.consume_tiles(states, next_work)
                t("if (work == -1) break;")
                t(f"barrier_arrive_if(lane == 0, {pipe.drained});")
                t(f"barrier_wait({pipe.drained}, 0);")
                t(f"if (load_shared<u32>({pipe.failed}) == 0) break;")
        else:
            self.consume_tiles(states, next_work)
        lines = [line.replace("    ", "    " * depth, 1) if line.startswith("    ") else line for line in self.declared]
        t.out[mark:mark] = lines

    def consume_tiles(self, states: Mapping[int, str], next_work: str) -> None:
        t, pipe = self.t, self.pipe
        t(f"int work = {next_work}();")
        if pipe.overlap:
            with t.block("if (work >= 0)"):
                t(f"{self.issue_early_name}(Yes{{}});")
                t("products_wait<0>();")
        with t.block("while (work >= 0)"):
            for ring in dict.fromkeys([*self.early_ring.values(), *self.late_ring.values(), *self.done_ring.values()]):
                t(f"{ring}.settle();")
            self.positions("work / 2" if pipe.frozen else "work")
            if pipe.frozen:
                t("const bool exact = work & 1;  // not with frozen pivots")
            before = dict(self.env)
            n = self.p.body.index(pipe.loop)
            self.statements(self.p.body[:n])
            self.flush()
            self.main_loop(states, next_work)
            if pipe.frozen:
                self.check(states)
            self.printed, self.reads = set(), readers_of(self.p.body[n + 1 :])
            self.results = {states[c.phi.id] for c in pipe.loop.carries if self.overwritten(c)}
            self.statements(self.p.body[n + 1 :])
            self.flush()
            self.store_held_first()
            self.env = before
            if pipe.overlap:
                if not pipe.chain:
                    t(f"if (coming >= 0) {self.issue_early_name}(Yes{{}});")
                t("products_wait<0>();")
            t("work = coming;")
        if self.waiting:
            with t.block("if (pending)"):
                for part in range(max(n for _, n in self.waiting)):
                    self.store_held(part)

    def store_held_first(self) -> None:
        """Puts in front of the loop, which is printed already: some iterations that store what the tile before has left."""
        if not self.waiting:
            return
        self.declare("bool pending = false;  // results that are still to be stored")
        self.t("pending = true;")
        t, self.t = self.t, Text()
        self.t.depth = t.depth
        with self.t.block("if (pending)"):
            for part in range(max(n for _, n in self.waiting)):
                self.t(self.one_step)
                self.store_held(part)
            self.t("pending = false;")
        t.out[self.before_loop : self.before_loop] = self.t.out
        self.t = t

    def store_held(self, part: int) -> None:
        for name, parts in self.waiting:
            if part < parts:
                self.t(f"{name}.store<{part}, {parts}>();")

    def check(self, states: Mapping[int, str]) -> None:
        """Did frozen pivots leave everything in range?  Sums above 10³⁷ have no reciprocal.  Nothing else is lost on the way: a weight
        that a product's operand has no room for is infinite there, and then so is every sum that it is part of, or NaN.  Nor is a
        weight too small beside others, for no pivot is above the maximum, unless there was none yet when it was frozen."""
        t, pipe = self.t, self.pipe
        with t.block("if (!exact)"):
            t("bool fits = true;")
            for c in pipe.loop.carries:
                most = "INFINITE" if c.phi.id in pipe.pivots.candidates else "1e37f"
                t(f"fits &= all_below({states[c.phi.id]}, {most});")
            t(f"if (warp_any(!fits) && lane == 0) note_failed({pipe.failed}, work / 2);")

    def led_rings(self, rings: Mapping[int, str]) -> list[tuple[int, str]]:
        """Of these rings those that are a tile's own."""
        return [(v, ring) for v, ring in rings.items() if self.pipe.leader[v] == v]

    def wait_full(self, vid: int, ring: str) -> None:
        self.t(f"barrier_wait({self.pipe.full[vid]} + 8 * {self.place(vid, ring)}, {ring}.parity());")

    def release(self, vid: int, ring: str) -> None:
        barrier = f"{self.pipe.empty[vid]} + 8 * {self.place(vid, ring)}"
        if self.pipe.common(vid):
            self.t(f"barrier_arrive_at_if(lane < {self.pipe.cluster}, {barrier}, lane);  // in each block of the cluster")
        else:
            self.t(f"barrier_arrive_if(lane == 0, {barrier});")

    def place(self, vid: int, ring: str, part: str = "group") -> str:
        """Which of a tile's barriers."""
        if vid not in self.pipe.parted:
            return f"{ring}.slot()"
        return part if self.s.tiles[vid].stages == 1 else f"({ring}.slot() * {self.pipe.consumers} + {part})"

    def panels(self, vid: int) -> str:
        """The first stage of a tile (of one that is parted, the first part)."""
        plan = self.s.tiles[vid]
        ctype = C_TYPES[self.p.buffer(plan.load.buffer).dtype]
        rows = plan.rows // (self.pipe.consumers if vid in self.pipe.parted else 1)
        return f"Panels<{ctype}, {rows}, {self.pipe.boxes[vid].panels * 64}>{{{plan.offset}}}"

    def shift(self, vid: int, ring: str, turned: bool, left: bool) -> str:
        """Bytes from there to where this warpgroup's operand begins."""
        plan, pipe = self.s.tiles[vid], self.pipe
        parts = [f"{ring}.slot() * {self.stage_bytes(plan)}"] if plan.stages > 1 else []
        if left and pipe.consumers > 1:
            own = plan.bytes // pipe.consumers if vid in pipe.parted else plan.rows * 128 if turned else 64 * 128
            parts.append(f"group * {own}")
        place = " + ".join(parts) or "0"
        return f"uniform({place})" if len(parts) > 1 else place  # else it is worked out in every lane, and read from one again

    def multiply(self, s: Contract, acc: str, add: str, rings: Mapping[int, str], part: int | None = None) -> None:
        """part: only the first (0) or the second (1) part of its steps, of one with its left operand in registers."""
        plan, home = self.s.contracts[s.out.id], self.s.home[s.out.id]
        assert home.row is not None and home.column is not None
        ctype = C_TYPES[plan.dtype]
        self.shapes.add((ctype, home.column.padded, plan.left.where == "register"))

        def tile(x: Operand, own: Sequence[str], left: bool) -> str:
            vid = x.value.id
            turned = set(self.s.tiles[vid].outer) != set(own)
            return f"{'MNMajor' if turned else 'KMajor'}({self.panels(vid)}, {self.shift(vid, rings[vid], turned, left)})"

        in_registers = plan.left.where == "register"
        left = self.packed_operands[plan.left.value.id] if in_registers else tile(plan.left, home.row.axes, True)
        right = tile(plan.right, home.column.axes, False)
        self.comment(s)
        what = f"multiply<{plan.steps}>"
        if part is not None:
            assert in_registers
            middle = min(self.pipe.split, plan.steps - 1)
            what = f"multiply_part<{middle * part}, {plan.steps if part else middle}>"
        self.t(f"{what}({acc}, {left}, {right}, {add});")

    def issue_early(self) -> None:
        """Wait for the tiles of the early products and issue those.  What lies outside the loop is there since its first iteration."""
        t = self.t
        known = []
        for vid, ring in self.led_rings(self.early_ring):
            if self.pipe.overlap and self.s.tiles[vid].loop is None:
                known.append((vid, ring))
            else:
                self.wait_full(vid, ring)
        if known:
            with t.block("if constexpr (decltype(at_start)::value)"):
                for vid, ring in known:
                    self.wait_full(vid, ring)
        self.pin_scores()
        t("products_fence();")
        for product in self.pipe.parts.early:
            self.multiply(product, self.scores[product.out.id], "false", self.early_ring)
        t("products_commit();")

    def issue_late(self, states: Mapping[int, str], part: int | None = None) -> None:
        """part: the first of two."""
        t, pipe = self.t, self.pipe
        for vid, ring in self.led_rings(self.late_ring):
            if vid not in self.early_ring and not (pipe.peek and self.s.tiles[vid].loop):
                self.wait_full(vid, ring)
        if pipe.parts.early:  # else others are under way, adding to the same registers
            self.pin_sums(states)
        for name in self.packed_operands.values():
            t(f"pin({name});")
        t("products_fence();")
        for product in pipe.parts.late:
            carry = pipe.carries[product.out.id]
            add = "!fresh" if self.overwritten(carry) else "true"
            self.multiply(product, states[carry.phi.id], add, self.late_ring, part)
        t("products_commit();")
        if any(map(self.overwritten, pipe.loop.carries)):
            t("fresh = false;")

    def issue_rest(self, states: Mapping[int, str]) -> None:
        """The second part of the late products, once the elementwise work before it is done.  Nothing may touch their registers here."""
        self.pin_scores()
        self.t("products_fence();")
        for product in self.pipe.parts.late:
            self.multiply(product, states[self.pipe.carries[product.out.id].phi.id], "true", self.late_ring, 1)
        self.t("products_commit();")

    def fixed_early(self) -> list[tuple[int, str]]:
        """Tiles outside the loop that only early products read."""
        rings = self.led_rings(self.early_ring)
        return [(v, ring) for v, ring in rings if self.s.tiles[v].loop is None and v not in self.late_ring]

    def release_early(self, last: str) -> None:
        """After the early products are done: their tiles go back, those outside the loop if it was the last iteration.  Their
        rings advance after the loop, whatever happens in it: then they are the same for all lanes, as the compiler sees it."""
        t = self.t
        for vid, ring in self.led_rings(self.early_ring):
            plan = self.s.tiles[vid]
            if plan.loop is None:
                if last and (vid, ring) in self.fixed_early():
                    with t.block(f"if ({last})"):
                        self.release(vid, ring)
            else:
                if vid not in self.late_ring:
                    self.release(vid, ring)
                t(f"{ring}.advance();")

    def release_fixed(self) -> None:
        """Tiles outside the loop that its products read to the end go back."""
        for vid, plan in self.led():
            if plan.loop is None and (vid in self.late_ring or not self.pipe.overlap):
                rings = [x[vid] for x in (self.early_ring, self.late_ring) if vid in x]
                self.release(vid, rings[0])
                for ring in rings:
                    self.t(f"{ring}.advance();")

    def main_loop(self, states: Mapping[int, str], next_work: str) -> None:
        """The loop over one tile of work.  Its first early products are under way when it begins, those of the next tile when it ends."""
        t, pipe, s = self.t, self.pipe, self.s
        loop, parts = pipe.loop, pipe.parts
        a = loop.axis
        name = self.axis_name[a]
        state = LoopState(loop)
        first, end = self.range_names()
        state.edges, state.full = self.tile_range(first, end)
        state.limits = self.loop_limits(a, self.tile[a])
        for c in loop.carries:
            home = s.home[c.phi.id]
            var = states[c.phi.id]
            self.env[c.phi.id, home] = var
            if self.overwritten(c):
                continue
            kind = "set_all" if c.init.id in self.consts or home == Layout(None, None) else "assign"
            t(f"{kind}({var}, {self.initial(c, home)});")
        state.state = set(states.values())
        state.outside = set(self.env.values()) - state.state
        if any(map(self.overwritten, loop.carries)):
            t("bool fresh = true;  // the first product overwrites what it adds to")
        if not parts.early:
            t("bool alone = true;  // no products are under way")
            self.pin_sums(states)
        tile = self.names.new(f"{name}_tile")
        t(f"int {tile} = {end} - 1;")
        self.start[a] = name if self.tile[a] == 1 else self.first_of(name)
        position = f"const {self.width[a]} {self.start[a]} = {tile} * {self.tile[a]};"
        self.loops.append(state)
        self.open.append(a)
        outer_env = dict(self.env)
        for product in parts.early:
            self.env[product.out.id, s.home[product.out.id]] = self.scores[product.out.id]

        def steps(suffix: str, which: Parts) -> tuple[str, str]:
            absorb, step = self.names.new(f"absorb{suffix}"), self.names.new(f"advance{suffix}")
            if parts.early:
                with t.block(f"auto {absorb} = [&](auto at_edge, auto at_start) INLINE_LAMBDA", "};"):
                    self.absorb(states, position, which)
            with t.block(f"auto {step} = [&](auto at_edge) INLINE_LAMBDA", "};"):
                self.step(states, absorb, tile, first)
            return absorb, step

        absorb, step = steps("", parts)
        frozen = steps("_frozen", pipe.frozen)[1] if pipe.frozen else ""
        if pipe.overlap:
            self.early_done(f"{tile} == {first}")
            t(f"{absorb}({'Yes' if state.edges else 'No'}{{}}, Yes{{}});")
            t(f"--{tile};")
        elif frozen:
            t(f"{step}({'Yes' if state.edges else 'No'}{{}});  // where pivots stay is up to the first tile")
        self.before_loop, self.one_step = len(t.out), f"if ({tile} >= {first}) {step}(No{{}});"
        low = any(dict(c.terms).get(a, 0) > 0 for c in (*loop.constraints, *state.limits))
        until = f"at_least({state.full[0]}, {first})" if low else first
        if state.edges:
            t(f"while ({tile} >= at_least({state.full[1]}, {first})) {step}(Yes{{}});")
        if frozen:
            t(f"if (!exact) while ({tile} >= {until}) {frozen}(No{{}});")
        t(f"while ({tile} >= {until}) {step}(No{{}});")
        if low:
            t(f"while ({tile} >= {first}) {step}(Yes{{}});")
        self.last_products(states, next_work)
        self.loops.pop()
        self.open.pop()
        self.masked.clear()
        self.env = outer_env
        self.finish(loop)

    def tile_range(self, first: str, end: str) -> tuple[bool, tuple[str, str]]:
        """As loop_range, but never empty: what lies outside is masked, and one such iteration changes nothing."""
        loop = self.pipe.loop
        found = self.loop_range(loop, self.tile[loop.axis], first, f"{end}_found")
        self.t(f"const int {end} = at_least({end}_found, {first} + 1);")
        return found

    def overwritten(self, c: Carry) -> bool:
        """Does a product write the state first, so that it needs no initial value?"""
        return self.consts.get(c.init.id) == 0.0 and any(x is c for x in self.pipe.carries.values())

    def last_products(self, states: Mapping[int, str], next_work: str) -> None:
        """The last iteration's late products, beside the first early ones of the next tile."""
        t, pipe = self.t, self.pipe
        if not pipe.overlap:
            # The wait comes first, and results are read behind the loop in next_work: the assembler has been seen to move such reads up
            # to where products_wait<1> had waited for an earlier product with the same sums, but not past a loop.
            t("products_wait<0>();")
            if not pipe.parts.early:
                self.release_done()
                self.pin_sums(states)
            self.release_fixed()
            t(f"const int coming = {next_work}();")
            return
        for _, ring in self.fixed_early():
            t(f"{ring}.advance();")
        if not pipe.parts.late:
            if not pipe.chain:
                self.release_fixed()
            t(f"const int coming = {next_work}();")
            if pipe.chain:
                with t.block("if (coming >= 0)"):
                    self.my_turn()
                    t(f"{self.issue_early_name}(Yes{{}});  // beside the end of this tile")
                    self.your_turn()
            return
        self.my_turn()
        self.issue_late(states)
        if pipe.chain:
            t(f"const int coming = {next_work}();")
            with t.block("if (coming >= 0)"):
                t(f"{self.issue_early_name}(Yes{{}});  // beside the end of this tile")
                self.your_turn()
                t("products_wait<1>();")
            with t.block("else"):
                self.your_turn()
                t("products_wait<0>();")
        else:
            self.your_turn()
            t("products_wait<0>();")
        self.late_done(states)
        if not pipe.chain:
            self.release_fixed()
            t(f"const int coming = {next_work}();")

    def pin_scores(self) -> None:
        for name in self.scores.values():
            self.t(f"pin({name});")

    def pin_sums(self, states: Mapping[int, str]) -> None:
        for carry in self.pipe.carries.values():
            self.t(f"pin({states[carry.phi.id]});")

    def early_done(self, last: str) -> None:
        self.pin_scores()
        self.release_early(last)

    def late_done(self, states: Mapping[int, str]) -> None:
        self.pin_sums(states)
        for name in self.packed_operands.values():
            self.t(f"pin({name});")
        for vid, ring in self.led_rings(self.late_ring):
            if self.s.tiles[vid].loop is not None:
                self.release(vid, ring)
                self.t(f"{ring}.advance();")

    def step(self, states: Mapping[int, str], absorb: str, tile: str, first: str) -> None:
        """One iteration: its early products, the late products of the one before, and its elementwise work."""
        t, pipe, parts = self.t, self.pipe, self.pipe.parts
        if pipe.overlap:
            self.my_turn()
            t(f"{self.issue_early_name}(No{{}});")
            if parts.late:
                self.issue_late(states, 0 if pipe.split else None)
            self.your_turn()
            t(f"products_wait<{int(bool(parts.late))}>();")
            self.early_done(f"{tile} == {first}")
            t(f"{absorb}(at_edge, No{{}});")
        elif parts.early:
            t(f"{self.issue_early_name}(Yes{{}});")
            t("products_wait<0>();")
            self.early_done("")
            t(f"{absorb}(at_edge, No{{}});")
            if parts.late:
                self.issue_late(states)
                t("products_wait<0>();")
                self.late_done(states)
        else:
            self.issue_late(states)
            for _, ring in self.led_rings(self.late_ring):
                t(f"{ring}.advance();")
            t("products_wait<1>();  // those of the iteration before are done")
            with t.block("if (!alone)"):
                self.release_done()
            t("alone = false;")
        t(f"--{tile};")

    def my_turn(self) -> None:
        if self.pipe.turns:
            self.t(f"named_sync(2 + group, {128 * 2});")

    def your_turn(self) -> None:
        if self.pipe.turns:
            last = self.pipe.consumers - 1
            self.t(f"named_arrive(group == {last} ? 2 : 3 + group, {128 * 2});")

    def release_done(self) -> None:
        for vid, ring in self.led_rings(self.done_ring):
            self.release(vid, ring)
            self.t(f"{ring}.advance();")

    def peek(self) -> None:
        """Wait for the tiles of the late products to come.  That is a branch: no elementwise work moves from before it to behind the
        wait for those under way."""
        t = self.t
        for vid, ring in self.led_rings(self.late_ring):
            if self.s.tiles[vid].loop is not None and vid not in self.early_ring:
                ahead = self.names.new(f"{ring}_ahead")
                t(f"auto {ahead} = {ring};")
                t(f"if constexpr (!start) {ahead}.advance();")
                self.wait_full(vid, ahead)

    def absorb(self, states: Mapping[int, str], position: str, parts: Parts) -> None:
        """The elementwise work of an iteration."""
        t, pipe, s = self.t, self.pipe, self.s
        env, self.printed = dict(self.env), set()
        self.reads = readers_of((*parts.score, *parts.weight, *parts.state, *parts.late))
        for c in pipe.loop.carries:
            self.reads.setdefault(c.next.id, set()).add(-1)
        readers = self.readers
        if parts is pipe.frozen:
            self.readers = {}
            for x in (*parts.score, *parts.weight, *parts.state, *parts.late):
                for v in operands(x):
                    self.readers.setdefault(v.id, []).append(id(x))
            for c in pipe.loop.carries:
                self.readers.setdefault(c.next.id, []).append(-c.phi.id)
        t("constexpr bool edge = decltype(at_edge)::value, start = decltype(at_start)::value;")
        t(position)
        self.masked.clear()
        for x in parts.score:
            self.statement(x)
        if pipe.split:
            self.flush()
            with t.block("if constexpr (!start)"):
                self.issue_rest(states)
        for x in parts.weight if pipe.peek else ():
            self.statement(x)
        if pipe.overlap:  # else nothing runs beside it
            self.flush()
        if pipe.peek:
            self.peek()
        if pipe.overlap and parts.late:
            with t.block("if constexpr (!start)"):
                self.pin_scores()
                t("products_wait<0>();")
                self.pin_scores()
                self.late_done(states)
        for x in () if pipe.peek else parts.weight:
            self.statement(x)
        self.flush()
        for product in parts.late:
            plan = s.contracts[product.out.id]
            if plan.left.where == "register":
                v, layout = plan.left.value, plan.left.layout
                assert layout is not None
                source = self.mask_missing(v, layout, set(product.axes), 0.0, self.get(v, layout))
                t(f"round_to<{C_TYPES[plan.dtype]}>({self.packed_operands[v.id]}, {source});")
        if pipe.peek:  # else what the next early products overwrite seems to be written while late ones are under way
            for name in self.scores.values():
                t(f"set_all({name}, 0.0f);")
        if parts.state:
            with t.block("if constexpr (!start)"):
                idle = self.idle(parts)
                if idle:
                    t("bool moves = false;  // else state stays as it is")
                    for factor, neutral in idle:
                        rows = s.home[factor.id]
                        name = self.get(factor, rows)
                        with self.over(rows):
                            t(f"moves |= {name}{self.at(rows)} != {constant(neutral, self.compute)};")
                with t.block("if (warp_any(moves))") if idle else nullcontext():
                    self.move_state(states, parts)
        moves = []
        late = {c.out.id for c in parts.late}
        for carry in pipe.loop.carries:
            if carry.next.id in late:
                continue
            if parts is pipe.frozen and carry.phi.id in pipe.pivots.candidates:
                continue
            home = s.home[carry.phi.id]
            source, var = self.get(carry.next, home), states[carry.phi.id]
            if source != var:
                moves.append((var, source, home, carry))
        self.move(moves)
        self.env, self.readers = env, readers

    def move_state(self, states: Mapping[int, str], parts: Parts) -> None:
        """What products add to, at new pivots."""
        inner = dict(self.env)
        for x in parts.state:
            self.statement(x)
        self.flush()
        moves = []
        for product in parts.late:
            carry = self.pipe.carries[product.out.id]
            assert product.acc is not None
            home = self.s.home[carry.phi.id]
            source = self.get(product.acc, home)
            if source != states[carry.phi.id]:
                moves.append(
                    (states[carry.phi.id], source, home, Carry(carry.init, carry.phi, product.acc, carry.out, carry.kind))
                )
        self.move(moves)
        self.env = inner

    def idle(self, parts: Parts) -> list[tuple[Value, float]]:
        """Factors a row with which state stays as it is: each, and the number that it must be.  Of state that is made of several parts
        only: where it is one product, that looks for itself."""
        made = {x.out.id: x for x in parts.state if isinstance(x, Map)}
        out: dict[tuple[int, float], Value] = {}
        several = False
        for product in parts.late:
            phi = self.pipe.carries[product.out.id].phi
            x = made.get(product.acc.id) if product.acc is not None else None
            if x is None:
                if product.acc != phi:
                    return []
                continue
            terms = x.args if x.fn == "add" else (x.out,)
            several = several or x.fn == "add"
            if phi not in terms and not any(phi in made[v.id].args for v in terms if v.id in made):
                return []
            for v in terms:
                if v == phi:
                    continue
                f = made.get(v.id)
                if f is None or f.fn != "mul" or len(f.args) != 2:
                    return []
                wide = [a for a in f.args if any(a == c.phi for c in self.pipe.carries.values())]
                rest = [a for a in f.args if a not in wide]
                if len(wide) != 1 or len(rest) != 1 or not self.row_only(rest[0]):
                    return []
                neutral = 1.0 if wide[0] == phi else 0.0
                out[rest[0].id, neutral] = rest[0]
        return [(v, n) for (_, n), v in out.items()] if several else []

    def row_only(self, v: Value) -> bool:
        home = self.s.home.get(v.id)
        return home is not None and home.row is not None and home.column is None

    def rounded(self, x: str, how: RoundedSum) -> str:
        """Rows of few elements are met at edges; over many the rounding of their weights averages out."""
        edges = bool(self.loops) and self.loops[-1].edges
        return f"(edge ? {super().rounded(x, how)} : {x})" if edges else x

    def store(self, s: Store) -> None:
        """Whole rows of 16-bit results leave 16 bytes at a time."""
        frame, v, b = self.s.store_frames[id(s)], s.arg, self.p.buffer(s.buffer)
        if not self.wide_store(s, frame):
            return super().store(s)
        assert frame.row is not None
        self.comment(s)
        ctype = C_TYPES[b.dtype]
        rows = Layout(frame.row, None)
        source = self.get(v, frame)
        head = f"store_rows<{ctype}>({source}"
        if self.pipe.hold:
            assert frame.column is not None
            name = self.names.new(f"{self.pointer[s.buffer]}_held")
            self.declare(f"HeldRows<{ctype}, {frame.column.slots}> {name};")
            self.waiting.append((name, math.gcd(frame.column.slots // 8, 4)))
            head = f"{name}.take({source}"
        with self.t.block(f"{head}, [&](int i) INLINE_LAMBDA -> {ctype}*", "});"):
            f = Frame(self, rows)
            exists = list(dict.fromkeys(self.exists(f, {a for ix in s.index for a in ix.axes}, rows)))
            place = f"{self.pointer[s.buffer]} + ({self.offset(f, s.buffer, s.index)})"
            for line in f.definitions(frame.row):
                self.t(line)
            self.t(f"return {' && '.join(exists)} ? {place} : nullptr;" if exists else f"return {place};")

    def wide_store(self, s: Store, frame: Layout) -> bool:
        b, g = self.p.buffer(s.buffer), frame.column
        if frame.row is None or g is None or g.slots % 8 or len(g.axes) != 1 or b.dtype not in HALVES or b.kind == "input":
            return False
        if (
            s.arg.predicate
            or s.arg.id in self.consts
            or s.arg.id in self.inline
            or frame.restricted(self.live(s.arg.axes)) != frame
        ):
            return False
        (a,) = g.axes
        whole = self.tile[a] == g.padded and self.p.axes[a].extent % self.tile[a] == 0 and a not in self.p.limits
        last = dict(s.index[-1].terms) if s.index else {}
        alone = last.get(a) == 1 and not any(a in ix.axes for ix in s.index[:-1])
        inside = s.index[-1].bounds(self.p.extents)[0] >= 0 and s.index[-1].bounds(self.p.extents)[1] < b.shape[-1]
        aligned = not any(c % 8 for x, c in last.items() if x != a) and s.index[-1].const % 8 == 0 and b.shape[-1] % 8 == 0
        return whole and alone and inside and aligned

    def elementwise(self, layout: Layout, members: list[Map | Gather], loads: list[tuple[Layout, Load]]) -> None:
        """Results go where the last operand of their shape was: registers that products write then stay the same ones, and the
        compiler sees that nothing else touches them while products are under way.  So do those of a whole tile of work: it does not
        see that the next one's first product overwrites its sums, and would keep them beside the results."""
        scores = set(self.scores.values()) if self.loops else self.results
        self.in_place = {}
        sources: dict[int, set[int]] = {}  # member → values from elsewhere that it is made of
        for n, m in enumerate(members):
            args = m.args if isinstance(m, Map) else ()
            sources[m.out.id] = set().union(*(sources.get(a.id, {a.id}) for a in args))
            later = {x.out.id for x in members[n + 1 :]}
            if self.reads.get(m.out.id, set()) <= later:
                continue  # stays within the loop over the slots
            for a in sorted(sources[m.out.id]):
                name = self.env.get((a, layout))
                dead = self.reads.get(a, {-1}) <= self.printed - later - self.waiting_for
                if name in scores and dead and name not in self.in_place.values():
                    self.in_place[m.out.id] = name
                    break
        super().elementwise(layout, members, loads)
        self.in_place = {}

    def load(self, s: Load) -> None:
        """What is wanted by element comes from memory: a tile's panels lie as products want them."""
        if s.out.id not in self.s.tiles:
            return super().load(s)
        for layout in self.s.instances.get(s.out.id, ()):
            self.load_registers(s, layout)

    def statement(self, s: Stmt) -> None:
        super().statement(s)  # may print elementwise work that waited, which must not overwrite what s is about to read
        if not isinstance(s, Store | Loop):
            self.printed.add(s.out.id)
        if isinstance(s, Reduce) and self.pipe.pivot != "running" and s.out.id in self.pipe.pivots.nexts:
            self.keep_pivot(s)

    def flush_for(self, s: Stmt) -> None:
        """Of the elementwise statements only those that this one waits for: others may make tiles of operands that must be kept
        anyway, and these would take registers from here on."""
        wanted = {v.id for v in operands(s)}
        now: list[tuple[Layout, Map | Gather]] = []
        for x in reversed(self.pending):
            if x[1].out.id in wanted:
                wanted |= {v.id for v in operands(x[1])}
                now.insert(0, x)
        waiting = [x for x in self.pending if x not in now]
        self.pending, self.waiting_for = now, {x.out.id for _, x in waiting}
        self.flush()
        self.pending, self.waiting_for = waiting, set()

    def keep_pivot(self, s: Reduce) -> None:
        """The pivot stays while no weight would exceed 2⁸."""
        phi = self.pipe.pivots.nexts[s.out.id]
        home = self.s.home[phi.id]
        reach = 8.0 / self.pipe.pivots.scale.get(phi.id, 1.0)
        name, old = self.env[s.out.id, home], self.env[phi.id, home]
        self.t("// it moves only when a weight would exceed 2⁸")
        with self.over(home):
            at = self.at(home)
            within = f"{name}{at} <= {old}{at} + {reach!r}f" if s.op == "max" else f"{name}{at} >= {old}{at} - {reach!r}f"
            self.t(f"if ({within}) {name}{at} = {old}{at};")

    def variable(self, v: Value) -> str:
        return self.in_place.get(v.id) or super().variable(v)

    def sync(self) -> str:
        return f"named_sync(1, {128 * self.pipe.consumers});"
