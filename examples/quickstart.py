"""Optimise textbook attention for the CPU, check it against float64, and show what was found.

python examples/quickstart.py [--n 1024] [--target cpu]
"""

from __future__ import annotations

import argparse
import time

import numpy as np

import eqsat_neptune as en


def attention(q, k, v):
    """Nothing fused, the division where the textbook puts it."""
    xp = q.__array_namespace__()
    s = q @ k.mT / q.shape[-1] ** 0.5
    p = xp.exp(s - xp.max(s, axis=-1, keepdims=True))
    return (p / xp.sum(p, axis=-1, keepdims=True)) @ v


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument("--n", type=int, default=1024, help="sequence length")
    args.add_argument("--heads", type=int, default=8)
    args.add_argument("--dim", type=int, default=64)
    args.add_argument("--target", default="cpu", help='"cpu", or for example "cuda:sm_90a" (then only the report is shown)')
    a = args.parse_args()

    spec = en.TensorSpec((1, a.heads, a.n, a.dim), "float32")
    start = time.perf_counter()
    program = en.trace(attention, spec, spec, spec)
    kernel = en.optimize(program, target=a.target)
    print(f"optimised in {time.perf_counter() - start:.2f} s\n")
    print(kernel.report())
    print("\nHow it was derived\n" + kernel.explain())
    if a.target != "cpu":
        return

    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(spec.shape).astype(np.float32) for _ in range(3))
    out = kernel(q, k, v)
    exact = en.evaluate(program, q, k, v)
    start = time.perf_counter()
    kernel(q, k, v)
    fused = time.perf_counter() - start
    start = time.perf_counter()
    attention(q, k, v)
    plain = time.perf_counter() - start
    print(f"\nrelative error against float64: {np.abs(out - exact).max() / np.abs(exact).max():.1e}")
    print(f"fused {fused * 1e3:.1f} ms, the same function in plain NumPy {plain * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
