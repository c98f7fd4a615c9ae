"""Cost models under which small programs fall apart into many kernels and split their reductions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from eqsat_neptune.cost_models import Cpu
from eqsat_neptune.cost_models.host import HostModel
from eqsat_neptune.cost_models.machines import H200
from eqsat_neptune.cost_models.roofline import Roofline


class Eager(Roofline):
    """A GPU on which launches cost nothing and rooms are tiny, so that small programs fall apart into many kernels."""

    def __init__(self, **changes: Any):
        super().__init__(replace(H200, launch=1e-9, block=1e-9, step=1e-9, latency=1e-9, sms=64, **changes))

    def roles(self, extent: int, contracted: bool) -> tuple[str, ...]:
        return ("loop", "whole")

    def splits(self, extent: int) -> tuple[int, ...]:
        return (2, 3) if extent >= 16 else ()

    def tiles(self, program: Any, extents: Any) -> dict[str, tuple[int, ...]]:
        return {
            a: (max(extents[a], 1),) if x.role == "whole" else tuple(t for t in (1, 2, 4, 8, 16) if t <= max(extents[a], 1))
            for a, x in program.axes.items()
        }


class ManyCores(HostModel):
    """A host whose calls cost nothing and whose blocks hold next to nothing."""

    def __init__(self) -> None:
        super().__init__(Cpu("many cores", 8, launch=1e-9, block=1e-9, call=1e-9, memory_block=3e3))

    roles = Eager.roles
    splits = Eager.splits
    tiles = Eager.tiles
