PYTHON ?= python3
BIN := .venv/bin

.PHONY: audit docs test slow coverage mutants fuzz bench clean

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

.venv/docs: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/pip install -q -c constraints.txt mkdocs-material 'mkdocstrings[python]'
	touch $@

# The site of docs/, into site/. A broken link or a page that the navigation lacks ends it.
docs: .venv/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

test: .venv/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 --dist worksteal

slow: .venv/dev
	$(BIN)/python -m pytest -n 2 --dist worksteal --run-slow

# Apart from `make test`: counting costs time, most of it below Python 3.12, which lacks sys.monitoring.
coverage: .venv/dev
	COVERAGE_CORE=$$($(BIN)/python -c 'import sys; print("sysmon" if sys.version_info >= (3, 12) else "ctrace")') \
		$(BIN)/python -m pytest -n 2 --dist worksteal --cov --cov-report=term:skip-covered

mutants: .venv/dev
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/mutmut run
	$(BIN)/mutmut results

INPUTS ?= 1000000

# Goes on where it was stopped; rm -r runs/fuzz to begin anew.
fuzz: .venv/dev
	$(BIN)/python -m fuzz --inputs $(INPUTS)

BEFORE ?= $(shell git describe --tags --abbrev=0 2>/dev/null || git rev-parse HEAD~1)
SIZES ?= 1,4

# make bench TEXTS=FILE.parquet writes runs/bench.md: span beside its floor and beside BEFORE (the last tag, else the last
# commit), in CPU seconds; a row that lost more than 10 % says so.
bench: .venv/dev
	mkdir -p runs
	rm -rf .venv/before && git worktree prune && git worktree add --detach .venv/before $(BEFORE)
	export HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1; set -- $(TEXTS) minilm --sizes $(SIZES); \
		($(BIN)/python benchmarks/span_speed.py scan "$$@" && echo && \
		$(BIN)/python benchmarks/span_speed.py whole "$$@" --before .venv/before && echo && \
		$(BIN)/python benchmarks/span_speed.py whole "$$@" --before .venv/before --defense frozen-embeddings+dropout:0.1) \
		> runs/bench.md
	cat runs/bench.md
	git worktree remove --force .venv/before

clean:
	rm -rf .venv runs site build dist mutants *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage*
