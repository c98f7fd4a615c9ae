"""What `optimize` returns: a callable with its plan, source, predicted cost, report and derivation."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import cache
from .backends import Runner, make_runner
from .codegen.serial import from_json, to_json
from .errors import InputError, SavedKernelError
from .extraction.plan import Cost, Plan
from .program import Program
from .report import Report, Section, seconds
from .targets import Target, parse_target

FORMAT = "eqsat-neptune-kernel-1"


@dataclass
class Record:
    """All that a kernel is made of, as data: what the cache and saved files hold.

    info: "form" (text of each output), "egraph" (nodes, classes, phases), "seconds" (by stage), "candidates", "measured",
    "explain"; "forbidden" (what float16's range left out: "times" as many operations, "form", "rule"), if that costs much.
    """

    program: Program
    target: Target
    plan: Plan
    info: dict[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        return json.dumps(
            {"program": to_json(self.program), "target": str(self.target), "plan": to_json(self.plan), "info": self.info}
        ).encode()

    @staticmethod
    def from_bytes(raw: bytes) -> Record:
        """Raises ValueError if this is not a record."""
        d = json.loads(raw)
        if not isinstance(d, dict) or set(d) != {"program", "target", "plan", "info"} or not isinstance(d["info"], dict):
            raise ValueError("not a kernel record")
        program, plan = from_json(d["program"]), from_json(d["plan"])
        if not isinstance(program, Program) or not isinstance(plan, Plan):
            raise ValueError("not a kernel record")
        return Record(program, parse_target(d["target"]), plan, d["info"])


class Kernel:
    """A compiled program.

    Call it with arrays in the order of the program's inputs: NumPy arrays for "cpu"; for a GPU anything that has DLPack or
    `__cuda_array_interface__`, on `stream` (default: the current stream of the arrays' framework).  One output comes back as
    an array, several as a tuple.

    A kernel may be pickled (so that other processes may have it): what is pickled is what `save` writes, which is read back as `load`
    does, so by the same version only; it compiles itself again there.  A copy of a kernel is the kernel.
    """

    def __init__(self, record: Record, *, from_cache: bool = False):
        self._record = record
        self.from_cache = from_cache  # `optimize` found it in the cache and searched nothing
        self._runner: Runner | None = None
        self._lock = threading.Lock()

    @property
    def program(self) -> Program:
        return self._record.program

    @property
    def target(self) -> str:
        return str(self._record.target)

    @property
    def plan(self) -> Plan:
        """The kernels that run, in order, with their axis roles, tiles and schedule choices."""
        return self._record.plan

    @property
    def cost(self) -> Cost:
        """Predicted seconds in all, by resource, and the resource that dominates."""
        return self._record.plan.cost

    @property
    def form(self) -> tuple[str, ...]:
        """The chosen form of each output, in mathematical notation."""
        return tuple(self._record.info.get("form", ()))

    @property
    def egraph(self) -> dict[str, Any]:
        """How large the search space was: "nodes", "classes", and "phases" with nodes, iterations, seconds and why each ended."""
        return self._record.info.get("egraph", {})

    @property
    def source(self) -> str:
        """All emitted source text (on "cpu": the tile programs)."""
        return self._run.source

    @property
    def _run(self) -> Runner:
        with self._lock:
            if self._runner is None:
                self._runner = make_runner(self.program, self.plan, self._record.target)
            return self._runner

    def compile(self) -> Kernel:
        """Run the device compiler now rather than at the first call.  CompilerError if there is none or it fails."""
        self._run.compile()
        return self

    def __call__(self, *arrays: Any, stream: Any = None) -> Any:
        ins = self.program.inputs
        if len(arrays) != len(ins):
            raise InputError(f"{self.program.name} takes {len(ins)} arrays ({', '.join(i.name for i in ins)}), got {len(arrays)}")
        outs = self._run(arrays, stream)
        return tuple(outs) if self.program.structured or len(outs) != 1 else outs[0]

    def explain(self) -> str:
        """The chain of named rules from the program as written to the chosen form."""
        steps = self._record.info.get("explain", [])
        if not steps:
            return "the program runs as it was written: no rule was needed"
        return "\n".join(f"{i + 1:3d}. {rule}: {law}\n     {shown}" for i, (rule, law, shown) in enumerate(steps))

    def report(self) -> Report:
        """The chosen form, the kernels, predicted time against the roofline, what lost, and where compile time went."""
        info, plan = self._record.info, self.plan
        total = plan.cost
        r = Report(f"{self.program.name} for {self.target}")
        r.sections.append(Section("Chosen form", [(f"out{i} =", f) for i, f in enumerate(self.form)]))
        rows = []
        for k in plan.kernels:
            c = k.cost or Cost(0.0)
            ax = ", ".join(
                f"{a}:{x.extent}" + (f"/{x.tile}" if x.tile != x.extent else "") + f" {x.role}" for a, x in k.axes.items()
            )
            choices = ", ".join(
                [*(f"{n}={v}" for n, v in k.choices.items()), *(["computed operands in float32"] if k.wide else [])]
            )
            rows.append((k.name, seconds(c.seconds), f"bound by {c.bound}", ax, choices))
        r.sections.append(Section(f"Kernels ({len(plan.kernels)}), predicted {seconds(total.seconds)}", rows))
        parts = sorted(total.parts.items(), key=lambda p: -p[1])
        r.sections.append(
            Section(
                "Roofline", [(n, seconds(v), f"{100 * v / total.seconds:.0f}%" if total.seconds else "") for n, v in parts if v]
            )
        )
        temps = [b for b in plan.buffers.values() if b.kind == "temp"]
        if temps:
            r.sections.append(Section("Intermediates in memory", [(b.name, b.dtype, str(list(b.shape))) for b in temps]))
        if out := info.get("forbidden"):
            reason = f"{out['times']:.2g} times fewer operations, but operands that float16 (±65504) may not hold"
            remedy = 'bfloat16, bounds of the inputs (TensorSpec(…, range=…)) or numerics="fast" allow it'
            r.sections.append(Section("Left out", [(f"{out['form']} ({out['rule']})", reason, remedy)]))
        compiled = self._runner.details() if self._runner else []
        if compiled:
            r.sections.append(Section("Compiled code", compiled))
        lost = info.get("candidates", [])
        if lost:
            r.sections.append(
                Section(
                    "Candidates that lost",
                    [
                        (f"{c['seconds'] / total.seconds:.2f}×" if total.seconds else "", f"{c['kernels']} kernels", c["form"])
                        for c in lost
                    ],
                )
            )
        measured = [
            (seconds(m["seconds"]), f"predicted {seconds(m['predicted'])}", "taken" if m["taken"] else "")
            for m in info.get("measured", [])
        ]
        if measured:
            r.sections.append(Section("Measured on the device", measured))
        eg = self.egraph
        phases = [
            (p["name"], f"{p['nodes']} nodes", f"{p['iterations']} iterations", seconds(p["seconds"]), p["stop"])
            for p in eg.get("phases", [])
        ]
        if eg:
            r.sections.append(Section(f"E-graph: {eg['nodes']} nodes in {eg['classes']} classes", phases))
        times = info.get("seconds", {})
        if times:
            r.sections.append(Section("Compile time", [(n, seconds(v)) for n, v in times.items()]))
        return r

    def __repr__(self) -> str:
        time = seconds(self.cost.seconds)
        return f"<Kernel {self.program.name} for {self.target}: {len(self.plan.kernels)} kernels, {time} predicted>"

    def save(self, path: str | Path) -> None:
        """Write the kernel to a file that `load` reads, on a machine without egglog too.  The file holds data only.
        SavedKernelError if it cannot be written; what was there before is then still there."""
        try:
            cache.write_atomically(_path(path), [self._saved()])
        except (OSError, ValueError) as e:
            raise _unusable("write", path, e) from None

    def _saved(self) -> bytes:
        payload = self._record.to_bytes()
        head = json.dumps({"format": FORMAT, "version": _version(), "sha256": hashlib.sha256(payload).hexdigest()}).encode()
        return head + b"\n" + payload

    def __copy__(self) -> Kernel:
        return self  # nothing in it changes

    def __deepcopy__(self, memo: object) -> Kernel:
        return self

    def __reduce__(self) -> Any:
        return _restored, (self._saved(),)


def _path(path: Any) -> Path:
    if isinstance(path, (str, os.PathLike)) and isinstance(os.fspath(path), str):
        return Path(path)
    raise SavedKernelError(f"a kernel's path must be a str or a pathlib.Path, not {path!r:.100}", 'for example "kernel.eqsat"')


def _unusable(what: str, path: Any, e: OSError | ValueError) -> SavedKernelError:
    """ValueError: of a name that no file can have (with a null character, or text that the file system cannot encode)."""
    if isinstance(e, OSError):
        return SavedKernelError(f"cannot {what} {path}: {e.strerror}")
    return SavedKernelError(f"cannot {what} {str(path)!r:.200}: no file can have this name", "use a path without such characters")


def load(path: str | Path) -> Kernel:
    """A kernel that `Kernel.save` wrote.  SavedKernelError if the file is not one, or of another version."""
    try:
        raw = _path(path).read_bytes()
    except (OSError, ValueError) as e:
        raise _unusable("read", path, e) from None
    return _read(raw, path)


def _restored(raw: bytes) -> Kernel:
    """The kernel that was pickled."""
    return _read(raw, "the pickled kernel")


def _read(raw: bytes, path: Any) -> Kernel:
    """The kernel in the bytes that `Kernel._saved` made; path: what to call them."""
    head, _, payload = raw.partition(b"\n")
    try:
        meta = json.loads(head)
    except (ValueError, RecursionError):
        meta = None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise SavedKernelError(f"{path} is not a saved kernel", "files written by Kernel.save are")
    if meta.get("version") != _version():
        raise SavedKernelError(
            f"{path} was saved by version {meta.get('version')}, this is {_version()}",
            "optimize and save it again with this version",
        )
    if meta.get("sha256") != hashlib.sha256(payload).hexdigest():
        raise SavedKernelError(f"{path} is damaged: it is not what was written", "save the kernel again")
    try:
        return Kernel(Record.from_bytes(payload))
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise SavedKernelError(f"{path} is damaged: {e}", "save the kernel again") from None


def _version() -> str:
    from . import __version__

    return __version__
