"""Which tile of work a block is at: from the number of a work to where it begins along each axis, and to the range of its loop.

Producer and consumers ask alike, each in its own registers: only the number goes from one to the others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..cuda.fragments import Fragments
from ..cuda.text import Names
from .pipeline import Pipeline


class Works(Fragments):
    converts_once = True

    def __init__(self, pipe: Pipeline, names: Names, macros: Mapping[str, str]):
        super().__init__(pipe.schedule, names, macros)
        self.pipe = pipe

    def trips(self, a: str) -> int:
        """Positions of a grid axis, as works count them."""
        return self.p.axes[a].trips // (self.pipe.cluster if a == self.pipe.along else 1)

    def positions(self, work: str) -> None:
        """Declares where the tile of work number `work` begins along each grid axis."""
        t, order = self.t, self.pipe.traversal
        for a in self.p.grid:
            self.start[a] = "0"
        for a, x in self.p.axes.items():
            if x.role == "whole":
                self.start[a] = "0"
        slow, fast = (math.prod(self.trips(a) for a, _ in axes) for axes in (order.slow, order.fast))
        together = self.pipe.cluster if any(a == self.pipe.along for a, _ in order.fast) else 1
        group = min(max(1, order.group // together), fast)
        if slow > 1 and fast > 1 and group < fast:
            new = self.names.new
            g, rest, some, at_slow, at_fast = new("group"), new("place"), new("size"), new("slow"), new("fast")
            t(f"// {group * together} places of {', '.join(a for a, _ in order.fast)} at a time")
            t(f"const int {g} = {work} / {group * slow}, {rest} = {work} % {group * slow};")
            if fast % group:
                t(f"const int {some} = {g} == {fast // group} ? {fast % group} : {group};")
            else:
                some = str(group)
            t(f"const int {at_slow} = {rest} / {some}, {at_fast} = {g} * {group} + {rest} % {some};")
            self.decode(order.slow, at_slow)
            self.decode(order.fast, at_fast)
        else:
            self.decode((*order.slow, *order.fast), work)

    def decode(self, axes: Sequence[tuple[str, bool]], at: str) -> None:
        """Declares the first position of each axis from their joint number; the last one varies fastest."""
        step = 1
        for n, (a, reverse) in reversed(list(enumerate(axes))):
            x, name, trips = self.p.axes[a], self.axis_name[a], self.trips(a)
            part = f"{at} / {step}" if step > 1 else at
            part = f"{part} % {trips}" if n else part
            part = f"{trips - 1} - {part if part == at else f'({part})'}" if reverse else part
            part = part if part.isidentifier() else f"({part})"
            if trips < x.trips:
                part = f"({part} * {self.pipe.cluster} + rank)"
            note = "  // the longest first" if reverse else ""
            self.start[a] = name if x.tile == 1 else self.first_of(name)
            self.t(f"const {self.width[a]} {self.start[a]} = {part if x.tile == 1 else f'{part} * {x.tile}'};{note}")
            step *= trips

    def range_names(self) -> tuple[str, str]:
        name = self.axis_name[self.pipe.loop.axis]
        return self.names.new(f"{name}_first"), self.names.new(f"{name}_end")

    def tile_range(self, first: str, end: str) -> tuple[bool, tuple[str, str]]:
        """As loop_range, but never empty: what lies outside is masked, and one such iteration changes nothing."""
        loop = self.pipe.loop
        found = self.loop_range(loop, self.tile[loop.axis], first, f"{end}_found")
        self.t(f"const int {end} = at_least({end}_found, {first} + 1);")
        return found
