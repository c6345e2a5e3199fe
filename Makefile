# Every target sets up what it needs: a virtual environment in .venv with the package and its tools.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Three processes for two processors: many tests wait for other processes, or for a deadline.
SUITE  := -n 3 --dist worksteal -q -m "not soak and not ray"
# Programs are compiled as users compile them; the other tests save that time (conftest.py).
AS_USERS := JAX_DISABLE_MOST_OPTIMIZATIONS=0

.PHONY: demo test test-newest test-ray test-keras test-loaders soak coverage durations lint format docs bench clean
.DEFAULT_GOAL := test

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: $(STAMP)          ## train the digits classifier on four replicas
	$(BIN)/phalanx demo

test: $(STAMP)          ## the whole test suite
	$(BIN)/python -m pytest $(SUITE)

test-newest:            ## the test suite on Python 3.13 and the newest JAX, where they are to be had
	$(AS_USERS) $(PYTHON) tools/newest.py

test-ray: $(STAMP)      ## the tests that need Ray, which is installed if it is missing
	$(BIN)/python -c 'import ray' 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[ray]'
	$(BIN)/python -m pytest -q -m ray tests/job/launch  # others start JAX when they are collected, which Ray would fork

test-keras:             ## the tests of the Keras integration on the oldest Keras that it supports
	$(PYTHON) -m venv .venvs/oldest-keras
	.venvs/oldest-keras/bin/python -m pip install --quiet --disable-pip-version-check -e '.[dev]' 'keras==3.12.*'
	.venvs/oldest-keras/bin/python -m pytest -q -m "not soak" tests/integrations/keras

test-loaders:           ## Keras with tf.data and with loaders of torch, each in an environment of its own
	for library in tensorflow-cpu==2.21.0 torch==2.13.0; do \
	  home=.venvs/loaders-$${library%%[-=]*} && $(PYTHON) -m venv $$home && \
	  $$home/bin/python -m pip install --quiet --disable-pip-version-check -e '.[keras]' pytest hypothesis $$library && \
	  $$home/bin/python -m pytest -q tests/integrations/keras/foreign_loaders.py || exit 1; \
	done

soak: $(STAMP)          ## the slow stress tests
	$(AS_USERS) $(BIN)/python -m pytest -q -m soak

coverage: $(STAMP)      ## which lines the tests reach; the report is in build/coverage
	$(BIN)/python -c 'import pytest_cov' 2>/dev/null || $(BIN)/python -m pip install --quiet -e '.[coverage]'
	$(BIN)/python -m pytest $(SUITE) --cov --cov-report=term:skip-covered --cov-report=html

durations: $(STAMP)     ## the slowest tests
	$(BIN)/python -m pytest $(SUITE) --durations=50 --durations-min=1

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
	$(BIN)/python benchmarks/plan.py
	$(BIN)/python benchmarks/parameter_server.py
	$(BIN)/python benchmarks/checkpoint.py
	$(BIN)/python benchmarks/elastic.py
	$(BIN)/python benchmarks/faults.py
	$(BIN)/python benchmarks/keras.py

clean:
	rm -rf $(VENV) build .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
