"""A plan run on the NVIDIA GPU that is here, with NumPy arrays in and out, for checks: outputs are poisoned before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..extraction.plan import Plan
from ..program import Program
from ..targets import Target
from .arrays import view
from .cuda import CudaRunner
from .driver import available, device_arch, driver


def present(target: Target) -> bool:
    """Is a GPU here that code for this target is made for?"""
    if target.kind != "cuda" or available() is not None:
        return False
    digits, mine = (a.removeprefix("sm_").rstrip("a") for a in (target.arch, device_arch()))
    return target.arch == device_arch() or (not target.arch.endswith("a") and int(digits) // 10 == int(mine) // 10 and digits <= mine)


def run(program: Program, plan: Plan, target: Target, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Outputs of one run.  DeviceError if a kernel fails."""
    d = driver()
    with d.activate(d.current_device() or 0):
        from pycuda.gpuarray import to_gpu

        runner = _Poisoned(program, plan, target.arch)
        outs = runner([to_gpu(np.ascontiguousarray(x)) for x in arrays], None)
        d.check(d.lib.cuCtxSynchronize(), "running the kernels")
        return [o.get() for o in outs]


class _Poisoned(CudaRunner):
    """Elements that no kernel writes are NaN, or −1."""

    def _allocate(self, like: Any, device: int, stream: int | None) -> list[Any]:
        outs = super()._allocate(like, device, stream)
        for o, (name, *_) in zip(outs, self._outputs):
            if o.size:
                d = driver()
                d.check(d.lib.cuMemsetD8_v2(_address(view(o, name).pointer), 0xFF, o.nbytes), "poisoning an output")
        return outs


def _address(pointer: int) -> Any:
    import ctypes

    return ctypes.c_uint64(pointer)
