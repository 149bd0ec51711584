# `make demo` and `make test` are all a newcomer needs: both make .venv and install what they use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-slow lint types check bench bench-quick docs notebooks lock clean

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "QuPeL needs Python 3.11 or newer: make PYTHON=python3.11 demo"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,onnx,zstd,tensorboard,flower,privacy,docs]'
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
	.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt 'fluke-fl>=0.8,<0.9' 'nvflare>=2.9,<2.10' || echo "without fluke and NVFlare, which do not install here"
	.venv-bench/bin/python benchmarks/peers --out docs/results

bench-quick: $(STAMP)
	$(BIN)/python benchmarks/quick.py

# The documentation as a folder of pages, site/index.html, that needs no server and no network.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

notebooks: $(STAMP)
	mkdir -p notebooks
	for script in examples/*.py; do $(BIN)/jupytext --quiet --to ipynb $$script -o notebooks/$$(basename $$script .py).ipynb; done

# requirements.lock out of constraints.txt, with the hash of torch's CPU wheel (Linux, x86-64, Python 3.11) beside the others.
TORCH_CPU := 6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b
lock: $(STAMP)
	{ grep '^#' requirements.lock; $(BIN)/uv --no-config pip compile constraints.txt --no-deps --generate-hashes \
	  --no-annotate --no-header --quiet | awk '{print} /^torch==/ {print "    --hash=sha256:$(TORCH_CPU) \\"}'; } > .lock.tmp
	mv .lock.tmp requirements.lock

clean:
	rm -rf $(VENV) .venv-bench build dist site notebooks src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
