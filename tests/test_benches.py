"""What benches/h200.py does without a GPU: names, saving, references and peers, the processes around measurements, tables, the fit."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import eqsat_neptune as en

sys.path.insert(0, str(Path(__file__).parent.parent / "benches"))
import chains
import float64
import h200
import operators
import peers
import records
import repriced
import timing
import tuned

SMALL = dict(n=37, nq=3, m=19, f=11, d=8, hq=4, h=3, v=29, b=2, batch=2, r=3, dv=0)


def small(op: operators.Operator) -> dict[str, int]:
    full = op.case.full
    return {k: (4 if full["hkv"] == full["hq"] else 2) if k == "hkv" else SMALL[k] for k in full}


# ------------------------------------------------------------------ names and arguments


def test_names_of_files_say_what_is_in_them() -> None:
    for label in h200.cells():
        assert h200.Label.of(label.stem) == label
        op = operators.OPERATORS[label.name]
        op.case.arguments("full", **op.extents(label.sizes))  # raises for extents that the program does not have
    varied = h200.Label.of("prefill_global__4096_192_128__float16__lazy")
    assert varied.sizes == (4096, 192, 128) and varied.variant == "lazy" and not varied.base and varied.program.base
    assert len(h200.cells(quick=True)) < len(h200.cells()) / 2
    assert {x.extents for x in h200.cells(small=True, dtypes=("float32",))} == {"small"}
    with pytest.raises(ValueError, match="expected NAME__EXTENTS__DTYPE"):
        h200.Label.of("prefill_global")


def test_a_variant_is_read_strictly() -> None:
    assert h200.parse_variant("lazy:pivot=lazy,k0.stages=2,a3/64") == (
        "lazy",
        [("", "pivot", "lazy"), ("k0", "stages", 2), ("", "/a3", 64)],
    )
    for text in ("lazy", "base:stages=2", "a__b:stages=2", "x:stages", "x:stages=", "X:stages=2"):
        with pytest.raises(ValueError, match="expected"):
            h200.parse_variant(text)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["save", "x", "--only", "no such program"], "--list says"),
        (["save", "x", "--dtype", "int4"], "unknown dtype int4"),
        (["save", "x", "--only", "("], "unterminated"),
        (["save", "x", "--vary", "oops"], "no variant"),
        (["run", "x", "--peers", "cudnn,magic"], "unknown peer magic"),
        (["run", "x", "--sanitize", "nothing"], "invalid choice"),
    ],
)
def test_bad_arguments_are_explained(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        h200.main(argv)
    assert e.value.code == 2 and says in capsys.readouterr().err


def test_an_empty_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="nothing to run"):
        h200.main(["run", str(tmp_path)])


def test_list_saves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert h200.main(["save", str(tmp_path / "x"), "--list", "--quick", "--only", "^prefill_c", "--dtype", "float16"]) == 0
    assert capsys.readouterr().out.split() == ["prefill_causal__4096__float16", "prefill_causal__16384__float16"]
    assert not (tmp_path / "x").exists()


# ------------------------------------------------------------------ saving


def test_kernels_and_their_variants_are_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vary = ["--vary", "other:stages=2", "--vary", "same:nobody_reads_this=1"]
    assert h200.main(["save", str(tmp_path), "--only", "^rmsnorm_linear__1__", *vary]) == 0
    stems = sorted(p.stem for p in tmp_path.glob("*.json"))
    assert stems == [f"rmsnorm_linear__1__bfloat16__{v}" for v in ("base", "other")]
    assert "same is the same code as base" in capsys.readouterr().out
    base, other = (en.load(tmp_path / f"rmsnorm_linear__1__bfloat16__{v}.json") for v in ("base", "other"))
    assert other.plan.kernels[0].choices == {**base.plan.kernels[0].choices, "stages": 2} and other.source != base.source
    row = h200.described(other)
    assert row["predicted"] > 0 and "stages=2" in row["kernels"][0]["plan"] and row["kernels"][0]["parts"]["dram"] > 0


def test_a_row_says_which_schedule_runs() -> None:
    row = ("k0", "168 registers", "8 bytes spilled", "196720 bytes of shared memory")
    numbers = dict(kernel="k0", registers=168, spilled=8, shared=196720)
    assert h200.compiled_code(row) == numbers
    note = "as planned, spilled 900 bytes; runs with chain=False"
    assert h200.compiled_code((*row, note)) == {**numbers, "note": note}


def test_a_variant_with_another_tile_is_priced_anew() -> None:
    case = operators.OPERATORS["matmul"].case
    kernel = en.optimize(en.trace(case.function("full"), *case.specs("full", n=4096)), "cuda:sm_90a")
    (k,) = kernel.plan.kernels
    rows = next(a for a, x in k.axes.items() if x.role == "grid")
    other = h200.varied(kernel, [("", f"/{rows}", 16)])
    assert other.plan.kernels[0].axes[rows].tile == 16 and other.cost.seconds > 1.5 * kernel.cost.seconds
    assert kernel.plan.kernels == (k,)


def test_a_variant_keeps_axes_whole_that_are() -> None:
    case = operators.OPERATORS["prefill_global"].case
    kernel = en.optimize(en.trace(case.function("full"), *case.specs("full", n=512)), "cuda:sm_90a")
    with pytest.raises(ValueError, match="has all of a2 in a tile"):
        h200.varied(kernel, [("", "/a2", 64)])


# ------------------------------------------------------------------ references and peers, on the CPU


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch")


def instance(op: operators.Operator) -> tuple[Any, Any]:
    """(float64 result, inputs) at a small size."""
    fn, extents = op.case.function("full"), small(op)
    program = en.trace(fn, *op.case.specs("full", dtype="float32", **extents))
    ins = op.case.inputs("full", np.random.default_rng(0), dtype="float32", **extents)
    return en.evaluate(program, *ins), ins


@pytest.mark.parametrize("name", operators.OPERATORS)
def test_reference_and_peers_compute_the_program(name: str, torch: Any) -> None:
    op = operators.OPERATORS[name]
    want, ins = instance(op)
    args = [h200.to_torch(x, "cpu") for x in ins]
    wants = [(at, float64.in_float64(op.case.function("full"), part)) for at, part in float64.samples(op, args)]
    result = torch.from_numpy(np.array(want))
    assert float64.error(result, wants) < 1e-12
    assert float64.error(result * (1 + 1e-3), wants) == pytest.approx(1e-3, rel=1e-6)
    assert math.isnan(float64.error(torch.full_like(result, math.nan), wants))
    for programs in (peers.torch_programs(), peers.library_programs()):
        if name in programs:
            assert float64.error(programs[name](*args), wants) < 2e-6
    with torch.compiler.set_stance("force_eager"):
        found = peers.peer("flex", name, args, 0, 0) if "flex" in op.peers else None
        if found:
            assert float64.error(found[0](args)(), wants) < 2e-6
    named = {"library"} if name == "attention_dq" else {"cublas", "cublaslt"} & set(op.peers)
    for kind in sorted(named):
        found = peers.peer(kind, name, args, 0, 0)
        assert found and float64.error(found[0](args)(), wants) < 2e-6


def test_every_peer_that_an_operator_names_exists(torch: Any) -> None:
    for name, op in operators.OPERATORS.items():
        assert set(op.peers) <= set(h200.PEERS)
        assert name in peers.torch_programs() or not {"torch", "compile"} & set(op.peers)
        assert name in peers.library_programs() or "library" not in op.peers or name == "attention_dq"


def test_only_kept_pairs_count() -> None:
    n, w = 6000, operators.WINDOW
    j, i = np.arange(n), np.arange(n)[:, None]
    for kind, keep in (("global", j < n + i), ("causal", j <= i), ("windowed", (j <= i) & (i - j < w))):
        assert operators.Attention.of(f"prefill_{kind}").pairs(n, n) == keep.sum()
    assert operators.OPERATORS["prefill_causal"].flops((1, 2, 5, 8), (1, 2, 5, 8), (1, 2, 5, 4)) == 2 * 2 * 15 * 12  # type: ignore[misc]


def test_tuning_that_takes_too_long_is_cut(torch: Any) -> None:
    calls = []

    def slow(x: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            time.sleep(30)
        return x + 1

    with torch.compiler.set_stance("force_eager"):
        bind, note = peers.compiled(slow, [torch.ones(3)], 0.05)
        assert "cut after 0.05 s" in note and bind([torch.ones(3)])().tolist() == [2, 2, 2]
        assert peers.compiled(lambda x: x * 2, [torch.ones(3)], 30)[1] == "max-autotune"
        with pytest.raises(RuntimeError, match="own"):
            peers.compiled(raises, [torch.ones(3)], 30)


def raises(x: Any) -> Any:
    raise RuntimeError("an error of its own is no timeout")


# ------------------------------------------------------------------ attention by hand in other languages


INTERPRETED = """
import dataclasses, json, sys
import numpy as np, torch
sys.path[:0] = [{benches!r}, {root!r}]
import h200, float64, triton_attention as hand
from operators import OPERATORS, Attention
from eqsat_neptune.programs import windowed_attention

hand.L2 = 1  # one group of heads at a time, so that every group's first and last tile counts
kind, runs = json.loads(sys.argv[1])
op, f = OPERATORS["prefill_" + kind], Attention.of("prefill_" + kind)
case, errors = op.case, []
for n, window, dtype, tile in runs:
    if kind == "windowed":
        f = dataclasses.replace(f, window=window)
        case = dataclasses.replace(case, fn=windowed_attention(window))
    sizes = dict(b=2, hq=4, hkv=4 if case.full["hkv"] == case.full["hq"] else 2, n=n, d=24, dv=16)
    args = [h200.to_torch(x, "cpu") for x in case.inputs("full", np.random.default_rng(0), dtype=dtype, **sizes)]
    q, k, v, *slopes = args
    out = hand.attention(f, q, k, v, slopes[0] if slopes else None, hand.Tile(*tile))()
    want = float64.in_float64(case.function("full"), args)
    errors.append(float((out.double() - want).norm() / want.norm()))
print(json.dumps(errors))
"""


# ragged lengths; tiles with more keys than rows, and fewer
@pytest.mark.parametrize("kind", ["global", "causal", "gqa", "alibi", "softcap", "windowed"])
def test_triton_attention_computes_the_program(kind: str, torch: Any) -> None:
    pytest.importorskip("triton")
    root = Path(__file__).parent.parent
    text = INTERPRETED.format(benches=str(root / "benches"), root=str(root))
    runs = [(75, 20, "float32", (32, 16, 4, 2)), (75, 50, "float32", (16, 32, 4, 2)), (64, 33, "float16", (32, 32, 4, 2))]
    interpreter = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", text, json.dumps([kind, runs])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=interpreter, timeout=300)
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("this Triton's interpreter does not work with NumPy from 2.4 on")
    assert done.returncode == 0, done.stderr[-2000:]
    *single, half = json.loads(done.stdout.splitlines()[-1])
    assert len(single) == 2 and max(single) < 1e-5 and half < 2e-3


def test_triton_attention_has_as_many_tiles_as_fit(torch: Any) -> None:
    pytest.importorskip("triton")
    import triton_attention as hand

    for d in (64, 96, 128, 192, 256):
        for t in hand.tiles(d):
            wide, stages = hand.padded(d), t.stages
            assert 2 * wide * (t.rows + 2 * stages * t.keys) <= 227 << 10


@pytest.mark.parametrize("kind", ["global", "causal", "gqa", "alibi", "softcap", "windowed"])
def test_tilelang_attention_becomes_a_pipeline_of_warpgroups(kind: str, torch: Any) -> None:
    tilelang = pytest.importorskip("tilelang")
    import tilelang_attention as hand

    f, q, kv = operators.Attention.of(f"prefill_{kind}"), (1, 4, 5000, 128), (1, 2 if kind == "gqa" else 4, 5000, 128)
    code = hand.program(f, hand.tiles(128)[0], q, kv, kv, "bfloat16")
    config = {"tl.enable_fast_math": True}
    with tilelang.tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}) as target, tilelang.transform.PassContext(config=config):
        source = tilelang.lower(code, target=target, enable_host_codegen=False, enable_device_compile=False).kernel_source
    assert source.count("tma_load(") == 3 and "warpgroup_reg_dealloc" in source and "wgmma_rs<" in source
    assert ("tanhf(" in source) == bool(f.cap) and ("slopes[" in source) == f.alibi


@pytest.mark.parametrize("kind", ["triton", "tilelang"])
def test_attention_by_hand_is_prefill_only_and_needs_its_language(kind: str, torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, kind, None)
    monkeypatch.delitem(sys.modules, f"{kind}_attention", raising=False)
    x = torch.zeros(1, 2, 8, 16)
    assert peers.peer(kind, "decode_causal", [x, x, x], 0, 1.0) is None
    with pytest.raises(ImportError, match=kind):
        peers.peer(kind, "prefill_causal", [x, x, x], 0, 1.0)
    assert all(kind in op.peers for name, op in operators.OPERATORS.items() if name.startswith("prefill"))


def test_copies_exceed_the_cache() -> None:
    for moved in (2_245_120, 16_777_216, 67_371_008, 4 << 30):
        n = timing.copies(moved, 50 << 20)
        assert n >= 2 and n * moved >= 4 * (50 << 20) and (n == 2 or (n - 1) * moved < 4 * (50 << 20))
    assert timing.copies(0, 50 << 20) == 1000 and timing.copies(1000, 0) == 2


def test_the_fastest_that_works_is_taken(torch: Any) -> None:
    def way(value: float, takes: float) -> Any:
        def call() -> Any:
            return torch.full((3,), value)

        call.takes = takes  # type: ignore[attr-defined]
        return lambda args: call

    ways = [("slow", way(1.0, 3.0)), ("wrong", way(1.2, 0.1)), ("broken", raises), ("fast", way(1.001, 2.0))]
    bind, note = tuned.fastest(ways, [], 60.0, lambda c: c.takes)  # type: ignore[attr-defined]
    assert bind([])().tolist() == pytest.approx([1.001] * 3)
    assert note.startswith("fast, the fastest of 2; wrong: ArithmeticError") and "broken: RuntimeError: an error" in note
    bind, note = tuned.fastest(ways, [], -1.0, lambda c: c.takes)  # type: ignore[attr-defined]
    assert bind([])().tolist() == [1.0] * 3 and note.count("not tried") == 3
    for none, error in ((ways[2:3], RuntimeError), ([], ValueError)):
        with pytest.raises(error):
            tuned.fastest(none, [], 60.0)
    nan = [("right", way(1.0, 2.0)), ("poisoned", way(math.nan, 1.0))]
    assert tuned.fastest(nan, [], 60.0, lambda c: c.takes)[1].startswith("right")  # type: ignore[attr-defined]


# ------------------------------------------------------------------ measuring, with the CPU in the GPU's place


class OnCpu:
    """A kernel that torch tensors can be given."""

    def __init__(self, kernel: Any, spoil: float = 0.0):
        self.kernel, self.spoil, self.calls = kernel, spoil, 0
        self.program, self.plan, self.cost = kernel.program, kernel.plan, kernel.cost

    def __call__(self, *args: Any) -> Any:
        import torch

        self.calls += 1
        return torch.from_numpy(self.kernel(*[x.numpy() for x in args])) + self.spoil * self.calls


class Ticks(timing.Clock):
    def __init__(self, calls: Any):
        assert len(calls) > 1  # they are short
        self.call, self.graph, self.seconds = calls[-1], None, 1e-3
        self.call()
        self.turns, self.joules, self.megahertz = [], [], []

    def turn(self, meter: Any, seconds: float = 0.0) -> None:
        self.call()
        self.turns.append(2e-3)
        self.joules.append(math.nan)
        self.megahertz.append(math.nan)


@pytest.fixture(scope="module")
def lora() -> Any:
    case = operators.OPERATORS["lora"].case
    return en.optimize(en.trace(case.function("full"), *case.specs("full", dtype="float32", n=8)), "cpu")


def measured(monkeypatch: pytest.MonkeyPatch, kernels: dict[str, Any], **job: Any) -> tuple[dict[str, Any], list[tuple]]:
    import torch

    monkeypatch.setattr(h200.en, "load", lambda path: kernels[Path(path).stem])
    monkeypatch.setattr(h200, "Clock", Ticks)
    sent: list[tuple] = []
    settings = dict(
        files=[Path(f"{s}.json") for s in kernels], peers=h200.PEERS, check=False, sustained=True, compile=0.0, without={}
    )
    with torch.compiler.set_stance("force_eager"):
        h200.Group(h200.Job(**{**settings, **job}), lambda *m: sent.append(m), "cpu").run()
    return {m[1]: m[2] for m in sent if m[0] == "row"}, sent


def test_variants_are_checked_and_timed_with_their_peers(lora: Any, torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    base, drifts, wrong = "lora__8__float32__base", "lora__8__float32__drifts", "lora__8__float32__wrong"

    class Wrong(OnCpu):
        def __call__(self, *args: Any) -> Any:
            return super().__call__(*args) * 1.01

    class Breaks(OnCpu):
        def __call__(self, *args: Any) -> Any:
            raise en.EqsatError("no such kernel")

    breaks = "lora__8__float32__breaks"
    kernels = {base: OnCpu(lora), drifts: OnCpu(lora, 1e-4), wrong: Wrong(lora), breaks: Breaks(lora)}
    rows, sent = measured(monkeypatch, kernels, without={"compile": "hung"})
    assert rows[base]["ok"] and rows[base]["repeatable"] and rows[base]["error"] < 1e-6
    assert 0 <= rows[base]["poisoned"] <= 10
    assert not rows[drifts]["repeatable"] and not rows[drifts]["ok"]
    assert rows[wrong]["repeatable"] and not rows[wrong]["ok"] and rows[wrong]["error"] == pytest.approx(0.01, rel=1e-3)
    assert "no such kernel" in rows[breaks]["failed"]
    assert rows[base]["bytes"] == 4 * (8 * 256 + 256 * 4096 + 256 * 16 + 16 * 4096 + 8 * 4096) and rows[base]["unit"] == "GB/s"
    assert set(rows[base]["peers"]) == {"torch", "compile"} and rows[base]["peers"]["compile"] == {"failed": "hung"}
    assert rows[base]["peers"]["torch"]["error"] < 1e-6 and rows[base]["peers"]["torch"]["sustained"] == 2e-3
    assert rows[base]["sustained"] == 2e-3 and "joules" not in rows[base] and "peers" not in rows[drifts]
    assert ("at", "sustained") in sent and [m for m in sent if m[0] == "failed"] == [("failed", breaks, rows[breaks]["failed"])]


def test_small_programs_are_only_checked(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = {}
    for dtype, name in (("float32", "prefill_causal"), ("float32", "kmeans_assign")):
        case = h200.CASES[name]
        kernels[f"{name}__small__{dtype}"] = en.optimize(
            en.trace(case.function("small"), *case.specs("small", dtype=dtype)), "cpu"
        )

    class Several(OnCpu):
        def __call__(self, *args: Any) -> Any:
            outs = self.kernel(*[x.numpy() for x in args])
            return tuple(map(torch.from_numpy, outs)) if isinstance(outs, tuple) else torch.from_numpy(outs)

    for stem, kernel in kernels.items():
        rows, _ = measured(monkeypatch, {stem: Several(kernel)})
        assert rows[stem]["ok"] and rows[stem]["extents"] == "small" and "seconds" not in rows[stem]


# ------------------------------------------------------------------ processes


def unreliable(connection: Any) -> None:
    """A worker that hangs at what is called hangs, and so on."""
    connection.send(("hello", dict(device="none")))
    while (job := connection.recv()) is not None:
        for path in job.files:
            connection.send(("at", path.stem))
            if "hangs" in path.stem:
                time.sleep(60)
            if "dies" in path.stem:
                os._exit(3)
            if "breaks" in path.stem:
                connection.send(("failed", path.stem, "illegal address"))
                os._exit(3)
            connection.send(("row", path.stem, h200.Label.of(path.stem).fields | dict(ok=True, error=math.nan)))
        for kind in ("torch", "copy"):
            if kind not in job.without:
                connection.send(("at", kind))
                if kind == "copy" and "peer" in job.files[0].stem:
                    os._exit(4)
        connection.send(("row", job.files[0].stem, h200.Label.of(job.files[0].stem).fields | dict(ok=True, without=job.without)))
        connection.send(("done",))


def test_what_hangs_or_crashes_loses_its_row_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stems = [f"lora__1__float16__{v}" for v in ("base", "breaks", "dies", "fine", "hangs", "uncompiled")]
    stems += ["matmul__4096__float16", "peer__1__float16"]
    for s in stems:
        (tmp_path / f"{s}.json").write_text("")
    (tmp_path / "commit").write_text("saved\n")
    monkeypatch.setattr(h200, "compile_all", lambda paths: {
        p.stem: dict(failed="no compiler") if "uncompiled" in p.stem else dict(compiled=[dict(kernel="k0", registers=40)]) for p in paths
    })  # fmt: skip
    monkeypatch.setattr(h200, "commit", lambda: "")
    out = tmp_path / "results" / "record.json"
    rows = h200.run(tmp_path, out, h200.Options(limit=0.5, compile=0), unreliable)["rows"]
    record = json.loads(out.read_text())
    assert record["rows"] == h200.clean(rows) and not list(out.parent.glob("*.tmp"))
    assert (
        record["status"] == 0
        and record["commit"] == "saved"
        and record["device"] == "none"
        and record["command"].startswith("python ")
    )
    by = {h200.Label(r["case"], "_".join(map(str, r["extents"])), r["dtype"], r["variant"]).stem: r for r in rows}
    assert set(by) == set(stems)
    assert {s.rpartition("_")[2] for s, r in by.items() if "failed" in r} == {"breaks", "dies", "hangs", "uncompiled"}
    assert (
        "no sign" in by[stems[4]]["failed"]
        and by[stems[1]]["failed"] == "illegal address"
        and "ended (3)" in by[stems[2]]["failed"]
    )
    assert by[stems[0]]["compiled"] == [dict(kernel="k0", registers=40)]
    assert "ended (4)" in by["peer__1__float16"]["without"]["copy"]
    assert "FAILED" in capsys.readouterr().out


def broken(connection: Any) -> None:
    raise SystemExit(5)


def test_a_process_that_does_not_start_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lora__1__float16.json").write_text("")
    monkeypatch.setattr(h200, "compile_all", lambda paths: {p.stem: {} for p in paths})
    with pytest.raises(SystemExit, match=r"does not start: it ended \(5\)"):
        h200.run(tmp_path, None, h200.Options(), broken)


def test_the_budget_starts_nothing_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lora__1__float16.json").write_text("")
    monkeypatch.setattr(h200, "compile_all", lambda paths: {p.stem: {} for p in paths})
    assert h200.run(tmp_path, None, h200.Options(budget=-1.0), unreliable)["rows"] == []
    assert "not started" in capsys.readouterr().out


def complains(connection: Any) -> None:
    """As under a sanitizer that found something."""
    unreliable(connection)
    os._exit(1)


def test_what_the_sanitizer_finds_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lora__1__float16.json").write_text("")
    monkeypatch.setattr(h200, "compile_all", lambda paths: {p.stem: {} for p in paths})
    record = h200.run(tmp_path, None, h200.Options(), complains)
    assert record["status"] == 1 and record["rows"][0]["ok"]
    seen = []

    class Done:
        returncode = 7

    monkeypatch.setattr(h200.subprocess, "run", lambda command, check: seen.append(command) or Done)
    assert h200.main(["run", str(tmp_path), "--sanitize", "racecheck", "--only", "lora"]) == 7
    (command,) = seen
    assert command[:3] == ["compute-sanitizer", "--tool", "racecheck"] and "--sanitize" not in command
    assert command[-7:] == ["run", str(tmp_path), "--only", "lora", "--limit", "600", "--check"]


def test_numbers_are_read_from_the_report() -> None:
    row = ("k0", "168 registers", "8 bytes spilled", "163840 bytes of shared memory")
    assert h200.compiled_code(row) == dict(kernel="k0", registers=168, spilled=8, shared=163840)


# ------------------------------------------------------------------ tables and the fit


def synthetic(case: str, size: float, variant: str = "base", **factor: float) -> dict[str, Any]:
    """A row whose measured time is the model's with the resources scaled, and a little noise of a fixed kind."""
    parts = dict(tensor=40e-6 * size, special=15e-6 * size, shared=25e-6, dram=20e-6 * math.sqrt(size), latency=2e-6, launch=3e-6)
    if case == "decode_causal":
        parts |= dict(tensor=1e-6, special=1e-6, dram=90e-6 * size)
    if variant == "lean":
        parts |= dict(special=5e-6 * size, shared=10e-6)
    busy = [parts[k] for k in ("tensor", "special", "shared")]
    seconds = 3e-6 + max(max(busy) + 0.3 * (sum(busy) - max(busy)) + 2e-6, parts["dram"])
    launches = ((seconds, parts),)
    measured = records.model_seconds(records.Point(case, (), 1.0, seconds, launches), factor)
    peers = dict(cudnn=dict(seconds=measured * 1.1, sustained=measured, error=0.002), fa3=dict(failed="ImportError: none"))
    return dict(
        case=case, extents=[int(size * 1000)], dtype="bfloat16", variant=variant, error=0.0021, repeatable=True, ok=True,
        seconds=measured, sustained=measured * 1.25, rate=1.0 / measured, work=1.0, unit="TFLOP/s", predicted=seconds,
        kernels=[dict(name="k0", plan=f"a0 64/8 grid; warps=4, stages={2 if variant == 'base' else 3}", seconds=seconds, parts=parts)],
        compiled=[dict(kernel="k0", registers=168, spilled=0)], **(dict(peers=peers) if variant == "base" else {}),
    )  # fmt: skip


def rows_of(**factor: float) -> list[dict[str, Any]]:
    cases = ("prefill_global", "prefill_causal", "decode_causal", "matmul")
    return [synthetic(c, s, v, **factor) for c in cases for s in (0.5, 1.0, 3.0, 8.0) for v in ("base", "lean")]


def test_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [*rows_of(tensor=1.3), h200.failed_row("lora__1__float16", "gave no sign for 60 s")]
    f = tmp_path / "r.json"
    h200.write(f, dict(rows=rows))
    assert h200.main(["table", str(f)]) == 0
    text = capsys.readouterr().out
    first = text.splitlines()[0]
    assert "prefill_global 500 bfloat16 [base]" in first and "cudnn 1.10|0.80" in first and "best 1.10|0.80" in first
    assert "fa3 failed" in first and "FAILED gave no sign" in text and f"{len(rows) - 1} of {len(rows)} rows are good" in text
    lean = next(x for x in text.splitlines() if x.strip().startswith("lean"))
    base, other = rows[0], rows[1]
    assert f"{base['seconds'] / other['seconds']:.3f}" in lean and "k0.stages=3" in lean and "warps" not in lean
    assert "prefill                  against cudnn    1.10|0.80" in text
    assert records.ablations([rows[0], rows[2]]) == ""


def test_records_are_valid_json_whatever_was_measured(tmp_path: Path) -> None:
    f = tmp_path / "deep" / "r.json"
    h200.write(f, dict(rows=[dict(error=math.nan, peers=dict(a=dict(seconds=math.inf)), list=(1, 2.5))]))
    assert json.loads(f.read_text())["rows"] == [dict(error="nan", peers=dict(a=dict(seconds="inf")), list=[1, 2.5])]
    f.write_text("[]")
    with pytest.raises(SystemExit, match="no record"):
        records.read_rows([f])


def test_rank_correlation() -> None:
    assert records.rank_correlation([1, 2, 3, 4], [10, 20, 30, 35]) == pytest.approx(1)
    assert records.rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert records.rank_correlation([1, 2, 2, 4], [1, 3, 2, 4]) == pytest.approx(0.9486832980505138)  # ties share a rank
    assert math.isnan(records.rank_correlation([1, 1], [1, 2]))


def test_the_fit_finds_what_was_wrong_with_the_machine() -> None:
    found = records.points(rows_of(tensor=1.5, dram=1.2), sustained=False)
    factors = records.fitted(found, ridge=1e-4)
    assert factors["tensor"] == pytest.approx(1.5, rel=0.03) and factors["dram"] == pytest.approx(1.2, rel=0.03)
    assert factors["launch"] == pytest.approx(1.0, abs=0.15)
    measured = [x.measured for x in found]
    before = records.median_error([x.predicted for x in found], measured)
    held = records.held_out(found)
    assert records.median_error(held, measured) < 0.5 * before
    untouched = records.points(rows_of(), sustained=False)
    assert all(f == pytest.approx(1.0, abs=1e-6) for f in records.fitted(untouched).values())
    assert all(records.model_seconds(x, {}) == pytest.approx(x.predicted) for x in untouched)


def test_best_of_variants_counts_ties_within_5_percent() -> None:
    def point(group: str, measured: float) -> records.Point:
        return records.Point("p", (group,), measured, 1.0, ())

    found = [point("a", 1.0), point("a", 1.04), point("b", 1.0), point("b", 1.2), point("alone", 1.0)]
    assert records.best_of_variants(found, [2, 1, 2, 1, 1]) == (1, 2)
    assert records.best_of_variants(found, [1, 2, 1, 2, 1]) == (2, 2)


def test_fit_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    f = tmp_path / "r.json"
    h200.write(f, dict(rows=[*rows_of(tensor=1.3), h200.failed_row("lora__1__float16", "hung")]))
    assert h200.main(["fit", str(f), "--single"]) == 0
    text = capsys.readouterr().out
    assert "32 rows, 4 programs; single" in text and "figures fitted, held out" in text and "of 16" in text
    assert "tensor" in text and "not applied" in text and "decode_causal" in text
    h200.write(f, dict(rows=[h200.failed_row("lora__1__float16", "hung")]))
    with pytest.raises(SystemExit, match="no row"):
        h200.main(["fit", str(f)])


RESULTS = Path(__file__).parent.parent / "benches" / "results"


@pytest.fixture(scope="module")
def tiles() -> list[dict[str, Any]]:
    """Variants of tiles: few long rows, few short ones, and what special functions bound."""
    wanted = {("prefill_gqa", 1024), ("prefill_gqa", 2048), ("prefill_causal", 2048), ("prefill_softcap", 8192)}
    rows = records.read_rows([RESULTS / "2026-11-30_h200_tiles.json"])
    return [r for r in rows if (r["case"], r["extents"][0]) in wanted and len(r["extents"]) == 1 and r["dtype"] == "bfloat16"]


def test_the_model_ranks_the_measured_tiles(tiles: list[dict[str, Any]]) -> None:
    found, lost = repriced.pipelines(tiles, "cuda:sm_90a")
    assert len(found) == len(tiles) == 8 and not lost
    points = records.points([x.row for x in found])
    now = repriced.prices(found, "cuda:sm_90a")
    assert records.best_of_variants(points, now) == (4, 4)
    assert records.median_error(now, [x.measured for x in found]) < 0.12
    with repriced.constant("PASSING", 1.4e-6):  # as if nothing ran beside a tile's start and end
        assert records.best_of_variants(points, repriced.prices(found, "cuda:sm_90a"))[0] < 4
    assert repriced.prices(found, "cuda:sm_90a") == now


def test_constants_are_fitted_without_the_program_that_is_judged(tiles: list[dict[str, Any]]) -> None:
    found, _ = repriced.pipelines(tiles, "cuda:sm_90a")
    best, predicted = repriced.held_out(found, "cuda:sm_90a", "PASSING")
    assert best.keys() == {"prefill_gqa", "prefill_causal", "prefill_softcap"}
    assert set(best.values()) <= set(repriced.TRIED["PASSING"])
    with repriced.constant("PASSING", best["prefill_gqa"]):
        again = repriced.prices(found, "cuda:sm_90a")
    mine = [i for i, x in enumerate(found) if x.row["case"] == "prefill_gqa"]
    assert [predicted[i] for i in mine] == [again[i] for i in mine]


def test_fit_prices_records_anew(tiles: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    f = tmp_path / "r.json"
    other = next(r for r in records.read_rows([RESULTS / "2026-11-30_h200_tiles.json"]) if r["case"] == "softmax")
    h200.write(f, dict(rows=[*tiles, other]))
    assert h200.main(["fit", str(f), "--anew"]) == 0
    text = capsys.readouterr().out
    assert "8 pipelines of warpgroups" in text and "by the model as it is" in text and "PASSING held out" in text
    h200.write(f, dict(rows=[other]))
    assert h200.main(["fit", str(f), "--anew"]) == 0 and "no row is a pipeline" in capsys.readouterr().out


# ------------------------------------------------------------------ chains of small products


@pytest.mark.parametrize("name", chains.PROGRAMS)
def test_chains_are_programs(name: str) -> None:
    fn, specs = chains.PROGRAMS[name]
    program = en.trace(fn, *specs)
    rng = np.random.default_rng(1)
    result = en.evaluate(program, *[(rng.standard_normal(x.shape) / 8).astype(x.dtype) for x in program.inputs])
    assert np.isfinite(result).all() and np.any(result)
