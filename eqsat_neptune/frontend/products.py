"""Matrix products and einsum."""
from __future__ import annotations

import builtins
import math
from typing import Any

from ..errors import ShapeError
from ..terms import Affine
from . import arguments, dtypes, primitives
from .casts import astype
from .elementwise import abs, multiply, pow
from .reductions import count_nonzero, max, min, sum
from .shapes import squeeze
from .tensor import Absent, Tensor

__all__ = [
    "einsum", "linalg", "matmul", "matrix_transpose", "tensordot", "vecdot",
]


def matmul(x1: Any, x2: Any, /) -> Tensor:
    """Matrix product of the last two dimensions; those before broadcast; vectors as in the standard.  → red + of mul."""
    a, b = arguments.lift(x1), arguments.lift(x2)
    if a.ndim == 0 or b.ndim == 0:
        raise ShapeError(f"matmul needs dimensions: {a.shape} @ {b.shape}", "multiply by a number with *")
    rows, columns = a.ndim > 1, b.ndim > 1
    if a.shape[-1] != b.shape[-2 if columns else -1]:
        rows_of_b = b.shape[-2 if columns else -1]
        raise ShapeError(f"matmul of {a.shape} and {b.shape}: {a.shape[-1]} columns against {rows_of_b} rows",
                         "the last dimension of the first must equal the last but one of the second; x.mT transposes")
    a = primitives.expand(a if rows else primitives.expand(a, 0), a.ndim + (not rows))                # (…, n, k, 1)
    b = b if columns else primitives.expand(b, 1)
    b = primitives.expand(b, b.ndim - 2)                                                   # (…, 1, k, m)
    out = sum(multiply(a, b), axis=-2, dtype=arguments.result_dtype(arguments.lift(x1), arguments.lift(x2)))
    drop = [i for i, keep in ((out.ndim - 2, rows), (out.ndim - 1, columns)) if not keep]
    return squeeze(out, tuple(drop)) if drop else out


def matrix_transpose(x: Any, /) -> Tensor:
    """The last two dimensions swapped.  → nothing."""
    return arguments.lift(x).mT


def vecdot(x1: Any, x2: Any, /, axis: int = -1) -> Tensor:
    """Σ x1·x2 over one axis.  → red + of mul."""
    return sum(multiply(x1, x2), axis=axis, dtype=arguments.result_dtype(arguments.argument(x1), arguments.argument(x2)))


def tensordot(x1: Any, x2: Any, /, *, axes: Any = 2) -> Tensor:
    """Contract the last `axes` dimensions of x1 with the first of x2, or the pairs that two sequences give.  → red + of mul."""
    a, b = arguments.lift(x1), arguments.lift(x2)
    if isinstance(axes, (tuple, list)):
        lists = [s if isinstance(s, (tuple, list)) else (s,) for s in axes]
        da, db = ([arguments.dimension(i, t.ndim) for i in s] for s, t in zip(lists, (a, b)))
    else:
        n = arguments.extent(axes)
        if not 0 <= n <= builtins.min(a.ndim, b.ndim):
            raise ShapeError(f"tensordot over {n} axes of {a.shape} and {b.shape}")
        da, db = list(range(a.ndim - n, a.ndim)), list(range(n))
    if [a.shape[i] for i in da] != [b.shape[i] for i in db]:
        raise ShapeError(f"tensordot of {a.shape} over {tuple(da)} and {b.shape} over {tuple(db)}: extents differ")
    letters = iter("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    la = [next(letters) for _ in a.shape]
    lb = [la[da[db.index(i)]] if i in db else next(letters) for i in range(b.ndim)]
    out = [c for i, c in enumerate(la) if i not in da] + [c for i, c in enumerate(lb) if i not in db]
    return einsum(f"{''.join(la)},{''.join(lb)}->{''.join(out)}", a, b)


def einsum(subscripts: str, /, *operands: Any) -> Tensor:
    """Einstein summation, with "...", repeated letters (diagonals) and an implicit output.  Three operands or more are contracted
    from left to right.  → red + of mul."""
    xs = [arguments.lift(x) for x in operands]
    labels, out = _parsed(subscripts, [x.shape for x in xs])
    total: Tensor | None = None
    have: list[Label] = []
    for k, (own, x) in enumerate(zip(labels, xs)):
        own, x = _diagonals(own, x)
        if total is None:
            total, have = x, own
        else:
            both = [*have, *(c for c in own if c not in have)]
            total, have = multiply(_laid_out(total, have, both), _laid_out(x, own, both)), both
        later = set(out).union(*labels[k + 1:])
        if drop := tuple(i for i, c in enumerate(have) if c not in later):
            total = sum(total, axis=drop, dtype=total.dtype)
            have = [c for c in have if c in later]
    assert total is not None
    return primitives.permute(total, [have.index(c) for c in out])


Label = str | int                       # a letter; or a dimension of "...", counted from its last: −1, −2, …


def _parsed(subscripts: str, shapes: list[tuple[int, ...]]) -> tuple[list[list[Label]], list[Label]]:
    """Labels of each operand's dimensions, and of the output's."""
    def wrong(why: str) -> ShapeError:
        return ShapeError(f"einsum {subscripts!r}: {why}", 'as in "bij,bjk->bik": a letter for each dimension')

    def split(text: str, dots: int) -> list[Label]:
        before, ellipsis, after = text.partition("...")
        if not all(c.isalpha() for c in before + after):
            raise wrong(f"{text!r} is not made of letters and at most one ...")
        return [*before, *(range(-dots, 0) if ellipsis else ()), *after]

    left, arrow, right = subscripts.replace(" ", "").partition("->")
    texts = left.split(",")
    if len(texts) != len(shapes):
        raise wrong(f"it names {len(texts)} operands, {len(shapes)} were given")
    labels = []
    for text, shape in zip(texts, shapes):
        labels.append(split(text, builtins.max(0, len(shape) - len(text.replace("...", "")))))
        if len(labels[-1]) != len(shape):
            raise wrong(f"{text!r} does not fit an operand of shape {shape}")
    every = [c for own in labels for c in own]
    dots = -builtins.min((c for c in every if isinstance(c, int)), default=0)
    out = split(right, dots) if arrow else [*range(-dots, 0), *sorted(
        c for c in set(every) if isinstance(c, str) and left.count(c) == 1)]
    if len(set(out)) < len(out) or not set(out) <= set(every):
        raise wrong("its output repeats a letter or has one that no operand has")
    sizes: dict[Label, int] = {}
    for own, shape in zip(labels, shapes):
        for c, n in zip(own, shape):
            if isinstance(c, str) and sizes.setdefault(c, n) != n:              # dimensions of ... broadcast
                raise wrong(f"{c!r} has extents {sizes[c]} and {n}")
    return labels, out


def _laid_out(x: Tensor, labels: list[Label], want: list[Label]) -> Tensor:
    x = primitives.permute(x, [labels.index(c) for c in want if c in labels])
    for i, c in enumerate(want):
        if c not in labels:
            x = primitives.expand(x, i)
    return x


def _diagonals(labels: list[Label], x: Tensor) -> tuple[list[Label], Tensor]:
    """Repeated labels of one operand become one dimension, read along the diagonal."""
    while len(set(labels)) < len(labels):
        j = next(i for i, c in enumerate(labels) if c in labels[:i])
        x = _diagonal(x, labels.index(labels[j]), j)
        labels = labels[:j] + labels[j + 1:]
    return labels, x


def _diagonal(x: Tensor, i: int, j: int) -> Tensor:
    """Dimensions i and j, of one extent, read at equal positions; dimension j goes."""
    trace, ax = x.trace, x.trace.axes
    if 0 in x.shape:
        return trace.empty([n for p, n in enumerate(x.shape) if p != j], x.dtype)
    own = ax.fresh(x.shape[i])
    x = primitives.shifted(x, i, own, ax.linear(own))
    x = primitives.shifted(x, j, (), Affine()) if not own else _at_same(x, j, own)
    return trace.tensor(x.term, [d for p, d in enumerate(x.dims) if p != j], x.dtype)


def _at_same(x: Tensor, j: int, own: tuple[str, ...]) -> Tensor:
    trace, ax = x.trace, x.trace.axes
    m: dict[str, Affine] = {}
    term = trace.read_linear(x.term, ax.resolve(x._dims[j]), ax.linear(ax.resolve(own)), m)
    term = trace.reindex(term, {a: ax.resolved(e) for a, e in m.items()})
    return Tensor(trace, term, tuple(() if p == j else d for p, d in enumerate(x.dims)), x.dtype)


class _Linalg:
    """The part of the standard's linalg extension that needs no decompositions."""

    matmul = staticmethod(matmul)
    matrix_transpose = staticmethod(matrix_transpose)
    vecdot = staticmethod(vecdot)
    tensordot = staticmethod(tensordot)

    @staticmethod
    def outer(x1: Any, x2: Any, /) -> Tensor:
        """x1[i]·x2[j]."""
        return multiply(primitives.expand(arguments.lift(x1), 1), x2)

    @staticmethod
    def diagonal(x: Any, /, *, offset: int = 0) -> Tensor:
        """x[…, i, i + offset]."""
        x, k = arguments.lift(x), arguments.extent(offset)
        if x.ndim < 2:
            raise ShapeError(f"diagonal needs two or more dimensions, got shape {x.shape}")
        rows, columns = builtins.max(-k, 0), builtins.max(k, 0)
        n = builtins.max(0, builtins.min(x.shape[-2] - rows, x.shape[-1] - columns))
        x = primitives.part(primitives.part(x, x.ndim - 2, rows, n), x.ndim - 1, columns, n)
        return _diagonal(x, x.ndim - 2, x.ndim - 1)

    @staticmethod
    def trace(x: Any, /, *, offset: int = 0, dtype: Any = None) -> Tensor:
        """Σ of the diagonal."""
        return sum(_Linalg.diagonal(x, offset=offset), axis=-1, dtype=dtype)

    @staticmethod
    def vector_norm(x: Any, /, axis: Any = None, keepdims: builtins.bool = False, ord: int | float = 2) -> Tensor:
        """(Σ |x|^ord)^(1/ord) over axis; ord inf, −inf, 0, 1, 2 or another number."""
        x = arguments.lift(x)
        if ord == math.inf:
            return max(abs(x), axis=axis, keepdims=keepdims)
        if ord == -math.inf:
            return min(abs(x), axis=axis, keepdims=keepdims)
        if ord == 0:
            return astype(count_nonzero(x, axis=axis, keepdims=keepdims), dtypes.floating(x.dtype))
        if ord == 1:
            return sum(abs(x), axis=axis, keepdims=keepdims)
        powers = multiply(x, x) if ord == 2 else pow(abs(x), ord)
        return pow(sum(powers, axis=axis, keepdims=keepdims), 1.0 / ord)

    def __getattr__(self, name: str) -> Any:
        raise Absent(f"xp.linalg.{name} is not supported", "linalg has matmul, outer, diagonal, trace, vector_norm, …")


linalg = _Linalg()
