"""Loops: ranges, rings of tiles, carried state, and the join of states where warps share a loop."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable

from ...terms import REDUCTIONS
from ..tile import Carry, Contract, Load, Loop, Reduce, Stmt, Value, walk
from .contractions import Contractions
from .layout import Layout, Unsupported
from .reductions import OPS
from .registers import LoopState
from .schedule import merge_steps
from .text import constant


class Loops(Contractions):
    @abstractmethod
    def statements(self, body: tuple[Stmt, ...]) -> None: ...

    def loop(self, s: Loop) -> None:
        state = LoopState(s)
        a = s.axis
        name, tile = self.axis_name[a], self.tile[a]
        split = s is self.s.split
        new = self.names.new
        t = self.t
        t(f"// ---- over {name}, {tile} at a time" + (f", shared by {self.sharers()}" if split else ""))
        first, end = new(f"{name}_first"), new(f"{name}_end")
        state.edges, state.full = self.loop_range(s, tile, first, end)
        state.limits = self.loop_limits(a, tile)
        # carried state
        for c in s.carries:
            home = self.s.home[c.phi.id]
            var = self.variable(c.phi)
            kind = "partial " if c.phi.id in self.s.deferred else ""
            t(f"{self.compute} {var}{self.shape(home)};  // {kind}{c.kind} {c.op}")
            t(
                f"{'set_all' if c.init.id in self.consts or home == Layout(None, None) else 'assign'}({var}, {self.initial(c, home)});"
            )
            self.env[c.phi.id, home] = var
        ring = [
            vid
            for vid, plan in self.s.tiles.items()
            if plan.loop == a and any(isinstance(x, Load) and x.out.id == vid for x in s.body)
        ]
        stages = self.s.tiles[ring[0]].stages if ring else 1
        tile_var = new(f"{name}_tile")
        step = str(self.s.warps_split * self.s.cluster) if split else "1"
        begin = f"{first} + warp" if split else first
        if split and self.s.cluster > 1:
            begin = f"{first} + rank * {self.s.warps_split} + warp"
        self.start[a] = self.axis_name[a] if tile == 1 else self.first_of(name)
        position = f"const {self.width[a]} {self.start[a]} = {self.widened(a, tile_var)} * {tile};"
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
                t("#pragma unroll 1")
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
        state.state = {self.env[c.phi.id, self.s.home[c.phi.id]] for c in s.carries}
        state.outside = set(self.env.values()) - state.state
        self.loops.append(state)
        self.open.append(a)
        env = dict(self.env)
        self.masked.clear()
        advance = f"{tile_var} += {step}" if step != "1" else f"++{tile_var}"
        begin_of_body = len(t.out)
        t.depth += 1
        t(position)
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
            t(f"const {self.tile_types[vid]} {var} = {self.tile_of(vid, slot if stages > 1 else None)};")
            state.tiles[vid] = var
        self.statements(s.body)
        self.flush()
        self.advance(s.carries)
        if ring and stages > 1:
            t(f"{slot} ^= 1;" if stages == 2 else f"{slot} = {slot} == {stages - 1} ? 0 : {slot} + 1;")
        t.depth -= 1
        printed = t.out[begin_of_body:]
        del t.out[begin_of_body:]
        edges = state.edges and any(re.search(r"\bedge\b", line) for line in printed)
        if edges and self.peels(s):
            self.peeled(printed, state, tile_var, begin, end, advance)
        else:
            t("#pragma unroll 1")
            with t.block(f"for (int {tile_var} = {begin}; {tile_var} < {end}; {advance})"):
                if edges:
                    t(f"const bool edge = {tile_var} < {state.full[0]} || {tile_var} >= {state.full[1]};")
                t.out.extend(printed)
        self.loops.pop()
        self.open.pop()
        self.masked.clear()
        self.env = {k: v for k, v in self.env.items() if k in env}
        self.landed = before
        if split:
            self.merge(s)
        else:
            self.finish(s)

    def peels(self, s: Loop) -> bool:
        """Is code for the tiles in the middle alone worth it?  It is longer; in blocks of eight warps that was slower."""
        innermost = not any(isinstance(x, Loop) for x in s.body)
        return self.arch.peels and self.s.kind == "fragment" and self.s.warps <= 4 and innermost

    def peeled(self, body: list[str], state: LoopState, tile: str, begin: str, end: str, advance: str) -> None:
        """The loop in two or three: the tiles in the middle, which no mask and no end touches, run without code for either (`edge` is
        a constant wherever the step is inlined)."""
        t, a, step = self.t, state.loop.axis, self.names.new(f"{self.axis_name[state.loop.axis]}_step")
        with t.block(f"auto {step} = [&](const int {tile}, const bool edge) INLINE_LAMBDA", "};"):
            t.out.extend(body)
        t(f"int {tile} = {begin};")
        parts = [(state.full[0], "true"), (state.full[1], "false"), ("", "true")]
        if not any(dict(c.terms).get(a, 0) > 0 for c in (*state.loop.constraints, *state.limits)):
            del parts[0]  # the first tile is in the middle
        for stop, edge in parts:
            inside = f"{tile} < {end} && {tile} < {stop}" if stop else f"{tile} < {end}"
            t("#pragma unroll 1")
            t(f"for (; {inside}; {advance}) {step}({tile}, {edge});")

    def needs_no_barrier(self, s: Loop) -> bool:
        return not any(isinstance(x, Contract) for x in walk(s.body))

    def initial(self, c: Carry, home: Layout) -> str:
        return self.get(c.init, home)

    def advance(self, carries: Iterable[Carry]) -> None:
        """All phis take their new values at once."""
        moves = []
        for c in carries:
            home = self.s.home[c.phi.id]
            source, var = self.get(c.next, home), self.env[c.phi.id, home]
            if source != var:
                moves.append((var, source, home, c))
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
        t, warps, blocks = self.t, self.s.warps_split, self.s.cluster
        width = self.width_bytes
        sync = "cluster_sync();" if blocks > 1 else "block_sync();"
        t(f"// ---- the {self.sharers()} join their states")
        t("copy_wait<0>();")
        for c in s.carries:
            if c.phi.id in self.s.deferred:
                self.loops.append(LoopState(s))  # a warp joins its own lanes only
                self.join_lanes(s, c, self.env[c.phi.id, self.s.home[c.phi.id]], self.s.home[c.phi.id])
                self.loops.pop()
        t("block_sync();")
        place = self.s.join
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
                conditions = list(
                    filter(None, [self.one_lane(home), f"{row} < {rows}" if home.row and home.row.padded > rows else ""])
                )
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
                if blocks > 1:
                    t("#pragma unroll")
                    t(f"for (int b = 0; b < {blocks}; ++b)")
                t("#pragma unroll")
                t(f"for (int w = 0; w < {warps}; ++w)")
                where = f"{at} + ((w * {rows} + {row}) * {pitch} + {column}) * {width}"
                guard = f"if ({inside}) " if inside else ""
                load = f"load_shared_of<{self.compute}>(b, {where})" if blocks > 1 else f"load_shared<{self.compute}>({where})"
                t(f"    {guard}x = {OPS[op]}::of(x, {load});")
                t(f"{name}{self.at(layout)} = x;")

        pivots = [c for c in s.carries if steps[c.phi.id] and steps[c.phi.id][0] != "+"]  # type: ignore[index]
        sums = [c for c in s.carries if c not in pivots]
        places = {c.phi.id: publish(c, self.env[c.phi.id, self.s.home[c.phi.id]]) for c in pivots}
        if pivots:
            t(sync)
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
                if x.out.id not in seen:
                    seen.add(x.out.id)
                    self.pending.append((self.s.home.get(x.out.id) or self.free_layout(x.out), x))
        self.flush()
        for c in sums:
            v = steps[c.phi.id][2]  # type: ignore[index]
            values[c.phi.id] = self.get(v, self.s.home[c.phi.id])
        for c in sums:
            places[c.phi.id] = publish(c, values[c.phi.id])
        if sums:
            t(sync)
        self.env = env
        for c in s.carries:
            out = self.s.home[c.out.id]
            if c in pivots:
                self.env[c.out.id, out] = joined[c.phi.id]
                continue
            name = self.variable(c.out)
            collect(c, places[c.phi.id], "+", out, name)
            self.env[c.out.id, out] = name
        if blocks > 1:
            t("cluster_sync();  // others have read what is here, and are through with it before this block ends")
        for c in s.carries:
            self.convert(c.out)

    def sharers(self) -> str:
        """Who has a share of a shared loop, in words."""
        warps = f"{self.s.warps_split} warps"
        return f"{warps} of each of {self.s.cluster} blocks" if self.s.cluster > 1 else warps

    def free_layout(self, v: Value) -> Layout:
        have = self.s.instances.get(v.id, [])
        if len(have) != 1:
            raise Unsupported(f"{v} is used in a shared loop's merge in {len(have)} layouts")
        return have[0]
