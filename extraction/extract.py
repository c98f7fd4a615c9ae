"""`extract`: from a saturated e-graph to the cheapest legal plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from .. import collecting
from ..cost_models.base import CostModel
from ..errors import PlanError
from ..graph import Graph, Node
from ..program import Program
from .build import Builder
from .classes import Classes
from .compared import consistent
from .copies import with_copies
from .forbidden import Forbidden, forbidden
from .legality import legal_nodes, usable
from .parts import Parts
from .plan import Buffer, Plan
from .regions import forced_cuts, regions
from .search import Limits

Progress = Callable[[str, int, int | None], None]


@dataclass
class Candidate:
    """A plan that lost.  seconds: predicted; kernels: how many; form: its outputs in mathematical notation; plan: itself."""

    seconds: float
    kernels: int
    _make: Callable[[], tuple[Plan, tuple[str, ...]]] = field(repr=False)

    @cached_property
    def _made(self) -> tuple[Plan, tuple[str, ...]]:
        return self._make()

    @property
    def plan(self) -> Plan:
        return self._made[0]

    @property
    def form(self) -> str:
        return "; ".join(self._made[1])


@dataclass
class Extraction:
    """plan        the cheapest plan found
    form        the chosen form of each output in mathematical notation, with what kernels store written out
    candidates  plans that lost, cheapest first
    chosen      class → e-nodes that the plan computes it by: most often one
    forbidden   what float16's range left out, if that would have far fewer operations
    stats       counts (regions; searched: how often one was; nodes: usable; lowerings, their statements and points; sets: of classes whose
                next kernels were ranked; asked: kernels whose printing was looked into) and "seconds"
    """

    plan: Plan
    form: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    chosen: dict[int, tuple[Node, ...]]
    stats: dict[str, float]
    forbidden: Forbidden | None = None


@collecting.put_off()
def extract(
    graph: Graph,
    program: Program,
    model: CostModel,
    *,
    numerics: str = "safe",
    limits: Limits | None = None,
    progress: Progress | None = None,
) -> Extraction:
    """Search for the cheapest plan.  Deterministic; names of axes and inputs change nothing but names.

    Raises PlanError where no legal plan exists.
    """
    limits = limits or Limits()
    made = graph.extents.keys() - program.axes.keys()
    program = replace(program, axes=program.axes | graph.extents)
    start = time.perf_counter()
    dtypes = [*(o.dtype for o in program.outputs), *(i.dtype for i in program.inputs)]
    half = None if program.wide else next((d for d in dtypes if d in model.tensor_dtypes), None)
    nodes = legal_nodes(graph, program.compute_dtype, half, numerics)
    missing = [i for i, c in enumerate(graph.outputs) if c not in nodes]
    if missing:
        raise PlanError(f"no legal form of output {missing[0]} exists", 'numerics="fast" allows forms that may overflow')
    checked = numerics != "fast"
    classes = Classes(graph, program, nodes, model.intermediate, rounds=half is not None, checked=checked)
    compared, selections = consistent(classes)
    if compared:
        classes = replace(classes, nodes=usable(selections, graph.outputs), outputs={})
    classes = with_copies(classes)
    build = Builder(classes, model)
    cuts = forced_cuts(classes, model) | compared
    cones = regions(classes, cuts, compared)
    buffers = {i.name: Buffer(i.name, i.shape, i.dtype, "input") for i in program.inputs}
    buffers |= {f"out{n}": Buffer(f"out{n}", o.shape, o.dtype, "output") for n, o in enumerate(program.outputs)}
    parts = Parts(classes, build, model, limits, made, buffers, cuts, compared)
    for done, cone in enumerate(cones):

        def tick(_: int, done: int = done) -> None:
            if progress is not None:
                progress("search", done, len(cones))

        parts.add(cone, tick)
    stats: dict[str, float] = {"regions": len(build.parts), "nodes": sum(map(len, nodes.values())), **parts.stats}
    plan, forms, chosen = build.plan([p.found.best for p in build.parts])
    chosen = {c: n for c, n in chosen.items() if c in graph.nodes}
    stats["seconds"] = time.perf_counter() - start
    ranged = half == "float16" and numerics != "fast"
    left_out = forbidden(graph, nodes, program.compute_dtype, numerics) if ranged else None
    return Extraction(plan, forms, tuple(_losers(build, limits.candidates)), chosen, stats, left_out)


def _losers(build: Builder, most: int) -> Iterator[Candidate]:
    """Plans that differ from the chosen one in one region."""
    base = [p.found.best for p in build.parts]
    total = sum(c.seconds for c in base)
    kernels = sum(len(c.kernels) for c in base)
    rows, seen = [], set()
    for i, p in enumerate(build.parts):
        if id(p.found) not in seen:  # else the same region once more
            seen.add(id(p.found))
            rows += [(total - base[i].seconds + c.seconds, i, c) for c in p.found.others]
    for seconds, i, c in sorted(rows, key=lambda r: r[:2])[:most]:
        choices = [*base[:i], c, *base[i + 1 :]]
        n = kernels + len(c.kernels) - len(base[i].kernels)
        yield Candidate(seconds, n, lambda choices=choices: build.plan(choices)[:2])  # type: ignore[misc]
