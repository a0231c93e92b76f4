PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready

# Two cores: one torch thread in each of two pytest workers is faster than two threads that meet at every operation.
export OMP_NUM_THREADS ?= 1
# The folder kernels/ must not be importable under its own name: -P keeps the checkout off the module search path.
PYTEST := $(PY) -P -m pytest

.PHONY: setup demo test lint types pytest bench-scheduler clean

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

pytest: $(READY)
	$(PYTEST) --numprocesses 2

bench-scheduler: $(READY)
	$(PY) benchmarks/bench_scheduler.py

clean:
	rm -rf build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
