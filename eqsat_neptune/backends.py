"""From a plan to something that runs, one `Runner` a target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from .extraction.plan import Plan
from .program import Program
from .targets import Target


class Runner(Protocol):
    """Runs one plan.  `source`: emitted text.  `details()`: rows about compiled code, for the report."""

    @property
    def source(self) -> str: ...

    def compile(self) -> None: ...

    def __call__(self, arrays: Sequence[Any], stream: Any) -> list[Any]: ...

    def details(self) -> list[tuple[str, ...]]: ...


def make_runner(program: Program, plan: Plan, target: Target) -> Runner:
    if target.kind == "cpu":
        from .runtime.cpu import CpuRunner

        return CpuRunner(program, plan)
    if target.kind == "cuda":
        from .runtime.cuda import CudaRunner

        return CudaRunner(program, plan, target.arch)
    from .runtime.hip import HipRunner

    return HipRunner(program, plan, target.arch)
