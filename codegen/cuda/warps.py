"""Which contractions are matrix products, and how many warps share rows, columns or a loop."""

from __future__ import annotations

import math
from dataclasses import replace

from ...terms import REDUCTIONS
from ..tile import (
    Const,
    Contract,
    Loop,
    Map,
    Mask,
    Reduce,
    Stmt,
    Store,
    Value,
    walk,
)
from .facts import Facts
from .layout import Unsupported
from .rewrite import highest_id, rebuild, shared, with_axis
from .schedule import mergeable, missing_limits

# elements of products' results that a thread may hold (cost_models/roofline.py reckons with them, too)
MOST_RESULT = 160  # of one product
SHARED_RESULT = 64  # of all, where the warps share a loop's tiles, so that each holds the whole results
FED_RESULT = 96  # … and one product feeds another one
UNIT = "one"  # a row axis of extent 1, given to contractions that have no rows


class Warps(Facts):
    unit_ends = False  # does what has no rows lose its row again where it meets what has rows?
    split: Loop | None = None  # the loop whose tiles warps share
    shares = True  # may warps share a loop's tiles where no product feeds another one?

    def choose_matrices(self) -> None:
        """Contractions become matrix products where they can; the others a product and a sum."""
        unit: set[int] = set()
        for s in walk(self.p.body):
            if isinstance(s, Contract):
                m = self.matrix(s)
                if m and self.tensor_dtype(s) and (not m[0]) != (not m[1]) and math.prod(self.tile[x] for x in m[2]) >= 16:
                    few, many = (s.a, s.b) if not m[0] else (s.b, s.a)
                    if not self.free(many):  # it lies in registers: a product and a sum there
                        continue
                    rows = [x for x in few.axes if x not in many.axes and x not in s.axes]
                    if self.forced or rows:  # an axis of extent 1 that only this operand has serves as rows
                        self.forced.update(rows[:1])
                    elif not unit and (self.free(few) or not m[0]):
                        unit.add(few.id)
        if unit and not self.forced:
            self.p = with_axis(self.p, unit, UNIT, self.unit_ends)
            self.tile[UNIT] = 1
            self.forced.add(UNIT)
            self.index()
        fresh = highest_id(self.p)

        def f(s: Stmt) -> list[Stmt]:
            nonlocal fresh
            if not isinstance(s, Contract):
                return [s]
            m = self.matrix(s)
            if m and m[0] and m[1]:
                return [s]
            frame = tuple(sorted({*s.a.axes, *s.b.axes}))
            fresh += 1
            product = Value(fresh, frame)
            return [Map(product, "mul", (s.a, s.b)), Reduce(s.out, "+", s.axes, product, s.acc, s.role)]

        self.p = shared(replace(self.p, body=rebuild(self.p.body, f)))
        self.index()
        self.matrices = {s.out.id: s for s in walk(self.p.body) if isinstance(s, Contract)}
        if any(isinstance(s, Reduce) and not self.live(s.axes) for s in walk(self.p.body)):
            self.fresh = fresh
            self.p = replace(self.p, body=rebuild(self.p.body, self.trivial_reduce))
            self.index()

    def trivial_reduce(self, s: Stmt) -> list[Stmt]:
        """A reduction over axes of which the block sees one position."""
        if not isinstance(s, Reduce) or self.live(s.axes):
            return [s]
        fn = {"+": "add", "*": "mul", "max": "max", "min": "min"}[s.op]
        limits = tuple(missing_limits(self.p, s.axes, s.arg.axes))
        if not limits:
            return [Map(s.out, fn, (s.acc, s.arg) if s.acc else (s.arg,), s.role)]
        n = self.fresh
        self.fresh += 3
        where = tuple(sorted({a for x in limits for a in x.axes}))
        exists, identity = Value(n + 1, where, True), Value(n + 2, ())
        chosen = Value(n + 3, tuple(sorted({*s.arg.axes, *where})))
        return [
            Mask(exists, limits),
            Const(identity, REDUCTIONS[s.op]),
            Map(chosen, "where", (exists, s.arg, identity)),
            Map(s.out, fn, (s.acc, chosen) if s.acc else (chosen,), s.role),
        ]

    def choose_warps(self) -> None:
        p, arch = self.p, self.arch
        choices = p.choices
        want = choices.get("warps")
        if isinstance(want, int) and want < 1:
            raise Unsupported(f"{want} warps")
        self.kind = "fragment" if self.matrices else "vector"
        self.wr = self.wc = self.ws = 1
        self.split = None
        if self.kind == "vector":
            return  # sides.py spreads them, when groups are known
        shapes = []
        for s in self.matrices.values():
            m = self.matrix(s)
            assert m is not None
            v = self.chained(s)
            a, b = (m[1], m[0]) if v is s.b else (m[0], m[1])
            shapes.append((math.prod(self.tile[x] for x in a), math.prod(self.tile[x] for x in b), v is not None))
        chain = any(c for _, _, c in shapes)
        if chain:
            rows = max((a for a, _, c in shapes if c))
            per = arch.row_fragments * arch.fragment[0] if rows >= 8 * arch.fragment[0] else arch.fragment[0]
            if isinstance(want, int):
                per = max(arch.fragment[0], -(-rows // want))
            warps = max(1, rows // per)
            many = want if isinstance(want, int) else 4
            few = rows <= arch.fragment[0]
            if few or (self.shares and warps < many):
                self.split = self.splittable(many, any_number=few)
            if self.split is None:
                # a wide result: fewer rows a warp, then its columns over several warps (which all work out the left operand)
                columns = max(b for _, b, c in shapes if c)
                while per > arch.fragment[0] and per * columns > MOST_RESULT * arch.warp:
                    per //= 2
                while per * columns > MOST_RESULT * arch.warp * self.wc and columns % (2 * self.wc * arch.grain) == 0:
                    self.wc *= 2
                warps = max(1, rows // per)
                self.wr = min(warps, 16, arch.most_warps // self.wc)
        else:
            rows = max(min(a, b) if not any(self.left_fixed(s) for s in self.matrices.values()) else a for a, b, _ in shapes)
            m0, n0 = self.extent_pair()
            loops = {x.axis for x in walk(p.body) if isinstance(x, Loop)}
            along = all(loops & set(s.axes) for s in self.matrices.values())  # the loop is what the products sum over
            if self.shares and along and sum(a * b for a, b, _ in shapes) <= SHARED_RESULT * arch.warp:
                # few rows: no warp reads what another one has read, and none waits for another
                self.split = self.splittable(want if isinstance(want, int) else 4)
                if self.split is not None:
                    return
            total = want if isinstance(want, int) else (8 if m0 * n0 >= 128 * 256 else 4)
            fits = [
                (r, c)
                for r in (1, 2, 4, 8, 16)
                for c in (1, 2, 4, 8, 16)
                if (r == 1 or m0 >= r * arch.fragment[0]) and (c == 1 or n0 % (c * arch.grain) == 0)
            ]
            while not any(r * c == total for r, c in fits):
                total //= 2
            _, self.wr, self.wc = min((m0 / r + n0 / c, r, c) for r, c in fits if r * c == total)

    def left_fixed(self, s: Contract) -> bool:
        return self.chained(s) is not None

    def extent_pair(self) -> tuple[int, int]:
        """Rows and columns of the largest product, with the contiguous axis of the result as its columns."""
        wanted = self.columns_wanted()
        best = (0, 0, 0)
        for s in self.matrices.values():
            m = self.matrix(s)
            assert m is not None
            a, b = (math.prod(self.tile[x] for x in g) for g in m[:2])
            if set(m[0]) & wanted and not set(m[1]) & wanted:
                a, b = b, a
            best = max(best, (a * b, a, b))
        return best[1], best[2]

    def splittable(self, warps: int, any_number: bool = True) -> Loop | None:
        """The loop whose tiles the warps can share, each with its own state; its tile shrinks accordingly.  any_number: may they be
        fewer, and hold as much as they have to?"""
        loops = [s for s in walk(self.p.body) if isinstance(s, Loop)]
        if len(loops) != 1 or not loops[0].carries or any(isinstance(s, Store) for s in loops[0].body):
            return None
        loop = loops[0]
        t, want = self.tile[loop.axis], warps
        while warps > 1 and (t % warps or t // warps < self.arch.fragment[2]):
            warps //= 2
        if warps <= 1 or not mergeable(loop):
            return None
        if not any_number:
            results = [(s.out.axes, self.size(s.out.axes)) for s in self.matrices.values()]
            held = sum(n / warps if loop.axis in axes else n for axes, n in results)
            if warps < want or held > FED_RESULT * self.arch.warp:
                return None
        self.ws = warps
        self.tile[loop.axis] = t // warps
        return loop
