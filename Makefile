# make test   |   make demo      each is enough on a fresh clone: it creates .venv, installs, and does the job
#
# PYTHON       interpreter that creates the environment                     make test PYTHON=python3.12
# VENV         the environment; one that exists is used as it is            make test VENV=/path/to/env
# CONSTRAINTS  empty keeps the torch an existing environment already has    make test VENV=/path/to/env CONSTRAINTS=
# PIP_FLAGS    extra flags for pip install, such as another index           make test PIP_FLAGS="--extra-index-url ..."
# WORKERS      test processes (auto: one per core, at most 4)               make test WORKERS=1
# ARGS         passed on to pytest, demo, resolve or matrix                 make test ARGS="-k seeds"

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
PIP_FLAGS ?=
WORKERS ?= auto
ARGS ?=

# without files of bytecode each of the many processes that tests start would compile the package again
export PYTHONDONTWRITEBYTECODE :=

BIN := $(VENV)/bin
PARALLEL := -n $(WORKERS) --maxprocesses 4 --dist worksteal
LIBRARY := $(VENV)/.backlight-library
TOOLS := $(VENV)/.backlight-tools
INSTALL = $(BIN)/python -m pip install --quiet $(PIP_FLAGS) $(addprefix -c ,$(CONSTRAINTS))

.DEFAULT_GOAL := help
.PHONY: help install test later slow demo lint format resolve matrix dist clean

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | awk -F '\t' '{ printf "  make %-9s %s\n", $$1, $$2 }'
	@printf '\nVariables: PYTHON VENV CONSTRAINTS PIP_FLAGS WORKERS ARGS (see the head of the Makefile)\n'

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "backlight needs Python 3.10 or later; choose one with PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(LIBRARY): pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "installing backlight and matplotlib into $(VENV); torch is the large part, the first time takes a minute or two"
	@$(INSTALL) -e '.[report]'
	@touch $@

$(TOOLS): pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	@echo "installing backlight, its tests and tools into $(VENV); the first time this takes a minute or two"
	@$(INSTALL) -e '.[report,test,dev]'
	@touch $@ $(LIBRARY)

install: $(TOOLS)  ## create the environment and install backlight into it

test: lint  ## ruff, mypy, the Triton kernels in the interpreter, then all tests but long ones and most combinations
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not slow and not later" $(PARALLEL) tests/interpreted
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not slow and not later" $(PARALLEL) $(ARGS)

later: $(TOOLS)  ## what `make test` leaves out: whole programs, models, compilations, the other combinations of parameters
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "later and not slow" $(PARALLEL) tests/interpreted
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "later and not slow" $(PARALLEL) $(ARGS)

slow: $(TOOLS)  ## the longest tests: long compilations, every mutant of the doctor
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m slow $(PARALLEL) $(ARGS)

demo: $(LIBRARY)  ## see it work on this machine, under three minutes
	$(BIN)/backlight demo $(ARGS)

lint: $(TOOLS)  ## ruff, codespell and mypy
	$(BIN)/ruff check .
	$(BIN)/codespell src tests docs examples tools *.md
	$(BIN)/mypy

format: $(TOOLS)  ## let ruff fix and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

resolve: $(TOOLS)  ## can Linux, macOS and Windows install what constraints.txt pins? asks the public index
	$(BIN)/python tools/resolve.py $(ARGS)

matrix: $(TOOLS)  ## torch 2.11 to 2.15 with their Tritons, and the floors: an environment each (gigabytes), CPU tests in it
	$(BIN)/python tools/matrix.py $(ARGS)
	$(BIN)/python tools/make_versions_page.py --write

dist:  ## the wheel and the sdist of a release into dist/, checked by tools that live in an environment of their own
	$(PYTHON) -m venv .release
	.release/bin/python -m pip install --quiet $(PIP_FLAGS) build twine check-wheel-contents cffconvert 'hatchling>=1.27'
	rm -rf dist
	.release/bin/python -m build --no-isolation
	.release/bin/twine check --strict dist/*
	.release/bin/check-wheel-contents dist/*.whl
	.release/bin/cffconvert --validate

clean:  ## remove what the other targets made
	rm -rf .venv .matrix .release build dist reports .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
