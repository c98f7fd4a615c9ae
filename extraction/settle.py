"""Kernels as a code generator will print them: schedules that it cannot express are found anew, and what it decides itself is said."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from ..codegen.lower import lower
from ..codegen.tile import TileProgram
from ..cost_models.base import CostModel, Sizes
from .kernels import thin
from .plan import Axis, Buffer, Cost, Kernel, Plan

# (choices in full) for a tile program of a plan with these buffers, or None if there is no such schedule
Schedules = Callable[[TileProgram, Mapping[str, Buffer]], dict[str, object] | None]


def settle(plan: Plan, model: CostModel, plain: CostModel, schedule: Schedules) -> Plan:
    """plain: the model without the schedules that may be impossible."""
    kernels = []
    for k in plan.kernels:
        if k.choices.get("warpgroups"):
            found = schedule(lower(k, plan.buffers, plan.compute_dtype), plan.buffers)
            k = replace(k, choices=found) if found is not None else anew(k, plan, plain)
        else:
            k = replace(k, choices={n: v for n, v in k.choices.items() if n != "warpgroups"})
        kernels.append(k)
    return replace(plan, kernels=tuple(kernels))


def anew(k: Kernel, plan: Plan, model: CostModel) -> Kernel:
    """The kernel with the tiles and choices that the model finds best."""
    program = lower(k, plan.buffers, plan.compute_dtype)
    ladder = thin(model.tiles(program, {a: x.extent for a, x in k.axes.items()}))
    axes = list(program.axes)
    grids = np.meshgrid(*[np.array(ladder[a], float) for a in axes], indexing="ij")
    sizes = Sizes({a: g.ravel() for a, g in zip(axes, grids)}, {a: np.full(1, float(k.axes[a].extent)) for a in axes})
    best = int(model.cost(program, sizes).seconds.argmin())
    one = Sizes({a: t[best : best + 1] for a, t in sizes.tile.items()}, sizes.extent)
    price = model.cost(program, one, detail=True)
    parts = {n: float(np.ravel(v)[0]) for n, v in price.parts.items()}
    cost = Cost(float(price.seconds[0]), parts, max(parts, key=parts.__getitem__, default=""), k.cost.detail if k.cost else {})
    tiles: dict[str, Axis] = {a: replace(x, tile=int(one.tile[a][0])) for a, x in k.axes.items()}
    choices: dict[str, object] = {n: int(v[0]) for n, v in price.choices.items()}
    return replace(k, axes=tiles, choices=choices, cost=cost)
