"""Chains of small products: what a launch costs beside steps that follow one another in a kernel.

    python benches/chains.py save DIR    # no GPU needed: each program by plans whose kernels have more and more steps
    python benches/chains.py run DIR     # times them: in a CUDA graph, one call after the other, and called from Python

The cost model's TERM, TURN and FETCHED come from such a run (cost_models/roofline.py).
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from eqsat_neptune.extraction import parts

import eqsat_neptune as en
from eqsat_neptune import xp
from eqsat_neptune.programs import CASES, transformer_layers

SIZES = (1, 60, parts.LARGE)  # classes of a region that pieces are joined to
CALLS, ROUNDS = 20, 30
Made = tuple[Callable[..., Any], Sequence[en.TensorSpec]]


def spec(*shape: int) -> en.TensorSpec:
    return en.TensorSpec(shape, "float32")


def residual(n: int) -> Made:
    def f(x: Any, *weights: Any) -> Any:
        for w in weights:
            x = x + xp.tanh(x @ w)
        return x

    return f, [spec(8, 32), *[spec(32, 32)] * n]


def conditioned(n: int) -> Made:
    """Every layer is normalised and scaled by one vector."""

    def f(x: Any, e: Any, first: Any, *weights: Any) -> Any:
        c = xp.tanh(e @ first)
        for w in weights:
            h = x - xp.mean(x, axis=-1, keepdims=True)
            h = h / xp.sqrt(xp.mean(h * h, axis=-1, keepdims=True) + 1e-5)
            x = x + xp.tanh((h * (1 + c)) @ w)
        return x

    return f, [spec(8, 32), spec(8, 16), spec(16, 32), *[spec(32, 32)] * n]


def masked(n: int) -> Made:
    def f(x: Any, m: Any, *weights: Any) -> Any:
        for w in weights:
            s = xp.where((m > 0)[None, :], x @ x.mT, -xp.inf)
            x = x + xp.softmax(s, axis=-1) @ x @ w
        return x

    return f, [spec(16, 32), spec(16), *[spec(32, 32)] * n]


def rnn(n: int) -> Made:
    def f(xs: Any, h: Any, w: Any, u: Any) -> Any:
        for t in range(n):
            h = xp.tanh(xs[t] @ w + h @ u)
        return h

    return f, [spec(n, 4, 16), spec(4, 32), spec(16, 32), spec(32, 32)]


def lstm(n: int) -> Made:
    def f(xs: Any, h: Any, c: Any, w: Any, u: Any, b: Any) -> Any:
        for t in range(n):
            g = xs[t] @ w + h @ u + b
            i, j, o = (xp.sigmoid(g[:, 32 * k : 32 * k + 32]) for k in range(3))
            c = j * c + i * xp.tanh(g[:, 96:])
            h = o * xp.tanh(c)
        return h

    return f, [spec(n, 4, 16), spec(4, 32), spec(4, 32), spec(16, 128), spec(32, 128), spec(128)]


def newton_schulz(n: int) -> Made:
    def f(x: Any) -> Any:
        x = x / xp.sqrt(xp.sum(x * x))
        for _ in range(n):
            x = 1.5 * x - 0.5 * (x @ x.mT @ x)
        return x

    return f, [spec(64, 64)]


def layers(n: int) -> Made:
    x, *weights = CASES["layers1"].specs("small")
    return transformer_layers(n, 2), [x, *weights * n]


PROGRAMS: dict[str, Made] = {
    "residual": residual(8), "conditioned": conditioned(8), "masked": masked(5), "rnn": rnn(16), "lstm": lstm(4),
    "newton_schulz": newton_schulz(6), "transformer": layers(4),
}  # fmt: skip


def save(folder: Path, target: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for size in SIZES:
        parts.LARGE = size
        with tempfile.TemporaryDirectory() as cache:  # what was found with another size must not be taken
            os.environ["EQSAT_NEPTUNE_CACHE"] = cache
            for name, (fn, specs) in PROGRAMS.items():
                en.optimize(fn, target, specs=specs).save(folder / f"{name}-{size:03}.enk")


def run(folder: Path) -> None:
    import torch

    print(f"{'program':14} {'joined':>6} {'kernels':>7} {'predicted':>9} {'in a graph':>10} {'from Python':>11}  error")
    for path in sorted(folder.glob("*.enk")):
        kernel = en.load(path)
        rng = np.random.default_rng(0)
        arrays = [(rng.standard_normal(i.shape) / np.sqrt(max(i.shape[-1:], default=1))).astype(i.dtype) for i in kernel.program.inputs]
        args = [torch.tensor(a, device="cuda") for a in arrays]
        want = en.evaluate(kernel.program, *arrays)
        error = float(np.linalg.norm(kernel(*args).cpu().numpy() - want) / np.linalg.norm(want))
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            kernel(*args)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(CALLS):
                kernel(*args)
        inside = []
        for _ in range(ROUNDS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            inside.append(start.elapsed_time(end) / CALLS * 1e3)
        begin = time.perf_counter()
        for _ in range(CALLS * ROUNDS):
            kernel(*args)
        torch.cuda.synchronize()
        python = (time.perf_counter() - begin) / (CALLS * ROUNDS) * 1e6
        name, _, size = path.stem.partition("-")
        times = f"{kernel.cost.seconds * 1e6:9.1f} {np.median(inside):10.1f} {python:11.1f}"
        print(f"{name:14} {int(size):6} {len(kernel.plan.kernels):7} {times}  {error:.1e}", flush=True)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=["save", "run"])
    p.add_argument("folder", type=Path)
    p.add_argument("--target", default="cuda:sm_90a")
    args = p.parse_args()
    if args.what == "save":
        save(args.folder, args.target)
    else:
        run(args.folder)


if __name__ == "__main__":
    main()
