"""Compiled CUDA kernels and how to launch them: data in, launches out.

A `GpuModule` is loaded at its first run, once for each context that it runs in.  A run costs a few microseconds of host time,
never synchronises, and may be captured in a CUDA graph, a first run too.  Code stays loaded until the process ends, for a graph
may still launch it.
"""
from __future__ import annotations

import ctypes as C
import hashlib
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from operator import itemgetter

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
        self._loaded: dict[int | None, _Loaded] = {}                    # by context
        self._lock = threading.Lock()               # an argument block holds the values of one run at a time
        self._driver: Driver | None = None
        self._current = C.c_void_p()
        self._current_ref = C.byref(self._current)

    def load(self, device: int = 0) -> None:
        """Loads the code on a device ahead of the first run."""
        with self._lock, driver().activate(device):
            self._load(device)

    def run(self, values: Mapping[str, int], stream: int = 0, device: int = 0) -> None:
        """Launches everything on a stream (a handle; 0: the default stream) of a device.

        `values` holds what the launches name: addresses of buffers, strides, extents.  The caller keeps the buffers alive as
        the libraries that own them demand: until the work in the stream is done, or by their stream-ordered allocators."""
        with self._lock:
            d = self._driver
            if d is None:
                d = self._driver = driver()
            d.get_context(self._current_ref)
            loaded = self._loaded.get(self._current.value)
            if loaded is not None and loaded.device == device:
                loaded.run(values, stream)
                return
            with d.activate(device):                # another device's context is current, or none, or a new one
                self._load(device).run(values, stream)

    def _load(self, device: int) -> _Loaded:
        """The code in the current context, which belongs to the device."""
        context = driver().current_context()
        if context not in self._loaded:
            self._loaded[context] = _Loaded(self, context, device)
        return self._loaded[context]


class _Loaded:
    """A module in one context."""

    def __init__(self, module: GpuModule, context: int | None, device: int):
        self.device, self.driver = device, driver()
        self.offsets, self.workspace_size = module.offsets, module.workspace_size
        self.workspaces: dict[tuple[int, int, int], tuple[DeviceMemory, dict[str, int]]] = {}
        with self.driver.uncaptured():
            code = _load_code(module.cubin, context)
            self.launches = [_prepare(self.driver, code, launch) for launch in module.launches if 0 not in launch.grid]

    def run(self, values: Mapping[str, int], stream: int) -> None:
        if self.workspace_size:
            values = {**values, **self.workspace(stream)}
        for launch in self.launches:
            launch(values, stream)

    def workspace(self, stream: int) -> dict[str, int]:
        capture = self.driver.capture_id(stream)
        key = (stream, capture, threading.get_ident() if stream == _PER_THREAD_STREAM else 0)
        found = self.workspaces.get(key)
        if found is None:
            memory = DeviceMemory(self.workspace_size)
            if capture:
                _captured.append(memory)
            found = self.workspaces[key] = memory, {name: memory.address + o for name, o in self.offsets.items()}
        return found[1]


_captured: list[DeviceMemory] = []                  # workspaces that graphs use; a graph does not say when it ends
_code: dict[tuple[int | None, bytes], C.c_void_p] = {}
_code_lock = threading.Lock()


def _load_code(cubin: bytes, context: int | None) -> C.c_void_p:
    """Handle of the loaded module; the same code is loaded once in a context."""
    key = context, hashlib.sha256(cubin).digest()
    with _code_lock:
        if key not in _code:
            _code[key] = driver().load_module(cubin)
        return _code[key]


def _prepare(d: Driver, code: C.c_void_p, launch: Launch) -> Callable[[Mapping[str, int], int], None]:
    """A function (values, stream) that launches.  The block of arguments is laid out here, once: tensor maps (64-byte aligned),
    then named values side by side, then constants, each in 8 bytes, of which the driver copies as many as the parameter has."""
    function = d.function(code, launch.function, launch.smem, launch.cluster)
    config = launch_config(launch.grid, launch.block, launch.smem, launch.cluster, launch.pdl)
    maps = [a for a in launch.args if isinstance(a, TensorMap)]
    names = [a for a in launch.args if isinstance(a, str)]
    constants = [a for a in launch.args if not isinstance(a, str | TensorMap)]
    storage = C.create_string_buffer(128 * len(maps) + 8 * (len(names) + len(constants)) + 64)
    block = memoryview(storage).cast("B")
    at_maps = -C.addressof(storage) % 64
    at_names = at_maps + 128 * len(maps)
    at_constants = at_names + 8 * len(names)
    struct.pack_into(f"{len(constants)}q", block, at_constants, *constants)

    map_at, name_at, constant_at = count(at_maps, 128), count(at_names, 8), count(at_constants, 8)
    places = [next(map_at if isinstance(a, TensorMap) else name_at if isinstance(a, str) else constant_at) for a in launch.args]
    parameters = (C.c_void_p * max(1, len(places)))(*(C.addressof(storage) + p for p in places))

    encoders = [(at, _Encoder(m)) for at, m in zip(count(at_maps, 128), maps)]
    pack, pick = struct.Struct(f"{len(names)}q").pack_into, _picker(names)
    config_ref, launch_ex = C.byref(config), d.launch

    def run(values: Mapping[str, int], stream: int) -> None:
        pack(block, at_names, *pick(values))
        for at, encoder in encoders:
            block[at:at + 128] = encoder.encoded(values)
        config.stream = stream
        error = launch_ex(config_ref, function, parameters, None)
        if error:
            what = f"grid {launch.grid}, block {launch.block}, {launch.smem} bytes of shared memory"
            raise d.error(error, f"launching {launch.function} ({what})")

    return run


def _picker(names: Sequence[str]) -> Callable[[Mapping[str, int]], tuple[int, ...]]:
    """values → the values of these names"""
    if len(names) < 2:
        return lambda values: tuple(values[n] for n in names)
    return itemgetter(*names)


class _Encoder:
    """Descriptors of a tensor-map argument.  They depend on nothing but the key, and layers of a network take turns."""

    def __init__(self, tensor_map: TensorMap):
        self.map, self.kept = tensor_map, dict[tuple[int, ...], bytes]()
        self.rank = len(tensor_map.dims)

    def encoded(self, values: Mapping[str, int]) -> bytes:
        m = self.map
        key = (values[m.buffer], *[values[d] if isinstance(d, str) else d for d in (*m.dims, *m.strides)])
        found = self.kept.get(key)
        if found is None:
            if len(self.kept) >= _MAPS_KEPT:
                self.kept.clear()
            buffer = C.create_string_buffer(128 + 64)
            skip = -C.addressof(buffer) % 64
            driver().encode_tensor_map(C.addressof(buffer) + skip, m.dtype, key[0], key[1:1 + self.rank], key[1 + self.rank:],
                                       m.box, m.swizzle, DTYPES[m.dtype])
            found = self.kept[key] = buffer.raw[skip:skip + 128]
        return found
