# make book    builds the book into _build/html
# make test    checks the code and runs the tests
# make clean   removes what these two made
# Another interpreter: make book PYTHON=python3.12
PYTHON ?= python3

# The folder of this file. Its name may hold a space, which only the shell handles.
HERE := $(shell file='$(MAKEFILE_LIST)'; cd "$$(dirname "$${file# }")" && pwd -P)
STAMP := .venv/installed

.PHONY: book test clean
.NOTPARALLEL:

ifneq ($(HERE),$(CURDIR))

book test clean:
	@"$(MAKE)" --no-print-directory -C "$(HERE)" $@

else

book: $(STAMP)
	.venv/bin/python book/build.py

test: $(STAMP)
	@git status --porcelain > .venv/status 2> /dev/null || true
	.venv/bin/python -m ruff check
	.venv/bin/python -m ruff format --check
	.venv/bin/python -m pytest
	@git status --porcelain 2> /dev/null | diff .venv/status - || { echo "The tests changed the working tree: see the lines above."; exit 1; }

clean:
	rm -rf .venv _build *.egg-info .hypothesis .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp holds the folder, since an editable installation does not survive a move. Without a stamp, as after an
# installation that was interrupted, the environment starts empty.
ifneq ($(shell cat $(STAMP) 2> /dev/null),$(CURDIR))
.PHONY: $(STAMP)
endif

$(STAMP): pyproject.toml constraints.txt
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed, but '$(PYTHON)' is $$("$(PYTHON)" --version 2>&1 || true). Name a newer one: make PYTHON=python3.12"; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' || { echo "'$(PYTHON)' lacks its venv module. Install it (on Debian and Ubuntu: apt install python3-venv), or name another Python: make PYTHON=python3.12"; exit 1; }
	@echo "Installing into .venv: a few minutes, several gigabytes"
	@[ -e $@ ] || "$(PYTHON)" -m venv --clear .venv
	@rm -f $@
	.venv/bin/python -m pip install --disable-pip-version-check --progress-bar off -e ".[book,test]" -c constraints.txt
	@pwd -P > $@

endif
