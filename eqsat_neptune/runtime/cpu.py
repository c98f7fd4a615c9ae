"""Runs a plan on NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..codegen.cpu import CpuKernel
from ..codegen.cpu.layout import element_type
from ..errors import DtypeError, InputError
from ..extraction.plan import Plan
from ..program import Input, Program, dtype_name
from .arrays import require_host


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
    """The argument as a NumPy array of the declared shape and dtype, without a copy.  For shape () a number will do."""
    require_host(x, spec.name)
    if not isinstance(x, np.ndarray | np.generic):
        if isinstance(x, int | float) and not spec.shape:
            return np.asarray(x, element_type(spec.dtype))
        if not hasattr(x, "__array__"):
            raise InputError(f"{spec.name} must be a NumPy array, not {type(x).__name__}")
        try:
            x = np.asarray(x)
        except Exception as e:  # whatever the array's own library raises
            raise InputError(
                f"{spec.name} ({type(x).__name__}) cannot be read as a NumPy array: {str(e).partition(chr(10))[0]}",
                "convert it first",
            ) from None
    if isinstance(x, np.ma.MaskedArray):
        raise InputError(f"{spec.name} is a masked array", "fill in the masked values first: x.filled(…)")
    if x.shape != spec.shape:
        raise InputError(f"{spec.name} has shape {x.shape}, the kernel was made for {spec.shape}", "optimize for this shape too")
    try:
        name = dtype_name(x.dtype)
    except DtypeError:
        name = str(x.dtype)
    if name != spec.dtype or not x.dtype.isnative:
        said = x.dtype.str if name == spec.dtype else name
        raise InputError(
            f"{spec.name} has dtype {said}, the kernel was made for {spec.dtype}",
            f'convert it: {spec.name}.astype("{spec.dtype}")',
        )
    return np.asarray(x)
