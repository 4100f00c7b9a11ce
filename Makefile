# Two commands do everything on a fresh machine with Python 3.11 or newer: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
TEST_VENV := .venv-test
PIP_FLAGS := --quiet --disable-pip-version-check

.PHONY: demo test check slow bench equality clean

## demo: install into .venv, predict the paper's cluster from its baseline, draw the plots into out/
demo: $(VENV)/.installed
	$(VENV)/bin/nestpipe reproduce --out out
	@echo "plots are in out/; to go on: . $(VENV)/bin/activate"

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "nestpipe needs Python 3.11 or newer; set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install $(PIP_FLAGS) -c constraints.txt -e .
	touch $@

## test: all that CI runs, in a fresh virtual environment of its own
test:
	rm -rf $(TEST_VENV)
	$(PYTHON) -m venv $(TEST_VENV)
	$(TEST_VENV)/bin/pip install $(PIP_FLAGS) -c constraints.txt -e '.[executor,sweep,dev]'
	$(MAKE) check BIN=$(TEST_VENV)/bin

## check: the same without the installing, with the tools in BIN
BIN ?= $(VENV)/bin
check:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -n 2

## slow: the tests that take minutes, with the tools in BIN
slow:
	$(BIN)/python -m pytest -m slow

## bench: every benchmark, as ratios within one run
bench: $(VENV)/.installed
	for each in benchmarks/bench_*.py; do echo "== $$each"; $(VENV)/bin/python $$each || exit 1; done

## equality: every synchronous schedule against sequential training, bit by bit, the full grid (hours)
equality: $(VENV)/.installed
	$(VENV)/bin/pip install $(PIP_FLAGS) -c constraints.txt -e '.[executor]'
	$(VENV)/bin/python -m executor.app.equality

clean:
	rm -rf $(VENV) $(TEST_VENV) out build *.egg-info
