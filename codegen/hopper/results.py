"""What a tile of work leaves: whole rows of 16-bit results, 16 bytes at a time, at its end or (`hold`) beside the next one's products."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..cuda.layout import Layout
from ..cuda.registers import Frame
from ..cuda.schedule import HALVES
from ..cuda.text import C_TYPES, Names, Text
from ..tile import Store
from .pipeline import Pipeline
from .works import Works


class Results(Works):
    def __init__(self, pipe: Pipeline, names: Names, macros: Mapping[str, str]):
        super().__init__(pipe, names, macros)
        self.waiting: list[tuple[str, int]] = []  # results that wait to be stored: the variable, and in how many parts
        self.before_loop = 0  # line of the text
        self.one_step = ""  # text of an iteration, if there is one more

    def store(self, s: Store) -> None:
        """Whole rows of 16-bit results leave 16 bytes at a time."""
        frame, v, b = self.s.store_frames[id(s)], s.arg, self.p.buffer(s.buffer)
        if not self.wide_store(s, frame):
            return super().store(s)
        assert frame.row is not None
        self.comment(s)
        ctype = C_TYPES[b.dtype]
        rows = Layout(frame.row, None)
        source = self.get(v, frame)
        head = f"store_rows<{ctype}>({source}"
        if self.pipe.hold:
            assert frame.column is not None
            name = self.names.new(f"{self.pointer[s.buffer]}_held")
            self.declare(f"HeldRows<{ctype}, {frame.column.slots}> {name};")
            self.waiting.append((name, math.gcd(frame.column.slots // 8, 4)))
            head = f"{name}.take({source}"
        with self.t.block(f"{head}, [&](int i) INLINE_LAMBDA -> {ctype}*", "});"):
            f = Frame(self, rows)
            exists = list(dict.fromkeys(self.exists(f, {a for ix in s.index for a in ix.axes}, rows)))
            place = f"{self.pointer[s.buffer]} + ({self.offset(f, s.buffer, s.index)})"
            for line in f.definitions(frame.row):
                self.t(line)
            self.t(f"return {' && '.join(exists)} ? {place} : nullptr;" if exists else f"return {place};")

    def wide_store(self, s: Store, frame: Layout) -> bool:
        b, g = self.p.buffer(s.buffer), frame.column
        if frame.row is None or g is None or g.slots % 8 or len(g.axes) != 1 or b.dtype not in HALVES or b.kind == "input":
            return False
        if (
            s.arg.predicate
            or s.arg.id in self.consts
            or s.arg.id in self.inline
            or frame.restricted(self.live(s.arg.axes)) != frame
        ):
            return False
        (a,) = g.axes
        whole = self.tile[a] == g.padded and self.p.axes[a].extent % self.tile[a] == 0 and a not in self.p.limits
        last = dict(s.index[-1].terms) if s.index else {}
        alone = last.get(a) == 1 and not any(a in ix.axes for ix in s.index[:-1])
        inside = s.index[-1].bounds(self.p.extents)[0] >= 0 and s.index[-1].bounds(self.p.extents)[1] < b.shape[-1]
        aligned = not any(c % 8 for x, c in last.items() if x != a) and s.index[-1].const % 8 == 0 and b.shape[-1] % 8 == 0
        return whole and alone and inside and aligned

    def store_held_first(self) -> None:
        """Puts in front of the loop, which is printed already: some iterations that store what the tile before has left."""
        if not self.waiting:
            return
        self.declare("bool pending = false;  // results that are still to be stored")
        self.t("pending = true;")
        t, self.t = self.t, Text()
        self.t.depth = t.depth
        self.store_held(self.one_step, "pending = false;")
        t.out[self.before_loop : self.before_loop] = self.t.out
        self.t = t

    def store_held(self, between: str = "", after: str = "") -> None:
        """What waits, part by part.  between: what goes before each part."""
        with self.t.block("if (pending)"):
            for part in range(max(n for _, n in self.waiting)):
                if between:
                    self.t(between)
                for name, parts in self.waiting:
                    if part < parts:
                        self.t(f"{name}.store<{part}, {parts}>();")
            if after:
                self.t(after)
