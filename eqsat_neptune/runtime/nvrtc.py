"""CUDA C++ to machine code: NVRTC through ctypes, or nvcc where NVRTC is missing.

Neither a GPU nor a driver is needed.  NVRTC comes with the wheels nvidia-cuda-nvrtc (the compiler) and nvidia-cuda-runtime
(the headers cuda_fp16.h, cuda_bf16.h, cuda_fp8.h), with PyTorch, with conda's packages or with a CUDA toolkit.
"""
from __future__ import annotations

import ctypes as C
import glob
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache

from ..errors import CompilationError, CompilerNotFound, TargetError
from .compiled import Compiled, ptxas_report

_REMEDY = "pip install nvidia-cuda-nvrtc nvidia-cuda-runtime, or set CUDA_HOME to a CUDA toolkit"
_HEADER = "cuda_fp16.h"
_OPTIONS = ("-std=c++17", "--ptxas-options=-v")         # spelled alike by NVRTC and nvcc


def compile_cuda(source: str, arch: str, *, options: Sequence[str] = (), name: str = "kernel.cu",
                 compiler: str | None = None) -> Compiled:
    """Compiles one translation unit for one architecture ("sm_80", "sm_90a", …).

    `options` are further options that NVRTC and nvcc share (-D…, -I…, --use_fast_math, --maxrregcount=…, -lineinfo).
    `compiler` is "nvrtc" or "nvcc"; by default NVRTC if there is one that knows the architecture, else nvcc.
    Raises CompilerNotFound if there is no compiler, CompilationError (with the log) if it rejects the source.
    """
    lib, nvcc = _choose(arch, compiler)
    return _with_nvrtc(lib, source, arch, options, name) if lib else _with_nvcc(nvcc, source, arch, options, name)


def compiler_version(arch: str, compiler: str | None = None) -> str:
    """Name and version of what `compile_cuda` would use: part of the key of a cache of compiled kernels."""
    lib, nvcc = _choose(arch, compiler)
    return f"nvrtc {lib.version[0]}.{lib.version[1]}" if lib else f"nvcc {_nvcc_release(nvcc)}"


def _choose(arch: str, compiler: str | None) -> tuple[_Nvrtc | None, str]:
    if not (m := re.fullmatch(r"sm_(\d{2,3})[af]?", arch)):
        raise TargetError(f"unknown CUDA architecture {arch!r}", 'for example "sm_80" or "sm_90a"')
    if compiler not in (None, "nvrtc", "nvcc"):
        raise CompilerNotFound(f"unknown CUDA compiler {compiler!r}", 'accepted: "nvrtc", "nvcc"')
    if compiler != "nvcc" and (lib := _nvrtc_for(int(m[1]))):
        return lib, ""
    if compiler != "nvrtc" and (nvcc := find_nvcc()):
        return None, nvcc
    known = [lib for path in nvrtc_paths() if (lib := _load(path))]
    if known and compiler != "nvcc":
        a = known[0].architectures
        raise CompilerNotFound(f"{known[0].path} (CUDA {known[0].version[0]}.{known[0].version[1]}) compiles for sm_{a[0]} to "
                               f"sm_{a[-1]}, not for {arch}", "install the nvidia-cuda-nvrtc of another CUDA release")
    raise CompilerNotFound(f"no CUDA compiler found ({compiler or 'neither NVRTC nor nvcc'})", _REMEDY)


# ------------------------------------------------------------------ where things lie

def _toolkits() -> Iterator[str]:
    """Roots of CUDA toolkits: those that the user names, then the usual places."""
    for variable in ("CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX"):
        if os.environ.get(variable):
            yield os.environ[variable]
    yield sys.prefix
    yield "/usr/local/cuda"


def _packages(name: str) -> list[str]:
    """Folders of an importable top-level package, found without importing it."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return []
    return list(spec.submodule_search_locations or ()) if spec else []


def _newest_first(pattern: str) -> list[str]:
    def number(path: str) -> list[int]:
        return [int(d) for d in re.findall(r"\d+", os.path.basename(path))]
    return sorted(glob.glob(pattern), key=number, reverse=True)


def nvrtc_paths() -> list[str]:
    """Every NVRTC library that could be used, in order of preference; bare names are left to the loader's own search."""
    found: list[str] = []
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            found += _newest_first(os.path.join(os.environ[variable], "lib*", "libnvrtc.so.*"))
    for root in _packages("nvidia"):
        found += _newest_first(os.path.join(root, "cu[0-9]*", "lib", "libnvrtc.so.*"))
        found += _newest_first(os.path.join(root, "cuda_nvrtc", "lib", "libnvrtc.so.*"))
    for root in _packages("torch"):
        found += _newest_first(os.path.join(root, "lib", "libnvrtc[.-]*so*"))
    for root in _toolkits():
        found += _newest_first(os.path.join(root, "lib*", "libnvrtc.so.*"))
    found = [p for p in found if "builtins" not in p and ".alt." not in p]
    return list(dict.fromkeys([*found, "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]))


def find_nvcc() -> str | None:
    """Path of an nvcc, or None."""
    for root in _toolkits():
        path = os.path.join(root, "bin", "nvcc")
        if os.access(path, os.X_OK):
            return path
    return shutil.which("nvcc")


def include_folder(library: str) -> str | None:
    """The folder with the half-precision headers that belongs to an NVRTC library, or else any that is there."""
    lib = os.path.dirname(os.path.realpath(library)) if os.path.sep in library else ""
    folders = [os.path.join(lib, "..", "include"), os.path.join(lib, "..", "..", "cuda_runtime", "include")] if lib else []
    for root in _packages("nvidia"):
        folders += _newest_first(os.path.join(root, "cu[0-9]*", "include"))
        folders.append(os.path.join(root, "cuda_runtime", "include"))
    for root in _toolkits():
        folders += [os.path.join(root, "include"), os.path.join(root, "targets", "x86_64-linux", "include")]
    folders.append("/usr/include")
    return next((os.path.normpath(f) for f in folders if os.path.isfile(os.path.join(f, _HEADER))), None)


# ------------------------------------------------------------------ NVRTC

class _Nvrtc:
    """One loaded NVRTC library."""

    def __init__(self, path: str):
        # The 13.0 wheels have no run path: the library finds its builtins only if they are loaded already.
        if os.path.sep in path:
            for builtins in _newest_first(os.path.join(os.path.dirname(path), "libnvrtc-builtins*.so*")):
                C.CDLL(builtins)
        self.path, self.lib = path, C.CDLL(path)
        self.lib.nvrtcGetErrorString.restype = C.c_char_p
        major, minor, count = C.c_int(), C.c_int(), C.c_int()
        self._check(self.lib.nvrtcVersion(C.byref(major), C.byref(minor)))
        self.version = major.value, minor.value
        self._check(self.lib.nvrtcGetNumSupportedArchs(C.byref(count)))
        archs = (C.c_int * count.value)()
        self._check(self.lib.nvrtcGetSupportedArchs(archs))
        self.architectures = sorted(archs)

    def _check(self, code: int) -> None:
        if code:
            raise CompilerNotFound(f"{self.path}: {self.lib.nvrtcGetErrorString(code).decode()}", _REMEDY)

    def text(self, size: str, get: str, program: C.c_void_p) -> bytes:
        n = C.c_size_t()
        self._check(getattr(self.lib, size)(program, C.byref(n)))
        buffer = C.create_string_buffer(n.value)
        self._check(getattr(self.lib, get)(program, buffer))
        return buffer.raw

    def compile(self, source: str, name: str, options: Sequence[str]) -> tuple[bytes | None, str]:
        """(machine code or None, log)"""
        program = C.c_void_p()
        self._check(self.lib.nvrtcCreateProgram(C.byref(program), source.encode(), name.encode(), 0, None, None))
        try:
            array = (C.c_char_p * len(options))(*(o.encode() for o in options))
            code = self.lib.nvrtcCompileProgram(program, len(options), array)
            log = self.text("nvrtcGetProgramLogSize", "nvrtcGetProgramLog", program).rstrip(b"\0").decode(errors="replace")
            if code:
                return None, log.strip() or self.lib.nvrtcGetErrorString(code).decode()
            return self.text("nvrtcGetCUBINSize", "nvrtcGetCUBIN", program), log
        finally:
            self.lib.nvrtcDestroyProgram(C.byref(program))


@cache
def _load(path: str) -> _Nvrtc | None:
    try:
        return _Nvrtc(path)
    except (OSError, AttributeError, CompilerNotFound):         # absent, not an NVRTC, too old to make machine code
        return None


def _nvrtc_for(number: int) -> _Nvrtc | None:
    """The first NVRTC that knows the architecture; later ones are not even loaded."""
    return next((lib for path in nvrtc_paths() if (lib := _load(path)) and number in lib.architectures), None)


def _with_nvrtc(lib: _Nvrtc, source: str, arch: str, options: Sequence[str], name: str) -> Compiled:
    include = include_folder(lib.path)
    # lambdas are device code without being marked as such, as they are under nvcc
    flags = [f"--gpu-architecture={arch}", "--device-as-default-execution-space", *_OPTIONS, *([f"-I{include}"] if include else []), *options]
    cubin, log = lib.compile(source, name, flags)
    if cubin is None:
        raise _rejected(f"NVRTC {lib.version[0]}.{lib.version[1]}", arch, name, log)
    return Compiled(cubin, log, ptxas_report(log))


# ------------------------------------------------------------------ nvcc

@cache
def _nvcc_release(nvcc: str) -> str:
    out = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    m = re.search(r"V(\d[\d.]*)", out)
    return m[1] if m else "of unknown version"


def _with_nvcc(nvcc: str, source: str, arch: str, options: Sequence[str], name: str) -> Compiled:
    with tempfile.TemporaryDirectory(prefix="eqsat_neptune_") as folder:
        path, out = os.path.join(folder, os.path.basename(name)), os.path.join(folder, "out.cubin")
        with open(path, "w", encoding="utf-8") as f:
            f.write(source)
        target = f"-gencode=arch={arch.replace('sm_', 'compute_')},code={arch}"
        command = [nvcc, target, "-cubin", *_OPTIONS, *options, "-o", out, path]
        done = subprocess.run(command, capture_output=True, text=True)
        log = (done.stdout + done.stderr).replace(folder + os.path.sep, "")
        if done.returncode:
            raise _rejected(f"nvcc {_nvcc_release(nvcc)}", arch, name, log)
        with open(out, "rb") as f:
            return Compiled(f.read(), log, ptxas_report(log))


def _rejected(compiler: str, arch: str, name: str, log: str) -> CompilationError:
    if re.search(r"(cannot|could not) open source file \"cuda_\w+\.h", log):
        hint = "the CUDA headers are missing: pip install nvidia-cuda-runtime"
    elif re.search(r"invalid value for --gpu-architecture|[Uu]nsupported gpu architecture", log):
        hint = f"this compiler does not know {arch}: install another CUDA release"
    else:
        hint = "emitted code should always compile: please report it with this log"
    return CompilationError(f"{compiler} rejected {name} for {arch}:\n{log.strip()}\n", hint)
