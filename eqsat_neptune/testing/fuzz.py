"""A fuzzer of the whole compiler:

    python -m eqsat_neptune.testing.fuzz --seconds N [--seed S] [--jobs N] [--corpus DIR] [--target cpu,cuda,hip]

draws random programs, compiles each under random rules and schedules, runs it and compares it with float64 evaluation.  Code for a GPU
that is here runs there (--device emulator: never), other GPU code in the emulator, if there is a C++ compiler.  Inputs that let rules
fire or statements appear as none did before are kept and changed again.  What disagrees, crashes or hangs is shrunk, printed as a
Python program and written to DIR/faults as JSON; run it again to go on where it stopped.  `--replay FILE…` runs what was written.

Each of the jobs is a process with its own stream of cases and its own state in DIR; one that dies or stops answering is started anew,
and the case that it died of is tried once more alone.  DIR/summary.json and the last lines printed sum up all states in DIR.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..cache import write_atomically
from ..errors import EqsatError
from ..rules import RULES, Rule
from .cases import DEVICE, TARGETS, Case, Outcome, run, runnable
from .drawing import draw, mutate
from .layers import draw_products
from .statements import size, smaller

LIMIT = 20.0  # seconds of CPU time for one case
DEAD = 4 * LIMIT  # seconds after which a process that answers to nothing is ended
SHRINKING = 300  # cases run to shrink one
ALONE = 40  # if each takes a process of its own
EMULATED = 0.2  # of the cases are for GPUs, if any target asks for one: compiling takes long
PRODUCTS = 0.5  # of those are chains of matrix products
PIPELINES = "cuda:sm_90a"  # what may run as pipelines of warpgroups
_SMALL = (1, 2, 3, 4, 5, 7, 8, 12)
_TILED = (1, 3, 8, 16, 17, 32, 40, 64)  # extents that fill fragments, and that do not


# ------------------------------------------------------------------ shrinking


def shrink(case: Case, outcome: Outcome, runs: Callable[[Case], Outcome], most: int = SHRINKING) -> tuple[Case, Outcome]:
    """The simplest case found that fails as this one does."""
    left = most
    changed = True
    while changed and left > 0:
        changed = False
        for new in _simpler(case):
            left -= 1
            got = _try(new, runs)
            if got is not None and got.sign == outcome.sign:
                case, outcome, changed = new, got, True
                break
            if left <= 0:
                break
    return case, outcome


def _try(case: Case, runs: Callable[[Case], Outcome]) -> Outcome | None:
    try:
        case.program.trace()
    except EqsatError:
        return None
    except Exception:
        pass  # may be the fault
    return runs(case)


def _simpler(case: Case) -> Iterator[Case]:
    for plainer in (dict(pipeline=0), dict(schedule=0), dict(order=0), dict(split=0), dict(without=()), dict(numerics="safe"), dict(seed=0)):
        new = replace(case, **plainer)  # type: ignore[arg-type]
        if new != case:
            yield new
    for n in range(len(case.without)):
        yield replace(case, without=(*case.without[:n], *case.without[n + 1 :]))
    for p in smaller(case.program):
        if size(p)[:2] <= size(case.program)[:2]:
            yield replace(case, program=p)


# ------------------------------------------------------------------ the search


@dataclass
class Figures:
    """seconds: of all cases by the clock, with shrinking; cpu: of the processor, compilers included.  lost: cases during which the
    process was ended though they can run alone."""

    tried: int = 0
    refused: int = 0
    faulty: int = 0  # cases that failed, the same fault counted each time
    seconds: float = 0.0
    cpu: float = 0.0
    lost: int = 0
    kinds: dict[str, int] = field(default_factory=dict)  # of outcomes
    targets: dict[str, int] = field(default_factory=dict)

    def add(self, other: Figures) -> None:
        for n in ("tried", "refused", "faulty", "seconds", "cpu", "lost"):
            setattr(self, n, getattr(self, n) + getattr(other, n))
        for mine, theirs in ((self.kinds, other.kinds), (self.targets, other.targets)):
            for n, m in theirs.items():
                mine[n] = mine.get(n, 0) + m

    def __str__(self) -> str:
        lost = f", {self.lost} lost" if self.lost else ""
        return f"{self.tried} programs in {self.seconds:.0f} s ({self.cpu / 3600:.2f} CPU hours), {self.refused} refused, {self.faulty} failed{lost}"


@dataclass
class Fuzzer:
    """Everything follows from `seed`, `job`, `targets` and `rules`: the n-th case is the same in each process, unless a time limit was
    met on the way.  folder: where state, kept cases and faults go; None: nowhere."""

    seed: int = 0
    job: int = 0  # each has a stream of its own
    targets: tuple[str, ...] = field(default=("cpu",), kw_only=True)
    folder: Path | None = None
    rules: Sequence[Rule] = RULES
    limit: float = LIMIT
    broken: bool = False  # this process can run no further case
    counted: bool = False  # the case that runs is one of those that shrink another one, which has been counted
    dead: float | None = None  # seconds in one case after which the process ends: for one that is started anew
    figures: Figures = field(default_factory=Figures)
    coverage: set[str] = field(default_factory=set)
    queue: list[Case] = field(default_factory=list)
    faults: dict[str, tuple[Case, Outcome]] = field(default_factory=dict)
    refusals: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = [t for t in self.targets if t not in TARGETS]
        if unknown or not self.targets:
            raise EqsatError(f"unknown target {', '.join(unknown) or '(none)'}", f"known: {', '.join(TARGETS)}")
        if self.state is not None and self.state.exists():
            self._load(_read(self.state))

    @property
    def stream(self) -> str:
        return f"{self.seed}.{self.job}" if self.job else str(self.seed)

    @property
    def state(self) -> Path | None:
        return self.folder / f"state-{self.stream}-{'-'.join(self.targets)}.json" if self.folder else None

    @property
    def running(self) -> Path | None:
        """Holds the case that is being run: what a process that dies leaves behind."""
        return self.folder / f"running-{self.stream}-{'-'.join(self.targets)}.json" if self.folder else None

    def step(self) -> tuple[Case, Outcome] | None:
        """Run the next case.  A fault not seen before comes back, shrunk."""
        start, cpu = time.perf_counter(), _cpu()
        case = self.case(self.figures.tried)
        outcome = self._run(case)
        self.figures.kinds[outcome.kind] = self.figures.kinds.get(outcome.kind, 0) + 1
        self.figures.targets[case.target] = self.figures.targets.get(case.target, 0) + 1
        new = not outcome.coverage <= self.coverage
        self.coverage |= outcome.coverage
        self.figures.tried += 1
        self.save()  # before shrinking: a process that dies is not to meet the same case again
        found = None
        if outcome.kind == "refused":
            self.figures.refused += 1
            why = outcome.text.partition(" (")[0][:100]
            self.refusals[why] = self.refusals.get(why, 0) + 1
        elif outcome.faulty:
            self.figures.faulty += 1
            lost = "CUDA is lost" in outcome.text  # to this process: the next case needs another one
            runs, most = (self._alive(alone), ALONE) if lost else (self._run, SHRINKING)
            self.counted = True
            found = self._fault(*shrink(case, outcome, runs, most))
            self.counted, self.broken = False, lost
        elif new:
            self.queue.append(case)
        self.figures.seconds += time.perf_counter() - start
        self.figures.cpu += _cpu() - cpu
        self.save()
        return found

    def case(self, n: int) -> Case:
        """The n-th case, given what is in the queue by then."""
        r = random.Random(f"{self.stream} {n}")
        if self.queue and r.random() < 0.4:
            old = r.choice(self.queue[-64:]) if r.random() < 0.5 else r.choice(self.queue)
            return self._varied(r, replace(old, program=mutate(r, old.program)))
        emulated = [t for t in self.targets if t != "cpu"]
        if emulated and (r.random() < EMULATED or "cpu" not in self.targets):
            target = r.choice(TARGETS[r.choice(emulated)])
            if r.random() < PRODUCTS:
                return self._varied(r, Case(draw_products(r, r.choice(("float16", "bfloat16", "bfloat16"))), target=target))
            dtype, extents = r.choice(("float16", "bfloat16", "float32", "float32", "float64")), r.choice((_SMALL, _TILED))
        else:
            target, dtype, extents = "cpu", r.choice(("float64",) * 7 + ("float32", "float32", "bfloat16")), _SMALL
        return self._varied(r, Case(draw(r, dtype, extents), target=target))

    def _varied(self, r: random.Random, case: Case) -> Case:
        def some() -> int:
            return r.randint(1, 1 << 30)

        names = [x.name for x in self.rules if x.phase != "norm"]  # without a normalisation saturation need not end
        return replace(
            case,
            seed=some(),
            without=tuple(sorted(r.sample(names, r.randint(1, max(1, len(names) // 3))))) if r.random() < 0.3 else (),
            order=some() if r.random() < 0.3 else 0,
            split=some() if r.random() < 0.5 else 0,
            numerics="strict" if r.random() < 0.1 else "safe",
            schedule=some() if r.random() < 0.6 else 0,
            pipeline=some() if case.target == PIPELINES and r.random() < 0.75 else 0,
        )

    def _run(self, case: Case) -> Outcome:
        if self.running is not None:
            _write(self.running, {"case": case.to_json(), "counted": self.counted})
        if self.dead is None:
            return run(case, self.rules, self.limit)
        faulthandler.dump_traceback_later(self.dead, exit=True)
        try:
            return run(case, self.rules, self.limit)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _fault(self, case: Case, outcome: Outcome) -> tuple[Case, Outcome] | None:
        name = _digest(case)
        if name in self.faults:
            return None
        self.faults[name] = case, outcome
        if self.folder:
            keep(self.folder / "faults", case, outcome)
        return case, outcome

    def recover(self, runs: Callable[[Case], Outcome]) -> tuple[Case, Outcome] | None:
        """What is to be done first if an earlier process ended within a case, which it then has left in `running`: if that fails
        alone too (runs), it is a fault, and comes back shrunk.  The next case is another one."""
        if self.running is None or not self.running.exists():
            return None
        start, cpu, found = time.perf_counter(), _cpu(), None
        case, runs = load(self.running), self._alive(runs)
        counted = bool(_read(self.running).get("counted"))
        outcome = runs(case)  # if this process is ended now, the next one begins here, too
        if not counted:
            self.figures.tried += 1
            self.figures.targets[case.target] = self.figures.targets.get(case.target, 0) + 1
        if outcome.faulty:
            if not counted:
                self.figures.faulty += 1
                self.figures.kinds[outcome.kind] = self.figures.kinds.get(outcome.kind, 0) + 1
            found = self._fault(*shrink(case, outcome, runs, ALONE))
        elif not counted:
            self.figures.lost += 1
        self.running.unlink(missing_ok=True)
        self.figures.seconds += time.perf_counter() - start
        self.figures.cpu += _cpu() - cpu
        self.save()
        return found

    def _alive(self, runs: Callable[[Case], Outcome]) -> Callable[[Case], Outcome]:
        """Says before each case that this process is at work: the time of `running` is what is looked at."""

        def touched(case: Case) -> Outcome:
            if self.running is not None and self.running.exists():
                os.utime(self.running)
            return runs(case)

        return touched

    def save(self) -> None:
        if self.state is not None:
            d = {
                "figures": vars(self.figures),
                "coverage": sorted(self.coverage),
                "refusals": self.refusals,
                "queue": [c.to_json() for c in self.queue],
                "faults": {n: [c.to_json(), o.kind, o.stage, o.text] for n, (c, o) in self.faults.items()},
            }
            _write(self.state, d)

    def _load(self, d: Any) -> None:
        try:
            self.figures = Figures(**d["figures"])
            self.coverage, self.refusals = set(d["coverage"]), dict(d["refusals"])
            self.queue = [Case.from_json(c) for c in d["queue"]]
            self.faults = {n: (Case.from_json(c), Outcome(*o)) for n, (c, *o) in d["faults"].items()}
        except (KeyError, TypeError, ValueError) as e:
            raise EqsatError(f"{self.state} is not a state of the fuzzer: {e}", "remove it to begin anew") from None

    def merge(self, other: Fuzzer) -> None:
        """Takes in what another one has found."""
        self.figures.add(other.figures)
        self.coverage |= other.coverage
        self.faults |= other.faults
        self.queue.extend(other.queue)
        for why, n in other.refusals.items():
            self.refusals[why] = self.refusals.get(why, 0) + n

    @property
    def lowerings(self) -> list[str]:
        """Which code generators were reached."""
        return sorted(c for c in self.coverage if " as " in c or " on the device" in c)

    def __str__(self) -> str:
        why = "".join(f"\n  refused {n} times: {w}" for w, n in sorted(self.refusals.items(), key=lambda x: -x[1])[:5])
        return f"{self.figures}; {len(self.coverage)} kinds of behaviour, {len(self.queue)} inputs kept, {len(self.faults)} faults{why}"


# ------------------------------------------------------------------ files


def keep(folder: Path, case: Case, outcome: Outcome) -> Path:
    """Write a case to a corpus."""
    path = folder / f"{outcome.kind}-{_digest(case)}.json"
    _write(path, {"case": case.to_json(), "outcome": str(outcome)})
    return path


def load(path: Path) -> Case:
    """A case that `keep` wrote.  EqsatError if it is none."""
    try:
        return Case.from_json(_read(path)["case"])
    except (ValueError, KeyError, TypeError) as e:
        raise EqsatError(f"{path} holds no case of the fuzzer: {e}") from None


def _digest(case: Case) -> str:
    return hashlib.sha256(json.dumps(case.to_json(), sort_keys=True).encode()).hexdigest()[:12]


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise EqsatError(f"cannot read {path}: {e}") from None


def _write(path: Path, d: Any) -> None:
    write_atomically(path, [(json.dumps(d, indent=1) + "\n").encode()])


def _cpu() -> float:
    """Processor seconds of this process and of those that it has started and waited for."""
    return sum(os.times()[:4])


def alone(case: Case) -> Outcome:
    """The case in a process of its own, which may die of it."""
    with tempfile.TemporaryDirectory(prefix="eqsat_neptune_") as folder:
        path = Path(folder) / "case.json"
        _write(path, {"case": case.to_json()})
        command = [sys.executable, "-m", "eqsat_neptune.testing.fuzz", "--alone", str(path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=2 * DEAD)
            kind, stage, text = json.loads(done.stdout.strip().splitlines()[-1])
        except subprocess.TimeoutExpired:
            return Outcome("hang", "process", f"no answer within {2 * DEAD:g} s")
        except (ValueError, IndexError):
            return Outcome("crash", "process", f"exit {done.returncode}: {done.stderr.strip()[-500:]}")
    return Outcome(kind, stage, text)


# ------------------------------------------------------------------ command line

_FOUND, _AGAIN = 3, 4  # exit codes
POLL = 0.5  # seconds
SILENT = 4 * DEAD  # seconds without a new case after which a process is ended: its own clock (see `dead`) has failed


def main(argv: Sequence[str] | None = None) -> int:
    a = argparse.ArgumentParser(prog="python -m eqsat_neptune.testing.fuzz", description=(__doc__ or "").partition(":")[0])
    a.add_argument("--seconds", type=float, default=60.0)
    a.add_argument("--seed", type=int, default=0)
    a.add_argument("--jobs", type=int, default=1, help="processes, each with its own stream of cases")
    a.add_argument("--corpus", type=Path, default=Path("fuzz-corpus"))
    a.add_argument("--target", default="cpu", help="a list of cpu, cuda, hip")
    a.add_argument("--device", choices=("auto", "emulator"), default="auto", help="auto: the GPU, where it can run the code")
    a.add_argument("--replay", type=Path, nargs="+", metavar="FILE")
    a.add_argument("--inside", type=int, metavar="JOB", help=argparse.SUPPRESS)  # a process that does the work
    a.add_argument("--alone", type=Path, help=argparse.SUPPRESS)
    args = a.parse_args(argv)
    if args.device != "auto":
        os.environ[DEVICE] = args.device
    try:
        if args.jobs < 1:
            raise EqsatError(f"--jobs must be at least 1, not {args.jobs}")
        if args.alone:
            return _alone(args.alone)
        if args.replay:
            return _replay(args.replay)
        return _outside(args) if args.inside is None else _inside(args)
    except EqsatError as e:
        print(e, file=sys.stderr)
        return 2


def _replay(paths: Sequence[Path]) -> int:
    code = 0
    for p in paths:
        case = load(p)
        outcome = run(case)
        print(f"{p}: {outcome}" + (f"\n\n{case}\n" if outcome.faulty else ""))
        code = _FOUND if outcome.faulty else code
    return code


def _alone(path: Path) -> int:
    faulthandler.dump_traceback_later(DEAD, exit=True)
    outcome = run(load(path))
    print(json.dumps([outcome.kind, outcome.stage, outcome.text]), flush=True)
    return 0


def _fuzzer(args: argparse.Namespace, job: int = 0) -> Fuzzer:
    targets = tuple(args.target.split(","))
    fuzzer = Fuzzer(args.seed, job, targets=targets, folder=args.corpus)
    for t in targets:
        if missing := [why for x in TARGETS[t] if (why := runnable(x))]:
            raise EqsatError(missing[0], "install g++, or leave out cuda and hip")
    return fuzzer


def _outside(args: argparse.Namespace) -> int:
    """Starts processes that work, and another one whenever one of them dies: hard crashes and hangs are faults too."""
    from tqdm import tqdm

    fuzzers = [_fuzzer(args, job) for job in range(args.jobs)]
    end = time.monotonic() + args.seconds
    workers: list[subprocess.Popen[bytes] | None] = [None] * args.jobs
    started = [0.0] * args.jobs
    code, stopped = 0, False

    def start(job: int) -> None:
        left = max(0.0, end - time.monotonic())
        command = [sys.executable, "-m", "eqsat_neptune.testing.fuzz", "--inside", str(job), "--seconds", str(left)]
        command += ["--seed", str(args.seed), "--corpus", str(args.corpus), "--target", args.target, "--device", args.device]
        workers[job] = subprocess.Popen(command)
        started[job] = time.time()

    for job in range(args.jobs):
        start(job)
    with tqdm(total=args.seconds, unit="s", disable=None, bar_format="{l_bar}{bar}| {n:.0f}/{total:.0f} s {postfix}") as bar:
        looked = 0.0
        while any(w is not None for w in workers):
            try:
                time.sleep(POLL)
                for job, w in enumerate(workers):
                    if w is None:
                        continue
                    if w.poll() is None:
                        if time.time() - max(started[job], _touched(fuzzers[job].running)) > SILENT:
                            w.kill()
                    elif w.returncode in (0, 2, _FOUND) or stopped:
                        code, workers[job] = 2 if w.returncode == 2 else code, None
                    else:  # it has died, or asks for a fresh process
                        start(job)
                if not bar.disable and time.monotonic() - looked > 10 * POLL:
                    looked = time.monotonic()
                    bar.set_postfix_str(str(summed(args.corpus).figures))
                bar.update(min(args.seconds, time.monotonic() - end + args.seconds) - bar.n)
            except KeyboardInterrupt:  # the others have got it too, and end in order
                stopped = True
    whole = summed(args.corpus)
    report(whole, args.corpus)
    return code or (_FOUND if whole.faults else 0)


def _touched(path: Path | None) -> float:
    try:
        return path.stat().st_mtime if path else 0.0
    except OSError:
        return 0.0


def summed(folder: Path) -> Fuzzer:
    """All that the states in a folder say, of all seeds and jobs; what cannot be read is left out."""
    whole = Fuzzer()
    for path in sorted(folder.glob("state-*.json")):
        one = Fuzzer()
        try:
            one._load(_read(path))
        except EqsatError:
            continue
        whole.merge(one)
    return whole


def report(whole: Fuzzer, folder: Path) -> None:
    """Print the sum of all states, and write it to summary.json."""
    f = whole.figures
    print(whole)
    print("outcomes: " + ", ".join(f"{n} {kind}" for kind, n in sorted(f.kinds.items())))
    print("targets: " + ", ".join(f"{t} {n}" for t, n in sorted(f.targets.items())))
    print("reached: " + ", ".join(whole.lowerings))
    signs: dict[str, int] = {}
    for _, o in whole.faults.values():
        signs[f"{o.kind} in {o.stage}"] = signs.get(f"{o.kind} in {o.stage}", 0) + 1
    summary = vars(f) | {"cpu_hours": f.cpu / 3600, "behaviours": len(whole.coverage), "faults": signs, "reached": whole.lowerings}
    _write(folder / "summary.json", summary)


def _inside(args: argparse.Namespace) -> int:
    fuzzer = _fuzzer(args, args.inside)
    fuzzer.dead = DEAD
    end, parent = time.monotonic() + args.seconds, os.getppid()
    recovered = False
    try:
        show(fuzzer.recover(alone))
        recovered = True
        while time.monotonic() < end and not fuzzer.broken and os.getppid() == parent:
            show(fuzzer.step())
    except KeyboardInterrupt:
        pass
    finally:
        fuzzer.save()
    if fuzzer.running is not None and recovered:
        fuzzer.running.unlink(missing_ok=True)
    return _AGAIN if fuzzer.broken else _FOUND if fuzzer.faults else 0


def show(found: tuple[Case, Outcome] | None) -> None:
    if found:
        print(f"\n# {found[1]}\n{found[0]}\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
