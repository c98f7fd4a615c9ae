"""Times, energy and clocks of functions on a GPU."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from records import median

Call = Callable[[], Any]
CALLS = 10  # calls of a CUDA graph
TURN = 0.15  # seconds that a function runs before it is another's turn


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """TimeoutError in the main thread, where Python code runs."""

    def expire(*_: Any) -> None:
        raise TimeoutError

    old = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def captured(calls: Sequence[Call], flushed: bool) -> Any:
    """A CUDA graph of calls in a row, CALLS at least; each after a flush of the L2, or right after the one before."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in (*calls, *calls):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds(calls)):
            for call in calls:
                if flushed:
                    flusher().zero_()
                call()
    return graph


def rounds(calls: Sequence[Call]) -> int:
    return -(-CALLS // len(calls))


def elapsed(body: Callable[[], Any]) -> float:
    import torch

    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record()
    body()
    b.record()
    torch.cuda.synchronize()
    return a.elapsed_time(b) / 1e3


@cache
def flusher() -> Any:
    import torch

    return torch.empty(64 << 20, device="cuda", dtype=torch.int32)


@cache
def flush_graph() -> Any:
    return captured([lambda: None], flushed=True)


def cache_bytes() -> int:
    """Of the GPU's L2; 0 where there is no GPU."""
    import torch

    return torch.cuda.get_device_properties(0).L2_cache_size if torch.cuda.is_available() else 0


def copies(moved: int, cache: int) -> int:
    """How many inputs to take turns so that four caches' worth lies between a call and the next on the same: each call moves `moved` bytes.
    At least two; at most 1000, which programs that move hardly anything would need more than."""
    return min(max(2, -(-4 * cache // max(moved, 1))), 1000)


class Meter:
    """Energy and clock of the GPU, where NVML is there."""

    def __init__(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            self.nvml, self.handle = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
            self.joules()
        except Exception:
            self.nvml = None

    def joules(self) -> float:
        return self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.handle) / 1e3 if self.nvml else math.nan

    def megahertz(self) -> float:
        return float(self.nvml.nvmlDeviceGetClockInfo(self.handle, 1)) if self.nvml else math.nan  # 1: multiprocessors


class Clock:
    """Times a function.  calls: it, of one input or of several that take turns.  If there are several, calls are so short that the host
    would show: they run in a CUDA graph."""

    def __init__(self, calls: Sequence[Call]):
        self.calls = calls
        self.seconds = self._single()
        self.graph = captured(calls, flushed=False) if len(calls) > 1 else None
        self.turns: list[float] = []
        self.joules: list[float] = []
        self.megahertz: list[float] = []

    def _single(self) -> float:
        """With a cold L2."""
        if len(self.calls) > 1:  # beside the flushes alone, in turns: clocks drift
            graph = captured(self.calls[:1], flushed=True)
            pairs = [(elapsed(graph.replay), elapsed(flush_graph().replay)) for _ in range(12)][1:]
            return max(median(a for a, _ in pairs) - median(b for _, b in pairs), 1e-7) / CALLS
        from triton.testing import do_bench

        return do_bench(self.calls[0], warmup=8, rep=40, return_mode="median") / 1e3

    def turn(self, meter: Meter, seconds: float = TURN) -> None:
        """Back to back for about that long."""
        step, each = (self.graph.replay, rounds(self.calls) * len(self.calls)) if self.graph else (self.calls[0], 1)
        step()
        n = max(3, math.ceil(seconds / (each * self.seconds)))
        before = meter.joules()

        def body() -> None:
            for _ in range(n):
                step()
            self.megahertz.append(meter.megahertz())  # while the queue still runs

        self.turns.append(elapsed(body) / (n * each))
        self.joules.append((meter.joules() - before) / (n * each))

    def record(self) -> dict[str, float]:
        found = dict(sustained=median(self.turns), joules=median(self.joules), megahertz=median(self.megahertz))
        return {k: v for k, v in found.items() if math.isfinite(v)}
