"""How a tile lies in the registers of a block: which axes run along the rows of a fragment, and which along its columns.

A *group* is a set of axes laid out together, flattened row-major, on the row or the column side.  A value's layout is a row group and
a column group (each may be missing: the value is then repeated over that side), so an element's place is a pair (row slot,
column slot) in a lane of a warp, and broadcasting needs no code.  `infer_sides` finds for every tile which of its axes are rows: it
follows from the contractions (a left operand that is computed in registers has the summed axes as its columns, a result the left
operand's axes as its rows), from elementwise maps (equal places) and, where nothing else decides, from memory (contiguous axes are
columns).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ...errors import PlanError
from .arch import Arch

ROW, COLUMN = "row", "column"


class Unsupported(PlanError):
    """This lowering cannot express the tile program; the message says why.  Another one may."""


class Entangled(Unsupported):
    """… for the sides on which its axes lie; they depend on its tiles, but not on how many warps share those."""


class Torn(Entangled):
    """… for an axis that lies on one side of a value and goes with another one on its other side."""


class TooLarge(Unsupported):
    """… with tiles of this size; with smaller ones it may."""


class Crowded(TooLarge):
    """… in the registers of this many threads; more rows, which more warps take, may have room as well."""


@dataclass(frozen=True)
class Group:
    """Axes flattened row-major on one side, spread over `warps` warps.

    slots: places of one thread.  padded: places of all threads (≥ size).  run: adjacent elements in adjacent slots.
    kind: "fragment" (a matrix instruction's layout) or "vector" (columns: runs side by side over lanes; rows: whole rows to a warp).
    """

    axes: tuple[str, ...]
    extents: tuple[int, ...]
    side: str
    kind: str
    warps: int
    slots: int
    padded: int
    run: int

    @property
    def size(self) -> int:
        return math.prod(self.extents)

    @property
    def name(self) -> str:
        return "_".join(self.axes) or "one"


def fragment_group(axes: tuple[str, ...], extents: tuple[int, ...], side: str, warps: int, arch: Arch) -> Group:
    step = arch.fragment[0 if side == ROW else 1]
    per = arch.row_slots if side == ROW else arch.column_slots
    tiles = -(-math.prod(extents) // (step * warps))
    if warps > 1 and side == ROW:  # a warp's first chunk and its steps from there share no bits (Tile::step)
        tiles = 1 << (tiles - 1).bit_length()
    return Group(
        axes, extents, side, "fragment", warps, tiles * per, tiles * step * warps, arch.column_run if side == COLUMN else 1
    )


def vector_group(axes: tuple[str, ...], extents: tuple[int, ...], side: str, warps: int, run: int, arch: Arch) -> Group:
    size = math.prod(extents)
    if side == ROW:
        slots = -(-size // warps)
        return Group(axes, extents, side, "vector", warps, slots, slots * warps, 1)
    span = run * arch.warp * warps
    n = -(-size // span)
    return Group(axes, extents, side, "vector", warps, n * run, n * span, run)


class Layout(NamedTuple):
    row: Group | None
    column: Group | None

    @property
    def slots(self) -> int:
        return (self.row.slots if self.row else 1) * (self.column.slots if self.column else 1)

    def restricted(self, axes: Iterable[str]) -> Layout:
        """The layout of a value with these axes that is read beside one in this layout."""
        axes = set(axes)
        return Layout(
            self.row if self.row and axes & set(self.row.axes) else None,
            self.column if self.column and axes & set(self.column.axes) else None,
        )


class Sides:
    """Union-find over (owner, axis) places, with a side for each class."""

    def __init__(self) -> None:
        self.parent: dict[object, object] = {}
        self.side: dict[object, str] = {}

    def find(self, x: object) -> object:
        self.parent.setdefault(x, x)
        while self.parent[x] != x:
            self.parent[x] = self.parent[self.parent[x]]
            x = self.parent[x]
        return x

    def get(self, x: object) -> str | None:
        return self.side.get(self.find(x))

    def tie(self, x: object, y: object) -> bool:
        """False (and nothing happens) if they are on different sides already."""
        x, y = self.find(x), self.find(y)
        if x == y:
            return True
        a, b = self.side.get(x), self.side.get(y)
        if a and b and a != b:
            return False
        self.parent[x] = y
        if a:
            self.side[y] = a
        return True

    def put(self, x: object, side: str) -> bool:
        x = self.find(x)
        return self.side.setdefault(x, side) == side
