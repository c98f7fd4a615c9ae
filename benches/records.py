"""What the records of h200.py say: tables of speedups and of ablations, and how good the cost model is."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# ------------------------------------------------------------------ tables


def median(values: Iterable[float]) -> float:
    return float(np.median(list(values)))


def number(x: Any, form: str, missing: str = "–") -> str:
    return format(x, form) if isinstance(x, int | float) and math.isfinite(x) else missing


def ratio(of: Any, to: Any) -> float:
    return of / to if isinstance(of, int | float) and isinstance(to, int | float) and to > 0 else math.nan


def speedups(row: Mapping[str, Any], p: Mapping[str, Any]) -> tuple[float, float]:
    """(single, sustained): how many times as long as ours a peer takes."""
    return ratio(p.get("seconds"), row.get("seconds")), ratio(p.get("sustained"), row.get("sustained"))


def both(pair: tuple[float, float]) -> str:
    return f"{number(pair[0], '.2f')}|{number(pair[1], '.2f')}"


def title(row: Mapping[str, Any]) -> str:
    variant = f" [{row['variant']}]" if row.get("variant") else ""
    extents = row["extents"] if isinstance(row["extents"], str) else "_".join(map(str, row["extents"]))
    return f"{row['case']} {extents} {row['dtype']}{variant}"


def good(row: Mapping[str, Any]) -> bool:
    return row.get("ok", "failed" not in row)


def line(row: Mapping[str, Any]) -> str:
    """One row; after each peer (its time / ours), single|sustained."""
    if "failed" in row:
        return f"{title(row):48s} FAILED {row['failed']}"
    text = f"{title(row):48s} err {number(row.get('error'), '.5f')} {'ok ' if good(row) else 'BAD'}"
    text += "" if row.get("repeatable", True) else " NOT REPEATABLE"
    if "seconds" in row:
        text += f" {number(row['seconds'] * 1e6, '9.1f')} µs {number(row['rate'], '8.1f')} {row.get('unit', '')}"
        text += f" (sustained {number(ratio(row.get('work'), row.get('sustained')), '.1f')}; predicted ×{number(ratio(row.get('predicted'), row['seconds']), '.2f')})"
    peers = row.get("peers", {})
    for name, p in peers.items():
        text += f"  {name} " + ("failed" if "failed" in p else both(speedups(row, p)))
    real = [speedups(row, p) for n, p in peers.items() if n != "copy" and "failed" not in p]
    if real:
        text += "  best " + both((min(a for a, _ in real), min(b for _, b in real)))
    spilled = sum(c.get("spilled", 0) for c in row.get("compiled", []))
    notes = [f"  {c['kernel']}: {c['note']}" for c in row.get("compiled", []) if "note" in c]
    return text + (f"  SPILLS {spilled} bytes" if spilled else "") + "".join(notes)


def variants(rows: Iterable[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Rows of the same program that were measured, where there are several."""
    found: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for r in rows:
        if "seconds" in r and "failed" not in r:
            found.setdefault((r["case"], str(r["extents"]), r["dtype"]), []).append(r)
    return [sorted(g, key=lambda r: r.get("variant") not in ("", None, "base")) for g in found.values() if len(g) > 1]


def ablations(rows: Sequence[Mapping[str, Any]]) -> str:
    """Variants relative to the base one: its time / theirs."""
    out = []
    for group in variants(rows):
        base = group[0]
        out.append(f"{title({**base, 'variant': ''})}: base {base['seconds'] * 1e6:.1f} µs")
        out.append(
            f"    {'variant':20s} {'single':>7s} {'sustained':>9s} {'predicted':>9s} {'joules':>7s}  registers  choices changed"
        )
        for r in group:
            fields = (ratio(base.get(k), r.get(k)) for k in ("seconds", "sustained", "predicted", "joules"))
            single, sustained, predicted, joules = (number(x, ".3f") for x in fields)
            registers = "/".join(str(c.get("registers", "?")) for c in r.get("compiled", []))
            spilled = sum(c.get("spilled", 0) for c in r.get("compiled", []))
            changed = changed_choices(base, r) + (f"; spills {spilled} bytes" if spilled else "") + ("" if good(r) else "; WRONG")
            out.append(
                f"    {r.get('variant') or 'base':20s} {single:>7s} {sustained:>9s} {predicted:>9s} {joules:>7s}  {registers:9s}  {changed}"
            )
    return "\n".join(out)


def changed_choices(base: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    def items(r: Mapping[str, Any]) -> list[str]:
        return [f"{k['name']}.{x}" for k in r.get("kernels", []) for x in re.split(r"[,;] ", k["plan"]) if x]

    had = set(items(base))
    return ", ".join(x for x in items(row) if x not in had)


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """Geometric means of the speedups by family of programs and peer."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for r in rows:
        for name, p in r.get("peers", {}).items():
            if "failed" not in p and "seconds" in p:
                family = r["case"].partition("_")[0] if r["case"].startswith(("prefill", "decode", "matmul")) else r["case"]
                found.setdefault((family, name), []).append(speedups(r, p))

    def mean(values: Iterable[float]) -> float:
        logs = [math.log(v) for v in values if math.isfinite(v) and v > 0]
        return math.exp(sum(logs) / len(logs)) if logs else math.nan

    out = [
        f"{f:24s} against {p:8s} {both((mean(a for a, _ in v), mean(b for _, b in v)))}  ({len(v)})"
        for (f, p), v in found.items()
    ]
    bad = sum(not good(r) for r in rows)
    return "\n".join([*out, f"{len(rows) - bad} of {len(rows)} rows are good"])


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    return "\n\n".join(x for x in ("\n".join(map(line, rows)), ablations(rows), summary(rows)) if x)


def read_rows(files: Sequence[Path]) -> list[dict[str, Any]]:
    rows = []
    for f in files:
        record = json.loads(f.read_text())
        if not isinstance(record, dict) or not isinstance(record.get("rows"), list):
            raise SystemExit(f"{f} is no record of `run`")
        rows += record["rows"]
    return rows


# ------------------------------------------------------------------ judging the cost model


@dataclass(frozen=True)
class Point:
    """A measured kernel.  parts: predicted seconds by resource, for each launch."""

    program: str
    group: tuple[str, ...]
    measured: float
    predicted: float
    launches: tuple[tuple[float, dict[str, float]], ...]


def points(rows: Iterable[Mapping[str, Any]], sustained: bool = True) -> list[Point]:
    out = []
    for r in rows:
        measured = (r.get("sustained") if sustained else None) or r.get("seconds")
        if "failed" in r or not measured or not r.get("predicted"):
            continue
        kernels = r.get("kernels")
        found = [(k["seconds"], k["parts"]) for k in kernels if "parts" in k] if isinstance(kernels, list) else []
        group = (r["case"], str(r["extents"]), r["dtype"])
        out.append(Point(r["case"], group, float(measured), float(r["predicted"]), tuple(found)))
    return out


def ranks(x: np.ndarray) -> np.ndarray:
    """Equal values share the mean of their places."""
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's; NaN where it is not defined."""
    x, y = (ranks(np.asarray(v, float)) for v in (a, b))
    return float(np.corrcoef(x, y)[0, 1]) if len(x) > 1 and x.std() and y.std() else math.nan


def median_error(predicted: Sequence[float], measured: Sequence[float]) -> float:
    return median(abs(p / m - 1) for p, m in zip(predicted, measured)) if len(measured) else math.nan


def best_of_variants(found: Sequence[Point], predicted: Sequence[float]) -> tuple[int, int]:
    """(how often the predicted best is within 5% of the measured best, number of programs with variants)."""
    groups: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for x, p in zip(found, predicted):
        groups.setdefault(x.group, []).append((p, x.measured))
    several = [g for g in groups.values() if len(g) > 1]
    return sum(min(g)[1] <= 1.05 * min(m for _, m in g) for g in several), len(several)


OUTSIDE = ("dram", "latency", "launch")  # parts that do not compete for the issue slots of a multiprocessor


def model_seconds(x: Point, factor: Mapping[str, float]) -> float:
    """The roofline's sum again with every resource's time scaled; as recorded where parts are missing.  How much of the lesser
    resources shows is inferred from the recorded price."""
    if not x.launches:
        return x.predicted
    total = 0.0
    for seconds, parts in x.launches:

        def combined(f: Mapping[str, float], share: float, parts: Mapping[str, float] = parts) -> float:
            busy = [v * f.get(k, 1.0) for k, v in parts.items() if k not in OUTSIDE]
            most = max(busy, default=0.0)
            dram, latency, launch = (parts.get(k, 0.0) * f.get(k, 1.0) for k in OUTSIDE)
            return launch + max(most + share * (sum(busy) - most) + latency, dram)

        low, high = combined({}, 0.0), combined({}, 1.0)
        share = min(max((seconds - low) / (high - low), 0.0), 1.0) if high > low else 0.0
        total += combined(factor, share) * (seconds / combined({}, share) if combined({}, share) > 0 else 1.0)
    return total


def fitted(found: Sequence[Point], ridge: float = 0.05) -> dict[str, float]:
    """Factors of each resource's seconds: least squares over the logarithms of measured / modelled, held near 1 where the data say
    nothing."""
    names = sorted({k for x in found for _, parts in x.launches for k, v in parts.items() if v > 0})
    logs = np.log([x.measured for x in found])

    def residual(z: np.ndarray) -> np.ndarray:
        f = dict(zip(names, np.exp(z)))
        return np.concatenate([np.log([model_seconds(x, f) for x in found]) - logs, math.sqrt(ridge) * z])

    z, damping = np.zeros(len(names)), 1e-2
    r = residual(z)
    for _ in range(60):
        jacobian = (
            np.stack([(residual(z + 1e-4 * e) - r) / 1e-4 for e in np.eye(len(names))], 1) if names else np.zeros((len(r), 0))
        )
        step = np.linalg.solve(jacobian.T @ jacobian + damping * np.eye(len(names)), -jacobian.T @ r)
        new = residual(z + step)
        if new @ new < r @ r:
            done = r @ r - new @ new < 1e-9 * (r @ r)
            z, r, damping = z + step, new, damping / 3
            if done:
                break
        else:
            damping *= 4
            if damping > 1e6:
                break
    return dict(zip(names, np.exp(z).tolist()))


def held_out(found: Sequence[Point]) -> list[float]:
    """Every point's modelled seconds, with factors fitted to the other programs only."""
    of = {p: fitted([x for x in found if x.program != p]) for p in sorted({x.program for x in found})}
    return [model_seconds(x, of[x.program]) for x in found]


def judgement(name: str, found: Sequence[Point], predicted: Sequence[float]) -> str:
    """One line: how well these predictions agree with what was measured."""
    measured = [x.measured for x in found]
    hits, several = best_of_variants(found, predicted)
    slack = [p / m for p, m in zip(predicted, measured)]
    return (
        f"{name:28s} median error {100 * median_error(predicted, measured):5.1f}%   median predicted / measured {median(slack):.2f}   "
        f"rank correlation {number(rank_correlation(predicted, measured), '.3f')}   within programs {number(within(found, predicted), '.3f')}   "
        f"best of variants within 5%: {hits} of {several}"
    )


def fit(files: Sequence[Path], target: str, sustained: bool = True, anew: bool = False) -> str:
    """The report of `fit`.  anew: search the programs of pipelines again, and price these by the model as it is now, too."""
    rows = read_rows(files)
    found = points(rows, sustained)
    if not found:
        raise SystemExit("no row has both a measured and a predicted time")
    recorded = [x.predicted for x in found]
    out = [
        f"{len(found)} rows, {len({x.program for x in found})} programs; {'sustained where there is one' if sustained else 'single'}"
    ]
    out.append(judgement("as recorded", found, recorded))
    if len({x.program for x in found}) > 1 and any(x.launches for x in found):
        out.append(judgement("figures fitted, held out", found, held_out(found)))
        factors = fitted(found)
        out.append(judgement("figures fitted, all rows", found, [model_seconds(x, factors) for x in found]))
        out += ["", *proposed(factors, target)]
    out += ["", "median predicted / measured by program:"]
    for p in sorted({x.program for x in found}):
        mine = [x.predicted / x.measured for x in found if x.program == p]
        out.append(f"    {p:28s} {median(mine):5.2f}  from {min(mine):.2f} to {max(mine):.2f}  ({len(mine)})")
    if anew:
        import repriced

        out += ["", repriced.report(rows, target, lambda name, some, p: judgement(name, points(some, sustained), p))]
    return "\n".join(out)


def within(found: Sequence[Point], predicted: Sequence[float]) -> float:
    """Mean rank correlation among the variants of one program, where there are at least three."""
    groups: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for x, p in zip(found, predicted):
        groups.setdefault(x.group, []).append((p, x.measured))
    each = [rank_correlation(*zip(*g)) for g in groups.values() if len(g) > 2]
    each = [c for c in each if math.isfinite(c)]
    return sum(each) / len(each) if each else math.nan


def proposed(factors: Mapping[str, float], target: str) -> list[str]:
    """What the fit would have cost_models/machines.py say; nothing is applied."""
    from eqsat_neptune.cost_models import machine_for

    machine, out = machine_for(target), [f"proposed for {machine_for(target).name}, not applied:"]
    for name, f in factors.items():
        for figure in ("step", "block") if name == "latency" else (name,):
            now = getattr(machine, figure, 0.0)
            new = now * f if name in ("latency", "launch") else now / f
            shown = f"{now:.3g} → {new:.3g}" if now else "no such figure"
            out.append(f"    {figure:10s} seconds × {f:.2f}: {shown}")
    return out
