# Everything one does here, from nothing but python3 and make. The environment is made in .venv on first use.
#
#   make launch ARGS="--steps=50"      flags for the launcher
#   make test ARGS="-k search"         flags for pytest
#   make launch PYTHON=python3.12      another Python
#   make launch TENSORFLOW=gpu         TensorFlow with CUDA; the default follows the hardware (cpu where no GPU answers)

PYTHON ?= python3
TENSORFLOW ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
# pip says nothing of an extra that it does not know: the build that is there would be removed, and none installed.
ifeq ($(filter cpu gpu,$(TENSORFLOW)),)
  $(error TENSORFLOW=$(TENSORFLOW): unknown; take cpu or gpu)
endif
ARGS ?=

# pip cannot choose TensorFlow's build by hardware, so the stamp carries the choice: another choice installs anew.
ENVIRONMENT := .venv/.installed-$(TENSORFLOW)
BIN := .venv/bin

# The version of the Python that .venv has, where another one is asked for: then .venv is made anew.
VERSION := -c 'import sys; print("%d.%d" % sys.version_info[:2])'
ANOTHER := $(if $(filter command,$(origin PYTHON)),$(shell \
  wanted=$$($(PYTHON) $(VERSION) 2>/dev/null); there=$$($(BIN)/python $(VERSION) 2>/dev/null); \
  [ -n "$$wanted" ] && [ -n "$$there" ] && [ "$$wanted" != "$$there" ] && echo "$$there"))

# Numba compiles a kernel again once its file is newer than what it has kept: then here, not in somebody's first search.
COMPILED := .venv/.compiled
KERNELS := $(shell grep -rlE "import compiled|njit" pase_mtf --include=*.py 2>/dev/null)

# The C++ core of TensorFlow opens with a page of notes unless told before it is loaded.
export TF_CPP_MIN_LOG_LEVEL ?= 3
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help environment launch test test-all lint benchmark bazel clean

help:
	@echo "make launch       find a strategy for the transformer on 8 devices, train with it, show the speedup"
	@echo "make test         the gate: make lint, then every test but the slow ones"
	@echo "make test-all     the gate, the tests under Bazel where it is installed, and the slow tests"
	@echo "make lint         ruff, the contracts of imports, types"
	@echo "make benchmark    the measurements behind the README's table"
	@echo "make bazel        the gate's tests under Bazel, with the Python of .venv"
	@echo "make environment  install everything into .venv, which all of these do on first use"
	@echo "make clean        remove the environment and every cache"

launch: $(COMPILED)
	@$(BIN)/python -m pase_mtf.launch --model=transformer --mesh=8 $(ARGS)

PYTEST := $(BIN)/python -m pytest --numprocesses=auto --maxprocesses=4 --dist=worksteal

# Tests start hundreds of processes: without bytecode each of them would compile the whole package anew, for some seconds.
test test-all: export PYTHONDONTWRITEBYTECODE :=

# Half of the time that kernels take to be compiled needs one core: lint has the other.
test: $(ENVIRONMENT)
	@$(MAKE) --no-print-directory -j2 lint $(COMPILED)
	@$(PYTEST) -m "not slow" $(ARGS)

# What `make test` leaves out; pytest comes last, so that its summary is the last line.
test-all: test
	@if command -v bazel >/dev/null; then $(MAKE) --no-print-directory bazel ARGS=; \
	  else echo "Bazel is not installed: its targets are skipped"; fi
	@$(PYTEST) -m slow $(ARGS)

lint: $(ENVIRONMENT)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/python tools/lint.py

benchmark: $(COMPILED)
	@$(BIN)/python -m benchmarks $(ARGS)

# Every test has a sandbox of its own; what one of them compiles is kept for all, where all may write.
bazel: export NUMBA_CACHE_DIR := $(CURDIR)/.venv/bazel-kernels
bazel: $(ENVIRONMENT)
	@mkdir -p $(NUMBA_CACHE_DIR)
	@$(BIN)/python -m pase_mtf.strategy.compile
	@bazel test //... --test_env=NUMBA_CACHE_DIR --sandbox_writable_path=$(NUMBA_CACHE_DIR) $(ARGS)

environment: $(COMPILED)

# A target that no file is: what needs it is always made.
another-python:

$(ENVIRONMENT): setup.py $(if $(ANOTHER),another-python)
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null || { \
	  echo "pase_mtf needs Python 3.10 to 3.13, $(PYTHON) is $$($(PYTHON) --version 2>&1); try make PYTHON=python3.11" >&2; \
	  exit 1; }
	@if [ -n "$(ANOTHER)" ]; then echo "removing .venv, which has Python $(ANOTHER)"; rm -rf .venv; fi
# An environment whose making was interrupted has a Python, and no pip yet.
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	  echo "making .venv with $$($(PYTHON) --version 2>&1)"; $(PYTHON) -m venv --clear .venv; } || { \
	  rm -rf .venv; echo "$(PYTHON) cannot make an environment; install its venv module (Debian: python3-venv)" >&2; exit 1; }
	@if ls .venv/.installed-* 2>/dev/null | grep -qv -- '-$(TENSORFLOW)$$'; then \
	  echo "removing the other build of TensorFlow"; \
	  rm -f .venv/.installed-*; $(BIN)/python -m pip uninstall -qq --yes tensorflow tensorflow-cpu; fi
	@echo "installing pase_mtf with TensorFlow for $(TENSORFLOW) into .venv (a few minutes, once)"
	@$(BIN)/python -m pip install -qq --no-compile -e '.[$(TENSORFLOW),launch,benchmark,test,lint]'
# TensorFlow Probability, for one of Mesh-TF's own tests, imports tf-keras. Its dependency is the package `tensorflow`,
# which would overwrite the files of `tensorflow-cpu`; TensorFlow is there already, so it goes in by itself.
	@$(BIN)/python -m pip install -qq --no-compile --no-deps 'tf-keras>=2.21,<2.22'
# pip would compile ten thousand files one after another; some, of other Pythons, never compile.
	@$(BIN)/python -m compileall -qq -j 0 "$(CURDIR)/.venv/lib" >/dev/null 2>&1 || true
	@touch $@

$(COMPILED): $(ENVIRONMENT) $(KERNELS)
	@echo "compiling the kernels of cost model and search (once)"
	@$(BIN)/python -m pase_mtf.strategy.compile
	@touch $@

clean:
	@rm -rf .venv .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
