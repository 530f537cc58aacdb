# On a fresh machine with Python 3.11, pip and make: `make train` installs what it needs, `make test` the rest.
# PYTHON=... and TORCH_INDEX=... are passed to scripts/setup.sh, which documents them.

BIN := .venv/bin
# Newer than the files that the environment is made from, so that a second call does nothing.
TRAIN := .venv/.train-complete
STAMP := .venv/.setup-complete

.PHONY: setup train demo train-llm test test-all bench bench-all gpu docs lint format clean

setup: $(STAMP)

$(TRAIN): scripts/setup.sh pyproject.toml setup.py $(wildcard requirements/train.txt requirements/torch*.txt lightning_pipe/recsys/kernels/csrc/*)
	scripts/setup.sh train
	touch $@

$(STAMP): $(TRAIN) requirements/test.txt
	scripts/setup.sh test
	touch $@

train: $(TRAIN)
	$(BIN)/lightning-pipe fit --config examples/recsys_movielens/prefetch.yaml $(ARGS)

# The same training under three plans, with rows on this machine's disk, in about two minutes.
demo: $(TRAIN)
	$(BIN)/python -m examples.rows_on_disk.demo $(ARGS)

train-llm: $(TRAIN)
	$(BIN)/lightning-pipe fit --config examples/llm_text/1f1b.yaml $(ARGS)

# Run test after every change; test-all also runs the tests marked "exhaustive".
# FILE=tests/... runs all tests of one file. ARGS are more options of pytest. WORKERS processes run files in parallel, each
# with one thread, because the ranks of a test are processes too.
WORKERS ?= 3
test test-all: export OMP_NUM_THREADS = 1
# If this is set, each process that a test starts compiles the package again.
test test-all: export PYTHONDONTWRITEBYTECODE =
test: setup
	$(BIN)/python -m pytest $(ARGS) $(if $(FILE),--exhaustive $(FILE),-n $(WORKERS) --dist loadfile)

test-all: setup
	$(BIN)/python -m pytest --exhaustive $(ARGS) $(or $(FILE),-n $(WORKERS) --dist loadfile)

# One table, and benchmarks/results/latest.json. bench measures the figures of the docs, in about 12 minutes on two quiet
# cores; bench-all runs every benchmark.
bench bench-all: export OMP_NUM_THREADS = 1
bench: setup
	$(BIN)/python -m benchmarks.table

bench-all: setup
	$(BIN)/python -m benchmarks.table --all

# All checks and measurements that need a GPU, in at most ten minutes; scripts/gpu.sh documents PYTHON, WHEELS and OUT.
# Without .venv it uses the machine's own packages. ARGS=--dry-run tries it on a CPU.
gpu:
	scripts/gpu.sh $(ARGS)

# Every warning is an error. Open docs/_build/html/index.html.
docs: setup
	$(BIN)/sphinx-build -W --keep-going -b html docs docs/_build/html

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist docs/_build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
