"""`tune=N`: the N most promising plans are run on the device, and the fastest is taken."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .backends import make_runner
from .errors import EqsatError
from .extraction.plan import Plan
from .program import Program
from .targets import Target
from .verification import random_inputs

ROUNDS = 7
SECONDS = 1.0  # that all rounds together may take, beyond one round

Clock = Callable[[Callable[[], Any]], float]


def fastest(plans: Sequence[Plan], program: Program, target: Target) -> tuple[Plan, list[float]]:
    """The plan that runs fastest on random inputs, and the median seconds of each.

    The plans take turns, so that they share whatever else the machine does.  DeviceError if the device is not here.
    """
    arrays, clock = _device(program, target)
    runners = [make_runner(program, p, target) for p in plans]
    for r in runners:
        r(arrays, None)  # compiles, allocates, warms up
    times: list[list[float]] = [[] for _ in plans]
    start = time.perf_counter()
    for done in range(ROUNDS):
        if done and time.perf_counter() - start > SECONDS:
            break
        for r, t in zip(runners, times):
            t.append(clock(lambda r=r: r(arrays, None)))  # type: ignore[misc]
    medians = [statistics.median(t) for t in times]
    return plans[min(range(len(plans)), key=medians.__getitem__)], medians


def _device(program: Program, target: Target) -> tuple[list[Any], Clock]:
    """Random inputs on the device, and how to time a call there."""
    if target.kind == "hip":
        raise EqsatError("plans for AMD GPUs cannot be measured here", "leave out tune=, or pass a cost model of your own")
    arrays = random_inputs(program, np.random.default_rng(0))
    if target.kind == "cpu":
        return arrays, _host_seconds
    from .runtime.driver import driver

    d = driver()
    device = d.current_device() or 0
    with d.activate(device):
        from pycuda.gpuarray import to_gpu

        on_device = [to_gpu(x) for x in arrays]

    def seconds(call: Callable[[], Any]) -> float:
        with d.activate(device):
            begin, end = d.pycuda.Event(), d.pycuda.Event()
            begin.record()
            call()
            end.record()
            end.synchronize()
            return 1e-3 * end.time_since(begin)

    return on_device, seconds


def _host_seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
