"""Price of a kernel as a pipeline of warpgroups (codegen/hopper): one warp copies tiles, warpgroups of 64 rows multiply them.

One block to a multiprocessor takes one tile of work after the other.  Where products read what others gave, an iteration of one
warpgroup is a chain: its products, then its elementwise work.  Others work on theirs meanwhile, so a block takes as long as its dearest
unit or as one warpgroup's chain, whichever is longer, and somewhat more where the two are alike.  Else one warpgroup's elementwise
work runs beside another's products, and the dearest unit nearly hides the others."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from ..codegen.hopper import planner
from ..codegen.hopper.pipeline import ROWS
from ..codegen.tile import Contract, Gather, Load, Loop, Map, Reduce, Store, TileProgram, Value, walk
from ..program import DTYPES
from . import walk as W
from .base import Array, Sizes
from .block import HALF, Block
from .machines import Gpu

STAGES = (2, 3, 4, 6)
STEP = 0.2e-6  # of one iteration: barriers, a turn, and what products and elementwise work take to begin and to end
BESIDE = 2048  # bytes of shared memory that the planner leaves to barriers
START = 1.4e-6  # first copies and the end of a tile of work, where they run beside nothing
# … where they run beside another warpgroup's products, and copies beside the tile before.  Fitted to the pipelines that are recorded, and
# the same without any one of the programs (`python benches/h200.py fit --anew` has the figures); up to 1 µs ranks them alike.
PASSING = 0.05e-6
# … for each load that elementwise work does itself, for want of a copy that brought it: a norm of keys multiplied into scores is measured
# 0.4 µs dearer in an iteration of 1.5 (qknorm in benches/results/2026-11-30_h200_programs_4.json)
DIRECT = 0.4e-6
UNEVEN = 0.4  # of a tile of work, by which blocks with tiles of different lengths end after each other
# Where two blocks share a multiprocessor a tile takes so many times as long, and each iteration so much longer: 34 variants at n = 512 and
# 1024 (benches/results/2026-11-30_h200_together.json)
TOGETHER, TOGETHER_STEP = 1.02, 0.2e-6
APART = 0.6e-6  # of one iteration with nothing beside it: it waits for early products, then for elementwise work, then for late products
# With three warpgroups it takes so many times as long, and begins and ends so much later: fitted to 119 variants of tiles and pivots
# (benches/results/2026-11-30_h200_tiles.json, and the gradient in 2026-11-30_h200_variants_2.json).  Special functions, which have a unit
# to themselves, half as much: where they bound a block (a softcap), rows of 192 are measured 6 % faster.
CROWDED, LATER = 1.12, 0.5e-6
CROWDED_SPECIAL = 1.06
FEW_STAGES = {2: 0.04, 3: 0.015}  # so much longer with fewer than four: of two, one is read and only the other is on its way
ALIKE = 6.0  # power mean of what limits a block: where two are alike, neither is reached


@dataclass(frozen=True)
class Form:
    """What does not depend on sizes.  units: products of matrices; products: (row axes, column axes, summed axes) of each; computed: those
    whose left operand is; staged, fixed: loads of tiles, in the loop and before it; sources: of those in the loop the ones that left
    operands are made of.  direct: how many others elementwise work reads anew in each iteration.  chained: do some products read what
    others gave, or what is made of loaded tiles?"""

    loop: Loop
    units: tuple[Contract, ...]
    products: tuple[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...]
    computed: tuple[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...]
    staged: tuple[Load, ...]
    fixed: tuple[Load, ...]
    sources: tuple[Load, ...]
    direct: int
    chained: bool
    batch: tuple[str, ...]
    carried: frozenset[tuple[tuple[str, ...], tuple[str, ...]]]  # (row axes, column axes) of what is carried


def form(program: TileProgram, block: Block) -> Form | None:
    """None if the program has no such form whatever its tiles are."""
    loops = [s for s in program.statements if isinstance(s, Loop)]
    if len(loops) != 1 or program.compute_dtype != "float32" or program.wide:
        return None
    outputs = [b.dtype for b in program.writes if b.kind == "output"]
    if any(d in ("float32", "float64") for d in outputs) or not any(b.dtype in HALF for b in (*program.reads, *program.writes)):
        return None
    (loop,) = loops
    inside = {id(s) for s in walk(loop.body)}
    contracts = [s for s in program.statements if isinstance(s, Contract)]
    units = [s for s in contracts if id(s) in block.units]
    if not units or any(id(s) not in inside for s in units) or any(isinstance(s, Store) for s in loop.body):
        return None
    loads = {s.out.id: s for s in program.statements if isinstance(s, Load)}
    made = {s.out.id for s in program.statements if not isinstance(s, Load | Store | Loop)}
    if any(isinstance(s, Gather) and id(s) in inside for s in program.statements):
        return None
    nexts = {c.next.id for c in loop.carries}
    computed = {s.out.id for s in loop.body if isinstance(s, Contract | Reduce)}  # and what is made of them
    computed |= {c.out.id for c in loop.carries}
    for s in program.body:
        if isinstance(s, Map) and any(v.id in computed for v in s.args):
            computed.add(s.out.id)
    for s in loop.body:
        if not isinstance(s, Loop | Store | Load) and any(v.id in computed for v in _operands(s)):
            computed.add(s.out.id)
    products = []
    lefts: dict[int, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {}
    chained = False
    carried: set[tuple[tuple[str, ...], tuple[str, ...]]] = set()
    tiles: dict[int, Load] = {}
    sources: dict[int, Load] = {}
    plain = False  # is there a product of another kind?
    for s in units:
        p = W.Product.of(s)
        a, b = s.a.id in made, s.b.id in made
        if a and b:
            return None
        own = [v for v in (s.a, s.b) if v.id in made and v.id not in computed]  # made of what is loaded
        for v in own:
            found = _loaded(v, program, loads, inside)
            if not found:
                return None
            sources |= found
        plain = plain or not own
        if (a or b) and s.out.id not in nexts:
            return None
        chained = chained or a or b
        left = s.a.id if a else s.b.id
        rows, cols = (p.rows, p.cols) if not b else (p.cols, p.rows)
        products.append((tuple(sorted(rows)), tuple(sorted(cols)), tuple(sorted(p.inner))))
        if a or b:
            lefts[left] = products[-1]
        if s.out.id in nexts:
            carried.add(products[-1][:2])
        for v in (s.a, s.b):
            if v.id in loads:
                if loads[v.id].out.id != v.id or program.buffer(loads[v.id].buffer).dtype not in HALF:
                    return None
                tiles[v.id] = loads[v.id]
    if not chained:  # columns are what results are reduced along, or what is contiguous in them
        results = {a for r, c, _ in products for a in (*r, *c)}
        wide = {a for s in program.statements if isinstance(s, Reduce) and s.arg.id in computed for a in s.axes} & results
        if not wide:
            wide = {a for s in program.statements if isinstance(s, Store) and s.index for a, c in s.index[-1].terms if c == 1}
        products = [(c, r, k) if set(r) & wide and not set(c) & wide else (r, c, k) for r, c, k in products]
        if carried and len(loop.body) != len(units) + sum(isinstance(s, Load) for s in loop.body):
            return None  # elementwise work between products of loaded tiles
    rows = next((r for r, _, _ in lefts.values()), products[0][0])  # those of products that read what others gave
    products = [(r, c, k) if r == rows else (c, r, k) for r, c, k in products]
    carried = {(r, c) if r == rows else (c, r) for r, c in carried}
    if any(r != rows for r, _, _ in products):
        return None
    readers: dict[int, int] = {}
    for s in program.statements:
        for v in _operands(s):
            readers[v.id] = readers.get(v.id, 0) + (not isinstance(s, Contract) or id(s) not in block.units)
    if any(readers.get(v) for v in tiles) or (sources and plain):
        return None  # read by element, too
    tiles = {**sources, **tiles}
    staged = tuple(t for t in tiles.values() if id(t) in inside)
    fixed = tuple(t for t in tiles.values() if id(t) not in inside)
    batch = tuple(sorted({a for s in units for a in W.Product.of(s).batch}))
    return Form(
        loop,
        tuple(units),
        tuple(products),
        tuple(lefts.values()),
        staged,
        fixed,
        tuple(sources.values()),
        sum(isinstance(s, Load) and s.out.id not in tiles and loop.axis in s.out.axes for s in loop.body),
        chained,
        batch,
        frozenset(carried),
    )


def _loaded(v: Value, program: TileProgram, loads: dict[int, Load], inside: set[int]) -> dict[int, Load]:
    """The tiles that an elementwise value is made of, if a loop's copies can bring them: as many axes, in 16 bits, in the loop."""
    made = {s.out.id: s for s in walk(program.body) if isinstance(s, Map)}
    out: dict[int, Load] = {}
    todo = [v]
    while todo:
        u = todo.pop()
        if u.id in made:
            todo.extend(made[u.id].args)
        elif u.id in loads and set(u.axes) == set(v.axes):
            s = loads[u.id]
            if id(s) not in inside or program.buffer(s.buffer).dtype not in HALF:
                return {}
            out[u.id] = s
    return out


def _shared_bytes(f: Form, sizes: Sizes, b: Block) -> Array:
    """What a block's copies write to shared memory and its products read from there: each warpgroup all of the right operand, and a
    left one that is not in registers."""
    out = b.l2 + np.zeros(1)
    for s, (r, c, k) in zip(f.units, f.products):
        rows, cols, inner = (sizes.elements(x) for x in (r, c, k))
        left = 0.0 if (r, c, k) in f.computed else rows * inner
        out = out + 2.0 * b.runs(s) * (left + rows / ROWS * cols * inner)
    for t in f.sources:
        out = out + 2.0 * b.runs(t) * sizes.elements(t.out.axes)
    return out


def _operands(s: object) -> tuple[Value, ...]:
    from ..codegen.tile import operands

    return operands(s)  # type: ignore[arg-type]


def fits(f: Form, sizes: Sizes) -> Array:
    """Points whose tiles suit the matrix instructions and the boxes that are copied."""
    tile = sizes.tile
    rows = sizes.elements(f.products[0][0])
    ok = (rows == ROWS) | (rows == 2 * ROWS) | (rows == 3 * ROWS)
    for _, c, k in f.products:
        n, inner = sizes.elements(c), sizes.elements(k)
        ok = ok & (n % 8 == 0) & (n <= 256) & (inner % 16 == 0)
    for a in f.batch:
        ok = ok & (tile[a] == 1)
    for t in (*f.staged, *f.fixed):
        last = _last(t)
        if last not in t.out.axes:
            return np.zeros(1, bool)
        outer = sizes.elements(tuple(a for a in t.out.axes if a != last))
        ok = ok & (outer <= 256) & (outer % 8 == 0)
    return ok


def _last(t: Load) -> str | None:
    """The axis along which a tile is contiguous in memory."""
    return t.index[-1].axes[-1] if t.index and t.index[-1].axes else None


def _longest(f: Form, sizes: Sizes) -> Array:
    """The share of the loop's tiles that the longest tile of work goes through: what two conditions leave between them, if the loop has
    such, in whole tiles on either side."""
    a = f.loop.axis
    out = np.ones(1)
    for c, d in itertools.combinations(f.loop.constraints, 2):
        between, step = c.plus(d), abs(dict(c.terms).get(a, 0))
        if step and not between.terms:
            spread = sum(abs(k) * sizes.tile[x] for x, k in c.terms if x in sizes.tile)
            out = np.minimum(out, ((between.const + spread) / step + sizes.tile[a]) / sizes.extent[a])
    return out


def price(
    f: Form, program: TileProgram, sizes: Sizes, b: Block, blocks: Array, alive: Array, m: Gpu
) -> list[tuple[int, int, int, Array, dict]]:
    """(warpgroups, blocks together, stages, seconds at every point, parts) for each way to run it."""
    good_tiles = fits(f, sizes)
    if not good_tiles.any():
        return []
    one = np.ones(sizes.points)
    rows = f.products[0][0]
    ok_tiles = (one > 0) & good_tiles
    tile = {a: one * sizes.tile[a] for a in program.axes}
    m_rows = one * sizes.elements(rows)
    # 32-bit words in registers: sums, results that the iteration reads, left operands, rounded
    sums, scores, operands = (
        sum((sizes.elements(r) * sizes.elements(x) for r, x in axes), 0.0 * one)
        for axes in (
            [(r, c) for r, c, _ in f.products if (r, c) in f.carried],
            [(r, c) for r, c, _ in f.products if (r, c) not in f.carried],
            [(r, k) for r, _, k in f.computed],
        )
    )
    if f.sources:  # they are there in full, and rounded
        operands = operands * (1.0 + 2.0 * len(f.sources))
    both = sums + scores + operands / 2.0
    held = np.minimum(both, sums + np.maximum(scores, operands / 2.0))
    several = len([0 for r, c, _ in f.products if (r, c) not in f.carried]) > 1
    shared = _shared_bytes(f, sizes, b)
    panel: dict[int, Array] = {}
    for t in (*f.staged, *f.fixed):
        axes = t.out.axes
        last = _last(t)
        columns = np.ceil(tile[last] / 64.0) * 64.0  # type: ignore[index]
        outer = one * sizes.elements(tuple(a for a in axes if a != last))
        panel[t.out.id] = outer * columns * DTYPES[program.buffer(t.buffer).dtype]
    staged = sum((panel[t.out.id] for t in f.staged), 0.0 * one)
    fixed = sum((panel[t.out.id] for t in f.fixed), 0.0 * one)
    trips = one * sizes.trips(f.loop.axis) * alive
    l2 = b.l2 / (1.4 * m.l2)  # whole boxes move better
    work = [b.tensor / m.wgmma, b.special / m.special, b.ops / m.ops, l2, shared / m.shared]
    time = np.broadcast_arrays(*[x * m.sms + 0.0 * one for x in work])
    most = np.maximum.reduce(time[:4])
    rest = time[1] + time[2] + time[0] - np.maximum.reduce(time[:3])
    longest = np.maximum(_longest(f, sizes), alive)
    out: list[tuple[int, int, int, Array, dict]] = []
    for groups, together in ((1, 1), (1, 2), (2, 1), (3, 1)):
        room = planner.ROOM[groups]
        apart = both / (128 * groups) > room[several]  # no room for two iterations at a time
        registers = np.where(apart, held, both) / (128 * groups)
        ok = ok_tiles & (m_rows == ROWS * groups) & (registers <= np.where(apart, room[2], room[several]))
        if together > 1:
            ok = ok & (blocks > m.sms) & f.chained
        if not bool(np.any(ok)):
            continue
        if f.chained:
            chain = sum(time[:3]) / groups + (np.where(apart, APART, STEP) + DIRECT * f.direct + TOGETHER_STEP * (together > 1)) * trips
            units = [*(together * x for x in time), chain]
            if groups > 2:
                tensor, special, *others = units
                units = [CROWDED * tensor, CROWDED_SPECIAL * special, *(CROWDED * x for x in others)]
            each = sum(x**ALIKE for x in units) ** (1.0 / ALIKE)
            each = each + (PASSING if groups > 1 or together > 1 else START) + (LATER if groups > 2 else 0.0)
        else:
            each = most + (m.beside if groups > 1 else 0.6) * rest + trips * STEP / 8 + START
        each = each * (TOGETHER if together > 1 else 1.0)
        slots = m.sms * together
        per_slot = np.where(alive < 1, np.maximum(blocks / slots + UNEVEN / together, 1.0), np.ceil(blocks / slots))
        if together == 1:
            per_slot = np.where((alive < 1) & (blocks <= slots), longest / alive, per_slot)
        per_sm = per_slot * together
        for stages in STAGES:
            used = fixed + staged * stages + BESIDE
            most_used = min(m.shared_block, m.shared_sm // together - 1024)
            good = ok & (used <= most_used) & (stages <= np.maximum(trips, 2))
            pull = np.minimum(m.pull * 1.2, together * np.maximum(staged * (stages - 0.5), 2048.0) / m.latency)
            rate = ((np.minimum(blocks, m.sms) * pull) ** -4.0 + m.dram**-4.0) ** -0.25  # near the bend there is less than either
            memory = b.dram / rate + m.block + per_sm * trips * STEP / 16
            slow = 1.0 + (FEW_STAGES.get(stages, 0.0) if f.chained else 0.03 * (4 - min(stages, 4)))
            seconds = np.where(good, m.launch + np.maximum(per_slot * each * slow + 1.5e-6, memory), np.inf)
            names = ("tensor", "special", "ops", "l2", "shared")
            parts = {n: per_sm * x for n, x in zip(names, time)} | {"dram": memory + 0 * one, "launch": np.full(1, m.launch)}
            parts |= {"registers": registers + planner.BESIDE, "shared bytes": used, "resident": together * one}
            parts |= {"blocks": blocks + 0 * one, "warps": 4.0 * groups * one}
            out.append((groups, together, stages, seconds, parts))
    return out
