"""The CUDA lowering: emitted kernels compile for every architecture."""

from __future__ import annotations

import pytest
from cuda_jobs import Job, attention, compiler_missing, product, softmax_rows
from eqsat_neptune.codegen.cuda.arch import cuda_arch
from eqsat_neptune.codegen.cuda.emit import emit

import eqsat_neptune as en
from eqsat_neptune.programs import CASES

ARCHES = ("sm_80", "sm_89", "sm_90a", "sm_120a")
OPERATORS = (
    "prefill_global", "prefill_causal", "prefill_gqa", "prefill_alibi", "prefill_softcap", "prefill_windowed",
    "decode_causal", "decode_gqa", "decode_alibi", "decode_softcap",
)  # fmt: skip


def operators(keys: int = 64) -> dict[str, Job]:
    """The ten attention operators at their real tiles (few heads: the text does not depend on it)."""
    pre = dict(h=1, n=2048, m=2048, d=128, e=128, rows=(1, 128), keys=keys)
    dec = dict(h=1, n=1, m=4096, d=128, e=128, keys=64, split=8)
    return {
        "prefill_global": attention(**pre),
        "prefill_causal": attention(**pre, mask="causal"),
        "prefill_gqa": attention(**pre, mask="causal", g=8),
        "prefill_alibi": attention(**pre, mask="causal", alibi=True),
        "prefill_softcap": attention(**{**pre, "keys": 32}, mask="causal", cap=50.0, pivot=False),
        "prefill_windowed": attention(**{**pre, "keys": 32}, mask="window", cap=50.0, pivot=False),
        "decode_causal": attention(**dec),
        "decode_gqa": attention(**dec, g=8, rows=(8, 1)),
        "decode_alibi": attention(**dec, alibi=True),
        "decode_softcap": attention(**dec, g=2, rows=(2, 1), cap=50.0, pivot=False),
    }


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_compile_with_hardly_a_spill(name: str, arch: str) -> None:
    """A few values that the loop touches once (row sums, pointers) may lie in memory: it costs nothing measurable."""
    from eqsat_neptune.runtime.nvrtc import compile_cuda

    if reason := compiler_missing(arch):
        pytest.skip(reason)
    job = operators(32 if arch == "sm_120a" else 64)[name]  # 99 KB of shared memory there
    compiled = compile_cuda(emit(job.programs, job.buffers, cuda_arch(arch)).text, arch)
    assert len(compiled.kernels) == len(job.programs)
    assert max(k.spill_bytes for k in compiled.kernels.values()) <= (96 if name.startswith("prefill") else 0)


@pytest.mark.parametrize("arch", ("sm_80", "sm_90a"))
def test_compiles(arch: str) -> None:
    from eqsat_neptune.runtime.nvrtc import compile_cuda

    if reason := compiler_missing(arch):
        pytest.skip(reason)
    jobs = [attention(n=1, m=500, keys=64, split=3), softmax_rows(5, 700, 1, 128), product(40, 40, 70, (32, 32, 16), dtype="float32")]
    for job in jobs:
        compiled = compile_cuda(emit(job.programs, job.buffers, cuda_arch(arch)).text, arch)
        assert len(compiled.kernels) == len(job.programs)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("name", ["gated_linear_attention", "retention", "attention_dq", "performer"])
def test_programs_are_emitted(name: str, arch: str, dtype: str) -> None:
    """Decays are masks over what varies less than they do."""
    case = CASES[name]
    assert en.optimize(en.trace(case.function("full"), *case.specs("full", dtype)), f"cuda:{arch}").source
