"""Contractions as BLAS calls: which axes form the rows, the columns and the summed dimension of a (batched) matrix product."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

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


def empty(dims: dict[str, int], dtype: np.dtype) -> Tensor:
    """A new contiguous tensor; axes from the outermost in."""
    flat = np.empty(math.prod(dims.values()), dtype)
    step, out = dtype.itemsize, {}
    for a in reversed(dims):
        out[a] = (dims[a], step)
        step *= max(1, dims[a])

    def make(shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
        return np.ndarray(shape, dtype, flat, 0, strides)

    return Tensor({a: out[a] for a in dims}, dtype, make)


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


def contraction(regs: list, out: Tensor, a: Tensor, b: Tensor, summed: tuple[str, ...]) -> list[Step]:
    """out = Σ a·b.  Every axis in `summed` belongs to both operands."""
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

    def pack(t: Tensor, rows: list[str]) -> Tensor:
        """A contiguous copy, made whenever the contraction runs."""
        order = tuple([*free["batch"], *rows, *k])
        new = empty({x: t.dims[x][0] for x in order}, out.dtype)
        steps.append(invoke(regs, np.copyto, new.aligned(order), t.aligned(order), casting="same_kind"))
        return new

    a = pack(a, free["m"]) if a.dtype != out.dtype else a
    b = pack(b, free["n"]) if b.dtype != out.dtype else b
    for _ in range(2):
        K = merged(k, a, b)
        batch = [(n, (s[1], s[2], s[0])) for n, s in merged(free["batch"], out, a, b)]
        rows, columns = merged(free["m"], out, a), merged(free["n"], out, b)
        rows.sort(key=lambda d: d[0])
        columns.sort(key=lambda d: d[0])
        M, N = rows.pop() if rows else (1, (0, 0)), columns.pop() if columns else (1, (0, 0))
        batch += [(n, (s[1], 0, s[0])) for n, s in rows] + [(n, (0, s[1], s[0])) for n, s in columns]
        sum_ = K[0] if K else (1, (0, 0))
        item = out.dtype.itemsize
        fits = [len(K) <= 1 and is_matrix((x[0], x[1][1]), (sum_[0], sum_[1][i]), item) for i, x in enumerate((M, N))]
        if all(fits):
            break
        tiny = math.prod(n for n, _ in batch) > 1 and M[0] * N[0] * sum_[0] < SMALL
        if tiny and len(K) <= 1:
            break
        a, b = a if fits[0] else pack(a, free["m"]), b if fits[1] else pack(b, free["n"])
    shape = tuple(n for n, _ in batch)

    def spread(length: int, stride: int, other: tuple[int, int]) -> int:
        """A stride for a dimension of length 1 that keeps the matrix regular."""
        return stride if length > 1 else other[0] * item if other[1] == item or other[0] == 1 else item

    def view(t: Tensor, which: int, r: tuple[int, int], c: tuple[int, int]) -> Any:
        strides = (spread(*r, c), spread(*c, r))
        return t.make((*shape, r[0], c[0]), (*(s[which] for _, s in batch), *strides))

    A = view(a, 0, (M[0], M[1][1]), (sum_[0], sum_[1][0]))
    B = view(b, 1, (sum_[0], sum_[1][1]), (N[0], N[1][1]))
    o_rows, o_cols = (M[0], M[1][0]), (N[0], N[1][0])
    if shape and math.prod(shape) > 1 and M[0] * N[0] * sum_[0] < SMALL:
        d = list(range(len(shape)))
        x, y, z = len(d), len(d) + 1, len(d) + 2
        O = view(out, 2, o_rows, o_cols)
        steps.append(invoke(regs, np.einsum, A, [*d, x, z], B, [*d, z, y], [*d, x, y], out=O))
    elif is_matrix(o_rows, o_cols, item):
        steps.append(invoke(regs, np.matmul, A, B, out=view(out, 2, o_rows, o_cols)))
    else:
        temp = np.empty((*shape, M[0], N[0]), out.dtype)
        O = out.make((*shape, M[0], N[0]), (*(s[2] for _, s in batch), M[1][0], N[1][0]))
        steps += [invoke(regs, np.matmul, A, B, out=temp), invoke(regs, np.copyto, O, temp)]
    return steps
