"""Schedules that the compiler finds registers for: pipelines of warpgroups that spill give way to simpler ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from .. import cache
from ..codegen.cuda.arch import Arch
from ..codegen.cuda.emit import Source, emit, warpgroup_choices
from ..codegen.cuda.layout import Unsupported
from ..codegen.hopper.choices import relaxed
from ..codegen.tile import TileProgram
from ..extraction.plan import Buffer
from .compiled import Compiled, KernelInfo

FEW_BYTES = 32  # spilled by a thread: that costs less than any other schedule


@dataclass(frozen=True)
class Fit:
    """By kernel: the choices that it runs with, and a line for the report.  Only kernels whose own choices do not fit are here."""

    choices: Mapping[str, dict[str, object]]
    notes: Mapping[str, str]

    def programs(self, programs: Sequence[TileProgram]) -> list[TileProgram]:
        return [replace(p, choices=self.choices.get(p.name, p.choices)) for p in programs]

    def to_bytes(self) -> bytes:
        return json.dumps({"choices": self.choices, "notes": self.notes}).encode()

    @staticmethod
    def from_bytes(raw: bytes | None) -> Fit | None:
        """None if this is nothing, or nothing that `to_bytes` gives."""
        if raw is None:
            return None
        try:
            d = json.loads(raw)
            fit = Fit(d["choices"], d["notes"])
            if all(isinstance(c, dict) for c in fit.choices.values()) and all(isinstance(n, str) for n in fit.notes.values()):
                return fit
        except (ValueError, KeyError, TypeError, AttributeError):
            pass
        cache.warn("a cache entry holds no schedules that fit; they are found again")
        return None


def fits(k: KernelInfo) -> bool:
    return k.spill_bytes <= FEW_BYTES and not k.serialised


def fit(
    programs: Sequence[TileProgram],
    buffers: Mapping[str, Buffer],
    arch: Arch,
    found: Mapping[str, KernelInfo],
    compile: Callable[[Source], Compiled],
) -> Fit:
    """found: what the compiler says of these programs, by name, as they are, where it says anything.  compile: of a source that holds one of them."""
    choices: dict[str, dict[str, object]] = {}
    notes: dict[str, str] = {}
    for p in programs:
        if not p.choices.get("warpgroups") or p.name not in found or fits(found[p.name]):
            continue
        own = warpgroup_choices(p, buffers, arch)
        assert own is not None, "it has been emitted"
        best, least = own, found[p.name]
        tried = set()
        for simpler in relaxed(own):
            try:
                source = emit([replace(p, choices=simpler)], buffers, arch)
            except Unsupported:
                continue
            if source.text in tried:
                continue
            tried.add(source.text)
            info = compile(source).kernels.get(source.functions[0].name)
            if info is None:
                continue
            pipeline = "warpgroups" in simpler
            if fits(info) or (pipeline and (info.serialised, info.spill_bytes) < (least.serialised, least.spill_bytes)):
                best, least = simpler, info
            if fits(least):
                break
        notes[p.name] = f"{problem(found[p.name])}; {outcome(own, best, least)}"
        if best is not own:
            choices[p.name] = best
    return Fit(choices, notes)


def problem(k: KernelInfo) -> str:
    said = [f"spilled {k.spill_bytes} bytes"] if k.spill_bytes > FEW_BYTES else []
    return "as planned, " + " and ".join([*said, "its products waited for one another"] if k.serialised else said)


def outcome(own: Mapping[str, object], best: Mapping[str, object], info: KernelInfo) -> str:
    if best is own:
        return "no simpler schedule is better"
    changed = ", ".join(f"{n}={v}" for n, v in best.items() if own.get(n) != v)
    what = f"runs with {changed}" if "warpgroups" in best else f"runs without warpgroups, {changed}"
    return what if fits(info) else f"{what}, which is the best of its schedules"
