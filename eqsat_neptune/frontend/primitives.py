"""The primitives that `xp` is written with: `elementwise` (which aligns and broadcasts), `reduce`, `reshape`, `read` (slices), `take`,
`permute`.  Where one tensor is needed under two names, an elementwise function of inputs is read again under the other name (that costs
nothing), anything computed gets a `view`.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import DtypeError, ShapeError, TraceError
from ..terms import Affine, Term, add, affine_of, axis_index, bi, is_num, make, mul, num, red, un
from . import dtypes
from .arguments import broadcast_shape, lift
from .tensor import Tensor
from .tracing import Map, Trace, current


def align(tensors: Sequence[Tensor]) -> tuple[list[Term], list[tuple[str, ...]]]:
    """Bring tensors under common axes: their terms, and the dimensions of the broadcast result (which must not be empty)."""
    trace = tensors[0].trace
    ax = trace.axes
    shape = broadcast_shape([t.shape for t in tensors])
    target: list[tuple[str, ...]] = [()] * len(shape)
    terms: dict[int, Term] = {}
    # where two must stay apart, it is the cheaper one that is read under another name, and of computed ones the one that is there first
    for i in sorted(range(len(tensors)), key=lambda i: (not trace.locked(t := tensors[i].term), -trace.depth(t))):
        t, term = tensors[i], tensors[i].term
        pad = len(shape) - t.ndim
        dims = [(), ] * pad + list(t._dims)
        before = -1
        while before != len(ax.extent):                     # splitting for one dimension may matter to another
            before = len(ax.extent)
            for p in range(pad, len(shape)):
                if dims[p] and target[p] and not ax.refine(target[p], dims[p]):         # 6·4 against 8·3: read it by position
                    temporary = [b for a in ax.resolve(target[p]) for b in ax.fresh(ax.extent[a])]
                    m: Map = {}
                    term = trace.reindex(trace.read_linear(term, ax.resolve(dims[p]), ax.linear(temporary), m), m)
                    dims[p] = tuple(temporary)
        renamed: list[tuple[str, str]] = []
        for p in range(pad, len(shape)):
            if dims[p] and target[p]:
                for a, b in zip(ax.resolve(target[p]), ax.resolve(dims[p]), strict=True):
                    if not ax.unify(a, b):
                        renamed.append((b, a))
        m = {ax.resolve((b,))[0]: axis_index(ax.resolve((a,))[0]) for b, a in renamed}
        taken = set(ax.resolve(a for d in target for a in d))
        for p in range(pad, len(shape)):
            if dims[p] and not target[p]:
                own = []
                for a in ax.resolve(dims[p]):
                    if a in taken:
                        (b,) = ax.fresh(ax.extent[a])
                        m[a] = axis_index(b)
                        a = b
                    own.append(a)
                target[p] = tuple(own)
        terms[i] = trace.reindex(term, m)
        target = [ax.resolve(d) for d in target]
        ax.apart(a for d in target for a in d)
    return [terms[i] for i in range(len(tensors))], target


def elementwise(build: Callable[..., Term], args: Sequence[Any], dtype: str) -> Tensor:
    """build(term of each argument) over tensors and numbers that broadcast together."""
    trace = current()
    tensors = [lift(a) for a in args]
    shape = broadcast_shape([t.shape for t in tensors])
    if 0 in shape:
        return trace.empty(shape, dtype)
    terms, dims = align(tensors)
    return trace.tensor(build(*terms), dims, dtype)


def reduce(op: str, x: Tensor, over: Sequence[int], keepdims: bool, dtype: str) -> Tensor:
    """Reduce dimensions by "+", "*", "max" or "min"."""
    trace = x.trace
    if not isinstance(keepdims, int | np.bool_) or keepdims not in (0, 1):
        raise TraceError(f"keepdims is {keepdims!r}", "it is True or False")
    shape = [1 if i in over else n for i, n in enumerate(x.shape) if keepdims or i not in over]
    if any(x.shape[i] == 0 for i in over):
        if op in ("max", "min"):
            raise ShapeError(f"{op} over an empty axis: shape {x.shape}, axis {tuple(over)}", f"a {op} needs one element or more")
        if 0 not in shape:
            dims = [trace.axes.fresh(n) for n in shape]
            return trace.tensor(num(0.0 if op == "+" else 1.0), dims, dtype)
    if 0 in shape:
        return trace.empty(shape, dtype)
    term = x.term
    dims = list(x.dims)
    for i in reversed(over):
        for a in reversed(dims[i]):
            term = reduce_axis(trace, op, a, term)
            trace.summed(op, term, x.dtype)
    return trace.tensor(term, [() if i in over else d for i, d in enumerate(dims) if keepdims or i not in over], dtype)


def reduce_axis(trace: Trace, op: str, axis: str, term: Term) -> Term:
    free = trace.free(term)
    if axis in free:
        return trace.bound(red(op, axis, term), free - {axis})
    n = trace.axes.extent[axis]                             # the same value n times
    return mul(term, n) if op == "+" else bi("pow", term, n) if op == "*" else term


def permute(x: Tensor, order: Sequence[int]) -> Tensor:
    return x.trace.tensor(x.term, [x._dims[i] for i in order], x.dtype)


def expand(x: Tensor, position: int) -> Tensor:
    """Insert a dimension of extent 1."""
    return x.trace.tensor(x.term, [*x._dims[:position], (), *x._dims[position:]], x.dtype)


def reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Row-major: splits and merges axes.  Where the factorisations do not agree (6·4, 8·3), elements are gathered."""
    trace, ax = x.trace, x.trace.axes
    if math.prod(shape) != x.size:
        raise ShapeError(f"cannot reshape {x.shape} ({x.size} elements) to {tuple(shape)} ({math.prod(shape)} elements)",
                         "one extent may be −1, which stands for the rest")
    if 0 in shape:
        return trace.empty(shape, x.dtype)
    new = [ax.fresh(n) for n in shape]
    # the shortest runs of old axes and new dimensions, from the end, that have equally many elements
    old = list(ax.resolve(a for d in x._dims for a in d))
    dims: list[tuple[str, ...]] = [()] * len(shape)
    term = x.term
    m: Map = {}
    p = len(shape)
    while old:
        mine = [old.pop()]
        theirs: list[int] = []
        n, k = ax.extent[mine[0]], 1
        while n != k:
            if k < n:
                p -= 1
                if new[p]:
                    theirs.insert(0, p)
                    k *= shape[p]
            else:
                mine.insert(0, old.pop())
                n *= ax.extent[mine[0]]
        whole = tuple(a for q in theirs for a in new[q])
        if ax.refine(whole, tuple(mine)):
            for a, b in zip(ax.resolve(mine), ax.resolve(whole), strict=True):
                assert ax.unify(a, b)                       # the new axes are nobody's yet
        else:
            term = trace.read_linear(term, mine, ax.linear(whole), m)
        for q in theirs:
            dims[q] = new[q]
    return trace.tensor(trace.reindex(term, m), dims, x.dtype)


def broadcast_to(x: Tensor, shape: Sequence[int]) -> Tensor:
    trace = x.trace
    pad = len(shape) - x.ndim
    if pad < 0 or any(n not in (1, m) for n, m in zip(x.shape, shape[pad:])):
        raise ShapeError(f"shape {x.shape} cannot be broadcast to {tuple(shape)}", "only dimensions of extent 1 can grow")
    if 0 in shape:
        return trace.empty(shape, x.dtype)
    own = [()] * pad + list(x.dims)
    dims = [d or trace.axes.fresh(n) for d, n in zip(own, shape)]
    return trace.tensor(x.term, dims, x.dtype)


def read(x: Tensor, index: Sequence[int | tuple[int, int, int] | None]) -> Tensor:
    """Each dimension at a position (which drops it), at (start, step, count), or whole (None)."""
    trace, ax = x.trace, x.trace.axes
    shape = [n if i is None else i[2] for i, n in zip(index, x.shape) if not isinstance(i, int)]
    if 0 in shape:
        return trace.empty(shape, x.dtype)
    term = x.term
    dims: list[tuple[str, ...]] = []
    m: Map = {}
    for i, d in zip(index, x._dims):
        if i is None:
            dims.append(d)
            continue
        own = () if isinstance(i, int) else ax.fresh(i[2])
        e = Affine(i) if isinstance(i, int) else Affine(i[0], tuple((a, i[1]) for a in own))
        if d:
            term = trace.read_linear(term, ax.resolve(d), e, m)
        if not isinstance(i, int):
            dims.append(own)
    # splitting an axis while reading one dimension cannot touch another one's: all axes of a tensor differ, new ones are fresh
    return trace.tensor(trace.reindex(term, {a: ax.resolved(e) for a, e in m.items()}), dims, x.dtype)


def part(x: Tensor, dim: int, start: int, count: int, step: int = 1) -> Tensor:
    """A slice of one dimension."""
    return read(x, [(start, step, count) if i == dim else None for i in range(x.ndim)])


def shifted(x: Tensor, dim: int, axes: tuple[str, ...], e: Affine) -> Tensor:
    """Dimension `dim` read at index e over new axes that form it from now on.  Where e leaves the dimension nothing is said."""
    trace = x.trace
    m: Map = {}
    term = trace.read_linear(x.term, trace.axes.resolve(x._dims[dim]), e, m) if x._dims[dim] else x.term
    term = trace.reindex(term, {a: trace.axes.resolved(i) for a, i in m.items()})
    return trace.tensor(term, [axes if i == dim else d for i, d in enumerate(x._dims)], x.dtype)


def index_term(x: Tensor, extent: int, what: str) -> Tensor:
    """Indices as array code counts them: negative ones from the end."""
    if dtypes.kind(x.dtype) != "int":
        raise DtypeError(f"{what} with {x.dtype} indices", "indices must be integers; to choose by a condition use xp.where")
    if x.trace.lower_bound(x.term) >= 0:
        return x
    return elementwise(lambda i: make("where", None, (bi("lt", i, 0.0), add(i, extent), i)), [x], x.dtype)


def take(x: Tensor, indices: Tensor, dim: int) -> Tensor:
    """x[…, indices, …]: the dimensions of `indices` replace dimension `dim`."""
    trace, ax = x.trace, x.trace.axes
    shape = [*x.shape[:dim], *indices.shape, *x.shape[dim + 1:]]
    if 0 in shape:
        return trace.empty(shape, x.dtype)
    if x.shape[dim] == 0:
        raise ShapeError(f"cannot take from an empty axis: shape {x.shape}, axis {dim}")
    i = index_term(indices, x.shape[dim], "take")
    mine = set(ax.resolve(a for d in x._dims for a in d))
    rename = {a: b for a in ax.resolve(a for d in i._dims for a in d) if a in mine for b in ax.fresh(ax.extent[a])}
    position = trace.reindex(i.term, {a: axis_index(b) for a, b in rename.items()})
    new = [tuple(rename.get(a, a) for a in d) for d in i.dims]
    ax.apart(mine | {a for d in new for a in d})
    own = ax.resolve(x._dims[dim])
    m: Map = {}
    e = affine_of(position)
    if e is not None and 0 <= (ends := ax.resolved(e).bounds(ax.extent))[0] and ends[1] < x.shape[dim]:
        term = trace.read_linear(x.term, own, ax.resolved(e), m)                # positions known now: a slice
        term = trace.reindex(term, {a: ax.resolved(ix) for a, ix in m.items()})
    else:
        term = trace.gather_linear(x.term, own, position)
    return trace.tensor(term, [*x._dims[:dim], *new, *x._dims[dim + 1:]], x.dtype)


def take_along(x: Tensor, indices: Tensor, dim: int) -> Tensor:
    """result[…, j, …] = x[…, indices[…, j, …], …]; the other dimensions broadcast together."""
    trace, ax = x.trace, x.trace.axes
    if x.ndim != indices.ndim:
        raise ShapeError(f"take_along_axis needs as many dimensions in both: {x.shape} and indices {indices.shape}")
    without = [tuple(1 if i == dim else n for i, n in enumerate(s)) for s in (x.shape, indices.shape)]
    shape = [*broadcast_shape(without)]
    shape[dim] = indices.shape[dim]
    if 0 in shape:
        return trace.empty(shape, x.dtype)
    if x.shape[dim] == 0:
        raise ShapeError(f"cannot take from an empty axis: shape {x.shape}, axis {dim}")
    i = index_term(indices, x.shape[dim], "take_along_axis")
    # the gathered dimension of x and that of the indices go to dimensions of their own
    spread_x = trace.tensor(x.term, [*(() if p == dim else d for p, d in enumerate(x._dims)), x._dims[dim], ()], x.dtype)
    spread_i = trace.tensor(i.term, [*(() if p == dim else d for p, d in enumerate(i._dims)), (), i._dims[dim]], i.dtype)
    (term, position), dims = align([spread_x, spread_i])
    term = trace.gather_linear(term, ax.resolve(dims[-2]), position)
    return trace.tensor(term, [dims[-1] if p == dim else d for p, d in enumerate(dims[:-2])], x.dtype)


# ------------------------------------------------------------------ small constructors that fold numbers

def unary(f: str, x: Term) -> Term:
    """un(f, x), computed now if x is a number."""
    out = un(f, x)
    return _folded(out) if out.op == "un" else out


def binary(f: str, x: Term, y: Term) -> Term:
    return _folded(bi(f, x, y))


def _folded(t: Term) -> Term:
    if not all(is_num(a) for a in t.args):
        return t
    from ..reference import BI, UN
    with np.errstate(all="ignore"):
        f: Any = (UN if t.op == "un" else BI)[t.attr]                           # type: ignore[index]
        return num(float(f(*[np.float64(a.attr) for a in t.args])))             # type: ignore[arg-type]
