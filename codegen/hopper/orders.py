"""In which order blocks take a kernel's tiles: what each order comes to, found from how long the tiles are.

Everything is in iterations of the kernel's loop."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...program import DTYPES
from ...terms import Affine
from ..cuda.layout import Unsupported
from ..tile import Load, Loop, TileProgram

ORDERS = ("dynamic", "static", "folded", "grid")
END = 1.2  # what a tile takes beside its iterations: no products run beside the first one's elementwise work, nor beside the last part
COUNTER = 0.33  # a trip to the counter in memory that nothing hides: a block's last one
DRIFT = 0.02  # of their time by which blocks with the same work differ: a counter makes up for it, a fixed order cannot
CACHE = 36_000_000  # bytes of the second-level cache that the loops of the tiles under way may fill
MOST_TILES = 1 << 14  # beyond, no order leaves blocks with nothing to do for long


@dataclass(frozen=True)
class Traversal:
    """In which order a kernel's tiles are taken: `group` positions of the fast axes at a time, and for those all of the slow axes', so
    that what tiles share stays in the second-level cache.  Of each axis: its name, and whether it runs backwards."""

    slow: tuple[tuple[str, bool], ...]
    fast: tuple[tuple[str, bool], ...]
    group: int


def starts(p: TileProgram, order: Traversal) -> dict[str, np.ndarray]:
    """Where the tile of each work number begins along each grid axis."""
    trips = {a: p.axes[a].trips for a in p.grid}
    slow, fast = (math.prod(trips[a] for a, _ in axes) for axes in (order.slow, order.fast))
    group = min(order.group, fast)
    work = np.arange(slow * fast)
    g, rest = work // (group * slow), work % (group * slow)
    some = np.minimum(group, fast - g * group)
    out = {a: np.zeros_like(work) for a in p.grid}
    for axes, at in ((order.slow, rest // some), (order.fast, g * group + rest % some)):
        for a, reverse in reversed(axes):
            place = at % trips[a]
            out[a] = (trips[a] - 1 - place if reverse else place) * p.axes[a].tile
            at = at // trips[a]
    return out


def lengths(p: TileProgram, loop: Loop, order: Traversal) -> np.ndarray:
    """Iterations of each work number's tile: those in which something is neither masked nor past an end, and at least one."""
    a, axis = loop.axis, p.axes[loop.axis]
    start = starts(p, order)
    first, end = np.zeros(len(next(iter(start.values()), [0])), int), axis.trips

    def highest(ix: Affine) -> np.ndarray:
        value = np.full_like(first, ix.const)
        for x, c in ix.terms:
            spread = (p.axes[x].tile if x in p.axes else p.extents[x]) - 1
            value = value + c * start.get(x, 0) + max(c * spread, 0)
        return value

    ends = [x for of, x in p.limits.items() if a in x.axes and (of == a or of in p.axes)]
    last = np.full_like(first, end)
    for c in (*loop.constraints, *ends):
        step = dict(c.terms).get(a, 0)
        high = highest(c.plus(Affine(0, ((a, step),)), -1))
        if step < 0:
            last = np.minimum(last, high // (-step * axis.tile) + 1)
        elif step > 0:
            first = np.maximum(first, -((high + step * (axis.tile - 1)) // (step * axis.tile)))
        else:
            last = np.where(high >= 0, last, 0)
    return np.maximum(last - first, 1)


def makespan(order: str, tiles: Sequence[int] | np.ndarray, blocks: int, ahead: int = 2) -> float:
    """When the last block ends, in iterations.  ahead: how many of them a block still has before it when it asks for its next tile."""
    cost = np.asarray(tiles, float) + END
    if order in ("static", "folded"):
        padded = np.zeros(-(-len(cost) // blocks) * blocks)
        padded[: len(cost)] = cost
        rows = padded.reshape(-1, blocks)
        if order == "folded":
            rows[1::2] = rows[1::2, ::-1]
        return float(rows.sum(0).max()) * (1 + DRIFT)
    ends = cost[:blocks].tolist()
    asks = [(max(t - ahead, 0.0), n, t) for n, t in enumerate(ends)]
    heapq.heapify(asks)
    for x in cost[blocks:].tolist():
        _, n, t = heapq.heappop(asks)
        ends[n] = t + x
        heapq.heappush(asks, (max(t, ends[n] - ahead), n, ends[n]))
    return max(ends) + COUNTER


def makespans(tiles: np.ndarray, blocks: int, ahead: int, together: int = 1) -> Mapping[str, float]:
    """Of the orders that a kernel whose blocks stay may have.  Where blocks have one tile each, none matters, but for those that share a
    multiprocessor: what they take they take of each other's time."""
    if len(tiles) <= blocks:
        if len(tiles) <= blocks // together:
            return {"static": float(tiles.max()) + END}
        return {order: makespan(order, tiles, blocks // together) for order in ("static", "folded")}
    if len(tiles) > MOST_TILES:
        return {"dynamic": float(tiles.sum() + END * len(tiles)) / blocks}
    return {order: makespan(order, tiles, blocks, ahead) for order in ("static", "folded", "dynamic")}


def best_order(p: TileProgram, loop: Loop, order: Traversal, tiles: int, stages: int, multiprocessors: int, together: int) -> str:
    """The one with which the last block ends first, of equals the plainest.  together: blocks on a multiprocessor."""
    want = p.choices.get("order")
    if want is not None:
        if want not in ORDERS:
            raise Unsupported(f"order {want}, not one of {', '.join(ORDERS)}")
        return str(want)
    ends = makespans(lengths(p, loop, order), multiprocessors * together, stages, together)
    return min(ends, key=ends.__getitem__)


def traversal_of(p: TileProgram, loop: Loop, multiprocessors: int) -> Traversal:
    """Tiles with the longest loops first; as many positions of the other axes at a time as the cache holds what their loops read.
    Where nothing bounds the loop and two axes share what it reads, blocks at one time form a square."""
    axes = p.axes
    grid = [a for a in p.grid if axes[a].trips > 1]
    backwards: dict[str, bool] = {}
    for c in loop.constraints:
        terms = dict(c.terms)
        for a in grid:
            if a in terms and loop.axis in terms:  # of several constraints one that lets loops grow decides
                backwards[a] = backwards.get(a, False) or terms[loop.axis] < 0 < terms[a]
    reads = [s for s in loop.body if isinstance(s, Load) and loop.axis in s.out.axes]
    depends = {a: [s for s in reads if a in s.out.axes] for a in grid}

    def bytes_of(s: Load, fixed: Iterable[str]) -> int:
        n = DTYPES[p.buffer(s.buffer).dtype]
        for a in s.out.axes:
            n *= 1 if a in fixed and a in grid else axes[a].tile if a in grid else axes[a].extent
        return n

    want = p.choices.get("group")
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
            group = max(1, round((multiprocessors * two / one) ** 0.5))
            rest = [a for a in grid if a not in apart]
            if rest:  # batches, one after the other
                slow, fast, group = [], sorted(grid, key=lambda a: (a not in rest, grid.index(a))), 1
        else:
            slow, fast, group = [], sorted(grid, key=lambda a: (-len(depends[a]), grid.index(a))), 1
    group = want if isinstance(want, int) else group
    return Traversal(
        tuple((a, backwards.get(a, False)) for a in slow), tuple((a, backwards.get(a, False)) for a in fast), max(1, group)
    )
