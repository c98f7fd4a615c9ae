"""Programs through the whole pipeline on a GPU, against float64."""
from __future__ import annotations

import numpy as np
import pytest

import eqsat_neptune as en
from eqsat_neptune.programs import CASES
from eqsat_neptune.runtime.driver import available

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(available() is not None, reason=str(available()))]
torch = pytest.importorskip("torch")
pytest.importorskip("egglog", reason="optimising needs egglog")

NAMES = [n for n, c in CASES.items() if not c.needs_scan]


def on_gpu(x: np.ndarray):
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16).copy()).cuda().view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(x)).cuda()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", NAMES)
def test_case(name: str, dtype: str) -> None:
    case = CASES[name]
    program = en.trace(case.function("small"), *case.specs("small", dtype=dtype))
    kernel = en.optimize(program, "cuda")
    ins = case.inputs("small", np.random.default_rng(0), dtype=dtype)
    want = en.evaluate(program, *ins)
    args = [on_gpu(x) for x in ins]
    got = kernel(*args)
    again = kernel(*args)
    torch.cuda.synchronize()
    for w, g, a in zip(*((x if isinstance(x, tuple) else (x,)) for x in (want, got, again))):
        x = g.double().cpu().numpy()
        assert np.array_equal(x, a.double().cpu().numpy(), equal_nan=True), "not repeatable"
        scale = np.abs(w).max(initial=0.0) or 1.0
        error = np.abs(x - w).max(initial=0.0) / scale
        assert error <= {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}[dtype], f"relative error {error:.2e}"
