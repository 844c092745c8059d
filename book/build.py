"""Build the book into _build/html, every notebook executed afresh: ``python book/build.py``.

Warnings and unresolved references are errors. Afterwards every page of _toc.yml must be there and every code cell must
have run, since a build may end well without them.
"""

import json
import shutil
import sys
from importlib.resources import files
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "_build"


def pages(toc: dict) -> list[str]:
    """List the pages of a table of contents.

    Parameters
    ----------
    toc : dict
        _toc.yml, or any part of it.

    Returns
    -------
    list of str
        Paths from the root, without suffix, in reading order.
    """
    own = [toc[key] for key in ("root", "file") if key in toc]
    parts = [part for key in ("parts", "chapters", "sections") for part in toc.get(key, [])]
    return own + [page for part in parts for page in pages(part)]


def faults(root: Path, build: Path) -> list[str]:
    """Look for what a build left out.

    Parameters
    ----------
    root : Path
        Folder with _toc.yml.
    build : Path
        Jupyter Book's output folder, with html/ and jupyter_execute/.

    Returns
    -------
    list of str
        One sentence a fault.
    """
    found = []
    for page in pages(yaml.safe_load((root / "_toc.yml").read_text(encoding="utf-8"))):
        if not (build / "html" / f"{page}.html").is_file():
            found.append(f"{page} is in _toc.yml but has no page.")
        if not (root / f"{page}.ipynb").is_file():
            continue
        executed = build / "jupyter_execute" / f"{page}.ipynb"
        if not executed.is_file():
            found.append(f"{page}.ipynb was not executed.")
            continue
        cells = json.loads(executed.read_text(encoding="utf-8"))["cells"]
        for number, cell in enumerate(cells, start=1):
            if cell["cell_type"] != "code" or not "".join(cell["source"]).strip():
                continue
            if cell["execution_count"] is None:
                found.append(f"{page}.ipynb: cell {number} did not run.")
            if any(output["output_type"] == "error" for output in cell["outputs"]):
                found.append(f"{page}.ipynb: cell {number} failed.")
    return found


def main() -> None:
    """Build, check, and say where the book is."""
    from jupyter_book.cli.main import main as jupyter_book

    # From nothing: Sphinx would keep the old output of a notebook when only mr2_core/ or data/ changed
    shutil.rmtree(BUILD, ignore_errors=True)
    jupyter_book(["build", str(ROOT), "-W", "--keep-going", "-n"], standalone_mode=False)
    if found := faults(ROOT, BUILD):
        sys.exit("\n".join(["The book is not complete:", *found]))
    # For mr2_core.plots.show_interactive, so that no page asks another host
    shutil.copy(files("plotly") / "package_data" / "plotly.min.js", BUILD / "html" / "_static")
    print(f"The book is built. Open {BUILD / 'html' / 'index.html'}")


if __name__ == "__main__":
    main()
