# make demo        see it work: profile, train the pilot, train under one eighth of the memory
# make test        lint, types and tests in a virtual environment of its own
# make test-here   the tests with the Python at hand: no installation, no network
# make lint        ruff and mypy alone
# make bench       the benchmarks; results go to docs/results/
# make slow        the tests that take minutes
# make gpu-check   on a machine with a GPU: training there has the bits of plain PyTorch
#
# PY is the Python that makes the environment, VENV where it stands, JOBS how many test processes.

PY ?= python3
VENV ?= .venv
# Tests wait for disks and processes about half of their time.
JOBS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null) && echo $$(( (n * 3 + 1) / 2 )) || echo auto)

STAMP := $(VENV)/.stamp
BIN := $(VENV)/bin
MYPY := $(BIN)/mypy --strict -p dynoffload
PYTEST_FLAGS ?= --timeout 300
# On the torch backend of tests/backend, which is the accelerator of all of a process.
BACKEND = tests/backend $(wildcard tests/test_hazard_*.py)
# One thread for each of several test processes; tests that measure have the machine to themselves.
# A selection that finds no test is an error (pytest ends with 5): a marker must not lose its tests.
SHARED := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

OLD_PYTHON = import sys; v = sys.version_info; sys.exit(v < (3, 11) and \
  "dynoffload needs Python 3.11 or newer; $(1) is Python %d.%d. Name another: make PY=python3.11" % (v[0], v[1]))
NO_PAGER = "dynoffload: no C compiler found, so the C pager was not built; dynoffload works without it, on the slower mapped-file backend."

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-here lint style bench slow gpu-check clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard dynoffload/memory/native/*)
	@command -v $(PY) >/dev/null || { echo "dynoffload needs Python 3.11 or newer; $(PY) was not found. Name one: make PY=/path/to/python3.11"; exit 1; }
	@$(PY) -c '$(call OLD_PYTHON,$(PY))'
	@echo "Installing dynoffload into $(VENV): about a minute, or as long as the download of torch takes."
	@$(PY) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools wheel
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev]'
	@test "$$(uname -s)" != Linux -o ! -e dynoffload/memory/native/pager.h || ls dynoffload/memory/_pager*.so >/dev/null 2>&1 || echo $(NO_PAGER)
	@touch $@

demo: $(STAMP)
	$(BIN)/dynoffload experiment demo

lint: style
	$(MYPY)

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Types are checked beside the first tests. Of the tests that measure, only their files are collected.
test: style
	@log=$$(mktemp); $(MYPY) >$$log 2>&1 & types=$$!; \
	  $(SHARED) $(BIN)/python -m pytest -n $(JOBS) -m "not slow and not alone" $(PYTEST_FLAGS); tests=$$?; \
	  wait $$types; types=$$?; cat $$log; rm -f $$log; test $$tests$$types = 00
	$(SHARED) $(BIN)/python -m pytest -n $(JOBS) -m "not slow" $(PYTEST_FLAGS) $(BACKEND)
	$(BIN)/python -m pytest -m "alone and not slow" $(PYTEST_FLAGS) $$(grep -l 'mark[.]alone' tests/test_*.py)

slow: $(STAMP)
	$(BIN)/python -m pytest -m slow --timeout 3600
	$(BIN)/python -m pytest -m slow --timeout 3600 $(BACKEND)

# With the Python at hand nothing is installed: the link makes this checkout's package importable, and
# not the folders beside it.
test-here:
	@$(PY) -c '$(call OLD_PYTHON,$(PY))'
	@$(PY) setup.py --quiet build_ext --inplace || echo "dynoffload: the extension could not be built here (setuptools missing?); going on without it."
	@mkdir -p build/path && ln -sfn ../../dynoffload build/path/dynoffload
	PYTHONPATH="build/path$${PYTHONPATH:+:$$PYTHONPATH}" $(PY) -m pytest -m "not slow"

gpu-check:
	@$(PY) -c '$(call OLD_PYTHON,$(PY))'
	@$(PY) -c 'import torch, numpy, rapidfuzz' 2>/dev/null || { echo "gpu-check: $(PY) lacks torch, numpy or rapidfuzz; name one that has them: make gpu-check PY=/path/to/python"; exit 1; }
	@mkdir -p build/path && ln -sfn ../../dynoffload build/path/dynoffload
	PYTHONPATH="build/path$${PYTHONPATH:+:$$PYTHONPATH}" $(PY) -P -m dynoffload.experiments.gpu_check --json build/gpu-check.json

bench: $(STAMP)
	@mkdir -p docs/results
	$(BIN)/dynoffload experiment all --json docs/results

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
