"""The fastest of several ways to compute the same, found by trying them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from timing import Call, synchronize

Bind = Callable[[Sequence[Any]], Call]  # from inputs to a function of no arguments
FAR = 0.05  # relative to the first result, in the 2-norm: what differs by more computes something else


def seconds(call: Call) -> float:
    """Of one call, roughly; 0 where there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        return 0.0
    from triton.testing import do_bench

    return do_bench(call, warmup=5, rep=20, return_mode="median") / 1e3


def fastest(
    ways: Iterable[tuple[str, Bind]],
    args: Sequence[Any],
    budget: float,
    measure: Callable[[Call], float] = seconds,
) -> tuple[Bind, str]:
    """The way whose function of no arguments is the fastest, and what was tried.

    ways: a name and what makes a function of inputs, the likeliest first.  One that fails, or whose result is far from the first one's, is
    left out.  budget: seconds after which nothing new is made once there is something.  Raises what the last one raised if none works.
    """
    start = time.monotonic()
    best: tuple[float, str, Bind] | None = None
    first: Any = None
    lost: list[str] = []
    why: Exception = ValueError("nothing to try")
    tried = 0
    for name, bind in ways:
        if best and time.monotonic() - start > budget:
            lost.append(f"{name}: not tried, {budget:g} s were used up")
            continue
        try:
            call = bind(args)
            result = call().double()
            synchronize()
            if first is not None and not (gap := float((result - first).norm() / first.norm())) <= FAR:
                raise ArithmeticError(f"its result is off by {gap:.2g}")
            first = result if first is None else first
            now = measure(call)
        except Exception as e:
            why = e
            lost.append(f"{name}: {brief(e)}")
            continue
        tried += 1
        if best is None or now < best[0]:
            best = now, name, bind
    if best is None:
        raise why
    return best[2], "; ".join([f"{best[1]}, the fastest of {tried}", *lost])


def brief(e: Exception) -> str:
    lines = str(e).strip().splitlines()
    return f"{type(e).__name__}: {lines[0][:100]}" if lines else type(e).__name__
