"""x[…]: slices, new dimensions, and integer tensors as indices."""
from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import ShapeError, TraceError
from .arguments import argument, broadcast_shape, extent
from .primitives import align, expand, index_term, permute, read, take
from .tensor import Tensor


def getitem(x: Tensor, key: Any) -> Tensor:
    keys = list(key) if isinstance(key, tuple) else [key]
    argument(x)
    used = 0
    for k in keys:
        _check_key(k)
        used += k is not None and k is not Ellipsis
    if sum(k is Ellipsis for k in keys) > 1:
        raise ShapeError("an index can have one ellipsis only")
    if used > x.ndim:
        raise ShapeError(f"{used} indices for a tensor of shape {x.shape}")
    at = next((i for i, k in enumerate(keys) if k is Ellipsis), len(keys))
    keys[at:at + 1] = [slice(None)] * (x.ndim - used)

    index: list[int | tuple[int, int, int] | None] = []
    arrays: list[Tensor | None] = []                        # for each dimension that is left: the indices into it
    result: list[str] = []                                  # what each entry of the result comes from: "new", "dim" or "array"
    for k in keys:
        if k is None:
            result.append("new")
            continue
        n = x.shape[len(index)]
        if isinstance(k, slice):
            start, stop, step = _slice(k).indices(n)
            count = len(range(start, stop, step))
            index.append(None if (start, step, count) == (0, 1, n) else (start, step, count))
            arrays.append(None)
            result.append("dim")
        elif isinstance(k, Tensor):
            index.append(None)
            arrays.append(k)
            result.append("array")
        else:
            i = extent(k)
            if not -n <= i < n:
                raise ShapeError(f"index {i} is out of range for dimension {len(index)} of shape {x.shape}")
            index.append(i % n)
            result.append("int")
    out = read(x, index)
    if any(a is not None for a in arrays):
        return _advanced(out, arrays, result)
    position = 0
    for r in result:
        if r == "new":
            out = expand(out, position)
        position += r in ("new", "dim")
    return out


def _check_key(k: Any) -> None:
    if k is None or k is Ellipsis or isinstance(k, (slice, Tensor)):
        if isinstance(k, Tensor) and k.dtype == "bool":
            raise TraceError("indexing by a condition gives a shape that depends on values", "use xp.where(condition, x, other)")
        return
    if isinstance(k, (bool, np.bool_)):
        raise TraceError("a tensor cannot be indexed with True or False", "use None to add a dimension")
    if isinstance(k, (list, np.ndarray)):
        raise TraceError("a tensor cannot be indexed with a list or a NumPy array",
                         "pass the indices as an integer input, or use slices and xp.concat")
    if isinstance(k, float):
        raise ShapeError(f"indices must be ints, not {k!r}", "use // where an int is meant")


def _slice(k: slice) -> slice:
    start, stop, step = (v if v is None else extent(v) for v in (k.start, k.stop, k.step))
    if step == 0:
        raise ShapeError("the step of a slice must not be 0")
    return slice(start, stop, step)


def _advanced(x: Tensor, arrays: list[Tensor | None], result: list[str]) -> Tensor:
    """Integer tensors as indices: they broadcast together; their dimensions stand where the first of them stood if they are next
    to each other (ints count as such), else in front."""
    trace = x.trace
    positions = [i for i, r in enumerate(result) if r in ("array", "int")]
    adjacent = positions == list(range(positions[0], positions[-1] + 1))
    dims = [i for i, a in enumerate(arrays) if a is not None]
    shape = broadcast_shape([a.shape for a in arrays if a is not None])
    before = sum(r == "dim" for r in result[:positions[0]]) if adjacent else 0
    kept = [n for n, a in zip(x.shape, arrays) if a is None]
    if len(dims) == 1:                                      # take puts the new dimensions in place of the old one
        out = take(x, arrays[dims[0]], dims[0])             # type: ignore[arg-type]
        order = list(range(out.ndim))
        moved = order[dims[0]:dims[0] + len(shape)]
        rest = [i for i in order if i not in moved]
        out = permute(out, rest[:before] + moved + rest[before:])
    elif 0 in shape or 0 in kept:
        out = trace.empty([*kept[:before], *shape, *kept[before:]], x.dtype)
    else:
        if any(x.shape[d] == 0 for d in dims):
            raise ShapeError(f"cannot index an empty axis: shape {x.shape}")
        # x's indexed dimensions, its others, and those of the indices, each in a place of its own
        k, rank = len(dims), len(shape)
        others = [d for d, a in zip(x._dims, arrays) if a is None]
        front = trace.tensor(x.term, [*(x._dims[d] for d in dims), *others, *[()] * rank], x.dtype)
        spread = []
        for d in dims:
            i = index_term(arrays[d], x.shape[d], "indexing")                   # type: ignore[arg-type]
            spread.append(trace.tensor(i.term, [()] * (k + len(kept) + rank - i.ndim) + list(i._dims), i.dtype))
        terms, together = align([front, *spread])
        term = terms[0]
        for axes, position_there in zip(together[:k], terms[1:]):
            term = trace.gather_linear(term, trace.axes.resolve(axes), position_there)
        others = together[k:k + len(kept)]
        out = trace.tensor(term, [*others[:before], *together[k + len(kept):], *others[before:]], x.dtype)
    position = 0
    seen = False
    if not adjacent:
        position, seen = len(shape), True
    for r in result:
        if r == "new":
            out = expand(out, position)
        if r in ("new", "dim"):
            position += 1
        elif not seen:
            seen, position = True, position + len(shape)
    return out
