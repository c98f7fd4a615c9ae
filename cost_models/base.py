"""What a cost model is, and the sizes it is asked about.

A model prices one tile program at many tile sizes at once: arguments are arrays over the points of the search, and every result
has one entry per point.  The structure of a tile program does not depend on sizes, so one lowering serves all points.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np

from ..codegen.tile import TileProgram
from ..extraction.plan import Buffer

Array = np.ndarray
ONE = np.ones(1)  # for all points; this very object is left out of products (`Tally`)
ONE.flags.writeable = False


@dataclass(frozen=True)
class Work:
    """A rough amount of work, for bounds before anything is lowered.

    tensor   multiply-add flops (two per product) of contractions that matrix units could do
    mixed    … where elementwise work reads the same tiles as the contractions, or makes these from what is loaded
    ops      plain arithmetic operations, a multiply-add counting as one
    special  results of special functions (exp, tanh, 1/x …)
    bytes    moved between memory and chip, each distinct element once
    """

    tensor: float = 0.0
    mixed: float = 0.0
    ops: float = 0.0
    special: float = 0.0
    bytes: float = 0.0


@dataclass
class Sizes:
    """Tile and extent of every axis that a kernel walks.  The arrays broadcast against each other, and every entry of what they
    broadcast to is a point, in C order: those of a grid may have an axis each, so that what depends on few of them stays small.

    only    the points that are asked about (None: all); what a model says of others does not count
    """

    tile: dict[str, Array]
    extent: dict[str, Array]
    only: Array | None = field(default=None, repr=False)
    _trips: dict[str, Array] = field(default_factory=dict, repr=False)
    _products: dict[tuple[str, ...], Array] = field(default_factory=dict, repr=False)
    _walked: dict[tuple[str, ...], Array] = field(default_factory=dict, repr=False)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return np.broadcast_shapes((1,), *(a.shape for d in (self.tile, self.extent) for a in d.values()))

    @cached_property
    def points(self) -> int:
        return math.prod(self.shape)

    def flat(self, x: Array) -> Array:
        """An array over the points, one entry each (or one for all)."""
        return x.reshape(1) if x.size == 1 else np.broadcast_to(x, self.shape).reshape(-1)

    def picker(self, where: Array) -> Callable[[Array], Array]:
        """Takes of an array over the points the entries of some points, given by their numbers (one entry for all stays that)."""
        places: dict[tuple[int, ...], Array] = {}  # of those entries in an array of a shape

        def pick(x: Array) -> Array:
            if x.size == 1:
                return x.reshape(1)
            if x.shape not in places:
                at = np.arange(x.size).reshape(x.shape)
                places[x.shape] = np.broadcast_to(at, self.shape).reshape(-1)[where]
            return x.reshape(-1).take(places[x.shape])

        return pick

    def pick(self, where: Array) -> Sizes:
        """These points alone, given by their numbers."""
        return self.at(self.picker(where))

    def at(self, of: Callable[[Array], Array]) -> Sizes:
        """The points that a picker takes."""
        tile, extent = ({a: of(x) for a, x in d.items()} for d in (self.tile, self.extent))
        return Sizes(tile, extent)

    def trips(self, axis: str) -> Array:
        if axis not in self._trips:
            self._trips[axis] = np.ceil(self.extent[axis] / np.maximum(self.tile[axis], 1.0))
        return self._trips[axis]

    def elements(self, axes: tuple[str, ...]) -> Array:
        """Elements of a tile with these axes."""
        return _product(axes, self.tile, self._products)

    def walked(self, axes: tuple[str, ...]) -> Array:
        """Elements along all of these axes."""
        return _product(axes, self.extent, self._walked)


def _product(axes: tuple[str, ...], of: dict[str, Array], known: dict[tuple[str, ...], Array]) -> Array:
    if not axes:
        return ONE
    if axes not in known:
        last = of[axes[-1]]
        known[axes] = _product(axes[:-1], of, known) * last if len(axes) > 1 else last
    return known[axes]


def clip(x: Array, least: Array | float, most: Array | float) -> Array:
    """As `np.clip`, which takes longer on short arrays."""
    return np.asarray(np.minimum(np.maximum(x, least), most))


def choose(where: Array, x: Array | float, y: Array | float) -> Array:
    """As `np.where`, which works out what nothing needs where the condition is one for all points."""
    return np.asarray((x if where.item() else y) if where.size == 1 else np.where(where, x, y))


@dataclass
class Scores:
    """Predicted time of each point (inf: it cannot run) and the schedule choices that go with it; if asked for, the time's parts by
    resource, and other figures."""

    seconds: Array
    choices: dict[str, Array]
    parts: dict[str, Array] = field(default_factory=dict)
    detail: dict[str, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class Refusal:
    """Why a code generator cannot print a kernel as the model has it.  smaller: with smaller tiles it might.  crowded: with more of a
    grid's axes in a block too, because more threads share the rest.  torn: its reductions and products want an axis in two places of a
    block's tiles at once."""

    reason: str
    smaller: bool
    crowded: bool = False
    torn: bool = False


# what a code generator says of a kernel of a program with these buffers
Printed = Callable[[TileProgram, Mapping[str, Buffer]], Refusal | None]


class Prices(Protocol):
    """What kernels take that are printed in one way."""

    def cost(self, program: TileProgram, sizes: Sizes, detail: bool = False) -> Scores:
        """Price of the kernel at every point; detail: with parts."""
        ...

    def instead(self, choices: Mapping[str, object]) -> Prices | None:
        """The prices of what is printed where a kernel with these schedule choices cannot be; None if each can.  The same object for
        the same kind of choices."""
        ...


class CostModel(Prices, Protocol):
    """What the search asks.  Implementations must be deterministic and must not look at names of axes or buffers."""

    @property
    def name(self) -> str: ...

    @property
    def workers(self) -> int:
        """Blocks that it takes to keep the machine busy."""
        ...

    @property
    def intermediate(self) -> float:
        """Bytes that one intermediate may take in memory."""
        ...

    @property
    def tensor_dtypes(self) -> frozenset[str]:
        """16-bit dtypes whose products run on matrix units; operands computed in a kernel are rounded to one of them."""
        ...

    def refusal(self, program: TileProgram, buffers: Mapping[str, Buffer]) -> Refusal | None:
        """Why the kernel, with the tiles and choices that it has, cannot be what `cost` describes; None if it can.
        buffers: the whole program's inputs and outputs, which say how exact it must be."""
        ...

    def tiles(self, program: TileProgram, extents: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """Tile sizes worth trying for each axis (the extent itself where the axis is whole)."""
        ...

    def floor(self, work: Work) -> float:
        """Seconds that no kernel with this much work can beat, its launch included."""
        ...

    def roles(self, extent: int, contracted: bool) -> tuple[str, ...]:
        """Roles ("whole", "loop") worth trying for a reduced axis of this extent; contracted: by a product of two tiles."""
        ...

    def splits(self, extent: int) -> tuple[int, ...]:
        """Numbers of parts worth trying for a split reduction over an axis of this extent."""
        ...
