"""A plan as HIP: emitted and compiled for AMD GPUs, and not launched: there is no AMD driver support yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..codegen.cuda.emit import Source, emit
from ..codegen.hip import hip_arch
from ..codegen.lower import lower
from ..errors import DriverNotFound, WrongDevice
from ..extraction.plan import Plan
from ..program import Program
from .compiled import Compiled
from .hipcc import compile_hip


class HipRunner:
    """`arch`: for example "gfx942".  `emitted`: the translation unit with its launches; `compiled`: None before `compile`."""

    def __init__(self, program: Program, plan: Plan, arch: str):
        self.program, self.plan, self.arch = program, plan, arch
        tiles = [lower(k, plan.buffers, plan.compute_dtype) for k in plan.kernels]
        self.emitted: Source = emit(tiles, plan.buffers, hip_arch(arch))
        self.source = self.emitted.text if plan.kernels else "// nothing to compute: every output is empty\n"
        self.compiled: Compiled | None = None

    def compile(self) -> None:
        """For arrays with contiguous rows.  CompilerNotFound where there is no clang with the AMD target."""
        if self.compiled is None and self.plan.kernels:
            self.compiled = compile_hip(self.source, self.arch)

    def __call__(self, arrays: Sequence[Any], stream: Any) -> list[Any]:
        for spec, x in zip(self.program.inputs, arrays):
            if isinstance(x, np.ndarray):
                raise WrongDevice(f"{spec.name} is a NumPy array; this kernel is for an AMD GPU", 'optimize(..., target="cpu")')
        raise DriverNotFound(
            f"kernels for {self.arch} are compiled but not launched: there is no AMD driver support yet",
            "kernel.source is the HIP text, kernel.compile() compiles it; to run it here optimize for another target",
        )

    def details(self) -> list[tuple[str, ...]]:
        """Kernel, threads, shared memory, registers, spills."""
        if self.compiled is None:
            return []
        rows: list[tuple[str, ...]] = []
        for launch in self.emitted.launches:
            info = self.compiled.kernels[launch.function]
            rows.append(
                (
                    launch.function,
                    f"{launch.block} threads",
                    f"{launch.smem} bytes of shared memory",
                    f"{info.registers} registers",
                    f"{info.spill_bytes} bytes spilled",
                )
            )
        return rows
