"""The warp that copies: one lane of it takes one work after the other, says which it is, and fills the rings with its tiles.

With frozen pivots the works where something did not fit come once more behind the last one, to be computed with running pivots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ...terms import Affine
from ..cuda.text import Names, affine
from .pipeline import MOST_FAILED, WORK_SLOTS, Pipeline
from .rings import Rings

MANY = 40  # registers of a producer: with fewer it has none for several iterations at a time, nor any need of them


class Producer(Rings):
    def __init__(self, pipe: Pipeline, names: Names, macros: Mapping[str, str]):
        super().__init__(pipe, names, macros)
        self.map_names: dict[int, str] = {}  # tile → the parameter that is its tensor map
        self.counter = ""  # the parameter that counts works in memory, for the order "dynamic"

    def produce(self) -> None:
        t, pipe = self.t, self.pipe
        total = pipe.works
        rings = self.rings(self.s.tiles)
        t(f"Ring<{WORK_SLOTS}> works;")
        t(f"int work = {self.first_work()};")
        if pipe.frozen:
            t("int again = -1, failures = 0;  // the next of the tiles that failed, of how many")
        with t.block("for (;;)"):
            t(f"barrier_wait({pipe.work_empty} + 8 * works.slot(), works.parity() ^ 1);")
            if pipe.frozen:
                self.produce_again(total)
            with t.block("if (work < 0)" if pipe.frozen else f"if (work >= {total})"):
                self.announce("-1")
                if self.arch.overlap and not self.followed:
                    t("next_kernel_may_start();")
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
            # asked late, so that who is done first has the next; the last copies hide the trip to memory
            self.copy_work(rings, first, end, f"next = {following};" if pipe.dynamic else "")
            t(f"work = {'next' if pipe.dynamic else following};")

    def copy_work(self, rings: Mapping[int, str], first: str, end: str, late: str) -> None:
        """All copies of one work; tiles of early products come one iteration ahead of the others.  late: what goes beside the last."""
        t, pipe = self.t, self.pipe
        fixed = [v for v, x in self.s.tiles.items() if x.loop is None]
        self.copies(fixed, rings)
        early = self.tiles_of(pipe.parts.early)
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
            if late:
                t(f"if ({tile} == {first}) {late}")
            if rest:
                copies(rest, tile)

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

    def first_work(self) -> str:
        """The number of the work that this block begins with."""
        pipe, n = self.pipe, self.arch.multiprocessors
        block = f"(int)block_index(){f' / {pipe.cluster}' if pipe.cluster > 1 else ''}"
        if pipe.order == "folded" and pipe.workers == pipe.works:  # blocks n apart share a multiprocessor, most likely
            return f"(int)block_index() < {n} ? (int)block_index() : {n + pipe.works - 1} - (int)block_index()"
        return block

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
        into = " + ".join([str(plan.offset + part * size), *self.at_stage(plan, ring)])
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
