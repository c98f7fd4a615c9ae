"""Target strings: "cpu", "cuda" (the GPU present), "cuda:sm_90a", "hip:gfx942"."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import TargetError

CUDA_ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100a", "sm_120", "sm_120a")
HIP_ARCHS = ("gfx90a", "gfx942", "gfx1100")
_KNOWN = (
    f'"cpu", "cuda" (the GPU present), {", ".join(f"cuda:{a}" for a in CUDA_ARCHS)}, {", ".join(f"hip:{a}" for a in HIP_ARCHS)}'
)


@dataclass(frozen=True)
class Target:
    """kind: "cpu", "cuda" or "hip"; arch: "" on cpu, else the device architecture."""

    kind: str
    arch: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.arch}" if self.arch else self.kind


def parse_target(text: str | Target) -> Target:
    """The target named by a string.  "cuda" asks the driver which GPU is present."""
    if isinstance(text, Target):
        return text
    if not isinstance(text, str):
        raise TargetError(f"target must be a string, not {type(text).__name__}", f"known: {_KNOWN}")
    if text == "cpu":
        return Target("cpu")
    if text == "cuda":
        from .runtime.driver import device_arch

        return Target("cuda", device_arch())
    kind, colon, arch = text.partition(":")
    if (colon and (kind, arch in CUDA_ARCHS) == ("cuda", True)) or (kind, arch in HIP_ARCHS) == ("hip", True):
        return Target(kind, arch)
    if kind == "cuda" and re.fullmatch(r"sm_\d+a?", arch):
        raise TargetError(f"unknown or too old CUDA architecture {arch!r}", f"known: {_KNOWN}")
    raise TargetError(f"unknown target {text!r}", f"known: {_KNOWN}")
