# Everything starts from a Python >= 3.11 with headers and a C++ compiler: each target makes .venv first if it is not there.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Extra arguments for torch's own install, e.g. TORCH_ARGS="--index-url …" to choose a CUDA build.
TORCH_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help venv demo test lab docs fuzz sanitize bench format clean

help:
	@echo "make demo    the whole path on the small model, into out/demo"
	@echo "make test    lint, types and every test"
	@echo "make lab     JupyterLab on the notebooks (loopback, token)"
	@echo "make docs    every notebook in full, as pages in docs/ that open offline"
	@echo "make fuzz    long campaigns of damaged files and random lives; make sanitize: kernels under ASan and UBSan"
	@echo "make bench   CPU kernel benchmark; make format, clean, venv"

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

# Long campaigns: damaged files, random lives, and minutes of coverage-guided fuzzing where atheris is installed.
fuzz: $(STAMP)
	HSWQ_FUZZ=4000 $(BIN)/python -m pytest -q -n auto tests/test_checkpoint_fuzz.py tests/test_hostile_inputs.py
	HSWQ_FUZZ=100 $(BIN)/python -m pytest -q --timeout 3600 tests/test_lifecycle.py
	mkdir -p build/fuzz
	if $(BIN)/python -c "import atheris" 2>/dev/null; then cd build/fuzz && ../../$(BIN)/python ../../tools/fuzz_coverage.py -max_total_time=600 corpus; else echo "coverage-guided part left out: pip install atheris"; fi

# The CPU extension under AddressSanitizer and UBSan, on the kernels' tests and the damaged files.
SANITIZERS := -fsanitize=address,undefined -fno-omit-frame-pointer
sanitize: $(STAMP)
	rm -rf build/sanitized && mkdir -p build/sanitized
	cp -r hswq_lab tests tools pyproject.toml build/sanitized && rm -f build/sanitized/hswq_lab/_C*.so
	CXX="g++ $(SANITIZERS)" HSWQ_LAB_CUDA=0 HSWQ_LAB_REQUIRE_CPU=1 $(BIN)/python setup.py -q build_ext --build-lib build/sanitized
	cd build/sanitized && PYTHONPATH=$$PWD ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
	  LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
	  ../../$(BIN)/python -m pytest -q -s -x -n 0 --timeout 3600 tests/test_ops.py tests/test_ops_products.py tests/test_checkpoint_fuzz.py tests/test_hostile_inputs.py

bench: $(STAMP)
	$(BIN)/python benchmarks/cpu_kernels.py

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	find csrc -name '*.cpp' -o -name '*.h' -o -name '*.inl' -o -name '*.cu' -o -name '*.cuh' | xargs $(BIN)/clang-format -i

clean:
	rm -rf build out notebooks/out docs/*.html docs/api docs/plotly.min.js
