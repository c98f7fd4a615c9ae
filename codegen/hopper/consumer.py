"""The warpgroups that multiply and do everything else: the walk over works, and the loop over one work's tiles.

The loop is walked from its end, so that tiles cut by a mask come first; an iteration's early products and the late ones of the
iteration before are issued together, and its elementwise work runs beside them.  Where there are no late products, elementwise
work of one warpgroup runs beside the early products of another."""

from __future__ import annotations

from collections.abc import Mapping

from ..cuda.layout import Layout
from ..cuda.registers import LoopState
from ..cuda.text import Names
from .iteration import Iteration, makes
from .parts import Parts
from .pipeline import WORK_SLOTS, Pipeline
from .results import Results


class Consumer(Iteration, Results):
    def __init__(self, pipe: Pipeline, names: Names, macros: Mapping[str, str]):
        super().__init__(pipe, names, macros)
        self.next_work = ""  # name of the function that waits for the next work

    def consume(self) -> None:
        t, pipe = self.t, self.pipe
        t("const int warp = warp_index() - 4, lane = lane_index();")
        t("const int group = warp / 4;  // of the warpgroups that compute")
        self.warp_row, self.warp_column = "warp", "0"
        mark = len(t.out)
        depth = t.depth
        t(f"Ring<{WORK_SLOTS}> works;")
        self.declare_rings()
        self.declare_registers()
        self.declare_next_work()
        self.issue_early_name = self.names.new("issue_early") if pipe.parts.early else ""
        if pipe.parts.early:
            with t.block(f"auto {self.issue_early_name} = [&](auto at_start) INLINE_LAMBDA", "};"):
                self.issue_early()
        if pipe.turns:
            t(f"if (group == {pipe.consumers - 1}) named_arrive(2, {128 * 2});  // the first one begins")
        if pipe.frozen:
            with t.block("for (;;)"):
                self.consume_tiles()
                t("if (work == -1) break;")
                t(f"barrier_arrive_if(lane == 0, {pipe.drained});")
                t(f"barrier_wait({pipe.drained}, 0);")
                t(f"if (load_shared<u32>({pipe.failed}) == 0) break;")
        else:
            self.consume_tiles()
        lines = [line.replace("    ", "    " * depth, 1) if line.startswith("    ") else line for line in self.declared]
        t.out[mark:mark] = lines

    def declare_rings(self) -> None:
        tiles, parts = self.s.tiles, self.pipe.parts
        early_tiles, late_tiles = self.tiles_of(parts.early), self.tiles_of(parts.late)
        self.early_ring = self.rings(v for v in tiles if v in early_tiles)
        self.late_ring = self.rings(v for v in tiles if v in late_tiles and v not in early_tiles)
        self.late_ring |= self.rings((v for v in tiles if v in late_tiles and v in early_tiles), "_late")
        self.source_ring = self.rings(self.pipe.sources)
        running = [v for v in tiles if v in late_tiles and tiles[v].loop is not None]
        self.done_ring = {} if parts.early else self.rings(running, "_done")

    def declare_registers(self) -> None:
        """Those that products write or read: alive across iterations."""
        t, s, parts = self.t, self.s, self.pipe.parts
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
        for c in self.pipe.loop.carries:
            home = s.home[c.phi.id]
            var = self.states[c.phi.id] = self.variable(c.phi)
            kind = "partial " if c.phi.id in s.deferred else ""
            t(f"{self.compute} {var}{self.shape(home)};  // {kind}{c.kind} {c.op}")

    def declare_next_work(self) -> None:
        t, pipe = self.t, self.pipe
        self.next_work = self.names.new("next_work")
        with t.block(f"auto {self.next_work} = [&]() INLINE_LAMBDA", "};"):
            t(f"barrier_wait({pipe.work_full} + 8 * works.slot(), works.parity());")
            # the lane that says that it has been read is the one that reads it
            t(f"const int x = of_first_lane(lane == 0 ? load_shared<int>({pipe.work} + 4 * works.slot()) : 0);")
            t(f"barrier_arrive_if(lane == 0, {pipe.work_empty} + 8 * works.slot());")
            t("works.advance();")
            t("return x;")

    def consume_tiles(self) -> None:
        t, pipe = self.t, self.pipe
        t(f"int work = {self.next_work}();")
        if pipe.overlap:
            with t.block("if (work >= 0)"):
                t(f"{self.issue_early_name}(Yes{{}});")
                t("products_wait<0>();")
        with t.block("while (work >= 0)"):
            for ring in dict.fromkeys(
                x for rings in (self.early_ring, self.late_ring, self.source_ring, self.done_ring) for x in rings.values()
            ):
                t(f"{ring}.settle();")
            self.positions("work / 2" if pipe.frozen else "work")
            if pipe.frozen:
                t("const bool exact = work & 1;  // not with frozen pivots")
            before = dict(self.env)
            n = self.p.body.index(pipe.loop)
            self.statements(self.p.body[:n])
            self.flush()
            self.main_loop()
            if pipe.frozen:
                self.check()
            self.printed, self.reads = set(), makes(self.p.body[n + 1 :])
            self.results = {self.states[c.phi.id] for c in pipe.loop.carries if self.overwritten(c)}
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
            self.store_held()

    def check(self) -> None:
        """Did frozen pivots leave everything in range?  Sums above 10³⁷ have no reciprocal.  Nothing else is lost on the way: a weight
        that a product's operand has no room for is infinite there, and then so is every sum that it is part of, or NaN.  Nor is a
        weight too small beside others, for no pivot is above the maximum, unless there was none yet when it was frozen."""
        t, pipe = self.t, self.pipe
        with t.block("if (!exact)"):
            t("bool fits = true;")
            for c in pipe.loop.carries:
                most = "INFINITE" if c.phi.id in pipe.pivots.candidates else "1e37f"
                t(f"fits &= all_below({self.states[c.phi.id]}, {most});")
            t(f"if (warp_any(!fits) && lane == 0) note_failed({pipe.failed}, work / 2);")

    def main_loop(self) -> None:
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
            var = self.states[c.phi.id]
            self.env[c.phi.id, home] = var
            if self.overwritten(c):
                continue
            kind = "set_all" if c.init.id in self.consts or home == Layout(None, None) else "assign"
            t(f"{kind}({var}, {self.initial(c, home)});")
        state.state = set(self.states.values())
        state.outside = set(self.env.values()) - state.state
        if any(map(self.overwritten, loop.carries)):
            t("bool fresh = true;  // the first product overwrites what it adds to")
        if not parts.early:
            t("bool alone = true;  // no products are under way")
            self.pin_sums()
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
                    self.absorb(position, which)
            with t.block(f"auto {step} = [&](auto at_edge) INLINE_LAMBDA", "};"):
                self.step(absorb, tile, first, position)
            return absorb, step

        absorb, step = steps("", parts)
        frozen = steps("_frozen", pipe.frozen)[1] if pipe.frozen else ""
        if pipe.overlap:
            self.early_done(f"{tile} == {first}")
            t(f"{absorb}({'Yes' if state.edges else 'No'}{{}}, Yes{{}});")
            t(f"--{tile};")
        elif frozen:
            t(f"{step}({'Yes' if state.edges else 'No'}{{}});  // where pivots stay is up to the first tile")
        self.before_loop = len(t.out)
        self.one_step = f"if ({tile} >= {first}) {step}({'Yes' if state.edges else 'No'}{{}});"  # it may be at an edge
        low = any(dict(c.terms).get(a, 0) > 0 for c in (*loop.constraints, *state.limits))
        until = f"at_least({state.full[0]}, {first})" if low else first
        if state.edges:
            t(f"while ({tile} >= at_least({state.full[1]}, {first})) {step}(Yes{{}});")
        if frozen:
            t(f"if (!exact) while ({tile} >= {until}) {frozen}(No{{}});")
        t(f"while ({tile} >= {until}) {step}(No{{}});")
        if low:
            t(f"while ({tile} >= {first}) {step}(Yes{{}});")
        self.last_products()
        self.loops.pop()
        self.open.pop()
        self.masked.clear()
        self.env = outer_env
        self.finish(loop)

    def step(self, absorb: str, tile: str, first: str, position: str) -> None:
        """One iteration: its early products, the late products of the one before, and its elementwise work."""
        t, pipe, parts = self.t, self.pipe, self.pipe.parts
        if pipe.overlap:
            self.my_turn()
            t(f"{self.issue_early_name}(No{{}});")
            if parts.late:
                self.issue_late(0 if pipe.split else None)
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
                self.issue_late()
                t("products_wait<0>();")
                self.late_done()
        elif pipe.sources:
            self.absorb_alone(position, parts)
            with t.block("if (!alone)"):
                self.release_done()
            t("alone = false;")
            self.issue_late()
            for _, ring in self.led_rings(self.late_ring):
                t(f"{ring}.advance();")
        else:
            self.issue_late()
            for _, ring in self.led_rings(self.late_ring):
                t(f"{ring}.advance();")
            t("products_wait<1>();  // those of the iteration before are done")
            with t.block("if (!alone)"):
                self.release_done()
            t("alone = false;")
        t(f"--{tile};")

    def last_products(self) -> None:
        """The last iteration's late products, beside the first early ones of the next tile."""
        t, pipe = self.t, self.pipe
        if not pipe.overlap:
            # The wait comes first, and results are read behind the loop in next_work: the assembler has been seen to move such reads up
            # to where products_wait<1> had waited for an earlier product with the same sums, but not past a loop.
            t("products_wait<0>();")
            if not pipe.parts.early:
                self.release_done()
                self.pin_sums()
            self.release_fixed()
            t(f"const int coming = {self.next_work}();")
            return
        for _, ring in self.fixed_early():
            t(f"{ring}.advance();")
        if not pipe.parts.late:
            if not pipe.chain:
                self.release_fixed()
            t(f"const int coming = {self.next_work}();")
            if pipe.chain:
                with t.block("if (coming >= 0)"):
                    self.my_turn()
                    t(f"{self.issue_early_name}(Yes{{}});  // beside the end of this tile")
                    self.your_turn()
            return
        self.my_turn()
        self.issue_late()
        if pipe.chain:
            t(f"const int coming = {self.next_work}();")
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
        self.late_done()
        if not pipe.chain:
            self.release_fixed()
            t(f"const int coming = {self.next_work}();")
