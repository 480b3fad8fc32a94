# Every target does its own set-up: a virtual environment in .venv, made again only when what it depends on has changed.

.POSIX:
PYTHON = python3
VENV = .venv
BIN = $(VENV)/bin
BENCH_SECONDS = 1200
PIPELINE = tests/flows tests/unit/tasks tests/system/faults tests/system/kill_matrix tests/deployments tests/ui tests/end_to_end
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo up down test fast slow-pipeline slow-others soak check bench lock clean

demo: $(VENV)/service.stamp ## three releases: a good one, bad data, bad behaviour
	@$(BIN)/python examples/demo.py

up: $(VENV)/service.stamp ## service, Prefect server, worker and deployments on this machine; prints the addresses
	@$(BIN)/python -m deployments.local up

down: $(VENV)/service.stamp ## end what `make up` started
	@$(BIN)/python -m deployments.local down

test: $(VENV)/dev.stamp ## every test but `make soak`: the pipeline's slow ones, which mostly wait, beside all others
	@$(MAKE) -j2 --output-sync=line --no-print-directory slow-pipeline fast slow-others

fast: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -q -m "not slow and not soak"

slow-pipeline: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -q -m "slow and not soak" --durations=10 $(PIPELINE)

slow-others: fast
	$(BIN)/python -m pytest -q -m "slow and not soak" --durations=10 $(PIPELINE:%=--ignore=%)

soak: $(VENV)/dev.stamp ## what takes too long for every commit: the rest of the kill matrix, 600 random kills, new examples
	$(BIN)/python -m pytest -q --hypothesis-profile=soak -m "soak or hypothesis"

check: $(VENV)/dev.stamp ## format, lint, types, import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

bench: $(VENV)/dev.stamp ## the figures of docs and README, measured here; each program is ended after BENCH_SECONDS
	@wrong=; for file in benchmarks/*.py; do \
	  echo "== $$file"; code=0; \
	  timeout --foreground --signal=INT --kill-after=60 $(BENCH_SECONDS) $(BIN)/python $$file || code=$$?; \
	  case $$code in \
	    0) ;; \
	    124|137) echo "ended after $(BENCH_SECONDS) s: no figures" ;; \
	    *) wrong="$$wrong $$file" ;; \
	  esac; done; \
	  test -z "$$wrong" || { echo "wrong work:$$wrong" >&2; exit 1; }

lock: $(VENV)/dev.stamp ## name in constraints.txt whatever an installation takes and no line names yet
	$(BIN)/python scripts/lock.py

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
