"""Tile programs: what one block of a kernel does, in SSA form over tiles with named axes.

Every backend and the cost model read this and nothing before it.  A `Value` is a tile: its axes are a sorted tuple of the
kernel's axes, each as long as the axis' tile (`Axis.tile`; clipped at a ragged end).  Broadcasting is by name.  A block owns one tile of
every grid axis; `Loop` walks a loop axis tile by tile; carried state is explicit.  Statements run in order.

Ragged ends: `limits[axis]` is an affine expression that is ≥ 0 exactly on the elements that exist (absent: all do).  Elements
that do not exist count as the identity in every `Reduce` and `Contract`, are not stored, and are never read from memory.
A read through an index outside the buffer gives 0.

Masks: `Mask` is 1 where all its affine constraints are ≥ 0.  `Loop.constraints` hold on every element that contributes anything in the
loop: an iteration in which one of them is negative on the whole tile may be skipped, but never all iterations (in any of them a row
that nothing is kept of may get its NaN); where all are ≥ 0 on the whole tile, the `Mask` values inside made of these constraints alone
are 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ..extraction.plan import Axis, Buffer
from ..terms import Affine, Index


@dataclass(frozen=True)
class Value:
    """A tile.  Identified by number within its program."""

    id: int
    axes: tuple[str, ...]
    predicate: bool = False  # 0 or 1

    def __str__(self) -> str:
        return f"%{self.id}[{','.join(self.axes)}]"


@dataclass(frozen=True)
class Load:
    """out = buffer[index]; index is over the kernel's axes, one `Affine` a dimension; outside the buffer: 0."""

    out: Value
    buffer: str
    index: Index


@dataclass(frozen=True)
class Gather:
    """out = buffer[index] with dimension `dim` at index[dim] + the value of `position` (integers) instead."""

    out: Value
    buffer: str
    index: Index
    dim: int
    position: Value


@dataclass(frozen=True)
class Const:
    out: Value
    value: float


@dataclass(frozen=True)
class Iota:
    """out = the value of an affine expression of positions."""

    out: Value
    index: Affine


@dataclass(frozen=True)
class Mask:
    """out = 1 where every constraint is ≥ 0, else 0."""

    out: Value
    constraints: tuple[Affine, ...]


@dataclass(frozen=True)
class Map:
    """out = fn(args) elementwise.  fn: "add", "mul" (two or more arguments), "sub", "div" (two), "where" (three), or a name of
    terms.UNARY / terms.BINARY.  role says what it is for, where a schedule may care: "pivot" (new pivot from old and tile's),
    "rescale" (carried state moved to the new pivot), "weight" (coefficient of an element at the new pivot), or ""."""

    out: Value
    fn: str
    args: tuple[Value, ...]
    role: str = ""


@dataclass(frozen=True)
class Reduce:
    """out = op over `axes` of arg, combined with acc if there is one.  op: "+", "*", "max", "min"."""

    out: Value
    op: str
    axes: tuple[str, ...]
    arg: Value
    acc: Value | None = None
    role: str = ""


@dataclass(frozen=True)
class Contract:
    """out = Σ over `axes` of a·b, plus acc if there is one.  Axes of both operands that are not summed are batch axes."""

    out: Value
    axes: tuple[str, ...]
    a: Value
    b: Value
    acc: Value | None = None
    role: str = ""


@dataclass(frozen=True)
class Store:
    """buffer[index] = arg, rounded to the buffer's dtype.  Axes of the index that arg lacks are broadcast."""

    buffer: str
    index: Index
    arg: Value


@dataclass(frozen=True)
class Carry:
    """State of a loop: `init` before it, `phi` at the head of an iteration, `next` at its end, `out` after it (init if no
    iteration ran).  kind: "pivot" (with its fold operator), "linear" (a fold's component), "sum" (an ordinary reduction)."""

    init: Value
    phi: Value
    next: Value
    out: Value
    kind: str
    op: str = "+"


@dataclass(frozen=True)
class Loop:
    axis: str
    carries: tuple[Carry, ...]
    body: tuple[Stmt, ...]
    constraints: tuple[Affine, ...] = ()


Stmt = Load | Gather | Const | Iota | Mask | Map | Reduce | Contract | Store | Loop


@dataclass(frozen=True)
class TileProgram:
    """axes: what the kernel walks (role, extent, tile).  extents: of every axis, whole axes beside their parts.
    compute_dtype: of values that are not merely loaded ("float32" or "float64").  wide: no Contract rounds such an operand."""

    name: str
    axes: dict[str, Axis]
    extents: dict[str, int]
    limits: dict[str, Affine]
    body: tuple[Stmt, ...]
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]
    compute_dtype: str = "float32"
    choices: dict[str, object] = field(default_factory=dict)
    wide: bool = False

    @cached_property
    def statements(self) -> tuple[Stmt, ...]:
        """Every statement, loops before their bodies."""
        return tuple(walk(self.body))

    @property
    def grid(self) -> tuple[str, ...]:
        return tuple(a for a, x in self.axes.items() if x.role == "grid")

    def buffer(self, name: str) -> Buffer:
        return next(b for b in (*self.reads, *self.writes) if b.name == name)

    def __str__(self) -> str:
        ax = ", ".join(
            f"{a}: {x.extent}" + (f"/{x.tile}" if x.tile != x.extent else "") + f" {x.role}" for a, x in self.axes.items()
        )
        lim = "".join(f"\n  exists {a}: {ix} ≥ 0" for a, ix in self.limits.items())
        return f"kernel {self.name}({ax}){lim}\n" + "\n".join(lines(self.body, 1))


def walk(body: tuple[Stmt, ...]) -> Iterator[Stmt]:
    """Every statement, loops before their bodies."""
    for s in body:
        yield s
        if isinstance(s, Loop):
            yield from walk(s.body)


def operands(s: Stmt) -> tuple[Value, ...]:
    """Values that a statement reads (a loop: the initial values of its carries)."""
    return _OPERANDS[type(s)](s)


_OPERANDS: dict[type, Callable[[Any], tuple[Value, ...]]] = {
    Map: lambda s: s.args,
    Reduce: lambda s: (s.arg, s.acc) if s.acc else (s.arg,),
    Contract: lambda s: (s.a, s.b, s.acc) if s.acc else (s.a, s.b),
    Gather: lambda s: (s.position,),
    Store: lambda s: (s.arg,),
    Loop: lambda s: tuple(c.init for c in s.carries),
    **dict.fromkeys((Load, Const, Iota, Mask), lambda s: ()),
}


def results(s: Stmt) -> tuple[Value, ...]:
    if isinstance(s, Loop):
        return tuple(c.out for c in s.carries)
    return () if isinstance(s, Store) else (s.out,)


def live(body: Iterable[Stmt], used: set[int]) -> tuple[Stmt, ...]:
    """The statements whose results are used, going backwards; `used` grows by what they read."""
    out: list[Stmt] = []
    for s in reversed(list(body)):
        if isinstance(s, Loop):
            used.update(c.next.id for c in s.carries)
            s = replace(s, body=live(s.body, used))
        elif not isinstance(s, Store) and s.out.id not in used:
            continue
        used.update(v.id for v in operands(s))
        out.append(s)
    return tuple(reversed(out))


def lines(body: tuple[Stmt, ...], depth: int) -> Iterator[str]:
    """Printed form, a statement a line."""
    pad = "  " * depth

    def ix(index: Index) -> str:
        return ", ".join(map(str, index))

    for s in body:
        match s:
            case Load():
                yield f"{pad}{s.out} = load {s.buffer}[{ix(s.index)}]"
            case Gather():
                yield f"{pad}{s.out} = gather {s.buffer}[{ix(s.index)}] dim {s.dim} at {s.position}"
            case Const():
                yield f"{pad}{s.out} = {s.value!r}"
            case Iota():
                yield f"{pad}{s.out} = position {s.index}"
            case Mask():
                yield f"{pad}{s.out} = mask {' and '.join(f'{c} ≥ 0' for c in s.constraints)}"
            case Map():
                yield f"{pad}{s.out} = {s.fn} {', '.join(map(str, s.args))}" + (f"    # {s.role}" if s.role else "")
            case Reduce():
                acc = f"{s.acc} {s.op} " if s.acc else ""
                yield f"{pad}{s.out} = {acc}reduce {s.op} over {','.join(s.axes)} of {s.arg}"
            case Contract():
                acc = f"{s.acc} + " if s.acc else ""
                yield f"{pad}{s.out} = {acc}contract {','.join(s.axes)} of {s.a}, {s.b}"
            case Store():
                yield f"{pad}store {s.buffer}[{ix(s.index)}] = {s.arg}"
            case Loop():
                con = f"  where {' and '.join(f'{c} ≥ 0' for c in s.constraints)}" if s.constraints else ""
                yield f"{pad}for {s.axis}{con}:" + "".join(
                    f"\n{pad}    {c.phi} := {c.init}    # {c.kind} {c.op}" for c in s.carries
                )
                yield from lines(s.body, depth + 1)
                for c in s.carries:
                    yield f"{pad}  next {c.phi} = {c.next}, after {c.out}"
