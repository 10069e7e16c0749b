# Everything starts from a Python >= 3.11 with headers and a C++ compiler: each target makes .venv first if it is not there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Extra arguments for torch's own install, e.g. TORCH_ARGS="--index-url …" to choose a CUDA build.
TORCH_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help venv demo test lab docs fuzz bench format clean

help:
	@echo "make demo    the whole path on the small model, into out/demo"
	@echo "make test    lint, types and every test"
	@echo "make lab     JupyterLab on the notebooks (loopback, token)"
	@echo "make docs    every notebook in full, as pages in docs/ that open offline"
	@echo "make bench   CPU kernel benchmark; make fuzz, format, clean, venv"

venv: $(STAMP)

# torch goes first and alone: resolved together with the rest, pip would fetch a CUDA build of several gigabytes.
$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard csrc/*.cpp csrc/*.h csrc/*/*)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "hswq_lab needs Python 3.11 or newer: make PYTHON=…")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH_ARGS) torch==2.13.0
	$(BIN)/python -m pip install --quiet -e '.[dev]' -c constraints.txt
	$(BIN)/python -c 'from hswq_lab import ops; print(ops.describe_backends())'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/hswq-lab demo --out out/demo

test: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict hswq_lab
	find csrc -name '*.cpp' -o -name '*.h' -o -name '*.inl' -o -name '*.cu' -o -name '*.cuh' | xargs $(BIN)/clang-format --dry-run -Werror
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

lab: $(STAMP)
	$(BIN)/jupyter-lab --ip=127.0.0.1 --ServerApp.root_dir=notebooks

docs: $(STAMP)
	$(BIN)/python tools/build_docs.py

fuzz: $(STAMP)
	HSWQ_FUZZ=4000 $(BIN)/python -m pytest -q tests/test_checkpoint_fuzz.py

bench: $(STAMP)
	$(BIN)/python benchmarks/cpu_kernels.py

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	find csrc -name '*.cpp' -o -name '*.h' -o -name '*.inl' -o -name '*.cu' -o -name '*.cuh' | xargs $(BIN)/clang-format -i

clean:
	rm -rf build out notebooks/out docs/*.html docs/api docs/plotly.min.js
