"""What the repository's files must agree on: the address, the version, the dependencies, the form of a notebook."""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import nbformat
import numpy as np
import pytest
import torch
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


PROJECT = tomllib.loads(read("pyproject.toml"))["project"]
ADDRESS = PROJECT["urls"]["Repository"]
OWNER, NAME = ADDRESS.removeprefix("https://github.com/").split("/")
TAG = f"v{PROJECT['version']}"
CONFIG = yaml.safe_load(read("_config.yml"))
CITATION = yaml.safe_load(read("CITATION.cff"))
SETUP_CELL = read("book/setup_cell.py").strip()
INSTALL = 'python -m pip install -e ".[book,test]" -c constraints.txt'
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def module(path):
    """Import a file that belongs to no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


BUILD = module(ROOT / "book" / "build.py")
PAGES = BUILD.pages(yaml.safe_load(read("_toc.yml")))


# Addresses and versions


def test_address_and_tag_agree_everywhere():
    assert CONFIG["repository"] == {"url": ADDRESS, "branch": TAG}
    assert CITATION["repository-code"] == ADDRESS
    assert CITATION["url"] == PROJECT["urls"]["Documentation"] == f"https://{OWNER}.github.io/{NAME}"
    assert CITATION["version"] == PROJECT["version"]
    assert f"version = {{{PROJECT['version']}}}" in read("book/intro.md")
    assert f"## {PROJECT['version']}\n" in read("CHANGELOG.md")
    assert f"git+{ADDRESS}@{TAG}" in read("README.md")
    assert f"<{PROJECT['urls']['Documentation']}>" in read("README.md")
    for page in ("README.md", "book/intro.md"):
        assert f"git clone {ADDRESS}\ncd {NAME}\n" in read(page)


def test_no_other_address_of_the_repository():
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git clone")
    texts = [
        name for name in listed.stdout.splitlines() if Path(name).suffix in {".cff", ".ipynb", ".md", ".py", ".yml"}
    ]
    found = {(name, owner) for name in texts for owner in re.findall(rf"github\.com/([\w.-]+)/{NAME}\b", read(name))}
    assert [(name, owner) for name, owner in found if owner != OWNER] == []


def test_title_and_author_agree():
    assert CONFIG["title"] == CITATION["title"]
    assert read("README.md").startswith(f"# {CONFIG['title']}\n")
    assert f"title = {{{CONFIG['title']}}}" in read("book/intro.md")
    assert CONFIG["author"] == CITATION["authors"][0]["name"] == PROJECT["authors"][0]["name"]


# Dependencies


def required():
    """Requirements of the project and all its extras, but for its references to itself."""
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    requirements = [Requirement(line) for group in groups for line in group]
    return [r for r in requirements if canonicalize_name(r.name) != PROJECT["name"]]


def pins():
    lines = [line for line in read("constraints.txt").splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][\w.]*", line) for line in lines)
    found = dict(line.split("==") for line in lines)
    assert len(found) == len(lines)
    return found


def test_every_requirement_is_pinned_within_its_bounds():
    found = pins()
    for requirement in required():
        assert requirement.specifier.contains(found[canonicalize_name(requirement.name)]), requirement


def test_requirements_have_lower_bounds_only():
    upper = {str(r) for r in required() if {s.operator for s in r.specifier} != {">="}}
    # Jupyter Book 2 is another program
    assert upper == {"jupyter-book<2,>=1.0.4"}


def test_extras_agree():
    """A package that two extras name has one bound, and the extras that refer to others name ones that exist."""
    bounds = {}
    for requirement in required():
        assert bounds.setdefault(requirement.name, requirement.specifier) == requirement.specifier
    own = [Requirement(line) for group in PROJECT["optional-dependencies"].values() for line in group]
    for requirement in own:
        if canonicalize_name(requirement.name) == PROJECT["name"]:
            assert requirement.extras <= set(PROJECT["optional-dependencies"])


def test_make_pip_and_conda_install_the_same():
    assert INSTALL in read("README.md")
    arguments = INSTALL.removeprefix("python ")
    assert f".venv/bin/python {arguments}" in read("Makefile").replace(
        "--disable-pip-version-check --progress-bar off ", ""
    )
    python, pip, packages = yaml.safe_load(read("environment.yml"))["dependencies"]
    assert pip == "pip"
    assert packages == {"pip": ["--constraint constraints.txt", "--editable .[book,test]"]}
    assert SpecifierSet(PROJECT["requires-python"]) == SpecifierSet(">=3.11")
    assert set(PROJECT["requires-python"].split(",")) < set(python.removeprefix("python").split(","))
    assert "Python 3.11 or newer" in read("README.md")
    assert "(3, 11)" in read("Makefile")


# The set-up cell


def run_setup_cell(monkeypatch, folder, missing):
    """Run the cell in `folder`; return the commands it gave and the folder it left."""
    commands = []

    def run(command, check):
        assert check
        commands.append(command)
        if command[0] == "git":
            (Path.cwd() / command[-1].split("/")[-1] / "notebooks").mkdir(parents=True)

    monkeypatch.chdir(folder)
    monkeypatch.setattr(subprocess, "run", run)
    if missing:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    exec(compile(SETUP_CELL, "setup_cell", "exec"), {})
    return commands, Path.cwd()


def test_setup_cell_fetches_the_tag_and_installs_no_dependency(monkeypatch, tmp_path):
    (clone, install), folder = run_setup_cell(monkeypatch, tmp_path, missing=True)
    assert clone == ["git", "clone", "--quiet", "--depth", "1", "--branch", TAG, ADDRESS]
    assert install == [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", f"./{NAME}"]
    assert folder == tmp_path / NAME / "notebooks"


def test_setup_cell_does_nothing_where_the_module_is(monkeypatch, tmp_path):
    assert run_setup_cell(monkeypatch, tmp_path, missing=False) == ([], tmp_path)


def test_setup_cell_after_a_restart_goes_back_to_the_notebooks(monkeypatch, tmp_path):
    (tmp_path / NAME / "notebooks").mkdir(parents=True)
    assert run_setup_cell(monkeypatch, tmp_path, missing=False) == ([], tmp_path / NAME / "notebooks")
    # A second run in the same kernel stays where the first one went
    assert run_setup_cell(monkeypatch, Path.cwd(), missing=False)[1] == tmp_path / NAME / "notebooks"


def test_setup_cell_after_a_failed_installation_does_not_clone_again(monkeypatch, tmp_path):
    (tmp_path / NAME / "notebooks").mkdir(parents=True)
    commands, _ = run_setup_cell(monkeypatch, tmp_path, missing=True)
    assert [command[0] for command in commands] == [sys.executable]


# Notebooks


def tags(cell):
    return cell["metadata"].get("tags", [])


@each_notebook
def test_notebook_is_valid_and_has_no_output(path):
    nbformat.validate(json.loads(path.read_text(encoding="utf-8")))
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)


@each_notebook
def test_notebook_begins_with_the_setup_cell(path):
    cells = nbformat.read(path, as_version=4).cells
    assert cells[0].cell_type == "markdown"
    assert re.match(r"# \S", cells[0].source)
    first, *others = [cell for cell in cells if cell.cell_type == "code"]
    assert first.source.strip() == SETUP_CELL
    assert "hide-input" in tags(first)
    assert all("find_spec" not in cell.source for cell in others)


@each_notebook
def test_notebook_ends_with_what_to_remember_and_exercises(path):
    cells = nbformat.read(path, as_version=4).cells
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    sections = re.findall(r"^## (.+)$", text, flags=re.MULTILINE)
    assert sections[-2:] == ["What to remember", "Exercises"]
    solutions = [cell for cell in cells if "solution" in tags(cell)]
    assert len(solutions) >= 2
    for number, cell in enumerate(solutions, start=1):
        assert cell.cell_type == "code"
        assert "hide-cell" in tags(cell)
        assert re.match(rf"# Solution {number}( \(a beginning\))?: ", cell.source)
        assert any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(cell.source)))


def test_table_of_contents_has_every_page():
    assert len(PAGES) == len(set(PAGES))
    for page in PAGES:
        assert (ROOT / f"{page}.md").is_file() or (ROOT / f"{page}.ipynb").is_file(), page
    written = [*NOTEBOOKS, *(ROOT / "book").glob("*.md")]
    assert {path.relative_to(ROOT).with_suffix("").as_posix() for path in written} == set(PAGES)
    chapters = [page for page in PAGES if page.startswith("notebooks/")]
    numbers = [int(Path(page).name[:2]) for page in chapters]
    assert numbers == sorted(set(numbers)), "files are numbered in reading order"


# The embedded data


@pytest.mark.parametrize("path", sorted((ROOT / "data" / "features").glob("*.npz")), ids=lambda path: path.stem)
def test_datasheet_names_every_embedded_file_and_array(path):
    datasheet = read("data/DATASHEET.md")
    assert f"`{path.name}`" in datasheet
    with np.load(path) as arrays:
        assert [name for name in arrays if f"`{name}`" not in datasheet] == []


# The build's own check


def executed(build, page, **changes):
    """Write the page and the executed notebook of a build."""
    cell = {"cell_type": "code", "source": ["1"], "execution_count": 1, "outputs": []} | changes
    for name, text in ((f"html/{page}.html", ""), (f"jupyter_execute/{page}.ipynb", json.dumps({"cells": [cell]}))):
        (build / name).parent.mkdir(parents=True, exist_ok=True)
        (build / name).write_text(text)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"source": [" \n"], "execution_count": None}, None),
        ({"cell_type": "markdown", "execution_count": None}, None),
        ({"execution_count": None}, "notebooks/a.ipynb: cell 1 did not run."),
        ({"outputs": [{"output_type": "error"}]}, "notebooks/a.ipynb: cell 1 failed."),
    ],
)
def test_build_check_reads_the_executed_cells(tmp_path, changes, fault):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks/a.ipynb").touch()
    (tmp_path / "_toc.yml").write_text("root: notebooks/a")
    executed(tmp_path / "_build", "notebooks/a", **changes)
    assert BUILD.faults(tmp_path, tmp_path / "_build") == ([fault] if fault else [])


def test_build_check_misses_no_page(tmp_path):
    toc = {"root": "a", "parts": [{"chapters": [{"file": "b", "sections": [{"file": "c"}]}]}]}
    (tmp_path / "_toc.yml").write_text(yaml.safe_dump(toc))
    (tmp_path / "b.ipynb").touch()
    for page in "abc":
        executed(tmp_path / "_build", page)
    assert BUILD.faults(tmp_path, tmp_path / "_build") == []
    (tmp_path / "_build/jupyter_execute/b.ipynb").unlink()
    (tmp_path / "_build/html/c.html").unlink()
    assert BUILD.faults(tmp_path, tmp_path / "_build") == [
        "b.ipynb was not executed.",
        "c is in _toc.yml but has no page.",
    ]


def test_build_is_strict_and_afresh(monkeypatch, tmp_path):
    """Old output is removed, warnings and nitpicks are fatal, and an incomplete book is an error."""
    from jupyter_book.cli import main as command

    (tmp_path / "_build").mkdir()
    (tmp_path / "_build/old.html").touch()
    (tmp_path / "_toc.yml").write_text("root: a")
    monkeypatch.setattr(BUILD, "ROOT", tmp_path)
    monkeypatch.setattr(BUILD, "BUILD", tmp_path / "_build")
    monkeypatch.setattr(command, "main", lambda arguments, **_: calls.append(arguments))
    calls = []
    with pytest.raises(SystemExit, match="a is in _toc.yml but has no page"):
        BUILD.main()
    assert calls == [["build", str(tmp_path), "-W", "--keep-going", "-n"]]
    assert not (tmp_path / "_build").exists()
    execute = CONFIG["execute"]
    assert (execute["execute_notebooks"], execute["allow_errors"]) == ("force", False)


# The README's example, and the weight of an import


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NO_GPU)])
def test_readme_example_runs(device):
    (example,) = re.findall(r"```python\n(.*?)```", read("README.md"), flags=re.DOTALL)
    torch.manual_seed(0)
    backbone, head = torch.nn.Linear(8, 512).to(device), torch.nn.Linear(512, 100).to(device)
    before = head.weight.detach().clone()
    names = {
        "backbone": backbone,
        "head": head,
        "loader": [(torch.randn(16, 8), torch.arange(16) % 4) for _ in range(2)],
        "optimizer": torch.optim.SGD([*backbone.parameters(), *head.parameters()], lr=0.1),
    }
    exec(compile(example, "README.md", "exec"), names)
    assert torch.isfinite(names["loss"])
    assert not torch.equal(head.weight, before)
    assert f"a `warmup` of {names['criterion'].warmup} batches" in read("README.md")
    assert (names["criterion"].representation, names["MR2Loss"].paper(2, 2).representation) == ("relative", "printed")


def test_import_loads_nothing_heavier_than_torch():
    heavy = ["lightning", "matplotlib", "pandas", "scipy", "seaborn", "sklearn", "timm", "torchvision", "transformers"]
    code = f"import sys, mr2_core; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# The commands


def make(*arguments, folder=ROOT, **environment):
    return subprocess.run(
        ["make", *arguments],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if not name.startswith("MAKE")} | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def copy(tmp_path):
    """The Makefile alone, in a folder whose name has a space, with a stand-in for each interpreter."""
    (folder := tmp_path / "a clone").mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (folder / name).write_text(read(name))
    return folder


def stand_in(path, version=0, venv=0, install=0):
    """Write an interpreter that answers the Makefile's questions with these exit codes, and makes environments."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "#!/bin/sh\n"
        'echo "$*" >> "$LOG"\n'
        'case "$*" in\n'
        f'  *version_info*) exit {version};; *ensurepip*) exit {venv};; --version) echo "Python 3.9.1";;\n'
        f'  "-m venv --clear .venv") rm -rf .venv; mkdir -p .venv/bin; cp "$0" .venv/bin/python;;\n'
        f'  *"pip install"*) exit {install};;\n'
        "esac\n"
    )
    path.chmod(0o755)
    return str(path)


def calls(log):
    text = log.read_text() if log.exists() else ""
    log.unlink(missing_ok=True)
    kinds = {"venv --clear": "venv", "pip install": "install", "book/build.py": "book", "pytest": "pytest"}
    return [kind for line in text.splitlines() for key, kind in kinds.items() if key in line]


def test_make_works_from_anywhere_and_installs_once(copy, tmp_path):
    log = tmp_path / "log"
    python = {"PYTHON": stand_in(tmp_path / "bin dir" / "python3"), "LOG": str(log)}
    assert make("book", folder=copy, **python).returncode == 0
    assert calls(log) == ["venv", "install", "book"]
    for arguments in (["-C", str(copy)], ["-f", str(copy / "Makefile")], ["-f", "a clone/Makefile"]):
        assert make(*arguments, "test", "book", folder=tmp_path, **python).returncode == 0
        assert calls(log) == ["pytest", "book"]
    os.utime(copy / "constraints.txt", (2**32, 2**32))
    make("test", folder=copy, **python)
    assert calls(log) == ["install", "pytest"]


def test_make_installs_again_after_an_interruption_or_a_move(copy, tmp_path):
    log = tmp_path / "log"
    broken = {"PYTHON": stand_in(tmp_path / "bin" / "broken", install=1), "LOG": str(log)}
    sound = {"PYTHON": stand_in(tmp_path / "bin" / "sound"), "LOG": str(log)}
    assert make("book", folder=copy, **broken).returncode != 0
    assert calls(log) == ["venv", "install"]
    assert make("book", folder=copy, **sound).returncode == 0
    assert calls(log) == ["venv", "install", "book"]
    # An interrupted update leaves doubtful files too: the next one starts empty
    os.utime(copy / "constraints.txt", (2**32, 2**32))
    stand_in(copy / ".venv/bin/python", install=1)
    assert make("book", folder=copy, **sound).returncode != 0
    assert calls(log) == ["install"]
    os.utime(copy / "constraints.txt")
    assert make("book", folder=copy, **sound).returncode == 0
    assert calls(log) == ["venv", "install", "book"]
    copy = copy.rename(tmp_path / "moved clone")
    assert make("book", folder=copy, **sound).returncode == 0
    assert calls(log) == ["install", "book"]


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ({"version": 1}, "Python 3.11 or newer is needed, but '{}' is Python 3.9.1. Name a newer one: make PYTHON="),
        ({"venv": 1}, "'{}' lacks its venv module. Install it (on Debian and Ubuntu: apt install python3-venv)"),
    ],
)
def test_make_says_what_is_wrong_with_python(copy, tmp_path, fault, sentence):
    python = stand_in(tmp_path / "python3", **fault)
    done = make("book", folder=copy, PYTHON=python, LOG=str(tmp_path / "log"))
    assert done.returncode != 0
    assert sentence.format(python) in done.stdout
    assert not (copy / ".venv").exists()


def test_make_says_that_there_is_no_python(copy):
    done = make("book", folder=copy, PYTHON="no-such-python")
    assert done.returncode != 0
    assert "Python 3.11 or newer is needed, but 'no-such-python' is" in done.stdout
