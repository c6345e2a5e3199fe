# Every target sets up what it needs: a virtual environment in .venv with the package and its tools.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test test-newest test-ray soak coverage durations lint format docs bench clean
.DEFAULT_GOAL := test

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: $(STAMP)          ## train the digits classifier on four replicas
	$(BIN)/phalanx demo

test: $(STAMP)          ## the whole test suite
	$(BIN)/python -m pytest -n 2 --dist worksteal -q -m "not soak and not ray"

test-newest:            ## the test suite on Python 3.13 and the newest JAX, where they are to be had
	$(PYTHON) tools/newest.py

test-ray: $(STAMP)      ## the tests that need Ray, which is installed if it is missing
	$(BIN)/python -c 'import ray' 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[ray]'
	$(BIN)/python -m pytest -q -m ray tests/job/launch  # others start JAX when they are collected, which Ray would fork

soak: $(STAMP)          ## the slow stress tests
	$(BIN)/python -m pytest -q -m soak

coverage: $(STAMP)      ## which lines the tests reach; the report is in build/coverage
	$(BIN)/python -c 'import pytest_cov' 2>/dev/null || $(BIN)/python -m pip install --quiet -e '.[coverage]'
	$(BIN)/python -m pytest -n 2 --dist worksteal -q -m "not soak and not ray" --cov --cov-report=term:skip-covered --cov-report=html

durations: $(STAMP)     ## the slowest tests
	$(BIN)/python -m pytest -n 2 --dist worksteal -q -m "not soak and not ray" --durations=50 --durations-min=1

lint: $(STAMP)          ## formatting, lint rules and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP)        ## rewrite the files in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(STAMP)          ## build the documentation; any warning fails
	$(BIN)/sphinx-build -W --keep-going -q -d build/doctrees docs build/site

bench: $(STAMP)         ## side-by-side benchmarks (makes environments for the other libraries)
	$(BIN)/python benchmarks/eager.py
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/calls.py
	$(BIN)/python benchmarks/uneven.py
	$(BIN)/python benchmarks/loops.py
	$(BIN)/python benchmarks/allreduce.py
	$(BIN)/python benchmarks/data.py
	$(BIN)/python benchmarks/collectives.py
	$(BIN)/python benchmarks/pipeline.py
	$(BIN)/python benchmarks/multiworker.py
	$(BIN)/python benchmarks/parameter_server.py

clean:
	rm -rf $(VENV) build .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
