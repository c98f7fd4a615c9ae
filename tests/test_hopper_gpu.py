"""Pipelines of warpgroups on a Hopper GPU: run with `pytest -m gpu tests/test_hopper_gpu.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import eqsat_neptune as en
from eqsat_neptune.programs import CASES
from eqsat_neptune.runtime import available

pytestmark = pytest.mark.gpu
SHAPE = (1, 8, 1000, 128)


@pytest.fixture(scope="module")
def torch() -> Any:
    torch = pytest.importorskip("torch", reason="makes arrays on the GPU")
    if available() or not torch.cuda.is_available():
        pytest.skip(available() or "PyTorch sees no GPU")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU")
    torch.manual_seed(0)
    return torch


@pytest.fixture(scope="module")
def kernel() -> en.Kernel:
    case = CASES["prefill_causal"]
    k = en.optimize(en.trace(case.function("full"), *[en.TensorSpec(SHAPE, "bfloat16")] * 3), "cuda:sm_90a")
    assert k.plan.kernels[0].choices.get("warpgroups"), k.plan
    return k


def draw(torch: Any, *shape: int) -> Any:
    return torch.randn(shape, device="cuda").to(torch.bfloat16)


def reference(torch: Any, q: Any, k: Any, v: Any) -> Any:
    s = q.double() @ k.double().mT / q.shape[-1] ** 0.5
    keep = torch.ones(s.shape[-2:], dtype=torch.bool, device="cuda").tril()
    return torch.softmax(s.masked_fill(~keep, -torch.inf), -1) @ v.double()


def error(got: Any, want: Any) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


@pytest.mark.parametrize("how", ["contiguous", "transposed", "shifted by an element", "one head for all", "every other column"])
def test_inputs_in_any_place(torch: Any, kernel: en.Kernel, how: str) -> None:
    """Tensor maps where they can describe an input, else element by element."""
    b, h, n, d = SHAPE
    q, v = draw(torch, *SHAPE), draw(torch, *SHAPE)
    k = {
        "contiguous": lambda: draw(torch, *SHAPE),
        "transposed": lambda: draw(torch, b, n, h, d).transpose(1, 2),
        "shifted by an element": lambda: draw(torch, b * h * n * d + 1)[1:].view(SHAPE),
        "one head for all": lambda: draw(torch, b, 1, n, d).expand(SHAPE),
        "every other column": lambda: draw(torch, b, h, n, 2 * d)[..., ::2],
    }[how]()
    assert error(kernel(q, k, v), reference(torch, q, k, v)) < 3e-3


def test_streams_at_once(torch: Any, kernel: en.Kernel) -> None:
    """Kernels that count their tiles in memory do not share the count with one that runs beside them."""
    q, k, v = (draw(torch, *SHAPE) for _ in range(3))
    want = kernel(q, k, v)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    outs = []
    for n in range(40):
        with torch.cuda.stream(streams[n % 4]):
            outs.append(kernel(q, k, v))
    torch.cuda.synchronize()
    assert all(torch.equal(o, want) for o in outs)


def test_in_a_graph(torch: Any, kernel: en.Kernel) -> None:
    q, k, v = (draw(torch, *SHAPE) for _ in range(3))
    want = kernel(q, k, v)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = kernel(q, k, v)
        second = kernel(q, k, v)
    for _ in range(3):
        first.fill_(float("nan"))
        second.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(first, want) and torch.equal(second, want)


@pytest.mark.parametrize("captured", [False, True])
def test_a_row_of_kernels(torch: Any, captured: bool) -> None:
    """Each starts while the one ahead of it ends, reads what that one writes, and writes where an earlier one has read; between them,
    now and then, something that is no kernel of ours, or another stream."""
    rows, square = en.TensorSpec((512, 1024), "bfloat16"), en.TensorSpec((1024, 1024), "bfloat16")

    def centred(x: Any, w: Any) -> Any:
        xp = x.__array_namespace__()
        return xp.tanh(x - xp.mean(x, axis=-1, keepdims=True))

    steps_of = (lambda x, w: x + x @ w, lambda x, w: x * 2, centred)
    made = [en.optimize(f, "cuda:sm_90a", specs=(rows, square)) for f in steps_of]
    x, w = draw(torch, *rows.shape), draw(torch, *square.shape) / 32
    zeros, side = torch.empty_like(x), torch.cuda.Stream()

    def steps(apart: bool) -> Any:
        y = x
        for i in range(60):
            y = made[i % 3](y, w)
            if apart:
                torch.cuda.synchronize()
            elif i % 7 == 3:
                zeros.zero_()
                y = y + zeros
            elif i % 11 == 5:
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    z = made[1](y, w)
                torch.cuda.current_stream().wait_stream(side)
                y = made[1](z, w) / 4
        return y

    want = steps(apart=True)
    assert torch.isfinite(want).all() and want.any()
    if not captured:
        for _ in range(20):
            torch.cuda._sleep(50_000_000)  # clocks: all are queued before the first one runs, else the host is too slow for them to meet
            assert torch.equal(steps(apart=False), want)
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = steps(apart=False)
    for _ in range(20):
        got.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got, want)


def test_pivots_that_were_too_low(torch: Any) -> None:
    """Scores that outgrow the first tile's by more than float32 holds: such tiles are computed again."""
    shape = (1, 4, 1500, 128)
    case = CASES["prefill_global"]
    kernel = en.optimize(en.trace(case.function("full"), *[en.TensorSpec(shape, "bfloat16")] * 3), "cuda:sm_90a")
    assert kernel.plan.kernels[0].choices.get("pivot") == "frozen"
    q, k, v = (draw(torch, *shape) for _ in range(3))
    k[:, 1:3, 200:260] *= 300
    want = torch.softmax(q.double() @ k.double().mT / 128**0.5, -1) @ v.double()
    assert error(kernel(q, k, v), want) < 4e-3
    assert torch.equal(kernel(q, k, v), kernel(q, k, v))


@pytest.mark.parametrize("bad", ["nan", "inf"])
def test_what_is_not_finite_shows_where_it_counts(torch: Any, kernel: en.Kernel, bad: str) -> None:
    q, k, v = (draw(torch, *SHAPE) for _ in range(3))
    v[0, 2, 500] = float(bad)
    out = kernel(q, k, v)
    assert torch.isfinite(out[0, :2]).all() and torch.isfinite(out[0, 3:]).all() and torch.isfinite(out[0, 2, :384]).all()
    assert not torch.isfinite(out[0, 2, 500:]).any()


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("choices", [{}, {"cluster": 2}, {"cluster": 4}, {"hold": True}, {"cluster": 2, "hold": True}])
def test_schedules_of_a_product(torch: Any, choices: dict[str, object], turned: bool) -> None:
    """More tiles than multiprocessors, the last ones ragged."""
    m, n, k = 4000, 3584, 520
    shapes = (m, k), (n, k) if turned else (k, n)
    program = en.trace(lambda x, w: x @ (w.mT if turned else w), *(en.TensorSpec(s, "bfloat16") for s in shapes))
    old = en.optimize(program, "cuda:sm_90a")._record
    (first,) = old.plan.kernels
    given = {"warpgroups": 2, "stages": 4, **choices}
    axes = {a: replace(x, tile={m: 128, n: 256, k: 64}[x.extent]) for a, x in first.axes.items()}
    plan = replace(old.plan, kernels=(replace(first, axes=axes, choices=given),))
    kernel = en.Kernel(replace(old, plan=plan))
    assert ("cluster_sync()" in kernel.source.split("KERNEL(")[-1]) == ("cluster" in choices)
    x, w = (draw(torch, *s) for s in shapes)
    want = x.double() @ (w.double().mT if turned else w.double())
    first_result = kernel(x, w)
    assert error(first_result, want) < 3e-3
    for _ in range(20):
        assert torch.equal(kernel(x, w), first_result)


def test_near_ties_are_measured(torch: Any) -> None:
    case = CASES["rmsnorm_linear"]
    kernel = en.optimize(en.trace(case.function("full"), *case.specs("full", dtype="bfloat16")), "cuda", tune=2)
    assert "Measured on the device" in str(kernel.report())
    x, w = (draw(torch, *i.shape) for i in kernel.program.inputs)
    y = x.double()
    want = (y / torch.sqrt((y * y).mean(-1, keepdim=True) + 1e-6)) @ w.double()
    assert error(kernel(x, w), want) < 5e-3
