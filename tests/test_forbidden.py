"""A report says what float16's range forbade, where that costs, and the remedies that it names work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import eqsat_neptune as en
from eqsat_neptune.programs import CASES

TARGET = "cuda:sm_80"


def linear_attention(dtype: str, target: str = TARGET, **more: Any) -> en.Kernel:
    case = CASES["linear_attention"]
    shapes = [s.shape for s in case.specs("full")]
    bounds = {"range": more.pop("range")} if "range" in more else {}
    specs = [en.TensorSpec(s, dtype, **bounds) for s in shapes]
    return en.optimize(case.function("full"), target, specs=specs, **more)


def left_out(kernel: en.Kernel) -> list[tuple[str, ...]]:
    return [row for s in kernel.report().sections if s.title == "Left out" for row in s.rows]


def test_the_report_names_the_form_and_the_remedy(tmp_path: Path) -> None:
    kernel = linear_attention("float16")
    ((form, why, remedy),) = left_out(kernel)
    assert "Σ[a3] v[a0, a3, a4]" in form and form.endswith("(reassociate)")
    assert "31 times fewer operations" in why and "float16" in why and "bfloat16" in remedy
    kernel.save(tmp_path / "k")
    assert left_out(en.load(tmp_path / "k")) == left_out(kernel)


@pytest.mark.parametrize(
    "remedy", [dict(dtype="bfloat16"), dict(dtype="float16", range=(-1.0, 1.0)), dict(dtype="float16", numerics="fast")]
)
def test_the_remedies_work(remedy: dict[str, Any]) -> None:
    kernel = linear_attention(**remedy)
    assert not left_out(kernel) and kernel.cost.seconds < linear_attention("float16").cost.seconds / 4


def test_nothing_is_said_where_nothing_is_lost() -> None:
    """float16 leaves out forms of attention, too, that no plan would have."""
    assert not left_out(linear_attention("float16", "cpu")), "nothing is rounded there"
    for name in ("prefill_causal", "rmsnorm_gain_linear", "retention"):
        case = CASES[name]
        assert not left_out(en.optimize(case.function("full"), TARGET, specs=case.specs("full", dtype="float16")))
