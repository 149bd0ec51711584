# `make demo` and `make test` are all a newcomer needs: both make .venv and install what they use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-slow lint types check bench bench-quick clean

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "QuPeL needs Python 3.11 or newer: make PYTHON=python3.11 demo"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,onnx,zstd,tensorboard,flower]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/qupel run

test: $(STAMP)
	$(BIN)/python -m pytest -n auto -q

test-slow: $(STAMP)
	$(BIN)/python -m pytest -q -m slow

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

check: lint types test

# Against other frameworks, in an environment of its own; on an idle machine, images from the folder in QUPEL_DATA.
bench:
	test -x .venv-bench/bin/python || $(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	.venv-bench/bin/python benchmarks/peers --out docs/results

bench-quick: $(STAMP)
	$(BIN)/python benchmarks/quick.py

clean:
	rm -rf $(VENV) .venv-bench build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
