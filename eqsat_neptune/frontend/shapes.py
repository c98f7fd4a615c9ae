"""Functions that move, join, repeat and reshape.  Most become no term at all."""
from __future__ import annotations

import builtins
import math
from collections.abc import Sequence
from typing import Any

from ..errors import ShapeError, TraceError
from ..terms import Affine
from . import arguments, primitives
from .casts import astype
from .creation import arange, full
from .dtypes import DEFAULT_INT
from .elementwise import equal, less, where
from .tensor import Tensor

__all__ = [
    "broadcast_arrays", "broadcast_to", "concat", "expand_dims", "flip", "meshgrid", "moveaxis", "pad", "permute_dims",
    "repeat", "reshape", "roll", "squeeze", "stack", "tile", "unstack",
]


def reshape(x: Any, /, shape: Any, *, copy: builtins.bool | None = None) -> Tensor:
    """Row-major; one extent may be −1.  → nothing: axes split and merge (a gather where 6·4 becomes 8·3)."""
    x = arguments.lift(x)
    new = [arguments.extent(n) for n in (shape if isinstance(shape, (tuple, list)) else (shape,))]
    if new.count(-1) == 1:
        rest = -math.prod(new)
        if rest == 0 or x.size % rest:
            raise ShapeError(f"cannot reshape {x.shape} to {tuple(new)}", f"{rest} does not divide {x.size} elements")
        new[new.index(-1)] = x.size // rest
    if builtins.any(n < 0 for n in new):
        raise ShapeError(f"cannot reshape to {tuple(new)}", "an extent is ≥ 0; one may be −1")
    return primitives.reshape(x, new)


def permute_dims(x: Any, /, axes: Any) -> Tensor:
    """Dimensions in another order.  → nothing."""
    x = arguments.lift(x)
    order = [arguments.dimension(a, x.ndim) for a in axes]
    if sorted(order) != list(range(x.ndim)):
        raise ShapeError(f"{tuple(axes)} is no order of the {x.ndim} dimensions of {x.shape}", "name each dimension once")
    return primitives.permute(x, order)


def moveaxis(x: Any, source: Any, destination: Any, /) -> Tensor:
    """Dimensions `source` at `destination`, the others in their order.  → nothing."""
    x = arguments.lift(x)
    a, b = ([arguments.dimension(i, x.ndim) for i in (s if isinstance(s, (tuple, list)) else (s,))] for s in (source, destination))
    if len(a) != len(b) or len(set(a)) < len(a) or len(set(b)) < len(b):
        raise ShapeError(f"moveaxis from {source} to {destination}", "name as many different dimensions in both")
    order = [i for i in range(x.ndim) if i not in a]
    for to, frm in sorted(zip(b, a)):
        order.insert(to, frm)
    return primitives.permute(x, order)


def expand_dims(x: Any, /, axis: int = 0) -> Tensor:
    """A dimension of extent 1 inserted at `axis`.  → nothing."""
    x = arguments.lift(x)
    return primitives.expand(x, arguments.dimension(axis, x.ndim, 1))


def squeeze(x: Any, /, axis: Any) -> Tensor:
    """Dimensions of extent 1 removed.  → nothing."""
    x = arguments.lift(x)
    drop = arguments.dimensions(axis, x.ndim)
    for i in drop:
        if x.shape[i] != 1:
            raise ShapeError(f"cannot squeeze dimension {i} of {x.shape}: its extent is {x.shape[i]}, not 1")
    return x.trace.tensor(x.term, [d for i, d in enumerate(x.dims) if i not in drop], x.dtype)


def broadcast_to(x: Any, /, shape: Any) -> Tensor:
    """x repeated along new dimensions and those of extent 1.  → nothing."""
    return primitives.broadcast_to(arguments.lift(x), arguments.shape_of(shape))


def broadcast_arrays(*arrays: Any) -> list[Tensor]:
    """All broadcast to their common shape.  → nothing."""
    xs = [arguments.lift(a) for a in arrays]
    shape = arguments.broadcast_shape([x.shape for x in xs]) if xs else ()
    return [primitives.broadcast_to(x, shape) for x in xs]


def meshgrid(*arrays: Tensor, indexing: str = "xy") -> list[Tensor]:
    """Coordinates of a grid, from a vector for each of its dimensions.  → broadcasts."""
    xs = [arguments.lift(a) for a in arrays]
    if builtins.any(x.ndim > 1 for x in xs):
        raise ShapeError("meshgrid takes vectors")
    if indexing not in ("xy", "ij"):
        raise ShapeError(f'indexing is "xy" or "ij", not {indexing!r}')
    place = list(range(len(xs)))
    if indexing == "xy" and len(xs) > 1:
        place[:2] = [1, 0]
    spread = [primitives.reshape(x, [x.size if p == i else 1 for i in range(len(xs))]) for p, x in zip(place, xs)]
    return broadcast_arrays(*spread)


def flip(x: Any, /, axis: Any = None) -> Tensor:
    """Order reversed along axis.  → an affine index (a view if x is computed)."""
    x = arguments.lift(x)
    over = arguments.dimensions(axis, x.ndim)
    return primitives.read(x, [(n - 1, -1, n) if i in over and n > 1 else None for i, n in enumerate(x.shape)])


def roll(x: Any, /, shift: Any, *, axis: Any = None) -> Tensor:
    """Elements moved by `shift` along axis, around the end; axis None: of the flattened tensor.  → where of two reads."""
    x = arguments.lift(x)
    if axis is None:
        return primitives.reshape(roll(primitives.reshape(x, [x.size]), shift, axis=0), x.shape)
    axes = axis if isinstance(axis, (tuple, list)) else (axis,)
    shifts = shift if isinstance(shift, (tuple, list)) else (shift,) * len(axes)
    if len(shifts) != len(axes):
        raise ShapeError(f"roll by {shift} over axis {axis}: give a shift for each axis")
    for s, a in zip(shifts, axes):
        d = arguments.dimension(a, x.ndim)
        n = x.shape[d]
        s = arguments.extent(s) % n if n else 0
        if s and 0 not in x.shape:
            x = concat([primitives.part(x, d, n - s, s), primitives.part(x, d, 0, n - s)], axis=d)
    return x


def tile(x: Any, repetitions: Any, /) -> Tensor:
    """x repeated as a whole along each dimension.  → nothing: a new axis that x does not depend on."""
    x = arguments.lift(x)
    reps = arguments.shape_of(repetitions)
    for _ in range(len(reps) - x.ndim):
        x = primitives.expand(x, 0)
    reps = (1,) * (x.ndim - len(reps)) + reps
    if 0 in reps or 0 in x.shape:
        return x.trace.empty([n * r for n, r in zip(x.shape, reps)], x.dtype)
    return x.trace.tensor(x.term, [(*x.trace.axes.fresh(r), *d) for r, d in zip(reps, x.dims)], x.dtype)


def repeat(x: Any, repeats: Any, /, axis: int | None = None) -> Tensor:
    """Each element repeated `repeats` times (an int) along axis.  → nothing: a new axis that x does not depend on."""
    x = arguments.lift(x)
    if isinstance(arguments.argument(repeats), Tensor):
        raise TraceError("repeat by a tensor gives a shape that depends on values", "give an int")
    r = arguments.count(repeats, "the number of repeats")
    if axis is None:
        x, axis = primitives.reshape(x, [x.size]), 0
    d = arguments.dimension(axis, x.ndim)
    if r == 0 or 0 in x.shape:
        return x.trace.empty([n * r if i == d else n for i, n in enumerate(x.shape)], x.dtype)
    own = x.trace.axes.fresh(r)
    return x.trace.tensor(x.term, [(*m, *own) if i == d else m for i, m in enumerate(x.dims)], x.dtype)


def concat(arrays: Sequence[Any], /, axis: int | None = 0) -> Tensor:
    """Tensors one after the other along axis; axis None: flattened.  → where over the position, each read at its own offset."""
    xs = [arguments.lift(x) for x in _several(arrays, "concat")]
    if axis is None:
        xs, axis = [primitives.reshape(x, [x.size]) for x in xs], 0
    ndim = xs[0].ndim
    d = arguments.dimension(axis, ndim)
    if builtins.any(x.ndim != ndim or x.shape[:d] + x.shape[d + 1:] != xs[0].shape[:d] + xs[0].shape[d + 1:] for x in xs):
        raise ShapeError(f"concat of shapes {', '.join(str(x.shape) for x in xs)} along axis {d}", "all other extents must agree")
    dtype = arguments.result_dtype(*xs)
    trace = xs[0].trace
    total = builtins.sum(x.shape[d] for x in xs)
    shape = [total if i == d else n for i, n in enumerate(xs[0].shape)]
    if 0 in shape:
        return trace.empty(shape, dtype)
    xs = [x for x in xs if x.shape[d]]
    if len(xs) == 1:
        return astype(xs[0], dtype)
    own = trace.axes.fresh(total)
    moved, start, ends = [], 0, []
    for x in xs:
        index = trace.axes.resolved(trace.axes.linear(own))
        moved.append(primitives.shifted(x, d, trace.axes.resolve(own), Affine(index.const - start, index.terms)))
        start += x.shape[d]
        ends.append(start)
    position = trace.tensor(trace.positions(trace.axes.resolve(own)), [own if i == d else () for i in range(ndim)], DEFAULT_INT)
    out = moved[-1]
    for x, end in reversed(list(zip(moved[:-1], ends))):
        out = where(less(position, end), x, out)
    return astype(out, dtype)


def _several(arrays: Any, name: str) -> Sequence[Any]:
    if isinstance(arrays, Tensor) or not isinstance(arrays, (list, tuple)) or not arrays:
        raise ShapeError(f"{name} takes a list or tuple of one tensor or more")
    return arrays


def stack(arrays: Sequence[Any], /, axis: int = 0) -> Tensor:
    """Tensors of one shape along a new dimension.  → where over the position."""
    xs = [arguments.lift(x) for x in _several(arrays, "stack")]
    if builtins.any(x.shape != xs[0].shape for x in xs):
        raise ShapeError(f"stack of shapes {', '.join(str(x.shape) for x in xs)}", "all must agree; xp.concat joins others")
    d = arguments.dimension(axis, xs[0].ndim, 1)
    dtype = arguments.result_dtype(*xs)
    if 0 in xs[0].shape:
        return xs[0].trace.empty([*xs[0].shape[:d], len(xs), *xs[0].shape[d:]], dtype)
    if len(xs) == 1:
        return primitives.expand(xs[0], d)
    position = arange(len(xs))
    for _ in range(xs[0].ndim - d):
        position = primitives.expand(position, position.ndim)
    out = primitives.expand(xs[-1], d)
    for i, x in reversed(list(enumerate(xs[:-1]))):
        out = where(equal(position, i), primitives.expand(x, d), out)
    return astype(out, dtype)


def unstack(x: Any, /, axis: int = 0) -> tuple[Tensor, ...]:
    """The slices along one dimension.  → reads at constant indices."""
    x = arguments.lift(x)
    d = arguments.dimension(axis, x.ndim)
    return tuple(primitives.read(x, [k if i == d else None for i in range(x.ndim)]) for k in range(x.shape[d]))


def pad(x: Any, pad_width: Any, /, *, constant_values: Any = 0) -> Tensor:
    """A border of constants: (before, after) for all dimensions, or one pair for each.  → where over the position."""
    x = arguments.lift(x)
    if isinstance(pad_width, int):
        pad_width = (pad_width, pad_width)
    pairs = [tuple(p) for p in pad_width] if isinstance(pad_width[0], (tuple, list)) else [tuple(pad_width)] * x.ndim
    if len(pairs) != x.ndim or builtins.any(len(p) != 2 or builtins.min(map(arguments.extent, p)) < 0 for p in pairs):
        raise ShapeError(f"pad of shape {x.shape} by {pad_width}", "give (before, after), or such a pair for each dimension")
    for d, (before, after) in enumerate(pairs):
        parts = [x]
        for n, at in ((before, 0), (after, len(parts))):
            if n:
                shape = [n if i == d else m for i, m in enumerate(x.shape)]
                parts.insert(0 if at == 0 else len(parts), full(shape, constant_values, dtype=x.dtype))
        x = concat(parts, axis=d)
    return x
