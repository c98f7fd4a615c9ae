"""Every program of sections A to C, small and ragged, on a GPU against the float64 interpreter.

    python benches/gpu_cases.py save DIR [--target cuda:sm_90a] [--dtypes float32,bfloat16,float16]   # needs egglog, no GPU
    python benches/gpu_cases.py run DIR [--sanitize]                                                  # needs a GPU, no egglog

Outputs are poisoned first and two calls must give the same bits.  --sanitize runs one process of all kernels under memcheck.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import eqsat_neptune as en
from eqsat_neptune.programs import CASES

# relative to the largest element: a few roundings of the dtype
TOLERANCE = {"float64": 1e-10, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


def save(folder: Path, target: str, dtypes: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, case in CASES.items():
        for dtype in dtypes:
            try:
                program = en.trace(case.function("small"), *case.specs("small", dtype=dtype))
                en.optimize(program, target).save(folder / f"{name}__{dtype}.json")
            except en.EqsatError as e:
                print(f"{name} {dtype}: {type(e).__name__}: {e}", flush=True)


def compile_all(folder: Path) -> None:
    """Fill the cache with machine code, many compilers at a time; what fails will say so again when it runs."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for path in folder.glob("*.json"):
            pool.submit(lambda p: en.load(p).compile(), path)


def run(folder: Path) -> bool:
    import torch

    bad = total = 0
    compile_all(folder)
    for path in sorted(folder.glob("*.json")):
        name, dtype = path.stem.split("__")
        total += 1
        try:
            kernel = en.load(path)
            ins = CASES[name].inputs("small", np.random.default_rng(0), dtype=dtype)
            want = en.evaluate(kernel.program, *ins)
            args = [to_torch(x) for x in ins]
            first, second = kernel(*args), kernel(*args)
            torch.cuda.synchronize()
            text = []
            for w, a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (want, first, second))):
                x, y = a.double().cpu().numpy(), b.double().cpu().numpy()
                error = np.abs(x - w).max(initial=0.0) / (np.abs(w).max(initial=0.0) or 1.0)
                if not error <= TOLERANCE[dtype]:
                    text.append(f"relative error {error:.2e}")
                if not np.array_equal(x, y, equal_nan=True):
                    text.append("not repeatable")
        except Exception as e:
            text = [f"{type(e).__name__}: {e}"[:300]]
            if not isinstance(e, en.EqsatError):
                traceback.print_exc(limit=3)
        bad += bool(text)
        if text:
            print(f"{path.stem:40s} {'; '.join(text)}", flush=True)
    print(f"{total - bad} passed, {bad} failed")
    return not bad


def to_torch(x: np.ndarray):
    import torch

    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16).copy()).cuda().view(torch.bfloat16)
    return torch.from_numpy(np.array(x)).cuda()


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = p.add_subparsers(dest="command", required=True)
    s = sub.add_parser("save")
    s.add_argument("folder", type=Path)
    s.add_argument("--target", default="cuda:sm_90a")
    s.add_argument("--dtypes", default="float32,bfloat16,float16")
    r = sub.add_parser("run")
    r.add_argument("folder", type=Path)
    r.add_argument("--sanitize", action="store_true")
    a = p.parse_args()
    if a.command == "save":
        save(a.folder, a.target, a.dtypes.split(","))
    elif a.sanitize:
        sys.exit(
            subprocess.run(
                ["compute-sanitizer", "--error-exitcode", "1", sys.executable, __file__, "run", str(a.folder)]
            ).returncode
        )
    else:
        sys.exit(0 if run(a.folder) else 1)


if __name__ == "__main__":
    main()
