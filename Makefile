PYTHON ?= python3
BIN := .venv/bin

.PHONY: audit test slow clean

$(BIN)/python:
	$(PYTHON) -m venv .venv

.venv/demo: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/pip install -q -c constraints.txt -e '.[demo]'
	touch $@

.venv/dev: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	touch $@

audit: .venv/demo
	$(BIN)/rasura audit --budget quick --limit 3 --out runs/demo

test: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2

slow: .venv/dev
	$(BIN)/python -m pytest -n 2 --run-slow

clean:
	rm -rf .venv runs build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
