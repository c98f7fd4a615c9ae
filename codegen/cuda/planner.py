"""From a tile program to a `Schedule`; raises `Unsupported` where fragments cannot express it.  Here: shared memory and registers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from copy import copy
from dataclasses import replace

from ...program import DTYPES
from ...terms import Affine
from ..tile import (
    Const,
    Contract,
    Iota,
    Load,
    Loop,
    Map,
    Mask,
    Reduce,
    Stmt,
    Store,
    TileProgram,
    live,
    operands,
    results,
    walk,
)
from .arch import Arch
from .kernel import implied
from .layout import Crowded, Entangled, TooLarge, Unsupported
from .placement import Placement
from .schedule import ContractPlan, Precision, Schedule, TilePlan, staged_shape, tile_bytes
from .simplify import fold_exponentials
from .warps import UNIT


def plan(p: TileProgram, arch: Arch, precision: Precision) -> Schedule:
    if not precision.accurate and precision.compute == "float32":
        p = fold_exponentials(p)
    choices = [p.choices]
    if {"warps", "stages"} & set(p.choices):
        choices.append({n: c for n, c in p.choices.items() if n not in ("warps", "stages")})
    refusals: list[Unsupported] = []
    for ends in (False, True):
        whole = Planner(p, arch, precision)
        whole.unit_ends = ends
        whole.choose_matrices()
        entangled: set[tuple] = set()
        for chosen, settled in itertools.product(choices, (False, True)):
            for shares in (True, False):
                planner = whole.copy(chosen)
                planner.shares, planner.one_side = shares, settled
                try:
                    planner.choose_warps()
                    if (tiles := (settled, *planner.tile.values())) in entangled:
                        continue
                    return planner.run()
                except Entangled as e:
                    entangled.add(tiles)
                    refusals.append(e)
                except Unsupported as e:
                    refusals.append(e)
                if planner.split is None:
                    break  # no warps shared a loop
        if UNIT not in whole.forced:
            break
    try:
        raise next((e for e in refusals if isinstance(e, TooLarge)), refusals[0])
    finally:
        del refusals  # what is raised keeps this frame, and all that called it, which else would keep it alive in turn


VECTOR_REGISTERS = 24  # that a thread needs beside its values; a compiler that may take more loads farther ahead


def readers_of(p: TileProgram) -> dict[int, list[Stmt]]:
    """Statements that read each value, by its number, once for every time that they do; loops for what they carry."""
    out: dict[int, list[Stmt]] = {}
    for s in walk(p.body):
        for v in operands(s):
            out.setdefault(v.id, []).append(s)
        if isinstance(s, Loop):
            for c in s.carries:
                out.setdefault(c.next.id, []).append(s)
    return out


class Planner(Placement):
    def copy(self, choices: dict[str, object]) -> Planner:
        """One whose matrix products are chosen, to go on with on its own."""
        other = copy(self)
        other.p = replace(self.p, choices=choices)
        other.tile, other.forced = dict(self.tile), set(self.forced)
        return other

    def run(self) -> Schedule:
        """After `choose_matrices` and `choose_warps`."""
        self.choose_left()
        self.choose_sides()
        self.make_groups()
        self.place()
        self.demand()
        self.out.cluster = self.cluster()
        self.out.pieces = self.pieces()
        self.allocate()
        return self.out

    def allocate(self) -> None:
        o, p, arch = self.out, self.p, self.arch
        loop_of: dict[int, str | None] = {}

        def scopes(body: tuple[Stmt, ...], loop: str | None) -> Iterator[None]:
            for s in body:
                if isinstance(s, Loop):
                    yield from scopes(s.body, s.axis)
                elif isinstance(s, Load):
                    loop_of[s.out.id] = loop
            yield

        for _ in scopes(p.body, None):
            pass
        fixed = ring = 0
        for vid, t in o.tiles.items():
            t.loop = loop_of[vid]
        passing = self.hold()
        for vid, t in o.tiles.items():
            dtype = p.buffer(t.load.buffer).dtype
            t.packed = self.packable(t, dtype)
            t.bytes = tile_bytes(t.rows, t.columns, DTYPES[dtype])
            if vid in passing:
                pass
            elif t.loop is None:
                fixed += t.bytes
            else:
                ring += t.bytes * self.ws
        staged = 0
        for c in o.contracts.values():
            for x, _own in ((c.left, c.left_axes), (c.right, c.right_axes)):
                if x.where == "staged":
                    assert x.layout is not None and x.layout.row is not None and x.layout.column is not None
                    width = DTYPES[c.dtype]
                    x.bytes = tile_bytes(*staged_shape(x.layout, arch), width)
                    staged += x.bytes * self.ws
        want = p.choices.get("stages")
        trips = max((p.axes[s.axis].trips for s in walk(p.body) if isinstance(s, Loop)), default=1)
        if isinstance(want, int):
            stages = max(1, want)
        else:
            room = min(arch.shared, arch.shared_sm // 2 - 1024) - fixed - staged - 1024
            most = arch.stages if self.ws > 1 or self.wr * self.arch.fragment[0] <= 32 else 2
            stages = max(2, min(most, room // ring if ring else 2))
        stages = max(1, min(stages, trips, arch.stages))
        while stages > 1 and fixed + staged + ring * stages > arch.shared - 2048:
            stages -= 1
        at = over = 0
        for vid, t in sorted(o.tiles.items(), key=lambda x: x[1].loop is not None):
            t.stages = stages if t.loop is not None else 1
            size = -(-t.bytes // 128) * 128 * t.stages * (self.ws if t.loop is not None else 1)
            if vid in passing:  # where the loop's tiles will lie
                t.offset = over
                over += size
            else:
                t.offset = at
                at += size
        start = sum(-(-t.bytes // 128) * 128 for vid, t in o.tiles.items() if t.loop is None and vid not in passing)
        for vid in passing:
            o.tiles[vid].offset += start
        at = max(at, start + over)
        for c in o.contracts.values():
            for x in (c.left, c.right):
                if x.where == "staged":
                    x.offset = at
                    at += -(-x.bytes // 128) * 128 * self.ws
        o.scratch = at
        o.scratch_bytes = self.scratch_bytes()
        merge = 0
        if o.split is not None:
            o.join, merge = start, self.merge_bytes(o.split)  # over the loop's tiles; others may be needed later
        o.shared = max(at + o.scratch_bytes * self.ws, start + merge)
        if o.shared > arch.shared:
            raise TooLarge(f"{o.shared} bytes of shared memory, {arch.name} has {arch.shared} for a block")
        o.registers = self.count_registers()
        if (
            o.registers > (480 if self.kind == "fragment" else arch.most_registers)
            or (o.registers + 24) * o.threads > 2 * arch.registers
        ):
            raise Crowded(f"about {o.registers} registers a thread for {o.threads} threads")
        need = o.registers + (72 if self.kind == "fragment" else VECTOR_REGISTERS)
        blocks = min(
            arch.shared_sm // (o.shared + 1024),
            arch.registers // (o.threads * min(255, max(32, -(-need // 8) * 8))),
            2048 // o.threads,
        )
        o.min_blocks = max(1, min(8, blocks))

    def hold(self) -> set[int]:
        """Decides which left operands stay in registers while a loop runs.  The result: tiles that nothing needs any more when the
        loop writes its own."""
        o, p = self.out, self.p
        loops = [s for s in walk(p.body) if isinstance(s, Loop)]
        inside = {x.out.id for s in loops for x in walk(s.body) if isinstance(x, Contract)}
        if self.arch.holds == "always":
            for n, c in o.contracts.items():
                fits = c.kind == "tensor" and c.left.where == "tile" and self.held_registers(n, c) <= 32
                if fits and n in inside and o.tiles[c.left.value.id].loop is None:
                    c.left.held = True
        if self.arch.stages > 1 or self.ws > 1 or len(loops) != 1:
            return set()
        kept = {c.left.value.id for n, c in o.contracts.items() if c.left.held and n in inside}
        read = {x.value.id for c in o.contracts.values() for x in (c.left, c.right) if x.where == "tile" and not x.held}
        return {vid for vid in kept - read if o.tiles[vid].loop is None and not o.instances.get(vid)}

    def held_registers(self, result: int, c: ContractPlan) -> int:
        row = self.out.home[result].row
        assert row is not None
        rows, _, inner = self.arch.fragment
        return c.steps * rows * inner // self.arch.warp // 2 * -(-row.padded // (rows * self.wr))

    def packable(self, t: TilePlan, dtype: str) -> bool:
        """May the tile be copied in chunks of 16 bytes, as far as can be known before the arrays are?"""
        chunk = 16 // DTYPES[dtype]
        index = t.load.index
        if not index:
            return False
        last = t.inner[-1]
        terms = dict(index[-1].terms)
        if terms.get(last) != 1 or any(last in ix.axes for ix in index[:-1]):
            return False
        if len(t.inner) > 1 and self.tile[last] % chunk:
            return False
        x = self.p.axes[last]
        if x.role != "whole" and self.tile[last] % chunk:  # not the axis' own tile: warps may share that
            return False
        if last in self.p.limits and self.p.limits[last].axes != (last,) and x.extent % chunk:
            return False
        if any(c % chunk for a, c in index[-1].terms if a != last) or index[-1].const % chunk:
            return False
        shape = self.p.buffer(t.load.buffer).shape
        lo, hi = index[-1].bounds(self.p.extents)
        # where the index leaves the array, chunks lie inside of it or outside as a whole
        starts = lo >= 0 or self.tile[last] % chunk == 0
        rest = Affine(shape[-1] - 1).plus(index[-1], -1)
        ends = hi < shape[-1] or (last in self.p.limits and implied(rest, self.p.limits[last]))
        return starts and (ends or shape[-1] % chunk == 0)

    def scratch_bytes(self) -> int:
        """For exchanges between warps and between layouts, one at a time."""
        width = 8 if self.precision.compute == "float64" else 4
        most = 0
        for s in walk(self.p.body):
            if isinstance(s, Reduce):
                frame = self.out.frames[s.out.id]
                reduced = set(self.live(s.axes))
                rows, columns = ((g.padded if g and not set(g.axes) & reduced else 1) for g in frame)
                across = math.prod(g.warps for g in frame if g and set(g.axes) & reduced)
                if across > 1:
                    most = max(most, across * rows * columns * width)
                home = self.out.home[s.out.id]
                if self.reduced(frame, reduced) != home:
                    most = max(most, *(g.size * width for g in home if g))
        for v, have in self.out.instances.items():
            if v in self.out.home and len(have) > 1:
                most = max([most, *(g.size * width for layout in have for g in layout if g)])
        return most

    def merge_bytes(self, loop: Loop) -> int:
        width = 8 if self.precision.compute == "float64" else 4
        total = 0
        for c in loop.carries:
            home = self.out.home[c.phi.id]
            total += self.ws * (home.row.size if home.row else 1) * (home.column.padded + 4 if home.column else 1) * width
        return total

    def cluster(self) -> int:
        """Blocks that share the tiles of a shared loop: each has the same results, one stores them."""
        want = self.p.choices.get("cluster", 1)
        if not isinstance(want, int) or want < 2 or self.out.split is None or not self.arch.joined:
            return 1
        if not self.arch.clusters_of(want) or self.p.axes[self.out.split.axis].trips < 2 * want:
            return 1
        return want

    def pieces(self) -> frozenset[int]:
        """What is loaded piece by piece where the one statement that reads it is printed.  Whole, it would take a register for each
        element: a compiler that may move loads up does not move what is made of them."""
        if self.kind != "vector":
            return frozenset()
        readers = readers_of(self.p)
        found = set()
        for v, s in self.defs.items():
            have = self.out.instances.get(v, ())
            if isinstance(s, Load) and v not in self.out.tiles and len(have) == 1 and len(readers.get(v, ())) == 1:
                g, by = have[0].column, readers[v][0]
                alone = isinstance(by, Map) and len(self.out.instances.get(by.out.id, ())) == 1
                if alone and g is not None and g.slots > g.run > 1:
                    found.add(v)
        return frozenset(found)

    def passing(self) -> frozenset[int]:
        """Elementwise results that one statement reads, itself elementwise or a reduction: they are made element by element for it."""
        if self.kind != "vector":
            return frozenset()
        readers = readers_of(self.p)
        maps = [s.out.id for s in walk(self.p.body) if isinstance(s, Map)]
        return frozenset(
            v for v in maps if len(set(map(id, readers.get(v, ())))) == 1 and isinstance(readers[v][0], Map | Reduce)
        )

    def count_registers(self) -> int:
        """Registers alive at once at the worst place, in 32-bit words."""
        width = 2 if self.precision.compute == "float64" else 1
        inline = {s.out.id for s in walk(self.p.body) if isinstance(s, Const | Iota | Mask)}
        passing, pieces = self.passing(), self.out.pieces
        made = {s.out.id: s for s in walk(self.p.body) if isinstance(s, Map)}

        def slots(v: int) -> int:
            if v in inline or v in passing:
                return 0
            if v in pieces:
                (g,) = (x.column for x in self.out.instances[v])
                assert g is not None
                return width * g.run
            return width * sum(x.slots for x in self.out.instances.get(v, ()))

        def sources(values: set[int]) -> set[int]:
            """Of what passes, what it is made of."""
            out: set[int] = set()
            for v in values:
                out |= sources({a.id for a in made[v].args}) if v in passing else {v}
            return out

        def peak(body: tuple[Stmt, ...], after: set[int]) -> int:
            alive, worst = set(after), 0
            for s in reversed(body):
                if isinstance(s, Loop):
                    inside = (
                        alive | {c.next.id for c in s.carries} | {v for x in walk(s.body) for v in (o.id for o in operands(x))}
                    )
                    made = {v.id for x in walk(s.body) for v in results(x)} | {v.id for c in s.carries for v in (c.phi, c.out)}
                    through = {v for v in inside if v not in made}
                    worst = max(worst, peak(s.body, through | {c.next.id for c in s.carries}))
                    alive = (
                        (alive - {c.out.id for c in s.carries})
                        | (through - {c.next.id for c in s.carries})
                        | {c.init.id for c in s.carries}
                    )
                    continue
                used = sources({v.id for v in operands(s)})
                if isinstance(s, Map) and s.out.id in passing:
                    continue
                if isinstance(s, Map) and any(a not in alive and slots(a) == slots(s.out.id) for a in used):
                    alive.discard(s.out.id)  # in place
                if isinstance(s, Contract | Reduce) and s.acc and s.acc.id not in alive:
                    alive.discard(s.out.id)
                worst = max(worst, sum(map(slots, alive | used)))
                if not isinstance(s, Store):
                    alive.discard(s.out.id)
                alive |= used
            return worst

        held = sum(self.held_registers(n, c) for n, c in self.out.contracts.items() if c.left.held)
        return peak(live(self.p.body, set()), set()) + held
