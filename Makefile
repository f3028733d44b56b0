# `make train` trains the quickstart, `make test` runs every test, `make bench` measures how fast everything is and `make bench-cluster` what is
# lost when something dies (each most of an hour on two cores). All set up the virtual environment first.
VENV ?= .venv
PYTHON ?= python3.11
RUN ?= quickstart-$(shell date +%Y%m%d-%H%M%S)
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: train test lint bench bench-cluster venv

train: $(READY)
	$(BIN)/rtpo train --config conf/quickstart.yaml run.name=$(RUN) $(ARGS)

# Tests without Ray side by side, then those that share one cluster and need the machine for themselves.
test: $(READY)
	$(BIN)/python -m pytest tests/unit tests/processes -n 2 $(ARGS)
	$(BIN)/python -m pytest tests/integration tests/gpu $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(READY)
	for part in learner engine weights allocation cost peers growth simulation record; do $(BIN)/python tests/bench/$$part.py || exit 1; done

bench-cluster: $(READY)
	$(BIN)/python tests/bench/coordinator.py
	$(BIN)/python tests/bench/recovery.py
	$(BIN)/python tests/bench/chaos.py stages
	$(BIN)/python tests/bench/chaos.py faults

venv: $(READY)

# torch first, with its dependencies: whichever build of it this machine gets then works. The rest is complete, so --no-deps.
$(READY): requirements/cpu.txt requirements/dev.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q $$(grep '^torch==' requirements/cpu.txt)
	$(BIN)/pip install -q --no-deps -r requirements/cpu.txt -r requirements/dev.txt
	$(BIN)/pip install -q --no-deps --no-build-isolation -e .
	touch $@
