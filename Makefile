# Every target does its own set-up: a virtual environment in .venv, made again only when what it depends on has changed.

.POSIX:
PYTHON = python3
VENV = .venv
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test check bench clean

demo: $(VENV)/service.stamp ## three releases: a good one, bad data, bad behaviour
	@$(BIN)/python examples/demo.py

test: $(VENV)/dev.stamp ## fast tests, then those that start processes and train
	$(BIN)/python -m pytest -q -m "not slow"
	$(BIN)/python -m pytest -q -m slow

check: $(VENV)/dev.stamp ## format, lint, types, import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

bench: $(VENV)/dev.stamp ## the figures of docs and README, measured here
	@for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python $$file || exit 1; done

clean: ## forget the environment and the demo's files
	rm -rf $(VENV) .demo

$(VENV)/python.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || { \
	  echo "Python 3.11, 3.12 or 3.13 is needed; this is $$($(PYTHON) --version). Try: make PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/service.stamp: $(VENV)/python.stamp pyproject.toml constraints.txt
	$(PIP) -e '.[service]'
	@touch $@

$(VENV)/dev.stamp: $(VENV)/python.stamp pyproject.toml constraints.txt
	$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/service.stamp
