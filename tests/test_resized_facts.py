"""What a plan says of its buffers' values holds at the extents that it was made for."""

from __future__ import annotations

from typing import Any

import numpy as np

import eqsat_neptune as en
from eqsat_neptune import xp
from eqsat_neptune.forms import tile_values
from eqsat_neptune.programs import scores, softmax
from eqsat_neptune.reference import evaluate
from eqsat_neptune.resizing import resized, resized_plan


def weighed(k: Any, q: Any, g: Any) -> Any:
    """A sum over rows that each have one key, as long as there are as many keys as rows."""
    s = scores(q, k)
    return softmax(xp.where(xp.arange(s.shape[-1]) == xp.arange(s.shape[-2])[:, None], s, -xp.inf)).mT @ g


def test_rows_that_lose_their_keys_are_nan_at_other_extents() -> None:
    p = en.trace(weighed, *[en.TensorSpec((1, 1024, 128), "bfloat16")] * 3)
    plan = en.optimize(p, "cuda:sm_90a").plan
    assert any("finite" in b.known for b in plan.buffers.values() if b.kind == "temp")
    keys = p.outputs[0].dims[-2][0]
    small = resized(p, lambda axes: 4 if keys in axes else 8)
    q = resized_plan(plan, p, small, {}, lambda kernel, axis, n: min(n, 4))
    arrays = [np.random.default_rng(0).standard_normal(i.shape).astype(i.dtype) for i in small.inputs]
    with np.errstate(all="ignore"):
        want, (got,) = evaluate(small, *arrays), tile_values(small, q, arrays)
    assert np.isnan(want).all() and np.isnan(got).all()
