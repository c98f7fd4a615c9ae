"""Sums over a tile program's statements, each of which is a number times arrays over the points of a search."""

from __future__ import annotations

from functools import reduce

import numpy as np

from .base import ONE, Array


class Tally:
    """Sums of coefficient · array · array · … by resource.  Products of the same arrays (the very objects) are worked out once."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[tuple[int, ...], float]] = {}
        self._number: dict[int, int] = {}  # of an array, by its identity: in the order in which they come
        self._arrays: list[Array] = []
        self._products: dict[tuple[int, ...], Array] = {}

    def add(self, resource: str, amount: float, *arrays: Array) -> None:
        used = []
        for x in arrays:
            if x is not ONE:
                n = self._number.get(id(x))
                if n is None:
                    n = self._number[id(x)] = len(self._arrays)
                    self._arrays.append(x)
                used.append(n)
        if len(used) > 1:
            used.sort()
        key = tuple(used)
        of = self._sums.get(resource)
        if of is None:
            of = self._sums[resource] = {}
        of[key] = of.get(key, 0.0) + amount

    def __getitem__(self, resource: str) -> Array:
        terms = [amount * self._product(key) for key, amount in self._sums.get(resource, {}).items()]
        return reduce(np.add, terms) if terms else np.zeros(1)

    def _product(self, key: tuple[int, ...]) -> Array:
        if len(key) <= 1:
            return self._arrays[key[0]] if key else ONE
        if key not in self._products:
            self._products[key] = self._product(key[:-1]) * self._arrays[key[-1]]
        return self._products[key]
