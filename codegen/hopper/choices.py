"""Schedule choices of a kernel as a pipeline of warpgroups, said in full."""

from __future__ import annotations

from collections.abc import Mapping

from .pipeline import Pipeline


def choices_of(pipe: Pipeline) -> dict[str, object]:
    """What the schedule came to: each may be given in a kernel's `choices` to have it otherwise.

    warpgroups  of 64 rows each, that compute
    stages      tiles of a loop that lie in shared memory
    overlap     one iteration's elementwise work runs beside other products
    ahead       the next tile's tiles from outside the loop come before this one has ended (where blocks have several)
    turns       warpgroups take turns in issuing products
    peek        all of an iteration's elementwise work but the rounding of operands runs beside late products, and so does the wait for
                the tiles of the next ones (else what makes operands comes after them)
    split       (with peek) so many steps of late products are issued first, the others after the elementwise work that makes no operands
                (0: all at once): an instruction with an operand in registers holds its warps up until the unit has taken those before
    chain       the next tile's first products are issued before this tile ends
    order       "dynamic" (a counter in memory), "static" (every n-th tile of n blocks), "folded" (n at a time, to and fro: who had the
                longest has the shortest next, or shares a multiprocessor with who has it), "grid" (a block a tile)
    together    blocks of one warpgroup that a multiprocessor holds at the same time: one or two
    cluster     blocks at neighbouring tiles that copy for one another what all of them read; they take tiles together, and not from
                a counter
    hold        results are rounded at the end of a tile, and stored beside the first products of the next (where registers allow)
    group       places of the fast grid axes that are worked on together
    pivot       "running", "lazy" (moves only when a weight would exceed 2⁸), "frozen" (after the first tiles; checked at the end)
    sums        of weights that products take rounded: "matrix" (of the rounded ones, as a product with ones) or "registers" (at
                edges of the loop's range of the rounded ones)
    """
    s = pipe.schedule
    out: dict[str, object] = {"warpgroups": pipe.consumers, "stages": max((t.stages for t in s.tiles.values()), default=1)}
    if any(t.loop is None for t in s.tiles.values()):
        out["ahead"] = any(t.loop is None and t.stages > 1 for t in s.tiles.values())
    if pipe.parts.early:
        out |= {"overlap": pipe.overlap, "turns": pipe.turns, "peek": pipe.peek, "split": pipe.split, "chain": pipe.chain}
    if pipe.hold:
        out["hold"] = True
    out["order"] = pipe.order
    if pipe.together > 1:
        out["together"] = pipe.together
    if pipe.cluster > 1:
        out["cluster"] = pipe.cluster
    if pipe.traversal.slow:
        out["group"] = pipe.traversal.group
    if pipe.pivots.candidates:
        out["pivot"] = pipe.pivot
    if s.sums:
        out["sums"] = "matrix" if any(x.by_matrix for x in s.sums.values()) else "registers"
    return out


# what a schedule does without, if its code needs more registers than there are: what costs least first
_RELAXATIONS: tuple[dict[str, object], ...] = (
    {"hold": False},
    {"split": 0},
    {"peek": False},
    {"pivot": "lazy"},  # of "frozen": one copy of the loop
    {"chain": False},
    {"overlap": False, "turns": False},
)


def relaxed(choices: Mapping[str, object]) -> list[dict[str, object]]:
    """Schedules that need fewer registers than these choices in full, each simpler than the one before.  The last one is no pipeline:
    the general lowering in as many warps."""
    out: list[dict[str, object]] = []
    now = dict(choices)
    for step in _RELAXATIONS:
        change = {n: v for n, v in step.items() if (now.get(n) == "frozen" if n == "pivot" else now.get(n))}
        if change:
            now = now | change
            out.append(now)
    return [*out, {"warps": 4 * int(str(now["warpgroups"]))}]
