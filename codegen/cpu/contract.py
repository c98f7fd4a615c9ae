"""Contractions as BLAS calls: which axes form the rows, the columns and the summed dimension of a (batched) matrix product.

Slabs.  On processors with AVX-512, OpenBLAS computes small float32 products without packing their operands first, in 4/5 of the
time, if the operand that it reads as vectors is aligned, and contiguous along the result's rows.  There a product is made as a
batch of slabs of rows that are small enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

ALIGN = 64  # bytes
Step = Callable[[], Any]
Axis = tuple[int, tuple[int, ...]]  # length, stride in bytes in each of the tensors that have it


@dataclass(frozen=True)
class Reg:
    """An array that is known only when the step runs: the number of its register."""

    index: int


@dataclass
class Tensor:
    """A value under given tile lengths: axis → (length, stride in bytes), and a way to see it under any shape and strides."""

    dims: dict[str, tuple[int, int]]
    dtype: np.dtype
    make: Callable[[tuple[int, ...], tuple[int, ...]], Any]
    address: int | None = None  # where it begins, if that is the same place always

    def aligned(self, order: tuple[str, ...]) -> Any:
        """Its elements with a dimension for each axis of `order`, of length 1 where it lacks the axis."""
        shape = [self.dims.get(a, (1, 0)) for a in order]
        return self.make(tuple(n for n, _ in shape), tuple(s for _, s in shape))


def positional(fn: Callable[..., Any], args: tuple[Any, ...], kw: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with as few keywords as can be: they take NumPy a third of a call's fixed cost."""
    kw = dict(kw)
    reduction = getattr(fn, "__name__", "") == "reduce" and isinstance(getattr(fn, "__self__", None), np.ufunc) and len(args) == 3
    ufunc = isinstance(fn, np.ufunc) and fn not in (np.maximum, np.minimum)  # of which NumPy wants a keyword
    if "out" in kw and "dtype" not in kw and (ufunc or reduction):
        args = (*args, kw.pop("out"))
    if fn is np.copyto and kw.get("casting") == "same_kind":
        del kw["casting"]  # the default
    return args, kw


def invoke(regs: list, fn: Callable[..., Any], *args: Any, **kw: Any) -> Step:
    """The call with registers (among the arguments, or `out`) read when it happens."""
    args, kw = positional(fn, args, kw)
    moving = tuple((n, a.index) for n, a in enumerate(args) if isinstance(a, Reg))
    out = kw.get("out")
    if isinstance(out, Reg):
        fixed = {k: v for k, v in kw.items() if k != "out"}

        def into_register() -> None:
            now = list(args)
            for n, j in moving:
                now[n] = regs[j]
            fn(*now, out=regs[out.index], **fixed)

        return into_register
    if not moving:
        return partial(fn, *args, **kw)
    if len(moving) == 1 and not kw:
        n, j = moving[0]
        before, after = args[:n], args[n + 1 :]
        return lambda: fn(*before, regs[j], *after)

    def step() -> None:
        now = list(args)
        for n, j in moving:
            now[n] = regs[j]
        fn(*now, **kw)

    return step


def by_strips(out: np.ndarray, x: np.ndarray) -> None:
    """Copies what is transposed by strips that stay in the first cache: twice as fast."""
    for i in range(0, x.shape[-1], STRIP):
        np.copyto(out[..., i : i + STRIP], x[..., i : i + STRIP])


def aligned_bytes(size: int) -> np.ndarray:
    raw = np.empty(size + ALIGN, np.uint8)
    start = -raw.ctypes.data % ALIGN
    return raw[start : start + size]


def empty(dims: dict[str, int], dtype: np.dtype) -> Tensor:
    """A new contiguous tensor; axes from the outermost in."""
    flat = aligned_bytes(math.prod(dims.values()) * dtype.itemsize)
    step, out = dtype.itemsize, {}
    for a in reversed(dims):
        out[a] = (dims[a], step)
        step *= max(1, dims[a])

    def make(shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
        return np.ndarray(shape, dtype, flat, 0, strides)

    return Tensor({a: out[a] for a in dims}, dtype, make, flat.ctypes.data)


def merged(axes: list[str], *tensors: Tensor) -> list[Axis]:
    """The axes as few dimensions, outermost (in the first tensor) first: neighbours evenly spaced in every tensor become one."""
    dims: list[Axis] = [(tensors[0].dims[a][0], tuple(t.dims[a][1] for t in tensors)) for a in axes]
    out: list[Axis] = []
    for n, strides in sorted((d for d in dims if d[0] != 1), key=lambda d: (-abs(d[1][0]), d[1])):
        if out and all(o == n * s for o, s in zip(out[-1][1], strides)):
            out[-1] = (out[-1][0] * n, strides)
        else:
            out.append((n, strides))
    return out


def is_matrix(rows: tuple[int, int], cols: tuple[int, int], item: int) -> bool:
    """Can BLAS read it in place?  (length, stride) of each dimension."""

    def unit(a: tuple[int, int], b: tuple[int, int]) -> bool:
        return (a[0] == 1 or a[1] == item) and (b[0] == 1 or (b[1] >= a[0] * item and b[1] % item == 0))

    return unit(rows, cols) or unit(cols, rows)


SMALL = 256  # multiply-adds of one matrix below which a batch of them is quicker without BLAS
UNPACKED = 10**6  # multiply-adds up to which OpenBLAS does not pack
SLABS = {True: (24, 16, 12, 8), False: (24, 12)}  # rows of a slab that its kernels like, if they are contiguous or not
LONGEST = 384  # terms that it may add up one by one: where it packs it makes partial sums of about as many
STRIP = 128  # columns that a transposing copy writes at a time
COPIED = (64, 256)  # rows of a result that pay for an aligned copy of the operand: a plain one, a transposing one


@cache
def has_unpacked_products() -> bool:
    """Is NumPy's BLAS one that is quicker by slabs here?"""
    try:
        ours = np.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"]
    except (KeyError, TypeError):
        return False
    kinds = [x.info() for x in ThreadpoolController().lib_controllers if "numpy" in x.filepath]
    return "openblas" in ours and any(x.get("architecture") in ("SkylakeX", "Cooperlake", "SapphireRapids") for x in kinds)


def slab(m: int, n: int, k: int, dtype: np.dtype, contiguous: bool) -> int:
    """Rows of a slab of an m × n product over k, few of them left over; 0: not by slabs.  contiguous: rows of the left operand."""
    if dtype != np.float32 or not (n == 32 or n % 64 == 0) or not 32 <= k <= LONGEST or not has_unpacked_products():
        return 0
    return min((r for r in SLABS[contiguous] if r * n * k <= UNPACKED and m >= 2 * r), key=lambda r: (m % r, -r), default=0)


@dataclass
class Kept:
    """Copies of operands that do not change in a loop, and the steps that make them before it."""

    steps: list[Step] = field(default_factory=list)
    copies: dict[tuple[int | None, tuple[str, ...], np.dtype], Tensor] = field(default_factory=dict)


def contraction(
    regs: list,
    out: Tensor,
    a: Tensor,
    b: Tensor,
    summed: tuple[str, ...],
    names: tuple[int | None, int | None] = (None, None),
    kept: Kept | None = None,
) -> list[Step]:
    """out = Σ a·b.  Every axis in `summed` belongs to both operands.

    names: of operands that change less often than this runs; copies of these are made and remembered in `kept`."""
    if any(out.dims[x][0] == 0 for x in out.dims):
        return []
    if any(a.dims[x][0] == 0 for x in summed if x in a.dims):
        return [invoke(regs, np.copyto, out.aligned(tuple(out.dims)), out.dtype.type(0))]
    return _Contraction(regs, out, [a, b], summed, names, kept or Kept()).bind()


Dim = tuple[int, int]  # length, stride in bytes in one tensor


class _Contraction:
    """A contraction on its way to calls: which axes are batch, rows (of a), columns (of b), inner."""

    def __init__(
        self,
        regs: list,
        out: Tensor,
        operands: list[Tensor],
        summed: tuple[str, ...],
        names: tuple[int | None, int | None],
        kept: Kept,
    ):
        a, b = operands
        self.regs, self.out, self.operands, self.names, self.kept = regs, out, operands, names, kept
        self.inner = [x for x in summed if x in a.dims]
        self.shared = [x for x in a.dims if x in b.dims and x not in self.inner]
        self.own = ([x for x in a.dims if x not in b.dims], [x for x in b.dims if x not in a.dims])
        self.item = out.dtype.itemsize
        self.steps: list[Step] = []

    def bind(self) -> list[Step]:
        for which in (0, 1):
            if self.operands[which].dtype != self.out.dtype:
                self.pack(which)
        self.arrange()
        if not (self.tiny and len(self.sums) <= 1):
            for which, fits in enumerate(self.readable()):
                if not fits:
                    self.pack(which)
            self.arrange()
        height = 0 if self.tiny else self.slab_height()
        return [*self.steps, *(self.by_slabs(height) if height else self.at_once())]

    def pack(self, which: int, inner_last: bool = True) -> None:
        """The operand becomes a contiguous copy."""
        t, own = self.operands[which], self.own[which]
        order = (*self.shared, *own, *self.inner) if inner_last else (*self.shared, *self.inner, *own)
        key = (self.names[which], order, self.out.dtype)
        if key in self.kept.copies:
            self.operands[which] = self.kept.copies[key]
            return
        self.operands[which] = new = empty({x: t.dims[x][0] for x in order}, self.out.dtype)
        turns = bool(order) and t.dims[order[-1]][0] > STRIP and t.dims[order[-1]][1] != t.dtype.itemsize
        copy = invoke(self.regs, by_strips if turns else np.copyto, new.aligned(order), t.aligned(order))
        if self.names[which] is None:
            self.steps.append(copy)
        else:
            self.kept.steps.append(copy)
            self.kept.copies[key] = new

    def arrange(self) -> None:
        """Axes as dimensions.  batch: (length, strides in a, b, out); free: rows and columns with strides in (out, operand);
        sums: inner ones with strides in (a, b)."""
        a, b = self.operands
        self.sums = merged(self.inner, a, b)
        self.batch = [(n, (s[1], s[2], s[0])) for n, s in merged(self.shared, self.out, a, b)]
        rows, columns = merged(self.own[0], self.out, a), merged(self.own[1], self.out, b)
        rows.sort(key=lambda d: d[0])
        columns.sort(key=lambda d: d[0])
        self.free = (rows.pop() if rows else (1, (0, 0)), columns.pop() if columns else (1, (0, 0)))
        self.batch += [(n, (s[1], 0, s[0])) for n, s in rows] + [(n, (0, s[1], s[0])) for n, s in columns]
        self.sum = self.sums[0] if self.sums else (1, (0, 0))
        (m, _), (n, _) = self.free
        self.shape = tuple(n for n, _ in self.batch)
        self.tiny = math.prod(self.shape) > 1 and m * n * self.sum[0] < SMALL

    def of_operand(self, which: int) -> tuple[Dim, Dim]:
        """Its own dimension and the inner one."""
        return (self.free[which][0], self.free[which][1][1]), (self.sum[0], self.sum[1][which])

    def of_out(self) -> tuple[Dim, Dim]:
        return tuple((n, s[0]) for n, s in self.free)  # type: ignore[return-value]

    def readable(self) -> list[bool]:
        """Can BLAS read the operands in place?"""
        return [len(self.sums) <= 1 and is_matrix(*self.of_operand(which), self.item) for which in (0, 1)]

    def strides(self, which: int) -> tuple[int, ...]:
        return tuple(s[which] for _, s in self.batch)

    def matrix(self, t: Tensor, which: int, r: Dim, c: Dim) -> Any:
        """A view of a, b or out (which: 0, 1, 2)."""

        def spread(d: Dim, other: Dim) -> int:
            """A stride for a dimension of length 1 that keeps the matrix regular."""
            return d[1] if d[0] > 1 else other[0] * self.item if other[1] == self.item or other[0] == 1 else self.item

        return t.make((*self.shape, r[0], c[0]), (*self.strides(which), spread(r, c), spread(c, r)))

    # ---- calls
    def at_once(self) -> list[Step]:
        (a_rows, a_cols), (b_cols, b_rows), o = self.of_operand(0), self.of_operand(1), self.of_out()
        A, B = self.matrix(self.operands[0], 0, a_rows, a_cols), self.matrix(self.operands[1], 1, b_rows, b_cols)
        if self.tiny:
            d = list(range(len(self.shape)))
            x, y, z = len(d), len(d) + 1, len(d) + 2
            O = self.matrix(self.out, 2, *o)
            return [invoke(self.regs, np.einsum, A, [*d, x, z], B, [*d, z, y], [*d, x, y], out=O)]
        m, n, k = a_rows[0], b_cols[0], self.sum[0]
        if (
            self.out.dtype == np.float32
            and k > 2 * LONGEST
            and min(m, n) > 1
            and m * n * k <= UNPACKED
            and has_unpacked_products()
        ):
            return self.by_parts(A, B)
        if is_matrix(*o, self.item):
            return [invoke(self.regs, np.matmul, A, B, out=self.matrix(self.out, 2, *o))]
        temp = np.empty((*self.shape, m, n), self.out.dtype)
        O = self.out.make((*self.shape, m, n), (*self.strides(2), o[0][1], o[1][1]))
        return [invoke(self.regs, np.matmul, A, B, out=temp), invoke(self.regs, np.copyto, O, temp)]

    def by_parts(self, A: Any, B: Any) -> list[Step]:
        """A long sum of a small product, which would be made term by term, as a sum of sums.  A, B: the whole matrices."""
        (a_rows, a_cols), (b_cols, b_rows), (o_rows, o_cols) = self.of_operand(0), self.of_operand(1), self.of_out()
        parts, left = divmod(self.sum[0], LONGEST)
        (x, y), (i, j) = self.operands, (self.strides(0), self.strides(1))
        X = x.make((*self.shape, parts, a_rows[0], LONGEST), (*i, LONGEST * a_cols[1], a_rows[1], a_cols[1]))
        Y = y.make((*self.shape, parts, LONGEST, b_cols[0]), (*j, LONGEST * b_rows[1], b_rows[1], b_cols[1]))
        O = self.out.make((*self.shape, o_rows[0], o_cols[0]), (*self.strides(2), o_rows[1], o_cols[1]))
        sums = np.empty((*self.shape, parts + (left > 0), o_rows[0], o_cols[0]), self.out.dtype)
        steps = [invoke(self.regs, np.matmul, X, Y, out=sums[..., :parts, :, :])]
        if left:

            def rest(A: np.ndarray, B: np.ndarray) -> None:
                np.matmul(A[..., -left:], B[..., -left:, :], out=sums[..., parts, :, :])

            steps.append(invoke(self.regs, rest, A, B))
        return [*steps, invoke(self.regs, np.add.reduce, sums, -3, out=O)]

    # ---- slabs
    def vectors(self) -> int:
        """The operand that is read as vectors: the one along which the result is contiguous."""
        return 1 if self.free[1][1][0] == self.item else 0

    def slab_height(self) -> int:
        """Rows of a slab (of the transposed result, if a is read as vectors), after operands are where they must be; 0: no slabs."""
        which = self.vectors()
        if self.free[which][1][0] != self.item or not is_matrix(*self.of_out(), self.item) or not all(self.readable()):
            return 0
        rows, (n, step), k = self.free[1 - which][0], self.of_operand(which)[0], self.sum[1]
        height = slab(rows, n, self.sum[0], self.out.dtype, k[1 - which] == self.item)
        address, steps = self.operands[which].address, (k[which], *self.strides(which))
        if height == 0 or (step == self.item and address is not None and not any(x % ALIGN for x in (address, *steps))):
            return height
        if rows < COPIED[step != self.item] and self.names[which] is None:
            return 0
        self.pack(which, False)
        self.arrange()
        return height

    def by_slabs(self, height: int) -> list[Step]:
        which = self.vectors()
        other, v = 1 - which, self.operands[which]
        (rows, x_step), x_inner = self.of_operand(other)
        (n, _), v_inner = self.of_operand(which)
        out_rows, out_columns = self.of_out()[other], (n, self.item)

        def slabs(t: Tensor, i: int, r: Dim, c: Dim) -> Any:
            return t.make((*self.shape, r[0] // height, height, c[0]), (*self.strides(i), height * r[1], r[1], c[1]))

        x, i = self.operands[other], self.strides(which)
        X, O = slabs(x, other, (rows, x_step), x_inner), slabs(self.out, 2, out_rows, out_columns)
        V = v.make((*self.shape, 1, v_inner[0], n), (*i, 0, v_inner[1], self.item))
        steps = [invoke(self.regs, np.matmul, X, V, out=O)]
        if rows % height:
            done = rows // height * height

            def rest(X: np.ndarray, V: np.ndarray, O: np.ndarray) -> None:
                np.matmul(X[..., done:, :], V, out=O[..., done:, :])

            X, O = self.matrix(x, other, (rows, x_step), x_inner), self.matrix(self.out, 2, out_rows, out_columns)
            steps.append(invoke(self.regs, rest, X, self.matrix(v, which, v_inner, out_columns), O))
        return steps
