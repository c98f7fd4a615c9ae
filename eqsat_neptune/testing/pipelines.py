"""Kernels as pipelines of warpgroups under random schedules: tiles that fit such a form, and every choice that it leaves open."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from ..codegen.check import check
from ..codegen.cuda.arch import Arch
from ..codegen.cuda.emit import schedule_of
from ..codegen.cuda.layout import Unsupported
from ..codegen.hopper.choices import choices_of
from ..codegen.hopper.pipeline import MOST_CONSUMERS, ROWS, Pipeline
from ..codegen.lower import LoweringError, lower
from ..extraction.plan import Axis, Kernel, Plan

TRIES = 24  # random tiles for one kernel

# what a schedule may ask for; left out, the planner decides
CHOICES: dict[str, tuple[object, ...]] = {
    "stages": (1, 2, 3, 4, 6),
    "overlap": (True, False),
    "ahead": (True, False),
    "turns": (True, False),
    "chain": (True, False),
    "order": ("dynamic", "static", "grid"),
    "group": (1, 2, 3, 5),
    "pivot": ("running", "lazy", "frozen"),
    "sums": ("matrix", "registers"),
    "together": (1, 2),
}


def as_pipelines(r: random.Random, plan: Plan, arch: Arch) -> Plan | None:
    """The plan with every kernel that can be one as a pipeline, its tiles and choices drawn; None if no kernel can."""
    kernels = [_as_pipeline(r, k, plan, arch) for k in plan.kernels]
    if not any(kernels):
        return None
    return replace(plan, kernels=tuple(new or old for new, old in zip(kernels, plan.kernels)))


def _as_pipeline(r: random.Random, k: Kernel, plan: Plan, arch: Arch) -> Kernel | None:
    for _ in range(TRIES):
        groups = r.randint(1, MOST_CONSUMERS)
        axes = {a: _drawn(r, x, groups) for a, x in k.axes.items()}
        asked = {n: r.choice(some) for n, some in CHOICES.items() if r.random() < 0.5}
        new = replace(k, axes=axes, choices={"warpgroups": groups, **asked})
        try:
            program = check(lower(new, plan.buffers, plan.compute_dtype))
            if isinstance(schedule_of(program, plan.buffers, arch), Pipeline):
                return new
        except (LoweringError, Unsupported):
            continue
    return None


def _drawn(r: random.Random, x: Axis, groups: int) -> Axis:
    """An axis of a block: few positions are batches or all there is, many are rows of warpgroups, columns, or what is summed."""
    n = x.extent
    if n < 8:
        return replace(x, tile=1, role="grid") if x.role == "grid" else replace(x, tile=n, role="whole")
    sizes = [ROWS * groups, *(m for m in (16, 32, 64, 80, 128, 256) if m <= max(n, ROWS)), n]
    if x.role == "grid":
        return replace(x, tile=min(r.choice(sizes), n))
    role = "loop" if x.role == "loop" or (x.role == "whole" and r.random() < 0.5) else "whole"
    return replace(x, tile=n if role == "whole" else min(r.choice(sizes[1:]), n), role=role)


def seen(pipe: Pipeline) -> Iterator[str]:
    """What of a pipeline's schedule counts as behaviour."""
    for name, value in choices_of(pipe).items():
        yield f"pipeline {name} {value}"
    yield f"pipeline pivot {pipe.pivot} overlap {pipe.overlap} chain {pipe.chain} of {pipe.consumers}"
    yield f"pipeline products {len(pipe.parts.early)} {len(pipe.parts.late)}"
    if pipe.sources:
        yield f"pipeline sources {len(pipe.sources)}"
    yield f"pipeline work {len(pipe.parts.score).bit_length()} {len(pipe.parts.weight).bit_length()} {len(pipe.parts.state).bit_length()}"
    for kind in ("score", "weight", "state"):
        for s in getattr(pipe.parts, kind):
            yield f"pipeline {kind} {type(s).__name__} {getattr(s, 'fn', getattr(s, 'op', ''))}".rstrip()
    yield f"pipeline parted {bool(pipe.parted)} tiles {len(pipe.boxes)} edges {bool(pipe.loop.constraints)}"
