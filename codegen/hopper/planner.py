"""From a tile program to a schedule for warpgroups; raises `Unsupported` where it has no such form.

The program is one loop between statements that work on whole rows.  Its products are of two kinds:
    early   of tiles alone, wanted by the same iteration (scores),
    late    added to carried state, wanted only by the next iteration,
so one iteration's elementwise work may run beside the next one's early and its own late products.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ...program import DTYPES
from ...terms import Affine
from ..cuda.arch import Arch
from ..cuda.layout import Unsupported
from ..cuda.planner import Planner
from ..cuda.schedule import HALVES, ContractPlan, Precision, Schedule, TilePlan
from ..cuda.simplify import behind_loops, fold_exponentials
from ..tile import Carry, Contract, Load, Loop, Reduce, Stmt, Store, TileProgram, operands, walk
from .orders import ORDERS, Traversal, lengths, makespans
from .pivots import Pivots

ROWS = 64  # of one warpgroup
PANEL = 64  # columns of a panel
MOST_CONSUMERS = 3
REGISTERS = {1: (0, 240), 2: (24, 240), 3: (32, 160)}  # of a thread: producer (0: they need not give any up), consumers
# … and of a consumer's for results of products and their operands: of two iterations at a time where these make one result early, or
# several (elementwise work then has more of its own at a time); of one iteration at a time
ROOM = {1: (192, 168, 196), 2: (192, 168, 196), 3: (128, 104, 112)}
BESIDE = 36  # what a thread has beside those: addresses, barriers, state of rows
WORK_SLOTS = 2
READY = 5  # named barrier: those in shared memory are there (1: consumers meet; 2 to 4: their turns)
CACHE = 36_000_000  # bytes of the second-level cache that the loops of the tiles under way may fill
MOST_FAILED = 256  # entries: one for each warp that found its tile to have failed


@dataclass(frozen=True)
class Box:
    """How a tile is copied by tensor map.  dims: of the buffer, innermost first, with how much of each exists; box: elements copied at
    once; coordinates: where a panel starts, the first one to be moved by 64 for each panel; panels: how many."""

    dims: tuple[int, ...]
    sizes: tuple[int, ...]
    box: tuple[int, ...]
    coordinates: tuple[Affine, ...]
    panels: int

    @property
    def bytes(self) -> int:
        n = self.panels * 2
        for b in self.box:
            n *= b
        return n


@dataclass
class Parts:
    """The statements of an iteration, in the order in which the pipeline runs them."""

    early: list[Contract] = field(default_factory=list)
    score: list[Stmt] = field(default_factory=list)  # may run beside late products
    weight: list[Stmt] = field(default_factory=list)  # writes what late products read
    state: list[Stmt] = field(default_factory=list)  # touches what late products add to
    late: list[Contract] = field(default_factory=list)


@dataclass
class Pipeline:
    """What the schedule decides beyond `Schedule`.  Places are bytes in shared memory."""

    schedule: Schedule
    loop: Loop
    parts: Parts
    carries: dict[int, Carry]  # late product → carry that it adds to
    boxes: dict[int, Box]
    consumers: int
    overlap: bool
    chain: bool
    order: str  # "dynamic", "static", "folded" or "grid": see choices.py
    tiles: int  # of work, in all
    blocks: int  # that are launched for them
    pivots: Pivots
    pivot: str  # "running", "lazy" or "frozen"
    traversal: Traversal
    parted: dict[int, str] = field(default_factory=dict)  # tiles of which each warpgroup has a part of its own, by this axis
    leader: dict[int, int] = field(default_factory=dict)  # tile → the one whose barriers and ring it shares
    cluster: int = 1  # blocks that work on neighbouring tiles at the same time
    along: str = ""  # the grid axis on which they are neighbours
    spread: dict[int, str] = field(default_factory=dict)  # tiles that all need: each copies a part by this axis ("": panels)
    hold: bool = False  # results are rounded at the end of a tile of work, and stored beside the next one's first products
    turns: bool = False  # warpgroups take turns in issuing products
    peek: bool = False  # all elementwise work of an iteration, and the wait for the next tiles, go beside late products
    split: int = (
        0  # so many steps of late products are issued first, the others behind some of the elementwise work (0: all at once)
    )
    frozen: Parts | None = None  # of an iteration with pivots that stay
    drained: int = 0  # barrier: consumers have no tile left
    failed: int = 0  # tiles whose frozen pivots were too low: how many, and which
    full: dict[int, int] = field(default_factory=dict)  # tile → first of its barriers
    empty: dict[int, int] = field(default_factory=dict)
    work: int = 0
    work_full: int = 0
    work_empty: int = 0
    shared: int = 0

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + 1)

    @property
    def dynamic(self) -> bool:
        return self.order == "dynamic"

    @property
    def works(self) -> int:
        """Tiles of work; those that a cluster's blocks work on at the same time count as one."""
        return self.tiles // self.cluster

    @property
    def workers(self) -> int:
        """Clusters (blocks, where there are none) that take one work after the other."""
        return self.blocks // self.cluster

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread: producer, consumers.  The producer has more where these do not need them."""
        few, many = REGISTERS[self.consumers]
        spare = self.consumers == 2 and self.schedule.registers <= many - (8 if self.cluster > 1 else 60)
        return (few + 16, many - 8) if spare else (few, many)

    def common(self, vid: int) -> bool:
        """Does the cluster fill and release this tile's barriers together?"""
        return any(self.leader[v] == self.leader[vid] for v in self.spread)

    def arriving(self, vid: int) -> int:
        """Bytes of a tile (of one that is parted, of a part) for one block."""
        return self.boxes[vid].bytes * (self.cluster if self.spread.get(vid) else 1)


def stage_bytes(t: TilePlan) -> int:
    """Of shared memory, for one stage of a tile."""
    return -(-t.bytes // 1024) * 1024


def plan(p: TileProgram, arch: Arch, precision: Precision) -> Pipeline:
    if precision.accurate or precision.compute != "float32":
        raise Unsupported("wgmma computes with 16-bit operands only")
    return WarpgroupPlanner(behind_loops(fold_exponentials(p)), arch, precision).pipeline()


class WarpgroupPlanner(Planner):
    def pipeline(self) -> Pipeline:
        self.loop = self.only_loop()
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
            raise Unsupported(f"{n} rows do not make up to {MOST_CONSUMERS} warpgroups of {ROWS}")
        self.consumers = n // ROWS
        self.wr = 4 * self.consumers

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

    # ---- shared memory and barriers
    def allocate(self) -> None:
        o = self.out
        self.loop = self.only_loop()
        inside = {x.out.id for x in self.loop.body if isinstance(x, Load)}
        within = {x.out.id for x in self.loop.body if isinstance(x, Contract)}
        if not within.issuperset(o.contracts):
            raise Unsupported("a product outside the loop")
        for n, c in o.contracts.items():
            self.check_contract(n, c)
        parts = self.partition(self.loop.body)
        boxes = {}
        at = 0
        used = {v for c in o.contracts.values() for v in c.tiles}
        for vid, t in o.tiles.items():
            if vid not in used:
                raise Unsupported("a tile that no product reads")
            t.loop = self.loop.axis if vid in inside else None
            if t.loop and self.out.instances.get(vid):
                raise Unsupported(f"{t.load.out} is read by products and by element in a loop")
            boxes[vid] = box = self.box(t)
            t.rows = -(-t.rows // 8) * 8
            t.columns = -(-t.columns // 16) * 16
            t.bytes = box.panels * t.rows * 128
            t.packed = True
        fixed = sum(t.bytes for t in o.tiles.values() if t.loop is None)
        ring = sum(t.bytes for t in o.tiles.values() if t.loop is not None)
        trips = self.p.axes[self.loop.axis].trips
        room = self.arch.shared - 2048 - fixed
        want = self.p.choices.get("stages")
        stages = want if isinstance(want, int) else 4
        stages = max(1, min(stages, room // ring if ring else 1, 8))
        if ring and fixed and not isinstance(want, int):  # a third is worth more than a second set of what lies outside the loop
            stages = max(min(stages, 3), min(stages, (room - fixed) // ring))
        overlap = bool(self.p.choices.get("overlap", True)) and bool(parts.early) and trips > 1
        overlap = overlap and self.count_registers(True) <= ROOM[self.consumers][len(parts.early) > 1] + BESIDE
        if not parts.early and (parts.score or parts.weight or parts.state):
            raise Unsupported("elementwise work between products of loaded tiles")
        if (overlap or not parts.early) and stages < 2:
            raise Unsupported(f"{fixed + 2 * ring} bytes of shared memory for two stages")
        if fixed + ring * stages > self.arch.shared - 2048:
            raise Unsupported(f"{fixed + ring * stages} bytes of shared memory")
        ahead = bool(self.p.choices.get("ahead", True)) and 2 * fixed + ring * stages <= self.arch.shared - 4096
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
        tiles = math.prod(self.p.axes[a].trips for a in self.p.grid)
        traversal = self.traversal()
        order = self.best_order(traversal, tiles, stages)
        at = -(-at // 16) * 16
        carries = {s.out.id: next(c for c in self.loop.carries if c.next == s.out) for s in parts.late}
        limit = REGISTERS[self.consumers][1]
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
            pipe.frozen = self.partition(pipe.pivots.frozen)
            at = -(-at // 16) * 16
            pipe.drained, pipe.failed = at, at + 8
            at += 16 + 4 * MOST_FAILED
        pipe.parted = self.parted(parts)
        for vid, a in pipe.parted.items():
            whole = boxes[vid]
            part = tuple(n // self.consumers if a in ix.axes else n for n, ix in zip(whole.box, whole.coordinates))
            boxes[vid] = replace(whole, box=part)
        pipe.turns = bool(self.p.choices.get("turns", True)) and overlap and self.consumers > 1
        pipe.peek = bool(self.p.choices.get("peek", False)) and overlap and bool(parts.late)
        late = [o.contracts[s.out.id] for s in parts.late]
        if pipe.peek and all(c.left.where == "register" and c.steps > 1 for c in late):
            first = self.p.choices.get("split", 0)
            pipe.split = max(0, first) if isinstance(first, int) else 0
        if order != "grid":
            if pipe.pivot != "frozen":  # a tile that is computed again would be so in one block only
                self.join_blocks(pipe)
            self.share_out(pipe)
        pipe.leader = self.leaders(parts, set(pipe.parted))
        for vid, t in o.tiles.items():
            if pipe.leader[vid] != vid:
                continue
            n = t.stages * (self.consumers if vid in pipe.parted else 1)
            pipe.full[vid], pipe.empty[vid] = at, at + 8 * n
            at += 16 * n
        pipe.work, pipe.work_full, pipe.work_empty = at, at + 8 * WORK_SLOTS, at + 16 * WORK_SLOTS
        at += 24 * WORK_SLOTS
        pipe.shared = o.shared = at
        o.registers = self.count_registers(overlap)
        if o.registers > ROOM[self.consumers][2 if parts.early and not overlap else len(parts.early) > 1] + BESIDE:
            raise Unsupported(f"about {o.registers} registers of a thread, of {limit}")
        stores = [(o.store_frames[id(s)], self.p.buffer(s.buffer)) for s in self.p.body if isinstance(s, Store)]
        held = sum(f.slots // 2 + 4 for f, b in stores if b.dtype in HALVES and f.row and f.column and f.column.slots % 8 == 0)
        pipe.hold = bool(self.p.choices.get("hold", True)) and pipe.workers < pipe.works and not parts.early and held > 0
        pipe.hold = pipe.hold and o.registers + held <= limit - 8
        o.registers += held if pipe.hold else 0
        o.min_blocks = 1
        self.out_pipeline = pipe

    def count_registers(self, overlap: bool = True) -> int:
        """Results of products, and left operands, rounded (which with no overlap take the place of early results); elementwise work
        goes through them piece by piece."""
        late = {c.out.id for c in self.loop.body if isinstance(c, Contract) and c.acc is not None}
        sums = sum(self.out.home[v].slots for v in self.out.contracts if v in late)
        scores = sum(self.out.home[v].slots for v in self.out.contracts if v not in late)
        rounded = {c.left.value.id: c.left.layout for c in self.out.contracts.values() if c.left.where == "register"}
        operands = sum(x.slots // 2 for x in rounded.values() if x is not None)
        return sums + (scores + operands if overlap else max(scores, operands)) + BESIDE

    def pivot_choice(self, may_freeze: bool) -> tuple[Pivots, str]:
        """What the program asks for, as far as its results allow it."""
        pivots = Pivots(self.p, self.loop)
        want = str(self.p.choices.get("pivot", "frozen"))
        if not pivots.free:
            return pivots, "running"
        may_freeze = may_freeze and pivots.frozen is not None and not pivots.rising
        return pivots, "lazy" if want == "frozen" and not may_freeze else want

    def leaders(self, parts: Parts, apart: set[int]) -> dict[int, int]:
        """Tiles that come and go together share barriers: those of one loop that the same kinds of products read."""

        def readers(vid: int, products: list[Contract]) -> bool:
            every = [self.out.contracts[s.out.id] for s in products]
            return any(vid in (c.left.value.id, c.right.value.id) for c in every)

        first: dict[object, int] = {}
        out: dict[int, int] = {}
        for vid, t in self.out.tiles.items():
            key: object = (t.loop, readers(vid, parts.early), readers(vid, parts.late)) if vid not in apart else vid
            out[vid] = first.setdefault(key, vid)
        return out

    def parted(self, parts: Parts) -> dict[int, str]:
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
        pipe.blocks = min(pipe.works, self.arch.clusters_of(pipe.cluster)) * pipe.cluster
        if pipe.workers == pipe.works:
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

    def best_order(self, traversal: Traversal, tiles: int, stages: int) -> str:
        """The one with which the last block ends first, of equals the plainest."""
        want = self.p.choices.get("order")
        if want is not None:
            if want not in ORDERS:
                raise Unsupported(f"order {want}, not one of {', '.join(ORDERS)}")
            return str(want)
        blocks = min(tiles, self.arch.multiprocessors)
        ends = makespans(lengths(self.p, self.loop, traversal), blocks, stages)
        return min(ends, key=ends.__getitem__)

    def traversal(self) -> Traversal:
        """Tiles with the longest loops first; as many positions of the other axes at a time as the cache holds what their loops read.
        Where nothing bounds the loop and two axes share what it reads, blocks at one time form a square."""
        axes = self.p.axes
        grid = [a for a in self.p.grid if axes[a].trips > 1]
        loop = self.loop
        backwards: dict[str, bool] = {}
        for c in loop.constraints:
            terms = dict(c.terms)
            for a in grid:
                if a in terms and loop.axis in terms:  # of several constraints one that lets loops grow decides
                    backwards[a] = backwards.get(a, False) or terms[loop.axis] < 0 < terms[a]
        reads = [s for s in loop.body if isinstance(s, Load) and loop.axis in s.out.axes]
        depends = {a: [s for s in reads if a in s.out.axes] for a in grid}

        def bytes_of(s: Load, fixed: Iterable[str]) -> int:
            n = DTYPES[self.p.buffer(s.buffer).dtype]
            for a in s.out.axes:
                n *= 1 if a in fixed and a in grid else axes[a].tile if a in grid else axes[a].extent
            return n

        want = self.p.choices.get("group")
        if backwards:
            slow = [a for a in grid if a in backwards]
            fast = sorted((a for a in grid if a not in backwards), key=lambda a: (-len(depends[a]), grid.index(a)))
            size = sum(bytes_of(s, fast) for s in reads)
            shared = 1  # positions that read the same
            for a in fast:
                shared *= 1 if depends[a] else axes[a].trips
            group = max(shared, CACHE // max(size, 1) * shared)
            places = math.prod(axes[a].trips for a in fast)
            turns = -(-places // group)  # of equal length, as far as they can be
            group = -(-places // turns // shared) * shared
        else:
            apart = [a for a in grid if depends[a] and len(depends[a]) < len(reads)]
            if len(apart) == 2:
                one, two = (sum(bytes_of(s, ()) for s in depends[a]) for a in apart)
                slow, fast = [apart[1]], [apart[0]]
                group = max(1, round((self.arch.multiprocessors * two / one) ** 0.5))
                rest = [a for a in grid if a not in apart]
                if rest:  # batches, one after the other
                    slow, fast, group = [], sorted(grid, key=lambda a: (a not in rest, grid.index(a))), 1
            else:
                slow, fast, group = [], sorted(grid, key=lambda a: (-len(depends[a]), grid.index(a))), 1
        group = want if isinstance(want, int) else group
        return Traversal(
            tuple((a, backwards.get(a, False)) for a in slow), tuple((a, backwards.get(a, False)) for a in fast), max(1, group)
        )

    def check_contract(self, n: int, c: ContractPlan) -> None:
        if c.kind != "tensor":
            raise Unsupported("a product that wgmma cannot take")
        if c.right.where != "tile" or c.left.where not in ("tile", "register"):
            raise Unsupported("a right operand that is not a loaded tile")
        home = self.out.home[n]
        assert home.row is not None and home.column is not None
        if home.row.padded != ROWS * self.consumers or home.column.padded > 256:
            raise Unsupported(f"a result of {home.row.padded} × {home.column.padded}")
        if c.dtype not in HALVES:
            raise Unsupported(f"operands of {c.dtype}")
        if self.size(c.inner) % 16 and not all(
            x.where == "tile" and set(self.out.tiles[x.value.id].inner) == set(c.inner) for x in (c.left, c.right)
        ):  # along rows in memory, what is beyond the end is copied as zeros (see `box`)
            raise Unsupported("a summed axis that ends inside a matrix instruction")
        for x in (c.left, c.right):
            if x.where == "tile" and self.dtype(x.value) != c.dtype:
                raise Unsupported("operands of two dtypes")
        if c.left.where == "tile":
            for a in c.inner:  # both sides must have zeros where nothing exists
                limit = self.p.limits.get(a)
                if limit is not None and limit.axes != (a,):
                    raise Unsupported("an end of a summed axis that no tensor map can cut off")

    def box(self, t: TilePlan) -> Box:
        s, p = t.load, self.p
        b = p.buffer(s.buffer)
        if DTYPES[b.dtype] != 2 or not s.index:
            raise Unsupported(f"a tile of {b.dtype}")
        live = [a for a in (*t.outer, *t.inner) if self.tile[a] > 1]
        if len([a for a in t.inner if self.tile[a] > 1]) != 1:
            raise Unsupported("merged axes along a tile's rows")
        where: dict[str, int] = {}
        for n, ix in enumerate(s.index):
            here = [a for a in ix.axes if a in live]
            if len(here) > 1 or any(dict(ix.terms)[a] != 1 or a in where for a in here):
                raise Unsupported(f"no box covers {s.buffer}[{', '.join(map(str, s.index))}]")
            for a in here:
                where[a] = n
        if set(where) != set(live):
            raise Unsupported(f"no box covers {s.buffer}[{', '.join(map(str, s.index))}]")
        inner = next(a for a in t.inner if self.tile[a] > 1)
        if where[inner] != len(s.index) - 1:
            raise Unsupported("the tile's rows are not contiguous in memory")
        ordered = [where[inner], *(where[a] for a in reversed(t.outer) if a in where)]
        rest = [n for n, ix in enumerate(s.index) if n not in ordered and b.shape[n] > 1]
        dims = (*ordered, *reversed(rest))
        if len(dims) > 5:
            raise Unsupported("more than five dimensions")
        if b.kind == "temp" and b.shape[-1] * 2 % 16:
            raise Unsupported("rows of a temporary that are no multiple of 16 bytes")
        sizes, box = [], []
        for n in dims:
            sizes.append(max(1, min(b.shape[n], s.index[n].bounds(p.extents)[1] + 1)))
            tiles = [self.tile[a] for a in where if where[a] == n]
            box.append(PANEL if n == dims[0] else tiles[0] if tiles else 1)
        if max(box) > 256:
            raise Unsupported(f"a box of {max(box)} elements along one dimension")
        covered = self.tile[inner]
        if covered % 16 and sizes[0] != covered:
            raise Unsupported("a summed axis that ends inside a matrix instruction, and inside the buffer")
        origin = []
        for n in dims:
            ix = s.index[n]
            origin.append(Affine(ix.const, tuple((a, c) for a, c in ix.terms)))
        return Box(tuple(dims), tuple(sizes), tuple(box), tuple(origin), -(-max(t.columns, covered) // PANEL))

    # ---- the parts of an iteration
    def partition(self, body: tuple[Stmt, ...]) -> Parts:
        loop = self.loop
        defs = {s.out.id: s for s in body if not isinstance(s, Store | Loop)}
        phis = {c.phi.id: c for c in loop.carries}
        nexts = {c.next.id: c for c in loop.carries}
        late = [s for s in body if isinstance(s, Contract) and s.acc is not None and s.out.id in nexts]
        read = {v.id for s in body for v in operands(s)}
        for product in late:
            if product.out.id in read or sum(c.next == product.out for c in loop.carries) != 1:
                raise Unsupported("a carried product that the same iteration reads")
        sums = {nexts[s.out.id].phi.id for s in late}
        touched: set[int] = set(sums)  # values that depend on what late products add to
        for s in body:
            if any(v.id in touched for v in operands(s)) and s not in late:
                touched.add(s.out.id)  # type: ignore[union-attr]
        if any(p.a.id in touched or p.b.id in touched for p in late):
            raise Unsupported("a product that depends on another one's sum")
        for c in loop.carries:
            if c.phi.id not in sums and c.next.id in touched:
                raise Unsupported("state that depends on a product's sum")
        parts = Parts(late=late)
        for s in body:
            if isinstance(s, Contract) and s not in late:
                if any(v.id in defs and not isinstance(defs[v.id], Load) for v in (s.a, s.b)) or s.out.id in touched:
                    raise Unsupported("a product of computed operands that is not carried")
                if s.acc is not None and s.acc.id in phis:
                    raise Unsupported("a carried sum that the same iteration reads")
                parts.early.append(s)
        weights = {v.id for p in late for v in (p.a, p.b) if v.id in defs and not isinstance(defs[v.id], Load)}
        for s in body:
            if isinstance(s, Load | Contract):
                if isinstance(s, Load) and s.out.id not in self.out.tiles:
                    parts.score.append(s)
                continue
            if s.out.id in touched:  # type: ignore[union-attr]
                parts.state.append(s)
            elif s.out.id in weights or any(v.id in weights for v in operands(s)):  # type: ignore[union-attr]
                weights.add(s.out.id)  # type: ignore[union-attr]
                parts.weight.append(s)
            else:
                parts.score.append(s)
        return parts
