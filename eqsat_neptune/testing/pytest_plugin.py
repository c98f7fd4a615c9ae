"""pytest plug-in: a test that asks for `eqsat_rule` runs once for each rule of a registry.

In the top conftest.py:

    pytest_plugins = ["eqsat_neptune.testing.pytest_plugin"]

and in a test module

    eqsat_rules = [my_rule, …]              # left out: --eqsat-rules module:NAME, or else the compiler's own rules

    def test_rule(eqsat_rule):              # each rule
        verdict = check_rule(eqsat_rule)
        assert verdict, verdict.counterexample

    def test_condition(eqsat_weakened):     # each rule without one of its conditions: it must be caught
        assert not check_rule(eqsat_weakened)

    def test_mutant(eqsat_mutant):          # each corruption of each rule, see mutation.py
        assert outcome(eqsat_mutant) != "survived"
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

    from ..rules.rule import Rule


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("eqsat-neptune").addoption(
        "--eqsat-rules", metavar="MODULE:NAME", help="the rules that eqsat_rule, eqsat_weakened and eqsat_mutant go over"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name in ("eqsat_rule", "eqsat_weakened", "eqsat_mutant"):
        if name in metafunc.fixturenames:
            chosen = _chosen(name, registry(metafunc))
            metafunc.parametrize(name, chosen, ids=[getattr(x, "rule", x).name for x in chosen])


def registry(metafunc: pytest.Metafunc) -> Sequence[Rule]:
    """The rules that a test goes over."""
    own = getattr(metafunc.module, "eqsat_rules", None)
    if own is not None:
        return tuple(own)
    place = metafunc.config.getoption("--eqsat-rules")
    module, _, attribute = (place or "eqsat_neptune.rules:RULES").partition(":")
    return tuple(getattr(import_module(module), attribute or "RULES"))


def _chosen(name: str, rules: Sequence[Rule]) -> list[Any]:
    if name == "eqsat_rule":
        return list(rules)
    if name == "eqsat_weakened":
        return [w for r in rules for w in r.weakened()]
    from .mutation import mutants

    return [m for r in rules for m in mutants(r) if m.kind != "condition"]
