"""A plan run on the NVIDIA GPU that is here, with NumPy arrays in and out, for checks: inputs lie there as they do here, outputs are
poisoned before."""

from __future__ import annotations

import ctypes as C
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
        runner = _Poisoned(program, plan, target.arch)
        outs = runner([_Copied(x) for x in arrays], None)
        d.check(d.lib.cuCtxSynchronize(), "running the kernels")
        return [o.get() for o in outs]


class _Copied:
    """A host array in device memory: with its strides, and aligned as it is to up to 16 bytes."""

    def __init__(self, x: np.ndarray):
        from pycuda.gpuarray import to_gpu

        memory, offset = image(x)
        self._memory = to_gpu(memory)
        self.dtype = x.dtype
        self.__cuda_array_interface__ = {
            "shape": x.shape,
            "typestr": x.dtype.str,
            "data": (int(self._memory.gpudata) + offset, False),
            "strides": x.strides,
            "version": 3,
        }


def image(x: np.ndarray) -> tuple[np.ndarray, int]:
    """The memory that an array's elements lie in, as bytes, and where its first element is."""
    ends = [(n - 1) * s for n, s in zip(x.shape, x.strides)] if x.size else []
    below = -sum(min(e, 0) for e in ends)
    size = below + sum(max(e, 0) for e in ends) + x.itemsize
    start = x.ctypes.data - below
    gap = start % 16
    memory = np.zeros(gap + size, np.uint8)
    if x.size:
        memory[gap:] = np.frombuffer((C.c_ubyte * size).from_address(start), np.uint8)
    return memory, gap + below


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
    return C.c_uint64(pointer)
