"""From a tile program to a schedule for warpgroups; raises `Unsupported` where it has no such form.

The program is one loop between statements that work on whole rows."""

from __future__ import annotations

import math
from dataclasses import replace

from ..cuda.arch import Arch
from ..cuda.layout import Layout, TooLarge, Unsupported
from ..cuda.planner import Planner
from ..cuda.schedule import HALVES, ContractPlan, Precision, TilePlan
from ..cuda.simplify import behind_loops, fold_exponentials
from ..tile import Contract, Load, Loop, Reduce, Store, TileProgram, Value, walk
from .maps import Box, box_of
from .orders import best_order, traversal_of
from .parts import Parts, partition
from .pipeline import MOST_CONSUMERS, MOST_FAILED, REGISTERS, RESERVED, ROWS, SHARING, WORK_SLOTS, Pipeline, stage_bytes
from .pivots import Pivots

# of a consumer's registers for results of products and their operands: of two iterations at a time where these make one result early, or
# several (elementwise work then has more of its own at a time); of one iteration at a time
ROOM = {1: (192, 168, 196), 2: (192, 168, 196), 3: (128, 104, 112)}
BESIDE = 36  # what a thread has beside those: addresses, barriers, state of rows


def plan(p: TileProgram, arch: Arch, precision: Precision) -> Pipeline:
    if precision.accurate or precision.compute != "float32":
        raise Unsupported("wgmma computes with 16-bit operands only")
    return WarpgroupPlanner(behind_loops(fold_exponentials(p)), arch, precision).pipeline()


class WarpgroupPlanner(Planner):
    def pipeline(self) -> Pipeline:
        self.loop = self.only_loop()
        self.choose_matrices()
        self.choose_warps()
        self.run()
        return self.out_pipeline

    def only_loop(self) -> Loop:
        loops = [s for s in walk(self.p.body) if isinstance(s, Loop)]
        if len(loops) != 1 or any(isinstance(s, Store) for s in loops[0].body):
            raise Unsupported("a pipeline of warpgroups is one loop that stores nothing")
        return loops[0]

    # ---- warps: each has 16 rows of the block's, and all columns
    def choose_warps(self) -> None:
        if not self.matrices:
            raise Unsupported("nothing to multiply")
        self.kind = "fragment"
        self.split = None
        self.wc = self.ws = 1
        rows = set()
        for s in self.matrices.values():
            m = self.matrix(s)
            assert m is not None
            if self.chained(s) is not None:
                rows.add(self.size(m[1] if self.chained(s) is s.b else m[0]))
        if not rows:
            rows = {self.extent_pair()[0]}
        n = rows.pop()
        if rows or n % ROWS or not 1 <= n // ROWS <= MOST_CONSUMERS:
            wrong = Unsupported if rows or n < ROWS * MOST_CONSUMERS else TooLarge
            raise wrong(f"{n} rows do not make up to {MOST_CONSUMERS} warpgroups of {ROWS}")
        self.consumers = n // ROWS
        self.wr = 4 * self.consumers
        # two blocks of one warpgroup each have registers for what one has, but half the shared memory
        self.together = 2 if self.consumers == 1 and self.p.choices.get("together") == 2 else 1
        self.room = min(self.arch.shared, self.arch.shared_sm // self.together - RESERVED)

    def columns_wanted(self) -> set[str]:
        """Where no product's operand is computed, those along which results of products are reduced: a warp then has whole rows."""
        if not any(self.left_fixed(s) for s in self.matrices.values()):
            results = {a for s in self.matrices.values() for a in self.axes(s.out)}
            reduced = {a for s in walk(self.p.body) if isinstance(s, Reduce) and not self.free(s.arg) for a in self.live(s.axes)}
            if reduced & results:
                return reduced & results
        return super().columns_wanted()

    def match_sums(self) -> None:
        super().match_sums()
        if self.p.choices.get("sums", "registers") != "matrix":
            self.out.sums = {n: replace(s, by_matrix=False) for n, s in self.out.sums.items()}

    # ---- left operands that are made of loaded tiles alone
    def default(self, key: tuple, axes: tuple[str, ...], v: Value, columns: set[str]) -> None:
        """What is made of the same tiles as such an operand is reduced as that lies."""
        for s in self.matrices.values():
            m = self.matrix(s)
            left = s.a if self.left[s.out.id] == "a" else s.b
            if m and key[0] == "reduce" and self.free(left) and self.free(v) and set(axes) == set(self.axes(left)):
                if set(self.made_of(left)) & set(self.made_of(v)):
                    columns = set(m[2])
        super().default(key, axes, v, columns)

    def place(self) -> None:
        self.sources: dict[int, Layout] = {}  # tiles that are read by element, in the layout of the operand made of them
        super().place()
        tiles = self.out.tiles
        self.out.tiles = {v: tiles[v] for v in (*self.sources, *(v for v in tiles if v not in self.sources))}

    def place_contract(self, s: Contract, after: bool) -> None:
        super().place_contract(s, after)
        c = self.out.contracts[s.out.id]
        if c.left.where != "register" or not self.free(c.left.value) or c.left.layout is None:
            return
        row, column = c.left.layout
        inside = {x.out.id for x in self.loop.body if isinstance(x, Load)}
        assert row is not None and column is not None
        for v in self.made_of(c.left.value):
            if v.id in inside and set(self.axes(v)) == {*c.left_axes, *c.inner}:
                self.want_tile(v, row.axes, row.padded, c.inner, column.padded)
                self.sources[v.id] = c.left.layout

    def made_of(self, v: Value) -> list[Value]:
        """Loaded values that an elementwise one is made of."""
        return [s.out for s in self.loads_below(v)]

    def check_source(self, v: int) -> None:
        """Is what is loaded in 16 bits wanted by element, as the operand lies, and no otherwise?"""
        layout = self.sources[v]
        if any(v in c.tiles for c in self.out.contracts.values()) or self.out.instances.get(v) != [layout]:
            raise Unsupported(f"{self.out.tiles[v].load.out} is read by products and by element in a loop, or in two layouts")
        if layout.column is None or layout.column.padded % 16:
            raise Unsupported("a summed axis that ends inside a matrix instruction")

    # ---- shared memory and barriers
    def allocate(self) -> None:
        o = self.out
        self.loop = self.only_loop()
        within = {x.out.id for x in self.loop.body if isinstance(x, Contract)}
        if not within.issuperset(o.contracts):
            raise Unsupported("a product outside the loop")
        for n, c in o.contracts.items():
            self.check_contract(n, c)
        parts = partition(self.loop, self.loop.body, set(o.tiles) - set(self.sources))
        boxes = self.take_boxes()
        at = 0
        fixed = sum(t.bytes for t in o.tiles.values() if t.loop is None)
        ring = sum(t.bytes for t in o.tiles.values() if t.loop is not None)
        trips = self.p.axes[self.loop.axis].trips
        stages = self.stages(fixed, ring)
        overlap = bool(self.p.choices.get("overlap", True)) and bool(parts.early) and trips > 1
        overlap = overlap and self.count_registers(True) <= ROOM[self.consumers][len(parts.early) > 1] + BESIDE
        if not parts.early and (parts.state or ((parts.score or parts.weight) and not self.sources)):
            raise Unsupported("elementwise work between products of loaded tiles")
        if any(o.contracts[s.out.id].left.where != "tile" for s in parts.early):
            raise Unsupported("an early product of what is computed before the loop")
        if parts.early and self.sources:
            raise Unsupported("products whose operands are made of loaded tiles alone, beside others")
        if (overlap or not parts.early) and stages < 2:
            raise TooLarge(f"{fixed + 2 * ring} bytes of shared memory for two stages")
        if fixed + ring * stages > self.room - 2048:
            raise TooLarge(f"{fixed + ring * stages} bytes of shared memory")
        tiles = math.prod(self.p.axes[a].trips for a in self.p.grid)
        several = tiles > self.arch.multiprocessors * self.together or self.p.choices.get("cluster", 1) != 1
        ahead = several and bool(self.p.choices.get("ahead", True)) and 2 * fixed + ring * stages <= self.room - 4096
        for t in sorted(o.tiles.values(), key=lambda t: t.loop is not None):
            t.stages = stages if t.loop is not None else 2 if ahead else 1
            t.offset = at
            at += stage_bytes(t) * t.stages
        o.scratch = at
        o.scratch_bytes = self.scratch_bytes()
        at += -(-o.scratch_bytes // 16) * 16
        late = [o.contracts[s.out.id] for s in parts.late]
        early_only = {v for s in parts.early for v in o.contracts[s.out.id].tiles}
        early_only -= {x.value.id for c in late for x in (c.left, c.right)}
        fixed_early = all(v in early_only and not o.instances.get(v) for v, t in o.tiles.items() if t.loop is None)
        traversal = traversal_of(self.p, self.loop, self.arch.multiprocessors)
        order = best_order(self.p, self.loop, traversal, tiles, stages, self.arch.multiprocessors, self.together)
        at = -(-at // 16) * 16
        carries = {s.out.id: next(c for c in self.loop.carries if c.next == s.out) for s in parts.late}
        limit = (SHARING if self.together > 1 else REGISTERS[self.consumers])[1]
        pipe = Pipeline(
            o,
            self.loop,
            parts,
            carries,
            boxes,
            self.consumers,
            overlap,
            bool(self.p.choices.get("chain", True)) and overlap and fixed_early and order != "grid",
            order,
            tiles,
            tiles,
            *self.pivot_choice(order != "grid" and bool(parts.early) and (overlap or self.count_registers(False) <= limit - 24)),
            traversal,
        )
        if pipe.pivot == "frozen":
            assert pipe.pivots.frozen is not None
            pipe.frozen = partition(self.loop, pipe.pivots.frozen, o.tiles)
            at = -(-at // 16) * 16
            pipe.drained, pipe.failed = at, at + 8
            at += 16 + 4 * MOST_FAILED
        pipe.sources, pipe.together = tuple(self.sources), self.together
        pipe.parted = self.parted()
        for vid, a in pipe.parted.items():
            whole = boxes[vid]
            part = tuple(n // self.consumers if a in ix.axes else n for n, ix in zip(whole.box, whole.coordinates))
            boxes[vid] = replace(whole, box=part)
        pipe.turns = bool(self.p.choices.get("turns", True)) and overlap and self.consumers > 1
        pipe.peek = bool(self.p.choices.get("peek", False)) and overlap and bool(parts.late)
        if pipe.peek and all(c.left.where == "register" and c.steps > 1 for c in late):
            first = self.p.choices.get("split", 0)
            pipe.split = max(0, first) if isinstance(first, int) else 0
        if order != "grid":
            if pipe.pivot != "frozen" and self.together == 1:  # a tile that is computed again would be so in one block only
                self.join_blocks(pipe)
            self.share_out(pipe)
        pipe.leader = self.leaders(parts, set(pipe.parted))
        at = self.place_barriers(pipe, at)
        pipe.shared = o.shared = at
        o.registers = self.count_registers(overlap)
        if o.registers > ROOM[self.consumers][2 if parts.early and not overlap else len(parts.early) > 1] + BESIDE:
            raise TooLarge(f"about {o.registers} registers of a thread, of {limit}")
        held = 0 if parts.early or pipe.workers == pipe.works else self.held_results()
        pipe.hold = bool(self.p.choices.get("hold", True)) and 0 < held <= limit - 8 - o.registers
        o.registers += held if pipe.hold else 0
        o.min_blocks = self.together
        self.out_pipeline = pipe

    def take_boxes(self) -> dict[int, Box]:
        """How each tile is copied; its place in shared memory grows to whole panels."""
        o, boxes = self.out, {}
        inside = {x.out.id for x in self.loop.body if isinstance(x, Load)}
        used = {v for c in o.contracts.values() for v in c.tiles}
        for vid, t in o.tiles.items():
            if vid in self.sources:
                self.check_source(vid)
            elif vid not in used:
                raise Unsupported("a tile that no product reads")
            t.loop = self.loop.axis if vid in inside else None
            if t.loop and o.instances.get(vid) and vid not in self.sources:
                raise Unsupported(f"{t.load.out} is read by products and by element in a loop")
            boxes[vid] = box = box_of(self.p, t, self.tile)
            t.rows = -(-t.rows // 8) * 8
            t.columns = -(-t.columns // 16) * 16
            t.bytes = box.panels * t.rows * 128
            t.packed = True
        return boxes

    def stages(self, fixed: int, ring: int) -> int:
        """Of the loop's tiles.  fixed, ring: bytes of the tiles outside the loop and of those in it."""
        room = self.room - 2048 - fixed
        want = self.p.choices.get("stages")
        stages = want if isinstance(want, int) else 4
        stages = max(1, min(stages, room // ring if ring else 1, 8))
        if ring and fixed and not isinstance(want, int):  # a third is worth more than a second set of what lies outside the loop
            stages = max(min(stages, 3), min(stages, (room - fixed) // ring))
        return stages

    def place_barriers(self, pipe: Pipeline, at: int) -> int:
        """From byte `at` on.  Returns where they end."""
        for vid, t in self.out.tiles.items():
            if pipe.leader[vid] != vid:
                continue
            n = t.stages * (self.consumers if vid in pipe.parted else 1)
            pipe.full[vid], pipe.empty[vid] = at, at + 8 * n
            at += 16 * n
        pipe.work, pipe.work_full, pipe.work_empty = at, at + 8 * WORK_SLOTS, at + 16 * WORK_SLOTS
        return at + 24 * WORK_SLOTS

    def held_results(self) -> int:
        """Registers of a thread for rounded results that wait to be stored in whole rows."""
        stores = [(self.out.store_frames[id(s)], self.p.buffer(s.buffer)) for s in self.p.body if isinstance(s, Store)]
        return sum(f.slots // 2 + 4 for f, b in stores if b.dtype in HALVES and f.row and f.column and f.column.slots % 8 == 0)

    def count_registers(self, overlap: bool = True) -> int:
        """Results of products, and left operands, rounded (which with no overlap take the place of early results); elementwise work
        goes through them piece by piece."""
        late = {c.out.id for c in self.loop.body if isinstance(c, Contract) and c.acc is not None}
        sums = sum(self.out.home[v].slots for v in self.out.contracts if v in late)
        scores = sum(self.out.home[v].slots for v in self.out.contracts if v not in late)
        rounded = {c.left.value.id: c.left.layout for c in self.out.contracts.values() if c.left.where == "register"}
        operands = sum(x.slots // 2 for x in rounded.values() if x is not None)
        operands += sum(x.slots * (1 + n) for n, x in enumerate(self.sources.values()))
        return sums + (scores + operands if overlap else max(scores, operands)) + BESIDE

    def pivot_choice(self, may_freeze: bool) -> tuple[Pivots, str]:
        """What the program asks for, as far as its results allow it."""
        pivots = Pivots(self.p, self.loop)
        want = str(self.p.choices.get("pivot", "frozen"))
        if not pivots.free:
            return pivots, "running"
        may_freeze = may_freeze and pivots.frozen is not None and not pivots.rising
        if want == "frozen" and not may_freeze:
            want = "lazy"
        # a weight of 2⁸ has room in float16, what it multiplies may then have none (frozen pivots are checked)
        small = want == "lazy" and pivots.mixed and any(c.dtype == "float16" for c in self.out.contracts.values())
        return pivots, "running" if small else want

    def leaders(self, parts: Parts, apart: set[int]) -> dict[int, int]:
        """Tiles that come and go together share barriers: those of one loop that the same kinds of products read."""

        def readers(vid: int, products: list[Contract]) -> bool:
            every = [self.out.contracts[s.out.id] for s in products]
            return any(vid in (c.left.value.id, c.right.value.id) for c in every)

        first: dict[object, int] = {}
        out: dict[int, int] = {}
        for vid, t in self.out.tiles.items():
            alone = vid in apart or vid in self.sources
            key: object = (t.loop, readers(vid, parts.early), readers(vid, parts.late)) if not alone else vid
            out[vid] = first.setdefault(key, vid)
        return out

    def parted(self) -> dict[int, str]:
        """Left operands from outside the loop that each warpgroup can have its own rows of: it need not wait for the others' then."""
        out: dict[int, str] = {}
        if self.consumers == 1:
            return out
        for vid, t in self.out.tiles.items():
            uses = [c for c in self.out.contracts.values() if vid in (c.left.value.id, c.right.value.id)]
            left = all(c.left.value.id == vid != c.right.value.id and set(t.outer) == set(c.left_axes) for c in uses)
            first = next((a for a in t.outer if self.tile[a] > 1), None)
            if t.loop is None and left and first is not None and self.tile[first] % self.consumers == 0:
                if self.size(t.outer) == ROWS * self.consumers and not self.out.instances.get(vid):
                    out[vid] = first
        return out

    def join_blocks(self, pipe: Pipeline) -> None:
        """Blocks of a cluster share what the loop reads for all of them: along the axis where that is most."""
        n = self.p.choices.get("cluster", 1)
        if not isinstance(n, int) or n < 2 or not self.arch.clusters_of(n):
            return
        ways: list[tuple[int, str, dict[int, str]]] = []
        for a in self.p.grid:
            bounds = [c for c in self.loop.constraints if a in dict(c.terms)]  # then their loops would differ
            if self.p.axes[a].trips % n or bounds:
                continue
            found = {v: by for v, t in self.out.tiles.items() if (by := self.divided(v, t, pipe, a, n)) is not None}
            ways.append((sum(self.out.tiles[v].bytes for v in found), a, found))
        saved, along, spread = max(ways, key=lambda w: w[0], default=(0, "", {}))
        if not saved:
            return
        pipe.cluster, pipe.along, pipe.spread = n, along, spread
        for vid, by in spread.items():
            whole = pipe.boxes[vid]
            part = tuple(m // n if by and by in ix.axes else m for m, ix in zip(whole.box, whole.coordinates))
            pipe.boxes[vid] = replace(whole, box=part)

    def share_out(self, pipe: Pipeline) -> None:
        """As many blocks as run at the same time, and in which order they take tiles."""
        pipe.blocks = min(pipe.works, self.arch.clusters_of(pipe.cluster) * pipe.together) * pipe.cluster
        if pipe.workers == pipe.works and not (pipe.order == "folded" and pipe.works > self.arch.multiprocessors):
            pipe.order = "static"  # nothing to ask for
        elif pipe.cluster > 1 and pipe.dynamic:  # the blocks of a cluster would each get a number of their own
            uneven = any(a in c.axes for c in self.loop.constraints for a in self.p.grid)
            pipe.order = "folded" if uneven else "static"

    def divided(self, vid: int, t: TilePlan, pipe: Pipeline, along: str, n: int) -> str | None:
        """By which axis n blocks that are neighbours along another one copy a part each ("": panels); None if they cannot."""
        if t.loop is None or vid in pipe.parted or any(along in ix.axes for ix in t.load.index):
            return None
        if pipe.boxes[vid].panels % n == 0:
            return ""
        first = next((a for a in t.outer if self.tile[a] > 1), None)
        whole = self.size(t.outer) == t.rows and t.rows % (8 * n) == 0  # groups of eight rows
        return first if first is not None and whole and self.tile[first] % n == 0 else None

    def check_contract(self, n: int, c: ContractPlan) -> None:
        if c.kind != "tensor":
            raise Unsupported("a product that wgmma cannot take")
        if c.right.where != "tile" or c.left.where not in ("tile", "register"):
            raise Unsupported("a right operand that is not a loaded tile")
        home = self.out.home[n]
        assert home.row is not None and home.column is not None
        if home.row.padded != ROWS * self.consumers or home.column.padded > 256:
            wrong = TooLarge if home.row.padded == ROWS * self.consumers else Unsupported
            raise wrong(f"a result of {home.row.padded} × {home.column.padded}")
        if c.dtype not in HALVES:
            raise Unsupported(f"operands of {c.dtype}")
        if self.size(c.inner) % 16 and not all(
            x.where == "tile" and set(self.out.tiles[x.value.id].inner) == set(c.inner) for x in (c.left, c.right)
        ):  # along rows in memory, what is beyond the end is copied as zeros (see `box_of`)
            raise Unsupported("a summed axis that ends inside a matrix instruction")
        for x in (c.left, c.right):
            if x.where == "tile" and self.dtype(x.value) != c.dtype:
                raise Unsupported("operands of two dtypes")
        if c.left.where == "tile":
            for a in c.inner:  # both sides must have zeros where nothing exists
                limit = self.p.limits.get(a)
                if limit is not None and limit.axes != (a,):
                    raise Unsupported("an end of a summed axis that no tensor map can cut off")
