"""Tile programs → one translation unit and its launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...extraction.plan import Buffer
from ...program import DTYPES
from ...runtime.module import Launch
from ..tile import TileProgram
from .arch import Arch
from .fragments import Fragments
from .kernel import Function
from .layout import Unsupported
from .schedule import HALVES, Precision, Schedule, plan
from .simple import Simple, SimpleText, plan_simple
from .text import Names


@dataclass(frozen=True)
class Source:
    """text: the whole translation unit.  launches: in order; their arguments name buffers ("Q"), strides in elements ("Q.stride1"),
    and temporaries.  workspaces: bytes of each temporary.  packed: input → macro.  The macro says whether the input's last
    dimension is contiguous and its address and other strides are multiples of 16 bytes (it defaults to what a contiguous array
    has); arrays for which that differs need the text compiled with -Dmacro=0 (or =1)."""

    text: str
    launches: tuple[Launch, ...]
    functions: tuple[Function, ...]
    workspaces: dict[str, int] = field(default_factory=dict)
    packed: dict[str, str] = field(default_factory=dict)


def is_packed(shape: Sequence[int], strides: Sequence[int], dtype: str, address: int = 0) -> bool:
    """Can an array (strides in elements) be read 16 bytes at a time along its last dimension?"""
    width = DTYPES[dtype]
    live = [(n, s) for n, s in zip(shape, strides) if n > 1]
    if shape and shape[-1] == 1:
        return address % 16 == 0 and all(s * width % 16 == 0 for _, s in live)
    return address % 16 == 0 and (not live or live[-1][1] == 1) and all(s * width % 16 == 0 for _, s in live[:-1])


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    step, out = 1, []
    for n in reversed(shape):
        out.append(step)
        step *= n
    return tuple(reversed(out))


def precision_of(buffers: Mapping[str, Buffer], compute: str) -> Precision:
    """How exact a program's kernels must be, from what it reads and returns."""
    outputs = [b.dtype for b in buffers.values() if b.kind == "output"]
    halves = [b.dtype for b in buffers.values() if b.kind in ("input", "output") and b.dtype in HALVES]
    accurate = compute == "float64" or any(d in ("float32", "float64") for d in outputs) or not halves
    return Precision(accurate, halves[0] if halves else None, compute)


def schedule_of(p: TileProgram, buffers: Mapping[str, Buffer], arch: Arch) -> Schedule | Simple:
    """In fragments if they can express the program, else an element a thread.  Raises Unsupported if nothing fits."""
    precision = precision_of(buffers, p.compute_dtype)
    try:
        return plan(p, arch, precision)
    except Unsupported as why:
        try:
            return plan_simple(p, arch, precision)
        except Unsupported as e:
            raise Unsupported(f"{why}; {e}") from None


def feasible(p: TileProgram, buffers: Mapping[str, Buffer], arch: Arch) -> str | None:
    """None if the kernel can be emitted, else the reason why not."""
    try:
        schedule_of(p, buffers, arch)
    except Unsupported as e:
        return str(e)
    return None


def resources(p: TileProgram, buffers: Mapping[str, Buffer], arch: Arch) -> tuple[int, int, int]:
    """(bytes of shared memory of a block, registers of a thread, threads of a block), the registers estimated."""
    s = schedule_of(p, buffers, arch)
    return s.shared, s.registers, s.threads


def emit(programs: Sequence[TileProgram], buffers: Mapping[str, Buffer], arch: Arch) -> Source:
    names = Names(arch)
    macros: dict[str, str] = {}
    for b in buffers.values():
        if b.kind == "input":
            macros[b.name] = names.new(f"PACKED_{b.name}")
    schedules = [schedule_of(p, buffers, arch) for p in programs]
    functions = [(SimpleText if isinstance(s, Simple) else Fragments)(s, names.inner(), macros).run() for s in schedules]  # type: ignore[arg-type]
    used = [b for b in buffers.values() if any(b.name in f.packed for f in functions)]
    text = [arch.prelude]
    if used:
        text.append("// Which inputs have contiguous rows that start at multiples of 16 bytes.")
        for b in used:
            default = int(is_packed(b.shape, contiguous_strides(b.shape), b.dtype))
            text.append(f"#ifndef {macros[b.name]}\n#define {macros[b.name]} {default}\n#endif")
        text.append("")
    text += [f.text for f in functions]
    launches = tuple(
        Launch(f.name, (f.blocks, 1, 1), f.threads, f.shared, tuple(x.value for x in f.parameters)) for f in functions
    )
    temps: dict[str, int] = {}
    for f, s in zip(functions, schedules):
        if isinstance(s, Simple) and s.workspace:
            temps[f"{f.name}.workspace"] = s.workspace * f.blocks
    temps |= {b.name: b.size * DTYPES[b.dtype] for b in buffers.values() if b.kind == "temp"}
    return Source("\n".join(text), launches, tuple(functions), temps, {b.name: macros[b.name] for b in used})
