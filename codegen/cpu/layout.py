"""Where each value of a tile program lies: its dtype, the order of its axes in memory, its place in the scratch arena.

Types.  Floats are computed in the program's compute dtype.  A value known to be an integer carries a bound on its magnitude:
float32 holds it exactly up to 2²⁴, else it is kept in float64 (exact up to 2⁵³).  Predicates are bool.

Order.  One order of the kernel's axes serves all scratch arrays, so that elementwise operands line up.  It is voted: by the
memory order of what is loaded and stored, by reductions (cheaper over an outer axis), by batched contractions (batch outermost).

Arena.  Slots are assigned by liveness; an elementwise result takes over the slot of an argument that dies there, which also
makes carried state advance in place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from ...program import DTYPES, FLOATS
from ...terms import PREDICATES, Affine
from ..tile import (
    Carry,
    Const,
    Contract,
    Gather,
    Iota,
    Load,
    Loop,
    Map,
    Mask,
    Reduce,
    Stmt,
    Store,
    TileProgram,
    Value,
    operands,
    walk,
)
from .contract import ALIGN
from .functions import INTEGRAL
from .rewrite import loose_limits, point

Strides = tuple[int, ...]  # bytes

# ------------------------------------------------------------------ types


def element_type(name: str) -> np.dtype:
    """The NumPy dtype of a buffer."""
    if name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name)


def bound_of(dtype: str) -> float | None:
    """Largest magnitude of an integer dtype; None for floats."""
    if dtype in FLOATS:
        return None
    return 1.0 if dtype == "bool" else 2.0 ** (8 * DTYPES[dtype] - (0 if dtype[0] == "u" else 1))


def product(xs: list[float]) -> float:
    return 0.0 if 0.0 in xs else math.prod(xs)


class _Types:
    """Magnitude bound of each integer value (None: a float)."""

    def __init__(self, p: TileProgram):
        self.p, self.bound = p, {}  # type: tuple[TileProgram, dict[int, float | None]]
        self.body(p.body)

    def size(self, axes: tuple[str, ...]) -> int:
        return math.prod(max(1, self.p.axes[a].tile) for a in axes)

    def body(self, body: tuple[Stmt, ...]) -> None:
        for s in body:
            if isinstance(s, Loop):
                self.loop(s)
            elif not isinstance(s, Store):
                self.bound[s.out.id] = self.of(s)

    def loop(self, s: Loop) -> None:
        """What grows by at most g in a first trip is supposed to grow by g in each; where that fails, it is unbounded."""
        trips = max(1, self.p.axes[s.axis].trips)
        state = {c.phi.id: self.bound[c.init.id] for c in s.carries}
        growth = {phi: 0.0 for phi in state}
        self.bound.update(state)
        self.body(s.body)
        for c in s.carries:
            b, n = state[c.phi.id], self.bound[c.next.id]
            growth[c.phi.id] = 0.0 if b is None or n is None else max(0.0, n - b)
            state[c.phi.id] = None if b is None or n is None else b + growth[c.phi.id] * trips
        while True:
            self.bound.update(state)
            self.body(s.body)
            wrong = {}
            for c in s.carries:
                b, n = state[c.phi.id], self.bound[c.next.id]
                if b is not None and (n is None or n > b + growth[c.phi.id]):
                    wrong[c.phi.id] = None if n is None else math.inf
            if not wrong:
                break
            state |= wrong
        self.bound.update({c.out.id: state[c.phi.id] for c in s.carries})

    def of(self, s: Stmt) -> float | None:
        b = self.bound
        match s:
            case Load() | Gather():
                return bound_of(self.p.buffer(s.buffer).dtype)
            case Const():
                return abs(s.value) if s.value.is_integer() else 0.0 if math.isinf(s.value) else None
            case Iota():
                return float(max(map(abs, s.index.bounds(self.p.extents | {a: x.extent for a, x in self.p.axes.items()}))))
            case Mask():
                return 1.0
            case Map():
                if s.fn in PREDICATES:
                    return 1.0
                args = [b[a.id] for a in (s.args[1:] if s.fn == "where" else s.args)]
                known = [a for a in args if a is not None]
                if s.fn not in INTEGRAL or len(known) < len(args):
                    return None
                return sum(known) if s.fn in ("add", "sub") else product(known) if s.fn == "mul" else max(known)
            case Reduce():
                x = b[s.arg.id]
                if x is None or s.op == "*":
                    return None if x is None else math.inf
                out = x * self.size(s.axes) if s.op == "+" else x
            case Contract():
                x, y = b[s.a.id], b[s.b.id]
                if x is None or y is None:
                    return None
                out = product([x, y, self.size(s.axes)])
            case _:
                raise TypeError(f"{s} has no value")
        if s.acc is None:
            return out
        acc = b[s.acc.id]
        return None if acc is None else out + acc if isinstance(s, Contract) or s.op == "+" else max(out, acc)


# ------------------------------------------------------------------ where values lie


@dataclass(frozen=True)
class Home:
    """kind: "const" (`value`), "arena" (`offset` bytes; contiguous over `dims` in this order), "view" (elements of a buffer, read
    in place), "target" (elements of a buffer, written in place).  stride: bytes from one element to the next along each axis of a
    view or target; start: bytes from the beginning of the buffer's window where all positions are 0; loose: it may leave the
    buffer."""

    kind: str
    dtype: np.dtype
    dims: tuple[str, ...] = ()
    offset: int = 0
    value: float = 0.0
    buffer: int = 0
    start: int = 0
    stride: tuple[tuple[str, int], ...] = ()
    loose: bool = False


@dataclass(frozen=True)
class Format:
    """How an array lies in memory: dtype, shape, strides in bytes (any sign)."""

    dtype: np.dtype
    shape: tuple[int, ...]
    strides: Strides

    @staticmethod
    def of(x: np.ndarray) -> Format:
        return Format(x.dtype, x.shape, tuple(0 if n == 1 else s for n, s in zip(x.shape, x.strides)))

    @property
    def origin(self) -> int:
        """Bytes from the lowest address to element 0."""
        return sum(-s * (n - 1) for n, s in zip(self.shape, self.strides) if s < 0 and n)

    @property
    def nbytes(self) -> int:
        """Size of the window from the lowest address to the highest one."""
        if 0 in self.shape:
            return 0
        return sum(abs(s) * (n - 1) for n, s in zip(self.shape, self.strides)) + self.dtype.itemsize


@dataclass
class Slot:
    """Memory in the arena.  until: when it is free again; busy: when the values that lie there now have been read for the last
    time (what a loop leaves behind does not count before its end)."""

    size: int
    until: float
    busy: float = 0.0
    offset: int = 0


@dataclass
class Layout:
    """homes: of each value; scratch: slots of the temporaries of a statement, by the id of its result; arena: bytes in all.
    access: elements that a load or store touches, by id(statement); conditions: masks that are read as conditions only;
    direct: values that lie in their store's target from the start."""

    homes: dict[int, Home] = field(default_factory=dict)
    scratch: dict[int, int] = field(default_factory=dict)
    arena: int = 0
    order: tuple[str, ...] = ()
    conditions: frozenset[int] = frozenset()
    access: dict[int, Home] = field(default_factory=dict)
    direct: dict[int, Store] = field(default_factory=dict)
    bound: dict[int, float | None] = field(default_factory=dict)  # largest magnitude of each value that is an integer
    work: float = 0.0  # elements that all blocks touch, about


def layout(p: TileProgram, formats: tuple[Format, ...]) -> Layout:
    """formats: of the buffers `(*p.reads, *p.writes)`."""
    return _Layout(p, formats).run()


class _Layout:
    def __init__(self, p: TileProgram, formats: tuple[Format, ...]):
        self.p, self.formats, self.out = p, formats, Layout()
        self.names = {b.name: n for n, b in enumerate((*p.reads, *p.writes))}
        self.float = np.dtype(p.compute_dtype)
        self.bound = self.out.bound = _Types(p).bound
        self.points = {a for a in p.axes if point(p, a)}
        self.extents = p.extents | {a: x.extent for a, x in p.axes.items()}
        self.boxed = [ix for a, ix in p.limits.items() if a not in loose_limits(p)]
        self.tiles = {a: x.tile for a, x in p.axes.items()}
        self.position: dict[int, int] = {}  # id(statement) → when it runs; loops: when they begin
        self.end: dict[int, int] = {}  # id(loop) → when it ends
        self.last: dict[int, int] = {}  # value → when it is read for the last time
        self.users: dict[int, list[Stmt]] = {}
        self.scope: dict[int, int] = {}  # value → id of the loop that it is made in (0: none)
        self.within: dict[int, int] = {}  # id(statement) → id of the loop around it
        self.passes: dict[int, float] = {}  # id(statement) → how often a block runs it

    # ---- facts
    def dims(self, v: Value) -> tuple[str, ...]:
        return tuple(a for a in self.out.order if a in v.axes)

    def real(self, v: Value) -> list[str]:
        return [a for a in v.axes if a not in self.points]

    def size(self, axes: tuple[str, ...] | list[str]) -> int:
        return math.prod(self.tiles[a] for a in axes)

    def dtype(self, v: Value, made_by: Stmt | None = None) -> np.dtype:
        if isinstance(made_by, Mask) or (isinstance(made_by, Map) and made_by.fn in PREDICATES):
            return np.dtype(bool)
        if isinstance(made_by, (Load, Gather)) and self.p.buffer(made_by.buffer).dtype == "bool":
            return np.dtype(bool)
        b = self.bound[v.id]
        return self.float if b is None or b <= 2.0**24 else np.dtype(np.float64)

    def strides(self, buffer: str, index: tuple[Affine, ...]) -> dict[str, int]:
        """Bytes that a step along each axis moves."""
        out: dict[str, int] = {}
        for ix, s in zip(index, self.formats[self.names[buffer]].strides):
            for a, c in ix.terms:
                out[a] = out.get(a, 0) + c * s
        return out

    def inside(self, buffer: str, index: tuple[Affine, ...]) -> bool:
        """Does the index stay in the buffer on every element of every clipped tile?"""
        for ix, n in zip(index, self.formats[self.names[buffer]].shape):
            for room in (ix, Affine(n - 1).plus(ix, -1)):
                if room.bounds(self.extents)[0] < 0 and not any(
                    room.plus(limit, -1).bounds(self.extents)[0] >= 0 for limit in self.boxed
                ):
                    return False
        return True

    # ---- passes over the program
    def run(self) -> Layout:
        self.number(self.p.body, 0, 0, 1.0)
        self.extend(self.p.body, ())
        self.vote()
        masks = [s.out.id for s in walk(self.p.body) if isinstance(s, Mask)]
        self.out.conditions = frozenset(
            m
            for m in masks
            if all(
                isinstance(u, Map) and u.fn == "where" and u.args[0].id == m and m not in [a.id for a in u.args[1:]]
                for u in self.users.get(m, [])
            )
        )
        self.place()
        return self.out

    def number(self, body: tuple[Stmt, ...], now: int, scope: int, passes: float) -> int:
        for s in body:
            now += 1
            self.position[id(s)], self.passes[id(s)], self.within[id(s)] = now, passes, scope
            for v in operands(s):
                self.users.setdefault(v.id, []).append(s)
                self.last[v.id] = now
            if isinstance(s, Loop):
                now = self.number(s.body, now, id(s), passes * max(1, self.p.axes[s.axis].trips)) + 1
                self.end[id(s)] = now
                for c in s.carries:
                    self.users.setdefault(c.next.id, []).append(s)
                    self.last[c.next.id] = now
                    self.scope[c.phi.id], self.scope[c.out.id] = id(s), scope
            elif not isinstance(s, Store):
                self.scope[s.out.id] = scope
        return now

    def extend(self, body: tuple[Stmt, ...], inside: tuple[int, ...]) -> None:
        """A value made outside of a loop and read inside lives until the loop's end."""

        def used(v: Value, around: tuple[int, ...]) -> None:
            deeper = around[around.index(self.scope[v.id]) + 1 :] if self.scope[v.id] else around
            if deeper:
                self.last[v.id] = max(self.last[v.id], self.end[deeper[0]])

        for s in body:
            for v in operands(s):
                used(v, inside)
            if isinstance(s, Loop):
                self.extend(s.body, (*inside, id(s)))
                for c in s.carries:
                    used(c.next, (*inside, id(s)))

    def vote(self) -> None:
        votes: dict[tuple[str, str], float] = {}

        def cast(first: list[str], second: list[str], weight: float) -> None:
            for a in first:
                for b in second:
                    if a != b:
                        votes[a, b] = votes.get((a, b), 0.0) + weight

        for s in walk(self.p.body):
            if isinstance(s, Loop):
                continue
            arg = s.arg if isinstance(s, Store) else s.out
            axes, weight = self.real(arg), self.size(self.real(arg)) * self.passes[id(s)]
            self.out.work += weight
            match s:
                case Load() | Store():
                    stride = self.strides(s.buffer, s.index)
                    copied = isinstance(s, Store) or not self.readable(s) or not self.only_contracted(s.out)
                    by = sorted((a for a in axes if stride.get(a)), key=lambda a: -abs(stride[a]))
                    for n, a in enumerate(by):
                        cast([a], by[n + 1 :], 1.3 * weight if copied else 0.0)
                case Reduce():
                    arg_axes = self.real(s.arg)
                    weight = self.size(arg_axes) * self.passes[id(s)]
                    self.out.work += weight
                    rest = [a for a in arg_axes if a not in s.axes]
                    cast([a for a in s.axes if a in arg_axes], rest, 0.25 * weight)
                case Contract():
                    batch = [a for a in axes if a in s.a.axes and a in s.b.axes]
                    self.out.work += weight * 0.02 * self.size(s.axes)
                    cast(
                        batch,
                        [a for a in {**dict.fromkeys(self.real(s.a)), **dict.fromkeys(self.real(s.b))} if a not in batch],
                        2.0 * weight,
                    )
            if self.stretched(s):
                for a in axes:  # long rows make short work
                    cast([a], [b for b in axes if self.tiles[b] > self.tiles[a]], (0.2 + 4.0 / max(1, self.tiles[a])) * weight)
        left = sorted(a for a in self.p.axes if a not in self.points)
        order = []
        while left:
            first = max(left, key=lambda a: sum(votes.get((a, b), 0.0) - votes.get((b, a), 0.0) for b in left))
            order.append(first)
            left.remove(first)
        self.out.order = tuple(order)
        self.out.work *= math.prod(x.trips for x in self.p.axes.values() if x.role == "grid")

    def stretched(self, s: Stmt) -> bool:
        """Does it walk arrays row by row?  (Contiguous arrays of one shape are one long row, products have their own order.)"""
        if isinstance(s, Map):
            return any(a.axes and set(self.real(a)) != set(self.real(s.out)) for a in s.args)
        return not isinstance(s, Contract)

    def readable(self, s: Load) -> bool:
        """May the elements be used where they lie?"""
        f = self.formats[self.names[s.buffer]]
        if f.dtype != self.dtype(s.out, s) or not self.inside(s.buffer, s.index):
            return False
        if not any(isinstance(u, Contract) for u in self.users.get(s.out.id, [])):
            return True
        stride = self.strides(s.buffer, s.index)
        steps = [stride.get(a, 0) for a in self.real(s.out) if self.tiles[a] > 1]
        return not steps or (min(steps) > 0 and f.dtype.itemsize in steps)  # else BLAS cannot take it

    def only_contracted(self, v: Value) -> bool:
        return all(isinstance(u, Contract) for u in self.users.get(v.id, []))

    # ---- memory
    def place(self) -> None:
        self.slots: list[Slot] = []
        self.free: list[Slot] = []
        self.held: list[Slot] = []
        self.slot_of: dict[int, Slot] = {}
        self.carried: dict[int, Carry] = {}  # id(slot) → the carry of a loop around here that it belongs to
        self.nexts = {c.next.id for s in walk(self.p.body) if isinstance(s, Loop) for c in s.carries}
        self.temps: list[tuple[int, Slot]] = []
        self.statements(self.p.body)
        at = 0
        for slot in self.slots:
            slot.offset = at
            at += -(-slot.size // ALIGN) * ALIGN
        self.out.arena = at
        for v, slot in self.slot_of.items():
            h = self.out.homes[v]
            self.out.homes[v] = Home(h.kind, h.dtype, h.dims, slot.offset)
        self.out.scratch = {v: slot.offset for v, slot in self.temps}

    def take(self, size: int, until: float) -> Slot:
        """The smallest free slot that is large enough, else a new one."""
        fit = min((s for s in self.free if s.size >= size), key=lambda s: s.size, default=None)
        if fit is None:
            fit = Slot(size, until)
            self.slots.append(fit)
        else:
            self.free.remove(fit)
        fit.until = until
        self.held.append(fit)
        return fit

    def release(self, now: int) -> None:
        for s in [s for s in self.held if s.until <= now]:
            self.held.remove(s)
            self.free.append(s)

    def settle(self, v: Value, dtype: np.dtype, slot: Slot) -> None:
        self.slot_of[v.id] = slot
        slot.busy = max(slot.busy, self.last[v.id])
        self.out.homes[v.id] = Home("arena", dtype, self.dims(v))

    def statements(self, body: tuple[Stmt, ...]) -> None:
        for s in body:
            now = self.position[id(s)]
            match s:
                case Loop():
                    self.loop(s)
                    now = self.end[id(s)]
                case Store():
                    dims = tuple(a for a in self.out.order if any(a in ix.axes for ix in s.index))
                    self.out.access[id(s)] = self.in_buffer("target", s.buffer, s.index, dims)
                case Const():
                    self.out.homes[s.out.id] = Home("const", self.float, value=s.value)
                case Load():
                    self.out.access[id(s)] = self.in_buffer("view", s.buffer, s.index, self.dims(s.out))
                    if self.readable(s):
                        self.out.homes[s.out.id] = self.out.access[id(s)]
                    else:
                        self.value(s, now)
                case _:
                    self.value(s, now)
            self.release(now)

    def in_buffer(self, kind: str, buffer: str, index: tuple[Affine, ...], dims: tuple[str, ...]) -> Home:
        f = self.formats[self.names[buffer]]
        start = f.origin + sum(ix.const * s for ix, s in zip(index, f.strides))
        stride = tuple(self.strides(buffer, index).items())
        loose = not self.inside(buffer, index)
        return Home(kind, f.dtype, dims, start=start, stride=stride, buffer=self.names[buffer], loose=loose)

    def value(self, s: Stmt, now: int) -> None:
        v: Value = s.out  # type: ignore[union-attr]
        dtype = self.dtype(v, s)
        store = self.target(s, v, dtype)
        if store is not None:
            self.out.direct[v.id] = store
            self.out.homes[v.id] = self.in_buffer("target", store.buffer, store.index, self.dims(v))
            return
        if isinstance(s, (Reduce, Contract)) and s.acc is not None:
            temp = self.take(self.size(self.dims(v)) * dtype.itemsize, now)
            self.temps.append((v.id, temp))
        until = self.last.setdefault(v.id, now)
        size = self.size(self.dims(v)) * dtype.itemsize
        if v.id in self.out.conditions:  # never shared: a mask is drawn again only when another tile needs another one
            slot: Slot | None = Slot(size, math.inf)
            self.slots.append(slot)  # type: ignore[arg-type]
        else:
            slot = self.inherited(s, v, dtype, now)
        if slot is None:
            slot = self.take(size, until)
        slot.until = max(slot.until, until)
        self.settle(v, dtype, slot)

    def target(self, s: Stmt, v: Value, dtype: np.dtype) -> Store | None:
        """The store that can hold the value from the start: its only use, in the same place, of the same elements."""
        users = self.users.get(v.id, [])
        if len(users) != 1 or not isinstance(users[0], Store) or not isinstance(s, (Map, Reduce, Contract)):
            return None
        store = users[0]
        if getattr(s, "acc", None) is not None or self.within[id(store)] != self.scope[v.id]:
            return None
        stride = self.strides(store.buffer, store.index)
        whole = {a for ix in store.index for a in ix.axes if a not in self.points} == set(self.dims(v)) and all(
            stride[a] for a in self.dims(v)
        )
        same = self.formats[self.names[store.buffer]].dtype == dtype
        return store if whole and same and self.inside(store.buffer, store.index) else None

    def inherited(self, s: Stmt, v: Value, dtype: np.dtype, now: int) -> Slot | None:
        """The slot of an argument that is not needed any more."""
        if isinstance(s, Map):
            args = s.args[1:] if s.fn == "where" else s.args
            candidates = [a for a in args if args.count(a) <= 2]  # later terms of a sum must not read what the first two wrote
        elif isinstance(s, (Reduce, Contract)) and s.acc is not None:
            candidates = [s.acc]
        else:
            return None
        for a in candidates:
            slot = self.slot_of.get(a.id)
            if slot is None or self.last[a.id] != now or self.out.homes[a.id].dtype != dtype or self.dims(a) != self.dims(v):
                continue
            carry = self.carried.get(id(slot))
            if slot.busy > now:
                continue
            if carry is None or v.id == carry.next.id or v.id not in self.nexts:
                return slot
        return None

    def loop(self, s: Loop) -> None:
        end = self.end[id(s)]
        mine = []
        for c in s.carries:
            self.last.setdefault(c.phi.id, self.position[id(s)])
            self.last.setdefault(c.out.id, end)
            dtype = self.dtype(c.phi)
            slot = self.take(self.size(self.dims(c.phi)) * dtype.itemsize, max(end, self.last[c.out.id]))
            self.settle(c.phi, dtype, slot)
            self.carried[id(slot)] = c
            mine.append((c, slot))
        self.statements(s.body)
        for c, slot in mine:
            self.settle(c.out, self.dtype(c.out), slot)
            del self.carried[id(slot)]
