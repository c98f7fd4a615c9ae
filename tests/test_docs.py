"""Documents that can be wrong: the table of rules, and the code that CONTRIBUTING.md shows."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from eqsat_neptune.rules import RULES, Rule, document

from eqsat_neptune import terms, xp
from eqsat_neptune.testing import check_rule
from eqsat_neptune.testing import document as soundness

ROOT = Path(__file__).parent.parent


def test_the_table_of_rules_is_up_to_date() -> None:
    said = (ROOT / "docs" / "rules.md").read_text(encoding="utf-8")
    assert said == document.markdown(), "run python -m eqsat_neptune.rules.document"
    assert all(f"**{r.name}** — {r.law} " in said for r in RULES)


@pytest.mark.slow
def test_the_soundness_page_is_up_to_date() -> None:
    pytest.importorskip("sympy")
    said = (ROOT / "docs" / "soundness.md").read_text(encoding="utf-8")
    assert said == soundness.markdown(), "run python -m eqsat_neptune.testing.document"


def test_every_rule_has_a_law_and_a_documented_family() -> None:
    assert {r.family for r in RULES} == set(document.FAMILIES) and all(r.law for r in RULES)
    assert len({r.name for r in RULES}) == len(RULES)


def blocks(language: str) -> list[str]:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def the_rule_to_add() -> Rule:
    (call,) = (ast.parse(b).body[0].value for b in blocks("python") if b.startswith("Rule("))  # type: ignore[attr-defined]
    return Rule(*map(ast.literal_eval, call.args), **{k.arg: ast.literal_eval(k.value) for k in call.keywords})


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_rule_to_add_is_sound() -> None:
    rule = the_rule_to_add()
    assert rule.name not in {r.name for r in RULES}, "it has been added: show another one"
    verdict = check_rule(rule)
    assert verdict and "proved" in verdict.evidence
    weaker = rule.weakened()
    assert weaker and not any(check_rule(w) for w in weaker)


def test_a_wrong_rule_is_refused_with_its_smallest_counterexample() -> None:
    """Who follows the walk-through and leaves a condition out is told where the rule is false, in less than ten seconds."""
    start = time.process_time()
    verdict = check_rule(replace(the_rule_to_add(), when=""))
    assert not verdict and time.process_time() - start < 10
    found = verdict.counterexample
    assert max(found.extents.values()) <= 2 and "recip(min[" in found


def declared_in_a_copy(folder: Path, rule: str) -> None:
    """The package as it is installed, with the text of a rule where CONTRIBUTING.md says that it goes: at the end of REDUCTIONS."""
    package = folder / "eqsat_neptune"
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "eqsat_neptune", package, ignore=skip)
    for name in ("rules", "extraction", "codegen", "cost_models"):
        shutil.copytree(ROOT / name, package / name, ignore=skip)
    declared = package / "rules" / "declared.py"
    head, start, rest = declared.read_text(encoding="utf-8").partition("\nREDUCTIONS = [")
    body, end, tail = rest.partition("\n]\n")
    assert start and end
    declared.write_text(head + start + body + "\n    " + rule.strip() + "," + end + tail, encoding="utf-8")
    for name in ("conftest.py", "test_rules.py"):
        shutil.copy(ROOT / "tests" / name, folder)


@pytest.mark.parametrize("sound", [True, False], ids=["sound", "unsound"])
def test_a_newcomers_rule(sound: bool, tmp_path: Path) -> None:
    """Step 1 to the letter, with the condition or without it, and then the tests of the rules: the unsound one is rejected with its
    counterexample in less than ten seconds."""
    (call,) = (b for b in blocks("python") if b.startswith("Rule("))
    text = call if sound else re.sub(r',\s*when="[^"]*"', "", call)
    assert sound or text != call
    declared_in_a_copy(tmp_path, text)
    before = os.times()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", "test_rules.py"]
    command += ["-k", the_rule_to_add().name]
    env = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": ""}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    assert done.returncode == (0 if sound else 1), done.stdout + done.stderr
    assert "1 passed" in done.stdout if sound else "1 failed" in done.stdout
    if not sound:
        assert "a class has a node of another value" in done.stdout and "where l = " in done.stdout and spent < 10


def test_the_operator_to_add_is_not_there_yet() -> None:
    assert "cbrt" not in terms.UNARY and "cbrt" not in xp.__all__, "it has been added: show another one"


def test_paths_exist() -> None:
    for name in ("CONTRIBUTING.md", "docs/architecture.md", "docs/soundness.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        for path in re.findall(r"`([a-z_]+(?:/[a-z_]+)*\.(?:py|md|h))`", text):
            tried = [ROOT / path, ROOT / "eqsat_neptune" / path, ROOT / "codegen" / path, ROOT / "extraction" / path]
            assert any(p.exists() for p in tried), f"{name} names {path}"
