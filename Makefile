PYTHON ?= python3.11
BIN := .venv/bin
STAMP := .venv/.maskfx-installed
DOCS_STAMP := .venv/.maskfx-docs-installed

.PHONY: venv demo test test-all check bench docs

venv: $(STAMP)

# repeated only when the packaging or the pins change
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev,bench]"
	touch $@

demo: venv
	$(BIN)/python -m maskfx.cli.demo

# a test marked `gpu` skips itself where there is no CUDA device; `slow` ones run in test-all
test: venv
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadgroup -m "not slow" --durations=10

test-all: venv
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadgroup

check: venv
	scripts/check

bench: venv
	$(BIN)/python -m bench.denoisers

# the docs site, in site/; a broken link or an unknown name in the reference fails it
docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[docs]"
	touch $@
