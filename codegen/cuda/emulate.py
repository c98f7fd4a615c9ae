"""Runs emitted kernels on the CPU: the same text over device/emulator.h, compiled by the C++ compiler of the host.

For tests.  Threads run as fibres, in an order that `seed` varies; reading what no barrier or wait has made visible gives NaN or
an EmulationError.  One block (or cluster) at a time, so use small shapes.
"""

from __future__ import annotations

import ctypes as C
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np

from ...errors import CompilationError, CompilerNotFound
from ...extraction.plan import Buffer
from ...program import DTYPES
from ...runtime.module import TensorMap
from ...targets import Target
from ..tile import TileProgram
from .arch import Arch, cuda_arch, emulator_arch, hopper_emulator_arch
from .emit import Source, emit, packing

_ALIGNMENT = 256  # of outputs and workspaces, bytes


class EmulationError(Exception):
    """An emitted kernel did what a GPU would not forgive: a stray or misaligned access, a barrier that not all threads reach, a race
    with an asynchronous copy or matrix product."""


def host_compiler() -> str | None:
    return shutil.which("g++") or shutil.which("clang++")


@cache
def emulated(target: Target) -> Arch:
    """The architecture by which a GPU target's text runs on the CPU."""
    from ..hip import hip_emulator

    if target.kind == "hip":
        return hip_emulator(target.arch)
    return hopper_emulator_arch() if cuda_arch(target.arch).warpgroups else emulator_arch()


def run(
    programs: Sequence[TileProgram],
    buffers: Mapping[str, Buffer],
    inputs: Mapping[str, np.ndarray],
    arch: Arch | None = None,
    seeds: Sequence[int] = (0,),
) -> list[dict[str, np.ndarray]]:
    """Outputs (and temporaries) by name, once for each seed; 16-bit and 8-bit floats as ml_dtypes arrays."""
    return run_source(emit_for(programs, buffers, inputs, arch or emulator_arch()), buffers, inputs, seeds)


def emit_for(
    programs: Sequence[TileProgram], buffers: Mapping[str, Buffer], inputs: Mapping[str, np.ndarray], arch: Arch
) -> Source:
    """The text that a call with these inputs runs: without tensor maps if they cannot describe them."""
    source = emit(programs, buffers, arch)
    for name in source.mapped & inputs.keys():
        x = inputs[name]
        if not packing(x.shape, [s // x.itemsize for s in x.strides], buffers[name].dtype, x.ctypes.data):
            return emit(programs, buffers, arch, maps=False)
    return source


def run_source(
    source: Source, buffers: Mapping[str, Buffer], inputs: Mapping[str, np.ndarray], seeds: Sequence[int] = (0,)
) -> list[dict[str, np.ndarray]]:
    """The same for text that is there already."""
    with tempfile.TemporaryDirectory(prefix="eqsat_neptune_") as folder:
        library = build(source, buffers, inputs, folder)
        try:
            return launch(library, source, buffers, inputs, seeds)
        finally:
            unload(library)


def unload(library: C.CDLL) -> None:
    """For good.  ctypes never does it, and a process may run thousands of kernels."""
    try:
        from _ctypes import dlclose
    except ImportError:  # not on this system
        return
    dlclose(library._handle)


def launch(
    library: C.CDLL, source: Source, buffers: Mapping[str, Buffer], inputs: Mapping[str, np.ndarray], seeds: Sequence[int] = (0,)
) -> list[dict[str, np.ndarray]]:
    """The same for what `build` made of a source's text.  Workspaces that are no buffers begin as zeros, and each run finds them as
    the one before has left them: so it is on a GPU."""
    scratch = {n: np.zeros(size + _ALIGNMENT, np.uint8) for n, size in source.workspaces.items() if n not in buffers}
    return [_run(library, source, buffers, inputs, scratch, seed) for seed in seeds]


def build(source: Source, buffers: Mapping[str, Buffer], inputs: Mapping[str, np.ndarray], folder: str) -> C.CDLL:
    compiler = host_compiler()
    if compiler is None:
        raise CompilerNotFound("no C++ compiler for the emulator", "install g++")
    text = [source.text]
    for f in source.functions:
        args = ", ".join(f"*(({x.type.replace('__restrict__', '')}*)a[{n}])" for n, x in enumerate(f.parameters))
        text.append(f"static void run_{f.name}(void** a) {{ {f.name}({args}); }}")
        text.append(
            f'extern "C" const char* launch_{f.name}'
            "(void** a, long long grid, int threads, unsigned shared, int cluster, unsigned seed) "
            f"{{ emulator::together = {f.together}; return emulator::launch(run_{f.name}, a, grid, threads, shared, seed, cluster); }}"
        )
    path, out = os.path.join(folder, "kernel.cpp"), os.path.join(folder, "kernel.so")
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join(text))
    flags = []
    for name, macro in source.packed.items():
        x = inputs[name]
        strides = [s // x.itemsize for s in x.strides]
        flags.append(f"-D{macro}={packing(x.shape, strides, buffers[name].dtype, x.ctypes.data)}")
    command = [compiler, "-O1", "-std=c++17", "-w", "-fPIC", "-shared", "-fno-strict-aliasing", *flags, "-o", out, path]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CompilationError(f"{compiler} rejected emitted code:\n{done.stderr[:4000]}")
    return C.CDLL(out)


def _run(
    library: C.CDLL,
    source: Source,
    buffers: Mapping[str, Buffer],
    inputs: Mapping[str, np.ndarray],
    scratch: Mapping[str, np.ndarray],
    seed: int,
) -> dict[str, np.ndarray]:
    arrays = dict(inputs)
    for b in buffers.values():
        if b.kind != "input":
            raw = np.full(b.size * numpy_dtype(b.dtype).itemsize + _ALIGNMENT, 0xFF, np.uint8)  # poison
            skip = -raw.ctypes.data % _ALIGNMENT
            arrays[b.name] = raw[skip : skip + b.size * numpy_dtype(b.dtype).itemsize].view(numpy_dtype(b.dtype)).reshape(b.shape)
    values: dict[str, int] = {}
    for name, x in arrays.items():
        values[name] = x.ctypes.data
        for n, s in enumerate(x.strides):
            values[f"{name}.stride{n}"] = s // x.itemsize
    values |= {n: x.ctypes.data + -x.ctypes.data % _ALIGNMENT for n, x in scratch.items()}
    for f, one in zip(source.functions, source.launches):
        cells = C.create_string_buffer(128 * len(one.args) + 64)
        start = C.addressof(cells) + -C.addressof(cells) % 64
        pointers = (C.c_void_p * len(one.args))(*(start + 128 * n for n in range(len(one.args))))
        for at, a in zip(pointers, one.args):
            cell = (
                _tensor_map(a, values) if isinstance(a, TensorMap) else struct.pack("<q", values[a] if isinstance(a, str) else a)
            )
            C.memmove(at, cell, len(cell))
        call = getattr(library, f"launch_{f.name}")
        call.argtypes = [C.c_void_p, C.c_longlong, C.c_int, C.c_uint, C.c_int, C.c_uint]
        call.restype = C.c_char_p
        if wrong := call(pointers, one.grid[0], one.block, one.smem, one.cluster, seed):
            raise EmulationError(f"{f.name}: {_with_lines(wrong.decode(), source.text)}")
    return {b.name: arrays[b.name] for b in buffers.values() if b.kind != "input"}


def _tensor_map(m: TensorMap, values: Mapping[str, int]) -> bytes:
    """The struct TensorMap of device/emulator_sm90.h; refuses what the driver would."""
    address, width, rank = values[m.buffer], DTYPES[m.dtype], len(m.dims)
    dims, steps = ([values[x] if isinstance(x, str) else x for x in xs] for xs in (m.dims, m.strides))
    strides = [s * width for s in steps]
    inner = m.box[0] * width
    wrong = (
        not 1 <= rank <= 5 or len(m.box) != rank or len(strides) != rank - 1,
        address % 16 or any(s % 16 or not 0 <= s < 2**40 for s in strides),
        not all(1 <= n <= 2**32 for n in dims) or not all(1 <= n <= 256 for n in m.box),
        inner % 16 or m.swizzle not in (0, 32, 64, 128) or (m.swizzle and inner > m.swizzle),
    )
    if any(wrong):
        raise EmulationError(f"no tensor map can describe {m} at {address:#x} with dims {dims}, strides {steps}")
    if m.swizzle and inner != m.swizzle:
        raise EmulationError(f"{m}: not emulated: rows of a box that are shorter than the swizzle")
    dims, strides, box = ([*xs, *[0] * n][:n] for xs, n in ((dims, 5), (strides, 4), (m.box, 5)))
    return struct.pack("<QII5Q4Q5II16x", address, rank, width, *dims, *strides, *box, m.swizzle)


def _with_lines(message: str, text: str) -> str:
    """The message, with the lines of the text that it names."""
    lines = text.split("\n")
    named = dict.fromkeys(int(n) for n in re.findall(r"\bline (\d+)", message))
    return "\n".join([message, *(f"{n:6} | {lines[n - 1].strip()}" for n in named if 0 < n <= len(lines))])


def numpy_dtype(name: str) -> np.dtype:
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
