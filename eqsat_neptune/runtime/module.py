"""Compiled CUDA kernels and how to launch them: data in, launches out.

A `GpuModule` is loaded at its first run, once for each context that it runs in.  A run costs a few microseconds of host time,
never synchronises, and may be captured in a CUDA graph, a first run too.  Code stays loaded until the process ends, for a graph
may still launch it.
"""
from __future__ import annotations

import ctypes as C
import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from ..errors import DeviceError
from ..program import DTYPES
from .driver import DeviceMemory, Driver, driver, launch_config

_ALIGNMENT = 256                    # of each workspace, bytes
_MAPS_KEPT = 256                    # descriptors kept for each tensor-map argument
_PER_THREAD_STREAM = 2              # a handle that means another stream in every thread


@dataclass(frozen=True)
class TensorMap:
    """A kernel argument `const __grid_constant__ CUtensorMap`: how TMA sees the buffer with this name.

    dims and box: elements, innermost first; strides: elements, of dims 1, 2, …; a name stands for a value given at the run.
    swizzle: bytes (0, 32, 64, 128)."""
    buffer: str
    dtype: str
    dims: tuple[int | str, ...]
    strides: tuple[int | str, ...]
    box: tuple[int, ...]
    swizzle: int = 128


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    args: for each parameter of the kernel the name of a value (an address or another integer, given at the run; or a workspace),
    an integer constant, or a `TensorMap`.  An integer parameter may have any width up to 64 bits.
    smem: bytes of dynamic shared memory.  cluster: blocks of a cluster along x.
    pdl: programmatic dependent launch: the kernel may start while the one before it in the stream finishes.
    A launch with an empty grid does nothing.
    """
    function: str
    grid: tuple[int, int, int]
    block: int
    smem: int
    args: tuple[str | int | TensorMap, ...]
    cluster: int = 1
    pdl: bool = False


class GpuModule:
    """Machine code, its launches in order, and the workspaces (name → bytes) that they share.

    Each stream, and each capture of a CUDA graph, has workspaces of its own: runs on different streams may overlap.  They are
    zero before the first run; a kernel that counts on zeros must leave zeros behind.  Those that a graph uses are never freed.
    """

    def __init__(self, cubin: bytes, launches: Sequence[Launch], workspaces: Mapping[str, int] | None = None):
        self.cubin, self.launches = cubin, tuple(launches)
        self.offsets: dict[str, int] = {}
        self.workspace_size = 0
        for name, size in (workspaces or {}).items():
            self.offsets[name] = self.workspace_size
            self.workspace_size += -(-max(size, 1) // _ALIGNMENT) * _ALIGNMENT
        self._workspaces: dict[tuple[int | None, int, int, int], _Workspace] = {}
        self._lock = threading.Lock()
        # By device, what is ready to run and not running, last used last.  Taking from a list and adding to it are atomic.
        self._ready: dict[int, list[_Ready]] = {}

    def load(self, device: int = 0) -> None:
        """Loads the code on a device ahead of the first run."""
        with driver().activate(device):
            self._give(device, self._take(device))

    def run(self, values: Mapping[str, int], stream: int = 0, device: int = 0) -> None:
        """Launches everything on a stream (a handle; 0: the default stream) of a device.

        `values` holds what the launches name: addresses of buffers, strides, extents.  The caller keeps the buffers alive as
        the libraries that own them demand: until the work in the stream is done, or by their stream-ordered allocators."""
        pool = self._ready.get(device)
        if pool:
            try:
                ready = pool.pop()
            except IndexError:                      # another thread was faster
                pass
            else:
                ready.get_context(ready.current_ref)
                if ready.current.value == ready.context:
                    self._run(ready, values, stream)
                    pool.append(ready)
                    return
                pool.append(ready)
        with driver().activate(device):             # a first run, one beside others, or another context is current
            ready = self._take(device)
            self._run(ready, values, stream)
            self._give(device, ready)

    def _run(self, ready: _Ready, values: Mapping[str, int], stream: int) -> None:
        if self.workspace_size:
            with self._lock:                        # two threads on one stream must not mix their launches
                ready.run(values, stream, self._workspace(ready, stream))
        else:
            ready.run(values, stream, None)

    def _give(self, device: int, ready: _Ready) -> None:
        self._ready.setdefault(device, []).append(ready)

    def _take(self, device: int) -> _Ready:
        """Something ready for the current context, which belongs to the device."""
        context, pool = driver().current_context(), self._ready.setdefault(device, [])
        for ready in tuple(pool):
            if ready.context == context:
                try:
                    pool.remove(ready)
                except ValueError:                  # another thread was faster
                    continue
                return ready
        return _Ready(self, context)

    def _workspace(self, ready: _Ready, stream: int) -> _Workspace:
        capture = ready.driver.capture_id(stream)
        key = (ready.context, stream, capture, threading.get_ident() if stream == _PER_THREAD_STREAM else 0)
        found = self._workspaces.get(key)
        if found is None:
            found = self._workspaces[key] = _Workspace(self.workspace_size, self.offsets)
            if capture:
                _captured.append(found)
        return found


class _Workspace:
    def __init__(self, size: int, offsets: Mapping[str, int]):
        self.memory = DeviceMemory(size)
        self.addresses = {name: self.memory.address + o for name, o in offsets.items()}
        self.in_order = tuple(self.addresses.values())


_captured: list[_Workspace] = []                    # workspaces that graphs use; a graph does not say when it ends
_code: dict[tuple[int | None, bytes], C.c_void_p] = {}
_code_lock = threading.Lock()


def _load_code(cubin: bytes, context: int | None) -> C.c_void_p:
    """Handle of the loaded module; the same code is loaded once in a context."""
    key = context, hashlib.sha256(cubin).digest()
    with _code_lock:
        if key not in _code:
            _code[key] = driver().load_module(cubin)
        return _code[key]


class _Ready:
    """A module in the current context with its arguments laid out, for one run at a time.

    A kernel's parameters are addresses of 8 bytes each, of which the driver copies as many as the parameter has: in `named` for
    the values given at a run, in `spaces` for workspaces, in `constants`; and of 128 bytes for each tensor map."""

    def __init__(self, module: GpuModule, context: int | None):
        self.driver, self.context = driver(), context
        self.get_context, self.current = self.driver.get_context, C.c_void_p()
        self.current_ref = C.byref(self.current)
        args = [a for launch in module.launches for a in launch.args]
        names = list(dict.fromkeys(a for a in args if isinstance(a, str) and a not in module.offsets))
        constants = list(dict.fromkeys(a for a in args if isinstance(a, int)))
        self.named: Any = (C.c_int64 * len(names))()
        self.spaces: Any = (C.c_int64 * len(module.offsets))()
        self.constants: Any = (C.c_int64 * len(constants))(*constants)
        self.pick = _picker(names)
        at: dict[str | int, int] = {}
        at |= {k: C.addressof(self.named) + 8 * i for i, k in enumerate(names)}
        at |= {k: C.addressof(self.spaces) + 8 * i for i, k in enumerate(module.offsets)}
        at |= {k: C.addressof(self.constants) + 8 * i for i, k in enumerate(constants)}
        self.calls: list[_Call] = []
        with self.driver.uncaptured():
            code = _load_code(module.cubin, context)
            for launch in module.launches:
                if 0 not in launch.grid:
                    self.calls.append(_Call(self.driver, code, launch, at, module.offsets))

    def run(self, values: Mapping[str, int], stream: int, workspace: _Workspace | None) -> None:
        self.named[_ALL] = self.pick(values)
        if workspace is not None:
            self.spaces[_ALL] = workspace.in_order
        launch = self.driver.launch
        for call in self.calls:
            for m in call.maps:
                m.update(values, workspace)
            call.config.stream = stream
            error = launch(call.config_ref, call.function, call.parameters, None)
            if error:
                raise call.failed(error)


_ALL = slice(None)


def _picker(names: Sequence[str]) -> Callable[[Mapping[str, int]], tuple[int, ...]]:
    """values → the values of these names"""
    if len(names) < 2:
        return lambda values: tuple(values[n] for n in names)
    return itemgetter(*names)


class _Call:
    """One launch.  `at`: where the value of a name or a constant lies in host memory."""
    __slots__ = ("config", "config_ref", "driver", "function", "launch", "maps", "parameters")

    def __init__(self, d: Driver, code: C.c_void_p, launch: Launch, at: Mapping[str | int, int], offsets: Mapping[str, int]):
        self.driver, self.launch = d, launch
        self.function = d.function(code, launch.function, launch.smem, launch.cluster)
        self.config = launch_config(launch.grid, launch.block, launch.smem, launch.cluster, launch.pdl)
        self.config_ref = C.byref(self.config)
        self.maps: list[_Descriptor] = []
        places = []
        for a in launch.args:
            if isinstance(a, TensorMap):
                self.maps.append(_Descriptor(a, a.buffer in offsets))
                places.append(self.maps[-1].address)
            else:
                places.append(at[a])
        self.parameters = (C.c_void_p * max(1, len(places)))(*places)

    def failed(self, error: int) -> DeviceError:
        k = self.launch
        what = f"grid {k.grid}, block {k.block}, {k.smem} bytes of shared memory"
        return self.driver.error(error, f"launching {k.function} ({what})")


class _Descriptor:
    """A tensor-map argument: 128 bytes in host memory.  What they hold depends on nothing but the key, so the latest are kept:
    the layers of a network take turns."""

    def __init__(self, tensor_map: TensorMap, in_workspace: bool):
        self.map, self.in_workspace, self.kept = tensor_map, in_workspace, dict[tuple[int, ...], bytes]()
        self.storage = C.create_string_buffer(128 + 64)
        skip = -C.addressof(self.storage) % 64
        self.address = C.addressof(self.storage) + skip
        self.bytes = memoryview(self.storage).cast("B")[skip:skip + 128]
        self.steps = (*tensor_map.dims, *tensor_map.strides)
        self.key: tuple[int, ...] | None = None

    def update(self, values: Mapping[str, int], workspace: _Workspace | None) -> None:
        m = self.map
        base = workspace.addresses[m.buffer] if self.in_workspace and workspace else values[m.buffer]
        key = (base, *[values[d] if isinstance(d, str) else d for d in self.steps])
        if key == self.key:
            return
        if key in self.kept:
            self.bytes[:] = self.kept[key]
        else:
            rank = len(m.dims)
            self.key = None                         # in case it cannot be encoded
            driver().encode_tensor_map(self.address, m.dtype, base, key[1:1 + rank], key[1 + rank:],
                                       m.box, m.swizzle, DTYPES[m.dtype])
            if len(self.kept) >= _MAPS_KEPT:
                self.kept.clear()
            self.kept[key] = bytes(self.bytes)
        self.key = key
