"""Compiling and running device code: NVRTC, HIP's clang, the CUDA driver, arrays of other GPU libraries.

Importing this package loads no library and touches no device."""
from .compiled import Compiled, KernelInfo
from .driver import available
from .hipcc import compile_hip
from .module import GpuModule, Launch, TensorMap
from .nvrtc import compile_cuda

__all__ = ["Compiled", "GpuModule", "KernelInfo", "Launch", "TensorMap", "available", "compile_cuda", "compile_hip"]
