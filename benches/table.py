"""E-graph size, time of each stage and chosen plan, for every program of sections A to C.

    python benches/table.py [--target cuda:sm_90a] [--size full] [--json FILE] [NAME …]

The cache is not used.  Sizes are guarded by tests/test_sizes.py.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import eqsat_neptune as en
from eqsat_neptune.programs import CASES


def row(name: str, target: str, size: str) -> dict[str, Any]:
    """Compile one program from cold; times in seconds."""
    case = CASES[name]
    start = time.perf_counter()
    program = en.trace(case.function(size), *case.specs(size))
    traced = time.perf_counter()
    kernel = en.optimize(program, target)
    done = time.perf_counter()
    info = kernel._record.info
    return dict(
        name=name,
        nodes=info["egraph"]["nodes"],
        classes=info["egraph"]["classes"],
        trace=traced - start,
        saturation=info["seconds"]["saturation"],
        extraction=info["seconds"]["extraction"],
        total=done - start,
        kernels=len(kernel.plan.kernels),
        predicted=kernel.cost.seconds,
        bound=kernel.cost.bound,
    )


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("names", nargs="*", help="programs (default: all without a scan)")
    p.add_argument("--target", default="cuda:sm_90a")
    p.add_argument("--size", default="full", choices=("small", "full"))
    p.add_argument("--json", type=Path)
    a = p.parse_args()
    names = a.names or [n for n, c in CASES.items() if not c.needs_scan]
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["EQSAT_NEPTUNE_CACHE"] = cache
        row(names[0], a.target, "small")  # imports and first-use costs are not the program's
        print(f"{'program':24s} nodes classes  trace  satur. search  total ms  kernels  predicted µs  bound")
        for n in names:
            try:
                r = row(n, a.target, a.size)
            except en.EqsatError as e:
                print(f"{n:24s} {type(e).__name__}: {e}", flush=True)
                rows.append(dict(name=n, error=str(e)))
                continue
            rows.append(r)
            ms = [f"{1e3 * r[k]:6.0f}" for k in ("trace", "saturation", "extraction", "total")]
            print(
                f"{n:24s} {r['nodes']:5d} {r['classes']:7d} {' '.join(ms)}  {r['kernels']:10d}  {1e6 * r['predicted']:12.1f}  {r['bound']}",
                flush=True,
            )
    if a.json:
        a.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
