"""Special values, end to end, in emitted GPU code: a sample of what `python -m eqsat_neptune.testing.specials` runs; and what there is
to say of masks that leave nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from eqsat_neptune.codegen.cuda import emulate
from sweeps import some

import eqsat_neptune as en
from eqsat_neptune import xp
from eqsat_neptune.errors import EqsatError
from eqsat_neptune.program import Program
from eqsat_neptune.programs import softmax
from eqsat_neptune.testing import specials
from eqsat_neptune.testing.specials import DTYPES, WAYS, Expected, Values

needs_compiler = pytest.mark.skipif(emulate.host_compiler() is None, reason="no C++ compiler for the emulator")
SUBJECTS = {s.name: n for n, s in enumerate(specials.subjects())}


# ------------------------------------------------------------------ the sweep, in part

QUICK = {  # subject → dtype, way, every how many-th of its values
    "prefill_causal ragged": ("bfloat16", "pipeline:sm_90a", 9),
    "prefill_alibi more queries": ("float16", "general:sm_80", 4),
    "prefill_windowed one key": ("bfloat16", "general:gfx942", 3),
    "qknorm ragged": ("float16", "general:gfx942", 4),
    "gated_mlp aligned": ("bfloat16", "general:sm_80", 3),
    "variance ragged": ("float32", "general:sm_80", 1),
    "performer ragged": ("bfloat16", "general:sm_80", 6),
    "rmsnorm_quantize ragged": ("float16", "general:gfx942", 2),
    "kmeans_assign ragged": ("float32", "general:sm_80", 3),
    "gradient_of_values 83x37": ("bfloat16", "general:sm_80", 4),
    "gradient_by_position 83x37": ("float16", "general:gfx942", 4),
}


@needs_compiler
@pytest.mark.parametrize("name", some(QUICK, 6))
def test_special_values(name: str) -> None:
    dtype, way, share = QUICK[name]
    tally = specials.run((SUBJECTS[name], dtype, (way,), share))
    assert not tally.faults, "\n".join(map(str, tally.faults))
    assert tally.plans and tally.runs > 5


SLOW = [(name, DTYPES[n // 4 % 3], WAYS[n % 4], 9) for name, n in SUBJECTS.items() if n % 3 == 0]


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("name, dtype, way, share", SLOW)
def test_special_values_of_more(name: str, dtype: str, way: str, share: int) -> None:
    tally = specials.run((SUBJECTS[name], dtype, (way,), share))
    assert not tally.faults, "\n".join(map(str, tally.faults))


@needs_compiler
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not say what is in memory")
def test_kernels_are_unloaded() -> None:
    """Everything is thousands of them."""

    def loaded() -> int:
        return sum("kernel.so" in line for line in Path("/proc/self/maps").read_text().splitlines())

    before = loaded()
    tally = specials.run((SUBJECTS["variance ragged"], "float32", ("general:sm_80",), 9))
    assert tally.runs and not tally.faults and loaded() == before


def test_what_is_found() -> None:
    """The comparison itself: what a kernel must not do, and what it may."""

    def fn(x: Any, m: Any) -> Any:
        return softmax(x + m)

    p = en.trace(fn, en.TensorSpec((2, 3)), en.TensorSpec((2, 3)))
    assert isinstance(p, Program)
    x, hole = np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32)
    hole[1] = -np.inf
    e = Expected(p, Values("a masked row", [x, hole]), False)
    right = np.array([[1 / 3] * 3, [np.nan] * 3], np.float32)
    assert e.wrong([right]) is None
    assert "no NaN" in str(e.wrong([np.nan_to_num(right)]))
    assert "not finite" in str(e.wrong([right * np.array([[np.inf], [1]], np.float32)]))
    assert "error" in str(e.wrong([right * np.float32(1.01)]))
    assert "shape" in str(e.wrong([right[:1]]))


def test_what_masks_may_win_over() -> None:
    """0·∞ of a key that is masked by position need not show; of one that is not it must."""
    p = en.trace(lambda w, v: xp.where(xp.arange(3) < 2, w, 0.0) @ v, en.TensorSpec((3,)), en.TensorSpec((3, 2)))
    assert isinstance(p, Program)
    w, v = np.ones(3, np.float32), np.ones((3, 2), np.float32)
    v[2, 0] = np.inf
    e = Expected(p, Values("", [w, v], "∞"), False)
    assert np.isnan(e.want[0][0])
    assert e.wrong([np.array([2.0, 2.0], np.float32)]) is None and e.wrong([np.array([np.nan, 2.0], np.float32)]) is None
    assert "no NaN" in str(e.wrong([np.array([3.0, 2.0], np.float32)]))
    w[1], v[1, 1] = 0.0, np.inf
    w[0] = np.nan
    e = Expected(p, Values("", [w, v], "NaN"), False)
    assert "no NaN" in str(e.wrong([np.array([0.0, 0.0], np.float32)]))


def test_what_algebra_may_take_out() -> None:
    """Inputs count as finite: a softmax over one key is 1, whatever its score."""
    p = en.trace(lambda x: softmax(x), en.TensorSpec((2, 1)))
    assert isinstance(p, Program)
    e = Expected(p, Values("", [np.array([[np.nan], [1]], np.float32)], "NaN"), False)
    assert e.wrong([np.array([[1], [1]], np.float32)]) is None and e.wrong([np.array([[np.nan], [1]], np.float32)]) is None
    assert "no NaN" in str(e.wrong([np.array([[0], [1]], np.float32)]))
    assert "not finite" in str(e.wrong([np.array([[np.nan], [np.nan]], np.float32)]))


def test_overflow_of_what_is_stored() -> None:
    p = en.trace(lambda x, y: x @ y, en.TensorSpec((1, 2), "float16"), en.TensorSpec((2, 1), "float16"))
    assert isinstance(p, Program)
    arrays = [np.full((1, 2), 300, np.float16), np.full((2, 1), 300, np.float16)]
    e = Expected(p, Values("", arrays), True)
    assert e.wrong([np.array([[np.inf]], np.float16)]) is None
    assert "infinity" in str(e.wrong([np.array([[np.nan]], np.float16)]))


def test_the_command_refuses_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    for bad in (["--only", "nothing of this name"], ["--ways", "general:sm_10"], ["--dtypes", "int8"], ["--part", "3/2"]):
        assert specials.main(bad) == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1
    with pytest.raises(EqsatError, match="no subject"):
        specials.jobs(["nothing of this name"])
