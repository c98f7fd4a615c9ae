"""Running a plan: its buffers, and its tile programs one after another."""

from __future__ import annotations

import itertools
import math
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from weakref import WeakKeyDictionary

import numpy as np

from ...errors import InputError
from ...extraction import plan as P
from ...program import Program
from ..check import check
from ..lower import lower
from ..tile import Loop, TileProgram, walk
from .bind import Scope
from .contract import aligned_bytes
from .factors import prepare_factors
from .frame import Frame, Plan, clip, live_range
from .frozen import Frozen, freeze
from .layout import Format, element_type, layout
from .pool import cpus, run_blocks
from .rewrite import loose_limits, mask_loose_limits, reduce_one_sided

INLINE = 200_000  # elements of work below which threads cost more than they save
PLACES = 1 << 12  # blocks whose places are remembered
FORMATS = 8  # memory formats of the arguments for which a tile program is kept bound


def prepare(p: TileProgram) -> TileProgram:
    """The tile program in the form that runs here."""
    return prepare_factors(simplified(p))


def simplified(p: TileProgram) -> TileProgram:
    return mask_loose_limits(reduce_one_sided(p))


def prepare_frozen(p: TileProgram) -> Frozen | None:
    """The form that runs where the arguments allow it, if there is one."""
    f = freeze(simplified(p))
    return f and replace(f, program=prepare_factors(check(f.program)))


class Executable:
    """A tile program for buffers of given formats.  May be called from several threads at once."""

    def __init__(self, program: TileProgram, formats: tuple[Format, ...]):
        """program: prepared (`prepare`); formats: of its reads, then its writes."""
        loose = loose_limits(program)
        names = {b.name: n for n, b in enumerate((*program.reads, *program.writes))}
        self.plan = Plan(
            program,
            formats,
            layout(program, formats),
            tuple(program.limits[a] for a in loose),
            tuple((a, ix) for a, ix in program.limits.items() if a not in loose),
            names,
        )
        self.grid = [(a, x.tile, x.trips) for a, x in program.axes.items() if x.role == "grid"]
        self.inside = [a for a, x in program.axes.items() if x.role != "loop"]
        self.blocks = math.prod(n for _, _, n in self.grid)
        self.order = self._order()
        self.places: dict[int, tuple[dict[str, int], dict[str, int], tuple[int, ...]]] = {}  # block → where it is

    def _order(self) -> list[int] | None:
        """Blocks with more loop trips first, so that no thread is left with a long one at the end."""
        p = self.plan.program
        loops = [s for s in walk(p.body) if isinstance(s, Loop) and s.constraints]
        grid = {a for a, _, _ in self.grid}
        if not 1 < self.blocks <= 1 << 14 or not any(set(ix.axes) & grid for s in loops for ix in s.constraints):
            return None
        extents = p.extents | {a: x.extent for a, x in p.axes.items()}

        def trips(block: int) -> int:
            ranges = [live_range(s, self.plan, *self._tile(block), extents) for s in loops]
            return sum(end - first for first, end in ranges)

        return sorted(range(self.blocks), key=lambda n: (-trips(n), n))

    def _tile(self, block: int) -> tuple[dict[str, int], dict[str, int]]:
        """First positions and lengths of a block's tile of each axis outside of loops."""
        axes = self.plan.program.axes
        position = dict.fromkeys(axes, 0)
        for a, tile, trips in reversed(self.grid):
            block, n = divmod(block, trips)
            position[a] = n * tile
        length = {a: min(axes[a].tile, axes[a].extent - position[a]) for a in self.inside}
        for a, ix in self.plan.clips:
            if a in length:
                length[a] = max(0, clip(a, ix, position[a] + length[a], position) - position[a])
        return position, length

    def part(self, block: int) -> dict[str, slice]:
        """A block's part of each axis that is not streamed."""
        position, length = self._tile(block)
        return {a: slice(position[a], position[a] + length[a]) if a in length else slice(None) for a in position}

    def run(self, arrays: list[np.ndarray], idle: list[Worker], blocks: list[int] | None = None) -> None:
        """arrays: of the formats that this was made for.  idle: workers to take, and to leave behind.  blocks: which (all)."""
        todo = self.order if blocks is None else blocks
        count = self.blocks if todo is None else len(todo)
        if count == 0:
            return
        windows = [window(x) for x in arrays]

        def work(numbers: Iterator[int]) -> None:
            try:
                worker = idle.pop()
            except IndexError:
                worker = Worker()
            frame = worker.frame(self)
            frame.windows[:] = windows
            with np.errstate(all="ignore"):
                for n in numbers:
                    self._block(frame, n if todo is None else todo[n])
            frame.windows.clear()
            frame.registers[:] = [None] * len(frame.registers)
            idle.append(worker)

        try:
            run_blocks(count, work, 1 if self.plan.layout.work < INLINE else cpus())
        finally:
            windows.clear()  # the pool may hold on to `work` for a while

    def _block(self, frame: Frame, block: int) -> None:
        place = self.places.get(block)
        if place is None:
            position, length = self._tile(block)
            place = position, length, tuple(length.values())
            if len(self.places) < PLACES:
                self.places[block] = place
        position, length, key = place
        frame.position.update(position)
        steps = frame.scopes.get(key)
        if steps is None:
            steps = frame.scopes[key] = Scope(self.plan, frame, length).steps(self.plan.program.body)
        for step in steps:
            step()


class Worker:
    """Scratch memory for one thread, and its frames in it: one for each tile program, of which one runs at a time."""

    def __init__(self) -> None:
        self.arena = aligned_bytes(0)
        self.frames: WeakKeyDictionary[Executable, Frame] = WeakKeyDictionary()

    def frame(self, exe: Executable) -> Frame:
        frame = self.frames.get(exe)
        if frame is None:
            if exe.plan.layout.arena > self.arena.size:
                self.arena = aligned_bytes(exe.plan.layout.arena)
            frame = self.frames[exe] = Frame(exe.plan, self.arena)
        frame.drawn.clear()  # other programs have used the memory
        return frame


def window(x: np.ndarray) -> np.ndarray:
    """All bytes from the lowest address of the array's elements to the highest one."""
    if x.flags.c_contiguous:
        return x.reshape(-1).view(np.uint8)
    size = Format.of(x).nbytes
    if size == 0:
        return np.empty(0, np.uint8)
    lowest = x[(..., *(slice(n - 1, n) if s < 0 else slice(0, 1) for n, s in zip(x.shape, x.strides)))]
    return np.lib.stride_tricks.as_strided(lowest.reshape(1).view(np.uint8), (size,), (1,))


class CpuKernel:
    """A plan, ready to run.  May be called from several threads at once."""

    def __init__(self, plan: P.Plan, program: Program):
        self.plan, self.program = plan, program
        self.tile_programs = tuple(check(lower(k, plan.buffers, plan.compute_dtype)) for k in plan.kernels)
        self._prepared = tuple(map(prepare, self.tile_programs))
        self._frozen = tuple(map(prepare_frozen, self.tile_programs))
        self._bound: dict[str, OrderedDict[tuple[Format, ...], Executable]] = {}
        self._lock = threading.Lock()
        self._idle: list[Worker] = []
        self._last_use = {b.name: n for n, p in enumerate(self._prepared) for b in (*p.reads, *p.writes)}

    @property
    def source(self) -> str:
        return "\n\n".join(map(str, self.tile_programs))

    def _executable(self, program: TileProgram, used: list[np.ndarray], kind: str = "") -> Executable:
        formats = tuple(map(Format.of, used))
        with self._lock:
            known = self._bound.setdefault(program.name + kind, OrderedDict())
            if formats not in known:
                known[formats] = Executable(program, formats)
                if len(known) > FORMATS:
                    known.popitem(last=False)
            known.move_to_end(formats)
            return known[formats]

    def _run(self, n: int, arrays: dict[str, np.ndarray]) -> None:
        """One tile program.  arrays: by buffer."""
        p, frozen, blocks = self._prepared[n], self._frozen[n], None
        if frozen is not None and frozen.fits(arrays):
            guards = {b.name: np.ones(b.shape, element_type(b.dtype)) for b in frozen.program.writes if b not in p.writes}
            used = [(arrays | guards)[b.name] for b in (*frozen.program.reads, *frozen.program.writes)]
            exe = self._executable(frozen.program, used, " frozen")
            exe.run(used, self._idle)
            blocks = frozen.failed(guards, exe.part, exe.blocks)
            if not blocks:
                return
        used = [arrays[b.name] for b in (*p.reads, *p.writes)]
        self._executable(p, used).run(used, self._idle, blocks)

    def run(self, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
        """The outputs by the name of their buffer, written into `outputs` where given.

        inputs: by parameter, of the program's shapes and dtypes and with any strides.  Raises InputError if they do not fit."""
        arrays: dict[str, np.ndarray] = {}
        results: dict[str, np.ndarray] = {}
        for b in self.plan.buffers.values():
            if b.kind == "input":
                arrays[b.name] = _checked(inputs, b, "input")
        for b in self.plan.buffers.values():
            if b.kind == "output":
                if outputs is not None and b.name in outputs:
                    results[b.name] = x = _checked(outputs, b, "output")
                    if not x.flags.writeable:
                        raise InputError(f"output {b.name} is read-only")
                    if any(np.may_share_memory(x, y) for y in arrays.values()) or any(
                        np.may_share_memory(x, y) for n, y in results.items() if n != b.name
                    ):
                        x = np.empty(b.shape, x.dtype)  # it must not change while it is read
                    arrays[b.name] = x if x.flags.aligned else np.empty(b.shape, x.dtype)
                else:
                    results[b.name] = arrays[b.name] = np.empty(b.shape, element_type(b.dtype))
        for n, p in enumerate(self._prepared):
            names = [b.name for b in itertools.chain(p.reads, p.writes)]
            for b in p.writes:
                if b.name not in arrays:
                    arrays[b.name] = np.empty(b.shape, element_type(b.dtype))
            self._run(n, arrays)
            for name in names:
                if self._last_use[name] == n and self.plan.buffers[name].kind == "temp":
                    arrays.pop(name, None)
        for name, x in results.items():
            if arrays[name] is not x:
                np.copyto(x, arrays[name])
        return results


def _checked(given: dict[str, np.ndarray], b: P.Buffer, what: str) -> np.ndarray:
    x = given.get(b.name)
    if x is None:
        raise InputError(f"{what} {b.name} is missing")
    if not isinstance(x, np.ndarray):
        raise InputError(f"{what} {b.name} is a {type(x).__name__}", "give a NumPy array")
    dtype = element_type(b.dtype)
    if x.shape != b.shape:
        raise InputError(f"{what} {b.name} has shape {x.shape}, not {b.shape}")
    if x.dtype != dtype and (x.dtype.isnative or x.dtype.newbyteorder("=") != dtype):
        raise InputError(f"{what} {b.name} has dtype {x.dtype}, not {b.dtype}", f"convert it: {b.name}.astype({b.dtype!r})")
    if what == "input" and not (x.flags.aligned and x.dtype.isnative):
        x = x.astype(dtype)
    return x
