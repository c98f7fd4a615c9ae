"""Tensor maps: which tiles can be copied as boxes, and what the driver must know for it.

A tile lies in panels of 64 columns; a map copies one at a time.  What no map can copy raises `Unsupported`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ...extraction.plan import Buffer
from ...program import DTYPES
from ...runtime.module import TensorMap
from ...terms import Affine
from ..cuda.layout import TooLarge, Unsupported
from ..cuda.schedule import TilePlan
from ..tile import TileProgram

PANEL = 64  # columns of a panel


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
        return 2 * self.panels * math.prod(self.box)


def box_of(p: TileProgram, t: TilePlan, tile: Mapping[str, int]) -> Box:
    """How a loaded tile is copied.  tile: elements of each axis that a block holds."""
    s = t.load
    b = p.buffer(s.buffer)
    if DTYPES[b.dtype] != 2 or not s.index:
        raise Unsupported(f"a tile of {b.dtype}")
    live = [a for a in (*t.outer, *t.inner) if tile[a] > 1]
    if len([a for a in t.inner if tile[a] > 1]) != 1:
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
    inner = next(a for a in t.inner if tile[a] > 1)
    if where[inner] != len(s.index) - 1:
        raise Unsupported("the tile's rows are not contiguous in memory")
    ordered = [where[inner], *(where[a] for a in reversed(t.outer) if a in where)]
    rest = [n for n, ix in enumerate(s.index) if n not in ordered and b.shape[n] > 1]
    dims = (*ordered, *reversed(rest))
    if len(dims) > 5:
        raise Unsupported("more than five dimensions")
    if b.kind != "input" and b.shape[-1] * 2 % 16:
        raise Unsupported("rows that an earlier kernel stores, and no multiple of 16 bytes")
    sizes, box = [], []
    for n in dims:
        sizes.append(max(1, min(b.shape[n], s.index[n].bounds(p.extents)[1] + 1)))
        tiles = [tile[a] for a in where if where[a] == n]
        box.append(PANEL if n == dims[0] else tiles[0] if tiles else 1)
    if max(box) > 256:
        raise TooLarge(f"a box of {max(box)} elements along one dimension")
    covered = tile[inner]
    if covered % 16 and sizes[0] != covered:
        raise Unsupported("a summed axis that ends inside a matrix instruction, and inside the buffer")
    return Box(dims, tuple(sizes), tuple(box), tuple(s.index[n] for n in dims), -(-max(t.columns, covered) // PANEL))


def tensor_map(b: Buffer, box: Box) -> TensorMap:
    """What the driver must know to copy a box of a buffer: strides are given at the run for inputs, and row-major for temporaries."""

    def stride(n: int) -> int | str:
        return f"{b.name}.stride{n}" if b.kind == "input" else math.prod(b.shape[n + 1 :])

    return TensorMap(b.name, b.dtype, box.sizes, tuple(stride(n) for n in box.dims[1:]), box.box)
