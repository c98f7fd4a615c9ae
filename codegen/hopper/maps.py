"""Tensor maps of boxes."""

from __future__ import annotations

import math

from ...extraction.plan import Buffer
from ...runtime.module import TensorMap
from .planner import Box


def tensor_map(b: Buffer, box: Box) -> TensorMap:
    """What the driver must know to copy a box of a buffer: strides are given at the run for inputs, and row-major for temporaries."""

    def stride(n: int) -> int | str:
        return f"{b.name}.stride{n}" if b.kind == "input" else math.prod(b.shape[n + 1 :])

    return TensorMap(b.name, b.dtype, box.sizes, tuple(stride(n) for n in box.dims[1:]), box.box)
