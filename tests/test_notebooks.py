"""Every notebook runs from its first cell to its last, solutions included, in the smoke profile."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook_runs(path):
    notebook, where = nbformat.read(path, as_version=4), {"metadata": {"path": str(FOLDER)}}
    client = NotebookClient(notebook, timeout=120, kernel_name="python3", resources=where)
    client.execute(env=os.environ | {"MR2_PROFILE": "smoke"})
    ran = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert ran == list(range(1, len(ran) + 1))
