"""Every program of the library: the code says what its reference says, and so do its trace and its compiled kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from reference import REFERENCES

import eqsat_neptune as en
from eqsat_neptune.programs import CASES, Case

CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
PLAIN = [case for case in CASES.values() if not case.sugar]  # those that need only what NumPy's namespace has, too
PLAIN_CASE = pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.name)
OPERATORS = [case for case in CASES.values() if case.section == "A"]
OPERATOR = pytest.mark.parametrize("case", OPERATORS, ids=lambda case: case.name)


def as_tuple(result: Any) -> tuple[np.ndarray, ...]:
    return result if isinstance(result, tuple) else (result,)


def widened(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """The same values in float64; indices stay integers."""
    return [a if np.issubdtype(a.dtype, np.integer) else a.astype(np.float64) for a in arrays]


def relative_error(result: Any, expected: np.ndarray) -> float:
    """‖result − expected‖ / ‖expected‖ in float64 (NaN counts as infinitely far)."""
    difference = np.asarray(result).astype(np.float64) - expected
    error = float(np.linalg.norm(difference) / np.linalg.norm(expected))
    return error if error == error else float("inf")


def assert_close(results: Any, expected: Any, tolerance: float) -> None:
    results, expected = as_tuple(results), as_tuple(expected)
    assert len(results) == len(expected)
    for i, (result, want) in enumerate(zip(results, expected)):
        result, want = np.asarray(result), np.asarray(want)
        assert result.shape == want.shape, f"output {i}"
        if np.issubdtype(want.dtype, np.integer):
            np.testing.assert_array_equal(result, want)
        else:
            assert relative_error(result, want) <= tolerance, f"output {i}"


def test_every_case_has_a_reference() -> None:
    assert set(REFERENCES) == set(CASES)


@PLAIN_CASE
def test_program_on_numpy_agrees_with_reference(case: Case) -> None:
    arrays = case.inputs("small", np.random.default_rng(7), dtype="float64")
    assert_close(case.function("small")(*arrays), REFERENCES[case.name](*arrays), 1e-13)


@CASE
def test_traced_program_evaluates_to_reference(case: Case) -> None:
    arrays = case.inputs("small", np.random.default_rng(11))
    program = en.trace(case.function("small"), *case.specs("small"))
    assert_close(en.evaluate(program, *arrays), REFERENCES[case.name](*widened(arrays)), 1e-12)


@CASE
def test_full_size_traces(case: Case) -> None:
    """The full shapes are declared, not allocated: tracing them shows that the sizes fit together."""
    program = en.trace(case.function("full"), *case.specs("full"))
    assert [i.shape for i in program.inputs] == [a.shape for a in case.arguments("full")]


@CASE
def test_outputs_keep_the_dtype_of_the_inputs(case: Case) -> None:
    program = en.trace(case.function("small"), *case.specs("small", "bfloat16"))
    indices = {"kmeans_assign", "nearest_centre", "nearest_neighbours", "top2_gating", "topk_gating", "rmsnorm_quantize"}
    assert {o.dtype for o in program.outputs} - ({"int8", "int32", "int64"} if case.name in indices else set()) <= {"bfloat16"}


# Whole layers magnify the rounding of what goes in: over 60 draws the same code in float32 NumPy reaches 2.2e-6 on layers2
# (median 3.6e-7), the compiled kernel 2.0e-6 (median 3.5e-7).
FLOAT32_TOLERANCE = {"layers2": 5e-6}


@CASE
def test_compiled_in_float32(case: Case) -> None:
    arrays = case.inputs("small", np.random.default_rng(13))
    kernel = en.optimize(en.trace(case.function("small"), *case.specs("small")), target="cpu", verify=True)
    assert_close(kernel(*arrays), REFERENCES[case.name](*widened(arrays)), FLOAT32_TOLERANCE.get(case.name, 2e-6))


# extents that make the CPU plans loop over tiles, or split, with a ragged end
LONG = {
    "prefill_causal": {"n": 389},
    "prefill_windowed": {"n": 389},
    "qknorm": {"n": 389},
    "sink_attention": {"n": 389},
    "differential_attention": {"n": 389},
    "retention": {"n": 389},
    "decode_gqa": {"n": 5003},
    "gqa_plain": {"nk": 5003},
    "rmsnorm_linear": {"m": 5003},
    "cross_entropy_linear": {"v": 5003},
    "nearest_neighbours": {"m": 1037},
    "logsumexp": {"m": 50003},
    "variance": {"m": 50003},
}


@pytest.mark.parametrize("name", LONG)
def test_compiled_over_many_tiles(name: str) -> None:
    case, extents = CASES[name], LONG[name]
    arrays = case.inputs("small", np.random.default_rng(19), **extents)
    kernel = en.optimize(en.trace(case.function("small"), *case.specs("small", **extents)), target="cpu")
    assert_close(kernel(*arrays), REFERENCES[name](*widened(arrays)), 2e-6)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
@OPERATOR
def test_half_precision_is_as_accurate_as_pytorch(case: Case, dtype: str) -> None:
    pytest.importorskip("torch", reason="PyTorch is the peer that the error is compared with")
    extents = {"n": 130, "d": 32}
    arrays = case.inputs("small", np.random.default_rng(17), dtype, **extents)
    expected = REFERENCES[case.name](*widened(arrays))
    kernel = en.optimize(en.trace(case.function("small"), *case.specs("small", dtype, **extents)), target="cpu")
    result = kernel(*arrays)
    assert result.dtype == arrays[0].dtype
    assert relative_error(result, expected) <= 1.1 * relative_error(pytorch(case.name, arrays), expected)


def pytorch(name: str, arrays: list[np.ndarray]) -> np.ndarray:
    """The operator by PyTorch's own attention in the dtype of `arrays`; its result in float64."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    dtype = getattr(torch, arrays[0].dtype.name)
    q, k, v, *slopes = (torch.from_numpy(a.astype(np.float32)).to(dtype) for a in arrays)
    prefill = name.startswith("prefill")
    kind = name.partition("_")[2]
    grouped = q.shape[1] != k.shape[1]
    if kind in ("global", "causal", "gqa"):
        causal = prefill and kind != "global"
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
        return out.double().numpy()

    first = 0 if prefill else k.shape[2] - 1

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + slopes[0][h] * (j - i - first) if kind == "alibi" else 50.0 * torch.tanh(s / 50.0)

    def keep(b: Any, h: Any, i: Any, j: Any) -> Any:
        kept = j <= i + first
        return kept & (i - j < 11) if kind == "windowed" else kept

    mask = create_block_mask(keep, None, None, q.shape[2], k.shape[2], device="cpu")
    return flex_attention(q, k, v, score_mod=score, block_mask=mask, enable_gqa=grouped).double().numpy()


def test_full_sizes_are_those_of_the_operators() -> None:
    heads = {"gqa": (64, 8), "softcap": (32, 16), "windowed": (32, 8)}
    for case in OPERATORS:
        phase, _, kind = case.name.partition("_")
        hq, hkv = heads.get(kind, (32, 32))
        q, k, v = (a.shape for a in case.arguments("full", n=1000)[:3])
        assert q == (1, hq, 1000 if phase == "prefill" else 1, 128)
        assert k == v == (1, hkv, 1000, 128)


def test_inputs_have_the_dtype_and_the_range_of_their_spec() -> None:
    for case in CASES.values():
        for dtype in (None, "float16", "bfloat16"):
            specs = case.specs("small", dtype)
            for spec, array in zip(specs, case.inputs("small", np.random.default_rng(0), dtype), strict=True):
                assert (array.shape, array.dtype.name) == (spec.shape, spec.dtype)
                if spec.range is not None:
                    low, high = spec.range
                    assert low <= array.astype(np.float64).min() and array.astype(np.float64).max() <= high


def test_inputs_repeat_and_agree_across_dtypes() -> None:
    case = CASES["prefill_alibi"]
    wide, again, narrow = (
        case.inputs("small", np.random.default_rng(3), dtype) for dtype in ("float64", "float64", "bfloat16")
    )
    for a, b, c in zip(wide, again, narrow, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a.astype(c.dtype), c)


def test_unknown_size_or_extent_is_refused() -> None:
    case = CASES["softmax"]
    with pytest.raises(ValueError, match='"small" or "full"'):
        case.specs("huge")
    with pytest.raises(ValueError, match="no extent d; it has n, m"):
        case.specs("full", d=3)
