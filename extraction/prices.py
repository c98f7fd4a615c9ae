"""What it takes to store classes, before anything is lowered: bounds that always hold, and guesses that rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Protocol


@lru_cache(1 << 14)  # a search asks for the same few thousand again and again
def bits(mask: int) -> tuple[int, ...]:
    """Places of the bits that are set, the lowest first."""
    out: list[int] = []
    if 8 * mask.bit_count() < mask.bit_length():  # few of many
        while mask:
            low = mask & -mask
            out.append(low.bit_length() - 1)
            mask ^= low
        return tuple(out)
    for n, byte in enumerate(mask.to_bytes((mask.bit_length() + 7) // 8, "little")):
        if byte:
            out += [8 * n + i for i in IN_BYTE[byte]]
    return tuple(out)


IN_BYTE = [tuple(i for i in range(8) if byte >> i & 1) for byte in range(256)]


class Blend(Protocol):
    """Prices a set of work items (bits)."""

    def blend(self, items: int) -> float: ...


class Prices:
    """Kernels that several plans share count once; a class that comes out of another's kernel adds only the work that is not shared."""

    def __init__(self, launch: float, mates: Callable[[int, int], bool]):
        self.launch, self.mates = launch, mates
        self.floor: dict[int, float] = {}  # class → bound on a plan that stores it
        self.own: dict[int, float] = {}  # class → guess at the kernel that stores it
        self.work: dict[int, tuple[Blend, int]] = {}  # … and what that kernel does
        self.kernels: dict[int, int] = {}  # class → classes whose kernels its likely plan has, as bits
        self._memo: dict[int, tuple[float, int]] = {}
        self._in_memo = 0  # classes that any of its entries rests on (those it stores, and those whose kernels it has)

    def put(self, c: int, floor: float, own: float, work: tuple[Blend, int], kernels: int) -> None:
        known = self.own.get(c) == own and self.work.get(c) == work and self.kernels.get(c) == kernels
        self.floor[c], self.own[c], self.work[c], self.kernels[c] = floor, own, work, kernels
        if self._in_memo >> c & 1 and not known:
            self._memo = {leaves: (t, made) for leaves, (t, made) in self._memo.items() if not (leaves | made) >> c & 1}
            self._in_memo &= ~(1 << c)

    def bound(self, leaves: int) -> float:
        """No plan stores all of these classes in less time."""
        return max([self.floor.get(c, self.launch) for c in bits(leaves)], default=0.0)

    def guess(self, leaves: int) -> float:
        """Likely time of the kernels that store these classes."""
        if not leaves:
            return 0.0
        known = self._memo.get(leaves)
        return known[0] if known is not None else self._union(leaves)[0]

    def made(self, leaves: int) -> int:
        """Classes whose kernels that takes."""
        return self._union(leaves)[1]

    def _union(self, leaves: int) -> tuple[float, int]:
        if leaves not in self._memo:
            order = sorted(bits(leaves), key=lambda c: (-self.own.get(c, self.launch), c))
            kernels, more = 0, 0.0
            family: dict[int, int] = {}  # class that leads a kernel → work of that kernel
            for c in order:
                lead = self._lead(c, family)
                if lead is None:
                    kernels |= self.kernels.get(c, 1 << c)
                    family[c] = self.work[c][1] if c in self.work else 0
                else:
                    by, items = self.work[c]
                    if items & ~family[lead]:
                        more += by.blend(family[lead] | items) - by.blend(family[lead])
                        family[lead] |= items
            self._in_memo |= leaves | kernels
            self._memo[leaves] = more + sum(self.own.get(c, self.launch) for c in bits(kernels)), kernels
        return self._memo[leaves]

    def _lead(self, c: int, family: Iterable[int]) -> int | None:
        """The first of these classes whose kernel c comes out of, too."""
        if c not in self.work:
            return None
        by = self.work[c][0]
        for d in family:
            if d in self.work and self.work[d][0] is by and self.mates(c, d):
                return d
        return None
