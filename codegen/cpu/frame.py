"""What steps run on: a tile program with all that is known before it runs, the memory of one worker, ranges of tiles."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...terms import Affine
from ..tile import Loop, TileProgram
from .contract import Step
from .layout import Format, Layout


@dataclass
class Plan:
    """A tile program with everything that is known before it runs."""

    program: TileProgram
    formats: tuple[Format, ...]
    layout: Layout
    loose: tuple[Affine, ...]  # limits that clipping does not express
    clips: tuple[tuple[str, Affine], ...]  # axis, its limit: clipped where a tile of the axis is chosen
    buffers: dict[str, int] = field(default_factory=dict)


class Frame:
    """What one worker needs for one tile program: scratch memory, positions, registers, steps already bound."""

    def __init__(self, plan: Plan, arena: np.ndarray):
        self.arena, self.address = arena, int(arena.ctypes.data)
        self.position = dict.fromkeys(plan.program.axes, 0)
        self.registers: list[Any] = []
        self.windows: list[np.ndarray] = []
        self.full: dict[int, bool] = {}  # mask → holds on the whole tile
        self.drawn: dict[int, object] = {}  # mask → the tile whose mask lies in its slot
        self.scopes: dict[tuple[int, ...], list[Step]] = {}


def span(ix: Affine, position: dict[str, int], length: dict[str, int], extents: dict[str, int], but: str = "") -> tuple[int, int]:
    """Least and greatest value over a tile; axes that have no tile here range over all of theirs."""
    lo = hi = ix.const
    for a, c in ix.terms:
        if a == but:
            continue
        first, n = (position[a], length[a]) if a in length else (0, extents[a])
        x, y = c * first, c * (first + max(n, 1) - 1)
        lo += min(x, y)
        hi += max(x, y)
    return lo, hi


def clip(axis: str, ix: Affine, upto: int, position: dict[str, int]) -> int:
    """The end of the axis under a limit: the first position at which the affine expression is negative."""
    c = dict(ix.terms)[axis]
    rest = ix.const + sum(k * position[a] for a, k in ix.terms if a != axis)
    return max(0, min(upto, rest // -c + 1)) if c < 0 else upto


def live_range(s: Loop, plan: Plan, position: dict[str, int], length: dict[str, int], extents: dict[str, int]) -> tuple[int, int]:
    """Where the loop's axis begins and ends for the tiles chosen around it: what exists and may contribute anything, or a part of what
    exists."""
    first, end = 0, plan.program.axes[s.axis].extent
    for a, ix in plan.clips:
        if a == s.axis:
            end = clip(a, ix, end, position)
    exists = end
    for ix in s.constraints:
        top, k = span(ix, position, length, extents, s.axis)[1], dict(ix.terms).get(s.axis, 0)
        if k > 0:
            first = max(first, -(top // k))
        elif k < 0:
            end = min(end, top // -k + 1)
        elif top < 0:
            end = 0
    if end <= first and s.constraints and exists > 0:
        first = min(first, exists - 1)
        end = first + 1
    return first, max(first, end)
