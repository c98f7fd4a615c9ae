"""Programs on one NVIDIA GPU: accuracy, time beside their peers, and the cost model's error, in one run.

    python benches/h200.py save DIR [--dtype bfloat16] [--quick | --small] [--only TEXT] [--vary NAME:choice=value,…]
    python benches/h200.py run DIR [--out FILE] [--sustained] [--peers …] [--budget SECONDS] [--check [--sanitize TOOL]]
    python benches/h200.py table FILE…
    python benches/h200.py fit FILE…

`save` searches (no GPU), `run` measures (no egglog), `table` prints a record again, `fit` judges the cost model by records (with --anew
also the model as it is now, and with each constant of pipelines fitted without the program that is judged).
A saved kernel is NAME__EXTENTS__DTYPE[__VARIANT].json; "base" is the variant that others are compared with, and peers run once for
all variants of a program.  --small saves every program of the library at its ragged test size, to be checked and not timed.

Checks: ten calls into poisoned outputs give the same bits, and agree with the program itself in float64 (whole heads, or rows).
Times: "single" is the median of calls with a cold L2, inside a CUDA graph where calls are short; "sustained" has kernel, variants
and peers of one program take turns of 0.15 s of calls back to back, and is the median over rounds of a turn's mean: the card is limited by
power, so this is the figure to compare.  Short calls do so in a CUDA graph, on so many copies of the inputs that the L2 holds none of them
when its turn comes (in records before 2026-12: after a flush each, and the flushes' time taken off).  TFLOP/s count kept pairs only; GB/s
count every input and output once.

Attention's peers: PyTorch's fused kernels (cudnn, flash), FlashAttention-3 (fa3), FlexAttention (flex), and kernels written here in Triton
(triton_attention.py) and TileLang (tilelang_attention.py), which try their tiles for up to 10 s a program.  A peer whose package is
absent, or that fails, is recorded as failed.

Measuring is another process's work: a kernel or peer that hangs there or breaks the context loses its own row only.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import math
import multiprocessing
import os
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from float64 import error, in_float64, samples
from operators import OPERATORS, Operator
from peers import bound, peer
from records import ablations, fit, line, read_rows, report, summary
from timing import Clock, Meter, cache_bytes, copies, synchronize
from tuned import Bind

import eqsat_neptune as en
from eqsat_neptune.programs import CASES, Arg, Case

TOLERANCE = {"float64": 1e-10, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}  # small: of the largest element
LIMIT = {"float64": 1e-10, "float32": 1e-5, "float16": 4e-3, "bfloat16": 4e-3}  # full: relative error in the 2-norm
PEERS = ("cudnn", "flash", "fa3", "flex", "triton", "tilelang", "torch", "cublas", "cublaslt", "compile", "library", "copy")
STEP = 60.0  # seconds that a kernel or peer may take before it is given up
ROUNDS = 3  # of turns


# ------------------------------------------------------------------ the names of saved kernels


@dataclass(frozen=True)
class Label:
    """What a file's name says.  extents: numbers joined by "_", or "small", or "" for the program's own."""

    name: str
    extents: str
    dtype: str
    variant: str = ""

    @staticmethod
    def of(stem: str) -> Label:
        parts = stem.split("__")
        if len(parts) not in (3, 4):
            raise ValueError(f"{stem}: expected NAME__EXTENTS__DTYPE or NAME__EXTENTS__DTYPE__VARIANT")
        return Label(*parts)

    @property
    def stem(self) -> str:
        return "__".join((self.name, self.extents, self.dtype, *([self.variant] if self.variant else [])))

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(int(x) for x in self.extents.split("_") if x.isdigit())

    @property
    def fields(self) -> dict[str, Any]:
        """As a record has them."""
        return dict(case=self.name, extents=list(self.sizes) or self.extents, dtype=self.dtype, variant=self.variant)

    @property
    def program(self) -> Label:
        return replace(self, variant="")

    @property
    def base(self) -> bool:
        return self.variant in ("", "base")


# ------------------------------------------------------------------ saving (no GPU)


def cells(quick: bool = False, small: bool = False, only: str = "", dtypes: Sequence[str] = ("bfloat16",)) -> list[Label]:
    """What `save` saves; `only`: a regular expression over the names of the files."""
    if small:
        found = [Label(name, "small", d) for name in CASES for d in dtypes]
    else:
        listed = ((name, s) for name, op in OPERATORS.items() for s in (op.quick if quick else op.sizes))
        found = [Label(name, "_".join(map(str, s)), d) for name, s in listed for d in dtypes]
    return [x for x in found if re.search(only, x.stem)]


def parse_variant(text: str) -> tuple[str, list[tuple[str, str, Any]]]:
    """ "NAME:stages=2,k0.pivot=lazy,a3/128" → the name, and (kernel or "", choice or "/axis", value) for each change."""
    name, colon, rest = text.partition(":")
    changes = []
    for item in rest.split(",") if colon else []:
        m = re.fullmatch(r"(?:(k\d+)\.)?(?:(\w+)=(\w+)|([\w.]+)/(\d+))", item)
        if not m:
            raise ValueError(
                f"{item!r} is no change: expected choice=value or axis/tile, with kernel. before it for one kernel only"
            )
        value: Any = m[5] or m[3]
        value = int(value) if value.isdigit() else {"true": True, "false": False}.get(value.lower(), value)
        changes.append((m[1] or "", m[2] or "/" + m[4], value))
    if not re.fullmatch(r"[a-z0-9]\w*", name) or name == "base" or "__" in name or not changes:
        raise ValueError(f"{text!r} is no variant: expected NAME:choice=value,… (NAME is not base)")
    return name, changes


def varied(kernel: Any, changes: list[tuple[str, str, Any]]) -> Any:
    """The kernel with other schedule choices or tiles, priced again; its plan says what the schedule came to."""
    from eqsat_neptune.codegen.cuda.arch import cuda_arch
    from eqsat_neptune.codegen.cuda.emit import warpgroup_choices
    from eqsat_neptune.codegen.lower import lower
    from eqsat_neptune.cost_models import model_for
    from eqsat_neptune.cost_models.base import Sizes
    from eqsat_neptune.extraction.plan import Cost

    from eqsat_neptune.kernel import Kernel, Record

    model, plan, kernels = model_for(kernel.target), kernel.plan, []
    for k in plan.kernels:
        mine = [(what, value) for where, what, value in changes if where in ("", k.name)]
        tiles = {what[1:]: int(v) for what, v in mine if what[0] == "/" and what[1:] in k.axes}
        if whole := [a for a in tiles if k.axes[a].role == "whole" and tiles[a] < k.axes[a].extent]:
            raise ValueError(f"{k.name} has all of {', '.join(whole)} in a tile")
        axes = {a: replace(x, tile=min(tiles.get(a, x.tile), x.extent)) for a, x in k.axes.items()}
        k = replace(k, axes=axes, choices={**k.choices, **{c: v for c, v in mine if c[0] != "/"}})
        program = lower(k, plan.buffers, plan.compute_dtype)
        if k.choices.get("warpgroups"):
            found = warpgroup_choices(program, plan.buffers, cuda_arch(str(kernel.target).partition(":")[2]))
            k = replace(k, choices=found or k.choices)
        tile, extent = ({a: np.array([float(getattr(x, f))]) for a, x in axes.items()} for f in ("tile", "extent"))
        price = model.cost(program, Sizes(tile, extent), detail=True)
        if math.isfinite(seconds := float(price.seconds[0])):
            parts, detail = ({n: float(v[0]) for n, v in d.items()} for d in (price.parts, price.detail))
            k = replace(k, cost=Cost(seconds, parts, max(parts, key=parts.__getitem__), dict(detail)))
        kernels.append(k)
    old = kernel._record
    return Kernel(Record(old.program, old.target, replace(plan, kernels=tuple(kernels)), dict(old.info)))


def save(folder: Path, labels: Sequence[Label], target: str, vary: Sequence[str] = ()) -> list[Path]:
    """Search and write one file for each label, and for each of its variants.  Returns the files."""
    from tqdm import tqdm

    variants = [parse_variant(v) for v in vary]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "commit").write_text(commit() + "\n")
    written = []
    for label in tqdm(labels, desc="search", disable=None):
        small = label.extents == "small"
        case = CASES[label.name] if small else OPERATORS[label.name].case
        extents = {} if small else OPERATORS[label.name].extents(label.sizes)
        size = "small" if small else "full"
        try:
            kernel = en.optimize(en.trace(case.function(size), *case.specs(size, dtype=label.dtype, **extents)), target)
        except en.EqsatError as e:
            tqdm.write(f"{label.stem}: {type(e).__name__}: {e}")
            continue
        made = {"base" if variants else "": kernel}
        sources = {kernel.source: "base"} if variants else {}
        for name, changes in variants:
            try:
                other = varied(kernel, changes)
                source = other.source
            except Exception as e:  # a schedule given by hand may fit no emitter
                tqdm.write(f"{label.stem}: {name}: {type(e).__name__}: {e}")
                continue
            if source in sources:
                tqdm.write(f"{label.stem}: {name} is the same code as {sources[source]}")
                continue
            sources[source], made[name] = name, other
        for name, k in made.items():
            path = folder / (replace(label, variant=name).stem + ".json")
            k.save(path)
            written.append(path)
        tqdm.write(
            f"{label.stem}: {len(kernel.plan.kernels)} kernels, {kernel.cost.seconds * 1e6:.0f} µs predicted, {len(made)} files"
        )
    return written


def commit() -> str:
    def git(*args: str) -> str:
        try:
            done = subprocess.run(["git", *args], capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
        except OSError:
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    head = git("rev-parse", "HEAD")
    return head + ("+" if head and git("status", "--porcelain", "--untracked-files=no") else "")


# ------------------------------------------------------------------ measuring (the worker process)


def flat(x: Any) -> list[Any]:
    return list(x) if isinstance(x, tuple) else [x]


def bits(x: Any) -> Any:
    import torch

    return x.contiguous().reshape(-1).view(torch.uint8)


def repeated(kernel: Any, args: Sequence[Any], times: int = 10) -> tuple[list[Any], dict[str, Any]]:
    """Outputs, whether as many calls gave the same bits, and how many of them found their outputs poisoned: the allocator hands out
    again what the call before had."""
    import torch

    outs, same, poisoned = flat(kernel(*args)), True, 0
    first: list[Any] = []
    for _ in range(times):
        for x in outs:
            x.fill_(math.nan if x.is_floating_point() else 77)
        places = [x.data_ptr() for x in outs]
        del outs
        outs = flat(kernel(*args))
        poisoned += [x.data_ptr() for x in outs] == places
        if not first:
            first = [x.clone() for x in outs]
        same = same and all(torch.equal(bits(a), bits(b)) for a, b in zip(first, outs))
    return first, dict(repeatable=same, poisoned=poisoned)


def to_torch(x: np.ndarray, device: str) -> Any:
    import torch

    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16).copy()).to(device).view(torch.bfloat16)
    return torch.from_numpy(np.array(x)).to(device)


def arguments(case: Case, kernel: Any, extents: Mapping[str, int], device: str) -> list[Any]:
    """Random inputs; normal ones are drawn on the device."""
    import torch

    generator = torch.Generator(device=device).manual_seed(0)
    normal, out = Arg((1,)).draw, []
    for spec, arg in zip(kernel.program.inputs, case.arguments("full", **extents)):
        if arg.draw is normal:
            x = torch.randn(spec.shape, device=device, generator=generator)
        else:
            x = torch.from_numpy(np.array(arg.draw(np.random.default_rng(0), spec.shape))).to(device)
        out.append(x.to(getattr(torch, spec.dtype)))
    return out


def described(kernel: Any) -> dict[str, Any]:
    """What the plan is and what the cost model says of it."""
    kernels = []
    for k in kernel.plan.kernels:
        axes = ", ".join(f"{a} {x.extent}/{x.tile} {x.role}" for a, x in k.axes.items())
        choices = ", ".join(f"{n}={v}" for n, v in k.choices.items())
        cost = k.cost
        shown: dict[str, Any] = dict(name=k.name, plan=f"{axes}; {choices}")
        kernels.append(shown | (dict(seconds=cost.seconds, bound=cost.bound, parts=cost.parts) if cost else {}))
    return dict(predicted=kernel.cost.seconds, kernels=kernels)


def check_small(kernel: Any, label: Label, device: str) -> dict[str, Any]:
    """Against the reference interpreter, relative to the largest element."""

    ins = CASES[label.name].inputs("small", np.random.default_rng(0), dtype=label.dtype)
    wants = flat(en.evaluate(kernel.program, *ins))
    outs, found = repeated(kernel, [to_torch(x, device) for x in ins])
    worst = 0.0
    for want, out in zip(wants, outs):
        have = out.double().cpu().numpy()
        gap = float(np.abs(have - want).max(initial=0.0) / (np.abs(want).max(initial=0.0) or 1.0))
        worst = gap if not gap <= worst else worst
    return dict(error=worst, **found, ok=found["repeatable"] and worst <= TOLERANCE[label.dtype])


@dataclass
class Job:
    """Files of one program, and what to do with them.  without: steps that hung or crashed before."""

    files: list[Path]
    peers: tuple[str, ...]
    check: bool
    sustained: bool
    compile: float
    without: dict[str, str]


class Group:
    """All variants of one program and its peers, on shared inputs."""

    def __init__(self, job: Job, send: Callable[..., None], device: str = "cuda"):
        self.job, self.send, self.device = job, send, device
        self.rows: dict[str, dict[str, Any]] = {}
        self.clocks: dict[tuple[str, str], Clock] = {}  # ("ours", stem) or ("peer", kind)
        self.wants: list[tuple[Any, Any]] = []
        self.args: list[Any] = []
        self.copies: list[list[Any]] = []  # of args
        self.op: Operator | None = None
        self.main: dict[str, Any] = {}  # the row that has the peers

    def run(self) -> None:
        import torch

        torch._dynamo.reset()  # it stops compiling after eight shapes
        for path in self.job.files:
            self._step(path.stem, lambda path=path: self._ours(path))  # type: ignore[misc]
        good = {s: r for s, r in self.rows.items() if "failed" not in r}
        self.main = next((r for s, r in good.items() if Label.of(s).base), next(iter(good.values()), {}))
        if not self.main or self.job.check or self.op is None:
            return
        peers = self.main["peers"] = {k: dict(failed=why) for k, why in self.job.without.items() if k in PEERS}
        for kind in self.op.peers:
            if kind in self.job.peers and kind not in peers:
                self._step(kind, lambda kind=kind: self._peer(kind))  # type: ignore[misc]
        if self.job.sustained and "sustained" not in self.job.without:
            self._step("sustained", self._sustained)
        errors = [p["error"] for p in peers.values() if p.get("error", 0) > 0]
        for stem, row in self.rows.items():
            if "failed" not in row and errors and not row["ok"]:  # no less accurate than the best peer
                row["ok"] = row["repeatable"] and row["error"] <= min(errors)
            self.send("row", stem, row)

    def _step(self, what: str, action: Callable[[], None]) -> None:

        self.send("at", what)
        try:
            action()
        except Exception as e:
            text = f"{type(e).__name__}: {e}"[:400]
            if not isinstance(e, en.EqsatError | ImportError):
                traceback.print_exc(limit=4)
            self.send("failed", what, text)
            if what in PEERS:
                self.main["peers"][what] = dict(failed=text)
            elif what != "sustained":
                self.rows[what] = self.rows.get(what, {}) | dict(failed=text, ok=False)
            try:
                synchronize()
            except Exception:  # nothing works in this context any more
                os._exit(3)

    def _ours(self, path: Path) -> None:
        label, kernel = Label.of(path.stem), en.load(path)
        row = self.rows[path.stem] = label.fields
        row |= described(kernel)
        if label.extents == "small":
            row |= check_small(kernel, label, self.device)
            self.send("row", path.stem, row)
            return
        if label.name not in OPERATORS:
            raise en.EqsatError(f"no program is called {label.name}", "programs are listed in OPERATORS")
        op = self.op = OPERATORS[label.name]
        if not self.args:
            self.args = arguments(op.case, kernel, op.extents(label.sizes), self.device)
            self.wants = [(at, in_float64(op.case.function("full"), part)) for at, part in samples(op, self.args)]
        outs, found = repeated(kernel, self.args)
        gap = error(outs[0], self.wants)
        row |= dict(error=gap, **found, ok=found["repeatable"] and gap <= LIMIT[label.dtype])
        moved = sum(x.numel() * x.element_size() for x in (*self.args, *outs))
        flops = op.flops(*(tuple(x.shape) for x in self.args)) if op.flops else 0.0
        row |= dict(bytes=moved, flops=flops, unit="TFLOP/s" if flops else "GB/s", work=flops / 1e12 if flops else moved / 1e9)
        del outs
        if not self.job.check:
            clock = self.clocks["ours", path.stem] = self._clock(bound(kernel), row)
            row |= dict(seconds=clock.seconds, rate=row["work"] / clock.seconds)
        self.send("row", path.stem, row)

    def _clock(self, bind: Bind, row: Mapping[str, Any]) -> Clock:
        """Short calls take turns on copies of the inputs."""
        if row["flops"] / 5e14 + row["bytes"] / 4e12 >= 1e-4:
            return Clock([bind(self.args)])
        if not self.copies:
            self.copies = [[x.clone() for x in self.args] for _ in range(copies(row["bytes"], cache_bytes()))]
        return Clock([bind(x) for x in self.copies])

    def _peer(self, kind: str) -> None:
        main = self.main
        found = peer(kind, main["case"], self.args, main["bytes"], self.job.compile)
        if found is None:
            return
        bind, note = found
        gap = None if kind == "copy" else error(bind(self.args)(), self.wants)
        clock = self.clocks["peer", kind] = self._clock(bind, main)
        row = dict(seconds=clock.seconds, rate=main["work"] / clock.seconds)
        row |= {k: v for k, v in (("error", gap), ("note", note)) if v not in (None, "")}
        main["peers"][kind] = row

    def _sustained(self) -> None:
        meter = Meter()
        for _ in range(ROUNDS):
            for clock in self.clocks.values():
                self.send("at", "sustained")
                clock.turn(meter)
        for (whose, name), clock in self.clocks.items():
            (self.rows[name] if whose == "ours" else self.main["peers"][name]).update(clock.record())


def worker(connection: Any) -> None:
    """Measures the programs that it is sent, and says before each step what it is about to do."""
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("PyTorch sees no GPU here")
    connection.send(("hello", dict(device=torch.cuda.get_device_name(), torch=torch.__version__)))
    while (job := connection.recv()) is not None:
        Group(job, lambda *message: connection.send(message)).run()
        connection.send(("done",))
        gc.collect()
        torch.cuda.empty_cache()


# ------------------------------------------------------------------ running (the parent process)


class Workers:
    """One worker at a time, replaced when it hangs or dies."""

    def __init__(self, target: Callable[[Any], None], limit: float):
        self.target, self.limit = target, limit
        self.process: Any = None
        self.head: dict[str, Any] = {}
        self.idle = True  # the process waits for a job

    def start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.connection, theirs = spawn.Pipe()
        self.process = spawn.Process(target=self.target, args=(theirs,))
        self.process.start()
        theirs.close()
        self.greeted = False

    def stop(self) -> int:
        """End the process, by force if it does not end by itself; its exit status."""
        if self.process is None:
            return 0
        try:
            self.connection.send(None)
            self.process.join(30 if self.idle else 0)
        except OSError:
            pass
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        status, self.process = self.process.exitcode or 0, None
        return status

    def run(self, job: Job, on_row: Callable[[str, dict[str, Any]], None]) -> None:
        """Do the job; a step that hangs or kills the worker is left out and the rest done anew."""
        while job.files:
            if self.process is None or not self.process.is_alive():
                self.stop()
                self.start()
            self.connection.send(job)
            self.idle = False
            at, why = "", ""
            said: dict[str, str] = {}
            while True:
                limit = self.limit if at else max(self.limit, STEP)  # imports are slow
                limit += 2 * job.compile if at in PEERS else 0.0
                try:
                    if not self.connection.poll(limit):
                        why = f"gave no sign for {limit:.0f} s"
                        break
                    kind, *rest = self.connection.recv()
                except (EOFError, OSError):
                    self.process.join(10)
                    why = said.get(at) or f"the process ended ({self.process.exitcode})"
                    break
                if kind == "done":
                    self.idle = True
                    return
                if kind == "hello":
                    self.head, self.greeted = rest[0], True
                elif kind == "at":
                    at = rest[0]
                elif kind == "failed":
                    said[rest[0]] = rest[1]
                    if rest[0] not in (*PEERS, "sustained"):
                        on_row(rest[0], failed_row(rest[0], rest[1]))
                elif kind == "row":
                    on_row(*rest)
            self.stop()
            if not self.greeted:
                raise SystemExit(f"the measuring process does not start: it {why.removeprefix('the process ')}")
            stems = [p.stem for p in job.files]
            if at in stems:
                on_row(at, failed_row(at, why))
                job = replace(job, files=[p for p in job.files if p.stem != at])
            elif at and at not in job.without:
                job = replace(job, without={**job.without, at: why})
            else:  # not even started
                for stem in stems:
                    on_row(stem, failed_row(stem, why))
                return


def failed_row(stem: str, why: str) -> dict[str, Any]:
    return Label.of(stem).fields | dict(failed=why, ok=False)


def compile_all(paths: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Fill the cache with machine code, many compilers at a time; what the compiler says of each file."""
    from tqdm import tqdm

    def one(path: Path) -> dict[str, Any]:
        try:
            kernel = en.load(path).compile()
            details = next((s.rows for s in kernel.report().sections if s.title == "Compiled code"), ())
        except Exception as e:
            return dict(failed=f"{type(e).__name__}: {e}"[:1000])
        return dict(compiled=[compiled_code(r) for r in details])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = list(tqdm(pool.map(one, paths), total=len(paths), desc="compile", disable=None))
    return {p.stem: x for p, x in zip(paths, found)}


def compiled_code(row: Sequence[str]) -> dict[str, Any]:
    """A row of the report's "Compiled code" as numbers."""
    text = ", ".join(row[1:])
    numbers = {
        k: int(m[1])
        for k, p in (
            ("registers", r"(\d+) registers"),
            ("spilled", r"(\d+) bytes spilled"),
            ("shared", r"(\d+) bytes [\w ]*shared"),
        )
        if (m := re.search(p, text))
    }
    notes = [x for x in row if x.startswith("as planned")]
    return dict(kernel=row[0], **numbers, **({"note": notes[0]} if notes else {}))


def write(out: Path | None, record: dict[str, Any]) -> None:
    """Whole or not at all; a row a line."""
    if out is None:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(out.name + ".tmp")
    head = json.dumps(clean({k: v for k, v in record.items() if k != "rows"}), indent=1)
    rows = ",\n".join(json.dumps(clean(r), allow_nan=False) for r in record["rows"])
    opening = head.removesuffix("\n}") + ",\n" if len(record) > 1 else "{\n"
    temporary.write_text(f'{opening} "rows": [\n{rows}\n ]\n}}\n')
    temporary.replace(out)


def clean(x: Any) -> Any:
    """NaN and infinities are no JSON."""
    if isinstance(x, dict):
        return {k: clean(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [clean(v) for v in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x


def driver_version() -> str:
    try:
        ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip().partition("\n")[0]
    except OSError:
        return ""


@dataclass(frozen=True)
class Options:
    """Of `run`.  budget: seconds after which nothing new is started; compile: seconds for tuning one program with torch.compile."""

    peers: tuple[str, ...] = PEERS
    check: bool = False
    sustained: bool = False
    budget: float = math.inf
    compile: float = 30.0
    limit: float = STEP
    only: str = ""


def run(folder: Path, out: Path | None, options: Options, target: Callable[[Any], None] = worker) -> dict[str, Any]:
    """Compile, check and time what is saved in a folder; the record."""
    from tqdm import tqdm

    start = time.monotonic()
    paths = [p for p in sorted(folder.glob("*.json")) if re.search(options.only, p.stem)]
    if not paths:
        raise SystemExit(f"nothing to run in {folder}: save kernels there first")
    saved = folder / "commit"
    record: dict[str, Any] = dict(
        date=str(datetime.date.today()),
        driver=driver_version(),
        commit=commit() or (saved.read_text().strip() if saved.exists() else ""),
        command=" ".join(("python", *sys.argv)),
        units="seconds: a cold call, median; sustained: interleaved turns; rate: TFLOP/s of kept pairs, or GB/s of inputs and outputs",
        rows=[],
    )
    code = compile_all(paths)
    rows: dict[str, dict[str, Any]] = {}
    groups: dict[Label, list[Path]] = {}
    for p in paths:
        if "failed" in code[p.stem]:
            rows[p.stem] = failed_row(p.stem, code[p.stem]["failed"])
            tqdm.write(f"{p.stem}: {code[p.stem]['failed']}")
        else:
            label = Label.of(p.stem)
            groups.setdefault(label.program, []).append(p)
    workers = Workers(target, options.limit)

    def on_row(stem: str, row: dict[str, Any]) -> None:
        rows[stem] = row | code[stem]
        record.update(workers.head, rows=list(rows.values()))
        write(out, record)

    try:
        for files in tqdm(list(groups.values()), desc="measure", disable=None):
            if time.monotonic() - start > options.budget:
                tqdm.write(f"{files[0].stem}: not started, the budget of {options.budget:.0f} s is used up")
                continue
            files = sorted(files, key=lambda p: not Label.of(p.stem).base)
            workers.run(Job(files, options.peers, options.check, options.sustained, options.compile, {}), on_row)
            for p in files:
                if p.stem in rows:
                    tqdm.write(line(rows[p.stem]))
    finally:
        status = workers.stop()  # compute-sanitizer tells of what it found by the exit status
    record.update(workers.head, rows=list(rows.values()), seconds=round(time.monotonic() - start, 1), status=status)
    write(out, record)
    return record


# ------------------------------------------------------------------ the command line


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = p.add_subparsers(dest="command", required=True)
    s = sub.add_parser("save", help="search and save kernels; needs no GPU")
    s.add_argument("folder", type=Path)
    s.add_argument("--target", default="cuda:sm_90a")
    s.add_argument("--dtype", help="one or several, joined by commas (bfloat16; with --small float32,bfloat16,float16)")
    s.add_argument("--quick", action="store_true", help="few sizes of each program")
    s.add_argument("--small", action="store_true", help="the library's programs at their test sizes")
    s.add_argument("--only", default="", help="a regular expression over NAME__EXTENTS__DTYPE")
    s.add_argument("--vary", action="append", default=[], metavar="NAME:CHANGES",
                   help="a variant beside the base one: choice=value or axis/tile, joined by commas; k0. before it for one kernel")  # fmt: skip
    s.add_argument("--list", action="store_true", help="only say what would be saved")
    r = sub.add_parser("run", help="check and time saved kernels; needs a GPU and PyTorch")
    r.add_argument("folder", type=Path)
    r.add_argument("--out", type=Path, help="record, written anew after every row")
    r.add_argument("--only", default="", help="a regular expression over the files' names")
    r.add_argument("--peers", default=",".join(PEERS), help="joined by commas (none: an empty string); all: %(default)s")
    r.add_argument("--sustained", action="store_true", help="interleaved turns as well")
    r.add_argument("--budget", type=float, default=math.inf, help="seconds after which no program is started")
    r.add_argument("--compile-budget", type=float, default=30.0, help="seconds to tune one program with torch.compile (0: don't)")
    r.add_argument("--limit", type=float, default=STEP, help="seconds after which a step counts as hung")
    r.add_argument("--check", action="store_true", help="no timing, no peers")
    r.add_argument(
        "--sanitize", choices=("memcheck", "racecheck", "synccheck", "initcheck"), help="check under compute-sanitizer"
    )
    t = sub.add_parser("table", help="print records")
    t.add_argument("files", type=Path, nargs="+")
    f = sub.add_parser("fit", help="judge the cost model by records")
    f.add_argument("files", type=Path, nargs="+")
    f.add_argument("--target", default="cuda:sm_90a")
    f.add_argument("--single", action="store_true", help="by single calls, also where sustained times are there")
    f.add_argument("--anew", action="store_true", help="also price pipelines of warpgroups by the model as it is (searches: minutes)")
    return p


def sanitized(tool: str, argv: Sequence[str]) -> int:
    """This very command, checking only, under compute-sanitizer."""
    rest = [x for i, x in enumerate(argv) if not x.startswith("--sanitize") and (i == 0 or argv[i - 1] != "--sanitize")]
    command = [
        "compute-sanitizer",
        "--tool",
        tool,
        "--target-processes",
        "all",
        "--error-exitcode",
        "1",
        sys.executable,
        __file__,
    ]
    limit = [] if "--limit" in rest else ["--limit", "600"]  # it slows kernels down
    return subprocess.run([*command, *rest, *limit, *([] if "--check" in rest else ["--check"])], check=False).returncode


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    p = parser()
    a = p.parse_args(argv)
    if a.command == "save":
        dtypes = (a.dtype or ("float32,bfloat16,float16" if a.small else "bfloat16")).split(",")
        if unknown := [d for d in dtypes if d not in TOLERANCE]:
            p.error(f"unknown dtype {', '.join(unknown)}; known: {', '.join(TOLERANCE)}")
        try:
            labels = cells(a.quick, a.small, a.only, dtypes)
            for v in a.vary:
                parse_variant(v)
        except (ValueError, re.error) as e:
            p.error(str(e))
        if not labels:
            p.error(f"nothing is called like {a.only!r}; --list says what there is")
        if a.list:
            print("\n".join(x.stem for x in labels))
            return 0
        return 0 if save(a.folder, labels, a.target, a.vary) else 1
    if a.command == "run":
        peers = tuple(x for x in a.peers.split(",") if x)
        if unknown := [x for x in peers if x not in PEERS]:
            p.error(f"unknown peer {', '.join(unknown)}; known: {', '.join(PEERS)}")
        if a.sanitize:
            return sanitized(a.sanitize, argv)
        record = run(a.folder, a.out, Options(peers, a.check, a.sustained, a.budget, a.compile_budget, a.limit, a.only))
        rows = record["rows"]
        print("\n\n".join(x for x in (ablations(rows), summary(rows)) if x))
        if record["status"]:
            print(f"the measuring process ended with status {record['status']}")
        return 0 if rows and all(r.get("ok") for r in rows) and not record["status"] else 1
    print(report(read_rows(a.files)) if a.command == "table" else fit(a.files, a.target, not a.single, a.anew))
    return 0


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.exit(main())
