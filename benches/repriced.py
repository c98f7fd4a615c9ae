"""Recorded kernels at the price that the cost model gives them now, and with its constants fitted to other programs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from eqsat_neptune.codegen.lower import lower
from eqsat_neptune.codegen.tile import TileProgram
from eqsat_neptune.cost_models import Sizes, model_for, warpgroups
from eqsat_neptune.extraction.plan import Plan
from operators import OPERATORS

import eqsat_neptune as en

# constants of pipelines that a fit may move, with what it tries (seconds, or factors)
TRIED: dict[str, tuple[float, ...]] = {
    "PASSING": (0.02e-6, 0.05e-6, 0.1e-6, 0.2e-6, 0.4e-6, 0.7e-6, 1.0e-6, 1.4e-6),
    "STEP": (0.1e-6, 0.15e-6, 0.2e-6, 0.25e-6, 0.3e-6),
    "CROWDED": (1.06, 1.09, 1.12, 1.15, 1.18),
    "LATER": (0.2e-6, 0.35e-6, 0.5e-6, 0.65e-6, 0.8e-6),
}


@dataclass(frozen=True)
class Pipeline:
    """A row of a record whose only kernel is a pipeline of warpgroups, as a tile program."""

    row: Mapping[str, Any]
    program: TileProgram
    sizes: Sizes

    @property
    def measured(self) -> float:
        return float(self.row.get("sustained") or self.row["seconds"])


def pipelines(rows: Sequence[Mapping[str, Any]], target: str) -> tuple[list[Pipeline], int]:
    """Rows that can be priced anew, and how many pipelines cannot, since the program's plan is another one now.  Searches each program."""
    plans: dict[tuple, Plan] = {}
    out, lost = [], 0
    for r in rows:
        kernels = r.get("kernels")
        if "failed" in r or not r.get("seconds") or not isinstance(kernels, list) or not isinstance(r["extents"], list):
            continue
        if len(kernels) != 1 or "warpgroups=" not in kernels[0]["plan"] or r["case"] not in OPERATORS:
            continue
        key = r["case"], tuple(r["extents"]), r["dtype"]
        if key not in plans:
            op = OPERATORS[r["case"]]
            specs = op.case.specs("full", dtype=r["dtype"], **op.extents(key[1]))
            plans[key] = en.optimize(en.trace(op.case.function("full"), *specs), target).plan
        plan = plans[key]
        tiles = {a: int(t) for a, t in re.findall(r"([\w.]+) \d+/(\d+) ", kernels[0]["plan"].partition(";")[0])}
        if len(plan.kernels) != 1 or set(tiles) != set(plan.kernels[0].axes):
            lost += 1
            continue
        k = plan.kernels[0]
        k = replace(k, axes={a: replace(x, tile=tiles[a]) for a, x in k.axes.items()}, choices={})
        sizes = Sizes(*({a: np.array([float(getattr(x, f))]) for a, x in k.axes.items()} for f in ("tile", "extent")))
        out.append(Pipeline(r, lower(k, plan.buffers, plan.compute_dtype), sizes))
    return out, lost


def prices(found: Sequence[Pipeline], target: str) -> list[float]:
    """Seconds, by the model as it is."""
    model = model_for(target)
    return [float(model.cost(x.program, x.sizes).seconds[0]) for x in found]


@contextmanager
def constant(name: str, value: float) -> Iterator[None]:
    before = getattr(warpgroups, name)
    setattr(warpgroups, name, value)
    try:
        yield
    finally:
        setattr(warpgroups, name, before)


def held_out(found: Sequence[Pipeline], target: str, name: str) -> tuple[dict[str, float], list[float]]:
    """(the value of a constant that has the least squared error of logarithms for all programs but one, by that one; what each row then
    takes, by the value fitted without its program)."""
    table = {}
    for v in TRIED[name]:
        with constant(name, v):
            table[v] = np.array(prices(found, target))
    measured = np.array([x.measured for x in found])
    programs = np.array([x.row["case"] for x in found])
    best: dict[str, float] = {}
    out = np.zeros(len(found))
    for p in sorted(set(programs.tolist())):
        others = programs != p
        if not others.any():
            continue
        best[p] = min(table, key=lambda v: float(np.square(np.log(table[v] / measured)[others]).sum()))
        out[~others] = table[best[p]][~others]
    return best, out.tolist()


def report(
    rows: Sequence[Mapping[str, Any]], target: str, judged: Callable[[str, Sequence[Mapping[str, Any]], Sequence[float]], str]
) -> str:
    """Lines for `fit`.  judged: the line of some rows with predicted seconds."""
    found, lost = pipelines(rows, target)
    if not found:
        return "no row is a pipeline of warpgroups that could be priced anew"
    mine = [x.row for x in found]
    out = [f"{len(found)} pipelines of warpgroups" + (f", and {lost} that are planned otherwise now" if lost else "")]
    out += [
        judged("as recorded", mine, [x.row["predicted"] for x in found]),
        judged("by the model as it is", mine, prices(found, target)),
    ]
    for name in TRIED:
        best, predicted = held_out(found, target, name)
        if best:
            values = sorted(set(best.values()))
            out.append(
                judged(f"{name} held out", mine, predicted)
                + f"   ({' to '.join(f'{v:.3g}' for v in dict.fromkeys((values[0], values[-1])))})"
            )
    return "\n".join(out)
