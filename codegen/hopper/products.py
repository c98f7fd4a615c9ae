"""Products of tiles as text: when they are issued, what they wait for, and when the tiles that they read go back.

*Early* products make an iteration's scores; *late* ones add to state.  While products are under way nothing may touch the registers
that they write or read: pins say so to the compiler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..cuda.schedule import Operand
from ..cuda.text import C_TYPES, Names
from ..tile import Carry, Contract
from .pipeline import Pipeline
from .rings import Rings


class Products(Rings):
    def __init__(self, pipe: Pipeline, names: Names, macros: Mapping[str, str]):
        super().__init__(pipe, names, macros)
        self.shapes: set[tuple[str, int, bool]] = set()  # of wgmma: dtype, columns, left operand in registers
        self.scores: dict[int, str] = {}  # early product → the variable that it writes
        self.states: dict[int, str] = {}  # phi of a carry → the variable that holds it
        self.packed_operands: dict[int, str] = {}  # register operands of late products, rounded
        self.early_ring: dict[int, str] = {}  # tile → cursor over its stages, for the products that read it
        self.late_ring: dict[int, str] = {}
        self.source_ring: dict[int, str] = {}  # of what left operands are made
        self.done_ring: dict[int, str] = {}  # where late products end one iteration later
        self.issue_early_name = ""

    def shift(self, vid: int, ring: str, turned: bool, left: bool) -> str:
        """Bytes from there to where this warpgroup's operand begins."""
        plan, pipe = self.s.tiles[vid], self.pipe
        parts = self.at_stage(plan, ring)
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

    def issue_late(self, part: int | None = None) -> None:
        """part: the first of two."""
        t, pipe = self.t, self.pipe
        for vid, ring in self.led_rings(self.late_ring):
            if vid not in self.early_ring and not (pipe.peek and self.s.tiles[vid].loop):
                self.wait_full(vid, ring)
        if pipe.parts.early:  # else others are under way, adding to the same registers
            self.pin_sums()
        for name in self.packed_operands.values():
            t(f"pin({name});")
        t("products_fence();")
        for product in pipe.parts.late:
            carry = pipe.carries[product.out.id]
            add = "!fresh" if self.overwritten(carry) else "true"
            self.multiply(product, self.states[carry.phi.id], add, self.late_ring, part)
        t("products_commit();")
        if any(map(self.overwritten, pipe.loop.carries)):
            t("fresh = false;")

    def issue_rest(self) -> None:
        """The second part of the late products, once the elementwise work before it is done.  Nothing may touch their registers here."""
        self.pin_scores()
        self.t("products_fence();")
        for product in self.pipe.parts.late:
            self.multiply(product, self.states[self.pipe.carries[product.out.id].phi.id], "true", self.late_ring, 1)
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

    def my_turn(self) -> None:
        if self.pipe.turns:
            self.t(f"named_sync(2 + group, {128 * 2});")

    def your_turn(self) -> None:
        if self.pipe.turns:
            last = self.pipe.consumers - 1
            self.t(f"named_arrive(group == {last} ? 2 : 3 + group, {128 * 2});")

    def overwritten(self, c: Carry) -> bool:
        """Does a product write the state first, so that it needs no initial value?"""
        return self.consts.get(c.init.id) == 0.0 and any(x is c for x in self.pipe.carries.values())

    def pin_scores(self) -> None:
        for name in self.scores.values():
            self.t(f"pin({name});")

    def pin_sums(self) -> None:
        for carry in self.pipe.carries.values():
            self.t(f"pin({self.states[carry.phi.id]});")

    def early_done(self, last: str) -> None:
        self.pin_scores()
        self.release_early(last)

    def late_done(self) -> None:
        self.pin_sums()
        for name in self.packed_operands.values():
            self.t(f"pin({name});")
        for vid, ring in self.led_rings(self.late_ring):
            if self.s.tiles[vid].loop is not None:
                self.release(vid, ring)
                self.t(f"{ring}.advance();")
