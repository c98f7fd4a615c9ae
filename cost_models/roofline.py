"""Roofline of a GPU: a block's work on each unit of a multiprocessor, waves of blocks, memory, feasibility of registers and shared
memory; the schedule choices (warps, stages) are taken with the tiles."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from functools import cached_property, reduce
from typing import NamedTuple

import numpy as np

from ..codegen.cuda.warps import FED_RESULT, MOST_RESULT, SHARED_RESULT
from ..codegen.tile import Contract, Load, Store, TileProgram
from ..extraction.plan import Buffer
from . import walk as W
from . import warpgroups
from .base import Array, Prices, Printed, Refusal, Scores, Sizes, Work, choose, clip
from .block import HALF, Block
from .by_element import ByElement
from .machines import Gpu

WARPS = (4, 8)
STAGES = (2, 3, 4)
BUBBLE = 0.3  # share of what blocks and iterations wait in which less is asked from memory, whatever other blocks are there
START = 0.1  # … where blocks have no loop and others load beside their start and end
# A fourth stage is of no use where three have so many times the bytes under way that cover the latency: products of few rows take the same
# time with three stages of 40 KB as with four, and 7 % less with three of 48 KB (benches/results/2026-12-01_h200_few_rows_stages.json)
ENOUGH = 1.6
CHUNK = 2048  # points that are priced at a time: their arrays stay in a core's cache
HIDING = 16  # warps there must be room for, to keep a multiprocessor at work where blocks load, reduce, then compute
# Products that follow one another in a block, and reductions among them, each waiting for the one before: so long for each element that a
# product sums, and for a reduction, where there are more than a few; more than MANY_TURNS of them take so many times as long.  Fitted to
# chains of small products in kernels of several steps (benches/results/2026-12-01_h200_chains.txt).
TERM, TURN, FEW_TURNS, MANY_TURNS, FETCHED = 19e-9, 0.3e-6, 4, 24, 2.3
ALONE = 1.3  # what a multiprocessor pulls from the second-level cache while few do, relative to what it pulls from memory


def _whole(program: TileProgram, extents: Mapping[str, int], axes: tuple[str, ...], besides: str) -> int:
    """Elements along the other axes of these that lie whole in a block."""
    return math.prod(extents[a] for a in axes if a != besides and program.axes[a].role == "whole")


PLAIN = {"warpgroups": 0, "cluster": 1, "together": 1}  # what is so at every point is no choice


class Way(NamedTuple):
    """How a kernel runs.  warpgroups: 0 where it is no pipeline of them; cluster: blocks that share a loop's tiles; together: blocks of one
    warpgroup that share a multiprocessor."""

    warps: int
    stages: int
    warpgroups: int
    cluster: int
    together: int = 1


class Roofline:
    """The analytic model of one GPU.  Deterministic, and blind to names."""

    def __init__(self, machine: Gpu, plain: bool = False, printed: Printed | None = None):
        """printed: what the code generator says of a kernel (see `CostModel.refusal`); None: it prints all."""
        self.machine, self.printed = machine, printed
        self.plain = plain  # no pipelines of warpgroups

    @property
    def name(self) -> str:
        return self.machine.name

    @property
    def workers(self) -> int:
        return self.machine.sms

    @property
    def intermediate(self) -> float:
        return self.machine.memory / 8

    @property
    def tensor_dtypes(self) -> frozenset[str]:
        return frozenset(HALF) if self.machine.tensor else frozenset()

    # ---- bounds and choices
    def floor(self, work: Work) -> float:
        m = self.machine
        rate = max(m.tensor, 0.0 if self.plain else m.wgmma)  # pipelines leave tiles that products read to the products
        tensor = work.tensor / rate + work.mixed / m.tensor if m.tensor else (work.tensor + work.mixed) / 2 / m.ops
        t = max(tensor, work.ops / m.ops, work.special / m.special)
        return m.launch + max(t, work.bytes / m.dram)

    def roles(self, extent: int, contracted: bool) -> tuple[str, ...]:
        if contracted:
            return ("whole",) if extent <= 128 else ("whole", "loop") if extent <= 256 else ("loop",)
        return ("whole",) if extent <= 256 else ("loop", "whole") if extent <= 32768 else ("loop",)

    def splits(self, extent: int) -> tuple[int, ...]:
        counts = {s for s in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256) if extent // s >= 64}
        if 512 < extent < 1 << 20:
            counts.add(-(-extent // 256))  # a part may lie whole in a block, beside a product's tile
        return tuple(sorted(counts))

    def tiles(self, program: TileProgram, extents: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        products = [W.Product.of(s) for s in program.statements if isinstance(s, Contract)]
        lone = {a for p in products if bool(p.rows) != bool(p.cols) for a in p.batch}  # one vector each: no tile of several
        products = [p for p in products if p.rows and p.cols]
        kept = {a for p in products for a in (*p.rows, *p.cols)}
        summed = {a for p in products for a in p.inner}
        fast = {s.index[-1].axes[-1] for s in program.statements if isinstance(s, Load | Store) and s.index and s.index[-1].axes}
        out: dict[str, tuple[int, ...]] = {}
        for a, x in program.axes.items():
            n = extents[a]
            if x.role == "whole" or n <= 1:
                out[a] = (max(n, 1),)
                continue
            if a in kept and x.role == "grid":
                sizes: tuple[int, ...] = (1, 16, 32, 64, 128, 256) if n > 16 else (1, 2, 4, 8, 16)
                wave = -(-n // (16 * self.machine.sms)) * 16  # a block for each multiprocessor
                if 16 < n and wave < 128:
                    sizes = tuple(sorted({*sizes, wave}))
            elif a in summed or (products and x.role == "loop"):
                beside = min((_whole(program, extents, p.inner, a) for p in products if a in p.inner), default=1)
                sizes = tuple(t for t in (1, 2, 4, 8, 16, 32, 64, 128, 256) if 16 <= t * beside <= 256)
            elif x.role == "grid" and (products or a in lone):
                sizes = (1,)
            elif x.role == "loop":
                sizes = (64, 128, 256, 512, 1024, 2048, 4096)
            elif a in fast:
                sizes = (1, 8, 32, 64, 128, 256, 512, 1024)
            else:
                sizes = (1, 2, 4, 8, 16, 32, 64)
            fits = [t for t in sizes if t < n]
            # the whole extent as one tile where that is of the same order
            out[a] = tuple(fits) + ((n,) if not fits or n <= 2 * sizes[-1] else ())
        return out

    def finer(self, program: TileProgram, tiles: Mapping[str, int], extents: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """Tile sizes worth trying around these for a pipeline of warpgroups in which one product sums along what another one's columns
        are: any multiple of a matrix instruction there, and rows of three warpgroups.  Axes with one of `tiles` whole or of one stay."""
        products = [W.Product.of(s) for s in program.statements if isinstance(s, Contract)]
        kept = {a for p in products for a in (*p.rows, *p.cols)}
        passed = {a for p in products for a in p.inner if a in kept and program.axes[a].role == "loop"}
        out: dict[str, tuple[int, ...]] = {}
        for a, now in tiles.items():
            sizes = {now}
            if passed and 1 < now < extents[a]:
                if a in passed:
                    beside = math.prod(tiles[x] for x in passed if x != a)
                    whole = extents[a] if a.endswith(".i") else 0  # a tile must divide a part of a split axis
                    sizes |= {t for t in range(16, 257, 16) if t * beside <= 256 and t < extents[a] and whole % t == 0}
                elif a in kept and program.axes[a].role == "grid":
                    sizes |= {c << n for n in range(9) for c in (1, 3) if c << n < min(extents[a], 257)}
            out[a] = tuple(sorted(sizes))
        return out

    def _sharing(self, b: Block, loops: list[W.Iterations], sizes: Sizes, warps: Array) -> Array:
        """How many of these warps share a loop's tiles, each with results of its own (0: none do)?  (codegen/cuda/warps.py decides.)"""
        if len(loops) != 1 or not np.any(b.results > 0):
            return np.zeros(1)
        tile, m = sizes.tile[loops[0].loop.axis], self.machine
        sharing = np.zeros(1)
        for n in (2, 4, 8):
            sharing = np.where((n <= warps) & (tile >= n * m.fragment[2]) & (np.mod(tile, n) == 0), n, sharing)
        if not b.fed:
            may = b.results <= SHARED_RESULT * m.warp
        else:
            held = b.results - b.streamed * (1 - 1 / warps)
            more = (b.fed_rows < warps * m.fragment[0]) & (held <= FED_RESULT * m.warp) & (sharing == warps)
            may = (b.fed_rows <= m.fragment[0]) | more
        return np.where(may, sharing, 0) if may.any() else np.zeros(1)

    def _present(self, b: Block, sharing: Array, warps: Array) -> Array:
        """Warps that a kernel gets of those that it may have: where one product feeds another one, only rows are distributed (and columns
        of what is very wide), unless they share a loop's tiles.  (codegen/cuda/warps.py decides.)"""
        if not b.fed:
            return choose(sharing > 0, sharing, warps)
        m = self.machine
        along = clip(np.floor(b.fed_rows / m.fragment[0]), 1.0, warps)
        wide = np.ceil(m.fragment[0] * b.fed_cols / (MOST_RESULT * m.warp))
        return choose(sharing > 0, sharing, along * np.exp2(np.ceil(np.log2(np.maximum(wide, 1.0)))))

    def _padded(self, b: Block, shares: Array, warps: Array) -> Array:
        """Rows that warps have with those that fill up their last matrix instructions, relative to those that there are."""
        if not b.fed:
            return np.ones(1)
        each = warps * self.machine.fragment[0]
        return choose(shares, 1.0, np.maximum(np.ceil(b.fed_rows / each) * each / np.maximum(b.fed_rows, each), 1.0))

    def _clusters(self, b: Block, loops: list[W.Iterations], sizes: Sizes) -> tuple[int, ...]:
        """Numbers of blocks, more than one, that may share a loop's tiles somewhere."""
        some = any(np.any(self._sharing(b, loops, sizes, np.array(w))) for w in WARPS if self.machine.clusters)
        return self.machine.clusters if some else ()

    def _per_byte(self, blocks: Array, room: Array, flight: Array, piece: Array, share: Array) -> Array:
        """Seconds for a byte from memory: whole waves of as many blocks as there is room for, then the last one, whose fewer blocks may
        have too few bytes in flight (`flight` each) to cover the latency (Little's law) and the time in which a piece, that is waited for
        as one, comes in.  share: of what blocks load, what is not in the cache; the rest takes their time, too."""
        m = self.machine
        whole = np.floor(blocks / room) * room
        last = blocks - whole
        awaited, of_memory = m.latency + piece / m.pull, share / m.dram

        def slower(n: Array) -> Array:
            """How many times as long as memory needs it takes so many blocks."""
            active = clip(n, 1.0, m.sms)
            asked = active * np.minimum(m.pull, np.maximum(n / active * flight, 2048.0) / awaited) * of_memory
            square = asked * asked
            return np.sqrt(np.sqrt(1.0 / (square * square) + 1.0))  # near the bend there is less than either

        seconds = last * slower(last)
        if whole.any():
            seconds = whole * slower(np.minimum(blocks, room)) + seconds
        return seconds * (1.0 / (blocks * m.dram))

    # ---- the price
    def refusal(self, program: TileProgram, buffers: Mapping[str, Buffer]) -> Refusal | None:
        return self.printed(program, buffers) if self.printed is not None else None

    def instead(self, choices: Mapping[str, object]) -> Prices | None:
        if self.printed is None:
            return None
        return self.without_pipelines if choices.get("warpgroups") else self.by_element

    @cached_property
    def without_pipelines(self) -> Roofline:
        return Roofline(self.machine, plain=True, printed=self.printed)

    @cached_property
    def by_element(self) -> ByElement:
        return ByElement(self.machine)

    def cost(self, program: TileProgram, sizes: Sizes, detail: bool = False) -> Scores:
        m = self.machine
        steps, loops = W.steps(program, sizes)
        blocks = W.blocks(program, sizes)
        b = Block(program, sizes, steps, blocks, m)
        trips = sum((it.runs for it in loops), np.zeros(1))
        again = sum((it.again for it in loops), np.zeros(1))
        alive = min((it.alive for it in loops), key=lambda x: float(x.mean()), default=np.ones(1))
        shared = self._clusters(b, loops, sizes)
        pipeline = warpgroups.form(program, b) if m.wgmma and not self.plain else None
        # what follows has an entry for every way to run a point: only points that there may be a way for
        where = np.arange(sizes.points) if detail else self._possible(b, pipeline)
        pieces = np.split(where, range(CHUNK, len(where), CHUNK)) if not detail else [where]
        found: list[dict[Way, tuple[Array, dict[str, Array]]]] = []
        for piece in pieces:
            of = sizes.picker(piece)
            some = b.at(of)
            n, t, y, x = map(of, (blocks, trips, again, alive))
            ways = self._ways(some, loops, n, t, y, x, shared, detail)
            if pipeline is not None:
                names = next(iter(ways.values()))[1].keys()
                for groups, together, depth, seconds, parts in warpgroups.price(pipeline, program, some.sizes, some, n, x, m):
                    more = {k: np.broadcast_to(parts.get(k, 0.0), (len(piece),)) for k in names}
                    ways[Way(4 * groups, depth, groups, 1, together)] = seconds, more
            found.append(ways)
        every = list(dict.fromkeys(way for ways in found for way in ways))
        every.sort(key=lambda w: (w.warpgroups, w.together, w.warps, w.cluster, w.stages))
        table = np.full((len(every), len(where)), np.inf)
        at = 0
        for piece, ways in zip(pieces, found):
            for i, way in enumerate(every):
                if way in ways:
                    table[i, at : at + len(piece)] = ways[way][0]
            at += len(piece)
        best = (table * (1 + 1e-3 * np.arange(len(every)))[:, None]).argmin(0)  # near-ties go to fewer warps and stages
        picks = np.arange(len(where))
        seconds = np.full(sizes.points, np.inf)
        seconds[where] = table[best, picks]
        choices = {}
        for place, name in enumerate(Way._fields):
            values = np.array([w[place] for w in every], float)
            chosen = values[best]
            if not (chosen == PLAIN.get(name, math.nan)).all():
                choices[name] = np.full(sizes.points, values[0])
                choices[name][where] = chosen
        if not detail:
            return Scores(seconds, choices)
        (ways,) = found
        parts = {k: np.stack([ways[w][1][k] for w in every])[best, picks] for k in next(iter(ways.values()))[1]}
        more = {k: parts.pop(k) for k in ("registers", "shared bytes", "resident", "blocks", "warps")}
        return Scores(seconds, choices, parts, more)

    def _possible(self, b: Block, pipeline: warpgroups.Form | None) -> Array:
        """Numbers of the points whose tiles may fit into registers and shared memory (never none)."""
        m, sizes = self.machine, b.sizes
        pieces = sum((np.minimum(run, n / (WARPS[-1] * m.warp)) for run, n in b.pieces), np.zeros(1))
        ok = self._registers(b, b.registers, pieces, np.array(WARPS[-1] * m.warp)) <= m.registers_thread
        depth = min(STAGES[0], m.stages) if b.streams else 1
        ok = ok & (b.resident + b.staged * depth <= m.shared_block)
        if pipeline is not None:
            ok = ok | warpgroups.fits(pipeline, sizes)
        if sizes.only is not None:
            ok = ok & sizes.only
        where = np.flatnonzero(np.broadcast_to(ok, sizes.shape))
        return where if len(where) else np.zeros(1, int)

    def _registers(self, b: Block, held: Array, pieces: Array, threads: Array) -> Array:
        """Of one thread."""
        return np.asarray(np.ceil((held / 4.0 / threads + pieces + (48 if b.heavy else 28)) / 8.0) * 8.0)

    def _ways(
        self,
        b: Block,
        loops: list[W.Iterations],
        blocks: Array,
        trips: Array,
        again: Array,
        alive: Array,
        clusters: tuple[int, ...],
        detail: bool,
    ) -> dict[Way, tuple[Array, dict[str, Array]]]:
        """Seconds at every point, and parts if asked for, for each number of warps, stages and blocks in a cluster."""
        m, sizes = self.machine, b.sizes
        tiled = np.where(alive < 1, np.maximum(blocks / m.sms + 0.5, 1.0), np.ceil(blocks / m.sms))
        heavy, streams = b.heavy, b.streams
        ops = m.ops64 if b.p.compute_dtype == "float64" else m.ops
        # what is small and the same for all blocks stays in the first-level cache, beside what streams through
        common = np.where(b.common <= m.l1 / 2, b.common, 0.0)
        l2, dram = b.l2 - common, b.dram + b.partial
        share_of_memory = clip(dram / np.maximum(l2 * blocks, 1.0), 1e-3, 1.0)
        whole = [x * m.sms for x in (b.tensor / max(m.tensor, 1.0), b.ops / ops, b.special / m.special)]
        out: dict[Way, tuple[Array, dict[str, Array]]] = {}
        # all numbers of warps and of stages at once: arrays have these two axes before that of the points
        wanted = np.array(WARPS)[:, None, None]
        sharing = self._sharing(b, loops, sizes, wanted)
        warps, shares = self._present(b, sharing, wanted), sharing > 0
        depths = sorted({min(n, m.stages) for n in STAGES}) if streams else [1]
        stages = np.array(depths)[None, :, None]
        threads = warps * m.warp
        row_warps = clip(np.ceil(b.rows / m.fragment[0]), 1.0, warps)
        apart = b.per_row_warp * row_warps + b.per_col_warp * warps / row_warps
        own = b.results - b.streamed if b.fed else b.results
        joined = 4.0 * warps * own  # bytes: in the end they join their sums
        passed = choose(shares, b.per_row_warp + b.per_col_warp, apart)
        padded = self._padded(b, shares, warps)
        whole[0] = whole[0] * padded
        held = b.registers * padded + choose(shares, 4.0 * (warps - 1) * own, 0.0)
        pieces = sum((np.minimum(run, n / threads) for run, n in b.pieces), np.zeros(1))
        registers = self._registers(b, held, pieces, threads)
        chain = (TERM * b.chain + TURN * b.waits * (b.chain > 0)) * max(0.0, 1 - FEW_TURNS / max(b.turns, 1))
        fetched = (FETCHED - 1) * chain if b.turns > MANY_TURNS else 0.0
        fits = registers <= m.registers_thread
        if heavy:  # more warps only where each has a tile of its own
            tiles = np.ceil(b.rows / m.fragment[0]) * np.ceil(b.cols / m.fragment[1])
            fits = fits & (shares | (tiles >= warps) | (wanted == WARPS[0]))
        used = b.resident + b.staged * stages
        resident = np.minimum(np.floor(m.registers / (registers * threads)), np.floor(m.shared_sm / (used + 1024)))
        resident = np.minimum(resident, np.minimum(m.threads_sm // threads, 16))
        fits = fits & (used <= m.shared_block) & (resident >= 1)
        if streams:
            fits = fits & ((stages < 4) | (b.staged * (stages - 2) < ENOUGH * m.pull * m.latency))
        resident = np.maximum(resident, 1.0)
        room = m.sms * resident
        few, many = m.overlap
        piece = choose(shares & b.fed, 0.0, b.staged if streams and m.stages > 1 else 0.0)
        for cluster in (1, *clusters):
            # the blocks of a cluster have a part of the iterations each
            count, iterations = (blocks * cluster, trips / cluster) if cluster > 1 else (blocks, trips)
            per_sm = tiled if cluster == 1 else np.ceil(count / m.sms)
            # the second-level cache serves fewer multiprocessors faster
            working = clip(count, 1.0, m.sms)
            whole_l2 = l2 / np.minimum(m.l2 / working, np.maximum(m.l2 / m.sms, ALONE * m.pull))
            fixed, inside = [*whole, whole_l2], b.shared + common + passed
            if cluster > 1:
                fixed, inside = [x / cluster for x in fixed], inside / cluster
            shared = (inside + choose(shares, 2.0 * joined, 0.0)) * (m.sms / m.shared)
            meet = m.meet + (cluster - 1) * joined / m.remote if cluster > 1 else 0.0
            ok = fits & shares & (iterations >= 2) if cluster > 1 else fits
            time = [*fixed, shared]
            units = [*fixed[:3], shared]  # what loads have no part in
            busy, spent = reduce(np.maximum, units), reduce(np.add, units)
            together = np.minimum(resident, np.maximum(np.ceil(count / m.sms), 1.0))
            # from four warps to twelve what hides grows with their number
            share = clip(few + (many - few) / 8.0 * (together * warps - 4.0), many, few)
            latency = np.ceil(count / room) * (iterations * m.step + (1 + again) * m.block)  # copies of an inner loop begin anew
            serial = np.ceil(count / room) * chain + fetched
            flight = b.staged * np.maximum(stages - 1, 1) if streams else l2 / np.maximum(iterations, 1.0)
            memory = dram * self._per_byte(count, room, flight, piece, share_of_memory)
            if streams:
                memory = memory + (m.block + BUBBLE * (iterations * m.step + m.block) * np.maximum(count / m.sms, 1.0))
                # copies that are asynchronous run beside everything else
                most, total = np.maximum(busy, fixed[3]), spent if m.stages > 1 else spent + fixed[3]
                compute = per_sm * most + share * (per_sm * np.maximum(total - most, 0.0))
                seconds = np.maximum(np.maximum(compute, serial) + latency, memory)
            else:  # a block loads, then computes: only other blocks' loads run beside its work
                memory = memory + (m.block + START * m.block * np.maximum(count / m.sms, 1.0))
                # where registers leave room for few warps, those wait for their own results and for each other
                issue = np.maximum(HIDING / (resident * warps), 1.0)
                loads, work = np.maximum(memory, per_sm * fixed[3]), issue * (per_sm * (busy + share * (spent - busy)) + latency)
                work = np.maximum(work, serial + latency)
                # in a single wave all blocks load at the same time, then all compute
                beside = np.where(count <= room, 1.0, np.where(iterations > 0, together, together * together * together))
                seconds = np.maximum(loads, work) + np.minimum(loads, work) / beside
            full = (len(WARPS), len(depths), sizes.points)
            seconds = np.broadcast_to(np.where(ok, m.launch + meet + seconds, np.inf), full)
            parts: dict[str, Array] = {}
            if detail:
                names = ("tensor", "ops", "special", "l2", "shared")
                parts = {n: per_sm * x for n, x in zip(names, time)}
                parts |= {"dram": memory, "latency": latency + serial, "launch": np.full(1, m.launch)}
                parts |= {"registers": registers, "shared bytes": used, "resident": resident, "blocks": count, "warps": warps}
                parts = {n: np.broadcast_to(x, full) for n, x in parts.items()}
            for w, s in itertools.product(range(len(WARPS)), range(len(depths))):
                out[Way(WARPS[w], depths[s], 0, cluster)] = seconds[w, s], {n: x[w, s] for n, x in parts.items()}
        return out
