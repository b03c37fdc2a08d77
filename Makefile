# make demo, make test: both set up all that they need, in a virtual environment of their own.

PYTHON      ?= python3
VENV        ?= .venv
TORCH       ?=
TORCH_INDEX ?=
JOBS        ?= $(shell nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 2)
HEADS       ?= 64
FILE        ?=
DEMO_ARGS   ?=
PYTEST_ARGS ?=
SAMPLE      := tests/test_states.py tests/test_gate.py tests/test_norm.py tests/test_recurrent.py

TORCH_VERSION := 2.13.0
PY    := $(VENV)/bin/python
PIP   := $(PY) -m pip -qq --disable-pip-version-check
READY := $(VENV)/.kda-ready

.DEFAULT_GOAL := help
.PHONY: help demo test venv clean

help:
	@echo 'make demo    a GLM-5.3-Flash KDA layer over the bytes of a text file (FILE=README.md, HEADS=64)'
	@echo 'make test    the whole test suite (JOBS=$(JOBS) processes; PYTEST_ARGS= for more)'
	@echo 'make venv    only the virtual environment that both use'
	@echo 'make clean   remove .venv, caches and build output'
	@echo
	@echo 'Variables: PYTHON, VENV (reuse another environment), TORCH (a pip requirement), TORCH_INDEX (a pip'
	@echo 'index for torch). See README.md.'

demo: $(READY)
	@$(PY) -m kda demo --heads $(HEADS) $(DEMO_ARGS) $(FILE)

# One thread a process: the processes already fill the cores.
test: $(READY)
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest tests -q -n $(JOBS) $(PYTEST_ARGS)
	@echo 'a sample of the kernels in the interpreter of Triton'
	@TRITON_INTERPRET=1 OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(PY) -m pytest $(SAMPLE) -q -n $(JOBS) -k interpret

venv: $(READY)

# Set up once; again when pyproject.toml changes. Without a GPU the CPU build of torch is asked for first, and
# whatever build pip offers for this machine is taken where there is none.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	    || { echo 'Python 3.10 or newer is needed; name one with PYTHON=...'; exit 1; }
	@echo '[1/4] virtual environment in $(VENV)'
	@$(PYTHON) -m venv $(VENV) \
	    || { echo '$(PYTHON) cannot make a virtual environment; Debian and Ubuntu have it in python3-venv'; exit 1; }
	@echo '[2/4] torch (the longest step: up to some minutes)'
	@index='$(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))'; \
	if [ -n '$(TORCH)' ]; then $(PIP) install $$index '$(TORCH)'; \
	elif [ -e /dev/nvidia0 ] || [ -e /dev/kfd ] || command -v nvidia-smi >/dev/null || command -v rocm-smi >/dev/null; then \
	    $(PIP) install $$index 'torch==$(TORCH_VERSION)'; \
	else \
	    $(PIP) install $$index 'torch==$(TORCH_VERSION)+cpu' 2>/dev/null \
	    || $(PIP) install $$index 'torch==$(TORCH_VERSION)'; \
	fi
	@echo '[3/4] kda and what its demo and tests need'
	@$(PIP) install -e '.[test]' tqdm
	@echo '[4/4] ready:' "$$($(PY) -c 'import torch; print("torch", torch.__version__)')"
	@touch $@

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .hypothesis
	find kda tests bench -name __pycache__ -type d -prune -exec rm -rf {} +
