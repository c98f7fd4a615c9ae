"""Notebooks run from top to bottom, and are committed without outputs."""

from __future__ import annotations

from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook(path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert cell.cell_type != "code" or (not cell.outputs and cell.execution_count is None), "commit it without outputs"
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    shown = [o for c in notebook.cells if c.cell_type == "code" for o in c.outputs]
    assert shown and not any(o.output_type == "error" or o.get("name") == "stderr" for o in shown)
