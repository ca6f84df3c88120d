# `make demo` and `make test` do all the set-up; `make help` lists the rest.
#
# Variables: PYTHON (interpreter), TORCH and EXTRAS (see scripts/setup_venv.sh), ARGS (passed on to the program).

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-slow test-gpu test-browser test-soak check format coverage bench clean

PY := .venv/bin/python
PYTEST := $(PY) -m pytest
ARGS ?=

export EXTRAS ?= dev
export TORCH ?= torch==2.13.0
ifdef PYTHON
export PYTHON
endif

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  \1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F '|' '{ printf "%-15s %s\n", $$1, $$2 }'

venv:  ## make .venv and install the project in it (once)
	@bash scripts/setup_venv.sh

demo: venv  ## tune the example pipelines and write demo_out/
	$(PY) examples/demo.py $(ARGS)

test: venv  ## the tests that need no GPU, no network and little time
	$(PYTEST) $(ARGS)

test-slow: venv  ## the tests that take longer
	$(PYTEST) -m slow $(ARGS)

test-gpu: venv  ## the tests that need an NVIDIA GPU
	$(PYTEST) -m gpu $(ARGS)

test-browser: venv  ## the tests that look at a page in a headless browser
	$(PYTEST) -m browser $(ARGS)

test-soak: venv  ## the tests that run for minutes to find leaks and races
	$(PYTEST) -m soak $(ARGS)

check: venv  ## lint, format and types, changing nothing
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: venv  ## format the code and fix what can be fixed by itself
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

coverage: venv  ## run the tests and show which lines they miss
	$(PYTEST) --cov --cov-report=term-missing $(ARGS)

bench: venv  ## time tuned against eager on this machine
	$(PY) benchmarks/overhead.py
	$(PY) benchmarks/sharing.py $(ARGS)

clean:  ## remove what the tools made (.venv and the engine cache stay)
	rm -rf build dist demo_out .coverage .coverage.* htmlcov .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -path ./.venv -prune -o -type d -name __pycache__ -exec rm -rf {} +
