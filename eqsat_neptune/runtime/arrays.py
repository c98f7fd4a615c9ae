"""Arrays of any GPU library, without copying them: PyTorch, CuPy, PyCUDA, Numba, JAX and whatever else speaks
`__cuda_array_interface__` or DLPack.

`view` reads where an array lies, `empty_like` makes an output of the same kind, `stream_of` finds the stream on which the caller
works.  Libraries are used only if the caller has imported them.
"""
from __future__ import annotations

import ctypes as C
import math
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from ..errors import DtypeError, InputError, WrongDevice
from ..program import dtype_name
from .driver import driver


class View(NamedTuple):
    """An array on a GPU.  pointer: address of element 0; strides: in elements, any sign; keep: what must live as long as it."""
    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: int
    keep: object


_new = tuple.__new__        # what View(…) calls in the end


def view(array: Any, name: str = "array", stream: int = 0) -> View:
    """Where `array` lies.  `stream` is where it will be read: if its owner still works on it elsewhere, that stream waits.

    Raises WrongDevice if it is not on an NVIDIA GPU, InputError if it is no strided array of a dtype that we know.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):       # the fast path: attributes only
        if not array.is_cuda:
            raise _on_host(name, f"a PyTorch tensor on {array.device}", f"{name}.cuda()")
        if array.is_neg():                  # a lazily negated view, such as the imaginary part of a conjugate
            array = array.resolve_neg()
        try:
            dtype = _dtype(array.dtype, name)
            return _new(View, (array.data_ptr(), array.shape, array.stride(), dtype, array.get_device(), array))
        except RuntimeError as e:           # sparse, fake and other tensors without storage of their own
            raise InputError(f"{name} is no strided tensor: {str(e).partition(chr(10))[0]}", f"pass {name}.to_dense()") from None
    if isinstance(array, np.ndarray | np.generic | int | float | complex | list | tuple):
        raise _on_host(name, f"a NumPy array of {array.dtype}" if isinstance(array, np.ndarray) else f"a {type(array).__name__}",
                       f"torch.from_numpy({name}).cuda(), cupy.asarray({name}) or pycuda.gpuarray.to_gpu({name})")
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is not None:
        return _from_interface(array, interface, name, stream)
    if hasattr(array, "__dlpack__"):
        return _from_dlpack(array, name, stream)
    raise InputError(f"{name} is a {type(array).__name__}, not a GPU array",
                     "accepted: PyTorch tensors, CuPy and PyCUDA arrays, anything with __cuda_array_interface__ or __dlpack__")


def require_host(array: Any, name: str = "array") -> None:
    """Raises WrongDevice if `array` lies on a GPU, where a kernel for the CPU cannot read it."""
    if isinstance(array, np.ndarray):
        return
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        where = str(array.device) if array.device.type != "cpu" else ""
    elif getattr(array, "__cuda_array_interface__", None) is not None:
        where = "a GPU"
    elif hasattr(array, "__dlpack_device__") and (kind := int(array.__dlpack_device__()[0])) not in (_CPU, *_HOST):
        where = f"DLPack device {kind}"
    else:
        where = ""
    if where:
        raise WrongDevice(f"{name} is a {type(array).__name__} on {where}; this kernel runs on the CPU",
                          f'copy it to the host ({name}.cpu() or {name}.get()), or optimize(..., target="cuda")')


def _on_host(name: str, what: str, remedy: str) -> WrongDevice:
    return WrongDevice(f"{name} is {what}; this kernel runs on an NVIDIA GPU", f'pass {remedy}, or optimize(..., target="cpu")')


_names: dict[object, str] = {}              # dtype objects of the libraries → our names


def _dtype(dtype: object, name: str) -> str:
    try:
        return _names[dtype]
    except KeyError:
        pass
    try:
        return _names.setdefault(dtype, dtype_name(dtype))
    except DtypeError as e:
        raise InputError(f"{name} has dtype {dtype}, which kernels cannot read", e.hint) from None


def _in_elements(strides: Sequence[int], itemsize: int, name: str) -> tuple[int, ...]:
    if any(s % itemsize for s in strides):
        raise InputError(f"{name} has strides {tuple(strides)} bytes, no multiples of its element's {itemsize}",
                         "copy it into an array of its own")
    return tuple(s // itemsize for s in strides)


@lru_cache(maxsize=1024)
def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides, in elements."""
    return tuple(math.prod(shape[i + 1:]) for i in range(len(shape)))


# ------------------------------------------------------------------ __cuda_array_interface__

def _from_interface(array: Any, interface: dict[str, Any], name: str, stream: int) -> View:
    """https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html"""
    if interface.get("mask") is not None:
        raise InputError(f"{name} is a masked array", "fill in the masked values first")
    pointer, shape = interface["data"][0] or 0, tuple(interface["shape"])
    declared = np.dtype(interface["typestr"])
    dtype = _dtype(getattr(array, "dtype", declared), name)     # bfloat16 and float8 have no typestr: the array knows better
    if declared.byteorder == ">":
        raise InputError(f"{name} is big-endian", "copy it into an array of the machine's own byte order")
    strides = interface.get("strides")
    steps = _in_elements(strides, declared.itemsize, name) if strides is not None else _contiguous(shape)
    device = driver().device_of(pointer) if pointer else driver().current_device() or 0
    producer = interface.get("stream")
    if producer is not None and producer != (stream or 1):              # the interface calls the default stream 1
        driver().wait_stream(stream, producer)
    return View(pointer, shape, steps, dtype, device, array)


# ------------------------------------------------------------------ DLPack

_CPU, _CUDA, _HOST = 1, 2, (3, 11)          # DLDeviceType: CPU; CUDA; pinned host memory of CUDA and of ROCm
_MANAGED = 13


class _DLTensor(C.Structure):
    _fields_ = [("data", C.c_void_p), ("device_type", C.c_int32), ("device_id", C.c_int32), ("ndim", C.c_int32),
                ("code", C.c_uint8), ("bits", C.c_uint8), ("lanes", C.c_uint16), ("shape", C.POINTER(C.c_int64)),
                ("strides", C.POINTER(C.c_int64)), ("byte_offset", C.c_uint64)]


class _Versioned(C.Structure):
    _fields_ = [("major", C.c_uint32), ("minor", C.c_uint32), ("context", C.c_void_p), ("deleter", C.c_void_p),
                ("flags", C.c_uint64), ("tensor", _DLTensor)]


_capsule_pointer = C.PYFUNCTYPE(C.c_void_p, C.py_object, C.c_char_p)(("PyCapsule_GetPointer", C.pythonapi))
_capsule_is = C.PYFUNCTYPE(C.c_int, C.py_object, C.c_char_p)(("PyCapsule_IsValid", C.pythonapi))

# (DLDataTypeCode, bits) → dtype
_DLPACK_DTYPES = {**{(0, b): f"int{b}" for b in (8, 16, 32, 64)}, **{(1, b): f"uint{b}" for b in (8, 16, 32, 64)},
                  **{(2, b): f"float{b}" for b in (16, 32, 64)}, (4, 16): "bfloat16", (6, 8): "bool",
                  (10, 8): "float8_e4m3fn", (12, 8): "float8_e5m2"}


def _from_dlpack(array: Any, name: str, stream: int) -> View:
    kind = int(array.__dlpack_device__()[0])
    if kind in (_CPU, *_HOST):
        raise _on_host(name, f"a {type(array).__name__} in host memory", "a copy of it on the GPU")
    if kind not in (_CUDA, _MANAGED):
        raise WrongDevice(f"{name} lies on DLPack device type {kind}, not on an NVIDIA GPU", "copy it to a CUDA device")
    try:
        capsule = array.__dlpack__(stream=stream or 1, max_version=(1, 1))          # DLPack calls the default stream 1
    except TypeError:                                                               # a producer from before DLPack 1.0
        capsule = array.__dlpack__(stream=stream or 1)
    return view_capsule(capsule, name, array)


def view_capsule(capsule: object, name: str, owner: object = None) -> View:
    """The tensor in a DLPack capsule, which stays ours: unused, its own destructor returns the tensor to the producer."""
    if _capsule_is(capsule, b"dltensor_versioned"):
        managed = _Versioned.from_address(_capsule_pointer(capsule, b"dltensor_versioned"))
        if managed.major > 1:
            raise InputError(f"{name} comes as DLPack {managed.major}.{managed.minor}", "this version reads DLPack 1")
        t = managed.tensor
    elif _capsule_is(capsule, b"dltensor"):
        t = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    else:
        raise InputError(f"{name} gave a DLPack capsule that is used or foreign", "pass the array itself")
    dtype = _DLPACK_DTYPES.get((t.code, t.bits)) if t.lanes == 1 else None
    if dtype is None:
        raise InputError(f"{name} has DLPack dtype (code {t.code}, {t.bits} bits, {t.lanes} lanes), which kernels cannot read",
                         "convert it first")
    shape = tuple(t.shape[:t.ndim]) if t.ndim else ()
    strides = tuple(t.strides[:t.ndim]) if t.ndim and t.strides else _contiguous(shape)
    return View((t.data or 0) + t.byte_offset, shape, strides, dtype, t.device_id, (capsule, owner))


# ------------------------------------------------------------------ outputs

def empty_like(array: Any, shape: tuple[int, ...], dtype: str, device: int, stream: int | None = None) -> Any:
    """An uninitialised array of the kind of `array` (PyTorch, CuPy, else PyCUDA) on a device.

    `stream`: the one that will write it, if it is not the one on which the library works now.  The library must then take the
    memory from that stream's pool, or its former owner might still be at work in it.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        kind = getattr(torch, dtype)
        if stream is None:
            try:                            # the same allocation with a third of the overhead, for the current device
                if torch._C._cuda_getDevice() == device:
                    return torch._C._dynamo.guards._empty_strided_cuda(shape, _contiguous(shape), kind)
            except AttributeError:
                pass
            return torch.empty(shape, dtype=kind, device=array.device)
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, device) if stream else torch.cuda.default_stream(device)):
            return torch.empty(shape, dtype=kind, device=array.device)
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(array, cupy.ndarray):
        with cupy.cuda.Device(device):
            if stream is None:
                return cupy.empty(shape, dtype=_numpy_dtype(dtype))
            with cupy.cuda.ExternalStream(stream, device) if stream else cupy.cuda.Stream.null:
                return cupy.empty(shape, dtype=_numpy_dtype(dtype))
    with driver().activate(device):
        from pycuda.gpuarray import empty
        return empty(shape, _numpy_dtype(dtype))


def _numpy_dtype(name: str) -> np.dtype[Any]:
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes
        return np.dtype(getattr(ml_dtypes, name))


# ------------------------------------------------------------------ streams

def stream_of(array: Any, device: int) -> int:
    """Handle of the stream on which the library that owns `array` works now; 0 is the default stream."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _torch_stream(torch)(device)
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(array, cupy.ndarray):
        return cupy.cuda.get_current_stream().ptr
    return 0


def _torch_stream(torch: Any) -> Callable[[int], int]:
    """torch.cuda.current_stream(device).cuda_stream takes 2 µs; the call beneath it a tenth of that."""
    try:
        return torch._C._cuda_getCurrentRawStream
    except AttributeError:
        return lambda device: torch.cuda.current_stream(device).cuda_stream


def stream_handle(stream: Any) -> int:
    """The handle of a stream given as an int, as a stream of PyTorch, CuPy, PyCUDA or Numba, or by `__cuda_stream__`."""
    for attribute in ("cuda_stream", "ptr"):                            # PyTorch, CuPy
        if isinstance(handle := getattr(stream, attribute, None), int):
            return handle
    if hasattr(stream, "__cuda_stream__"):
        protocol = stream.__cuda_stream__
        return int((protocol() if callable(protocol) else protocol)[1])
    handle = getattr(stream, "handle", stream)                          # PyCUDA; Numba wraps it once more
    handle = getattr(handle, "value", handle)
    if handle is None:
        return 0
    if isinstance(handle, int) and not isinstance(handle, bool):
        return handle
    raise InputError(f"stream={stream!r} is no CUDA stream", "pass a stream of PyTorch, CuPy, PyCUDA or Numba, or its handle")
