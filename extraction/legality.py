"""Which e-nodes a plan may use: numerics are judged per node, by bounds; what the source itself computes is always allowed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ..graph import Graph, Node
from ..rules.payloads import is_payload
from ..terms import Monoid, Term, postorder

# largest argument of exp whose result each type holds, with a margin
EXP_LIMIT = {"float64": 700.0, "float32": 80.0, "bfloat16": 80.0, "float16": 11.0}
GROWS_LIKE_EXP = frozenset({"exp", "exp2", "expm1", "sinh", "cosh"})
NOT_AT_ZERO = frozenset({"recip", "log", "log2", "log10", "rsqrt"})
FLOAT16_MAX = 65504.0
FLOAT16_LEAST = 2.0**-6  # what is smaller for certain is mostly below 2⁻¹⁴, where there are fewer digits, and then none
TINY = 1e-30
MOST = 256  # nodes of a class


def legal_nodes(graph: Graph, compute_dtype: str, operand_dtype: str | None, numerics: str = "safe") -> dict[int, list[Node]]:
    """The usable nodes of every class that the outputs need.

    compute_dtype   of values that stay in a kernel
    operand_dtype   the 16-bit type to which operands of products are rounded, if the target rounds them
    numerics        "fast" allows every node

    Where a payload is carried with its extremum, looking for the extremum by comparison is no way to get it, not even the source's:
    values that are computed twice may be rounded in two ways.  And a difference that the source takes first is not opened: (x − m) − y
    may be small where m + y is large, and so may (x − m)·y where m is a reduction, beside x·y and m·y.  Nor does a value that cannot
    overflow in the source come from one that can, though the source may compute that one too: exp (x − m) beside exp x is not
    exp x · exp (−m).  And what products read as float16 is what the source makes, or known to fit: (A·B)·C does not become A·(B·C),
    nor (x·r·g)·w r·((x·g)·w); nor is it so small for certain that float16 has no digits for it.

    A rule may retire what the source computes for something that turns out not to be legal: where no form of an output is left,
    the source's own come back.
    """
    nodes = _legal(graph, compute_dtype, operand_dtype, numerics)
    if graph.retired and any(c not in nodes for c in graph.outputs):
        whole = {c: [*ns, *graph.retired.get(c, ())] for c, ns in graph.nodes.items()}
        nodes = _legal(replace(graph, nodes=whole), compute_dtype, operand_dtype, numerics)
    return nodes


def _legal(graph: Graph, compute_dtype: str, operand_dtype: str | None, numerics: str) -> dict[int, list[Node]]:
    centred, differences = _Centred(graph), _Differences(graph)
    ranges = _Ranges(graph, FLOAT16_MAX) if operand_dtype == "float16" and numerics != "fast" else None
    carried = {c for c, n in graph.items() if n.op == "fold" and is_payload(n.attr)}
    narrow = _operands(graph) if operand_dtype == "float16" else frozenset()

    def holds(c: int, n: Node) -> bool:
        """Does the type hold what this function, which grows like exp, makes of its argument?"""
        lo, hi = graph.interval(n.args[0])
        limit = EXP_LIMIT["float16" if c in narrow else compute_dtype]
        scale = math.log2(math.e) if n.attr == "exp2" else 1.0
        return hi <= limit * scale and (n.attr not in ("sinh", "cosh") or lo >= -limit)

    def legal(c: int, n: Node) -> bool:
        if c in carried and n.op == "red":
            return False
        if ranges is not None and n.why != "source" and not ranges.hold(c, n):
            return False
        if n.op == "add" and n.why != "source" and len(n.args) > 2 and numerics != "fast" and differences.opened(c, n):
            return False
        if n.op == "add" and n.why != "source" and numerics != "fast" and centred.opened(c, n):
            return False
        if n.op == "fold" and numerics != "fast" and not _moves_safely(graph, n, EXP_LIMIT[compute_dtype]):
            return False
        if n.why == "source" or n.op != "un" or numerics == "fast":
            return True
        lo, hi = graph.interval(n.args[0])
        if n.attr in GROWS_LIKE_EXP:
            return holds(c, n)
        if n.attr in NOT_AT_ZERO:
            # a masked 0 is not counted against it: the node equals its class there too, so the source has the same pole
            return lo >= TINY or (n.attr == "recip" and hi <= -TINY) or _far_from_zero(n.attr, *graph.interval(c))
        return True

    nodes = {c: [n for n in ns if legal(c, n)] for c, ns in graph.nodes.items()}
    if numerics != "fast":
        for c, ns in list(nodes.items()):
            if any(_steep(n) and not holds(c, n) for n in ns):
                nodes = _kept_apart(nodes, c)
    return _few(usable(nodes, graph.outputs), graph.outputs)


def _far_from_zero(f: str, lo: float, hi: float) -> bool:
    """Do bounds of the result keep the argument away from 0?  They may be known where the argument's are not, if the source comes by
    the result in another way."""
    match f:
        case "recip":
            return max(-lo, hi) <= 1 / TINY
        case "rsqrt":
            return hi <= TINY**-0.5
    return lo >= {"log": math.log, "log2": math.log2, "log10": math.log10}[f](TINY)


def _few(nodes: dict[int, list[Node]], roots: tuple[int, ...]) -> dict[int, list[Node]]:
    """The first MOST nodes of a class, and the source's: a class of sums whose terms cancel in many ways may have thousands, none of
    them better than the first."""
    if all(len(ns) <= MOST for ns in nodes.values()):
        return nodes
    few = usable({c: [n for i, n in enumerate(ns) if i < MOST or n.why == "source"] for c, ns in nodes.items()}, roots)
    return few if all(r in few for r in roots) else nodes


def _moves_safely(graph: Graph, n: Node, limit: float) -> bool:
    """Can no exponential overflow by which a fold moves its components from one pivot to another?  A part's maximum is at most the
    whole's; its mean may be as far above it as the values are apart."""
    monoid, component, _ = n.attr  # type: ignore[misc]
    _, components = monoid.needed(component)
    return all(
        _most_moved(graph, n, monoid, t.args[0]) <= limit
        for i in components
        for j, e in monoid.coef[i]
        for t in postorder([e])
        if t.op == "un" and t.attr in GROWS_LIKE_EXP
    )


def _most_moved(graph: Graph, n: Node, monoid: Monoid, t: Term) -> float:
    """The most that a sum of multiples of pivots may come to; what is no such sum is not judged (−∞)."""
    parts = _linear(t)
    if parts is None:
        return -math.inf
    most = parts.pop("", 0.0)
    for p in {int(v[1:]) for v in parts}:
        old, new = parts.get(f"r{p}", 0.0), parts.get(f"R{p}", 0.0)
        lo, hi = graph.interval(n.args[p])
        kind = monoid.pivots[p]
        if kind not in ("max", "min") and kind[0] != "mean":
            return -math.inf
        if old == -new:  # old·(r − R)
            least, largest = (lo - hi if kind != "min" else 0.0), (hi - lo if kind != "max" else 0.0)
            most += max(0.0, old * (largest if old > 0 else least)) if old else 0.0
        else:
            most += sum(max(x * lo, x * hi) for x in (old, new) if x)
    return most


def _linear(t: Term) -> dict[str, float] | None:
    """A sum of multiples of variables: variable → factor, "" → constant; None if it is none."""
    if t.op == "num":
        return {"": float(t.attr)}  # type: ignore[arg-type]
    if t.op == "var":
        return {str(t.attr): 1.0}
    if t.op not in ("add", "mul"):
        return None
    parts = [_linear(a) for a in t.args]
    out: dict[str, float] = {} if t.op == "add" else {"": 1.0}
    for p in parts:
        if p is None:
            return None
        if t.op == "add":
            out = {v: out.get(v, 0.0) + p.get(v, 0.0) for v in {**out, **p}}
        elif set(p) <= {""}:
            out = {v: x * p.get("", 0.0) for v, x in out.items()}
        elif set(out) <= {""}:
            out = {v: x * out[""] for v, x in p.items()}
        else:
            return None
    return out


def _steep(n: Node) -> bool:
    return n.op == "un" and n.attr in GROWS_LIKE_EXP


def _kept_apart(nodes: dict[int, list[Node]], overflows: int) -> dict[int, list[Node]]:
    """Without nodes by which a class that the source makes without the one that overflows would be made of it."""
    own = {c: [n for n in ns if n.why == "source"] or ns for c, ns in nodes.items()}
    apart = _made({c: [n for n in ns if c != overflows or not _steep(n)] for c, ns in own.items()})
    return {c: [n for n in ns if n.why == "source" or c not in apart or apart.issuperset(n.args)] for c, ns in nodes.items()}


class _Ranges:
    """What products read is rounded to a type with a small range.  What the source has fits as well as it does in the source; of
    anything else bounds must say that it fits, and not that it is as good as 0."""

    def __init__(self, graph: Graph, most: float):
        self.graph, self.most = graph, most
        summed = {n.args[0] for _, n in graph.items() if n.op == "red" and n.attr[0] == "+"}  # type: ignore[index]
        self.summed = summed | {a for _, n in graph.items() if n.op == "fold" for a in n.args}

    def hold(self, c: int, n: Node) -> bool:
        """Do operands fit, if this is a product of matrices that a sum adds up?"""
        if n.op != "mul" or c not in self.summed:
            return True
        near, others = self._operands(n)
        return not others or (self._fits(near) and self._fits(others))

    def _fits(self, factors: Sequence[int], depth: int = 4) -> bool:
        """Does the product of some factors?  One of them may be as large as what the source has."""
        if 0.0 < math.prod(map(self._size, factors)) < FLOAT16_LEAST and not all(self.graph.has(f, "source") for f in factors):
            return False
        large = [f for f in factors if self._size(f) > 1.0]
        return (len(large) == 1 and self._tame(large[0], depth)) or math.prod(map(self._size, large)) <= self.most

    def _tame(self, c: int, depth: int) -> bool:
        """Is it within bounds, or at most as large as what the source has?"""
        if self.graph.has(c, "source") or self._size(c) <= self.most:
            return True
        return depth > 0 and any(self._tamed(n, depth - 1) for n in self.graph.nodes[c])

    def _tamed(self, n: Node, depth: int) -> bool:
        match n.op:
            case "view":
                return self._tame(n.args[0], depth)
            case "where":
                return all(self._tame(a, depth) for a in n.args[1:])
        return n.op == "mul" and self._fits(n.args, depth)

    def _size(self, c: int) -> float:
        lo, hi = self.graph.interval(c)
        return max(-lo, hi)

    def _operands(self, n: Node) -> tuple[list[int], list[int]]:
        """The factors as they are gathered: those that have no more axes than the widest one, and the others."""
        axes = {a: self.graph.free.get(a, frozenset()) for a in n.args}
        wide = max(axes.values(), key=lambda xs: math.prod(self.graph.extents.get(a, 2) for a in xs))
        return [a for a in n.args if axes[a] <= wide], [a for a in n.args if not axes[a] <= wide]


class _Differences:
    """Sums that open a difference: a class may have thousands, so what they would open is looked up by its first term."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.known: dict[int, dict[int, set[tuple[int, frozenset[int]]]]] = {}

    def opened(self, c: int, n: Node) -> bool:
        """Has the sum the terms of a difference that the source's sum for the class takes as one?"""
        if c not in self.known:
            self.known[c] = self._inside(c)
        terms, by_first = set(n.args), self.known[c]
        return any(d not in terms and s < terms for a in terms for d, s in by_first.get(a, ()))

    def _inside(self, c: int) -> dict[int, set[tuple[int, frozenset[int]]]]:
        """Least term → differences that begin with it: the class, and its terms in one of its sums."""
        out: dict[int, set[tuple[int, frozenset[int]]]] = {}
        for d in {a for m in self.graph.nodes[c] if m.op == "add" and m.why == "source" for a in m.args}:
            for terms in {frozenset(m.args) for m in self.graph.nodes[d] if m.op == "add"}:
                if any(_is_negative(self.graph, a) for a in terms):
                    out.setdefault(min(terms), set()).add((d, terms))
        return out


class _Centred:
    """Products, and sums of them, that the source makes of what it has centred: factors x − m, m a reduction."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.differences = frozenset(c for c in graph.nodes if self._is_centred(c))
        self.wanted = {c: f for c in graph.nodes if (f := self._factors(c))} if self.differences else {}

    def _is_centred(self, c: int) -> bool:
        for n in self.graph.nodes[c]:
            if n.op == "add" and n.why == "source" and len(n.args) == 2:
                negative = [a for a in n.args if _is_negative(self.graph, a)]
                if len(negative) == 1 and any(self._reduced(a) for m in self.graph.nodes[negative[0]] for a in m.args):
                    return True
        return False

    def _reduced(self, c: int) -> bool:
        """Is it a reduction, or a multiple of one?"""
        nodes = self.graph.nodes
        return any(
            m.op in ("red", "fold") or (m.op == "mul" and any(k.op in ("red", "fold") for a in m.args for k in nodes[a]))
            for m in nodes[c]
        )

    def _factors(self, c: int) -> frozenset[int]:
        """Centred factors of the source's product, or of what its sum sums."""
        for n in self.graph.nodes[c]:
            if n.why == "source":
                if n.op == "mul":
                    return self.differences & set(n.args)
                if n.op == "red" and n.attr[0] == "+":  # type: ignore[index]
                    return self._factors(n.args[0])
        return frozenset()

    def opened(self, c: int, n: Node) -> bool:
        """Does the sum lack such a factor in one of its terms?  (Folds have it: they are centred.)"""
        wanted = self.wanted.get(c)
        return wanted is not None and not all(self._has(a, f) for f in wanted for a in n.args)

    def _has(self, c: int, factor: int, depth: int = 4) -> bool:
        return c == factor or any(
            n.op == "fold" or (n.op in ("mul", "red") and depth > 0 and any(self._has(a, factor, depth - 1) for a in n.args))
            for n in self.graph.nodes[c]
        )


def _is_negative(graph: Graph, c: int) -> bool:
    return any(
        m.op == "mul" and any(k.op == "num" and k.attr < 0 for a in m.args for k in graph.nodes[a]) for m in graph.nodes[c]
    )


def usable(nodes: dict[int, list[Node]], roots: tuple[int, ...]) -> dict[int, list[Node]]:
    """Without nodes that no legal term can have, and without classes that the roots do not reach."""
    made = _made(nodes)
    out: dict[int, list[Node]] = {}
    stack = [r for r in roots if r in made]
    while stack:
        c = stack.pop()
        if c not in out:
            out[c] = [n for n in nodes[c] if made.issuperset(n.args)]
            stack.extend(a for n in out[c] for a in n.args)
    return out


def _made(nodes: dict[int, list[Node]]) -> set[int]:
    """Classes that some term has."""
    waiting: dict[int, list[tuple[int, int]]] = {}  # class → nodes (class, place) that miss it
    missing: dict[tuple[int, int], int] = {}
    made: set[int] = set()
    todo: list[int] = []
    for c, ns in nodes.items():
        for i, n in enumerate(ns):
            args = set(n.args)
            missing[c, i] = len(args)
            for a in args:
                waiting.setdefault(a, []).append((c, i))
            if not args and c not in made:
                made.add(c)
                todo.append(c)
    while todo:
        for c, i in waiting.get(todo.pop(), ()):
            missing[c, i] -= 1
            if not missing[c, i] and c not in made:
                made.add(c)
                todo.append(c)
    return made


def _operands(graph: Graph) -> frozenset[int]:
    """Classes that are a factor of a summed product, directly or through a choice between values."""
    out: set[int] = set()
    products = {n.args[0] for _, n in graph.items() if n.op == "red" and n.attr[0] == "+"}  # type: ignore[index]
    products |= {a for _, n in graph.items() if n.op == "fold" for a in n.args}
    stack = [a for p in products for n in graph.nodes[p] for a in (n.args if n.op == "mul" else ())] + list(products)
    while stack:
        c = stack.pop()
        if c in out:
            continue
        out.add(c)
        for n in graph.nodes[c]:
            if n.op in ("where", "mul"):
                stack.extend(n.args[1:] if n.op == "where" else n.args)
    return frozenset(out)
