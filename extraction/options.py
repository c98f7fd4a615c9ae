"""The ways to get each class in a kernel, and the work that each way adds, counted before anything is lowered.

Work is counted without recomputation and without padding, so that it bounds every kernel that it may become.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from .. import terms as T
from ..cost_models.base import CostModel, Work
from ..graph import Node
from ..program import DTYPES
from .bounds import Least
from .classes import PARTS
from .prices import bits
from .region import Region

SPECIAL = frozenset({
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "recip", "sqrt", "rsqrt", "tanh", "erf", "sinh", "cosh", "sin", "cos",
    "tan", "asin", "acos", "atan", "asinh", "acosh", "atanh", "pow", "mod", "floordiv", "atan2",
})  # fmt: skip

Vec = tuple[float, float, float, float]  # seconds of tensor, plain and special work, and of memory traffic
ZERO: Vec = (0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Option:
    """One way to get a class.

    kind      "node": computed by `node`; "view": the node is a view, and its operand lies in memory; "inline": a view computed here
    product   for a sum: the product that it sums directly, without a class between them
    products  for a fold: of singletons that it weighs and sums directly, their products
    children  classes that it needs in the kernel
    items     work that it adds, as bits
    leaf      class that another kernel must store for it, or -1
    reduced   axes that it reduces, as bits
    renamed   axes that an inlined view takes away or brings in, as bits
    sides     of a product of matrices: the factors of each operand, the largest one first
    shown     of an inlined view: what share of its operand it shows
    """

    kind: str
    node: Node
    children: tuple[int, ...] = ()
    items: int = 0
    product: Node | None = None
    leaf: int = -1
    reduced: int = 0
    renamed: int = 0
    sides: tuple[tuple[int, ...], ...] = ()
    products: tuple[tuple[int, Node], ...] = ()
    shown: float = 1.0


def work_of(e: T.Term) -> tuple[float, float]:
    """(plain operations, special functions) of a coefficient on one element."""
    special = sum(1.0 for t in T.postorder([e]) if t.op in ("un", "bi") and t.attr in SPECIAL)
    return 1.0, special


class Options:
    """Options of all classes of a region under one view of the axes: `split` names the axis that is seen as two parts, if any.

    Sets of axes and of work items are bits of integers.  An item is work that counts once in a kernel however many classes need it.
    """

    def __init__(self, region: Region, model: CostModel, split: str | None):
        self.r, self.split = region, split
        self.parts = (split + ".i", split + ".o") if split else ()
        self.launch = model.floor(Work())
        kinds = ("tensor", "ops", "special", "bytes")
        self.rate = tuple((model.floor(Work(**{k: 1e15})) - self.launch) / 1e15 for k in kinds)
        mixed = (model.floor(Work(mixed=1e15)) - self.launch) / 1e15
        self.slow = max(mixed / self.rate[0], 1.0) if self.rate[0] else 1.0  # how much longer mixed products take
        # how much longer those take of numbers that memory holds in more than 16 bits: no matrix unit does them
        self.plain = self.rate[1] / 2 / self.rate[0] if model.tensor_dtypes and self.rate[0] else 1.0
        if self.plain > 1.0 and not self._rounds():
            self.rate, self.slow, self.plain = (self.rate[0] * self.plain, *self.rate[1:]), 1.0, 1.0
        classes = range(len(region.nodes)) if self.plain > 1.0 else ()
        self.long = self.union(1 << c for c in classes if DTYPES[self._held(c)] > 2)  # classes held so where they lie in memory
        # and where nothing computed is rounded, those that a kernel computes if it does not read them; beside them, one bit stands for
        # operands that are no class: weights of folds, products of factors
        self.made = 1 << len(region.nodes) if region.wide and self.plain > 1.0 else 0
        self.computed = self.made | self.union(1 << c for c in classes if self.made and not self._lies(c))
        self.alone: dict[int, int] = {}  # place of an item → those of them that are an operand of its product by themselves
        self.affected = 0  # items that have any
        self.bit: dict[str, int] = {}
        self.size: list[float] = []  # extent of each axis, by bit
        self.vecs: list[Vec] = []  # of each item
        self.item_axes: list[int] = []  # axes over which an item works
        self.reads = 0  # items that read memory
        self._items: dict[object, int] = {}
        self.least = Least(region)
        self.surely: list[Vec] = []  # of each item, what every kernel with it takes
        self.arrays: dict[tuple[object, float], list[int]] = {}  # (array, its bytes) → items that read it
        self._sure: dict[int, Vec] = {}
        self._vecs: dict[int, Vec] = {0: ZERO}
        self._blends: dict[int, float] = {}
        self._masks: dict[frozenset[str], int] = {}
        self._counts: dict[int, float] = {}
        self._tiles: dict[tuple[int, int], int] = {}
        n = len(region.nodes)
        self.zero = [any(x.op == "num" and x.attr == 0.0 for x in ns) for ns in region.nodes]
        self.options = [list(self._options(c)) for c in range(n)]

    # ---- axes and counts
    def mask(self, axes: frozenset[str]) -> int:
        """Axes as bits, the split axis as its parts."""
        if axes not in self._masks:
            m = 0
            for a in sorted(axes):
                for x in self.parts if a == self.split else (a,):
                    if x not in self.bit:
                        self.bit[x] = 1 << len(self.bit)
                        self.size.append(self._extent(x))
                    m |= self.bit[x]
            self._masks[axes] = m
        return self._masks[axes]

    def _extent(self, a: str) -> float:
        if a.endswith((".o", ".i")):
            whole = max(self._extent(a[:-2]), 1.0)
            parts = min(float(PARTS), whole)
            return parts if a.endswith(".o") else math.ceil(whole / parts)
        return float(self.r.extents[a])

    def count(self, mask: int) -> float:
        """Elements along these axes."""
        if mask not in self._counts:
            self._counts[mask] = math.prod(s for i, s in enumerate(self.size) if mask >> i & 1)
        return self._counts[mask]

    def tiles(self, mask: int, size: int) -> int:
        """Tiles of at most so many elements of each of these axes."""
        key = mask, size
        if key not in self._tiles:
            self._tiles[key] = math.prod(math.ceil(self.size[b] / size) for b in bits(mask))
        return self._tiles[key]

    def axes(self, mask: int) -> frozenset[str]:
        """Names of axes, the split one as its parts."""
        return frozenset(a for a, b in self.bit.items() if mask & b)

    def ax(self, c: int) -> int:
        return self.mask(self.r.free[c])

    def bytes(self, c: int, dtype: str) -> float:
        return self.count(self.ax(c)) * DTYPES[dtype]

    # ---- work
    def item(
        self,
        key: object,
        axes: int,
        tensor: float = 0.0,
        ops: float = 0.0,
        special: float = 0.0,
        read: float = 0.0,
        sure: Vec | None = None,
        array: tuple[object, float] | None = None,
    ) -> int:
        """The bit of a piece of work (made at its first mention); read: bytes; sure: (tensor, ops, special, read) that every kernel
        with these elements does, if less; array: which one is read, and its bytes."""
        if key not in self._items:
            self._items[key] = 1 << len(self.vecs)
            self.item_axes.append(axes)
            if read:
                self.reads |= self._items[key]
            t, o, s, m = self.rate
            self.vecs.append((tensor * t, ops * o, special * s, read * m))
            work, moved = self.least.share(self.axes(axes), self.count(axes))
            a, b, c, d = sure or (tensor, ops, special, read)
            self.surely.append((a * t * work, b * o * work, c * s * work, d * m * moved))
            if array is not None:
                self.arrays.setdefault(array, []).append(len(self.vecs) - 1)
        return self._items[key]

    def sure(self, items: int) -> Vec:
        """Seconds, by resource, that every kernel with these items takes."""
        found = self._sure.get(items)
        if found is None:
            t = o = s = m = 0.0
            surely = self.surely
            for i in bits(items):
                a, b, c, d = surely[i]
                t, o, s, m = t + a, o + b, s + c, m + d
            for ways, seconds in self._read_again:
                read = items & ways
                if read & (read - 1):  # no more than the array has, however many ways it is read in
                    m -= max(sum(surely[i][3] for i in bits(read)) - seconds, 0.0)
            found = self._sure[items] = t, o, s, m
        return found

    @cached_property
    def _read_again(self) -> list[tuple[int, float]]:
        """Arrays that may be read in several ways: these items, and the seconds that it takes to read the array once."""
        return [
            (self.union(1 << i for i in ways), size * self.rate[3]) for (_, size), ways in self.arrays.items() if len(ways) > 1
        ]

    def vec(self, items: int) -> Vec:
        """Seconds of a set of items, by resource."""
        found = self._vecs.get(items)
        if found is None:
            a = b = c = d = 0.0
            vecs = self.vecs
            for i in bits(items):
                t, o, s, m = vecs[i]
                a, b, c, d = a + t, b + o, c + s, d + m
            found = self._vecs[items] = (a, b, c, d)
        return found

    def blend(self, items: int) -> float:
        """Likely seconds of a set of items: the dominant resource, and a part of the others."""
        if items not in self._blends:
            v = self.vec(items)
            most = max(v)
            self._blends[items] = most + 0.25 * (v[0] + v[1] + v[2] + v[3] - most)
        return self._blends[items]

    def read(self, c: int) -> int:
        """Item of reading a class that a kernel of this region has stored."""
        size = self.bytes(c, self.r.dtype[c])
        return self.item(("read", c), self.ax(c), read=size, array=(c, size))

    def gathered(self, factors: list[int]) -> tuple[list[int], list[int]]:
        """Places of the factors (given by their axes) in two operands: around the widest one, and the others; the largest first."""
        order = sorted(range(len(factors)), key=lambda i: (self.count(factors[i]), factors[i]), reverse=True)
        wide = factors[order[0]]
        return [i for i in order if not factors[i] & ~wide], [i for i in order if factors[i] & ~wide]

    def product(self, key: object, factors: list[int], summed: int, classes: tuple[int, ...]) -> int:
        """Item of a sum over `summed` of a product of tensors with these axes (classes: which they are, −1: none).  Factors are
        gathered into two operands first."""
        near, others = self.gathered(factors)
        left, right = (self.union(factors[i] for i in g) for g in (near, others))
        every = left | right | summed
        if self.matrices(left, right, summed):
            ahead = (len(near) - 1) * self.count(left) + max(len(others) - 1, 0) * self.count(right)
            work = 2.0 * self.count(every)
            item = self.item(key, every, tensor=work, ops=ahead, sure=(work, 0.0, 0.0, 0.0))
            # a factor is an operand by itself for sure if every other one has an axis that it has not
            alone = self.union(
                1 << c for i, c in enumerate(classes) if c >= 0 and all(f & ~factors[i] for j, f in enumerate(factors) if j != i)
            )
            if self.made and any(self._is_made([classes[i] for i in g]) for g in (near, others)):
                alone |= self.made
            if alone & (self.long | self.computed):
                self.alone[item.bit_length() - 1] = alone & (self.long | self.computed)
                self.affected |= item
            return item
        return self.item(key, every, ops=self.count(every))

    def _is_made(self, operand: list[int]) -> bool:
        """Is an operand of these factors computed for sure?  (A number may go elsewhere.)"""
        real = [c for c in operand if c < 0 or not any(n.op == "num" for n in self.r.nodes[c])]
        return len(real) > 1 or real == [-1]

    @staticmethod
    def union(masks: Iterable[int]) -> int:
        out = 0
        for m in masks:
            out |= m
        return out

    @staticmethod
    def matrices(left: int, right: int, summed: int) -> bool:
        """Is a product of operands with these axes one of matrices?"""
        return bool(left & ~right & ~summed and right & ~left & ~summed)

    def sides(self, classes: tuple[int, ...], factors: list[int], summed: int) -> tuple[tuple[int, ...], ...]:
        """The factors' classes by operand, if the product is one of matrices."""
        groups = self.gathered(factors)
        left, right = (self.union(factors[i] for i in g) for g in groups)
        if not self.matrices(left, right, summed):
            return ()
        return tuple(tuple(classes[i] for i in g) for g in groups)

    # ---- options
    def _options(self, c: int) -> Iterator[Option]:
        r = self.r
        nodes = r.nodes[c]
        stored = r.stored(c)
        if stored is not None:
            items = self.item(("stored", stored.name), self.ax(c), read=self.bytes(c, stored.dtype), array=self._array(c))
            yield Option("node", nodes[0], items=items)
            return
        fixed = next((n for n in nodes if n.op in ("num", "iota")), None) or r.input_of(c)
        if fixed is not None:
            items = 0
            if fixed.op == "input":
                b = r.inputs[fixed.attr[0]]  # type: ignore[index]
                size = min(self.count(self.ax(c)), math.prod(b.shape)) * DTYPES[b.dtype]
                items = self.item(("input", fixed.attr), self.ax(c), read=size, array=self._array(c))
            yield Option("node", fixed, items=items)
            return
        if any(a.endswith((".o", ".i")) and a not in self.parts for a in r.free[c]):
            return  # made under another view of the axes, only read here
        for n in nodes:
            match n.op:
                case "red":
                    yield from self._sums(c, n)
                case "fold":
                    yield from self._folds(c, n)
                case "view":
                    yield from self._views(c, n)
                case "gather":
                    x, i = n.args
                    items = self.item(("gather", c), self.ax(c), read=self.bytes(c, r.dtype[x]))
                    yield Option("node", n, (i,), items, leaf=-1 if self._in_memory(x) else x)
                case _:
                    yield Option("node", n, tuple(dict.fromkeys(n.args)), self._elementwise(c, n))

    def _array(self, c: int) -> tuple[object, float]:
        """The array in which a class lies, and its bytes."""
        own, stored = self.r.input_of(c), self.r.stored(c)
        m = self.r.inputs[own.attr[0]] if own is not None else stored  # type: ignore[index]
        return (m.name, float(math.prod(m.shape) * DTYPES[m.dtype])) if m is not None else (c, self.bytes(c, self.r.dtype[c]))

    def _in_memory(self, c: int) -> bool:
        return self.r.input_of(c) is not None or self.r.stored(c) is not None

    def _lies(self, c: int) -> bool:
        """May a kernel find the class in memory although none has stored it: as an input, or a part of one?"""
        return self._in_memory(c) or any(n.op in ("view", "gather", "num") for n in self.r.nodes[c])

    def _held(self, c: int) -> str:
        """The type that a class has in memory."""
        if (own := self.r.input_of(c)) is not None:
            return self.r.inputs[own.attr[0]].dtype  # type: ignore[index]
        stored = self.r.stored(c)
        return stored.dtype if stored is not None else self.r.dtype[c]

    def _rounds(self) -> bool:
        """May products run on matrix units?  Where nothing in memory has 16 bits or less, no operand has."""
        small = any(DTYPES[m.dtype] <= 2 for m in self.r.inputs.values())
        return self.r.compute_dtype != "float64" and (self.r.half is not None or small)

    def _walks(self, axis: str) -> bool:
        """May a kernel of this view reduce over the axis?  Of the split axis only its inner part; of others not an inner part."""
        return axis not in (self.split, f"{self.split}.o") and (not axis.endswith(".i") or axis in self.parts)

    def _elementwise(self, c: int, n: Node) -> int:
        size, axes = self.count(self.ax(c)), self.ax(c)
        if n.op in ("add", "mul"):
            # numbers among the factors may go elsewhere, and a product that is summed is one with its sum
            real = sum(1 for a in n.args if not any(m.op == "num" for m in self.r.nodes[a]))
            least = size * max(real - 1, 0) if n.op == "add" else 0.0
            return self.item(("map", c, n.op, n.args), axes, ops=size * (len(n.args) - 1), sure=(0.0, least, 0.0, 0.0))
        special = size if n.op in ("un", "bi") and n.attr in SPECIAL else 0.0
        ops = size * (0.5 if special or n.op == "bi" else 1.0)
        return self.item(("map", c, n.attr, n.args), axes, ops=ops, special=special, sure=(0.0, 0.0, special, 0.0))

    def _sums(self, c: int, n: Node) -> Iterator[Option]:
        op, axis = n.attr  # type: ignore[misc]
        if not self._walks(axis):
            return
        k, x = self.mask(frozenset([axis])), n.args[0]
        for m in self.r.nodes[x] if op == "+" else ():
            if m.op == "mul":
                axes_of = [self.ax(a) for a in m.args]
                items = self.product(("sum", c, m.args), axes_of, k, m.args)
                yield Option("node", n, tuple(dict.fromkeys(m.args)), items, m, reduced=k, sides=self.sides(m.args, axes_of, k))
        axes = self.ax(x) | k
        key = (
            ("pivot", axis, x, op) if op in ("max", "min") else ("sum", c, op, x)
        )  # the pivot of a fold is one with its reduction
        n_all = self.count(axes)
        product = op == "+" and any(m.op == "mul" for m in self.r.nodes[x])
        sure = (2.0 * n_all, 0.0, 0.0, 0.0) if product and 2.0 * self.rate[0] < self.rate[1] else (0.0, n_all, 0.0, 0.0)
        yield Option("node", n, (x,), self.item(key, axes, ops=n_all, sure=sure), reduced=k)

    def _folds(self, c: int, n: Node) -> Iterator[Option]:
        """Items are shared with other components of the same state: pivots, weights and accumulated products."""
        h, comp, axis = n.attr  # type: ignore[misc]
        if not self._walks(axis):
            return
        p = len(h.pivots)
        pivots, comps = h.needed(comp, lambda i: self.zero[n.args[p + i]])
        k = self.mask(frozenset([axis]))
        over, items, children = k, 0, [n.args[i] for i in pivots]
        own = tuple(children)
        sides: list[tuple[int, ...]] = []
        products: dict[int, Node] = {}
        for i in pivots:
            axes = self.ax(n.args[i]) | k
            if isinstance(h.pivots[i], str) or h.pivots[i][0] != "fn":
                over |= axes
            items |= self.item(("pivot", axis, n.args[i], str(h.pivots[i])), axes, ops=self.count(axes))
        for i in comps:
            for j, e in h.coef[i]:
                x = n.args[p + j]
                if self.zero[x]:
                    continue
                if e.op != "num" and (m := self._weighed(x, over, k)) is not None:
                    products[x] = m
                    children += m.args
                    items |= self._weights(axis, own, e, over)
                    factors = [over, *map(self.ax, m.args)]
                    items |= self.product(("absorb", axis, own, m.args, str(e)), factors, k, (-1, *m.args))
                    sides += self.sides((-1, *m.args), factors, k)
                    continue
                children.append(x)
                axes = self.ax(x)
                if e.op == "num":
                    items |= self.item(("absorb", axis, x), axes | k, ops=self.count(axes | k))
                    continue
                items |= self._weights(axis, own, e, over)
                key = ("absorb", axis, own, x, str(e))
                wide = axes & ~over
                items |= self.product(key, [over, axes], k, (-1, x)) if wide else self.item(key, over, ops=self.count(over))
                if self.matrices(over, axes, k):
                    sides.append((x,))
        yield Option(
            "node", n, tuple(dict.fromkeys(children)), items, reduced=k, sides=tuple(sides), products=tuple(products.items())
        )

    def _weights(self, axis: str, own: tuple[int, ...], e: T.Term, over: int) -> int:
        n, (ops, special) = self.count(over), work_of(e)
        return self.item(("weight", axis, own, str(e)), over, ops=ops * n, special=special * n)

    def _weighed(self, x: int, weight: int, summed: int) -> Node | None:
        """The product that a singleton is, if the sum of its multiples by a weight with these axes is a product of matrices only
        when its factors are seen."""
        if self.matrices(weight, self.ax(x), summed):
            return None
        for m in self.r.nodes[x]:
            if m.op == "mul" and self.sides((-1, *m.args), [weight, *map(self.ax, m.args)], summed):
                return m
        return None

    def _views(self, c: int, n: Node) -> Iterator[Option]:
        x, index = n.args[0], n.attr
        moved = frozenset(b for a, ix in index for b in (a, *ix.axes))  # type: ignore[attr-defined]
        if any(T.depends(moved, p) for p in self.parts) or any(a.endswith((".o", ".i")) for a in self.r.free[x]):
            return
        if self._in_memory(x) or self.r.read[x]:
            read = self.bytes(c, self.r.dtype[x])
            least = min(read, self.bytes(c, self._held(x)))
            items = self.item(("view", c), self.ax(c), read=read, sure=(0.0, 0.0, 0.0, least), array=self._array(x))
            yield Option("view", n, items=items, leaf=-1 if self._in_memory(x) else x)
        if not self._in_memory(x):
            shown = min(self.count(self.ax(c)) / max(self.count(self.ax(x)), 1.0), 1.0)
            yield Option("inline", n, (x,), renamed=self.mask(moved), shown=shown)
