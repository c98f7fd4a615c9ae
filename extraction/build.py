"""From choices under canonical names to a plan under the program's names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .. import terms as T
from ..cost_models.base import CostModel
from ..graph import Node
from ..terms import Term
from .classes import Classes
from .kernels import Scored
from .plan import Axis, Buffer, Cost, Kernel, Plan, Store
from .region import Binding, Memory, Region
from .search import Choice, Found
from .stores import Names, stores_of


@dataclass
class Part:
    """A region of the program and what the search found for it, or for one like it."""

    region: Region
    binding: Binding
    found: Found


class Builder:
    """Collects the regions of a program and builds plans of them.

    stored  where the classes lie that regions hand on to each other
    """

    def __init__(self, classes: Classes, model: CostModel):
        self.classes, self.model = classes, model
        self.parts: list[Part] = []
        self.stored: dict[int, Memory] = {}
        self._temps = 0

    def add(self, part: Part, roots: Iterable[int]) -> None:
        """The next region; its roots (classes of the program) get names that others may read."""
        self.parts.append(part)
        for c in roots:
            self.stored[c] = self.memory(c)
            self._temps += c not in self.classes.outputs

    def memory(self, c: int) -> Memory:
        """Where the next region would store a class."""
        outputs = self._outputs(c)
        if outputs:
            return outputs[0]
        axes = self.classes.layout(c)
        shape = tuple(self.classes.program.axes[a] for a in axes)
        return Memory(f"t{self._temps}", shape, self.classes.dtype(c), tuple(map(T.axis_index, axes)), self.classes.known(c))

    def _outputs(self, c: int) -> tuple[Memory, ...]:
        """Arrays of the program that a class fills."""
        axes = self.classes.program.axes
        return tuple(Memory(f"out{i}", o.shape, o.dtype, o.index(axes), self.classes.known(c)) for i, o in self.classes.outputs.get(c, ()))

    def plan(self, choices: list[Choice]) -> tuple[Plan, tuple[str, ...], dict[int, tuple[Node, ...]]]:
        """The plan of one choice for each region, the forms of its outputs, and the e-nodes that it takes for each class: that of
        the first kernel that has it, and others by which later ones do."""
        program = self.classes.program
        kernels: list[Kernel] = []
        known = self.classes.known_of_inputs
        buffers = {i.name: Buffer(i.name, i.shape, i.dtype, "input", known=known.get(i.name, ())) for i in program.inputs}
        chosen: dict[int, dict[Node, None]] = {}
        temps = self._temps
        for part, choice in zip(self.parts, choices):
            names, made = self._names(part, choice, temps)
            temps += made
            for k in choice.kernels:
                kernels.append(self._kernel(part, choice, k, names, f"k{len(kernels)}", buffers))
                for c, nodes in enumerate(part.region.nodes):
                    o = k.bodies.choice(k.state, c) if k.state.classes >> c & 1 else None
                    if o is not None and o.node.op != "stored":
                        chosen.setdefault(part.binding.classes[c], {})[part.binding.nodes[c][nodes.index(o.node)]] = None
        used = {b for k in kernels for s in k.stores for b in (s.buffer, *_reads(s.term))}
        plan = Plan(tuple(kernels), {n: b for n, b in buffers.items() if n in used}, program.compute_dtype)
        return plan, self._forms(plan), {c: tuple(ns) for c, ns in chosen.items()}

    def _names(self, part: Part, choice: Choice, temps: int) -> tuple[Names, int]:
        """Names of a region's classes in a plan, and how many temporaries they introduce."""
        region, binding = part.region, part.binding

        def axis(a: str) -> str:
            base, dot, rest = a.partition(".")
            return binding.axes[base] + dot + rest

        def extent(a: str) -> int:
            if a.endswith(".o") and choice.split is not None:
                return int(choice.split.parts[choice.part])
            return region.extents[a]

        memory: dict[int, Memory] = {}
        made = 0
        again = {c for k in choice.kernels for c in k.roots if c not in region.roots}  # though another region may have stored them
        for c, real in enumerate(binding.classes):
            if real in self.stored and c not in again:
                memory[c] = self.stored[real]
        for c in (c for k in choice.kernels for c in k.roots if c not in memory):
            dims = region.layout[c]
            index = tuple(T.axis_index(axis(a)) for a in dims)
            memory[c] = Memory(f"t{temps + made}", tuple(map(extent, dims)), region.dtype[c], index, region.known[c])
            made += 1
        return Names(axis, binding.inputs.__getitem__, memory.__getitem__), made

    def _kernel(self, part: Part, choice: Choice, k: Scored, names: Names, name: str, buffers: dict[str, Buffer]) -> Kernel:
        region, axis = part.region, names.axis
        stores = self._real(part, k, stores_of(region, k.roots, k.bodies, k.state, names)[0])
        for c in k.roots:
            outputs = self._outputs(part.binding.classes[c]) if c in region.outputs else ()
            for m in outputs or (names.memory(c),):
                dims = () if outputs else tuple(ix.axes[0] for ix in m.index)
                buffers.setdefault(m.name, Buffer(m.name, m.shape, m.dtype, "output" if outputs else "temp", dims, m.known))
        tiles, sizes, price = k.at(choice.part, self.model)
        occurring = {T.base(a) for s in stores for a in (*_axes_of(s.term), *(a for ix in s.index for a in ix.axes))}
        extents = {axis(a): n for a, n in region.extents.items() if axis(a) in occurring}
        for a in k.roles:
            whole = a.partition(".")[0]
            extents[axis(whole)], extents[axis(a)] = region.extents[whole], sizes[a]
            if "." in a and choice.split is not None:
                extents[axis(whole) + ".o"] = int(choice.split.parts[choice.part])
                extents[axis(whole) + ".i"] = int(choice.split.block[choice.part])
        axes = {axis(a): Axis(sizes[a], max(tiles[a], 1), role) for a, role in k.roles.items()}
        seconds = float(k.seconds[choice.part if len(k.seconds) > 1 else 0])
        parts = {n: float(v[0]) for n, v in price.parts.items()}
        detail: dict[str, object] = {n: float(v[0]) for n, v in price.detail.items()}
        cost = Cost(seconds, parts, max(parts, key=parts.__getitem__), detail)
        return Kernel(name, stores, axes, extents, {n: int(v[0]) for n, v in price.choices.items()}, cost, k.kernel.wide)

    def _real(self, part: Part, k: Scored, stores: tuple[Store, ...]) -> tuple[Store, ...]:
        """The stores with the program's own output arrays."""
        out = []
        todo = iter(stores)
        for r in k.roots:
            outputs = self._outputs(part.binding.classes[r]) if r in part.region.outputs else ()
            for i in range(len(part.region.outputs.get(r, (None,)))):
                s = next(todo)
                out.append(Store(outputs[i].name, s.term, outputs[i].index) if outputs else s)
        return tuple(out)

    def _forms(self, plan: Plan) -> tuple[str, ...]:
        """The outputs' terms with what other kernels stored written out."""
        whole: dict[str, Term] = {}

        def written_out(x: Term, args: tuple[Term, ...]) -> Term | None:
            if x.op != "input" or x.attr[0] not in whole or plan.buffers[x.attr[0]].kind != "temp":  # type: ignore[index]
                return None
            name, index = x.attr  # type: ignore[misc]
            changed = tuple((a, ix) for a, ix in zip(plan.buffers[name].axes, index) if ix != T.axis_index(a))
            return T.view(whole[name], changed) if changed else whole[name]

        for k in plan.kernels:
            for s, t in zip(k.stores, T.rewrite([s.term for s in k.stores], written_out)):
                whole[s.buffer] = t
        return tuple(T.show(whole[f"out{i}"]) for i in range(len(self.classes.program.outputs)))


def _reads(t: Term) -> list[str]:
    return [x.attr[0] for x in T.postorder([t]) if x.op == "input"]  # type: ignore[index]


def _axes_of(t: Term) -> set[str]:
    """Axes that occur in a term, free or reduced."""
    out: set[str] = set()
    for x in T.postorder([t]):
        out |= x.free
        if x.op in ("red", "fold"):
            out.add(x.attr[-1])  # type: ignore[index]
    return out
