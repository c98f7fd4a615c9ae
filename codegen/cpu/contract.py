"""Contractions as BLAS calls: which axes form the rows, the columns and the summed dimension of a (batched) matrix product.

Slabs.  On processors with AVX-512, OpenBLAS computes small float32 products without packing their operands first, in 4/5 of the
time, if the operand that it reads as vectors is aligned, and contiguous along the result's rows.  There a product is made as a
batch of slabs of rows that are small enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
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


def invoke(regs: list, fn: Callable[..., Any], *args: Any, **kw: Any) -> Step:
    """The call with registers (among the arguments, or `out`) read when it happens."""
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

    def step() -> None:
        now = list(args)
        for n, j in moving:
            now[n] = regs[j]
        fn(*now, **kw)

    return step


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
COPIED = (64, 384)  # rows of a result that pay for an aligned copy of the operand: a plain one, a transposing one


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
    if dtype != np.float32 or not (n == 32 or n % 64 == 0) or k < 32 or not has_unpacked_products():
        return 0
    return min((r for r in SLABS[contiguous] if r * n * k <= UNPACKED and m >= 2 * r), key=lambda r: (m % r, -r), default=0)


def contraction(
    regs: list,
    out: Tensor,
    a: Tensor,
    b: Tensor,
    summed: tuple[str, ...],
    still: tuple[bool, bool] = (False, False),
    first: list[Step] | None = None,
) -> list[Step]:
    """out = Σ a·b.  Every axis in `summed` belongs to both operands.

    still: operands that change less often than this runs; what must be done only when they do is added to `first`."""
    steps: list[Step] = []
    k = [x for x in summed if x in a.dims]
    free = {
        "batch": [x for x in a.dims if x in b.dims and x not in k],
        "m": [x for x in a.dims if x not in b.dims],
        "n": [x for x in b.dims if x not in a.dims],
    }
    if any(out.dims[x][0] == 0 for x in out.dims):
        return []
    if any(a.dims[x][0] == 0 for x in k):
        return [invoke(regs, np.copyto, out.aligned(tuple(out.dims)), out.dtype.type(0))]
    item = out.dtype.itemsize
    operands, own = [a, b], (free["m"], free["n"])

    def pack(which: int, k_inside: bool = True) -> None:
        """The operand becomes a contiguous copy."""
        t = operands[which]
        order = (*free["batch"], *own[which], *k) if k_inside else (*free["batch"], *k, *own[which])
        operands[which] = new = empty({x: t.dims[x][0] for x in order}, out.dtype)
        copy = invoke(regs, np.copyto, new.aligned(order), t.aligned(order), casting="same_kind")
        (steps if first is None or not still[which] else first).append(copy)

    for which in (0, 1):
        if operands[which].dtype != out.dtype:
            pack(which)
    readable = placed = False
    while True:
        a, b = operands
        K = merged(k, a, b)
        batch = [(n, (s[1], s[2], s[0])) for n, s in merged(free["batch"], out, a, b)]
        rows, columns = merged(free["m"], out, a), merged(free["n"], out, b)
        rows.sort(key=lambda d: d[0])
        columns.sort(key=lambda d: d[0])
        M, N = rows.pop() if rows else (1, (0, 0)), columns.pop() if columns else (1, (0, 0))
        batch += [(n, (s[1], 0, s[0])) for n, s in rows] + [(n, (0, s[1], s[0])) for n, s in columns]
        sum_ = K[0] if K else (1, (0, 0))
        tiny = math.prod(n for n, _ in batch) > 1 and M[0] * N[0] * sum_[0] < SMALL
        fits = [len(K) <= 1 and is_matrix((x[0], x[1][1]), (sum_[0], sum_[1][i]), item) for i, x in enumerate((M, N))]
        if not readable and not all(fits) and not (tiny and len(K) <= 1):
            for which in (0, 1):
                if not fits[which]:
                    pack(which)
            readable = True
            continue
        # The result's rows are contiguous, or those of its transpose: one operand is read as vectors along them.
        turned = N[1][0] != item
        which, along, across = (0, M, N[0]) if turned else (1, N, M[0])
        matrix = along[1][0] == item and is_matrix((M[0], M[1][0]), (N[0], N[1][0]), item)
        height = slab(across, along[0], sum_[0], out.dtype, sum_[1][1 - which] == item) if matrix and not tiny else 0
        if height == 0 or placed:
            break
        v, steps_of_v = operands[which], (sum_[1][which], *(s[which] for _, s in batch))
        lies_well = along[1][1] == item and v.address is not None and not any(x % ALIGN for x in (v.address, *steps_of_v))
        if lies_well:
            break
        if across < COPIED[along[1][1] != item] and not still[which]:
            height = 0
            break
        pack(which, False)
        placed = True
    shape = tuple(n for n, _ in batch)

    def spread(length: int, stride: int, other: tuple[int, int]) -> int:
        """A stride for a dimension of length 1 that keeps the matrix regular."""
        return stride if length > 1 else other[0] * item if other[1] == item or other[0] == 1 else item

    def view(t: Tensor, which: int, r: tuple[int, int], c: tuple[int, int]) -> Any:
        strides = (spread(*r, c), spread(*c, r))
        return t.make((*shape, r[0], c[0]), (*(s[which] for _, s in batch), *strides))

    a_rows, a_cols = (M[0], M[1][1]), (sum_[0], sum_[1][0])
    b_rows, b_cols = (sum_[0], sum_[1][1]), (N[0], N[1][1])
    o_rows, o_cols = (M[0], M[1][0]), (N[0], N[1][0])
    if height:
        x, line, k_stride = operands[1 - which], (N, M)[which], sum_[1]

        def slabs(t: Tensor, i: int, r: tuple[int, int], c: tuple[int, int]) -> Any:
            return t.make((*shape, r[0] // height, height, c[0]), (*(s[i] for _, s in batch), height * r[1], r[1], c[1]))

        rows_of_x, rows_of_out = (across, line[1][1]), (across, line[1][0])
        inner, columns_of_out = (sum_[0], k_stride[1 - which]), (along[0], item)
        V = v.make((*shape, 1, sum_[0], along[0]), (*(s[which] for _, s in batch), 0, k_stride[which], item))
        X, O = slabs(x, 1 - which, rows_of_x, inner), slabs(out, 2, rows_of_out, columns_of_out)
        steps.append(invoke(regs, np.matmul, X, V, out=O))
        if done := across % height and across // height * height:

            def rest(X: np.ndarray, V: np.ndarray, O: np.ndarray) -> None:
                np.matmul(X[..., done:, :], V, out=O[..., done:, :])

            V = view(v, which, (sum_[0], k_stride[which]), (along[0], item))
            X, O = view(x, 1 - which, rows_of_x, inner), view(out, 2, rows_of_out, columns_of_out)
            steps.append(invoke(regs, rest, X, V, O))
        return steps
    A, B = view(a, 0, a_rows, a_cols), view(b, 1, b_rows, b_cols)
    if tiny:
        d = list(range(len(shape)))
        m, n, z = len(d), len(d) + 1, len(d) + 2
        return [*steps, invoke(regs, np.einsum, A, [*d, m, z], B, [*d, z, n], [*d, m, n], out=view(out, 2, o_rows, o_cols))]
    if not is_matrix(o_rows, o_cols, item):
        temp = np.empty((*shape, M[0], N[0]), out.dtype)
        O = out.make((*shape, M[0], N[0]), (*(s[2] for _, s in batch), M[1][0], N[1][0]))
        return [*steps, invoke(regs, np.matmul, A, B, out=temp), invoke(regs, np.copyto, O, temp)]
    return [*steps, invoke(regs, np.matmul, A, B, out=view(out, 2, o_rows, o_cols))]
