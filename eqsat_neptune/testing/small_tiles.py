"""Plans as large programs have them, of small programs: long axes are streamed in small tiles, whose ends are ragged, and split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..cost_models import Cpu
from ..cost_models.host import HostModel
from ..cost_models.machines import H200
from ..cost_models.roofline import Roofline
from ..egraph import saturate
from ..extraction.extract import extract
from ..extraction.plan import Plan
from ..program import Program
from ..terms import postorder


class SmallTiles:
    """Axes longer than `long` are streamed in tiles of one of `sizes`, and may be split."""

    long: int = 12
    sizes: tuple[int, ...] = (4, 8)

    def roles(self, extent: int, contracted: bool) -> tuple[str, ...]:
        return ("loop",) if extent > self.long else ("whole",)

    def splits(self, extent: int) -> tuple[int, ...]:
        return (2, 3) if extent > self.long else ()

    def tiles(self, program: Any, extents: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        return {
            a: (max(extents[a], 1),)
            if x.role == "whole"
            else tuple(t for t in self.sizes if t <= extents[a]) or (max(extents[a], 1),)
            for a, x in program.axes.items()
        }


class SmallTilesOnCpu(SmallTiles, HostModel):
    def __init__(self) -> None:
        super().__init__(Cpu("small tiles", 8, launch=1e-6, block=1e-9, call=1e-9, memory_block=3e3))


class SmallTilesOnGpu(SmallTiles, Roofline):
    long, sizes = 16, (16,)

    def __init__(self) -> None:
        super().__init__(replace(H200, launch=1e-6, block=1e-9, step=1e-9, latency=1e-9, sms=4))


def plans(p: Program, model: Any, losers: int = 1) -> list[Plan]:
    """The best plan and the next ones."""
    split = [t.attr[1] for t in postorder(o.term for o in p.outputs) if t.op == "red" and p.axes[t.attr[1]] > model.long]  # type: ignore[index]
    found = extract(saturate(p, splittable=dict.fromkeys(split)).graph, p, model)
    return [found.plan, *(c.plan for c in found.candidates[:losers])]
