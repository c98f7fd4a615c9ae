"""`extract`: from a saturated e-graph to the cheapest legal plan."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from .. import terms as T
from ..cost_models.base import CostModel
from ..graph import Graph, Node
from ..errors import PlanError
from ..program import Program
from ..terms import Term
from .classes import Classes
from .kernels import Names, Scored, Terms, stores_of
from .legality import legal_nodes
from .plan import Axis, Buffer, Cost, Kernel, Plan
from .region import Binding, Memory, Region, canonical
from .regions import forced_cuts, regions
from .search import Choice, Found, Limits, Search

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
    chosen      class → e-node that the plan computes it by
    stats       counts: regions, searched (distinct regions), nodes, lowerings, points; and "seconds"
    """

    plan: Plan
    form: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    chosen: dict[int, Node]
    stats: dict[str, float]


def extract(
    graph: Graph,
    program: Program,
    model: CostModel,
    *,
    numerics: str = "safe",
    limits: Limits | None = None,
    progress: Progress | None = None,
) -> Extraction:
    """Search for the cheapest plan.  Deterministic: names of axes and inputs change nothing but names.

    Raises PlanError where no legal plan exists at all.
    """
    start = time.perf_counter()
    limits = limits or Limits()
    half = next((x.dtype for x in (*program.outputs, *program.inputs) if x.dtype in model.tensor_dtypes), None)
    nodes = legal_nodes(graph, program.compute_dtype, half, numerics)
    missing = [i for i, c in enumerate(graph.outputs) if c not in nodes]
    if missing:
        raise PlanError(f"no legal form of output {missing[0]} exists", 'numerics="fast" allows forms that may overflow')
    cl = Classes(graph, program, nodes)
    cuts = forced_cuts(cl, model)
    cones = regions(cl, cuts)
    memo: dict[tuple, Found] = {}
    parts: list[_Part] = []
    stored: dict[int, Memory] = {}
    temps = 0
    stats: dict[str, float] = {"regions": len(cones), "searched": 0, "nodes": sum(map(len, nodes.values())), "lowerings": 0, "points": 0}
    for done, cone in enumerate(cones):
        region, binding = canonical(cl, cone, stored)
        if region.key not in memo:

            def tick(n: int, done: int = done) -> None:
                if progress is not None:
                    progress("search", done, len(cones))

            found = Search(region, model, limits, tick).run()
            if found is None:
                raise PlanError(f"no kernel for {T.show(graph_term(cl, cone.roots[0]), 4)} fits the machine", "please report this program")
            memo[region.key] = found
            stats["searched"] += 1
            for k in ("lowerings", "points"):
                stats[k] += found.stats[k]
        part = _Part(cl, region, binding, memo[region.key])
        for c in cone.roots:  # names of what other regions will read
            if c in cl.outputs:
                i, o = cl.outputs[c][0]
                stored[c] = Memory(f"out{i}", o.shape, o.dtype, o.index(program.axes))
            else:
                axes = sorted(graph.free[c], key=list(program.axes).index)
                stored[c] = Memory(f"t{temps}", tuple(program.axes[a] for a in axes), cl.dtype(c), tuple(map(T.axis_index, axes)))
                temps += 1
        parts.append(part)
    build = _Build(cl, model, parts, stored, temps)
    plan, forms, chosen = build.plan([p.found.best for p in parts])
    stats["seconds"] = time.perf_counter() - start
    return Extraction(plan, forms, tuple(build.losers(limits.candidates)), chosen, stats)


def graph_term(cl: Classes, c: int) -> Term:
    """The smallest usable term of a class."""
    out: dict[int, Term] = {}
    stack = [c]
    while stack:
        d = stack[-1]
        n = cl.least[d][1]
        missing = [a for a in n.args if a not in out]
        if missing:
            stack += missing
        else:
            out[d] = T.make(n.op, n.attr, [out[a] for a in n.args])
            stack.pop()
    return out[c]


@dataclass
class _Part:
    """A region of the program and what the search found for it (or for one like it)."""

    cl: Classes
    region: Region
    binding: Binding
    found: Found


class _Build:
    """Turns choices under canonical names into a plan under the program's names."""

    def __init__(self, cl: Classes, model: CostModel, parts: list[_Part], stored: dict[int, Memory], temps: int):
        self.cl, self.model, self.parts, self.stored, self.temps = cl, model, parts, stored, temps

    def plan(self, choices: list[Choice]) -> tuple[Plan, tuple[str, ...], dict[int, Node]]:
        program = self.cl.program
        kernels: list[Kernel] = []
        buffers: dict[str, Buffer] = {i.name: Buffer(i.name, i.shape, i.dtype, "input") for i in program.inputs}
        chosen: dict[int, Node] = {}
        temps = self.temps
        for part, choice in zip(self.parts, choices):
            names, made = _names(part, choice, self.stored, temps)
            temps += made
            for k in choice.kernels:
                kernel = self.kernel(part, choice, k, names, f"k{len(kernels)}", buffers)
                kernels.append(kernel)
                for c in range(len(part.region.nodes)):
                    if k.state.classes >> c & 1 and (o := k.bodies.choice(k.state, c)) is not None and o.node is not None and o.node.op != "stored":
                        j = part.region.nodes[c].index(o.node)
                        chosen.setdefault(part.binding.classes[c], part.binding.nodes[c][j])
        used = {b for k in kernels for s in k.stores for b in (s.buffer, *_reads(s.term))}
        plan = Plan(tuple(kernels), {n: b for n, b in buffers.items() if n in used}, program.compute_dtype)
        return plan, self.forms(kernels, plan), chosen

    def kernel(self, part: _Part, choice: Choice, k: Scored, names: Names, name: str, buffers: dict[str, Buffer]) -> Kernel:
        tiles, sizes, price = k.at(choice.part, self.model)
        stores, _ = stores_of(part.region, k.roots, k.bodies, k.state, names)
        stores = self.real(part, k, stores)
        axis = names.axis
        extents = {axis(a): n for a, n in part.region.extents.items() if self.occurs(axis(a), stores)}
        axes = {}
        for a, role in k.roles.items():
            base = axis(a.partition(".")[0])
            extents[base] = part.region.extents[a.partition(".")[0]]
            extents[axis(a)] = sizes[a]
            if a.endswith((".o", ".i")) and choice.split is not None:
                extents[base + ".o"], extents[base + ".i"] = int(choice.split.parts[choice.part]), int(choice.split.block[choice.part])
            axes[axis(a)] = Axis(sizes[a], max(tiles[a], 1), role)
        for s in stores:
            if s.buffer not in buffers:
                c = next(r for r in k.roots if any(m.name == s.buffer for m in self.memories(part, r, names)))
                m = next(m for m in self.memories(part, c, names) if m.name == s.buffer)
                kind = "output" if part.binding.classes[c] in self.cl.outputs else "temp"
                dims = tuple(ix.axes[0] for ix in m.index) if kind == "temp" else ()
                buffers[s.buffer] = Buffer(s.buffer, m.shape, m.dtype, kind, dims)
        seconds = float(k.seconds[choice.part if len(k.seconds) > 1 else 0])
        parts = {n: float(v[0]) for n, v in price.parts.items()}
        choices: dict[str, object] = {n: int(v[0]) for n, v in price.choices.items()}
        cost = Cost(seconds, parts, max(parts, key=lambda p: parts[p]), {n: float(v[0]) for n, v in price.detail.items()})
        return Kernel(name, stores, axes, extents, choices, cost)

    def occurs(self, axis: str, stores) -> bool:  # type: ignore[no-untyped-def]
        return any(T.base(a) == axis for s in stores for a in _all_axes(s.term) | {a for ix in s.index for a in ix.axes})

    def memories(self, part: _Part, c: int, names: Names) -> tuple[Memory, ...]:
        real = part.binding.classes[c]
        if real in self.cl.outputs:
            return tuple(Memory(f"out{i}", o.shape, o.dtype, o.index(self.cl.program.axes)) for i, o in self.cl.outputs[real])
        return (names.memory(c),)

    def real(self, part: _Part, k: Scored, stores):  # type: ignore[no-untyped-def]
        """The stores with the program's own output arrays."""
        out = []
        todo = iter(stores)
        for r in k.roots:
            real = part.binding.classes[r]
            for m in part.region.outputs.get(r) or (None,):
                s = next(todo)
                if m is not None:
                    i, o = self.cl.outputs[real][part.region.outputs[r].index(m)]
                    s = type(s)(f"out{i}", s.term, o.index(self.cl.program.axes))
                out.append(s)
        return tuple(out)

    def forms(self, kernels: list[Kernel], plan: Plan) -> tuple[str, ...]:
        """The outputs' terms with what other kernels stored written out."""
        whole: dict[str, Term] = {}

        def written_out(x: Term, args: tuple[Term, ...]) -> Term | None:
            if x.op != "input" or x.attr[0] not in whole or plan.buffers[x.attr[0]].kind != "temp":  # type: ignore[index]
                return None
            name, index = x.attr  # type: ignore[misc]
            changed = tuple((a, ix) for a, ix in zip(plan.buffers[name].axes, index) if ix != T.axis_index(a))
            return T.view(whole[name], changed) if changed else whole[name]

        for k in kernels:
            for s, t in zip(k.stores, T.rewrite([s.term for s in k.stores], written_out)):
                whole[s.buffer] = t
        return tuple(T.show(whole[f"out{i}"]) for i in range(len(self.cl.program.outputs)))

    def losers(self, most: int) -> Iterator[Candidate]:
        """Plans that differ from the chosen one in one region."""
        base = [p.found.best for p in self.parts]
        total = sum(c.seconds for c in base)
        rows = []
        seen: set[int] = set()
        for i, p in enumerate(self.parts):
            if id(p.found) in seen:  # the same region once more
                continue
            seen.add(id(p.found))
            for c in p.found.others:
                rows.append((total - base[i].seconds + c.seconds, i, c))
        rows.sort(key=lambda r: r[:2])
        kernels = sum(len(c.kernels) for c in base)
        for seconds, i, c in rows[:most]:
            choices = [*base[:i], c, *base[i + 1 :]]
            yield Candidate(seconds, kernels + len(c.kernels) - len(base[i].kernels), lambda choices=choices: self.plan(choices)[:2])  # type: ignore[misc]


def _names(part: _Part, choice: Choice, stored: dict[int, Memory], temps: int) -> tuple[Names, int]:
    """Names of a region's classes in a plan, and how many temporaries they introduce."""
    axes = part.binding.axes

    def axis(a: str) -> str:
        base, dot, rest = a.partition(".")
        return axes[base] + dot + rest

    memory: dict[int, Memory] = {}
    made = 0
    for k in choice.kernels:
        for c in k.roots:
            real = part.binding.classes[c]
            if real in stored:
                memory[c] = stored[real]
                continue
            dims = part.region.order(part.region.free[c])
            shape = []
            for a in dims:
                if a.endswith(".o") and choice.split is not None:
                    shape.append(int(choice.split.parts[choice.part]))
                else:
                    shape.append(part.region.extents[a])
            memory[c] = Memory(f"t{temps + made}", tuple(shape), part.region.dtype[c], tuple(T.axis_index(axis(a)) for a in dims))
            made += 1
    for c, ns in enumerate(part.region.nodes):
        if ns and ns[0].op == "stored":
            memory[c] = stored[part.binding.classes[c]]
    return Names(axis, lambda x: part.binding.inputs[x], lambda c: memory[c]), made


def _reads(t: Term) -> list[str]:
    return [x.attr[0] for x in T.postorder([t]) if x.op == "input"]  # type: ignore[index]


def _all_axes(t: Term) -> set[str]:
    out: set[str] = set()
    for x in T.postorder([t]):
        out |= x.free
        if x.op in ("red", "fold"):
            out.add(x.attr[-1])  # type: ignore[index]
    return out
