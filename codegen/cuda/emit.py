"""Tile programs → one translation unit and its launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...cost_models.base import Refusal
from ...extraction.plan import Buffer
from ...program import DTYPES
from ...runtime.module import Launch, TensorMap
from ..hopper.choices import choices_of
from ..hopper.kernel import Warpgroups
from ..hopper.pipeline import Pipeline
from ..hopper.planner import plan as plan_warpgroups
from ..hopper.wgmma import wrapper
from ..tile import TileProgram
from .arch import Arch
from .fragments import Fragments
from .kernel import Function, contiguous_strides
from .layout import Crowded, TooLarge, Torn, Unsupported
from .planner import plan
from .schedule import HALVES, Precision, Schedule
from .simple import Simple, SimpleText, plan_simple
from .text import Names


@dataclass(frozen=True)
class Source:
    """text: the whole translation unit.  launches: in order; their arguments name buffers ("Q"), strides in elements ("Q.stride1"),
    and temporaries.  workspaces: bytes of each temporary.  packed: input → macro, which says how the input lies in memory: 0: anyhow;
    1: its last dimension is contiguous, its address and its other strides are multiples of 16 bytes; 2: that, and it is row-major
    without gaps.  It defaults to what a row-major array has; arrays for which that differs need the text compiled with
    -Dmacro=value, where value is that of `is_packed`."""

    text: str
    launches: tuple[Launch, ...]
    functions: tuple[Function, ...]
    workspaces: dict[str, int] = field(default_factory=dict)
    packed: dict[str, str] = field(default_factory=dict)

    @property
    def mapped(self) -> frozenset[str]:
        """Buffers that are read by tensor maps."""
        return frozenset(a.buffer for x in self.launches for a in x.args if isinstance(a, TensorMap))


def is_packed(shape: Sequence[int], strides: Sequence[int], dtype: str, address: int = 0) -> int:
    """The value of an input's macro (see `Source.packed`) for an array with these strides, in elements."""
    width = DTYPES[dtype]
    if address % 16 or (shape and shape[-1] > 1 and strides[-1] != 1):
        return 0
    if any(s * width % 16 for n, s in zip(shape[:-1], strides[:-1]) if n > 1):
        return 0
    row_major = all(n == 1 or s == c for n, s, c in zip(shape, strides, contiguous_strides(shape)))
    return 2 if row_major else 1


def packing(shape: Sequence[int], strides: Sequence[int], dtype: str, address: int) -> int:
    """The macro's value that a call takes for an array: as `is_packed`, but rows that lie backwards or are one and the same count as
    lying anyhow, because no tensor map describes them."""
    return 0 if any(s <= 0 for n, s in zip(shape, strides) if n > 1) else is_packed(shape, strides, dtype, address)


def precision_of(buffers: Mapping[str, Buffer], compute: str, wide: bool = False) -> Precision:
    """How exact a kernel of a program must be, from what the program reads and returns, and what is said of its products."""
    outputs = [b.dtype for b in buffers.values() if b.kind == "output"]
    halves = [b.dtype for b in buffers.values() if b.kind in ("input", "output") and b.dtype in HALVES]
    accurate = wide or compute == "float64" or any(d in ("float32", "float64") for d in outputs) or not halves
    return Precision(accurate, halves[0] if halves else None, compute)


def schedule_of(p: TileProgram, buffers: Mapping[str, Buffer], arch: Arch, maps: bool = True) -> Schedule | Simple | Pipeline:
    """As a pipeline of warpgroups if the program asks for one, in fragments if they can express it, else an element a thread.
    maps: can tensor maps describe the inputs?  Raises Unsupported if nothing fits."""
    precision = precision_of(buffers, p.compute_dtype, p.wide)
    if p.choices.get("warpgroups"):
        if arch.warpgroups and maps:
            return plan_warpgroups(p, arch, precision)
        p = replace(p, choices={"warps": 4 * int(str(p.choices["warpgroups"]))})
    try:
        return plan(p, arch, precision)
    except Unsupported as why:
        try:
            return plan_simple(p, arch, precision)
        except Unsupported as e:
            raise Unsupported(f"{why}; {e}") from None


def warpgroup_choices(p: TileProgram, buffers: Mapping[str, Buffer], arch: Arch) -> dict[str, object] | None:
    """The schedule of a program as a pipeline of warpgroups, in full; None if it has none."""
    try:
        return choices_of(plan_warpgroups(p, arch, precision_of(buffers, p.compute_dtype, p.wide)))
    except Unsupported:
        return None


def refusal(p: TileProgram, buffers: Mapping[str, Buffer], arch: Arch) -> Refusal | None:
    """Why the kernel cannot be a pipeline of warpgroups, if it asks to be one, or else why fragments cannot express it, so that
    `schedule_of` has one element go to a thread; None if it can."""
    precision = precision_of(buffers, p.compute_dtype, p.wide)
    try:
        if p.choices.get("warpgroups"):
            plan_warpgroups(p, arch, precision)
        else:
            plan(p, arch, precision)
    except Unsupported as e:
        return Refusal(str(e), isinstance(e, TooLarge), isinstance(e, Crowded), isinstance(e, Torn))
    return None


def own_buffers(p: TileProgram) -> dict[str, Buffer]:
    return {b.name: b for b in (*p.reads, *p.writes)}


def feasible(p: TileProgram, arch: Arch, buffers: Mapping[str, Buffer] | None = None, slow: bool = False) -> str | None:
    """None if the kernel can be emitted in fragments (or, if `slow` is allowed, at all), else the reason why not.  buffers: of the
    whole program, if the kernel is a part of one (they say how exact it must be)."""
    buffers = own_buffers(p) if buffers is None else buffers
    if not slow:
        why = refusal(p, buffers, arch)
        return why.reason if why else None
    try:
        schedule_of(p, buffers, arch)
    except Unsupported as e:
        return str(e)
    return None


def resources(p: TileProgram, arch: Arch, buffers: Mapping[str, Buffer] | None = None) -> tuple[int, int, int]:
    """(bytes of shared memory of a block, registers of a thread, threads of a block), the registers estimated."""
    s = schedule_of(p, own_buffers(p) if buffers is None else buffers, arch)
    return s.shared, s.schedule.registers if isinstance(s, Pipeline) else s.registers, s.threads


def emit(programs: Sequence[TileProgram], buffers: Mapping[str, Buffer], arch: Arch, maps: bool = True) -> Source:
    """maps: can tensor maps describe the inputs (16-byte aligned, positive strides)?  If not, all is read element by element."""
    names = Names(arch)
    macros: dict[str, str] = {}
    for b in buffers.values():
        if b.kind == "input":
            macros[b.name] = names.new(f"PACKED_{b.name}")
    schedules = [schedule_of(p, buffers, arch, maps) for p in programs]
    functions = []
    shapes: set[tuple[str, int, bool]] = set()
    counters: dict[str, int] = {}
    for n, s in enumerate(schedules):
        kind = SimpleText if isinstance(s, Simple) else Warpgroups if isinstance(s, Pipeline) else Fragments
        printer = kind(s, names.inner(), macros)  # type: ignore[arg-type, operator]
        printer.followed = n + 1 < len(schedules)
        functions.append(printer.run())
        if isinstance(printer, Warpgroups):
            shapes |= printer.shapes
            counters |= {str(x.value): 8 for x in printer.parameters if x.type == "u32*"}
    used = [b for b in buffers.values() if any(b.name in f.packed for f in functions)]
    text = [arch.prelude]
    if shapes:
        text += [arch.warpgroup_prelude(wrapper(*x) for x in sorted(shapes))]
    elif any(f.cluster > 1 for f in functions):
        text.append(arch.cluster_prelude)
    if used:
        text.append(
            "// How inputs lie in memory.  0: anyhow; 1: rows are contiguous and start at multiples of 16 bytes; 2: row-major, too."
        )
        for b in used:
            default = is_packed(b.shape, contiguous_strides(b.shape), b.dtype)
            text.append(f"#ifndef {macros[b.name]}\n#define {macros[b.name]} {default}\n#endif")
        text.append("")
    text += [f.text for f in functions]
    for f in functions:
        if f.blocks >= 2**31:
            raise Unsupported(f"{f.name} has {f.blocks} blocks, a grid has at most {2**31 - 1}: larger tiles are needed")
    launches = tuple(
        Launch(
            f.name,
            (f.blocks, 1, 1),
            f.threads,
            f.shared,
            tuple(x.value for x in f.parameters),
            cluster=f.cluster,
            pdl=arch.overlap,
        )
        for f in functions
    )
    temps: dict[str, int] = dict(counters)
    for f, s in zip(functions, schedules):
        if isinstance(s, Simple) and s.workspace:
            temps[f"{f.name}.workspace"] = s.workspace * f.blocks
    temps |= {b.name: b.size * DTYPES[b.dtype] for b in buffers.values() if b.kind == "temp"}
    return Source("\n".join(text), launches, tuple(functions), temps, {b.name: macros[b.name] for b in used})
