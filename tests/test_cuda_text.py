"""The CUDA lowering: what is printed, and what it takes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from cuda_jobs import BF16, attention, f64, job_text, make, product, simple_job, softmax_rows
from eqsat_neptune.codegen.cuda import emit as emit_module
from eqsat_neptune.codegen.cuda.arch import cuda_arch, hopper_emulator_arch
from eqsat_neptune.codegen.cuda.emit import feasible, precision_of, resources
from eqsat_neptune.codegen.cuda.emulate import host_compiler, run
from eqsat_neptune.codegen.cuda.layout import Unsupported
from eqsat_neptune.codegen.cuda.planner import plan
from eqsat_neptune.codegen.cuda.reductions import Reductions
from eqsat_neptune.codegen.cuda.simple import Simple
from eqsat_neptune.codegen.lower import lower
from eqsat_neptune.extraction.plan import Axis

import eqsat_neptune as en
from eqsat_neptune import terms as T
from eqsat_neptune.programs import CASES
from eqsat_neptune.terms import axis_index as A
from eqsat_neptune.terms import inp, mul


def test_text_reads_well() -> None:
    text = job_text(attention(mask="causal"))
    assert "asm" not in text and "contract<" in text and "Rounded" not in text
    assert text.startswith("// kernel k0(") and "for k  where" in text  # the tile program heads the kernel
    assert all(len(line) < 400 for line in text.splitlines())
    balance = text.count("{") - text.count("}")
    assert balance == 0


@pytest.mark.parametrize("lowering", ["fragments", "an element a thread"])
def test_nothing_is_read_ahead_of_the_wait(lowering: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels start while the one ahead ends, another plan's too.  Reads through const __restrict__ pointers may be moved up, past the
    wait for the kernel that writes there."""

    def none(*_: Any) -> Any:
        raise Unsupported("not in this test")

    if lowering != "fragments":
        monkeypatch.setattr(emit_module, "plan", none)
    text = job_text(attention(n=1, m=500, keys=64, split=3), "sm_90a")
    bodies = re.split(r"^k\d+\(.*\) \{$", text, flags=re.MULTILINE)[1:]
    assert len(bodies) > 1 and all(x.count("previous_kernel_wait();") == 1 for x in bodies)
    assert [x.count("next_kernel_may_start();") for x in bodies] == [1] * (len(bodies) - 1) + [0]  # behind the last one comes another plan
    assert not any(re.search(r"\b(load|read|gather|copy)\w*\(", x.partition("previous_kernel_wait();")[0]) for x in bodies)
    assert "const bf16* " in text and not re.search(r"const \w+\* __restrict__", text)
    older = job_text(attention(n=1, m=500, keys=64, split=3), "sm_80")
    assert "const bf16* __restrict__" in older and "previous_kernel_wait();" not in older.partition("k0(")[2]


def test_text_depends_on_the_program_alone() -> None:
    code = (
        f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
        "import hashlib, cuda_jobs as t\n"
        "jobs = [t.attention(mask='causal', g=3, rows=(3, 16)), t.attention(n=1, m=500, keys=64, split=3), t.softmax_rows(5, 700, 1, 128)]\n"
        "print(hashlib.sha256(''.join(map(t.job_text, jobs)).encode()).hexdigest())"
    )
    out = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**_environment(), "PYTHONHASHSEED": seed}).stdout
        for seed in ("1", "2")
    }
    assert len(out) == 1


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}


def test_masked_tiles_are_skipped_and_longest_blocks_run_first() -> None:
    text = job_text(attention(mask="causal", n=256, m=256, rows=(1, 64)))
    assert re.search(r"k_end = at_least\(at_most\(floor_div\(\(i64\)q0 \+ 63, 32\) \+ 1, 8\), k_first \+ 1\);", text)
    assert "the longest first" in text and "if (edge)" in text
    assert "edge" not in job_text(attention(n=256, m=256, rows=(1, 64)))  # nothing masked, nothing ragged: no code for it


def test_tiles_that_no_mask_touches_have_code_without_masks() -> None:
    def parts(arch: str = "sm_90a", **more: object) -> list[str]:
        text = job_text(attention(n=256, m=256, rows=(1, 64), **more), arch)  # type: ignore[arg-type]
        return re.findall(r"for \(; k_tile < k_end(?: && k_tile < (?:k_full_first|k_full_end))?; \+\+k_tile\) k_step\(k_tile, (\w+)\);", text)

    assert parts(mask="causal") == ["false", "true"]
    assert parts(mask="window") == ["true", "false", "true"]
    assert parts() == [] and parts(mask="causal", choices={"warps": 8}) == ["false", "true"]  # 64 rows are work for 4
    wide = dict(n=256, m=256, rows=(1, 256), mask="causal", choices={"warps": 8})
    assert "k_step" not in job_text(attention(**wide))  # type: ignore[arg-type]


def test_warps_that_share_a_loop_exchange_in_places_of_their_own() -> None:
    """Each goes through its iterations without waiting for the others: norms of keys, a value for each row that becomes one for each
    column, were written where other warps' were."""
    spec = en.TensorSpec((8, 256, 64), "bfloat16")
    kernel = en.optimize(CASES["qknorm"].function("full"), "cuda:sm_90a", specs=[spec] * 3)
    loops = [x for x in kernel.source.split("// ---- over ")[1:] if "shared by" in x.partition("\n")[0]]
    exchanges = [y for x in loops for y in re.findall(r"_shared<float>\((.*?), ", x.partition("join their states")[0])]
    exchanges += [y for x in loops for y in re.findall(r"load_shared<float>\((.*?)\);", x.partition("join their states")[0])]
    assert exchanges and all("warp" in y for y in exchanges)


@pytest.mark.skipif(host_compiler() is None, reason="no C++ compiler on this machine")
def test_warps_overtake_each_other_in_the_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where warps that share a loop exchange values in one place, the results are wrong under every order but the first."""
    spec = en.TensorSpec((1, 256, 64), "bfloat16")
    program = en.trace(CASES["qknorm"].function("full"), *[spec] * 3)
    plan = en.optimize(program, "cuda:sm_90a").plan
    programs = [lower(k, plan.buffers, plan.compute_dtype) for k in plan.kernels]
    rng = np.random.default_rng(0)
    inputs = {i.name: rng.standard_normal(i.shape).astype(BF16) for i in program.inputs}
    want = en.evaluate(program, *inputs.values())

    def error(seed: int) -> float:
        (out,) = run(programs, plan.buffers, inputs, hopper_emulator_arch(), seeds=(seed,))
        return float(np.abs(out["out0"].astype(np.float64) - want).max())

    assert all(error(seed) < 1e-2 for seed in range(3))
    monkeypatch.setattr(Reductions, "in_split", lambda self: False)  # as if a block's warps waited for each other
    monkeypatch.setattr(Reductions, "sync", lambda self: "warp_sync();")
    assert all(error(seed) > 1e-2 for seed in (1, 2))


def test_names_clash_with_nothing() -> None:
    x = inp("float", (A("int"), A("fill")))
    job = simple_job({"warp": (T.red("+", "fill", mul(x, x)), ("int",))},
                     {"int": Axis(10, 2, "grid"), "fill": Axis(20, 20, "whole")}, {"float": make("float32", (10, 20), 0)},
                     {"warp": (f64(make("float32", (10, 20), 0)) ** 2).sum(-1)}, "float32", tolerance=1e-6)  # fmt: skip
    (out,) = run(job.programs, job.buffers, job.inputs) if host_compiler() else (None,)
    if out is not None:
        job.check(out)


def test_resources_and_reasons() -> None:
    job = attention(h=1, n=256, m=256, d=128, e=128, rows=(1, 128), keys=64)
    shared, registers, threads = resources(job.programs[0], cuda_arch("sm_90a"))
    assert (shared, threads) == (98304, 128) and 190 <= registers <= 255
    assert feasible(job.programs[0], cuda_arch("sm_90a"), job.buffers) is None
    huge = attention(h=1, n=2048, m=256, d=512, e=512, rows=(1, 512), keys=128)
    assert re.search("bytes of shared memory|registers", feasible(huge.programs[0], cuda_arch("sm_120a")) or "")
    assert feasible(huge.programs[0], cuda_arch("sm_120a"), slow=True) is None


def test_hints_that_do_not_fit_are_dropped() -> None:
    job = softmax_rows(4, 16384, 4, None, warps=1)
    assert plan(job.programs[0], cuda_arch("sm_90a"), precision_of(job.buffers, "float32")).warps > 1


def test_simple_lowering_is_a_last_resort() -> None:
    from eqsat_neptune.codegen.cuda.emit import schedule_of

    for job in (attention(), attention(n=1, m=500, keys=64, split=3), softmax_rows(5, 700, 1, 128), product(70, 100, 96, (64, 64, 32))):
        for p in job.programs:
            assert not isinstance(schedule_of(p, job.buffers, cuda_arch("sm_80")), Simple)
