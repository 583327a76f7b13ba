# Rolecall. `make help` lists the targets.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup run-rl test lint format bench-rl docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  \033[1m%-12s\033[0m %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## make .venv with everything (PIP_ARGS is passed to pip, e.g. an index of CPU builds of torch)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Rolecall needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Set PYTHON=..." >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) || { echo "no venv module: install python3-venv (Debian, Ubuntu)" >&2; exit 2; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --constraint constraints.txt --editable '.[dev]'
	@touch $@

run-rl: $(READY) ## train the reinforcement learning job here: one agent, two observers
	$(BIN)/python -m app local rl

test: $(READY) ## every test that needs neither Docker nor a network
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(READY) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY) ## let ruff mend and format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench-rl: $(READY) ## speed and time to solve against the tutorial's way (10 to 20 minutes; BENCH_JSON=FILE for JSON)
	$(BIN)/python -m tests.benchmarks.bench_rl

docs: $(READY) ## write the tables of settings and metrics in docs/ anew
	$(BIN)/python -m tests.contracts.tables

clean: ## delete what was made here: caches, runs, .venv
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis runs build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
