"""The reference of a measured kernel: the program itself in float64, on parts of its result."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from operators import Operator


@cache
def float64_arrays() -> type:
    """A torch tensor that has as much of the array API as the measured programs use."""
    import torch

    def number(x: Any, like: Any) -> Any:
        return x if isinstance(x, torch.Tensor) else torch.full((), x, dtype=like.dtype, device=like.device)

    class Namespace:
        inf, int32 = math.inf, torch.int32
        exp, log, sqrt, tanh, where, reshape = torch.exp, torch.log, torch.sqrt, torch.tanh, torch.where, torch.reshape
        arange = torch.arange

        @staticmethod
        def max(x: Any, axis: Any, keepdims: bool = False) -> Any:
            return torch.amax(x, axis, keepdim=keepdims)

        @staticmethod
        def sum(x: Any, axis: Any, keepdims: bool = False) -> Any:
            return torch.sum(x, axis, keepdim=keepdims)

        @staticmethod
        def mean(x: Any, axis: Any, keepdims: bool = False) -> Any:
            return torch.mean(x, axis, keepdim=keepdims)

        @staticmethod
        def maximum(x: Any, y: Any) -> Any:
            return torch.maximum(x, number(y, x))

        @staticmethod
        def minimum(x: Any, y: Any) -> Any:
            return torch.minimum(x, number(y, x))

        @staticmethod
        def squeeze(x: Any, axis: int) -> Any:
            return torch.squeeze(x, axis)

        @staticmethod
        def take_along_axis(x: Any, i: Any, axis: int) -> Any:
            return torch.take_along_dim(x, i.long(), axis)

    class Array(torch.Tensor):
        def __array_namespace__(self, api_version: str | None = None) -> type:
            return Namespace

    return Array


def in_float64(fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    import torch

    kind = float64_arrays()
    with torch.device(args[0].device):
        out = fn(*[(x.double() if x.is_floating_point() else x).as_subclass(kind) for x in args])
    return out.as_subclass(torch.Tensor)


def samples(op: Operator, args: Sequence[Any]) -> Iterator[tuple[tuple[Any, ...], list[Any]]]:
    """Parts of the result, each as an index into it and the inputs that it depends on."""
    import torch

    if op.rows:
        n = args[op.rows[0]].shape[0]
        pick = torch.arange(0, n, max(1, n // 512) | 1, device=args[0].device)  # an odd stride: every place of a tile
        yield (pick,), [x[pick] if i in op.rows else x for i, x in enumerate(args)]
        return
    first = args[0].shape
    *batch, heads = first[:2] if len(first) == 4 else first[:1]
    for b, h in sorted({(0, 0), (batch[0] - 1 if batch else 0, heads - 1), (0, heads // 2)}):
        at = (slice(b, b + 1),) if batch else ()
        part = []
        for x in args:
            if x.ndim == 1:
                part.append(x[h : h + 1])
            elif x.ndim < len(first):
                part.append(x)
            else:
                own = h * x.shape[len(at)] // heads  # heads of a group share one
                part.append(x[(*at, slice(own, own + 1))])
        yield (*at, slice(h, h + 1)), part


def error(out: Any, wants: Sequence[tuple[Any, Any]]) -> float:
    """The largest relative error of a part, in the 2-norm; NaN where anything is not finite that should be."""
    worst = 0.0
    for at, want in wants:
        have = out[at].double()
        finite = want.to(out.dtype).isfinite()  # beyond the dtype's range there is nothing to compare
        gap = ((have - want)[finite].norm() / want[finite].norm().clamp_min(1e-300)).item()
        worst = gap if not gap <= worst else worst
    return worst if bool(out.isfinite().all()) or not all(bool(w.to(out.dtype).isfinite().all()) for _, w in wants) else math.nan
