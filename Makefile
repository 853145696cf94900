# Everything a fresh machine needs: `make demo` shows tensortap at work, `make test` runs all checks.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
MINUTES ?= 20

.PHONY: demo test lint types tests browser bench floors wheel fuzz clean

demo: $(VENV)/.demo
	$(BIN)/tensortap demo --out runs/demo --overwrite

test: lint types tests

lint: $(VENV)/.ready
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples

types: $(VENV)/.ready
	$(BIN)/mypy

# Two processes, one thread each; each file stays in one of them, with the servers and clusters that it starts.
tests: $(VENV)/.ready browser
	$(BIN)/python tests/support/compile_kernels.py
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --durations 25

# The report page is tested in a real browser. If none can be installed, these tests are skipped.
browser:
	@command -v chromium >/dev/null || [ -n "$$TENSORTAP_BROWSER" ] || [ "$$(id -u)" != 0 ] || \
	  { apt-get update && apt-get install -y chromium; } >/dev/null 2>&1 || \
	  echo "chromium could not be installed: the tests of the report page will be skipped"

bench: $(VENV)/.ready
	$(BIN)/python benchmarks/capture_cpu.py

# Clean environments without a framework; each needs a package index and one or two minutes.
floors:  # the lowest versions that pyproject.toml allows
	$(PYTHON) tests/support/clean_install.py floors

wheel:  # the built wheel
	$(PYTHON) tests/support/clean_install.py wheel

# Mutated files of every type that is read, for MINUTES. A short version is part of the tests.
fuzz: $(VENV)/.ready
	$(BIN)/python tests/fuzz/run.py --minutes $(MINUTES)

# constraints.txt pins the frameworks, so that a plain pip takes their CPU builds.
install := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e

# The demo needs torch alone, not the development tools.
$(VENV)/.demo: pyproject.toml constraints.txt
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	$(install) '.[torch]'
	@touch $@

$(VENV)/.ready: pyproject.toml constraints.txt
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	$(install) '.[dev]'
	@touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) runs build dist .pytest_cache .mypy_cache .ruff_cache
