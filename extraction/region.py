"""A region under canonical names, so that equal regions are searched once and names can have no influence.

Classes become 0, 1, …, axes a0, a1, … and buffers b0, b1, …; the order comes from structure and from the order of axes and inputs in the
program, never from names.  `Binding` leads back.
"""

from __future__ import annotations

import zlib
from collections.abc import Set
from dataclasses import dataclass, field, replace

from .. import terms as T
from ..graph import Node
from ..terms import Affine, Index
from .classes import Classes
from .legality import usable
from .regions import Cone

ROUNDS = 6  # how deep the hash of a class looks


@dataclass(frozen=True)
class Memory:
    """An array that a region reads or writes: an input, or a class that some kernel stores.  known: as of `plan.Buffer`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    index: Index  # where the element at given axes lies
    known: tuple[str, ...] = ()


@dataclass
class Region:
    """nodes    usable nodes of each class; "stored" (attr: its Memory) marks a class that another region has made
    free        free axes of each class
    rank        order in which classes may read each other from memory: only smaller ones
    cut         may the class be stored
    read        may it be read back from there
    dtype       its type in memory
    cancels     may it, made by a rule, cancel as a factor of what a sum adds up, so that it must not be rounded there?
    summed      is it a product that a sum adds up?
    known       what is known of its elements, as of `plan.Buffer`
    layout      its axes in the order in which a buffer of our own has them
    outputs     root → arrays of the program that it must fill (others get a buffer of their own)
    """

    roots: tuple[int, ...]
    nodes: list[list[Node]]
    free: list[frozenset[str]]
    rank: list[int]
    cut: list[bool]
    read: list[bool]
    source: list[bool]
    dtype: list[str]
    known: list[tuple[str, ...]]
    layout: list[tuple[str, ...]]
    cancels: list[bool]
    summed: list[bool]
    extents: dict[str, int]
    inputs: dict[str, Memory]
    outputs: dict[int, tuple[Memory, ...]]
    half: str | None
    compute_dtype: str
    wide: bool
    key: tuple = ()

    def input_of(self, c: int) -> Node | None:
        return next((n for n in self.nodes[c] if n.op == "input"), None)

    def stored(self, c: int) -> Memory | None:
        n = self.nodes[c]
        return n[0].attr if n and n[0].op == "stored" else None  # type: ignore[return-value]


def axis_key(axis: str) -> tuple[int, str]:
    base, _, part = axis.partition(".")
    return int(base[1:]), part


def without(region: Region, axes: Set[str]) -> Region:
    """The region without views of tensors that have these axes, and so without those tensors; classes keep their numbers."""

    if not any(_shows(n, axes) for ns in region.nodes for n in ns):
        return region
    kept = _without(dict(enumerate(region.nodes)), region.roots, axes)
    return replace(region, nodes=[kept.get(c, []) for c in range(len(region.nodes))])


def _without(nodes: dict[int, list[Node]], roots: tuple[int, ...], axes: Set[str]) -> dict[int, list[Node]]:
    return usable({c: [n for n in ns if not _shows(n, axes)] for c, ns in nodes.items()}, roots) if axes else nodes


def _shows(n: Node, axes: Set[str]) -> bool:
    """Is the node a view of a tensor that has one of these axes?"""
    return n.op == "view" and any(a in axes for a, _ in n.attr)  # type: ignore[attr-defined]


@dataclass
class Binding:
    """From canonical to real: classes, axes, arrays, nodes."""

    classes: list[int] = field(default_factory=list)
    axes: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)
    nodes: list[list[Node]] = field(default_factory=list)


def canonical(cl: Classes, cone: Cone, stored: dict[int, Memory], made: Set[str] = frozenset()) -> tuple[Region, Binding]:
    """The region of a cone.  stored: where the classes lie that other regions have made.  made: axes that rules have made: tensors
    with these come last, and all others are numbered as if there were none."""
    place = {a: i for i, a in enumerate(cl.program.axes)}
    order = {i.name: n for n, i in enumerate(cl.program.inputs)}
    hashes = _structure(cl, cone.nodes, order)
    without_made = _without(cone.nodes, cone.roots, made)
    if made:
        hashes |= _structure(cl, without_made, order)
    # classes in the order of a walk from the roots, nodes and arguments of sums and products by structure
    nodes = {
        c: sorted((_settled(n, hashes) for n in ns), key=lambda n: (_shows(n, made), _node_hash(n, hashes, cl, order), n.args))
        for c, ns in cone.nodes.items()
    }
    classes: list[int] = []
    number: dict[int, int] = {}
    for some in ([without_made] if made else []) + [cone.nodes]:
        seen: set[int] = set()
        stack = list(reversed(cone.roots))
        while stack:
            c = stack.pop()
            if c in seen:
                continue
            seen.add(c)
            if c not in number:
                number[c] = len(classes)
                classes.append(c)
            stack.extend(a for n in reversed(nodes[c]) for a in reversed(n.args) if a in some and a not in seen)
    used = _axes(cl, cone, stored)
    names = {a: f"a{i}" for i, a in enumerate(sorted(used, key=place.__getitem__))}
    arrays = sorted({n.attr[0] for ns in nodes.values() for n in ns if n.op == "input"}, key=order.__getitem__)  # type: ignore[index]
    buffers = {x: f"b{i}" for i, x in enumerate(arrays)}

    def axis(a: str) -> str:
        base, dot, part = a.partition(".")
        return names[base] + dot + part

    def affine(ix: Affine) -> Affine:
        return Affine(ix.const, tuple((axis(a), k) for a, k in ix.terms))

    leaf_names: dict[int, str] = {}

    def memory(m: Memory, name: str) -> Memory:
        return Memory(name, m.shape, m.dtype, tuple(map(affine, m.index)), m.known)

    def attr(n: Node) -> object:
        match n.op:
            case "input":
                name, index = n.attr  # type: ignore[misc]
                return buffers[name], tuple(map(affine, index))
            case "stored":
                return memory(stored[n.attr], leaf_names.setdefault(n.attr, f"s{len(leaf_names)}"))  # type: ignore[index,arg-type]
            case "iota" | "gather":
                return axis(n.attr)  # type: ignore[arg-type]
            case "red":
                return n.attr[0], axis(n.attr[1])  # type: ignore[index]
            case "fold":
                return n.attr[0], n.attr[1], axis(n.attr[2])  # type: ignore[index]
            case "view":
                return tuple((axis(a), affine(i)) for a, i in n.attr)  # type: ignore[attr-defined]
        return n.attr

    canon = [
        [Node(n.op, attr(n), tuple(number[a] for a in n.args), "source" if n.why == "source" else "") for n in nodes[c]]
        for c in classes
    ]
    whole = {
        c: not any("." in a for a in cl.graph.free[c]) for c in classes
    }  # partial results come before what they are parts of
    order_of = {c: i for i, c in enumerate(sorted(classes, key=lambda c: (cl.size(c), whole[c], number[c])))}
    outputs = {
        number[c]: tuple(
            Memory(f"o{number[c]}_{i}", o.shape, o.dtype, tuple(map(affine, o.index(cl.program.axes))), cl.known(c))
            for i, (_, o) in enumerate(cl.outputs[c])
        )
        for c in cone.roots
        if c in cl.outputs
    }
    ins = {i.name: i for i in cl.program.inputs}
    region = Region(
        tuple(number[c] for c in cone.roots),
        canon,
        [frozenset(map(axis, cl.graph.free[c])) for c in classes],
        [order_of[c] for c in classes],
        [c in cl.materialisable or c in cone.roots for c in classes],
        [(c in cl.materialisable or c in cone.roots) and cl.readable(c) for c in classes],
        [c in cl.source for c in classes],
        [cl.dtype(c) for c in classes],
        [cl.known(c) if c in cl.materialisable or c in cone.roots else () for c in classes],
        [tuple(map(axis, cl.layout(c))) if c in cl.materialisable or c in cone.roots else () for c in classes],
        [c in cl.cancelling[0] for c in classes],
        [c in cl.cancelling[1] for c in classes],
        {name: cl.program.axes[a] for a, name in names.items()},
        {buffers[x]: Memory(buffers[x], ins[x].shape, ins[x].dtype, (), cl.known_of_inputs[x]) for x in arrays},
        outputs,
        cl.half,
        cl.program.compute_dtype,
        cl.program.wide,
    )
    region.key = (
        region.roots,
        tuple(tuple((n.op, n.attr.hex() if n.op == "num" else n.attr, n.args, n.why) for n in ns) for ns in region.nodes),  # type: ignore[attr-defined]
        tuple(tuple(sorted(f)) for f in region.free),
        tuple(region.rank),
        tuple(region.cut),
        tuple(region.read),
        tuple(region.source),
        tuple(region.dtype),
        tuple(region.known),
        tuple(region.layout),
        tuple(region.cancels),
        tuple(region.summed),
        tuple(sorted(region.extents.items())),
        tuple(region.inputs.values()),
        tuple(sorted(region.outputs.items())),
    )
    return region, Binding(
        classes, {v: k for k, v in names.items()}, {v: k for k, v in buffers.items()}, [nodes[c] for c in classes]
    )


def _settled(n: Node, hashes: dict[int, int]) -> Node:
    """The node with the arguments of sums and products in an order that structure gives."""
    return Node(n.op, n.attr, tuple(sorted(n.args, key=hashes.__getitem__)), n.why) if n.op in ("add", "mul") else n


def _axes(cl: Classes, cone: Cone, stored: dict[int, Memory]) -> set[str]:
    out: set[str] = set()
    for c, ns in cone.nodes.items():
        out |= {T.base(a) for a in cl.graph.free[c]}
        for n in ns:
            match n.op:
                case "input":
                    out |= {T.base(a) for ix in n.attr[1] for a in ix.axes}  # type: ignore[index]
                case "stored":
                    out |= {T.base(a) for ix in stored[n.attr].index for a in ix.axes}  # type: ignore[index]
                case "iota" | "gather":
                    out.add(T.base(n.attr))  # type: ignore[arg-type]
                case "red" | "fold":
                    out.add(T.base(n.attr[-1]))  # type: ignore[index]
                case "view":
                    out |= {T.base(x) for a, ix in n.attr for x in (a, *ix.axes)}  # type: ignore[attr-defined]
    for c in cone.roots:
        for _, o in cl.outputs.get(c, ()):
            out |= {a for d in o.dims for a in d}
    return out


# ------------------------------------------------------------------ hashes that do not depend on names

_OPS: dict[str, int] = {}


def _code(s: object) -> int:
    t = str(s)
    if t not in _OPS:
        _OPS[t] = zlib.crc32(t.encode())
    return _OPS[t]


def _attr_hash(n: Node, cl: Classes, order: dict[str, int]) -> int:
    def axis(a: str) -> int:
        base, _, part = a.partition(".")
        return hash((cl.program.axes.get(base, 0), _code(part)))

    def affine(ix: Affine) -> int:
        return hash((ix.const, tuple((axis(a), k) for a, k in ix.terms)))

    match n.op:
        case "num":
            return _code(n.attr.hex())  # type: ignore[attr-defined]
        case "input":
            name, index = n.attr  # type: ignore[misc]
            i = cl.program.inputs[order[name]]
            return hash((_code(i.dtype), i.shape, tuple(map(affine, index))))
        case "iota" | "gather":
            return axis(n.attr)  # type: ignore[arg-type]
        case "red":
            return hash((_code(n.attr[0]), axis(n.attr[1])))  # type: ignore[index]
        case "fold":
            return hash((_code(n.attr[0]), n.attr[1], axis(n.attr[2])))  # type: ignore[index]
        case "view":
            return hash(tuple((axis(a), affine(ix)) for a, ix in n.attr))  # type: ignore[attr-defined]
        case "stored":
            return 1
    return _code(n.attr) if n.attr is not None else 0


def _node_hash(n: Node, classes: dict[int, int], cl: Classes, order: dict[str, int]) -> int:
    return hash((_code(n.op), _attr_hash(n, cl, order), tuple(classes[a] for a in n.args)))


def _structure(cl: Classes, nodes: dict[int, list[Node]], order: dict[str, int]) -> dict[int, int]:
    """A hash of each class by what its nodes are, refined by what their arguments are."""
    out = {c: 0 for c in nodes}
    own = {c: [(_code(n.op), _attr_hash(n, cl, order), n) for n in ns] for c, ns in nodes.items()}
    for _ in range(ROUNDS):
        out = {c: hash(tuple(sorted((op, at, tuple(out[a] for a in n.args)) for op, at, n in ns))) for c, ns in own.items()}
    return out
