"""Bounds by which the search passes over bodies: no kernel that it prices takes less."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from eqsat_neptune.cost_models import model_for
from eqsat_neptune.extraction.bodies import State
from eqsat_neptune.extraction.bounds import SAMPLED, Fewest, alive
from eqsat_neptune.extraction.extract import extract
from eqsat_neptune.extraction.kernels import Scored
from eqsat_neptune.extraction.search import Search
from test_search_work import TARGETS, graph_of

from eqsat_neptune.programs import CASES
from eqsat_neptune.terms import Affine, axis_index

# masks, splits, views under other names, several reads of one array, products of few rows, products that are classes of their own
FEW = [
    ("prefill_windowed", "cuda:sm_90a"),
    ("decode_gqa", "hip:gfx942"),
    ("rope_attention", "cuda:sm_80"),
    ("gated_mlp", "cpu"),
    ("attention_dq", "cuda:sm_80"),
    ("layernorm_linear", "cpu"),
    ("layers1", "cuda:sm_90a"),
]


def priced(name: str, target: str, patch: pytest.MonkeyPatch) -> Iterator[tuple[float, float, str]]:
    """(bound, least time over roles, tiles and numbers of parts, what it stores) of every body that a search prices."""
    found: list[tuple[float, float, str]] = []
    kernels = Search._kernels

    def noting(self: Search, roots: tuple[int, ...], s: State) -> list[Scored]:
        out = kernels(self, roots, s)
        if out:
            bodies = self._view(self.partial.get(roots[0]))
            least = min(float(np.min(k.seconds)) for k in out)
            found.append((bodies.bound(s, roots), least, f"classes {roots} of {name}"))
        return out

    patch.setattr(Search, "_kernels", noting)
    extract(*graph_of(name, target), model_for(target))
    yield from found


@pytest.mark.parametrize(("name", "target"), FEW)
def test_no_kernel_takes_less_than_its_bound(name: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    every = list(priced(name, target, monkeypatch))
    assert len(every) >= 4
    assert not [x for x in every if x[0] > x[1] * (1 + 1e-9)]
    assert max(bound / least for bound, least, _ in every) > 0.3  # and some bound says something


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_no_kernel_of_any_program_takes_less_than_its_bound(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: Counter[str] = Counter()
    for name, case in CASES.items():
        if not case.needs_scan:
            with monkeypatch.context() as patch:
                wrong.update(what for bound, least, what in priced(name, target, patch) if bound > least * (1 + 1e-9))
    assert not wrong


def test_share_of_elements_that_masks_keep() -> None:
    """Half of a square below its diagonal; a band of it; nothing where two masks exclude each other."""
    below = axis_index("q").plus(axis_index("k"), -1)
    near = Affine(63).plus(below, -1)
    assert SAMPLED * 0.48 < alive((below,), {"q": 1024, "k": 1024}) < 0.52
    assert alive((below, near), {"q": 1024, "k": 1024}) < 0.08
    assert alive((below, Affine(-1).plus(below, -1)), {"q": 1024, "k": 1024}) < 0.01
    assert alive((), {"q": 1024}) == 1.0


def test_fewest_elements_of_parts() -> None:
    few = Fewest({"k": 1000, "d": 64})
    assert few.count(frozenset({"d", "k"})) == 64_000
    assert few.count(frozenset({"d", "k.o"})) == 128  # two parts
    assert few.count(frozenset({"d", "k.o", "k.i"})) == 64_000
