"""A schedule printed as CUDA C++ (or HIP C++: the device headers differ, this text does not).

Values are arrays of registers, in the layouts that the schedule chose.  Elementwise statements are collected and printed as a few
unrolled loops over the slots of a layout; everything else (contractions, reductions, copies, loops, stores) ends such a run.
"""

from __future__ import annotations

from dataclasses import replace

from ..tile import Const, Contract, Gather, Iota, Load, Loop, Map, Mask, Reduce, Stmt, Store
from .kernel import Function
from .layout import Layout
from .loops import Loops
from .registers import Frame
from .text import C_TYPES, Text


class Fragments(Loops):
    """Prints one kernel."""

    def run(self) -> Function:
        p, s = self.p, self.s
        self.symbols()
        body = Text()
        self.t = body
        body.depth = 1
        self.warps_text()
        self.preamble()
        top = len(body.out)
        for vid, plan in s.tiles.items():  # what no loop brings is asked for at once
            self.tile_names(vid, plan)
            if plan.loop is None:
                self.comment(plan.load)
                self.fill(plan, self.tile_of(vid, None))
                self.issued.append(vid)
        self.statements(p.body)
        self.flush()
        body.out[top:top] = self.declared
        f = self.function_text(body, s.threads, s.min_blocks, s.shared)
        return replace(f, blocks=f.blocks * s.cluster, cluster=s.cluster)

    def statements(self, body: tuple[Stmt, ...]) -> None:
        for s in body:
            self.statement(s)

    def statement(self, s: Stmt) -> None:
        match s:
            case Const() | Iota() | Mask():
                return
            case Load():
                self.load(s)
            case Map() | Gather():
                for layout in self.s.instances.get(s.out.id, ()):
                    self.pending.append((layout, s))
                home = self.s.home.get(s.out.id)
                if home is not None and len(self.s.instances.get(s.out.id, ())) > 1:
                    self.pending = [x for x in self.pending if x[1] is not s or x[0] == home]
                    self.flush()
                    self.convert(s.out)
            case Reduce():
                self.flush_for(s)
                self.reduce(s)
                self.convert(s.out)
            case Contract():
                self.flush()
                self.contract(s)
                self.convert(s.out)
            case Store():
                self.flush()
                self.store(s)
            case Loop():
                self.flush()
                self.load_postponed()
                self.loop(s)

    def store(self, s: Store) -> None:
        frame = self.s.store_frames[id(s)]
        v, b = s.arg, self.p.buffer(s.buffer)
        part = frame.restricted(self.live(v.axes))
        memory, ctype = self.pointer[s.buffer], C_TYPES[b.dtype]
        self.comment(s)
        guards = list(filter(None, ["rank == 0" if self.s.cluster > 1 else "", self.one_lane(frame), self.replica_guard(frame)]))
        axes = {a for ix in s.index for a in ix.axes} | set(v.axes)
        cast = f"({self.compute})" if v.predicate else ""
        if frame == Layout(None, None):
            f = Frame(self, frame)
            value = f.operand(v)
            guard = " && ".join(guards + self.scalar_exists(axes))
            self.t(f"if ({guard or 'true'}) {memory}[{self.offset(f, s.buffer, s.index)}] = as<{ctype}>({cast}{value});")
            return
        run, step, packed = self.run_length(s.buffer, s.index, frame, axes)
        if part != frame or v.predicate or v.id in self.consts or v.id in self.inline:
            run = 1
        with self.over(frame, run) as f:
            conditions = list(dict.fromkeys(guards + self.exists(f, axes, frame)))
            place = self.offset(f, s.buffer, s.index)
            value = f.operand(v)
            if run > 1:
                write = f"store_run<{run}, {packed}>({memory} + ({place}), &{value}, {step});"
            else:
                write = f"{memory}[{place}] = as<{ctype}>({cast}{value});"
            self.t(f"if ({' && '.join(conditions)}) {write}" if conditions else write)
