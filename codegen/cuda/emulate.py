"""Runs emitted kernels on the CPU: the same text over device/emulator.h, compiled by the C++ compiler of the host.

For tests.  Threads run as fibres, in an order that `seed` varies; reading what no barrier or wait has made visible gives NaN or
an EmulationError.  One block at a time, so use small shapes.
"""

from __future__ import annotations

import ctypes as C
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence

import numpy as np

from ...errors import CompilationError, CompilerNotFound
from ...extraction.plan import Buffer
from ..tile import TileProgram
from .arch import Arch, emulator_arch
from .emit import Source, emit, is_packed


class EmulationError(Exception):
    """An emitted kernel did what a GPU would not forgive: a stray or misaligned access, a barrier that not all threads reach."""


def host_compiler() -> str | None:
    return shutil.which("g++") or shutil.which("clang++")


def run(
    programs: Sequence[TileProgram],
    buffers: Mapping[str, Buffer],
    inputs: Mapping[str, np.ndarray],
    arch: Arch | None = None,
    seeds: Sequence[int] = (0,),
) -> list[dict[str, np.ndarray]]:
    """Outputs (and temporaries) by name, once for each seed; 16-bit and 8-bit floats as ml_dtypes arrays."""
    arch = arch or emulator_arch()
    source = emit(programs, buffers, arch)
    with tempfile.TemporaryDirectory(prefix="eqsat_neptune_") as folder:
        library = build(source, buffers, inputs, folder)
        return [_run(library, source, buffers, inputs, seed) for seed in seeds]


def build(source: Source, buffers: Mapping[str, Buffer], inputs: Mapping[str, np.ndarray], folder: str) -> C.CDLL:
    compiler = host_compiler()
    if compiler is None:
        raise CompilerNotFound("no C++ compiler for the emulator", "install g++")
    text = [source.text]
    for f in source.functions:
        args = ", ".join(f"*(({x.type.replace('__restrict__', '')}*)a[{n}])" for n, x in enumerate(f.parameters))
        text.append(f"static void run_{f.name}(void** a) {{ {f.name}({args}); }}")
        text.append(
            f'extern "C" const char* launch_{f.name}(void** a, long long grid, int threads, unsigned shared, unsigned seed) '
            f"{{ return emulator::launch(run_{f.name}, a, grid, threads, shared, seed); }}"
        )
    path, out = os.path.join(folder, "kernel.cpp"), os.path.join(folder, "kernel.so")
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join(text))
    flags = []
    for name, macro in source.packed.items():
        x = inputs[name]
        strides = [s // x.itemsize for s in x.strides]
        flags.append(f"-D{macro}={is_packed(x.shape, strides, buffers[name].dtype, x.ctypes.data)}")
    command = [compiler, "-O1", "-std=c++17", "-w", "-fPIC", "-shared", "-fno-strict-aliasing", *flags, "-o", out, path]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CompilationError(f"{compiler} rejected emitted code:\n{done.stderr[:4000]}")
    return C.CDLL(out)


def _run(
    library: C.CDLL, source: Source, buffers: Mapping[str, Buffer], inputs: Mapping[str, np.ndarray], seed: int
) -> dict[str, np.ndarray]:
    arrays = dict(inputs)
    for b in buffers.values():
        if b.kind != "input":
            raw = np.full(b.size * numpy_dtype(b.dtype).itemsize + 64, 0xFF, np.uint8)  # poison
            skip = -raw.ctypes.data % 64
            arrays[b.name] = raw[skip : skip + b.size * numpy_dtype(b.dtype).itemsize].view(numpy_dtype(b.dtype)).reshape(b.shape)
    values: dict[str, int] = {}
    for name, x in arrays.items():
        values[name] = x.ctypes.data
        for n, s in enumerate(x.strides):
            values[f"{name}.stride{n}"] = s // x.itemsize
    scratch = {n: np.full(size, 0xFF, np.uint8) for n, size in source.workspaces.items() if n not in arrays}
    values |= {n: x.ctypes.data for n, x in scratch.items()}
    for f, launch in zip(source.functions, source.launches):
        cells = (C.c_int64 * len(launch.args))(*(values[str(a)] for a in launch.args))
        pointers = (C.c_void_p * len(cells))(*(C.addressof(cells) + 8 * n for n in range(len(cells))))
        call = getattr(library, f"launch_{f.name}")
        call.argtypes = [C.c_void_p, C.c_longlong, C.c_int, C.c_uint, C.c_uint]
        call.restype = C.c_char_p
        if wrong := call(pointers, launch.grid[0], launch.block, launch.smem, seed):
            raise EmulationError(f"{f.name}: {wrong.decode()}")
    return {b.name: arrays[b.name] for b in buffers.values() if b.kind != "input"}


def numpy_dtype(name: str) -> np.dtype:
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
