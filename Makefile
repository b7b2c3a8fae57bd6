# make demo   set everything up and run the demo program on the small default model
# make test   set everything up and run the whole unmarked suite
# make check  format, lint, types
# make bench  the engine's own measurements
PYTHON ?= python3.11
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check -q

.PHONY: demo test check bench format clean

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing radixrt into $(VENV) (once; a few minutes)"
	$(PIP) install -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "installing the development tools into $(VENV) (once)"
	$(PIP) install -c constraints.txt -e ".[dev]"
	@touch $@

demo: $(VENV)/.installed
	@exec $(BIN)/radixrt demo

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/.installed
	$(BIN)/radixrt bench engine

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
