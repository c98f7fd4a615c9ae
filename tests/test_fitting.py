"""Schedules whose code spills give way to simpler ones, once: the outcome is kept.  No GPU and no device compiler is needed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from eqsat_neptune.codegen.hopper.choices import relaxed

import eqsat_neptune as en
from eqsat_neptune.programs import CASES
from eqsat_neptune.runtime import nvrtc
from eqsat_neptune.runtime.compiled import Compiled, KernelInfo, ptxas_report
from eqsat_neptune.runtime.fitting import FEW_BYTES, Fit

CHAIN = "// beside the end of this tile"
OVERLAP = "products_wait<1>"
PIPELINE = "more_registers"


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Callable[[str], KernelInfo]], list[str]]:
    """Sets what the compiler says of a kernel's text; gives the list of the texts that it has compiled since."""
    monkeypatch.setenv("EQSAT_NEPTUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(nvrtc, "compiler_version", lambda arch: "of these tests")

    def install(says: Callable[[str], KernelInfo]) -> list[str]:
        made: list[str] = []

        def compile_cuda(source: str, arch: str, *, options: tuple[str, ...] = ()) -> Compiled:
            made.append(source)
            parts = re.split(r"^// kernel (\w+)", source, flags=re.MULTILINE)[1:]
            return Compiled(source.encode(), "", {n: says(text) for n, text in zip(parts[::2], parts[1::2])})

        monkeypatch.setattr(nvrtc, "compile_cuda", compile_cuda)
        return made

    return install


def spilling(n: int, serialised: bool = False) -> KernelInfo:
    return KernelInfo(168, n, 0, n, serialised)


def kernel(name: str = "prefill_causal") -> en.Kernel:
    case = CASES[name]
    return en.optimize(case.function("full"), target="cuda:sm_90a", specs=case.specs("full"))


def notes(k: en.Kernel) -> dict[str, str]:
    rows = next(s.rows for s in k.report().sections if s.title == "Compiled code")
    return {row[0]: row[4] for row in rows if len(row) > 4}


def test_each_schedule_is_simpler_than_the_one_before() -> None:
    full = kernel().plan.kernels[0].choices
    assert full["overlap"] and full["chain"] and full["pivot"] == "frozen"
    *pipelines, general = relaxed({**full, "hold": True, "peek": True, "split": 2})
    changed = [
        {n for n in b if a[n] != b[n]} for a, b in zip([{**full, "hold": True, "peek": True, "split": 2}, *pipelines], pipelines)
    ]
    assert changed == [{"hold"}, {"split"}, {"peek"}, {"pivot"}, {"chain"}, {"overlap", "turns"}]
    assert general == {"warps": 4 * int(str(full["warpgroups"]))}
    assert relaxed({"warpgroups": 1, "overlap": False}) == [{"warps": 4}]


@pytest.mark.parametrize("bad", [spilling(900), spilling(0, serialised=True)], ids=["spills", "serialised"])
def test_the_first_schedule_that_fits_runs(bad: KernelInfo, compiler: Callable[..., list[str]], tmp_path: Path) -> None:
    made = compiler(lambda text: bad if CHAIN in text else spilling(FEW_BYTES))
    k = kernel()
    assert CHAIN in k.source
    k.compile()
    assert CHAIN not in k.source and OVERLAP in k.source and PIPELINE in k.source
    assert CHAIN in made[0] and made[-1] == k.source and len(made) == len(set(made[:-1])) + 1
    said = "spilled 900 bytes" if bad.spill_bytes else "its products waited for one another"
    assert notes(k) == {"k0": f"as planned, {said}; runs with chain=False, pivot=lazy"}
    k.save(tmp_path / "kernel.eqsat")
    again = compiler(lambda text: pytest.fail("nothing is left to compile"))
    loaded = en.load(tmp_path / "kernel.eqsat").compile()
    assert again == [] and loaded.source == k.source and notes(loaded) == notes(k)


def test_what_fits_is_compiled_once(compiler: Callable[..., list[str]]) -> None:
    made = compiler(lambda text: spilling(FEW_BYTES))
    k = kernel().compile()
    assert made == [k.source] and CHAIN in k.source and notes(k) == {}


def test_a_compiler_that_says_nothing_is_believed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EQSAT_NEPTUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(nvrtc, "compiler_version", lambda arch: "of these tests")
    monkeypatch.setattr(nvrtc, "compile_cuda", lambda source, arch, *, options=(): Compiled(source.encode(), ""))
    k = kernel().compile()
    assert CHAIN in k.source and "spilled" not in str(k.report())


def test_the_general_lowering_is_the_last_resort(compiler: Callable[..., list[str]]) -> None:
    compiler(lambda text: spilling(400 if PIPELINE in text else 0))
    k = kernel().compile()
    assert PIPELINE not in k.source
    warps = 4 * int(kernel().plan.kernels[0].choices["warpgroups"])
    assert notes(k) == {"k0": f"as planned, spilled 400 bytes; runs without warpgroups, warps={warps}"}


def test_where_nothing_fits_the_least_spills(compiler: Callable[..., list[str]]) -> None:
    compiler(lambda text: spilling(300 if CHAIN in text else 100 if OVERLAP in text else 200))
    k = kernel().compile()
    assert CHAIN not in k.source and OVERLAP in k.source
    assert notes(k) == {
        "k0": "as planned, spilled 300 bytes; runs with chain=False, pivot=lazy, which is the best of its schedules"
    }
    compiler(lambda text: spilling(80 if PIPELINE in text else 70))  # the cache remembers: 300
    assert "300" in notes(kernel().compile())["k0"]


def test_where_nothing_is_better_the_plan_runs(compiler: Callable[..., list[str]]) -> None:
    made = compiler(lambda text: spilling(80))
    k = kernel()
    before = k.source
    assert k.compile().source == before
    assert notes(k) == {"k0": "as planned, spilled 80 bytes; no simpler schedule is better"}
    tried = len(made)
    assert notes(kernel().compile()) == notes(k) and len(made) == tried


def test_only_the_kernel_that_spills_changes(compiler: Callable[..., list[str]]) -> None:
    def parts(source: str) -> dict[str, str]:
        found = re.split(r"^// kernel (\w+)", source, flags=re.MULTILINE)[1:]
        return dict(zip(found[::2], found[1::2]))

    made = compiler(lambda text: spilling(500 if "\nk1(" in text and len(made) == 1 else 0))
    k = kernel("differential_attention")
    before = parts(k.source)
    after = parts(k.compile().source)
    assert PIPELINE in before["k0"] and PIPELINE in before["k1"] and after["k1"] != before["k1"]
    assert after["k0"] == before["k0"] and set(after) == set(before) == {"k0", "k1"}
    assert set(notes(k)) == {"k1"}
    assert [list(parts(source)) for source in made] == [["k0", "k1"], ["k1"], ["k0", "k1"]]  # what is tried is tried alone


def test_a_damaged_entry_is_found_again(compiler: Callable[..., list[str]]) -> None:
    assert Fit.from_bytes(Fit({"k0": {"warps": 4}}, {"k0": "note"}).to_bytes()) == Fit({"k0": {"warps": 4}}, {"k0": "note"})
    assert Fit.from_bytes(None) is None
    for raw in (b"", b"[]", b'{"choices": 1}', b'{"choices": {"k0": 3}, "notes": {}}', b'{"choices": [], "notes": {}}'):
        with pytest.warns(RuntimeWarning, match="found again"):
            assert Fit.from_bytes(raw) is None


def test_serialised_products_are_read_from_the_log() -> None:
    log = """ptxas info    : (C7514) Potential Performance Loss: wgmma.mma_async instructions are serialized due to non wgmma \
instructions reading accumulator registers of  a wgmma between start and end of the pipeline stage in the function 'k0'
ptxas info    : Compiling entry function 'k1' for 'sm_90a'
ptxas info    : Used 168 registers, used 6 barriers
ptxas info    : Compiling entry function 'k0' for 'sm_90a'
ptxas info    : Used 168 registers, used 6 barriers
"""
    assert {n: k.serialised for n, k in ptxas_report(log).items()} == {"k0": True, "k1": False}
