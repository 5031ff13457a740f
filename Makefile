# Every target makes the virtual environment it needs and installs the pinned versions when they have changed.
# On a machine whose own Python already has torch (a GPU node), `make test-gpu VENV=` uses that Python as it is.
PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2

ifeq ($(strip $(VENV)),)
RUN := PYTHONPATH="$(CURDIR):$(CURDIR)/kernels" $(PYTHON)
ENV :=
else
RUN := $(VENV)/bin/python
ENV := $(VENV)/.installed
endif

.DEFAULT_GOAL := help
.PHONY: help env test test-slow test-gpu compile-all demo bench lint format typecheck wheel-check clean

help:
	@echo "make test        the tests that need no accelerator"
	@echo "make demo        train a small model three ways on four ranks, table and pictures in runs/demo"
	@echo "make test-slow   the exhaustive products"
	@echo "make test-gpu    the tests marked gpu and multigpu (VENV= PYTHON=python3 reuses an installed torch)"
	@echo "make compile-all every variant of every kernel for every GPU generation, without a GPU (JOBS=2)"
	@echo "make bench       ring against every tile on this machine"
	@echo "make lint format typecheck wheel-check clean"

env: $(ENV)

# torch comes first and to the version, so that nothing later can choose another build of it. setuptools is pinned
# beside it because the build is not isolated: an isolated one would fetch its own.
$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "installing torch and the rest into $(VENV): some minutes, once"
	$(PYTHON) -m venv "$(VENV)"
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools torch==2.13.0
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e ".[dev]"
	touch $@

# Without GPUs in sight, so that the same happens on every machine (and autograd can run in forked ranks). Each test
# computes with one thread: JOBS of them run at once.
test: $(ENV)
	CUDA_VISIBLE_DEVICES= OMP_WAIT_POLICY=passive $(RUN) -m pytest -n $(JOBS)

test-slow: $(ENV)
	$(RUN) -m pytest -m "slow and not gpu and not multigpu" --timeout 3600

# Without a GPU every test would be skipped, which looks like success.
test-gpu: $(ENV)
	@$(RUN) -c "import sys, torch; torch.cuda.is_available() or sys.exit('make test-gpu: torch finds no CUDA device here')"
	$(RUN) -m pytest -m "gpu or multigpu"

# Half an hour on two cores. The tests compile a covering set.
compile-all: $(ENV)
	$(RUN) tests/kernels/compile_portable.py --all --jobs $(JOBS)
	$(RUN) tests/kernels/compile_hopper.py --all

demo: $(ENV)
	$(RUN) launch/demo.py

bench: $(ENV)
	$(RUN) benchmarks/distributed.py

lint: $(ENV)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

format: $(ENV)
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

typecheck: $(ENV)
	$(RUN) -m mypy

wheel-check: $(ENV)
	$(RUN) .ci/check_wheel.py

clean:
	rm -rf .venv build dist runs *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
