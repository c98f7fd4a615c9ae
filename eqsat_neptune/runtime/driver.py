"""The CUDA driver: contexts through PyCUDA, and the calls that PyCUDA lacks through ctypes.

PyCUDA keeps the handles of modules and functions to itself and takes no foreign stream, so a kernel that shall run on the
caller's stream, with launch attributes, inside a CUDA graph, is loaded and launched here.  Nothing is touched at import;
`driver()` loads the libraries and raises DriverNotFound, with the remedy, where one is missing.
"""
from __future__ import annotations

import ctypes as C
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from ..errors import DeviceError, DriverNotFound

# CUresult codes for which we know a remedy
_NO_BINARY, _INVALID_IMAGE, _OLD_PTX, _RESOURCES, _MISSING = 209, 200, 222, 701, 500
_STICKY = {700, 710, 714, 715, 716, 717, 718, 719}
_MAX_DYNAMIC_SHARED, _NON_PORTABLE_CLUSTER = 8, 14              # CUfunction_attribute
_ATTRIBUTE_DEVICE_ORDINAL = 9                                   # CUpointer_attribute
_RELAXED = 2                                                    # CUstreamCaptureMode
_CLUSTER, _PROGRAMMATIC = 4, 6                                  # CUlaunchAttributeID
_NON_BLOCKING, _DISABLE_TIMING = 1, 2                           # flags of streams and events
_TENSOR_MAP_DTYPES = {"uint8": 0, "int8": 0, "bool": 0, "float8_e4m3fn": 0, "float8_e5m2": 0, "uint16": 1, "int16": 1,
                      "uint32": 2, "int32": 3, "uint64": 4, "int64": 5, "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}


class LaunchAttribute(C.Structure):
    _fields_ = [("id", C.c_int), ("pad", C.c_int), ("value", C.c_uint * 16)]


class LaunchConfig(C.Structure):
    _fields_ = [("grid", C.c_uint * 3), ("block", C.c_uint * 3), ("shared", C.c_uint), ("stream", C.c_void_p),
                ("attributes", C.POINTER(LaunchAttribute)), ("count", C.c_uint)]


def launch_config(grid: tuple[int, int, int], block: int, shared: int, cluster: int = 1,
                  programmatic: bool = False) -> LaunchConfig:
    """`cluster`: blocks of a cluster, along x.  `programmatic`: the kernel may start before the one ahead of it in the stream
    has finished (it then waits by griddepcontrol.wait, or never reads what that one writes)."""
    wanted: list[tuple[int, tuple[int, ...]]] = []
    if cluster > 1:
        wanted.append((_CLUSTER, (cluster, 1, 1)))
    if programmatic:
        wanted.append((_PROGRAMMATIC, (1,)))
    attributes = (LaunchAttribute * len(wanted))()
    for a, (ident, value) in zip(attributes, wanted):
        a.id = ident
        for i, v in enumerate(value):
            a.value[i] = v
    return LaunchConfig((C.c_uint * 3)(*grid), (C.c_uint * 3)(block, 1, 1), shared, None,
                        C.cast(attributes, C.POINTER(LaunchAttribute)) if wanted else None, len(wanted))


class Driver:
    """libcuda and PyCUDA, both initialised."""

    def __init__(self) -> None:
        try:
            self.lib = C.CDLL("libcuda.so.1")
        except OSError:
            raise DriverNotFound("no NVIDIA driver found (libcuda.so.1)", 'install the driver, or use target="cpu"') from None
        try:
            import pycuda.driver as pycuda
        except ModuleNotFoundError:
            raise DriverNotFound("PyCUDA is not installed", "pip install eqsat-neptune[cuda] (it is built from source: it needs "
                                 "g++ and the headers of a CUDA toolkit)") from None
        except ImportError as e:
            raise DriverNotFound(f"PyCUDA cannot be loaded: {e}", "build it anew against this driver and this NumPy: pip install "
                                 "--force-reinstall --no-cache-dir --no-binary :all: pycuda") from e
        self.pycuda: Any = pycuda
        try:
            pycuda.init()
            self.devices: int = pycuda.Device.count()
        except pycuda.Error as e:
            raise DriverNotFound(f"the CUDA driver does not start: {e}", "check that nvidia-smi lists a GPU") from e
        if not self.devices:
            raise DriverNotFound("the CUDA driver finds no GPU", "check nvidia-smi and CUDA_VISIBLE_DEVICES")
        if not hasattr(self.lib, "cuLaunchKernelEx"):
            raise DriverNotFound("the CUDA driver is too old: it lacks cuLaunchKernelEx", "install one for CUDA 11.8 or newer")
        self.launch = self.lib.cuLaunchKernelEx         # no argtypes: arguments are made once, as ctypes objects
        self.get_context = C.PyDLL("libcuda.so.1").cuCtxGetCurrent     # never blocks, so it may hold the interpreter's lock
        # PyCUDA's objects belong to the thread that made them.  One more of each is kept, or a primary context would end, and
        # all that is loaded in it, with the thread that used it first.
        self._primary, self._kept = threading.local(), dict[int, Any]()

    # -------------------------------------------------------------- errors

    def check(self, code: int, doing: str) -> None:
        if code:
            raise self.error(code, doing)

    def error(self, code: int, doing: str) -> DeviceError:
        text = C.c_char_p()
        self.lib.cuGetErrorString(code, C.byref(text))
        hint = None
        if code == _NO_BINARY:
            hint = 'it was compiled for another GPU: target="cuda" compiles for the one that is present'
        elif code in (_INVALID_IMAGE, _OLD_PTX):
            hint = f"this driver is for CUDA {self.version}: use a compiler of at most that release, or update the driver"
        elif code == _RESOURCES:
            hint = "the block needs more registers or shared memory than a multiprocessor has"
        elif code in _STICKY:
            hint = "a kernel that ran before failed, and CUDA is lost to this process; compute-sanitizer finds which one"
        return DeviceError(f"{doing}: CUDA error {code}, {text.value.decode() if text.value else 'unknown'}", hint)

    @property
    def version(self) -> str:
        """The newest CUDA release that the driver knows, for example "13.0"."""
        v = C.c_int()
        self.lib.cuDriverGetVersion(C.byref(v))
        return f"{v.value // 1000}.{v.value % 1000 // 10}"

    # -------------------------------------------------------------- devices and contexts

    def architecture(self, device: int = 0) -> str:
        """The compiler's name of a device, with the features of just that one: "sm_80", "sm_90a"."""
        major, minor = self.pycuda.Device(device).compute_capability()
        return f"sm_{major}{minor}{'a' if major >= 9 else ''}"

    def current_context(self) -> int | None:
        """Handle of the calling thread's context."""
        current = C.c_void_p()
        self.check(self.lib.cuCtxGetCurrent(C.byref(current)), "asking for the current context")
        return current.value

    def current_device(self) -> int | None:
        """Index of the device to which the calling thread's context belongs."""
        if self.current_context() is None:
            return None
        device = C.c_int()
        self.check(self.lib.cuCtxGetDevice(C.byref(device)), "asking for the current device")
        return device.value

    @contextmanager
    def activate(self, device: int) -> Iterator[None]:
        """Makes a context of the device current, for PyCUDA too: the one that is current, if it belongs to the device, else the
        primary one, which PyTorch, CuPy and the CUDA runtime share."""
        top = self.pycuda.Context.get_current()
        if top is not None and top.handle == self.current_context() and self.current_device() == device:
            yield
            return
        contexts = self._primary.__dict__.setdefault("contexts", {})
        if device not in contexts:
            if not 0 <= device < self.devices:
                raise DeviceError(f"there is no CUDA device {device}", f"devices 0 to {self.devices - 1} are there")
            contexts[device] = self.pycuda.Device(device).retain_primary_context()
            if device not in self._kept:
                self._kept[device] = self.pycuda.Device(device).retain_primary_context()
        contexts[device].push()
        try:
            yield
        finally:
            contexts[device].pop()

    def device_of(self, pointer: int) -> int:
        """Index of the device where an address lies."""
        device = C.c_int()
        code = self.lib.cuPointerGetAttribute(C.byref(device), _ATTRIBUTE_DEVICE_ORDINAL, C.c_uint64(pointer))
        self.check(code, f"asking where address {pointer:#x} lies")
        return device.value

    # -------------------------------------------------------------- modules, in the current context

    def load_module(self, image: bytes) -> C.c_void_p:
        module = C.c_void_p()
        self.check(self.lib.cuModuleLoadData(C.byref(module), image), "loading a compiled kernel")
        return module

    def function(self, module: C.c_void_p, name: str, shared: int = 0, cluster: int = 1) -> C.c_void_p:
        """Handle of a kernel that may use `shared` bytes of dynamic shared memory and clusters of that many blocks."""
        f = C.c_void_p()
        code = self.lib.cuModuleGetFunction(C.byref(f), module, name.encode())
        if code == _MISSING:
            raise DeviceError(f"the compiled code has no kernel {name!r}", 'declare it extern "C" __global__')
        self.check(code, f"looking up kernel {name}")
        if hasattr(self.lib, "cuFuncLoad"):             # or else the first launch loads it, and may synchronise to do so
            self.check(self.lib.cuFuncLoad(f), f"loading kernel {name}")
        if shared > 48 * 1024:
            code = self.lib.cuFuncSetAttribute(f, _MAX_DYNAMIC_SHARED, shared)
            self.check(code, f"reserving {shared} bytes of shared memory for {name}")
        if cluster > 8:
            code = self.lib.cuFuncSetAttribute(f, _NON_PORTABLE_CLUSTER, 1)
            self.check(code, f"allowing clusters of {cluster} blocks for {name}")
        return f

    def encode_tensor_map(self, destination: int, dtype: str, address: int, dims: tuple[int, ...], strides: tuple[int, ...],
                          box: tuple[int, ...], swizzle: int, itemsize: int) -> None:
        """Writes a TMA descriptor (128 bytes) to the host address `destination`, a multiple of 64.

        dims and box: elements, innermost first; strides: elements, of dims 1, 2, … (the innermost is contiguous).  What a box
        reads outside of dims is 0.  `swizzle`: bytes, 0, 32, 64 or 128."""
        n = len(dims)
        code = self.lib.cuTensorMapEncodeTiled(
            C.c_void_p(destination), _TENSOR_MAP_DTYPES[dtype], n, C.c_void_p(address), (C.c_uint64 * n)(*dims),
            (C.c_uint64 * n)(*(itemsize * s for s in strides)), (C.c_uint32 * n)(*box), (C.c_uint32 * n)(*([1] * n)),
            0, _SWIZZLES[swizzle], 2, 0)
        if code:
            raise DeviceError(f"no tensor map can describe {dtype} at {address:#x} with dims {dims}, strides {strides}, "
                              f"box {box}, swizzle {swizzle}", "address and strides must be multiples of 16 bytes")

    # -------------------------------------------------------------- streams and memory

    def capture_id(self, stream: int) -> int:
        """0, or the number of the CUDA-graph capture in which the stream takes part."""
        status, ident = C.c_int(), C.c_uint64()
        code = self.lib.cuStreamGetCaptureInfo_v2(C.c_void_p(stream), C.byref(status), C.byref(ident), None, None, None)
        self.check(code, "asking whether the stream is being captured")
        return ident.value if status.value else 0

    def wait_stream(self, stream: int, other: int) -> None:
        """Work put into `stream` from now on starts after what is in `other` now."""
        event = C.c_void_p()
        self.check(self.lib.cuEventCreate(C.byref(event), _DISABLE_TIMING), "making an event")
        try:
            self.check(self.lib.cuEventRecord(event, C.c_void_p(other)), "recording an event")
            self.check(self.lib.cuStreamWaitEvent(C.c_void_p(stream), event, 0), "waiting for an event")
        finally:
            self.lib.cuEventDestroy_v2(event)

    @contextmanager
    def uncaptured(self) -> Iterator[None]:
        """Lets this thread allocate and synchronise while a CUDA graph is being captured; what it does is not in the graph."""
        mode = C.c_int(_RELAXED)
        self.lib.cuThreadExchangeStreamCaptureMode(C.byref(mode))
        try:
            yield
        finally:
            self.lib.cuThreadExchangeStreamCaptureMode(C.byref(mode))


class DeviceMemory:
    """Zeroed memory in the current context, freed with the object.

    PyCUDA's own allocation cannot be freed by another thread than its maker, nor while a graph is being captured."""

    def __init__(self, size: int):
        self.driver, self.address, self.size = driver(), 0, size
        lib, check = self.driver.lib, self.driver.check
        with self.driver.uncaptured():
            pointer, stream = C.c_uint64(), C.c_void_p()
            check(lib.cuMemAlloc_v2(C.byref(pointer), C.c_size_t(size)), f"allocating {size} bytes of workspace")
            self.address, self.context = pointer.value, self.driver.current_context()
            check(lib.cuStreamCreate(C.byref(stream), _NON_BLOCKING), "making a stream")    # the caller's may be capturing
            try:
                check(lib.cuMemsetD8Async(pointer, 0, C.c_size_t(size), stream), "clearing the workspace")
                check(lib.cuStreamSynchronize(stream), "clearing the workspace")
            finally:
                lib.cuStreamDestroy_v2(stream)

    def __del__(self) -> None:
        if getattr(self, "address", 0) and not sys.is_finalizing():     # at exit the driver frees all, contexts may be gone
            with self.driver.uncaptured():
                self.driver.lib.cuCtxPushCurrent_v2(C.c_void_p(self.context))
                self.driver.lib.cuMemFree_v2(C.c_uint64(self.address))
                self.driver.lib.cuCtxPopCurrent_v2(C.byref(C.c_void_p()))


@cache
def driver() -> Driver:
    """The driver, loaded at the first call.  Raises DriverNotFound, also at later calls (one may install it meanwhile)."""
    return Driver()


def device_arch(device: int | None = None) -> str:
    """The compiler's name of a device; by default the one whose context is current, else the first."""
    d = driver()
    return d.architecture(d.current_device() or 0 if device is None else device)


def available() -> str | None:
    """None if CUDA kernels can run here, else the reason why not."""
    try:
        driver()
    except DriverNotFound as e:
        return str(e)
    return None
