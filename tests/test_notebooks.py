"""Every notebook runs from its first cell to its last, solutions included, in the smoke profile."""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"


@pytest.fixture(scope="module")
def executed(request):
    """By path, a future of the executed notebook; two kernels run at a time, with a thread each."""
    environment = os.environ | {"MR2_PROFILE": "smoke", "OMP_NUM_THREADS": "1"}

    def execute(path):
        notebook, where = nbformat.read(path, as_version=4), {"metadata": {"path": str(FOLDER)}}
        client = NotebookClient(notebook, timeout=120, kernel_name="python3", resources=where)
        return asyncio.run(client.async_execute(env=environment))  # closes the loop that its thread needs

    chosen = [item.callspec.params["path"] for item in request.session.items if "executed" in item.fixturenames]
    pool = ThreadPoolExecutor(2)
    yield {path: pool.submit(execute, path) for path in chosen}
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook_runs(path, executed):
    ran = [cell.execution_count for cell in executed[path].result().cells if cell.cell_type == "code"]
    assert ran == list(range(1, len(ran) + 1))
