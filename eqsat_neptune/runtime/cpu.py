"""Runs a plan on NumPy arrays."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..codegen.cpu import CpuKernel
from ..errors import InputError, WrongDevice
from ..extraction.plan import Plan
from ..program import Input, Program, dtype_name


class CpuRunner:
    def __init__(self, program: Program, plan: Plan):
        self.program, self.kernel = program, CpuKernel(plan, program)

    @property
    def source(self) -> str:
        return self.kernel.source

    def compile(self) -> None:
        """Nothing to do: tile programs were compiled into steps already."""

    def details(self) -> list[tuple[str, ...]]:
        return []

    def __call__(self, arrays: Sequence[Any], stream: Any) -> list[np.ndarray]:
        if stream is not None:
            raise InputError("a stream has no meaning on the cpu target", "leave out stream=")
        ins = {i.name: as_array(i, x) for i, x in zip(self.program.inputs, arrays)}
        out = self.kernel.run(ins)
        return [out[f"out{n}"] for n in range(len(self.program.outputs))]


def as_array(spec: Input, x: Any) -> np.ndarray:
    """The argument as a NumPy array of the declared shape and dtype, without a copy."""
    if not isinstance(x, np.ndarray | np.generic):
        if hasattr(x, "__cuda_array_interface__") or getattr(getattr(x, "device", None), "type", "cpu") not in ("cpu",):
            raise WrongDevice(f"{spec.name} lies on a GPU, this kernel runs on the cpu", 'move it, or optimize for target="cuda"')
        if not hasattr(x, "__array__"):
            raise InputError(f"{spec.name} must be a NumPy array, not {type(x).__name__}")
        x = np.asarray(x)
    if x.shape != spec.shape:
        raise InputError(f"{spec.name} has shape {x.shape}, the kernel was made for {spec.shape}", "optimize for this shape too")
    try:
        name = dtype_name(x.dtype)
    except Exception:
        name = str(x.dtype)
    if name != spec.dtype or not x.dtype.isnative:
        raise InputError(f"{spec.name} has dtype {x.dtype}, the kernel was made for {spec.dtype}", f"convert it: x.astype({spec.dtype})")
    return np.asarray(x)
