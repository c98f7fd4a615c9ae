"""Runs a plan on an NVIDIA GPU: emits, compiles (through the cache), loads and launches."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from .. import cache
from ..codegen.cuda.arch import cuda_arch
from ..codegen.cuda.emit import Source, emit, is_packed, packing
from ..codegen.cuda.kernel import contiguous_strides
from ..codegen.lower import lower
from ..codegen.tile import TileProgram
from ..errors import InputError
from ..extraction.plan import Plan
from ..program import Program
from .arrays import View, empty_like, stream_handle, stream_of, view
from .compiled import Compiled, KernelInfo
from .fitting import Fit, fit, fits
from .module import GpuModule


class CudaRunner:
    """Arrays of any strides are read in place.  Code is specialised for which inputs can be read 16 bytes at a time."""

    def __init__(self, program: Program, plan: Plan, arch: str):
        self.program, self.plan, self.arch = program, plan, arch
        self._emitted: Source | None = None
        self._unmapped: Source | None = None  # for inputs that no tensor map describes
        self._variants: dict[tuple[int, ...], GpuModule] = {}
        self._formats: dict[tuple, tuple[GpuModule, dict[str, int]]] = {}
        self._running: dict[tuple[int, ...], Source] = {}
        self._kernels: dict[str, KernelInfo] = {}
        self._dynamic: dict[str, int] = {}  # kernel → bytes of shared memory beside those that its code declares
        self._notes: dict[str, str] = {}
        self._lock = threading.RLock()
        self._inputs = [(i.name, i.shape, i.dtype) for i in program.inputs]
        self._contiguous = tuple(is_packed(s, contiguous_strides(s), d) for _, s, d in self._inputs)
        self._outputs = [(f"out{n}", o.shape, o.dtype) for n, o in enumerate(program.outputs)]

    @cached_property
    def _programs(self) -> list[TileProgram]:
        return [lower(k, self.plan.buffers, self.plan.compute_dtype) for k in self.plan.kernels]

    @property
    def _source(self) -> Source:
        with self._lock:
            if self._emitted is None:
                self._emitted = emit(self._programs, self.plan.buffers, cuda_arch(self.arch))
            return self._emitted

    @property
    def _plain_source(self) -> Source:
        with self._lock:
            if self._unmapped is None:
                self._unmapped = emit(self._programs, self.plan.buffers, cuda_arch(self.arch), maps=False)
            return self._unmapped

    @property
    def source(self) -> str:
        """Once it is compiled, what runs on contiguous inputs."""
        return (
            (self._running.get(self._contiguous) or self._source).text
            if self.plan.kernels
            else "// nothing to compute: every output is empty\n"
        )

    def compile(self) -> None:
        """Compile for contiguous inputs: what most calls need."""
        if self.plan.kernels:
            self._variant(self._contiguous)

    def details(self) -> list[tuple[str, ...]]:
        return [
            (
                n,
                f"{k.registers} registers",
                f"{k.spill_bytes} bytes spilled",
                f"{k.shared_bytes + self._dynamic.get(n, 0)} bytes of shared memory",
                *([self._notes[n]] if n in self._notes else []),
            )
            for n, k in self._kernels.items()
        ]

    def _variant(self, packed: tuple[int, ...]) -> GpuModule:
        with self._lock:
            if packed not in self._variants:
                s = self._source
                mapped = not any(n in s.mapped and not p for (n, _, _), p in zip(self._inputs, packed))
                s, compiled, notes = self._fitted(s, packed) if mapped else (self._plain_source, None, {})
                compiled = compiled or compiled_cuda(s.text, self.arch, self._options(s, packed))
                self._kernels.update(compiled.kernels)
                self._dynamic.update((x.function, x.smem) for x in s.launches)
                self._notes.update(notes)
                self._running[packed] = s
                self._variants[packed] = GpuModule(compiled.cubin, s.launches, s.workspaces)
            return self._variants[packed]

    def _options(self, s: Source, packed: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(f"-D{s.packed[n]}={p}" for (n, _, _), p in zip(self._inputs, packed) if n in s.packed)

    def _fitted(self, s: Source, packed: tuple[int, ...]) -> tuple[Source, Compiled, Mapping[str, str]]:
        """The source, with simpler schedules where those of the plan do not fit, its code, and notes for the report."""
        from .nvrtc import compile_cuda, compiler_version

        arch, buffers, options = cuda_arch(self.arch), self.plan.buffers, self._options(s, packed)
        key = cache.digest("fit", s.text, self.arch, *options, compiler_version(self.arch))
        known = Fit.from_bytes(cache.read(key)) if arch.warpgroups else None
        if known is None:
            compiled = compiled_cuda(s.text, self.arch, options)
            # a compiler need not say anything of a kernel
            found = {p.name: compiled.kernels[f.name] for p, f in zip(self._programs, s.functions) if f.name in compiled.kernels}
            if all(fits(found[p.name]) for p in self._programs if p.choices.get("warpgroups") and p.name in found):
                return s, compiled, {}
            known = fit(
                self._programs,
                buffers,
                arch,
                found,
                lambda x: compile_cuda(x.text, self.arch, options=self._options(x, packed)),
            )
            cache.write(key, known.to_bytes())
        if known.choices:
            s = emit(known.programs(self._programs), buffers, arch)
        return s, compiled_cuda(s.text, self.arch, self._options(s, packed)), known.notes

    def __call__(self, arrays: Sequence[Any], stream: Any) -> list[Any]:
        if not arrays:
            raise InputError("a program without inputs cannot say on which GPU, or as what kind of array, its result is wanted")
        handle = None if stream is None else stream_handle(stream)
        views = [view(x, n, handle or 0) for x, (n, _, _) in zip(arrays, self._inputs)]
        device = views[0].device
        key = tuple((v.strides, v.pointer & 15) for v in views)
        found = self._formats.get(key)
        for v, (name, shape, dtype) in zip(views, self._inputs):
            if v.shape != shape or v.dtype != dtype or v.device != device:
                raise self._mismatch(v, name, shape, dtype, device)
        outs = self._allocate(arrays[0], device, handle)
        if not self.plan.kernels:
            return outs
        if found is None:
            found = self._format(key, views)
        module, strides = found
        values = dict(strides)
        for v, (name, _, _) in zip(views, self._inputs):
            values[name] = v.pointer
        for o, (name, _, _) in zip(outs, self._outputs):
            values[name] = view(o, name).pointer
        module.run(values, stream_of(arrays[0], device) if handle is None else handle, device)
        return outs

    def _allocate(self, like: Any, device: int, stream: int | None) -> list[Any]:
        """Arrays for the outputs, of the kind of `like`."""
        return [empty_like(like, s, d, device, stream) for _, s, d in self._outputs]

    def _format(self, key: tuple, views: list[View]) -> tuple[GpuModule, dict[str, int]]:
        packed = tuple(packing(v.shape, v.strides, v.dtype, v.pointer) for v in views)
        strides = {f"{n}.stride{d}": s for v, (n, _, _) in zip(views, self._inputs) for d, s in enumerate(v.strides)}
        for n, shape, _ in self._outputs:
            strides |= {f"{n}.stride{d}": s for d, s in enumerate(contiguous_strides(shape))}
        if len(self._formats) > 64:
            self._formats.clear()
        self._formats[key] = found = self._variant(packed), strides
        return found

    @staticmethod
    def _mismatch(v: View, name: str, shape: tuple[int, ...], dtype: str, device: int) -> InputError:
        if v.shape != shape:
            return InputError(
                f"{name} has shape {tuple(v.shape)}, the kernel was made for {shape}", "optimize for this shape too"
            )
        if v.dtype != dtype:
            return InputError(
                f"{name} has dtype {v.dtype}, the kernel was made for {dtype}", "convert it, or optimize for this dtype"
            )
        return InputError(f"{name} lies on GPU {v.device}, the first array on GPU {device}", "move them to one device")


def compiled_cuda(source: str, arch: str, options: tuple[str, ...]) -> Compiled:
    """Machine code for a source, from the cache if it is there."""
    from .nvrtc import compile_cuda, compiler_version

    key = cache.digest("cubin", source, arch, *options, compiler_version(arch))
    if (kept := _kept(cache.read(key))) is not None:
        return kept
    c = compile_cuda(source, arch, options=options)
    head = json.dumps({n: vars_of(k) for n, k in c.kernels.items()}).encode()
    cache.write(key, head + b"\n" + c.cubin)
    return c


def _kept(raw: bytes | None) -> Compiled | None:
    """What an entry of the cache holds; None if that is nothing, or nothing that `compiled_cuda` writes."""
    if raw is None:
        return None
    head, _, cubin = raw.partition(b"\n")
    try:
        kernels = {n: KernelInfo(**k) for n, k in json.loads(head).items()}
    except (ValueError, TypeError, AttributeError):
        cache.warn("a cache entry holds no compiled kernel; it is made again")
        return None
    return Compiled(cubin=cubin, log="", kernels=kernels)


def vars_of(k: KernelInfo) -> dict[str, int]:
    return {f: getattr(k, f) for f in k.__dataclass_fields__}
