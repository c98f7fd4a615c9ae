"""Tile program → steps: argument-free calls that compute one tile.

A `Scope` is a statement list under given tile lengths.  Its steps are made once per frame (the memory of one worker) and
set of lengths, then run for every tile of these lengths.  Arrays in the arena are bound into the steps; what lies elsewhere
for each tile (elements of inputs and outputs) is looked up in registers that a step of its own fills.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ...errors import wrong_index
from ...integers import wrapped
from ...terms import PREDICATES, REDUCTIONS, Affine
from ..tile import Const, Contract, Gather, Iota, Load, Loop, Map, Mask, Reduce, Stmt, Store, Value, operands, results, walk
from .contract import Kept, Reg, Step, Tensor, contraction, empty, invoke
from .frame import Frame, Plan, live_range
from .functions import FUNCTIONS, REDUCERS
from .layout import Home

BLAS_SUM = 4096  # longest axis that is summed by products with ones
SUM_LENGTHS = range(128, 31, -1)  # elements that one of them adds, where it is not all: those that divide the axis, longest first


def conversion(source: np.dtype, dest: np.dtype) -> Callable[[np.ndarray, np.ndarray], Any]:
    """A function (dest, source) that copies elements."""
    if not source.name.startswith("float8"):
        return lambda out, x: np.copyto(out, x, casting="unsafe")
    table = np.arange(256, dtype=np.uint8).view(source).astype(dest)  # ten times as fast as converting one by one
    return lambda out, x: np.take(table, x.view(np.uint8), out=out, mode="clip")


def rounding(source: np.dtype, dest: np.dtype, bound: float | None) -> Callable[[np.ndarray, np.ndarray], Any]:
    """A function (dest, source) that stores elements; integers wrap around.  bound: of their magnitudes, if they are integers."""
    if source.kind != "f" or dest.kind not in "iu" or (bound is not None and dest.kind == "i" and bound <= np.iinfo(dest).max):
        return lambda out, x: np.copyto(out, x, casting="unsafe")
    if bound is not None and bound < 2.0**63:
        return lambda out, x: np.copyto(out, x.astype(np.int64), casting="unsafe")
    return lambda out, x: np.copyto(out, wrapped(x, dest))


def ones(axis: str, n: int, dtype: np.dtype) -> Tensor:
    x = np.ones(n, dtype)
    return Tensor({axis: (n, dtype.itemsize)}, dtype, lambda shape, strides: np.ndarray(shape, dtype, x, 0, strides))


class Scope:
    """Statements under given tile lengths, on the memory of a frame."""

    def __init__(
        self,
        plan: Plan,
        frame: Frame,
        length: dict[str, int],
        parent: Scope | None = None,
        loop: Loop | None = None,
        kept: Kept | None = None,
        fresh: frozenset[int] = frozenset(),
    ):
        """loop: whose body it is, if not the program's; kept: what is made before it; fresh: state that counts as 0 still."""
        self.plan, self.frame, self.length, self.parent, self.kept, self.fresh = plan, frame, length, parent, kept, fresh
        self.inside = (
            set() if loop is None else {v.id for s in walk(loop.body) for v in results(s)} | {c.phi.id for c in loop.carries}
        )
        self.homes, self.layout = plan.layout.homes, plan.layout
        self.views: dict[int, tuple[list, Step]] = {}  # value or access → registers to fill, the step that fills them
        self.extents = plan.program.extents | {a: x.extent for a, x in plan.program.axes.items()}

    # ---- tensors
    def tensor(self, v: Value) -> Tensor:
        h = self.homes[v.id]
        if h.kind == "const":
            return self.constant(h.value, h.dtype)
        if h.kind == "arena":
            return self.scratch(h.dims, h.dtype, h.offset)
        return self.in_buffer(h, v.id)

    def constant(self, value: float, dtype: np.dtype) -> Tensor:
        return Tensor({}, dtype, lambda shape, strides: dtype.type(value))

    def scratch(self, dims: tuple[str, ...], dtype: np.dtype, offset: int) -> Tensor:
        step, out = dtype.itemsize, {}
        for a in reversed(dims):
            out[a] = (self.length[a], step)
            step *= max(1, self.length[a])
        arena = self.frame.arena

        def make(shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
            return np.ndarray(shape, dtype, arena, offset, strides)

        return Tensor({a: out[a] for a in dims}, dtype, make, self.frame.address + offset)

    def in_buffer(self, h: Home, key: int) -> Tensor:
        """Elements in place.  Each view of them gets a register, which the access' own step fills."""
        scope: Scope = self
        while key not in scope.views:
            if scope.parent is None:
                raise KeyError(key)
            scope = scope.parent
        specs, refresh = scope.views[key]
        registers, stride = self.frame.registers, dict(h.stride)

        def make(shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
            if 0 in shape:
                return np.empty(shape, h.dtype)
            for index, *spec in specs:
                if spec == [shape, strides]:
                    return Reg(index)
            specs.append((len(registers), shape, strides))
            registers.append(None)
            refresh()
            return Reg(len(registers) - 1)

        return Tensor({a: (self.length[a], stride.get(a, 0)) for a in h.dims}, h.dtype, make)

    def access(self, h: Home, key: int) -> Step:
        """The step that points registers at the elements of the tile."""
        specs: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
        frame, position, registers, view = self.frame, self.frame.position, self.frame.registers, np.ndarray
        start, stride, buffer, dtype = h.start, h.stride, h.buffer, h.dtype

        def refresh() -> None:
            at = start
            for a, s in stride:
                at += s * position[a]
            window = frame.windows[buffer]
            for j, shape, strides in specs:
                registers[j] = view(shape, dtype, window, at, strides)

        self.views[key] = (specs, refresh)
        return refresh

    def invoke(self, fn: Callable[..., Any], *args: Any, **kw: Any) -> Step:
        return invoke(self.frame.registers, fn, *args, **kw)

    # ---- statements
    def steps(self, body: tuple[Stmt, ...]) -> list[Step]:
        out: list[Step] = []
        for s in body:
            match s:
                case Const():
                    pass
                case Load():
                    out += self.load(s)
                case Gather():
                    out += [self.gather(s)]
                case Iota():
                    out += self.iota(s)
                case Mask():
                    out += [self.mask(s)]
                case Store():
                    out += self.store(s)
                case Loop():
                    out += self.loop(s)
                case Map() | Reduce() | Contract():
                    store = self.layout.direct.get(s.out.id)
                    if store is not None:
                        out += [self.access(self.homes[s.out.id], s.out.id)]
                    out += self.map(s) if isinstance(s, Map) else self.reduce(s) if isinstance(s, Reduce) else self.contract(s)
        return out

    # ---- memory
    def load(self, s: Load) -> list[Step]:
        h = self.layout.access[id(s)]
        if self.homes[s.out.id] is h:
            return [self.access(h, s.out.id)]
        out = self.tensor(s.out)
        dims = tuple(out.dims)
        dest = out.aligned(dims)
        if dest.size == 0:
            return []
        if not h.loose:
            refresh = self.access(h, id(s))
            return [refresh, self.invoke(conversion(h.dtype, dest.dtype), dest, self.in_buffer(h, id(s)).aligned(dims))]
        shape, strides = dest.shape, tuple(dict(h.stride).get(a, 0) for a in dims)
        window = self.window(h.buffer)
        index, inside = self.positions(s.index, dims, self.plan.formats[h.buffer].shape)
        frame, stride, start = self.frame, h.stride, h.start
        box = self.box(s.index, dims, self.plan.formats[h.buffer].shape)

        def copy(out: np.ndarray, lengths: tuple[int, ...], first: int) -> None:
            first += start + sum(k * frame.position[a] for a, k in stride)
            np.copyto(out, np.ndarray(lengths, h.dtype, frame.windows[h.buffer], first, strides), casting="unsafe")

        def fetch() -> None:
            if inside():
                copy(dest, shape, 0)
                return
            dest[...] = 0
            if box is None:
                at, valid = index()
                np.copyto(dest, window()[at], casting="unsafe", where=valid)
                return
            part = box()
            lengths = tuple(hi - lo for lo, hi in part)
            if all(n > 0 for n in lengths):
                copy(dest[tuple(slice(*x) for x in part)], lengths, sum(lo * s for (lo, _), s in zip(part, strides)))

        return [fetch]

    def box(
        self, index: tuple[Affine, ...], dims: tuple[str, ...], shape: tuple[int, ...]
    ) -> Callable[[], list[tuple[int, int]]] | None:
        """Which elements of the tile lie in the buffer: a range of each of its dimensions.  None: not always a box."""
        moving = [[(d, c) for d, a in enumerate(dims) for b, c in ix.terms if a == b and self.length[a] > 1] for ix in index]
        if any(len(m) > 1 for m in moving):
            return None
        parts = [(m[0] if m else (0, 0), self.offsets(ix, dims)[1], n) for m, ix, n in zip(moving, index, shape)]
        lengths = [self.length[a] for a in dims]

        def ranges() -> list[tuple[int, int]]:
            lo, hi = [0] * len(lengths), list(lengths)
            for (d, c), base, n in parts:
                at = base()
                if c == 0:
                    if not 0 <= at < n:
                        return [(0, 0)] * max(1, len(lengths))
                    continue
                first, last = (-at, n - 1 - at) if c > 0 else (at - n + 1, at)  # least and most of |c|·place
                lo[d], hi[d] = max(lo[d], -(-first // abs(c))), min(hi[d], last // abs(c) + 1)
            return list(zip(lo, hi))

        return ranges

    def window(self, buffer: int) -> Callable[[], np.ndarray]:
        """The whole buffer as an array."""
        f, frame = self.plan.formats[buffer], self.frame
        if 0 in f.shape:
            return lambda: np.zeros(tuple(max(n, 1) for n in f.shape), f.dtype)
        return lambda: np.ndarray(f.shape, f.dtype, frame.windows[buffer], f.origin, f.strides)

    def offsets(self, ix: Affine, dims: tuple[str, ...], dtype: Any = np.int64) -> tuple[list[np.ndarray], Callable[[], int]]:
        """An affine expression on the tile: one array for each axis in it, in dimension order, and the rest of the sum."""
        coef, position = dict(ix.terms), self.frame.position
        arrays = []
        for d, a in enumerate(dims):
            if a in coef:
                x = (np.arange(self.length[a]) * coef[a]).astype(dtype)
                arrays.append(x.reshape([-1 if e == d else 1 for e in range(len(dims))]))
        terms = ix.terms
        return arrays, lambda: ix.const + sum(c * position[a] for a, c in terms)

    def positions(
        self, index: tuple[Affine, ...], dims: tuple[str, ...], shape: tuple[int, ...]
    ) -> tuple[Callable[[], tuple[tuple[np.ndarray, ...], np.ndarray]], Callable[[], bool]]:
        """(indices clipped into the buffer, where they needed no clipping), and whether none does on this tile."""
        parts = [self.offsets(ix, dims) for ix in index]
        statics = [sum(arrays, np.zeros((1,) * len(dims), np.int64)) for arrays, _ in parts]
        ends = [(int(x.min(initial=0)), int(x.max(initial=0))) if x.size else (0, 0) for x in statics]

        def inside() -> bool:
            return all(0 <= lo + (c := base()) and hi + c < n for (_, base), (lo, hi), n in zip(parts, ends, shape))

        def at() -> tuple[tuple[np.ndarray, ...], np.ndarray]:
            valid: Any = np.ones((1,) * len(dims), bool)
            out = []
            for (_, base), x, n in zip(parts, statics, shape):
                i = x + base()
                valid = valid & (i >= 0) & (i < n)
                out.append(np.clip(i, 0, max(0, n - 1)))
            return tuple(out), valid

        return at, inside

    def gather(self, s: Gather) -> Step:
        buffer = self.plan.buffers[s.buffer]
        shape, name, dim = self.plan.formats[buffer].shape, s.buffer, s.dim
        out = self.tensor(s.out)
        dims = tuple(out.dims)
        dest = out.aligned(dims)
        index, _ = self.positions(s.index, dims, tuple(n if d != dim else 1 << 62 for d, n in enumerate(shape)))
        base, window, registers = self.offsets(s.index[dim], dims), self.window(buffer), self.frame.registers
        where = self.tensor(s.position).aligned(dims)
        limits = [self.offsets(ix, dims) for ix in self.plan.loose if set(ix.axes) <= set(dims)]
        n = shape[dim]

        def fetch() -> None:
            if dest.size == 0:
                return
            p = registers[where.index] if isinstance(where, Reg) else where
            at = np.asarray(p).astype(np.int64) + base[1]()
            for x in base[0]:
                at = at + x
            if not (np.min(p) > -math.inf and np.max(p) < math.inf and at.min() >= 0 and at.max() < n):
                exists: Any = True  # what lies beyond a ragged end has no position
                for arrays, rest_of in limits:
                    exists = exists & (sum(arrays, np.int64(rest_of())) >= 0)
                wrong = ~(np.isfinite(p) & (at >= 0) & (at < n)) & exists
                if np.any(wrong):
                    raise wrong_index(float(np.broadcast_to(at, wrong.shape)[wrong].flat[0]), n, f"dimension {dim} of {name!r}")
                at = np.clip(at, 0, n - 1)
            rest, valid = index()
            got = window()[tuple(at if d == dim else i for d, i in enumerate(rest))]
            dest[...] = 0
            np.copyto(dest, got, casting="unsafe", where=valid)

        return fetch

    def store(self, s: Store) -> list[Step]:
        if self.layout.direct.get(s.arg.id) is s:
            return []
        h = self.layout.access[id(s)]
        arg = self.tensor(s.arg)
        size = math.prod(self.length[a] for a in h.dims)
        if size == 0:
            return []
        refresh = self.access(h, id(s))
        target = self.in_buffer(h, id(s))
        loose = [ix for ix in self.plan.loose if set(ix.axes) <= {a for i in s.index for a in i.axes}]
        if not h.loose and not loose:
            write = rounding(arg.dtype, h.dtype, self.layout.bound[s.arg.id])
            return [refresh, self.invoke(write, target.aligned(h.dims), arg.aligned(h.dims))]
        index, _ = self.positions(s.index, h.dims, self.plan.formats[h.buffer].shape)
        limits = [self.offsets(ix, h.dims) for ix in loose]
        window, registers, value = self.window(h.buffer), self.frame.registers, arg.aligned(h.dims)
        shape = tuple(self.length[a] for a in h.dims)

        def put() -> None:
            at, valid = index()
            for arrays, base in limits:
                valid = valid & (sum(arrays, np.int64(base())) >= 0)
            x = registers[value.index] if isinstance(value, Reg) else value
            valid = np.broadcast_to(valid, shape)
            into = tuple(np.broadcast_to(i, shape)[valid] for i in at)
            out = window()
            x = np.broadcast_to(x, shape)[valid]
            out[into] = wrapped(x, out.dtype) if x.dtype.kind == "f" and out.dtype.kind in "iu" else x.astype(out.dtype)

        return [put]

    # ---- positions
    def iota(self, s: Iota) -> list[Step]:
        out = self.tensor(s.out)
        dims = tuple(out.dims)
        dest = out.aligned(dims)
        arrays, base = self.offsets(s.index, dims, dest.dtype)
        kind = dest.dtype.type

        def step() -> None:
            if arrays:
                np.add(arrays[0], kind(base()), dest)
                for x in arrays[1:]:
                    np.add(dest, x, dest)
            else:
                dest[...] = base()

        return [step]

    def mask(self, s: Mask) -> Step:
        """Conditions lie in memory negated: `where` overwrites what they exclude."""
        negate = s.out.id in self.layout.conditions
        out = self.tensor(s.out)
        dims = tuple(out.dims)
        dest = out.aligned(dims)
        other = np.empty(dest.shape, bool) if len(s.constraints) > 1 else dest
        full, drawn, position, me = self.frame.full, self.frame.drawn, self.frame.position, s.out.id
        parts = []
        for ix in s.constraints:
            big = max(map(abs, ix.bounds(self.extents))) >= 2**30
            arrays, _ = self.offsets(ix, dims, np.int64 if big else np.int32)
            low = sum(int(x.min(initial=0)) for x in arrays if x.size)
            parts.append((ix.terms, ix.const, arrays, low))
        shape = dest.shape

        def test(arrays: list[np.ndarray], t: int, into: np.ndarray) -> None:
            if not arrays:
                into[...] = t >= 0
                return
            left, *rest = arrays
            right: Any = left.dtype.type(-t)
            for x in rest:
                right = right - x
            np.greater_equal(left, right, into)

        def step() -> None:
            todo = []
            for number, (terms, const, arrays, low) in enumerate(parts):
                t = const
                for a, c in terms:
                    t += c * position[a]
                if t + low < 0:
                    todo.append((number, t, arrays))
            full[me] = not todo
            if not todo and negate:
                return
            key = (shape, [(number, t) for number, t, _ in todo])
            if drawn.get(me) == key:
                return
            if negate:
                drawn[me] = key
            if not todo:
                dest[...] = True
            for n, (_, t, arrays) in enumerate(todo):
                test(arrays, t, other if n else dest)
                if n:
                    np.logical_and(dest, other, dest)
            if negate:
                np.logical_not(dest, dest)

        return step

    # ---- arithmetic
    def map(self, s: Map) -> list[Step]:
        if s.fn == "where":
            return [self.where(s)]
        out = self.tensor(s.out)
        dims = tuple(out.dims)
        dest = out.aligned(dims)
        homes = [self.homes[a.id] for a in s.args]
        held = [h.dtype for h in homes if h.kind != "const"]
        if s.fn in PREDICATES:
            kind = np.result_type(np.float32, *held)
            kw: dict[str, Any] = {}
        else:
            kind = out.dtype
            kw = {"dtype": kind} if any(d != kind for d in held) else {}
        args = [
            self.constant(h.value, kind).aligned(()) if h.kind == "const" else self.tensor(a).aligned(dims)
            for h, a in zip(homes, s.args)
        ]
        fn = FUNCTIONS[s.fn]
        if len(args) <= 2:
            return [self.invoke(fn, *args, out=dest, **kw)]
        args.sort(key=lambda x: not self.same(x, dest))  # what lies in the result's place must be read first
        steps = [self.invoke(fn, args[0], args[1], out=dest, **kw)]
        return steps + [self.invoke(fn, dest, x, out=dest, **kw) for x in args[2:]]

    @staticmethod
    def same(x: Any, dest: Any) -> bool:
        return isinstance(x, np.ndarray) and isinstance(dest, np.ndarray) and x.ctypes.data == dest.ctypes.data

    def where(self, s: Map) -> Step:
        c, x, y = s.args
        out = self.tensor(s.out)
        dims = tuple(out.dims)
        dest = out.aligned(dims)
        hc = self.homes[c.id]
        X, Y = (
            self.constant(self.homes[v.id].value, out.dtype).aligned(())
            if self.homes[v.id].kind == "const"
            else self.tensor(v).aligned(dims)
            for v in (x, y)
        )
        on_x, on_y = self.same(X, dest), self.same(Y, dest)
        if hc.kind == "const":
            return self.invoke(np.copyto, dest, X if hc.value else Y, casting="same_kind")
        C = self.tensor(c).aligned(dims)
        if c.id in self.layout.conditions:
            full = self.frame.full

            def masked(dest: Any, X: Any, Y: Any, out: Any) -> None:
                if full[c.id]:
                    if not on_x:
                        np.copyto(dest, X, casting="same_kind")
                elif on_y:
                    np.copyto(dest, X, casting="same_kind", where=np.logical_not(out))
                else:
                    if not on_x:
                        np.copyto(dest, X, casting="same_kind")
                    np.copyto(dest, Y, casting="same_kind", where=out)

            return self.invoke(masked, dest, X, Y, C)

        def chosen(dest: Any, X: Any, Y: Any, C: Any) -> None:
            hit = C if C.dtype == bool else np.not_equal(C, 0)
            if on_x:
                np.copyto(dest, Y, casting="same_kind", where=np.logical_not(hit))
            else:
                if not on_y:
                    np.copyto(dest, Y, casting="same_kind")
                np.copyto(dest, X, casting="same_kind", where=hit)

        return self.invoke(chosen, dest, X, Y, C)

    # ---- reductions
    def result(self, s: Reduce | Contract) -> tuple[Tensor, list[Step]]:
        """Where the tile's part goes, and the step that adds it to the accumulator."""
        out = self.tensor(s.out)
        if s.acc is None or s.acc.id in self.fresh:
            return out, []
        h = self.homes[s.out.id]
        part = self.scratch(h.dims, h.dtype, self.layout.scratch[s.out.id])
        op = "+" if isinstance(s, Contract) else s.op
        acc = self.constant(self.homes[s.acc.id].value, out.dtype) if self.homes[s.acc.id].kind == "const" else self.tensor(s.acc)
        dims = h.dims
        step = self.invoke(REDUCERS[op], acc.aligned(dims), part.aligned(dims), out=out.aligned(dims), dtype=out.dtype)
        return part, [step]

    def reduce(self, s: Reduce) -> list[Step]:
        part, then = self.result(s)
        arg = self.tensor(s.arg)
        dims = tuple(arg.dims)
        axes = tuple(d for d, a in enumerate(dims) if a in s.axes)
        dest = part.aligned(tuple(a for a in dims if a not in s.axes))
        count = math.prod(arg.dims[dims[d]][0] for d in axes)
        if count == 0:
            return [self.invoke(np.copyto, dest, part.dtype.type(REDUCTIONS[s.op])), *then]
        if not axes:
            return [self.invoke(np.copyto, dest, arg.aligned(dims), casting="same_kind"), *then]
        size = math.prod(n for n, _ in arg.dims.values())
        if s.op == "+" and count <= BLAS_SUM and size >= 1024 and arg.dtype == part.dtype and len(axes) == 1:
            if steps := self.blas_sum(part, arg, dims[axes[0]]):
                return [*steps, *then]
        if s.op == "+" and count > 2 * SUM_LENGTHS[0] and part.dtype.kind == "f" and len(axes) == 1 and axes[0] != len(dims) - 1:
            return [*self.sum_of_sums(arg, axes[0], dest, part.dtype), *then]
        step = self.invoke(REDUCERS[s.op].reduce, arg.aligned(dims), axes, part.dtype, out=dest)
        return [step, *then]

    def sum_of_sums(self, x: Tensor, axis: int, out: Any, dtype: np.dtype) -> list[Step]:
        """A long sum over an axis that is not the last, where NumPy adds one by one, not in pairs."""
        dims = list(x.dims.values())
        count, stride = dims[axis]
        parts, left = divmod(count, n := SUM_LENGTHS[-1])
        cut = [*dims[:axis], (parts, n * stride), (n, stride), *dims[axis + 1 :]]
        sums = np.empty([parts + (left > 0) if d == axis else m for d, (m, _) in enumerate(dims)], dtype)
        ahead: tuple[Any, ...] = (slice(None),) * axis
        main = x.make(tuple(m for m, _ in cut), tuple(step for _, step in cut))
        steps = [self.invoke(np.add.reduce, main, axis + 1, dtype, out=sums[(*ahead, slice(parts))])]
        if left:

            def rest(x: np.ndarray) -> None:
                np.add.reduce(x[(*ahead, slice(parts * n, None))], axis, dtype, out=sums[(*ahead, parts)])

            steps.append(self.invoke(rest, x.aligned(tuple(x.dims))))

        def total(out: np.ndarray) -> None:
            np.add.reduce(np.ascontiguousarray(np.moveaxis(sums, axis, -1)), -1, dtype, out=out)

        return [*steps, self.invoke(total, out)]

    def blas_sum(self, out: Tensor, x: Tensor, axis: str) -> list[Step]:
        """Sums by products with ones: long ones in two stages, or they would round more than NumPy's.  [] if that does not pay."""
        count, stride = x.dims[axis]
        parts = next((count // n for n in SUM_LENGTHS if count % n == 0), 0) if count > 2 * SUM_LENGTHS[0] else 1
        if parts == 1:
            steps = contraction(self.frame.registers, out, x, ones(axis, count, x.dtype), (axis,))
            return steps if len(steps) == 1 else []
        if parts == 0:
            return []
        rest = {a: n for a, (n, _) in x.dims.items() if a != axis}
        n, outer = count // parts, axis + " parts"
        cut = Tensor({}, x.dtype, x.make)
        for a, d in x.dims.items():
            cut.dims |= {outer: (parts, n * stride), axis: (n, stride)} if a == axis else {a: d}
        sums = empty({**rest, outer: parts}, x.dtype)
        steps = contraction(self.frame.registers, sums, cut, ones(axis, n, x.dtype), (axis,))
        steps += contraction(self.frame.registers, out, sums, ones(outer, parts, x.dtype), (outer,))
        return steps if len(steps) == 2 else []

    def contract(self, s: Contract) -> list[Step]:
        part, then = self.result(s)
        a, b = self.tensor(s.a), self.tensor(s.b)
        summed = tuple(x for x in s.axes if x in a.dims)
        if not summed:
            dims = tuple(part.dims)
            kw = {"dtype": part.dtype}
            return [self.invoke(np.multiply, a.aligned(dims), b.aligned(dims), out=part.aligned(dims), **kw), *then]
        names = tuple(None if self.kept is None or v.id in self.inside else v.id for v in (s.a, s.b))
        return [*contraction(self.frame.registers, part, a, b, summed, names, self.kept), *then]  # type: ignore[arg-type]

    # ---- loops
    def loop(self, s: Loop) -> list[Step]:
        frame, length, extents, plan = self.frame, self.length, self.extents, self.plan
        axis, position = s.axis, self.frame.position
        tile, plain = plan.program.axes[axis].tile, replace(s, constraints=())
        unit = max(1, tile // 4)  # ends are rounded up to it, or there would be too many lengths to bind
        narrowed = bool(s.constraints)
        bound: dict[tuple[int, bool], list[Step]] = {}  # length of the tile, is it the first one?
        kept = Kept()
        fresh = self.fresh_state(s)
        starts: list[Step] = []
        zeros: list[Step] = []  # of state that the first trip overwrites
        for c in s.carries:
            phi = self.tensor(c.phi)
            dims = tuple(phi.dims)
            h = self.homes[c.init.id]
            init = self.constant(h.value, phi.dtype).aligned(()) if h.kind == "const" else self.tensor(c.init).aligned(dims)
            start = self.invoke(np.copyto, phi.aligned(dims), init, casting="same_kind")
            (zeros if c.phi.id in fresh else starts).append(start)

        def bind(n: int, head: bool) -> list[Step]:
            inner = Scope(plan, frame, {**length, axis: n}, self, s, kept, fresh if head else frozenset())
            before = len(kept.steps)
            steps = [*inner.steps(s.body), *inner.advance(s)]
            for step in kept.steps[before:]:
                step()
            return steps

        def run() -> None:
            first, end = live_range(s, plan, position, length, extents)
            if narrowed and first < end:
                exists = live_range(plain, plan, position, length, extents)[1]
                first, end = first // tile * tile, min(exists, -(-end // unit) * unit)
            for step in starts if first < end else [*starts, *zeros]:
                step()
            if first < end:
                for step in kept.steps:
                    step()
            for at in range(first, end, tile):
                position[axis] = at
                key = min(tile, end - at), bool(fresh) and at == first
                if key not in bound:
                    bound[key] = bind(*key)
                for step in bound[key]:
                    step()

        return [run]

    def fresh_state(self, s: Loop) -> frozenset[int]:
        """State that begins at 0 and to which something is added, once, and nothing else: the first trip need not add."""
        reads = [v.id for x in walk(s.body) for v in operands(x)]
        reads += [c.next.id for x in walk((s,)) if isinstance(x, Loop) for c in x.carries]
        added = [
            x.acc.id
            for x in s.body
            if isinstance(x, Reduce | Contract) and x.acc is not None and (isinstance(x, Contract) or x.op == "+")
        ]
        zero = {c.phi.id for c in s.carries if (h := self.homes[c.init.id]).kind == "const" and h.value == 0.0}
        return frozenset(v for v in added if v in zero and reads.count(v) == 1)

    def advance(self, s: Loop) -> list[Step]:
        """Carried values move on, where they have not been updated in place."""
        homes = self.homes
        inits = {homes[c.phi.id].offset for c in s.carries}
        saves: list[Step] = []
        moves: list[Step] = []
        for c in s.carries:
            phi, new = homes[c.phi.id], homes[c.next.id]
            state = self.tensor(c.phi)
            dims = tuple(state.dims)
            if new.kind == "const":
                x = state.dtype.type(new.value)
            else:
                x = self.tensor(c.next).aligned(dims)
                if new.kind == "arena" and new.offset in inits:
                    if new.offset == phi.offset:
                        continue
                    save = np.empty(x.shape, x.dtype)  # it lies in the state of another carry, which is about to change
                    saves.append(self.invoke(np.copyto, save, x))
                    x = save
            moves.append(self.invoke(np.copyto, state.aligned(dims), x, casting="same_kind"))
        return [*saves, *moves]
