"""A fuzzer of the whole compiler:

    python -m eqsat_neptune.testing.fuzz --seconds N [--seed S] [--corpus DIR] [--target cpu,cuda,hip]

draws random programs, compiles each under random rules and schedules, runs it (GPU code in the emulator, where there is a C++
compiler) and compares it with float64 evaluation.  Inputs that let rules fire or statements appear as none did before are kept
and changed again.  What disagrees, crashes or hangs is shrunk, printed as a Python program and written to DIR/faults as JSON;
run it again to go on where it stopped.  `--replay FILE…` runs what was written.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..cache import write_atomically
from ..errors import EqsatError
from ..rules import RULES, Rule
from .cases import TARGETS, Case, Outcome, run
from .statements import draw, mutate, size, smaller

LIMIT = 20.0  # seconds of CPU time for one case
DEAD = 4 * LIMIT  # seconds after which a process that answers to nothing is ended
SHRINKING = 300  # cases run to shrink one
EMULATED = 0.15  # of the cases run in an emulator, if any target asks for one: compiling takes long
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
    for plainer in (dict(schedule=0), dict(order=0), dict(split=0), dict(without=()), dict(numerics="safe"), dict(seed=0)):
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
    tried: int = 0
    refused: int = 0
    faulty: int = 0  # cases that failed, the same fault counted each time
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.tried} programs in {self.seconds:.0f} s, {self.refused} refused, {self.faulty} failed"


@dataclass
class Fuzzer:
    """Everything follows from `seed`, `targets` and `rules`: the n-th case is the same in each process, unless a time limit was
    met on the way.  folder: where state, kept cases and faults go; None: nowhere."""

    seed: int = 0
    targets: tuple[str, ...] = ("cpu",)
    folder: Path | None = None
    rules: Sequence[Rule] = RULES
    limit: float = LIMIT
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
    def state(self) -> Path | None:
        return self.folder / f"state-{self.seed}-{'-'.join(self.targets)}.json" if self.folder else None

    @property
    def running(self) -> Path | None:
        """Holds the case that is being run: what a process that dies leaves behind."""
        return self.folder / "running.json" if self.folder else None

    def step(self) -> tuple[Case, Outcome] | None:
        """Run the next case.  A fault not seen before comes back, shrunk."""
        start = time.perf_counter()
        case = self.case(self.figures.tried)
        outcome = self._run(case)
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
            found = self._fault(*shrink(case, outcome, self._run))
        elif new:
            self.queue.append(case)
        self.figures.seconds += time.perf_counter() - start
        self.save()
        return found

    def case(self, n: int) -> Case:
        """The n-th case, given what is in the queue by then."""
        r = random.Random(f"{self.seed} {n}")
        if self.queue and r.random() < 0.4:
            old = r.choice(self.queue[-64:]) if r.random() < 0.5 else r.choice(self.queue)
            return self._varied(r, replace(old, program=mutate(r, old.program)))
        emulated = [t for t in self.targets if t != "cpu"]
        if emulated and (r.random() < EMULATED or "cpu" not in self.targets):
            target = r.choice(TARGETS[r.choice(emulated)])
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
        )

    def _run(self, case: Case) -> Outcome:
        if self.running is not None:
            _write(self.running, {"case": case.to_json()})
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

    def died(self, code: int) -> None:
        """The process ended within the case that it left in `running`: that is a fault, and the next case is another one."""
        if self.running is None or not self.running.exists():
            raise EqsatError(f"the fuzzer ended with code {code} before it ran anything")
        case = Case.from_json(_read(self.running)["case"])
        outcome = Outcome("crash", "process", f"exit {code}: the process died or did not answer")
        self.figures.tried += 1
        self.figures.faulty += 1
        self._fault(case, outcome)
        self.save()
        self.running.unlink()

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


# ------------------------------------------------------------------ command line

_FOUND = 3  # exit code


def main(argv: Sequence[str] | None = None) -> int:
    a = argparse.ArgumentParser(prog="python -m eqsat_neptune.testing.fuzz", description=(__doc__ or "").partition(":")[0])
    a.add_argument("--seconds", type=float, default=60.0)
    a.add_argument("--seed", type=int, default=0)
    a.add_argument("--corpus", type=Path, default=Path("fuzz-corpus"))
    a.add_argument("--target", default="cpu", help="a list of cpu, cuda, hip; the GPUs are emulated")
    a.add_argument("--replay", type=Path, nargs="+", metavar="FILE")
    a.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)  # the process that does the work
    args = a.parse_args(argv)
    try:
        if args.replay:
            return _replay(args.replay)
        return _inside(args) if args.inside else _outside(args)
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


def _fuzzer(args: argparse.Namespace) -> Fuzzer:
    targets = tuple(args.target.split(","))
    if any(t != "cpu" for t in targets):
        from ..codegen.cuda.emulate import host_compiler

        if host_compiler() is None:
            raise EqsatError("no C++ compiler for the emulator", "install g++, or leave out cuda and hip")
    return Fuzzer(args.seed, targets, args.corpus)


def _outside(args: argparse.Namespace) -> int:
    """Starts a process that works, and another one whenever that dies: hard crashes and hangs are faults too."""
    _fuzzer(args)
    end = time.monotonic() + args.seconds
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other process ends in order, and then this one
    try:
        while True:
            left = max(0.0, end - time.monotonic())
            command = [
                sys.executable,
                "-m",
                "eqsat_neptune.testing.fuzz",
                "--inside",
                "--seconds",
                str(left),
                "--seed",
                str(args.seed),
            ]
            code = subprocess.run([*command, "--corpus", str(args.corpus), "--target", args.target]).returncode
            if code in (0, 2, _FOUND):
                return code
            _fuzzer(args).died(code)
    finally:
        signal.signal(signal.SIGINT, before)


def _inside(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    signal.signal(signal.SIGINT, signal.default_int_handler)  # the parent ignores it
    fuzzer = _fuzzer(args)
    fuzzer.dead = DEAD
    start, shown = time.monotonic(), 0.0
    try:
        with tqdm(total=args.seconds, unit="s", disable=None, bar_format="{l_bar}{bar}| {n:.0f}/{total:.0f} s {postfix}") as bar:
            while (passed := time.monotonic() - start) < args.seconds:
                bar.update(passed - shown)
                shown = passed
                bar.set_postfix_str(f"{fuzzer.figures.tried} programs, {len(fuzzer.coverage)} kinds, {len(fuzzer.faults)} faults")
                if found := fuzzer.step():
                    bar.write(f"\n# {found[1]}\n{found[0]}\n")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    finally:
        fuzzer.save()
    print(fuzzer)
    if fuzzer.running is not None:
        fuzzer.running.unlink(missing_ok=True)
    return _FOUND if fuzzer.faults else 0


if __name__ == "__main__":
    sys.exit(main())
