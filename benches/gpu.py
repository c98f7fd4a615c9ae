"""Attention operators on one NVIDIA GPU: accuracy and time beside cuDNN, FlashAttention-3 and FlexAttention in one run.

    python benches/gpu.py save DIR [--target cuda:sm_90a] [--dtype bfloat16] [--quick]      # needs egglog, no GPU
    python benches/gpu.py run DIR [--out benches/results/NAME.json] [--peers cudnn,fa3,flex]  # needs a GPU, no egglog

Every output is poisoned before the checked call and compared with float64 on some rows of some heads.  Time is the median; calls
under 100 µs run inside a CUDA graph, with the L2 flushed between calls.  TFLOP/s counts kept pairs only; GB/s counts K, V, Q, O once.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import subprocess
import sys
import traceback
from pathlib import Path

from gpu_cases import compile_all

import eqsat_neptune as en

PREFILL = ("prefill_global", "prefill_causal", "prefill_gqa", "prefill_alibi", "prefill_softcap", "prefill_windowed")
DECODE = ("decode_causal", "decode_gqa", "decode_alibi", "decode_softcap")
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
BATCHES = ((1, 1024), (1, 8192), (1, 65536), (16, 4096), (16, 8192), (16, 16384))
WINDOW, CAP = 4096, 50.0


def cells(quick: bool) -> list[tuple[str, dict[str, int]]]:
    lengths, batches = ((4096, 16384), ((1, 8192), (16, 8192), (1, 65536))) if quick else (LENGTHS, BATCHES)
    return [(c, {"n": n}) for c in PREFILL for n in lengths] + [(c, {"batch": b, "n": n}) for c in DECODE for b, n in batches]


# ------------------------------------------------------------------ saving (no GPU)


def save(folder: Path, target: str, dtype: str, quick: bool) -> None:
    from eqsat_neptune.programs import CASES

    folder.mkdir(parents=True, exist_ok=True)
    for name, ext in cells(quick):
        case = CASES[name]
        program = en.trace(case.function("full"), *case.specs("full", dtype=dtype, **ext))
        kernel = en.optimize(program, target)
        kernel.save(folder / f"{name}__{'_'.join(map(str, ext.values()))}__{dtype}.json")
        print(f"{name} {ext}: {len(kernel.plan.kernels)} kernels, {kernel.cost.seconds * 1e6:.0f} µs predicted", flush=True)


# ------------------------------------------------------------------ the operators in torch: reference and peers


def flags(name: str) -> dict:
    kind = name.partition("_")[2]
    return dict(
        decode=name.startswith("decode"),
        causal=name.startswith("prefill") and kind != "global",
        alibi=kind == "alibi",
        cap=CAP if kind in ("softcap", "windowed") else 0.0,
        window=WINDOW if kind == "windowed" else 0,
    )


def reference(name, q, k, v, slopes, b, h, rows):
    """float64 output rows of one head."""
    import torch

    f = flags(name)
    g = q.shape[1] // k.shape[1]
    s = q[b, h, rows].double() @ k[b, h // g].double().T / math.sqrt(q.shape[-1])
    if f["cap"]:
        s = f["cap"] * torch.tanh(s / f["cap"])
    n = k.shape[2]
    i = torch.tensor([n - 1] if f["decode"] else rows, device=q.device)[:, None]
    j = torch.arange(n, device=q.device)[None]
    if f["alibi"]:
        s = s + slopes[h].double() * (j - i)
    keep = torch.ones_like(s, dtype=torch.bool)
    if f["causal"]:
        keep &= j <= i
    if f["window"]:
        keep &= i - j < f["window"]
    return torch.softmax(s.masked_fill(~keep, -math.inf), -1) @ v[b, h // g].double()


def peer(kind, name, q, k, v, slopes):
    """A callable giving (b, h, n, d), or None if the peer has no such operator."""
    import torch
    import torch.nn.functional as F

    f = flags(name)
    grouped = q.shape[1] != k.shape[1]
    if kind == "cudnn":
        if f["cap"] or f["alibi"] or f["window"]:
            return None
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def run():
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return F.scaled_dot_product_attention(q, k, v, is_causal=f["causal"], enable_gqa=grouped)

        return run
    if kind == "fa3":
        if f["alibi"]:
            return None
        import fa3_fwd_interface as fa3

        a, b, c = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        kw = dict(causal=f["causal"])
        if f["cap"]:
            kw["softcap"] = f["cap"]
        if f["window"]:
            kw["window_size"] = (f["window"] - 1, 0)
        if f["decode"]:
            kw["num_splits"] = 0

        def run():
            r = fa3.flash_attn_func(a, b, c, **kw)
            return (r[0] if isinstance(r, tuple) else r).transpose(1, 2)

        return run
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    n, last = k.shape[2], k.shape[2] - 1

    def score(s, b, h, i, j):
        if f["cap"]:
            s = CAP * torch.tanh(s / CAP)
        if f["alibi"]:
            s = s + slopes[h] * (j - (last if f["decode"] else i))
        return s

    def keep(b, h, i, j):
        return (j <= i) & (i - j < WINDOW) if f["window"] else j <= i

    mask = create_block_mask(keep, None, None, q.shape[2], n, device="cuda") if f["causal"] else None
    fn = torch.compile(flex_attention, dynamic=False)
    mod = score if f["cap"] or f["alibi"] else None
    return lambda: fn(q, k, v, score_mod=mod, block_mask=mask, enable_gqa=grouped)


# ------------------------------------------------------------------ timing


def graph_seconds(f, calls=10, repeats=11) -> float:
    """Median of a call inside a CUDA graph, L2 flushed before each; the cost of the flushes is taken out."""
    import torch

    flush = torch.empty(64 << 20, device="cuda", dtype=torch.int32)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            f()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()

    def capture(body):
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            for _ in range(calls):
                flush.zero_()
                body()
        return g

    def median(g):
        times = []
        for _ in range(repeats + 1):
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record()
            g.replay()
            b.record()
            torch.cuda.synchronize()
            times.append(a.elapsed_time(b))
        return sorted(times[1:])[repeats // 2]

    return (median(capture(f)) - median(capture(lambda: None))) / calls / 1e3


def time_of(f, small: bool) -> float:
    from triton.testing import do_bench

    return graph_seconds(f) if small else do_bench(f, warmup=8, rep=40, return_mode="median") / 1e3


def kept_pairs(name: str, nq: int, nk: int) -> float:
    f = flags(name)
    if not f["causal"]:
        return nq * nk
    w = f["window"]
    return w * (w + 1) / 2 + (nq - w) * w if w and nq > w else nq * (nq + 1) / 2


def measure(path: Path, peers: list[str]) -> dict:
    """Check and time one saved kernel, and the peers that have its operator."""
    import numpy as np
    import torch

    from eqsat_neptune.programs import CASES

    name, ext, dtype = path.stem.split("__")
    sizes = list(map(int, ext.split("_")))
    row: dict = dict(case=name, extents=sizes, dtype=dtype)
    kernel = en.load(path)
    gen = torch.Generator(device="cuda").manual_seed(0)
    arguments = CASES[name].arguments("full", **dict(zip(("n",) if len(sizes) == 1 else ("batch", "n"), sizes)))
    args = []
    for i, (spec, arg) in enumerate(zip(kernel.program.inputs, arguments)):
        if i < 3:
            x = torch.randn(spec.shape, device="cuda", generator=gen)
        else:
            x = torch.from_numpy(np.array(arg.draw(np.random.default_rng(0), spec.shape), dtype=np.float32)).cuda()
        args.append(x.to(getattr(torch, spec.dtype)))
    q, k, v, slopes = (*args, None)[:4]
    nq = q.shape[2]
    rows = sorted({0, nq // 3, nq // 2, max(nq - 2, 0), nq - 1})

    def error(x) -> float:
        worst = 0.0
        for b, h in ((0, 0), (q.shape[0] - 1, q.shape[1] - 1), (0, q.shape[1] // 2)):
            want = reference(name, q, k, v, slopes, b, h, rows)
            worst = max(worst, ((x[b, h, rows].double() - want).norm() / want.norm()).item())
        return worst

    kernel(*args).fill_(math.nan)  # the allocator hands the poisoned block out again
    out, again = kernel(*args), kernel(*args)
    torch.cuda.synchronize()
    row |= dict(repeatable=torch.equal(out.view(torch.int16), again.view(torch.int16)), error=error(out))
    row |= dict(predicted=kernel.cost.seconds, kernels=len(kernel.plan.kernels))
    flop = 4 * q.shape[0] * q.shape[1] * kept_pairs(name, nq, k.shape[2]) * q.shape[3]
    size = 2 * (2 * k.numel() + 2 * q.numel())
    small = flop / 5e14 + size / 4e12 < 1e-4
    work = size / 1e9 if name.startswith("decode") else flop / 1e12
    row["seconds"] = time_of(lambda: kernel(*args), small)
    row["rate"] = work / row["seconds"]
    for p in peers:
        try:
            f = peer(p, name, q, k, v, slopes)
            if f is not None:
                e = error(f())
                row[p] = dict(rate=work / time_of(f, small), error=e)
        except Exception as exc:
            row[p] = dict(failed=f"{type(exc).__name__}: {exc}"[:200])
    return row


def run(folder: Path, out: Path | None, peers: list[str]) -> bool:
    import torch

    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    head = dict(date=str(datetime.date.today()), device=torch.cuda.get_device_name(), commit=commit, command=" ".join(sys.argv))
    rows, good = [], True
    compile_all(folder)
    for path in sorted(folder.glob("*.json")):
        try:
            row = measure(path, peers)
            ok = row["error"] < 4e-3 and row["repeatable"]
        except Exception as exc:
            traceback.print_exc(limit=4)
            row, ok = dict(case=path.stem, failed=f"{type(exc).__name__}: {exc}"[:500]), False
        rows.append(row)
        good &= ok
        show = " ".join(f"{p} {row[p].get('rate', math.nan):7.1f}" for p in peers if p in row)
        rate, error = row.get("rate", math.nan), row.get("error", math.nan)
        print(f"{path.stem:38s} rate {rate:7.1f} err {error:.5f} {'ok ' if ok else 'BAD'} {show}", flush=True)
        if out:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps(dict(**head, rows=rows), indent=1))
    return good


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = p.add_subparsers(dest="command", required=True)
    s = sub.add_parser("save")
    s.add_argument("folder", type=Path)
    s.add_argument("--target", default="cuda:sm_90a")
    s.add_argument("--dtype", default="bfloat16")
    s.add_argument("--quick", action="store_true")
    r = sub.add_parser("run")
    r.add_argument("folder", type=Path)
    r.add_argument("--out", type=Path)
    r.add_argument("--peers", default="cudnn,fa3,flex")
    a = p.parse_args()
    if a.command == "save":
        save(a.folder, a.target, a.dtype, a.quick)
    else:
        sys.exit(0 if run(a.folder, a.out, [x for x in a.peers.split(",") if x]) else 1)


if __name__ == "__main__":
    main()
