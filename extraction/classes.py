"""What the search knows about each class before it starts: usable nodes, sizes, whether and how it may lie in memory."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from .. import terms as T
from ..codegen.real import FINITE, NONNEG, NONZERO, Real
from ..graph import Graph, Node
from ..program import DTYPES, FLOATS, Output, Program, range_of
from ..rules.payloads import is_payload
from .cancelling import may_cancel
from .plan import Buffer

HALF = ("bfloat16", "float16")
# functions that make much of a little rounding: steep ones, and those that jump
AMPLIFIES = frozenset({"exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sinh", "cosh", "pow"}) | frozenset(
    {"eq", "ne", "lt", "le", "sign", "floor", "ceil", "round", "trunc", "floordiv", "mod"}
)
FLOAT16_MAX = 60000.0
PARTS = 32  # parts of a split reduction, before their number is chosen
ELEMENTWISE = frozenset({"add", "mul", "un", "bi", "where"})


@dataclass
class Classes:
    """The usable part of a saturated e-graph, with what extraction derives from it.

    nodes     usable nodes of each class that the outputs need
    room      bytes that one intermediate may take
    outputs   class → outputs of the program that it gives (number, output)
    rounds    does the target round what it computes to 16 bits where a product of matrices takes it as an operand?
    checked   not where rules may have made it so that the rounding shows (cancelling.py)?
    """

    graph: Graph
    program: Program
    nodes: dict[int, list[Node]]
    room: float = math.inf
    outputs: dict[int, list[tuple[int, Output]]] = field(default_factory=dict)
    rounds: bool = False
    checked: bool = True

    def __post_init__(self) -> None:
        for i, (c, o) in enumerate(zip(self.graph.outputs, self.program.outputs)):
            self.outputs.setdefault(c, []).append((i, o))

    # ---- terms of least size
    @cached_property
    def least(self) -> dict[int, tuple[float, Node]]:
        """class → size of its smallest term and the node that begins it."""
        return least_terms(self.nodes, lambda c, n: 1)

    def size(self, c: int) -> float:
        return self.least[c][0]

    def term(self, c: int) -> T.Term:
        """The smallest usable term of a class."""
        out = self._terms
        stack = [c]
        while stack:
            n = self.least[stack[-1]][1]
            missing = [a for a in n.args if a not in out]
            if missing:
                stack += missing
            else:
                out[stack.pop()] = T.make(n.op, n.attr, [out[a] for a in n.args])
        return out[c]

    @cached_property
    def _terms(self) -> dict[int, T.Term]:
        return {}

    @cached_property
    def source(self) -> dict[int, Node]:
        """The program itself as a graph: class → its node in the source (where a rule has retired that: the smallest one)."""
        own = least_terms(self.nodes, lambda c, n: 1 if n.why == "source" else None)
        out: dict[int, Node] = {}
        stack = list(self.graph.outputs)
        while stack:
            c = stack.pop()
            if c not in out:
                out[c] = own[c][1] if c in own else self.least[c][1]
                stack.extend(out[c].args)
        return out if acyclic(out) else {c: self.least[c][1] for c in self.least}

    @cached_property
    def source_order(self) -> list[int]:
        """Classes of the source, arguments first."""
        out: list[int] = []
        seen: set[int] = set()
        stack = [(c, False) for c in reversed(self.graph.outputs)]
        while stack:
            c, done = stack.pop()
            if done:
                out.append(c)
            elif c not in seen:
                seen.add(c)
                stack.append((c, True))
                stack.extend((a, False) for a in reversed(self.source[c].args) if a not in seen)
        return out

    @cached_property
    def consumers(self) -> dict[int, list[int]]:
        """class → classes whose source node reads it."""
        out: dict[int, list[int]] = {}
        for c in self.source_order:
            for a in dict.fromkeys(self.source[c].args):
                out.setdefault(a, []).append(c)
        return out

    # ---- axes in memory
    def layout(self, c: int) -> tuple[str, ...]:
        """A class's axes in the order in which a buffer of our own has them: that of the first input with the same axes which it is
        made of element by element, so that a kernel reads and writes in one order, or else the program's."""
        free = self.graph.free[c]
        found: list[tuple[int, tuple[str, ...]]] = []
        seen, todo = {c}, [c]
        while todo:
            for n in self.nodes.get(todo.pop(), ()):
                if n.op == "input":
                    name, index = n.attr  # type: ignore[misc]
                    axes = tuple(a for ix in index for a, _ in sorted(ix.terms, key=lambda x: -abs(x[1])))
                    if frozenset(axes) == free and len(axes) == len(free):
                        found.append((self._inputs[name], axes))
                elif n.op in ELEMENTWISE:
                    more = [a for a in n.args if a not in seen and self.graph.free[a] == free]
                    seen.update(more)
                    todo += more
        if found:
            return min(found, key=lambda x: (x[0], [self._place(a) for a in x[1]]))[1]
        return tuple(sorted(free, key=self._place))

    def _place(self, axis: str) -> tuple[int, str]:
        base, _, part = axis.partition(".")
        return self._axes[base], part

    @cached_property
    def _axes(self) -> dict[str, int]:
        return {a: i for i, a in enumerate(self.program.axes)}

    @cached_property
    def _inputs(self) -> dict[str, int]:
        return {x.name: i for i, x in enumerate(self.program.inputs)}

    # ---- kinds of classes
    def is_input(self, c: int) -> bool:
        return any(n.op == "input" for n in self.nodes[c])

    def is_trivial(self, c: int) -> bool:
        return any(n.op in ("num", "iota") for n in self.nodes[c])

    @cached_property
    def materialisable(self) -> frozenset[int]:
        """Classes worth storing: results of reductions, and operands of views, gathers and (if the source has them) reductions.  Of
        tensors that a rule has made, those that are no parts of larger ones."""
        out = {c for c, ns in self.nodes.items() if any(n.op in ("red", "fold") for n in ns)}
        moved: set[int] = set()
        known = self.graph.facts.get("source", frozenset())
        for ns in self.nodes.values():
            for n in ns:
                if n.op in ("view", "gather"):
                    moved.add(n.args[0])
                elif n.op == "red":
                    out |= {a for a in n.args if a in known}
                    if n.attr[0] == "+":  # type: ignore[index]
                        out |= {
                            a for m in self.nodes[n.args[0]] if m.op == "mul" for a in m.args if a in known and self.graph.free[a]
                        }
        stored = out | moved
        stored -= {
            c for c in stored if c not in self.source and any(n.op == "view" and n.args[0] in self._views for n in self.nodes[c])
        }
        fits = {c for c in stored if not self.is_input(c) and not self.is_trivial(c) and self.bytes(c) <= self.room}
        again = {c for c in fits - moved if any(x in fits and not self.multiples(x) for x in self.multiples(c))}
        return frozenset(fits - again) | frozenset(self.outputs)

    def multiples(self, c: int) -> list[int]:
        """Classes that the class is a constant times: one of them in memory serves for all."""
        products = [n.args for n in self.nodes[c] if n.op == "mul" and len(n.args) == 2]
        return [x for ab in products for k, x in (ab, ab[::-1]) if any(n.op == "num" for n in self.nodes[k])]

    # ---- types in memory
    @cached_property
    def half(self) -> str | None:
        """The 16-bit float type that the program works in, if it does.  Where its products are wide, none: operands that a kernel had
        stored for them would be rounded after all."""
        if self.program.wide:
            return None
        dtypes = [*(o.dtype for o in self.program.outputs), *(i.dtype for i in self.program.inputs)]
        return next((d for d in dtypes if d in HALF), None)

    def dtype(self, c: int) -> str:
        """The type in which a class is stored.  16 bits only for values of the source that are neither positions nor products
        about to be summed nor statistics nor seen by an exp, a log or a jump, which would amplify the rounding, and for others that
        nothing but matrix units reads; and float16 only for what fits it or is rounded for a product anyway."""
        return self.outputs[c][0][1].dtype if c in self.outputs else self._own_dtype(c)

    def readable(self, c: int) -> bool:
        """May the class be read from where it is stored?  Not an output that is rounded more than an intermediate would be, nor
        integers that may wrap around there."""
        dtype = self.dtype(c)
        if dtype in FLOATS:
            return DTYPES[dtype] >= DTYPES[self._own_dtype(c)]
        (lo, hi), (least, most) = self.graph.interval(c), range_of(dtype)
        return least <= lo and hi <= most

    def _own_dtype(self, c: int) -> str:
        if self.half is None or self.program.compute_dtype != "float32":
            return self.program.compute_dtype
        parts = self.parts(c)
        if parts:  # it is stored for these
            return max(map(self._own_dtype, parts), key=DTYPES.__getitem__)
        lo, hi = self.graph.interval(c)
        fits = self.half != "float16" or (lo >= -FLOAT16_MAX and hi <= FLOAT16_MAX) or c in self._operands
        exact = any(c in group for group in (self._positions, self._amplified, self._products, self._statistics))
        narrow = fits and (not exact if c in self.source else c in self._rounded_anyway)
        return self.half if narrow else self.program.compute_dtype

    def parts(self, c: int) -> list[int]:
        """Classes of the source that are parts (views, or views of views) of one that the source has not."""
        seen = dict.fromkeys(self._views.get(c, ()))
        todo = list(seen)
        while todo:
            more = [v for v in self._views.get(todo.pop(), ()) if v not in seen]
            seen.update(dict.fromkeys(more))
            todo += more
        return [v for v in seen if v in self.source]

    @cached_property
    def wholes(self) -> dict[int, list[int]]:
        """Class of the source → classes that the source has not, of which it and others are parts."""
        out: dict[int, list[int]] = {}
        for w in self._views:
            parts = self.parts(w)
            for c in parts if len(parts) > 1 else ():
                out.setdefault(c, []).append(w)
        return out

    @cached_property
    def _views(self) -> dict[int, list[int]]:
        """Classes that the source has not → their views."""
        out: dict[int, list[int]] = {}
        for c, ns in self.nodes.items():
            for n in ns:
                if n.op == "view" and n.args[0] not in self.source:
                    out.setdefault(n.args[0], []).append(c)
        return out

    @cached_property
    def _operands(self) -> frozenset[int]:
        """Factors of the products that the source sums."""
        return frozenset(a for p in self._products for a in self.source[p].args)

    @cached_property
    def _rounded_anyway(self) -> frozenset[int]:
        """Classes that a rule has made and that nothing reads but products of matrices, as an operand: in one kernel with such a
        product they would be rounded too.  No partial results: those are added up in full precision first.  And none where results
        are wanted in more than 16 bits: there no computed operand is rounded."""
        if not self._operands_rounded:
            return frozenset()
        readers: dict[int, list[tuple[int, Node]]] = {}
        for c, ns in self.nodes.items():
            for n in ns:
                for a in dict.fromkeys(n.args):
                    readers.setdefault(a, []).append((c, n))
        free = self.graph.free

        def operand(c: int, product: int, n: Node) -> bool:
            """Is the class an operand of products of matrices alone, by this node?  A fold multiplies by weights, made of its pivots."""
            if n.op == "fold":
                h, first = n.attr[0], len(n.attr[0].pivots)  # type: ignore[index]
                weights: frozenset[str] = frozenset().union(*[free[a] for a in n.args[:first]])
                places = {j for j, a in enumerate(n.args[first:]) if a == c}
                weighed = all(e.op != "num" for row in h.coef for j, e in row if j in places)
                return bool(c not in n.args[:first] and weighed and free[c] - weights and weights - free[c])
            others = [a for a in n.args if a != c]
            beside: frozenset[str] = frozenset().union(*[free[a] for a in others])
            sums = readers.get(product, [])
            if n.op != "mul" or len(others) < len(n.args) - 1 or not sums:
                return False
            rows, columns = free[c] - beside, beside - free[c]
            return all(m.op == "red" and m.attr[0] == "+" and free[r] & rows and free[r] & columns for r, m in sums)  # type: ignore[index]

        def multiple(c: int, product: int, n: Node) -> bool:
            """Is it multiplied, element by element, and what that gives rounded, too?"""
            narrow = product in made or (product in self.source and self._own_dtype(product) == self.half)
            return n.op == "mul" and narrow and all(free[a] <= free[c] for a in n.args)

        made = {c for c in readers if c not in self.source and not any("." in a for a in free[c])}
        made -= self.cancelling[0]
        while others := {c for c in made if not all(operand(c, p, n) or multiple(c, p, n) for p, n in readers[c])}:
            made -= others
        return frozenset(made)

    @property
    def _operands_rounded(self) -> bool:
        return self.rounds and not any(o.dtype in ("float32", "float64") for o in self.program.outputs)

    @cached_property
    def cancelling(self) -> tuple[frozenset[int], frozenset[int]]:
        """Classes that must not be rounded as factors of what sums add up, and what sums add up."""
        return may_cancel(self.graph, self.nodes) if self.checked and self._operands_rounded else (frozenset(), frozenset())

    @cached_property
    def _products(self) -> frozenset[int]:
        """Products that the source sums: they are summed as they are, not rounded one by one."""
        summed = (n.args[0] for n in self.source.values() if n.op == "red" and n.attr[0] == "+")  # type: ignore[index]
        return frozenset(p for p in summed if self.source[p].op == "mul")

    @cached_property
    def _statistics(self) -> frozenset[int]:
        """Reductions of the source that are no products of matrices (means, norms, …), and what is made of these alone.  They are
        small, and much may depend on them: x − mean x of a mean that is rounded to 16 bits says nothing."""
        out: set[int] = set()
        for c in self.source_order:
            n = self.source[c]
            others = [a for a in n.args if not self.is_trivial(a)]
            if n.op == "red" and not self.flops(c):
                out.add(c)
            elif n.op in ELEMENTWISE and others and all(a in out for a in others):
                out.add(c)
        return frozenset(out)

    @cached_property
    def _positions(self) -> frozenset[int]:
        """Source classes whose values are (or contain) positions or integers."""
        floats = {i.name for i in self.program.inputs if i.dtype.startswith(("float", "bfloat"))}
        out: set[int] = set()
        for c in self.source_order:
            n = self.source[c]
            if n.op == "iota" or (n.op == "input" and n.attr[0] not in floats):  # type: ignore[index]
                out.add(c)
            elif n.op == "bi" and n.attr in T.PREDICATES:
                continue
            elif any(a in out for a in (n.args[1:] if n.op == "where" else n.args[:1] if n.op == "gather" else n.args)):
                out.add(c)
        return frozenset(out)

    @cached_property
    def _amplified(self) -> frozenset[int]:
        """Source classes that reach an exp, a log or a jump through elementwise operations and extrema alone."""
        out: set[int] = set()
        for c in reversed(self.source_order):
            n = self.source[c]
            passes = c in out and (n.op in ELEMENTWISE or n.op == "view" or (n.op == "red" and n.attr[0] != "+"))  # type: ignore[index]
            jumps = (n.op in ("un", "bi") and n.attr in AMPLIFIES) or (n.op == "fold" and is_payload(n.attr))
            if passes or jumps:
                out.update(a for a in n.args)
        return frozenset(out)

    def flops(self, c: int) -> float:
        """Flops of the matrix product that the source computes here (0: it computes none)."""
        n = self.source[c]
        if n.op != "red" or n.attr[0] != "+":  # type: ignore[index]
            return 0.0
        body = n.args[0]
        while self.source[body].op == "red" and self.source[body].attr[0] == "+":  # type: ignore[index]
            body = self.source[body].args[0]
        m = self.source[body]
        free, kept = self.graph.free, self.graph.free[c]
        if m.op != "mul" or not any((kept & free[a]) - free[b] and (kept & free[b]) - free[a] for a in m.args for b in m.args):
            return 0.0
        return 2.0 * self.elements(body)

    # ---- what lies in memory
    def known(self, c: int) -> tuple[str, ...]:
        """What is known of the elements of a class, as `plan.Buffer` has it."""
        facts = self._real.facts(self.term(c))
        finite = FINITE in facts or self.graph.has(c, "finite")
        nonzero = NONZERO in facts or self.graph.has(c, "nonzero")  # or NaN, says the graph
        nonneg = NONNEG in facts or self.graph.interval(c)[0] >= 0
        return tuple(f for f, holds in ((FINITE, finite), (NONZERO, finite and nonzero), (NONNEG, finite and nonneg)) if holds)

    @cached_property
    def known_of_inputs(self) -> dict[str, tuple[str, ...]]:
        """The same of the program's inputs."""
        return {n: b.known for n, b in self._real.buffers.items()}

    @cached_property
    def _real(self) -> Real:
        known: dict[str, tuple[str, ...]] = {}
        for c, ns in self.nodes.items():
            for name in (n.attr[0] for n in ns if n.op == "input"):  # type: ignore[index]
                facts = [f for f in (FINITE, NONZERO) if self.graph.has(c, f)]
                known[name] = tuple(f for f in facts if f in known.get(name, facts))
        buffers = {i.name: Buffer(i.name, i.shape, i.dtype, "input", known=known.get(i.name, ())) for i in self.program.inputs}
        return Real(buffers, self.program.axes)

    # ---- extents
    def elements(self, c: int) -> int:
        """Of partial results, those of `PARTS` parts."""
        n = 1
        for a in self.graph.free[c]:
            whole = self.program.axes.get(T.base(a), 1)
            n *= min(whole, PARTS) if a.endswith(".o") else whole
        return n

    def bytes(self, c: int) -> int:
        return self.elements(c) * DTYPES[self.dtype(c)]


def least_terms(nodes: Mapping[int, Sequence[Node]], own: Callable[[int, Node], float | None]) -> dict[int, tuple[float, Node]]:
    """class → (cost, node) of its cheapest term, taken as a tree, by Knuth's generalisation of Dijkstra's algorithm.  own: what a node
    of a class costs beside its arguments (None: it is not allowed)."""
    waiting: dict[int, list[tuple[int, int]]] = {}
    missing: dict[tuple[int, int], int] = {}
    costs: dict[tuple[int, int], float] = {}
    best: dict[int, tuple[float, Node]] = {}
    heap: list[tuple[float, int, int]] = []
    for c, ns in nodes.items():
        for i, n in enumerate(ns):
            cost = own(c, n)
            if cost is None:
                continue
            args = set(n.args)
            missing[c, i], costs[c, i] = len(args), cost
            for a in args:
                waiting.setdefault(a, []).append((c, i))
            if not args:
                heapq.heappush(heap, (cost, c, i))
    while heap:
        total, c, i = heapq.heappop(heap)
        if c in best:
            continue
        best[c] = (total, nodes[c][i])
        for d, j in waiting.get(c, ()):
            missing[d, j] -= 1
            if not missing[d, j] and d not in best:
                heapq.heappush(heap, (costs[d, j] + sum(best[a][0] for a in nodes[d][j].args), d, j))
    return best


def acyclic(graph: dict[int, Node]) -> bool:
    state: dict[int, int] = {}
    for root in graph:
        stack = [(root, False)]
        while stack:
            c, done = stack.pop()
            if done:
                state[c] = 2
            elif c not in state:
                state[c] = 1
                stack.append((c, True))
                for a in graph[c].args:
                    if state.get(a) == 1:
                        return False
                    if a not in state:
                        stack.append((a, False))
    return True
