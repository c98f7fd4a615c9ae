"""Parameters of which the fast tests take a few, and the slow ones the rest."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def some(every: Iterable[Any], quick: Container[Any] | int = 1) -> list[Any]:
    """All of them, those that are not among the quick ones (or the first so many) marked slow."""
    return [
        pytest.param(*(x if isinstance(x, tuple) else (x,)), marks=() if fast else pytest.mark.slow)
        for i, x in enumerate(every)
        for fast in [i < quick if isinstance(quick, int) else x in quick]
    ]
