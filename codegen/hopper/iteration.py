"""The elementwise work of an iteration: from scores to the operands of late products and to state at new pivots.

It runs beside products, so what it touches, and when, decides whether they wait: results stay in the registers that products write
anyway, and nothing is printed before it is wanted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace

from ..cuda.kernel import readers_of
from ..cuda.layout import Layout
from ..cuda.schedule import RoundedSum
from ..cuda.text import C_TYPES, Names, constant
from ..tile import Carry, Gather, Load, Loop, Map, Reduce, Stmt, Store, Value, operands
from .parts import Parts
from .pipeline import Pipeline
from .products import Products


def makes(body: Iterable[Stmt]) -> dict[int, set[int]]:
    """Value → the values that these statements make of it; −1: it is stored."""
    out: dict[int, set[int]] = {}
    for s in body:
        for v in operands(s):
            out.setdefault(v.id, set()).add(-1 if isinstance(s, Store | Loop) else s.out.id)
    return out


class Iteration(Products):
    def __init__(self, pipe: Pipeline, names: Names, macros: Mapping[str, str]):
        super().__init__(pipe, names, macros)
        self.printed: set[int] = set()  # values made so far in this iteration
        self.reads: dict[int, set[int]] = {}  # value → values that the iteration makes of it
        self.waiting_for: set[int] = set()  # values that are not printed yet, though later ones are
        self.results: set[str] = set()  # sums of a whole tile of work, which its results may overwrite
        self.in_place: dict[int, str] = {}  # value → the variable that it overwrites

    def absorb(self, position: str, parts: Parts) -> None:
        """The elementwise work of an iteration."""
        t, pipe = self.t, self.pipe
        body = (*parts.score, *parts.weight, *parts.state, *parts.late)
        env, self.printed = dict(self.env), set()
        self.reads = makes(body)
        for c in pipe.loop.carries:
            self.reads.setdefault(c.next.id, set()).add(-1)
        readers = self.readers
        if parts is pipe.frozen:
            self.readers = readers_of(body, pipe.loop.carries)
        t("constexpr bool edge = decltype(at_edge)::value, start = decltype(at_start)::value;")
        t(position)
        self.masked.clear()
        for x in parts.score:
            self.statement(x)
        if pipe.split:
            self.flush()
            with t.block("if constexpr (!start)"):
                self.issue_rest()
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
                self.late_done()
        for x in () if pipe.peek else parts.weight:
            self.statement(x)
        self.flush()
        self.round_operands(parts)
        if pipe.peek:  # else what the next early products overwrite seems to be written while late ones are under way
            for name in self.scores.values():
                t(f"set_all({name}, 0.0f);")
        if parts.state:
            with t.block("if constexpr (!start)"):
                self.rescale_sums(parts)
        still = {c.out.id for c in parts.late}
        fixed = pipe.pivots.candidates if parts is pipe.frozen else {}
        self.advance(c for c in pipe.loop.carries if c.next.id not in still and c.phi.id not in fixed)
        self.env, self.readers = env, readers

    def absorb_alone(self, position: str, parts: Parts) -> None:
        """The elementwise work of an iteration that makes operands of loaded tiles, beside the late products of the one before."""
        t = self.t
        env = dict(self.env)
        t("constexpr bool edge = decltype(at_edge)::value;")
        t(position)
        self.masked.clear()
        self.printed, self.reads = set(), makes((*parts.score, *parts.weight, *parts.late))
        for c in self.pipe.loop.carries:
            self.reads.setdefault(c.next.id, set()).add(-1)
        for x in (*parts.score, *parts.weight):
            self.statement(x)
        self.flush()
        t("products_wait<0>();")
        for name in self.packed_operands.values():
            t(f"pin({name});")
        self.round_operands(parts)
        still = {c.out.id for c in parts.late}
        self.advance(c for c in self.pipe.loop.carries if c.next.id not in still)
        self.env = env

    def round_operands(self, parts: Parts) -> None:
        """What late products read from registers."""
        for product in parts.late:
            plan = self.s.contracts[product.out.id]
            if plan.left.where == "register":
                v, layout = plan.left.value, plan.left.layout
                assert layout is not None
                source = self.mask_missing(v, layout, set(product.axes), 0.0, self.get(v, layout))
                self.t(f"round_to<{C_TYPES[plan.dtype]}>({self.packed_operands[v.id]}, {source});")

    def rescale_sums(self, parts: Parts) -> None:
        """What products add to, at new pivots; left out where no lane's pivots have moved."""
        t = self.t
        idle = self.idle(parts)
        if idle:
            t("bool moves = false;  // else state stays as it is")
            for factor, neutral in idle:
                rows = self.s.home[factor.id]
                name = self.get(factor, rows)
                with self.over(rows):
                    t(f"moves |= {name}{self.at(rows)} != {constant(neutral, self.compute)};")
        with t.block("if (warp_any(moves))") if idle else nullcontext():
            inner = dict(self.env)
            for x in parts.state:
                self.statement(x)
            self.flush()
            self.advance(self.without_products(parts))
            self.env = inner

    def without_products(self, parts: Parts) -> Iterable[Carry]:
        """Carries that late products add to, up to these products."""
        for product in parts.late:
            assert product.acc is not None
            yield replace(self.pipe.carries[product.out.id], next=product.acc)

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

    def variable(self, v: Value) -> str:
        return self.in_place.get(v.id) or super().variable(v)

    def load(self, s: Load) -> None:
        """What is wanted by element comes from memory, for a tile's panels lie as products want them; but of what operands are made
        comes from there, as a product would load it."""
        if s.out.id in self.pipe.sources:
            return self.load_source(s)
        if s.out.id not in self.s.tiles:
            return super().load(s)
        for layout in self.s.instances.get(s.out.id, ()):
            self.load_registers(s, layout)

    def load_source(self, s: Load) -> None:
        vid = s.out.id
        plan, ring, (layout,) = self.s.tiles[vid], self.source_ring[vid], self.s.instances[vid]
        assert layout.row is not None
        self.wait_full(vid, ring)
        name = self.env[vid, layout] = self.variable(s.out)
        self.comment(s)
        self.t(f"float {name}{self.shape(layout)};")
        kind = "RowsByInner" if set(plan.outer) == set(layout.row.axes) else "InnerByRows"
        stage = " + ".join([str(plan.offset), *self.at_stage(plan, ring)])
        tile = self.panels(vid).partition("{")[0] + f"{{(u32)({stage})}}"
        self.t(f"spread({name}, {kind}({tile}, {self.warp_offset(layout.row)}));")
        self.release(vid, ring)
        self.t(f"{ring}.advance();")

    def rounded(self, x: str, how: RoundedSum) -> str:
        """Rows of few elements are met at edges; over many the rounding of their weights averages out."""
        edges = bool(self.loops) and self.loops[-1].edges
        return f"(edge ? {super().rounded(x, how)} : {x})" if edges else x

    def sync(self) -> str:
        return f"named_sync(1, {128 * self.pipe.consumers});"
