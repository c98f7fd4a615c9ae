"""HIP C++ to AMD machine code: ROCm's hipcc, a plain clang with the AMD target, or the clang in the PyPI package ziglang.

No AMD GPU, driver or ROCm installation is needed: with a plain clang the source must bring its own prelude (attributes, thread
ids, barrier) behind `#ifndef __HIP_PLATFORM_AMD__`, because there is no HIP header.
"""
from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from ..errors import CompilationError, CompilerNotFound, TargetError
from .compiled import Compiled, KernelInfo

_REMEDY = "install ROCm, or clang-19 and lld-19 (apt-get install --no-install-recommends clang-19 lld-19), or pip install ziglang"
_OLDEST = 19                # clang releases before it are not tried
_OPTIONS = ("-x", "hip", "--cuda-device-only", "--no-gpu-bundle-output", "-O3", "-std=c++17", "-cuid=0")
_NO_ROCM = ("-nogpulib", "-nogpuinc", "-mcode-object-version=5")
_TRIPLE = "amdgcn-amd-amdhsa"


@dataclass(frozen=True)
class HipCompiler:
    """command: how to call the compiler.  rocm: it brings ROCm's headers and device library.  linker: how to call a linker for
    the object file where the compiler driver finds none itself."""
    command: tuple[str, ...]
    rocm: bool = False
    linker: tuple[str, ...] = ()


def compile_hip(source: str, arch: str, *, options: Sequence[str] = (), name: str = "kernel.hip",
                compiler: HipCompiler | None = None) -> Compiled:
    """Compiles one translation unit for one architecture ("gfx90a", "gfx942", "gfx1100", …).

    The result's `cubin` is a code object that hipModuleLoadData takes, its `assembly` the machine code as text.
    Raises CompilerNotFound if there is no compiler, CompilationError (with the log) if it rejects the source.
    """
    found = compiler or find_compiler(arch)
    with tempfile.TemporaryDirectory(prefix="eqsat_neptune_") as folder:
        path = os.path.basename(name)
        with open(os.path.join(folder, path), "w", encoding="utf-8") as f:
            f.write(source)

        def run(*command: str) -> str:          # inside the folder, with relative names: same source, same code object
            done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
            log = done.stdout + done.stderr
            if done.returncode:
                raise CompilationError(f"{' '.join(found.command)} rejected {name} for {arch}:\n{log.strip()}\n",
                                       "emitted code should always compile: please report it with this log")
            return log

        flags = (*found.command, *_OPTIONS, f"--offload-arch={arch}", *(() if found.rocm else _NO_ROCM), *options)
        if found.linker:
            log = run(*flags, "-S", "-o", "out.s", path)
            target = ("-target", _TRIPLE, f"-mcpu={arch}", "-mcode-object-version=5")
            log += run(*found.command, *target, "-c", "-o", "out.o", "out.s")
            log += run(*found.linker, "-shared", "-o", "out.hsaco", "out.o")
        else:
            log = run(*flags, "-save-temps=obj", "-o", "out.hsaco", path)
        with open(os.path.join(folder, "out.hsaco"), "rb") as code:
            image = code.read()
        with open(glob.glob(os.path.join(folder, "*.s"))[0], encoding="utf-8") as text:
            assembly = text.read()
    return Compiled(image, log, amdgpu_report(assembly), assembly)


def compiler_version(arch: str) -> str:
    """Name and version of what `compile_hip` would use: part of the key of a cache of compiled kernels."""
    return _version(find_compiler(arch).command)


def amdgpu_report(assembly: str) -> dict[str, KernelInfo]:
    """Resources of each kernel, from the metadata at the end of the assembly text."""
    kernels = {}
    metadata = re.search(r"^\s*\.amdgpu_metadata$(.*?)^\s*\.end_amdgpu_metadata$", assembly, re.M | re.S)
    for entry in re.split(r"^  - ", metadata[1] if metadata else "", flags=re.M)[1:]:
        value = dict(re.findall(r"^(?:    )?\.(\w+): +(\S+)$", entry, re.M))
        if "vgpr_count" not in value:                       # the list of version numbers has the same form
            continue
        kernels[value["name"]] = KernelInfo(
            registers=int(value["vgpr_count"]),
            spill_bytes=4 * (int(value["vgpr_spill_count"]) + int(value["sgpr_spill_count"])),
            shared_bytes=int(value["group_segment_fixed_size"]),
            stack=int(value["private_segment_fixed_size"]))
    return kernels


# ------------------------------------------------------------------ finding a compiler

@cache
def find_compiler(arch: str) -> HipCompiler:
    """The first compiler here that knows the architecture."""
    if not re.fullmatch(r"gfx[0-9a-f]{3,4}(:\w+[+-])*", arch):
        raise TargetError(f"unknown AMD architecture {arch!r}", 'for example "gfx90a" or "gfx942"')
    tried = []
    for compiler in _candidates():
        if _knows(compiler, arch):
            return compiler
        tried.append(compiler.command[0])
    if tried:
        raise CompilerNotFound(f"none of the HIP compilers here knows {arch}: {', '.join(tried)}", _REMEDY)
    raise CompilerNotFound("no HIP compiler found", _REMEDY)


def _candidates() -> Iterator[HipCompiler]:
    for root in (os.environ.get("HIP_PATH"), os.environ.get("ROCM_PATH"), "/opt/rocm"):
        if root and os.access(hipcc := os.path.join(root, "bin", "hipcc"), os.X_OK):
            yield HipCompiler((hipcc,), rocm=True)
    for path in _clangs():
        yield HipCompiler((path,))
    if hipcc_on_path := shutil.which("hipcc"):              # a distribution's own, often older than the clang beside it
        yield HipCompiler((hipcc_on_path,), rocm=True)
    try:
        import ziglang  # type: ignore[import-not-found]
    except ImportError:
        return
    zig = os.path.join(os.path.dirname(ziglang.__file__), "zig")
    yield HipCompiler((zig, "clang"), linker=(zig, "ld.lld"))


def _clangs() -> list[str]:
    """Paths of clang, newest release first; those without a linker for the device code are left out."""
    found: dict[int, str] = {}
    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
        for path in glob.glob(os.path.join(glob.escape(folder), "clang-[0-9]*")):
            if m := re.fullmatch(r"clang-(\d+)", os.path.basename(path)):
                found.setdefault(int(m[1]), path)
    if (plain := shutil.which("clang")) and (m := re.search(r"version (\d+)", _version((plain,)))):
        found.setdefault(int(m[1]), plain)
    return [found[n] for n in sorted(found, reverse=True) if n >= _OLDEST and _has_lld(found[n])]


def _has_lld(clang: str) -> bool:
    """clang looks for lld beside its real binary, then on PATH."""
    return os.path.exists(os.path.join(os.path.dirname(os.path.realpath(clang)), "lld")) or shutil.which("lld") is not None


def _call(*command: str) -> tuple[bool, str]:
    """(whether it went well, what it printed)"""
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except OSError as e:
        return False, str(e)
    return done.returncode == 0, done.stdout + done.stderr


@cache
def _version(command: tuple[str, ...]) -> str:
    return _call(*command, "--version")[1].partition("\n")[0].strip()


def _knows(compiler: HipCompiler, arch: str) -> bool:
    fine, log = _call(*compiler.command, "-target", _TRIPLE, f"-mcpu={arch}", "-nogpulib", "-fsyntax-only", "-x", "c", os.devnull)
    return fine or (compiler.rocm and "invalid target ID" not in log)       # hipcc may refuse the question for another reason
