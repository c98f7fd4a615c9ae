"""What is decided about a tile program before it is printed: warps, layouts, what lies in shared memory, which contractions use
tensor cores.  `planner.plan` decides, fragments.py prints."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ...terms import Affine
from ..tile import (
    Carry,
    Contract,
    Load,
    Loop,
    Map,
    Reduce,
    Store,
    TileProgram,
    Value,
)
from .arch import Arch
from .layout import ROW, Layout

HALVES = ("bfloat16", "float16")
EIGHTS = ("float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True)
class Precision:
    """accurate: results, or operands of products, are wanted in float32 or float64, so nothing is rounded on the way.  half: the 16-bit
    dtype that computed operands of a tensor-core product are rounded to (None: there is none)."""

    accurate: bool
    half: str | None
    compute: str = "float32"


@dataclass
class TilePlan:
    """A loaded tile in shared memory: outer × inner elements, `inner` contiguous.  stages: how many of it a loop keeps."""

    load: Load
    outer: tuple[str, ...]
    inner: tuple[str, ...]
    rows: int = 0
    columns: int = 0
    packed: bool = True
    loop: str | None = None
    stages: int = 1
    offset: int = 0
    bytes: int = 0


@dataclass
class Operand:
    """where: "tile" (a loaded tile), "register" (in fragments, rounded) or "staged" (computed, then put into shared memory)."""

    where: str
    value: Value
    layout: Layout | None = None
    held: bool = False
    offset: int = 0
    bytes: int = 0


@dataclass
class ContractPlan:
    kind: str  # "tensor" or "plain"
    dtype: str
    left: Operand
    right: Operand
    left_axes: tuple[str, ...]
    right_axes: tuple[str, ...]
    inner: tuple[str, ...]
    steps: int = 0

    @property
    def tiles(self) -> tuple[int, ...]:
        """Of the operands those that are loaded tiles."""
        return tuple(x.value.id for x in (self.left, self.right) if x.where == "tile")


@dataclass(frozen=True)
class RoundedSum:
    """A sum of what is also an operand, rounded, of a product over the same axes.  It adds the rounded values: so in a quotient of
    the two the rounding cancels, and a mean of one value is that value.  by_matrix: as a product with ones (whole rows of a left
    operand that stays in registers, `steps` as in its product)."""

    dtype: str
    steps: int
    by_matrix: bool


@dataclass
class Schedule:
    program: TileProgram
    arch: Arch
    precision: Precision
    kind: str  # "fragment" or "vector"
    warps_row: int
    warps_column: int
    warps_split: int  # warps that share a loop's tiles, each with a fold of its own
    split: Loop | None  # the loop that warps share, and the blocks of a cluster
    tile: dict[str, int]
    forced: frozenset[str]  # axes laid out although a block sees one position of them
    home: dict[int, Layout] = field(default_factory=dict)
    instances: dict[int, list[Layout]] = field(default_factory=dict)
    frames: dict[int, Layout] = field(default_factory=dict)  # by id of a Reduce's result
    store_frames: dict[int, Layout] = field(default_factory=dict)  # by id() of the Store, within one plan
    tiles: dict[int, TilePlan] = field(default_factory=dict)
    contracts: dict[int, ContractPlan] = field(default_factory=dict)
    sums: dict[int, RoundedSum] = field(default_factory=dict)  # by id of a Reduce's result
    deferred: frozenset[int] = frozenset()  # phis of carries kept as partial sums of each lane until their loop ends
    pieces: frozenset[int] = frozenset()  # what is loaded piece by piece where it is used
    scratch: int = 0
    scratch_bytes: int = 0
    join: int = 0  # where warps that share a loop exchange their states
    shared: int = 0
    registers: int = 0
    min_blocks: int = 1
    cluster: int = 1  # blocks whose warps share the loop's tiles, too

    @property
    def warps(self) -> int:
        return self.warps_row * self.warps_column * self.warps_split

    @property
    def threads(self) -> int:
        return self.warps * self.arch.warp


def missing_limits(p: TileProgram, reduced: Iterable[str], axes: Iterable[str]) -> list[Affine]:
    """Conditions for elements to exist that may fail along reduced axes, for a value with these axes."""
    reduced = set(reduced)
    return [p.limits[a] for a in sorted(set(axes)) if a in p.limits and set(p.limits[a].axes) & reduced]


def slots_of(side: str, arch: Arch) -> int:
    return arch.row_slots if side == ROW else arch.column_slots


def staged_shape(layout: Layout, arch: Arch) -> tuple[int, int]:
    """Rows and columns of a computed operand in shared memory."""
    assert layout.row is not None and layout.column is not None
    return -(-layout.row.padded // arch.grain) * arch.grain, -(-layout.column.padded // arch.grain) * arch.grain


def tile_bytes(rows: int, columns: int, width: int) -> int:
    """Bytes of a Tile of the device header."""
    chunk = 16 // width
    chunks = -(-columns // chunk)
    return rows * (chunks if chunks % 8 == 0 else chunks | 1) * 16


def mergeable(loop: Loop) -> bool:
    """Can states of two parts of the loop be joined from the loop's own statements?"""
    return all(merge_steps(loop, c) is not None for c in loop.carries)


def merge_steps(loop: Loop, c: Carry) -> tuple[str, list[Map], Value] | None:
    """How parts of a carried state join: (operator, statements, value).  The statements work out, from the old state (the phis)
    and the joined pivots (which stand for the pivots' nexts), the value that is combined over the parts with the operator."""
    defs = {s.out.id: s for s in loop.body if not isinstance(s, Store | Loop)}
    d = defs.get(c.next.id)
    if isinstance(d, Reduce) and d.op in ("max", "min", "*") and d.acc == c.phi:
        return d.op, [], c.phi
    v = c.next
    while isinstance(x := defs.get(v.id), Reduce | Contract) and x.acc is not None and (isinstance(x, Contract) or x.op == "+"):
        v = x.acc
    if v == c.next:
        return None
    pivots = {
        x.next.id
        for x in loop.carries
        if (y := defs.get(x.next.id)) and isinstance(y, Reduce) and y.op in ("max", "min") and y.acc == x.phi
    }
    phis = {x.phi.id for x in loop.carries}
    steps: dict[int, Map] = {}

    def visit(u: Value) -> bool:
        if u.id in phis or u.id in pivots or u.id in steps or u.id not in defs:
            return True
        s = defs[u.id]
        if not isinstance(s, Map) or loop.axis in u.axes or not all(map(visit, s.args)):
            return False
        steps[u.id] = s
        return True

    return ("+", list(steps.values()), v) if visit(v) else None
