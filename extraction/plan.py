"""Plans: a sequence of fused kernels that covers a program's outputs.  Extraction makes them, codegen lowers them.

A kernel is a set of stores.  Each stored value is a term whose leaves read buffers (program inputs, or temporaries that an
earlier kernel stored) by op "input"; the same Term object in two stores is computed once.  Nothing in a kernel says how loops
nest: that follows from the roles of the axes, by codegen/lower.py, for cost, CPU execution and device code alike.

Roles of an axis in a kernel:
    grid    a block sees one tile of it; blocks run in any order
    loop    the block streams over it, tile by tile
    whole   all of it lies in the block
A reduced axis is loop or whole; an axis of a stored value may be any of the three (loop: written tile by tile).
A split reduction is no role: its partial results depend on "k.o", which lies on the grid of the first kernel, and "k.i" is
streamed there; the second kernel reduces over "k.o".  Extents of such parts are in the kernel's `axes`; the block is
`extent of k.i`, and elements with k.o·block + k.i ≥ extent of k do not exist (they count as the identity of any reduction).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..program import DTYPES, elements
from ..terms import Index, Term


@dataclass(frozen=True)
class Buffer:
    """Something in memory.  kind: "input", "output" or "temp".  A temp's dimensions are single axes in the order of `axes`.
    known: "finite", if all its elements are real numbers (of an input: it is no score that may be −∞); "nonzero": none is 0;
    "nonneg": none is negative."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    axes: tuple[str, ...] = ()
    known: tuple[str, ...] = ("finite",)

    @property
    def size(self) -> int:
        return elements(self.shape)


@dataclass(frozen=True)
class Axis:
    """extent: elements in all; tile: elements a block holds at once; role: "grid", "loop" or "whole" (then tile = extent)."""

    extent: int
    tile: int
    role: str

    @property
    def trips(self) -> int:
        return -(-self.extent // self.tile)


@dataclass(frozen=True)
class Store:
    """Write `term` to buffer[index].  Axes in the index that the term lacks are broadcast."""

    buffer: str
    term: Term
    index: Index


@dataclass(frozen=True)
class Cost:
    """Predicted seconds, and seconds by resource ("tensor", "fp32", "sfu", "l2", "dram", "launch", …); bound: the dearest."""

    seconds: float
    parts: dict[str, float] = field(default_factory=dict)
    bound: str = ""
    detail: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Kernel:
    """One launch.  `extents` has every axis that occurs, whole axes beside their parts; `axes` those that the kernel walks.
    `choices` are the schedule choices beyond roles and tiles (warps, stages, pivot …), by name: data that backends read.
    `wide`: products take no computed operand rounded to 16 bits, as `Program.wide` asks."""

    name: str
    stores: tuple[Store, ...]
    axes: dict[str, Axis]
    extents: dict[str, int]
    choices: dict[str, object] = field(default_factory=dict)
    cost: Cost | None = None
    wide: bool = False

    def __str__(self) -> str:
        ax = ", ".join(
            f"{a} {x.extent}" + (f"/{x.tile}" if x.tile != x.extent else "") + f" {x.role}" for a, x in self.axes.items()
        )
        c = f"  {self.cost.seconds * 1e6:.1f} µs, {self.cost.bound}" if self.cost else ""
        ch = "".join(f", {k}={v}" for k, v in self.choices.items()) + (", wide" if self.wide else "")
        return f"{self.name}: {ax}{ch}{c}\n" + "\n".join(
            f"    {s.buffer}[{', '.join(map(str, s.index))}] = {s.term}" for s in self.stores
        )


@dataclass(frozen=True)
class Plan:
    """Kernels in the order in which they run, and every buffer they read or write."""

    kernels: tuple[Kernel, ...]
    buffers: dict[str, Buffer]
    compute_dtype: str = "float32"

    @property
    def cost(self) -> Cost:
        parts: dict[str, float] = {}
        for k in self.kernels:
            for name, v in (k.cost.parts if k.cost else {}).items():
                parts[name] = parts.get(name, 0.0) + v
        return Cost(sum(k.cost.seconds for k in self.kernels if k.cost), parts, max(parts, key=parts.__getitem__, default=""))

    @property
    def temporaries(self) -> int:
        """Bytes of the intermediates that lie in memory between kernels."""
        return sum(b.size * DTYPES[b.dtype] for b in self.buffers.values() if b.kind == "temp")

    def __reduce__(self) -> Any:
        from ..codegen.serial import from_json, to_json

        return from_json, (to_json(self),)  # terms may be nested deeper than pickle can go

    def __str__(self) -> str:
        return "\n".join(map(str, self.kernels))
