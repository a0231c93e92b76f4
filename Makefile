PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready

.PHONY: setup demo test lint types pytest pytest-gpu pytest-gpu-full bench-scheduler bench-kernels

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(READY)
	$(PY) benchmarks/recall/demo.py

test: lint types pytest

lint: $(READY)
	$(PY) -m ruff check .

# mypy reads the built tree, where kernels/ stands under its import name, so that calls into it are checked.
types: $(READY)
	rm -rf build
	$(PY) -m pip install --quiet --no-deps --no-build-isolation --target build/types .
	$(PY) -m mypy build/types/mambacache

# Two workers with one torch thread each: small operations gain little from a second thread.
# -P keeps the checkout off the module search path, where its folder kernels/ would be importable under that name too.
pytest: export OMP_NUM_THREADS ?= 1
pytest: $(READY)
	$(PY) -P -m pytest --numprocesses 2

# On a machine with a CUDA device, in the environment that has its torch: under eight minutes, and the whole grid.
pytest-gpu: MARK := gpu
pytest-gpu-full: MARK := gpu_full
pytest-gpu pytest-gpu-full: export OMP_NUM_THREADS ?= 1
pytest-gpu pytest-gpu-full:
	$(PYTHON) -P -m pytest --numprocesses 12 --dist loadgroup -m $(MARK)

bench-kernels:
	$(PYTHON) benchmarks/bench_kernels.py --json benchmarks/results/kernels-h200.json

bench-scheduler: $(READY)
	$(PY) benchmarks/bench_scheduler.py
