"""Kernels as a code generator will print them: schedules that it cannot express are found anew, and what it decides itself is said."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from ..codegen.lower import lower
from ..codegen.tile import Contract, TileProgram
from ..cost_models.base import CostModel, Sizes
from .kernels import thin
from .plan import Axis, Buffer, Cost, Kernel, Plan

# (choices in full) for a tile program of a plan with these buffers, or None if there is no such schedule
Schedules = Callable[[TileProgram, Mapping[str, Buffer]], dict[str, object] | None]


# tile sizes to try for each axis, around those that a kernel has
Ladders = Callable[[TileProgram, Mapping[str, int], Mapping[str, int]], dict[str, tuple[int, ...]]]
WORTH = 0.99  # other tiles are taken where they have so much of the time or less


def settle(plan: Plan, model: CostModel, plain: CostModel, schedule: Schedules, finer: Ladders) -> Plan:
    """plain: the model without the schedules that may be impossible; finer: sizes that these are tried with, too, once all else is chosen."""

    def settled(k: Kernel) -> Kernel:
        pipeline = bool(k.choices.get("warpgroups"))
        for way in (refined(k, plan, model, finer), k) if pipeline else (streamed(k, plan, model),):
            found = schedule(lower(way, plan.buffers, plan.compute_dtype), plan.buffers) if way is not None else None
            if way is not None and found is not None:
                return replace(way, choices=found)
        if pipeline:
            return anew(k, plan, plain)
        return replace(k, choices={n: v for n, v in k.choices.items() if n != "warpgroups"})

    return replace(plan, kernels=tuple(map(settled, plan.kernels)))


def refined(k: Kernel, plan: Plan, model: CostModel, finer: Ladders) -> Kernel | None:
    """The kernel as a pipeline with better tiles than it has, if there are any."""
    program = lower(k, plan.buffers, plan.compute_dtype)
    ladder = finer(program, {a: x.tile for a, x in k.axes.items()}, {a: x.extent for a, x in k.axes.items()})
    found = best_of(k, program, ladder, model)
    before = k.cost.seconds if k.cost else np.inf
    return found if found.choices.get("warpgroups") and found.cost and found.cost.seconds <= WORTH * before else None


def streamed(k: Kernel, plan: Plan, model: CostModel) -> Kernel | None:
    """A kernel without a loop as a pipeline that walks what its products sum over, in one tile or two, if that is better: the search
    leaves short axes whole, but blocks that take one tile of work after the other load the next one beside it."""
    if any(x.role == "loop" for x in k.axes.values()):
        return None
    program = lower(k, plan.buffers, plan.compute_dtype)
    products = [
        s for s in program.body if isinstance(s, Contract) and set(s.a.axes) - set(s.b.axes) and set(s.b.axes) - set(s.a.axes)
    ]
    summed = dict.fromkeys(a for s in products for a in s.axes if k.axes[a].role == "whole")
    if len(summed) != 1:
        return None
    (a,) = summed
    other = replace(k, axes=k.axes | {a: replace(k.axes[a], role="loop")})
    program = lower(other, plan.buffers, plan.compute_dtype)
    ladder = dict(thin(model.tiles(program, {x: y.extent for x, y in k.axes.items()})))
    ladder[a] = tuple(dict.fromkeys((min(64, k.axes[a].extent), k.axes[a].extent)))
    found = best_of(other, program, ladder, model)
    before = k.cost.seconds if k.cost else np.inf
    return found if found.choices.get("warpgroups") and found.cost and found.cost.seconds <= WORTH * before else None


def anew(k: Kernel, plan: Plan, model: CostModel) -> Kernel:
    """The kernel with the tiles and choices that the model finds best."""
    program = lower(k, plan.buffers, plan.compute_dtype)
    return best_of(k, program, thin(model.tiles(program, {a: x.extent for a, x in k.axes.items()})), model)


def best_of(k: Kernel, program: TileProgram, ladder: Mapping[str, tuple[int, ...]], model: CostModel) -> Kernel:
    """The kernel with the best tiles of a ladder, and the choices that go with them."""
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
