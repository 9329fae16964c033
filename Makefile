# `make demo` and `make test` each set everything up; a second call installs nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo docs test lint slow clean

help: ## say what there is
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 10

demo: $(READY) ## train a small network on embedded digits and show what early exits save here
	@$(BIN)/offramp demo

test: $(READY) lint ## lint, type check and run the tests
	$(BIN)/pytest -n auto --dist worksteal

lint: $(READY) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

slow: $(READY) ## the tests that take minutes
	$(BIN)/pytest -n auto --dist worksteal -m "slow and not exhaustive" --timeout 1800

docs: $(READY) ## build the documentation: one folder that opens offline
	$(BIN)/sphinx-build -W --keep-going -q docs build/docs
	@echo "open build/docs/index.html"

clean: ## remove the environment and caches; runs are kept
	rm -rf $(VENV) build .mypy_cache .pytest_cache .ruff_cache

$(READY): pyproject.toml constraints.txt
	@echo "setting up $(VENV): some minutes and about 5.5 GB, once"
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "offramp needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
