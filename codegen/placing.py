"""Where values live, and which loops there are: from a kernel's roles to the members of each loop.

A value lives in the shortest prefix of the current loop nest whose axes cover the loop axes that it depends on.
A reduction over a loop axis runs in the loop (axis, depth) at its place, where depth = 1 + the deepest loop at that place whose
result it needs; reductions (and streamed stores) with equal keys share one loop.  So two dependent reductions over one axis
make two loops, and one fold makes one."""

from __future__ import annotations

from .. import terms as T
from ..extraction import plan
from ..extraction.plan import Kernel
from ..terms import Affine, Term
from .monoids import fold_needs, is_fn

Path = tuple[tuple[str, int], ...]  # loops from the outside in: (axis, depth)


class LoweringError(Exception):
    """The kernel's roles do not fit its terms (a reduction over a grid axis, an axis without a role): extraction must not ask."""


class Placing:
    def __init__(self, kernel: Kernel):
        self.k = kernel
        self.streamed = frozenset(a for a, x in kernel.axes.items() if x.role == "loop")
        self.axes_memo: dict[frozenset[str], frozenset[str]] = {}
        self.places: dict[tuple[frozenset[str], Path], Path] = {}
        self.below_memo: dict[Term, dict[Term, int]] = {}
        self.parted = any("." in a for a in kernel.axes)  # is an axis seen as its parts?
        self.operands_memo: dict[Term, tuple[Term, ...]] = {}  # of folds
        # loop → reductions, stores and inner store loops, in order
        self.members: dict[Path, dict[Term | Path | plan.Store, None]] = {}
        self.collected: set[tuple[Term, Path]] = set()  # terms whose loops are registered, for all stores
        self.limits = self.ragged_ends()

    # ---- axes
    def walked(self, axis: str) -> frozenset[str]:
        """An axis in terms of those that the kernel walks."""
        if axis in self.k.axes:
            return frozenset([axis])
        parts = [a for a in self.k.axes if a.startswith(axis + ".")]
        if not parts:
            raise LoweringError(f"axis {axis} has no role in {self.k.name}")
        return frozenset(parts)

    def axes(self, free: frozenset[str]) -> frozenset[str]:
        if free not in self.axes_memo:
            self.axes_memo[free] = frozenset().union(*map(self.walked, free))
        return self.axes_memo[free]

    def position(self, axis: str) -> Affine:
        """The position along a whole axis, from those of the parts that the kernel walks."""
        if axis in self.k.axes:
            return T.axis_index(axis)
        o, i = T.outer(axis), T.inner(axis)
        return Affine().plus(self.position(o), self.k.extents[i]).plus(self.position(i))

    def globally(self, ix: Affine) -> Affine:
        if not self.parted and all(a in self.k.axes for a, _ in ix.terms):
            return ix
        return ix.substitute({a: self.position(a) for a in ix.axes})

    def ragged_ends(self) -> dict[str, Affine]:
        """What elements of each axis exist, where not all of every tile do."""
        out: dict[str, Affine] = {}
        for a, x in self.k.axes.items():
            if x.extent % max(1, x.tile):
                if a.endswith(".i"):
                    raise LoweringError(f"the tile of {a} must divide its block in {self.k.name}")
                out[a] = Affine(x.extent - 1).plus(T.axis_index(a), -1)
        parts = set()  # what the kernel walks of split axes, and the parts that those belong to
        for a in self.k.axes:
            while "." in a:
                parts.add(a)
                a = a.rpartition(".")[0]
        for whole in sorted({a[:-2] for a in parts if a.endswith(".i")}):
            o, i = T.outer(whole), T.inner(whole)
            if o not in parts:
                raise LoweringError(f"{i} without {o} in {self.k.name}")
            if self.k.extents[o] * self.k.extents[i] == self.k.extents[whole]:
                continue
            if i not in self.k.axes:
                raise LoweringError(f"{i} is split again in {self.k.name}, and the blocks of {whole} do not divide it")
            out[i] = Affine(self.k.extents[whole] - 1).plus(self.position(whole), -1)
        return out

    def existence(self, axis: str, here: Path) -> frozenset[str]:
        """Other axes that say which elements of `axis` exist."""
        others = frozenset(self.limits[axis].axes) - {axis} if axis in self.limits else frozenset()
        if not others & self.streamed <= {a for a, _ in here}:
            raise LoweringError(f"what exists of {axis} depends on {sorted(others)}, outside of its loops in {self.k.name}")
        return others

    # ---- places
    def place(self, free: frozenset[str], ctx: Path) -> Path:
        key = free, ctx
        if key not in self.places:
            want = self.axes(free) & self.streamed
            fits = (ctx[:n] for n in range(len(ctx) + 1) if want <= {a for a, _ in ctx[:n]})
            if (found := next(fits, None)) is None:
                raise LoweringError(f"a value over {sorted(want)} is needed outside its loops in {self.k.name}")
            self.places[key] = found
        return self.places[key]

    def below(self, t: Term) -> dict[Term, int]:
        """Reductions over loop axes at or below t, with their depths."""
        if t in self.below_memo:
            return self.below_memo[t]
        for x in T.postorder([t], self.below_memo):
            out: dict[Term, int] = {}
            for a in self.operands(x):
                out.update(self.below_memo[a] if a in self.below_memo else self.below(a))
            if self.is_streamed(x):
                out[x] = 1 + self.deepest(out, self.axes(x.free) & self.streamed)
            self.below_memo[x] = out
        return self.below_memo[t]

    def deepest(self, below: dict[Term, int], scope: frozenset[str]) -> int:
        return max((d for r, d in below.items() if self.axes(r.free) & self.streamed <= scope), default=0)

    def is_streamed(self, t: Term) -> bool:
        if t.op not in ("red", "fold"):
            return False
        axis: str = t.attr[-1]
        role = self.k.axes[axis].role if axis in self.k.axes else None
        if role in (None, "grid"):
            raise LoweringError(f"{self.k.name} reduces over {axis}, which {'is on its grid' if role else 'it does not walk'}")
        return role == "loop"

    def operands(self, t: Term) -> tuple[Term, ...]:
        """Arguments that are evaluated: a fold carries only what its component needs."""
        if t.op == "fold":
            if t not in self.operands_memo:
                h, comp, _ = t.attr
                ps, xs = fold_needs(h, comp, t.args)
                n = len(h.pivots)
                self.operands_memo[t] = tuple(
                    dict.fromkeys(
                        [t.args[p] for p in ps if p < n and not is_fn(h.pivots[p])]
                        + [t.args[n + j] for j in xs]
                        + [t.args[p] for p in ps if is_fn(h.pivots[p])]
                    )
                )
            return self.operands_memo[t]
        if t.op == "gather":
            return t.args[1:]
        return t.args

    def collect(self, t: Term, ctx: Path) -> None:
        """Register every loop that the value needs."""
        stack = [(t, ctx)]
        while stack:
            t, ctx = stack.pop()
            p = self.place(t.free, ctx)
            if (t, p) in self.collected:
                continue
            self.collected.add((t, p))
            here = p
            if self.is_streamed(t):
                if t.attr[-1] in {a for a, _ in p}:
                    raise LoweringError(f"a reduction over {t.attr[-1]} is needed inside a loop over it in {self.k.name}")
                here = (*p, (t.attr[-1], self.below(t)[t]))
                self.members.setdefault(here, {})[t] = None
            stack.extend((a, here) for a in reversed(self.operands(t)))

    def nest(self, s: plan.Store) -> Path:
        """Loops around a streamed store: behind all reductions that it needs, each at its place.  Axes along which something
        is also reduced go innermost."""
        streamed = self.axes(frozenset(a for ix in s.index for a in ix.axes) | s.term.free) & self.streamed
        below = self.below(s.term)
        reduced = {r.attr[-1] for r in below}
        ctx: Path = ()
        for a in sorted((a for a in self.k.axes if a in streamed), key=lambda a: a in reduced):
            ctx = (*ctx, (a, 1 + self.deepest(below, frozenset(b for b, _ in ctx))))
        return ctx
