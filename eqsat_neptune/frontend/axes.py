"""Identity of axes while a program is traced: which axes are one, which were split into parts, which must stay apart.

Every dimension of an input starts with an axis of its own.  Elementwise operations and contractions unify axes, reshapes
split them.  Two axes that occur in one tensor must never become one; `apart` records them and `unify` then refuses.
Names are provisional ("%0", "%1", … in order of creation) and stay valid: `resolve` says what has become of them.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..terms import Affine


class AxisTable:
    def __init__(self) -> None:
        self.extent: dict[str, int] = {}
        self._same: dict[str, str] = {}                     # unified with an older axis
        self._parts: dict[str, tuple[str, str]] = {}        # split into (major, minor)
        self._near: dict[str, set[str]] = {}                # of live axes: the live ones that occur together with it

    def fresh(self, extent: int) -> tuple[str, ...]:
        """A dimension of its own: one new axis, or none if the extent is 1."""
        if extent == 1:
            return ()
        name = f"%{len(self.extent)}"
        self.extent[name] = extent
        self._near[name] = set()
        return (name,)

    @staticmethod
    def age(axis: str) -> int:
        return int(axis[1:])

    def _root(self, a: str) -> str:
        while a in self._same:
            a = self._same[a]
        return a

    def resolve(self, axes: Iterable[str]) -> tuple[str, ...]:
        """The live axes, row-major, that these stand for now."""
        out: list[str] = []
        stack = list(axes)[::-1]
        while stack:
            a = self._root(stack.pop())
            if a in self._parts:
                stack.extend(reversed(self._parts[a]))
            else:
                out.append(a)
        return tuple(out)

    def size(self, axes: Iterable[str]) -> int:
        n = 1
        for a in axes:
            n *= self.extent[a]
        return n

    def linear(self, axes: Iterable[str]) -> Affine:
        """Position in the dimension that these axes form, row-major."""
        step, terms = 1, []
        for a in reversed(tuple(axes)):
            terms.append((a, step))
            step *= self.extent[a]
        return Affine(0, tuple(reversed(terms)))

    def resolved(self, ix: Affine) -> Affine:
        """The same index in live axes."""
        return ix.substitute({a: self.linear(self.resolve((a,))) for a in ix.axes})

    def apart(self, axes: Iterable[str]) -> None:
        """These live axes occur in one tensor, so they are different ones."""
        axes = tuple(axes)
        for a in axes:
            self._near[a].update(axes)
            self._near[a].discard(a)

    def unify(self, a: str, b: str) -> bool:
        """Make two live axes of one extent the same; False if they must stay apart."""
        if a == b:
            return True
        if b in self._near[a]:
            return False
        if self.age(b) < self.age(a):
            a, b = b, a
        self._same[b] = a
        for c in self._near.pop(b):
            self._near[c].discard(b)
            self._near[c].add(a)
            self._near[a].add(c)
        return True

    def split(self, a: str, minor: int) -> tuple[str, str]:
        """Split a live axis into (major, minor) parts; `minor` divides its extent and is neither 1 nor all of it."""
        (hi,), (lo,) = self.fresh(self.extent[a] // minor), self.fresh(minor)
        self._parts[a] = (hi, lo)
        near = self._near.pop(a)
        self._near[hi], self._near[lo] = near | {lo}, near | {hi}
        for c in near:
            self._near[c].discard(a)
            self._near[c] |= {hi, lo}
        return hi, lo

    def refine(self, x: tuple[str, ...], y: tuple[str, ...]) -> bool:
        """Split live axes of two dimensions of one size until both have the same extents, axis by axis.  False, with nothing
        split, if their factorisations do not agree (6·4 against 8·3)."""
        extent, cuts = dict(self.extent), {}                # a rehearsal: an axis may occur on both sides
        xs, ys = list(self.resolve(x)), list(self.resolve(y))
        i = 1
        while i <= min(len(xs), len(ys)):
            m, n = extent[xs[-i]], extent[ys[-i]]
            if m % n and n % m:
                return False
            if m == n:
                i += 1
                continue
            a, minor = (xs[-i], n) if m > n else (ys[-i], m)
            hi, lo = a + "h", a + "l"
            cuts[a] = (hi, lo, minor)
            extent |= {hi: extent[a] // minor, lo: minor}
            xs, ys = ([b for c in side for b in ((hi, lo) if c == a else (c,))] for side in (xs, ys))
            i = 1
        made: dict[str, str] = {}
        for a, (hi, lo, minor) in cuts.items():
            made[hi], made[lo] = self.split(made.get(a, a), minor)
        return True

    def digits(self, e: Affine, sizes: Iterable[int], extents: Mapping[str, int] | None = None) -> list[Affine] | None:
        """An index into a dimension as one index for each of the axes (of these sizes, row-major) that form it; None if they are
        not affine.  Only the first may leave its range."""
        out: list[Affine] = []
        for n in reversed(tuple(sizes)[1:]):
            lo = Affine(e.const % n, tuple((a, r) for a, c in e.terms if (r := c - n * int(c / n))))
            low, high = lo.bounds(extents or self.extent)   # type: ignore[arg-type]
            if low < 0 or high >= n:
                return None
            out.append(lo)
            rest = e.plus(lo, -1)
            e = Affine(rest.const // n, tuple((a, c // n) for a, c in rest.terms))
        out.append(e)
        return out[::-1]

    def digits_by_splitting(self, e: Affine, sizes: tuple[int, ...]) -> list[Affine] | None:
        """Like `digits`, but splits axes of `e` where that helps (a slice of a merged dimension that keeps whole rows)."""
        cuts: dict[str, int] = {}                           # axis → extent of its minor part
        trial, extents = e, dict(self.extent)
        while self.digits(trial, sizes, extents) is None:
            inner = 1
            for n in reversed(sizes[1:]):
                inner *= n
                for a, c in trial.terms:
                    cut = inner // abs(c)
                    if a in self.extent and cut * abs(c) == inner and 1 < cut < extents[a] and extents[a] % cut == 0:
                        cuts[a] = cut
                        extents |= {a + "hi": extents[a] // cut, a + "lo": cut}
                        trial = trial.substitute({a: Affine(0, ((a + "hi", cut), (a + "lo", 1)))})
                        break
                else:
                    continue
                break
            else:
                return None
        for a, cut in cuts.items():
            self.split(a, cut)
        return self.digits(self.resolved(e), sizes)
