"""Fused attention on the CPU against unfused NumPy and PyTorch's SDPA, interleaved in one run.

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
from pathlib import Path

import numpy as np

import eqsat_neptune as en
from eqsat_neptune.programs import attention

# Seconds before each call: threads that spin while they wait for more work, as OpenMP's do, have gone to sleep by then.
PAUSE = 0.02


def interleaved(calls: dict, rounds: int) -> dict[str, float]:
    """Median seconds of each call.  They take turns, each round in another order, so that they share whatever else the machine does
    and none always follows the same one."""
    times: dict[str, list[float]] = {n: [] for n in calls}
    for f in calls.values():
        f()
    names = list(calls)
    for r in range(rounds):
        for n in names[r % len(names) :] + names[: r % len(names)]:
            time.sleep(PAUSE)
            start = time.perf_counter()
            calls[n]()
            times[n].append(time.perf_counter() - start)
    return {n: statistics.median(t) for n, t in times.items()}


def measure(heads: int, n: int, d: int, rounds: int) -> dict:
    spec = en.TensorSpec((1, heads, n, d), "float32")
    program = en.trace(attention, spec, spec, spec)
    kernel = en.optimize(program, "cpu")
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(spec.shape).astype(np.float32) for _ in range(3))
    calls = {"ours": lambda: kernel(q, k, v), "numpy": lambda: attention(q, k, v)}
    try:
        import torch
        import torch.nn.functional as F

        torch.set_num_threads(os.cpu_count() or 1)
        a, b, c = map(torch.from_numpy, (q, k, v))
        calls["torch"] = lambda: F.scaled_dot_product_attention(a, b, c)
    except ImportError:
        print("torch is not installed: no comparison with its SDPA")
    t = interleaved(calls, rounds)
    rows = slice(0, min(n, 64))
    s = q[0, 0, rows].astype(np.float64) @ k[0, 0].T.astype(np.float64) / d**0.5
    p = np.exp(s - s.max(-1, keepdims=True))
    want = (p / p.sum(-1, keepdims=True)) @ v[0, 0]
    error = float(np.abs(kernel(q, k, v)[0, 0, rows] - want).max() / np.abs(want).max())
    ratios = {f"{x}/ours": t[x] / t["ours"] for x in t if x != "ours"}
    print(
        f"heads {heads} n {n} d {d}: "
        + ", ".join(f"{x} {1e3 * s:.1f} ms" for x, s in t.items())
        + "; "
        + ", ".join(f"{x} {r:.2f}" for x, r in ratios.items())
        + f"; error {error:.1e}",
        flush=True,
    )
    return dict(heads=heads, n=n, d=d, seconds=t, ratios=ratios, error=error, predicted=kernel.cost.seconds)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--json", type=Path)
    a = p.parse_args()
    rows = [measure(8, 1024, 64, 30), measure(1, 8192, 64, 6)]
    if a.json:
        a.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
