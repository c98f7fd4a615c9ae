"""Kernels of programs with dynamic extents: one specialised kernel for each set of extents met."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from .errors import EqsatError, InputError
from .kernel import Kernel
from .targets import Target


class DynamicKernel:
    """Specialises at the first call with new extents, then calls that kernel.  `bind(n=4096)` gives the specialised kernel."""

    def __init__(self, program: Any, target: Target, options: dict[str, Any], progress: Any):
        self.program, self._target, self._options, self._progress = program, target, options, progress
        self._kernels: dict[tuple[tuple[str, int], ...], Kernel] = {}
        self._lock = threading.Lock()

    @property
    def target(self) -> str:
        return str(self._target)

    def bind(self, extents: dict[str, int] | None = None, **more: int) -> Kernel:
        """The kernel for these extents."""
        from .compiler import optimize

        extents = {**(extents or {}), **more}
        key = tuple(sorted(extents.items()))
        with self._lock:
            if key not in self._kernels:
                program = self.program.bind(extents)
                self._kernels[key] = optimize(program, self._target, progress=self._progress, **self._options)  # type: ignore[arg-type]
            return self._kernels[key]

    def __call__(self, *arrays: Any, stream: Any = None) -> Any:
        for x in arrays:
            if not hasattr(x, "shape"):
                raise InputError(f"expected arrays, got {type(x).__name__}")
        extents = self.program.extents([tuple(x.shape) for x in arrays])
        return self.bind(extents)(*arrays, stream=stream)

    def __copy__(self) -> DynamicKernel:
        return self

    def __deepcopy__(self, memo: object) -> DynamicKernel:
        return self

    def __reduce__(self) -> Any:
        raise EqsatError("a kernel with open extents holds the traced function and cannot be pickled", "pickle kernel.bind(n=…)")

    def _unbound(self) -> EqsatError:
        return EqsatError("extents of this kernel are still open", "specialise it first: kernel.bind(n=…)")

    @property
    def plan(self) -> Any:
        raise self._unbound()

    @property
    def source(self) -> str:
        raise self._unbound()

    @property
    def cost(self) -> Any:
        raise self._unbound()

    @property
    def form(self) -> tuple[str, ...]:
        raise self._unbound()

    @property
    def egraph(self) -> dict[str, Any]:
        raise self._unbound()

    @property
    def from_cache(self) -> bool:
        raise self._unbound()

    def report(self) -> Any:
        raise self._unbound()

    def explain(self) -> str:
        raise self._unbound()

    def compile(self) -> Any:
        raise self._unbound()

    def save(self, path: str | Path) -> None:
        raise self._unbound()

    def __repr__(self) -> str:
        return f"<DynamicKernel {self.program.name} for {self.target}: {len(self._kernels)} specialised>"
