"""Fused attention on the CPU against unfused NumPy and PyTorch's SDPA, taking turns with each in one run.

    env -u OPENBLAS_CORETYPE python benches/cpu.py [--json FILE]

Targets: at B 8, N 1024, D 64 (fp32) at least as fast as unfused NumPy and within 1.25× of PyTorch; at N 8192 at least 1.5×
faster than unfused NumPy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import eqsat_neptune as en
from eqsat_neptune.programs import attention

PAUSE = 0.03  # seconds before each call: OpenMP's threads, which spin while they wait for more work, sleep by then


def interleaved(ours: Callable[[], object], peer: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Median seconds of each of two calls that take turns, so that they share whatever else the machine does.  (Two only: NumPy's
    BLAS threads spin for longer than a pause, and would take a processor from a third.)"""
    times: tuple[list[float], list[float]] = [], []
    for r in range(rounds + 1):
        for f, t in ((ours, times[0]), (peer, times[1])):
            time.sleep(PAUSE)
            start = time.perf_counter()
            f()
            if r:
                t.append(time.perf_counter() - start)
    return statistics.median(times[0]), statistics.median(times[1])


def measure(heads: int, n: int, d: int, rounds: int) -> dict:
    spec = en.TensorSpec((1, heads, n, d), "float32")
    program = en.trace(attention, spec, spec, spec)
    kernel = en.optimize(program, "cpu")
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(spec.shape).astype(np.float32) for _ in range(3))
    peers: dict[str, Callable[[], object]] = {"numpy": lambda: attention(q, k, v)}
    try:
        import torch
        import torch.nn.functional as F

        torch.set_num_threads(os.cpu_count() or 1)
        a, b, c = map(torch.from_numpy, (q, k, v))
        peers["torch"] = lambda: F.scaled_dot_product_attention(a, b, c)
    except ImportError:
        print("torch is not installed: no comparison with its SDPA")
    seconds = {}
    for name, peer in peers.items():
        mine, theirs = interleaved(lambda: kernel(q, k, v), peer, rounds)
        seconds[name] = {"ours": mine, name: theirs}
        time.sleep(0.5)
    rows = slice(0, min(n, 64))
    s = q[0, 0, rows].astype(np.float64) @ k[0, 0].T.astype(np.float64) / d**0.5
    p = np.exp(s - s.max(-1, keepdims=True))
    want = (p / p.sum(-1, keepdims=True)) @ v[0, 0]
    error = float(np.abs(kernel(q, k, v)[0, 0, rows] - want).max() / np.abs(want).max())
    ratios = {f"{x}/ours": t[x] / t["ours"] for x, t in seconds.items()}
    print(
        f"heads {heads} n {n} d {d}: "
        + ", ".join(f"{x} {1e3 * t[x]:.1f} ms beside ours {1e3 * t['ours']:.1f} ms" for x, t in seconds.items())
        + "; "
        + ", ".join(f"{x} {r:.2f}" for x, r in ratios.items())
        + f"; error {error:.1e}",
        flush=True,
    )
    return dict(heads=heads, n=n, d=d, seconds=seconds, ratios=ratios, error=error, predicted=kernel.cost.seconds)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--json", type=Path)
    a = p.parse_args()
    rows = [measure(8, 1024, 64, 30), measure(1, 8192, 64, 6)]
    if a.json:
        a.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
